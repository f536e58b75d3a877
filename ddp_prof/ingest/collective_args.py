"""The metadata of collectives (operation, bytes, communicator), as far as profilers note it.

Kineto writes it on a kernel's event (PyTorch 2.2 and later). NCCL (2.16 and later) hands it to NVTX; Nsight Systems
exports it as ``jsonText`` where it is asked to (``--include-json=true``).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddp_prof.ingest.string_table import NameTable
from ddp_prof.trace import UNKNOWN, Category, CollectiveMetadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_prof.trace import Trace

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
    """The rows as columns.

    Args:
        rows: One a collective.
        names: Takes in the names of operations and communicators.
    """

    def interned(text: str | None) -> int:
        return UNKNOWN if text is None else names.intern(text)

    columns = (
        [row.activity for row in rows],
        [interned(row.op) for row in rows],
        [_in_range(row.bytes) for row in rows],
        [interned(row.group) for row in rows],
        [_in_range(row.group_size) for row in rows],
        [_in_range(row.sequence) for row in rows],
    )
    return CollectiveMetadata(*(np.array(column, np.int64) for column in columns))


def _in_range(number: int) -> int:
    """A number that a column can hold; others are no sizes and no counts."""
    return number if 0 <= number < 2**62 else UNKNOWN


def message_bytes(elements: Iterable[object], element_type: object) -> int:
    """Bytes of the larger buffer; ``UNKNOWN`` where number or type are."""
    kind = str(element_type).lower()
    size = 1 if kind.startswith("float8") else ELEMENT_BYTES.get(kind)
    counts = [element for element in elements if isinstance(element, int)]
    return max(counts) * size if counts and size else UNKNOWN


def add_nccl_metadata(trace: Trace, ranges: Sequence[NcclRange]) -> Trace:
    """Give each collective the payload of the last NCCL range that its own thread had opened before the launch.

    The launch itself may lie in the ``ncclGroupEnd`` that follows; of several collectives that one kernel carries out
    the last one counts.
    """
    activities, calls = trace.activities, trace.calls
    launched = (activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    asked = np.flatnonzero(launched)
    call = trace.launching_calls[asked]
    by_thread: dict[tuple[int, int], list[NcclRange]] = {}
    for range_ in sorted(ranges):
        by_thread.setdefault((range_.process, range_.lane), []).append(range_)
    rows = []
    for (process, lane), mine in by_thread.items():
        own = np.flatnonzero((calls.process[call] == process) & (calls.lane[call] == lane))
        before = np.searchsorted([range_.start_ns for range_ in mine], calls.start_ns[call[own]], side="right") - 1
        rows += [
            _from_payload(activity, mine[index])
            for activity, index in zip(asked[own].tolist(), before.tolist(), strict=True)
            if index >= 0
        ]
    names = NameTable(trace.names)
    return replace(trace, collective_metadata=collective_metadata(rows, names), names=names.as_tuple())


def _from_payload(activity: int, nccl_range: NcclRange) -> CollectiveRow:
    try:
        fields = dict(_fields(json.loads(nccl_range.payload)))
    except (ValueError, RecursionError):
        fields = {}
    size = fields.get("message size [bytes]")
    group = fields.get("nccl communicator id")
    is_whole = isinstance(size, int) and _WHOLE_MESSAGE.match(nccl_range.name)
    return CollectiveRow(
        activity,
        op=nccl_range.name,
        bytes=size if is_whole and isinstance(size, int) else UNKNOWN,
        group=None if group is None else str(group),
        group_size=UNKNOWN,
        sequence=UNKNOWN,
    )


def _fields(document: Any) -> Iterable[tuple[str, Any]]:
    """All fields of a JSON document by name in lower case, however deep: the payload's nesting is not documented."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key.lower(), value
            yield from _fields(value)
    elif isinstance(document, list):
        for entry in document:
            yield from _fields(entry)
