"""Steps that complete a trace after its tables were read.

Among them are facts about collectives that their kernels do not hold: operation, bytes and communicator. Ranges of
torch and NCCL around the launch calls name the operation. Kineto writes all three into the event of a kernel (PyTorch
2.2 and later). NCCL 2.16 and later passes them to NVTX as payloads, which Nsight Systems exports as ``jsonText`` with
``--include-json=true``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.ingest.names import NameTable
from ddp_prof.manifest import MOST_RANKS
from ddp_prof.range_names import PROCESS, parse_ranges
from ddp_prof.table import (
    UNKNOWN,
    Ints,
    Mask,
    concatenate,
    distinct,
    distinct_rows,
    fill,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Calls, Category, CollectiveMetadata, Kind, Spans, Trace

SHAPE_COLUMNS = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
"""Columns with the launch shape, as Nsight Systems names them."""
REGISTERS = "registersPerThread"

_YEAR_2000_NS = 946_684_800_000_000_000
_LATEST_NS = 4 * 10**18
_LONGEST_NS = 10 * 365 * 86_400 * 10**9
UNNAMED_KERNEL, UNNAMED_RANGE, UNNAMED_CALL = "unnamed kernel", "unnamed range", "unnamed call"
"""Placeholders for kernels, ranges and calls without a name in the file."""


def warn_missing_starts(path: Path, has_start: Mapping[str, Mask]) -> Iterator[str]:
    """Yield warnings about rows without a start; raise TraceError if no row of a table has one."""
    for table, rows in has_start.items():
        missing = len(rows) - int(rows.sum())
        if missing == len(rows) > 0:
            raise TraceError(path, f"none of its {missing:,} {table} has a start", "export or record it again")
        if missing:
            yield f"{missing:,} of {len(rows):,} {table} have no start and are left out"


def warn_missing_ends(without: int) -> Iterator[str]:
    if without:
        yield f"activities that have no end, or one before they start: {without:,}; they count as taking no time"


_LOSS = re.compile(r"\b(?:lost|dropped|discarded|overflow|not all|incomplete|missing|missed|exceeded)\b", re.IGNORECASE)
_OF_THE_PROCESSOR = re.compile(r"\bsampl|context switch|\bperf\b|backtrace|ftrace|\bETW\b", re.IGNORECASE)
_MOST_LOSSES = 3


def report_losses(profiler: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield what the profiler itself said about events that it lost, except samples of the processor's work."""
    told = (" ".join(text.split()) for text in texts if _LOSS.search(text) and not _OF_THE_PROCESSOR.search(text))
    for text in tuple(dict.fromkeys(told))[:_MOST_LOSSES]:
        yield f"{profiler} itself reports: '{text[:200]}'"


def doubt_ranks(trace: Trace) -> Trace:
    """Leave the world size out, with a warning, if a rank is not below it: one of the two is wrong."""
    beyond = sorted(rank for rank in trace.ranks.values() if trace.world_size and rank >= trace.world_size)
    if not beyond:
        return trace
    warning = f"rank {beyond[0]} of a job of {trace.world_size} ranks: one of the two is wrong, so the size is not used"
    return replace(trace, world_size=None, warnings=(*trace.warnings, warning))


def are_utc(starts_ns: Iterable[Ints]) -> bool:
    """Whether times count from 1970, and not from the start of the recording or of the machine."""
    return all(int(start_ns.min(initial=_LATEST_NS)) > _YEAR_2000_NS for start_ns in starts_ns)


def refuse_shared_process_ids(path: Path, global_id: Ints) -> None:
    """Refuse an export in which processes of two machines share a process id: nothing else distinguishes them."""
    if not len(global_id) or int(global_id.min()) >> 48 == int(global_id.max()) >> 48:
        return
    numbers = np.unique(global_id >> 24) & 0xFFFFFF
    if len(np.unique(numbers)) < len(numbers):
        raise TraceError(
            path, "processes of several machines in it share a process id", "give the export of each machine"
        )


def refuse_impossible_times(trace: Trace) -> Trace:
    """Refuse times later than 2096 or earlier than 1843, and events more than ten years apart.

    Only damaged files hold such times. Sums and differences of all others fit into 64 bits.
    """
    tables = (trace.activities, trace.spans, trace.overhead, trace.operators)
    calls = (trace.calls.start_ns, trace.collective_calls.start_ns)
    columns = [*calls, *(table.start_ns for table in tables), *(table.end_ns for table in tables)]
    first = min((int(column.min()) for column in columns if len(column)), default=0)
    last = max((int(column.max()) for column in columns if len(column)), default=0)
    if first < -_LATEST_NS or last > _LATEST_NS or last - first > _LONGEST_NS:
        reason = f"it holds impossible times, from {first} to {last} ns"
        raise TraceError(trace.path, reason, "it is damaged: export or record it again")
    return trace


