"""What is told of collectives beside their kernels: ranges of libraries round the launch calls, and metadata.

The metadata (operation, bytes, communicator) Kineto writes on a kernel's event (PyTorch 2.2 and later). NCCL (2.16 and
later) hands it to NVTX; Nsight Systems exports it as ``jsonText`` where it is asked to (``--include-json=true``).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.ingest.names import NameTable
from ddp_prof.table import UNKNOWN, Ints, Mask, concatenate, distinct_rows, fill, positions, select, take_or_unknown
from ddp_prof.trace import Calls, Category, CollectiveMetadata, Kind, Spans, Trace

_COLLECTIVE = re.compile(
    r"^nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|AlltoAll|AllToAll|Gather|Scatter|Send|Recv)v?$"
)
_GROUP = ("ncclGroupStart", "ncclGroupEnd")


def mark_copy_engine_collectives(trace: Trace) -> Trace:
    """Make copies COMMUNICATION whose launch call lies in the range of an NCCL collective, on the same thread.

    NCCL 2.28 and later lets the copy engines carry out collectives on symmetric windows. A collective within a group
    is launched by the ``ncclGroupEnd`` that follows it, so that range counts, too.
    """
    copies = np.flatnonzero((trace.activities.kind == Kind.COPY) & (trace.launching_calls != UNKNOWN))
    ranges = np.array(list(find_nccl_calls(trace)) if len(copies) else [], np.int64)
    inside = _inside(select(trace.spans, ranges), select(trace.calls, trace.launching_calls[copies]))
    if not inside.any():
        return trace
    category = trace.activities.category.copy()
    category[copies[inside]] = Category.COMMUNICATION
    return replace(trace, activities=replace(trace.activities, category=category))


def name_operations(trace: Trace) -> Trace:
    """Take a collective's operation from the range around its launch, if the profiler recorded none.

    A kernel's name is a hint only: NCCL carries out an all-to-all by a kernel called ``SendRecv``, and some releases
    carry out every operation by that one. Torch's ranges (``nccl:all_to_all``) say more than NCCL's own (``ncclSend``).
    """
    noted = trace.collective_metadata
    rows = (trace.activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    rows[noted.activity[noted.op_id != UNKNOWN]] = False
    asked = np.flatnonzero(rows)
    calls = select(trace.calls, trace.launching_calls[asked])
    op_id = np.full(len(asked), UNKNOWN, np.int64)
    # Torch's ranges round collectives.
    ids = [index for index, name in enumerate(trace.names) if name.startswith(("nccl:", "xccl:"))]
    torchs = np.flatnonzero(np.isin(trace.spans.name_id, ids)) if ids else np.empty(0, np.int64)
    # NCCL's launching calls: of a group the operation that all its calls share; send and receive may mix.
    calls_of, of_groups = find_nccl_calls(trace), []
    for members in calls_of.values():
        used = {int(trace.spans.name_id[row]): trace.names[trace.spans.name_id[row]] for row in members}
        told = [key for key, name in used.items() if name != "ncclSend" or "ncclRecv" not in used.values()]
        of_groups.append(told[0] if len(told) == 1 else UNKNOWN)
    nccls = np.array(list(calls_of), np.int64), np.array(of_groups, np.int64)
    for ranges, name_id in ((torchs, trace.spans.name_id[torchs]), nccls):
        open_range = last_opened(select(trace.spans, ranges), calls)
        op_id = np.where(op_id == UNKNOWN, take_or_unknown(name_id, open_range), op_id)
    told = op_id != UNKNOWN
    row = positions(noted.activity, len(trace.activities))
    is_new, noted_ops = told & (row[asked] == UNKNOWN), noted.op_id.copy()
    noted_ops[row[asked[told & ~is_new]]] = op_id[told & ~is_new]
    found = fill(CollectiveMetadata, int(is_new.sum()), activity=asked[is_new], op_id=op_id[is_new])
    return replace(trace, collective_metadata=concatenate(replace(noted, op_id=noted_ops), found))


def find_nccl_calls(trace: Trace) -> dict[int, list[int]]:
    """NCCL's calls that may launch collectives, and which these are, both as rows of the trace's spans.

    A collective is launched by its own call; in a group, by the end of the outermost one::

        ncclGroupStart  ncclAllReduce  ncclAllReduce  ncclGroupEnd
                             A              B            A and B
    """
    calls: dict[int, list[int]] = {}
    is_collective = np.array([bool(_COLLECTIVE.match(name)) for name in (*trace.names, "")])
    if not is_collective.any():
        return calls
    is_start, is_end = (np.array([name == border for name in (*trace.names, "")]) for border in _GROUP)
    spans = trace.spans
    rows = np.flatnonzero((is_collective | is_start | is_end)[spans.name_id])
    rows = rows[np.lexsort((spans.start_ns[rows], spans.lane[rows], spans.process[rows]))]
    name_id = spans.name_id[rows]
    depth, members, thread = 0, list[int](), (UNKNOWN, UNKNOWN)
    columns = (rows, spans.process[rows], spans.lane[rows], is_start[name_id], is_end[name_id])
    for row, process, lane, starts, ends in zip(*(column.tolist() for column in columns), strict=True):
        if thread != (process, lane):
            depth, members, thread = 0, [], (process, lane)
        if starts:
            members = members if depth else []
            depth += 1
        elif ends:
            depth = max(0, depth - 1)
            if members and not depth:
                calls[row], members = members, []
        else:
            calls[row] = [row]
            members.append(row)
    return calls


def last_opened(ranges: Spans, calls: Calls) -> Ints:
    """Row of the range that the call's own thread had opened last, ``UNKNOWN`` where it is closed again."""
    found = np.full(len(calls), UNKNOWN, np.int64)
    for mine, asked in _by_thread(ranges, calls):
        mine = mine[np.argsort(ranges.start_ns[mine], kind="stable")]
        at = np.searchsorted(ranges.start_ns[mine], calls.start_ns[asked], side="right") - 1
        holds = (at >= 0) & (ranges.end_ns[mine[at]] > calls.start_ns[asked])
        found[asked[holds]] = mine[at[holds]]
    return found


def _inside(ranges: Spans, calls: Calls) -> Mask:
    inside = np.zeros(len(calls), np.bool_)
    for mine, asked in _by_thread(ranges, calls):
        at = calls.start_ns[asked]
        begun = np.searchsorted(np.sort(ranges.start_ns[mine]), at, side="right")
        ended = np.searchsorted(np.sort(ranges.end_ns[mine]), at, side="right")
        inside[asked] = begun > ended
    return inside


def _by_thread(ranges: Spans, calls: Calls) -> Iterator[tuple[Ints, Ints]]:
    """Rows of the ranges and of the calls of each thread that has ranges."""
    first, which = distinct_rows(ranges.process, ranges.lane)
    for thread, row in enumerate(first.tolist()):
        asked = (calls.process == ranges.process[row]) & (calls.lane == ranges.lane[row])
        yield np.flatnonzero(which == thread), np.flatnonzero(asked)


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


def collective_metadata(rows: Sequence[CollectiveRow], names: NameTable) -> CollectiveMetadata:
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


def add_nccl_metadata(trace: Trace, payloads: Mapping[tuple[int, int, int, str], str]) -> Trace:
    """Give each collective the payload of the NCCL call that is open when it is launched.

    Collectives launched outside of such a call, for example by a CUDA graph, stay unknown. If one kernel carries out a
    whole group, its bytes are the group's sum. If several kernels do, their sizes stay unknown.

    ``payloads`` are JSON texts of NCCL's ranges, by process, thread, start and name.
    """
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
