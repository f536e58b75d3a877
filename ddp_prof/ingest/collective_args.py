"""The metadata of collectives (operation, bytes, communicator), as far as profilers note it.

Kineto writes it on a kernel's event (PyTorch 2.2 and later). NCCL (2.16 and later) hands it to NVTX; Nsight Systems
exports it as ``jsonText`` where it is asked to (``--include-json=true``).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.ingest.communication_ranges import find_nccl_calls, last_opened
from ddp_prof.ingest.string_table import NameTable
from ddp_prof.trace import UNKNOWN, Category, CollectiveMetadata, Trace, select, take_or_unknown

ELEMENT_BYTES = {
    "double": 8, "long": 8, "complexfloat": 8, "complexdouble": 16, "float": 4, "int": 4, "half": 2, "bfloat16": 2,
    "short": 2, "uint64": 8, "uint32": 4, "uint16": 2, "char": 1, "byte": 1, "bool": 1,
}  # fmt: skip
"""Size of an element by torch's name of its type, in lower case; each kind of Float8 has one byte."""

_WHOLE_MESSAGE = re.compile(r"nccl(?:AllReduce|Broadcast|Bcast|Reduce)$")
"""NCCL's calls whose size is the whole message; of the others it notes one rank's share."""


class CollectiveRow(NamedTuple):
    """One row of :class:`~ddp_prof.trace.CollectiveMetadata`, names still as text."""

    activity: int
    op: str | None
    bytes: int
    group: str | None
    group_size: int
    sequence: int


class NcclRange(NamedTuple):
    """A range of NCCL's with its payload, a JSON text."""

    start_ns: int
    process: int
    lane: int
    name: str
    payload: str


def collective_metadata(rows: Sequence[CollectiveRow], names: NameTable) -> CollectiveMetadata:
    """The rows as columns."""

    def interned(text: str | None) -> int:
        return UNKNOWN if text is None else names.intern(text)

    columns = (
        [row.activity for row in rows],
        [interned(row.op) for row in rows],
        [_int64_or_unknown(row.bytes) for row in rows],
        [interned(row.group) for row in rows],
        [_int64_or_unknown(row.group_size) for row in rows],
        [_int64_or_unknown(row.sequence) for row in rows],
    )
    return CollectiveMetadata(*(np.array(column, np.int64) for column in columns))


def _int64_or_unknown(number: int) -> int:
    """``UNKNOWN`` for a number that is no size or count, or does not fit into the column."""
    return number if 0 <= number < 2**62 else UNKNOWN


def message_bytes(elements: Iterable[object], element_type: object) -> int:
    """Bytes of the larger buffer; ``UNKNOWN`` if the number of elements or their type is unknown."""
    kind = str(element_type).lower()
    size = 1 if kind.startswith("float8") else ELEMENT_BYTES.get(kind)
    counts = [element for element in elements if isinstance(element, int)]
    return max(counts) * size if counts and size else UNKNOWN


def add_nccl_metadata(trace: Trace, ranges: Sequence[NcclRange]) -> Trace:
    """Give each collective the payload of the NCCL call that is open when it is launched.

    Collectives launched outside of such a call, for example by a CUDA graph, stay unknown. If one kernel carries out a
    whole group, its bytes are the group's sum. If several kernels do, their sizes stay unknown.
    """
    payloads = {(item.process, item.lane, item.start_ns, item.name): item.payload for item in ranges}
    spans, nccl_calls = trace.spans, find_nccl_calls(trace)
    launched = (trace.activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    asked = np.flatnonzero(launched)
    rows = np.array(list(nccl_calls), np.int64)
    call = take_or_unknown(rows, last_opened(select(spans, rows), select(trace.calls, trace.launching_calls[asked])))
    kernels = Counter(call.tolist())
    found = []
    for activity, row in zip(asked.tolist(), call.tolist(), strict=True):
        keys = [
            (int(spans.process[member]), int(spans.lane[member]), int(spans.start_ns[member]), name)
            for member in nccl_calls.get(row, ())
            if (name := trace.names[spans.name_id[member]])
        ]
        if any(key in payloads for key in keys):
            told = [_size_and_group(key[-1], payloads.get(key, "")) for key in keys]
            found.append(_row(activity, told, kernels[row]))
    names = NameTable(trace.names)
    return replace(trace, collective_metadata=collective_metadata(found, names), names=names.as_tuple())


def _row(activity: int, members: Sequence[tuple[int, str | None]], kernels: int) -> CollectiveRow:
    """Metadata of one kernel of a group of ``members``: (bytes, communicator) of each collective."""
    sizes, groups = [size for size, _ in members], {group for _, group in members}
    size = UNKNOWN
    if kernels == 1 and UNKNOWN not in sizes:
        size = sum(sizes)
    elif kernels == len(members) and len(set(members)) == 1:
        size = sizes[0]
    group = groups.pop() if len(groups) == 1 else None
    return CollectiveRow(activity, op=None, bytes=size, group=group, group_size=UNKNOWN, sequence=UNKNOWN)


def _size_and_group(name: str, payload: str) -> tuple[int, str | None]:
    """Bytes of a call's message and the name of its communicator."""
    try:
        fields = dict(_fields(json.loads(payload)))
    except (ValueError, RecursionError):
        fields = {}
    size, group = fields.get("message size [bytes]"), fields.get("nccl communicator id")
    is_whole = isinstance(size, int) and size >= 0 and _WHOLE_MESSAGE.match(name)
    return (size if is_whole and isinstance(size, int) else UNKNOWN), (None if group is None else str(group))


def _fields(document: Any) -> Iterable[tuple[str, Any]]:
    """All fields of a JSON document by name in lower case, however deep: the payload's nesting is not documented."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key.lower(), value
            yield from _fields(value)
    elif isinstance(document, list):
        for entry in document:
            yield from _fields(entry)