def report_unresolved_names(trace: Trace) -> Trace:
    """Warn of kernels and ranges without a name; raise TraceError if no kernel has one."""
    unresolved, warnings = trace.unresolved_names, []
    if unresolved.kernels:
        if unresolved.kernels == unresolved.of_kernels:
            reason = f"none of its {unresolved.kernels:,} kernels has a name: its strings are missing or damaged"
            raise TraceError(trace.path, reason, "export or record it again")
        time = unresolved.time_ns / max(1, unresolved.of_time_ns)
        warnings.append(
            f"{unresolved.kernels:,} of {unresolved.of_kernels:,} kernels ({time:.1%} of their time) have no name in "
            "this trace: they count neither as compute nor as communication"
        )
    if UNNAMED_RANGE in trace.names:
        unnamed = int((trace.spans.name_id == trace.names.index(UNNAMED_RANGE)).sum())
        warnings.append(
            f"{unnamed:,} of {len(trace.spans):,} ranges have no name in this trace: they name no step or phase"
        )
    return replace(trace, warnings=(*trace.warnings, *warnings)) if warnings else trace


def close_open_ranges(trace: Trace) -> Trace:
    """Let ranges that were open when recording stopped end with the last event of the capture."""
    spans, is_open = trace.spans, trace.spans.is_open == 1
    if not is_open.any():
        return trace
    columns = (spans.start_ns, spans.end_ns, trace.activities.end_ns, trace.calls.start_ns)
    last = max(int(column.max()) for column in columns if len(column))
    return replace(trace, spans=replace(spans, end_ns=np.where(is_open, last, spans.end_ns)))


def name_ranks(trace: Trace) -> Trace:
    """Take rank by process and world size from the ``process|rank=...|world=...`` ranges, if there are any.

    A process without such a range gets no rank. The world size stays unknown if the ranges disagree.
    """
    ours = parse_ranges(trace.names, PROCESS)
    spans = trace.spans
    ranks: dict[int, int] = {}
    for index, range_ in ours.items():
        if (rank := range_.number("rank")) is not None and 0 <= rank < MOST_RANKS:
            ranks |= dict.fromkeys(distinct(spans.process[spans.name_id == index]), rank)
    worlds = {world for range_ in ours.values() if (world := range_.number("world")) is not None}
    worlds = {world for world in worlds if 0 < world < MOST_RANKS}
    world_size = worlds.pop() if len(worlds) == 1 else None
    return replace(trace, ranks=ranks or trace.ranks, world_size=trace.world_size or world_size)


def add_launch_shapes(trace: Trace, columns: Sequence[Ints]) -> Trace:
    """Name the launch shape of each kernel: ``grid 256x1x1 block 128x1x1``. The kernels are the first activities.

    ``columns`` are the :data:`SHAPE_COLUMNS` and the registers per thread; ``UNKNOWN`` if the profiler did not record
    them.
    """
    *sizes, registers = columns
    names = NameTable(trace.names)
    first, which = distinct_rows(*sizes)
    used = np.stack([size[first] for size in sizes], axis=1)
    index = [
        UNKNOWN if UNKNOWN in row else names.intern("grid {}x{}x{} block {}x{}x{}".format(*row))
        for row in used.tolist()
    ]
    others = np.full(len(trace.activities) - len(which), UNKNOWN, np.int64)
    return replace(
        trace,
        names=tuple(names),
        shape_id=np.concatenate([np.array(index, np.int64)[which], others]),
        registers=np.concatenate([registers, others]),
    )


_COLLECTIVE = re.compile(
    r"^nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|AlltoAll|AllToAll|Gather|Scatter|Send|Recv)v?$"
)
_GROUP = ("ncclGroupStart", "ncclGroupEnd")


def mark_copy_engine_collectives(trace: Trace) -> Trace:
    """Make a copy COMMUNICATION if an NCCL collective launched it: if its call lies in such a range of its thread.

    NCCL 2.28 and later lets the copy engines carry out collectives on symmetric windows. ``ncclGroupEnd`` launches the
    collectives of a group, so its range counts, too.
    """
    copies = np.flatnonzero((trace.activities.kind == Kind.COPY) & (trace.launching_calls != UNKNOWN))
    if not len(copies):
        return trace
    ranges = np.array(list(find_nccl_calls(trace)), np.int64)
    inside = _inside(select(trace.spans, ranges), select(trace.calls, trace.launching_calls[copies]))
    if not inside.any():
        return trace
    category = trace.activities.category.copy()
    category[copies[inside]] = Category.COMMUNICATION
    return replace(trace, activities=replace(trace.activities, category=category))


def name_operations(trace: Trace) -> Trace:
    """Take a collective's operation from the range around its launch, if the profiler recorded none.

    The name of the kernel is only a hint: NCCL runs an all-to-all as a kernel called ``SendRecv``, and some releases
    run every operation as that kernel. Torch's ranges (``nccl:all_to_all``) say more than NCCL's own (``ncclSend``).
    """
    recorded = trace.collective_metadata
    rows = (trace.activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    rows[recorded.activity[recorded.op_id != UNKNOWN]] = False
    activity = np.flatnonzero(rows)
    if not len(activity):
        return trace
    calls = select(trace.calls, trace.launching_calls[activity])
    op_id = np.full(len(activity), UNKNOWN, np.int64)
    torch_ids = [index for index, name in enumerate(trace.names) if name.startswith(("nccl:", "xccl:", "mccl:"))]
    torch_ranges = np.flatnonzero(np.isin(trace.spans.name_id, torch_ids))
    # A group of NCCL's calls has the operation that they share; a mix of sends and receives counts as receives.
    members_of, group_ops = find_nccl_calls(trace), []
    for members in members_of.values():
        names = {int(trace.spans.name_id[row]): trace.names[trace.spans.name_id[row]] for row in members}
        ops = [key for key, name in names.items() if name != "ncclSend" or "ncclRecv" not in names.values()]
        group_ops.append(ops[0] if len(ops) == 1 else UNKNOWN)
    nccl_ranges = np.array(list(members_of), np.int64)
    for ranges, name_id in (
        (torch_ranges, trace.spans.name_id[torch_ranges]),
        (nccl_ranges, np.array(group_ops, np.int64)),
    ):
        open_range = last_opened(select(trace.spans, ranges), calls)
        op_id = np.where(op_id == UNKNOWN, take_or_unknown(name_id, open_range), op_id)
    row = positions(recorded.activity, len(trace.activities))[activity]
    is_known, is_new = op_id != UNKNOWN, row == UNKNOWN
    completed = recorded.op_id.copy()
    completed[row[is_known & ~is_new]] = op_id[is_known & ~is_new]
    added = is_known & is_new
    found = fill(CollectiveMetadata, int(added.sum()), activity=activity[added], op_id=op_id[added])
    return replace(trace, collective_metadata=concatenate(replace(recorded, op_id=completed), found))


def find_nccl_calls(trace: Trace) -> dict[int, list[int]]:
    """Return the NCCL calls that may launch collectives, and the calls of these collectives, as rows of the spans.

    Each call launches its own collective. In a group, the end of the outermost group launches all::

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
    """Return for each call the range that its thread opened last, ``UNKNOWN`` if that range has ended by then."""
    found = np.full(len(calls), UNKNOWN, np.int64)
    for of_ranges, of_calls in _by_thread(ranges, calls):
        ordered = of_ranges[np.argsort(ranges.start_ns[of_ranges], kind="stable")]
        at = np.searchsorted(ranges.start_ns[ordered], calls.start_ns[of_calls], side="right") - 1
        holds = (at >= 0) & (ranges.end_ns[ordered[at]] > calls.start_ns[of_calls])
        found[of_calls[holds]] = ordered[at[holds]]
    return found


def _inside(ranges: Spans, calls: Calls) -> Mask:
    inside = np.zeros(len(calls), np.bool_)
    for of_ranges, of_calls in _by_thread(ranges, calls):
        at = calls.start_ns[of_calls]
        begun = np.searchsorted(np.sort(ranges.start_ns[of_ranges]), at, side="right")
        ended = np.searchsorted(np.sort(ranges.end_ns[of_ranges]), at, side="right")
        inside[of_calls] = begun > ended
    return inside


def _by_thread(ranges: Spans, calls: Calls) -> Iterator[tuple[Ints, Ints]]:
    """Yield the rows of the ranges and of the calls of each thread that has ranges."""
    first, which = distinct_rows(ranges.process, ranges.lane)
    for thread, row in enumerate(first.tolist()):
        is_own_call = (calls.process == ranges.process[row]) & (calls.lane == ranges.lane[row])
        yield np.flatnonzero(which == thread), np.flatnonzero(is_own_call)


ELEMENT_BYTES = {
    "double": 8, "long": 8, "complexfloat": 8, "complexdouble": 16, "float": 4, "int": 4, "half": 2, "short": 2,
    "char": 1, "byte": 1, "bool": 1,
}  # fmt: skip
"""Size of an element by the C++ name of its type in torch, in lower case."""
_BITS = re.compile(r"\d{1,3}$")
"""Ends the other names, as in ``BFloat16``, ``UInt64`` and ``float32``. All Float8 types have one byte."""

_WHOLE_MESSAGE = re.compile(r"nccl(?:AllReduce|Broadcast|Bcast|Reduce)$")
"""NCCL's calls whose recorded size is the whole message; for all others it is the share of one rank."""


def message_bytes(elements: Iterable[object], element_type: object) -> int:
    """Return the bytes of the larger buffer, ``UNKNOWN`` if the number of elements or their type is unknown."""
    kind = str(element_type).lower()
    bits = _BITS.search(kind)
    size = 1 if kind.startswith("float8") else int(bits[0]) // 8 if bits else ELEMENT_BYTES.get(kind)
    counts = [element for element in elements if isinstance(element, int)]
    return max(counts) * size if counts and size else UNKNOWN


def add_nccl_metadata(trace: Trace, payloads: Mapping[tuple[int, int, int, str], str]) -> Trace:
    """Give each collective the payload of the NCCL call that is open when it is launched.

    A collective launched outside of such a call, for example by a CUDA graph, stays unknown. If one kernel carries out
    a whole group, its size is the sum over the group. If several kernels do, their sizes are known only if there is one
    kernel for each call and all calls are alike.

    ``payloads`` are the JSON texts of NCCL's ranges, by process, thread, start and name.
    """
    spans, nccl_calls = trace.spans, find_nccl_calls(trace)
    is_launched = (trace.activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    activities = np.flatnonzero(is_launched)
    rows, launches = np.array(list(nccl_calls), np.int64), select(trace.calls, trace.launching_calls[activities])
    call = take_or_unknown(rows, last_opened(select(spans, rows), launches))
    kernels = Counter(call.tolist())
    found = []
    for activity, row in zip(activities.tolist(), call.tolist(), strict=True):
        keys = [
            (int(spans.process[member]), int(spans.lane[member]), int(spans.start_ns[member]), name)
            for member in nccl_calls.get(row, ())
            if (name := trace.names[spans.name_id[member]])
        ]
        if any(key in payloads for key in keys):
            members = [_size_and_group(key[-1], payloads.get(key, "")) for key in keys]
            found.append((activity, *_merge_members(members, kernels[row])))
    names = NameTable(trace.names)
    metadata = fill(
        CollectiveMetadata,
        len(found),
        activity=np.array([activity for activity, _, _ in found], np.int64),
        bytes=np.array([size if size < 2**62 else UNKNOWN for _, size, _ in found], np.int64),
        group_id=np.array([UNKNOWN if group is None else names.intern(group) for *_, group in found], np.int64),
    )
    return replace(trace, collective_metadata=metadata, names=tuple(names))


def _merge_members(members: Sequence[tuple[int, str | None]], kernels: int) -> tuple[int, str | None]:
    """Return the bytes and the communicator of one of the ``kernels`` of a group, by those of the group's calls."""
    sizes, groups = [size for size, _ in members], {group for _, group in members}
    size = UNKNOWN
    if kernels == 1 and UNKNOWN not in sizes:
        size = sum(sizes)
    elif kernels == len(members) and len(set(members)) == 1:
        size = sizes[0]
    return size, groups.pop() if len(groups) == 1 else None


def _size_and_group(name: str, payload: str) -> tuple[int, str | None]:
    """Return the bytes of a call's message and the name of its communicator."""
    try:
        fields = dict(_fields(json.loads(payload)))
    except (ValueError, RecursionError):
        fields = {}
    size, group = fields.get("message size [bytes]"), fields.get("nccl communicator id")
    is_whole = isinstance(size, int) and size >= 0 and _WHOLE_MESSAGE.match(name)
    return (size if is_whole and isinstance(size, int) else UNKNOWN), (None if group is None else str(group))


def _fields(document: Any) -> Iterable[tuple[str, Any]]:
    """Yield all fields of a JSON document, at any depth: the nesting of payloads is not documented."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key.lower(), value
            yield from _fields(value)
    elif isinstance(document, list):
        for entry in document:
            yield from _fields(entry)
