"""Completes a trace after its tables were read: names, ranks, ends of open ranges; and warns of what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import numpy as np

from ddp_prof.columns import by_number, count_noun, percent
from ddp_prof.errors import TraceError
from ddp_prof.growing_column import in_file, in_order, in_parts
from ddp_prof.ingest.names import NameTable
from ddp_prof.ingest.stream_order import find_disordered
from ddp_prof.manifest import MOST_RANKS
from ddp_prof.notes import Doubt
from ddp_prof.range_names import PROCESS, parse_ranges
from ddp_prof.table import (
    UNKNOWN,
    Ints,
    Mask,
    begins_run,
    constant_column,
    distinct,
    distinct_rows,
    is_among,
    is_in,
    parts_of,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Calls, Category, Kind, Synchronizations, SyncKind, Trace

SHAPE_COLUMNS = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
"""Columns with the launch shape of a kernel (blocks of the grid, threads of a block), as Nsight Systems names them."""
REGISTERS = "registersPerThread"
MOST = 2**62
"""Numbers from here on are taken for damaged."""
MOST_LETTERS_OF_GPU = 100
"""Longest name of a GPU; longer names are cut."""

_YEAR_2000_NS = 946_684_800_000_000_000
"""Nanoseconds from 1970 to 2000: earlier times do not count from 1970."""
_LATEST_NS = 4 * 10**18
"""Nanoseconds from 1970 to 2096, the largest time that is accepted."""
_LONGEST_NS = 10 * 365 * 86_400 * 10**9
"""Ten years, the longest time between two events that is accepted."""
MOST_AT_ZERO = 3
"""Largest number of events of a kind that may begin at 0, as where a program subtracted a start from all times.

If more do, their starts are lost, even if their ends or durations are not.
"""
UNNAMED_KERNEL, UNNAMED_RANGE, UNNAMED_CALL = "unnamed kernel", "unnamed range", "unnamed call"
"""Placeholders for kernels, ranges and calls without a name in the file."""


def warn_missing_starts(path: Path, has_start: Mapping[str, Mask]) -> Iterator[str]:
    """Yield a warning for each table that has rows without a start time.

    Args:
        path: The trace, for the error.
        has_start: Which rows have a start, by the name of the table as users read it.

    Raises:
        TraceError: No row of a table has a start.
    """
    for table, rows in has_start.items():
        missing = len(rows) - int(rows.sum())
        if missing == len(rows) > 0:
            raise TraceError(path, f"none of its {missing:,} {table} has a start", "export or record it again")
        if missing:
            are = by_number(missing, "has no start and is", "have no start and are")
            yield Doubt(f"{missing:,} of {len(rows):,} {table} {are} left out")


def warn_missing_ends(without: int) -> Iterator[str]:
    """Yield a warning if there are activities without a valid end; ``without`` is their number."""
    if without:
        yield Doubt(f"activities that have no end, or one before they start: {without:,}; they count as taking no time")


def warn_repeated(repeated: int, collectives: int) -> Iterator[str]:
    """Yield a warning if events are in the file twice, of which the second ones are left out.

    ``repeated`` is the number of all of them, ``collectives`` that of the collectives among them.
    """
    if repeated:
        of_these = f", with {count_noun(collectives, 'duplicate collective')}"
        counted = f"{repeated:,}{of_these if collectives else ''}"
        yield Doubt(f"duplicate events left out: {counted}; the file holds them twice")


# Messages of a profiler about lost events; messages about samples of the CPU, which do not matter; most that are shown.
_LOSS = re.compile(r"\b(?:lost|dropped|discarded|overflow|not all|incomplete|missing|missed|exceeded)\b", re.IGNORECASE)
_OF_THE_PROCESSOR = re.compile(r"\bsampl|context switch|\bperf\b|backtrace|ftrace|\bETW\b", re.IGNORECASE)
_MOST_LOSSES = 3


def report_losses(profiler: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield warnings with the profiler's own messages about events that it lost, three at most.

    Messages about lost samples of the CPU are left out.

    Args:
        profiler: Name of the profiler.
        texts: All messages that it wrote into the trace.
    """
    told = (" ".join(text.split()) for text in texts if _LOSS.search(text) and not _OF_THE_PROCESSOR.search(text))
    for text in tuple(dict.fromkeys(told))[:_MOST_LOSSES]:
        yield Doubt(f"{profiler} itself reports: '{text[:200]}'")


def doubt_ranks(trace: Trace) -> Trace:
    """Return the trace; without its world size, and with a warning, if a rank or a group of ranks is beyond that.

    A job may consist of several that each count their own ranks, and reduce gradients with each other as well.
    """
    beyond = sorted(rank for rank in trace.ranks.values() if trace.world_size and rank >= trace.world_size)
    sizes = trace.collective_metadata.group_size
    largest = int(sizes[sizes < MOST_RANKS].max(initial=0))
    if beyond:
        wrong = "one of the two is wrong"
        warning = f"rank {beyond[0]} of a job of {trace.world_size} ranks: {wrong}, so the size is not used"
    elif trace.world_size and largest > trace.world_size:
        job = f"its job is said to have {count_noun(trace.world_size, 'rank')}"
        warning = f"collectives of {largest} ranks, but {job}: that number is not used"
    else:
        return trace
    return replace(trace, world_size=None, warnings=(*trace.warnings, Doubt(warning)))


def are_utc(starts_ns: Iterable[Ints]) -> bool:
    """Return whether all times count from 1970, and not from the start of the recording or of the machine."""
    return all(int(start_ns.min(initial=_LATEST_NS)) > _YEAR_2000_NS for start_ns in starts_ns)


def refuse_shared_process_ids(path: Path, global_id: Ints) -> None:
    """Raise TraceError if processes of two machines in an export share a process id: nothing else tells them apart.

    Args:
        path: The export.
        global_id: Nsight Systems' global ids: the machine from bit 48 on, the process id in bits 24 to 47.
    """
    if not len(global_id) or int(global_id.min()) >> 48 == int(global_id.max()) >> 48:  # of one machine
        return
    numbers = np.unique(global_id >> 24) & 0xFFFFFF
    if len(np.unique(numbers)) < len(numbers):
        raise TraceError(
            path, "processes of several machines in it share a process id", "give the export of each machine"
        )


def refuse_impossible_times(trace: Trace) -> Trace:
    """Return the trace; raise TraceError if times are after 2096 or before 1843, or more than ten years apart.

    Only damaged files hold such times. Sums and differences of all other times fit into 64 bits.
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
    """Return the trace with warnings about kernels and ranges without a name; raise TraceError if no kernel has one."""
    unresolved, warnings = trace.unresolved_names, []
    # It is not known whether kernels without a name compute or communicate.
    if unresolved.kernels:
        if unresolved.kernels == unresolved.of_kernels:
            none = by_number(
                unresolved.kernels, "its kernel has no", f"none of its {unresolved.kernels:,} kernels has a"
            )
            reason = f"{none} name: its strings are missing or damaged"
            raise TraceError(trace.path, reason, "export or record it again")
        time = percent(unresolved.time_ns / max(1, unresolved.of_time_ns))
        warnings.append(
            f"{unresolved.kernels:,} of {unresolved.of_kernels:,} kernels ({time} of their time) "
            + by_number(
                unresolved.kernels, "has no name in this trace: it counts", "have no name in this trace: they count"
            )
            + " neither as compute nor as communication"
        )
    if UNNAMED_RANGE in trace.names:
        unnamed = int((trace.spans.name_id == trace.names.index(UNNAMED_RANGE)).sum())
        warnings.append(
            f"{unnamed:,} of {len(trace.spans):,} ranges "
            + by_number(unnamed, "has no name in this trace: it names", "have no name in this trace: they name")
            + " no step or phase"
        )
    return replace(trace, warnings=(*trace.warnings, *map(Doubt, warnings))) if warnings else trace


def close_open_ranges(trace: Trace) -> Trace:
    """Return the trace in which ranges that were open when recording stopped end with the last event of the capture."""
    spans, is_open = trace.spans, trace.spans.is_open == 1
    if not is_open.any():
        return trace
    columns = (spans.start_ns, spans.end_ns, trace.activities.end_ns, trace.calls.start_ns)
    last = max(int(column.max()) for column in columns if len(column))
    return replace(trace, spans=replace(spans, end_ns=np.where(is_open, last, spans.end_ns)))


_LAUNCH = re.compile(
    r"(?:cu|cuda|hip|musa)(?:\w*Launch\w*Kernel|GraphLaunch|Launch(?:Grid)?(?:_|$))"
    # Intel (SYCL's adapters, Level Zero), Ascend, MetaX, Enflame.
    r"|(?:ur|pi)Enqueue\w*KernelLaunch|zeCommandListAppendLaunch\w*Kernel|(?:aclrt|mc|tops)\w*LaunchKernel"
)
_CAPTURE = re.compile(r"(?:cu|cuda|hip|musa)Stream(Begin|End)Capture")
_PEER_COPY = re.compile(r"(?:cu|cuda|hip|musa)Memcpy(?:3D)?Peer")


class CallKind(IntEnum):
    """What a call does, as far as its activities are concerned."""

    OTHER = 0
    LAUNCH = 1
    BEGIN_CAPTURE = 2
    END_CAPTURE = 3
    PEER_COPY = 4


def kind_of_call(name: str) -> CallKind:
    """Return what a call of CUDA, or of another device's runtime, with this name does."""
    if found := _CAPTURE.match(name):
        return CallKind.BEGIN_CAPTURE if found[1] == "Begin" else CallKind.END_CAPTURE
    if _PEER_COPY.match(name):
        return CallKind.PEER_COPY
    return CallKind.LAUNCH if _LAUNCH.match(name) else CallKind.OTHER


def find_launches(calls: Calls, kind: Ints) -> Mask:
    """Return a mask of the calls that launched work; ``kind`` holds the :class:`CallKind` of each call.

    Launches while a stream of the process is captured into a CUDA graph are left out: their work does not run then.
    """
    is_launch: Mask = (kind == CallKind.LAUNCH) & ~_are_captured(calls, kind, calls)
    return is_launch


def leave_out_captured_copies(trace: Trace, kind: Ints, events: Ints | None) -> tuple[Trace, Ints | None]:
    """Return the trace without calls for copies that a CUDA graph captured: these copies do not run then.

    Args:
        trace: The trace.
        kind: The :class:`CallKind` of each call.
        events: A value for each of its synchronizations, or ``None``; is returned for those that are left.
    """
    calls, activities = trace.synchronizations, trace.activities
    is_captured = is_in(calls.kind, (SyncKind.COPY, SyncKind.SET)) & _are_captured(trace.calls, kind, calls)
    for process in distinct(calls.process[is_captured]):  # other threads may copy meanwhile
        mine = np.flatnonzero(is_captured & (calls.process == process))
        numbers = activities.correlation[activities.process == process]
        is_captured[mine] = ~is_among(calls.correlation[mine], numbers)
    if not is_captured.any():
        return trace, events
    kept = np.flatnonzero(~is_captured)
    calls = replace(calls, awaits=take_or_unknown(positions(kept, len(calls)), calls.awaits))
    return replace(trace, synchronizations=select(calls, kept)), None if events is None else events[kept]


def _are_captured(calls: Calls, kind: Ints, asked: Calls | Synchronizations) -> Mask:
    """Return which of the calls ``asked`` begin while a stream of their process is captured into a CUDA graph.

    ``calls`` are all calls, ``kind`` is the :class:`CallKind` of each.
    """
    is_captured = np.zeros(len(asked), np.bool_)
    for process in distinct(calls.process[kind == CallKind.BEGIN_CAPTURE]):
        # A call is captured if more captures have begun until then than have ended before.
        begun, ended = (
            np.sort(calls.start_ns[(calls.process == process) & (kind == border)])
            for border in (CallKind.BEGIN_CAPTURE, CallKind.END_CAPTURE)
        )
        at = asked.start_ns
        is_open = np.searchsorted(begun, at, side="right") > np.searchsorted(ended, at, side="left")
        is_captured |= (asked.process == process) & is_open
    return is_captured


def mark_peer_copies(trace: Trace, kind: Ints, within_one: Mask | None = None) -> Trace:
    """Return the trace in which copies that a call such as ``cudaMemcpyPeerAsync`` launched count as communication.

    Profilers record some of them as any other copy from memory of a device to memory of a device.

    Args:
        trace: The trace.
        kind: The :class:`CallKind` of each call.
        within_one: Which activities are known to copy within one device, even so.
    """
    activities = trace.activities
    rows = np.flatnonzero((activities.kind == Kind.COPY) & (trace.launching_calls != UNKNOWN))
    rows = rows[kind[trace.launching_calls[rows]] == CallKind.PEER_COPY]
    if within_one is not None:
        rows = rows[~within_one[rows]]
    if not len(rows):
        return trace
    category = activities.category.copy()
    category[rows] = Category.COMMUNICATION
    return replace(trace, activities=replace(activities, category=category))


def share_out_launches(trace: Trace, is_of_graph: Mask) -> Trace:
    """Return the trace in which kernels with the number of another kernel's launch have launches of their own.

    Some releases of ROCm give several kernels the number of one launch, and none the numbers of the next launches. If a
    process has as many such kernels as launches without work, these belong together, in order of time, unless a kernel
    would then begin before its launch::

        launches      1   2   3       none has the numbers 2 and 3
        numbers        1   1   1      the second and the third kernel belong to launches 2 and 3

    Args:
        trace: The trace, which knows which calls launched work.
        is_of_graph: Which calls launched a graph: its kernels share a number rightly.
    """
    activities, calls = trace.activities, trace.calls
    if trace.is_launch is None:
        return trace
    launching, shared = trace.launching_calls.copy(), 0
    rows = np.flatnonzero((activities.kind == Kind.KERNEL) & (launching != UNKNOWN))
    rows = rows[~is_of_graph[launching[rows]]]
    rows = rows[np.lexsort((activities.start_ns[rows], launching[rows]))]
    rows = rows[~begins_run(launching[rows])]  # without the first kernel of each launch
    for process in distinct(activities.process[rows]):
        kernels = rows[activities.process[rows] == process]
        kernels = kernels[np.argsort(activities.start_ns[kernels], kind="stable")]
        of_process = np.flatnonzero(trace.is_launch & ~is_of_graph & (calls.process == process))
        without = of_process[
            ~is_among(calls.correlation[of_process], activities.correlation[activities.process == process])
        ]
        without = without[np.argsort(calls.start_ns[without], kind="stable")]
        if len(without) == len(kernels) and np.all(calls.start_ns[without] <= activities.start_ns[kernels]):
            launching[kernels] = without
            shared += len(kernels)
    if not shared:
        return trace
    warning = (
        f"{shared:,} of {len(activities):,} activities {by_number(shared, 'has', 'have')} the correlation number of "
        "another one's launch: each is taken for work of the next launch that has none, so some phases may be wrong"
    )
    return replace(trace, launching_calls=launching, warnings=(*trace.warnings, Doubt(warning)))


_ROUNDING_NS = 2_000
"""Some profilers round starts and durations to microseconds."""


_BESIDE = 10
"""Two operations run at the same time if they do for more than one part in this of the shorter one's duration."""


def doubt_streams(trace: Trace) -> Trace:
    """Return the trace without its streams if all work has one number, and collectives ran beside compute under it.

    Operations of a stream follow each other. Some profilers write 0 for every stream, so collectives would seem to hold
    up compute that ran beside them. Where compute runs beside compute, too, durations are wrong instead.
    """
    activities = trace.activities
    lanes = activities.lane
    if not len(lanes) or lanes[0] == UNKNOWN or np.any(lanes != lanes[0]):
        return trace
    is_collective = activities.category == Category.COMMUNICATION
    rows = np.flatnonzero(is_collective | (activities.category == Category.COMPUTE))
    _, owner = distinct_rows(activities.process[rows], activities.device[rows])
    rows = rows[(order := np.lexsort((activities.start_ns[rows], owner)))]
    owner, start_ns, end_ns = owner[order], activities.start_ns[rows], activities.end_ns[rows]
    # Each operation and the one that begins next.
    at_once_ns = np.minimum(end_ns[:-1], end_ns[1:]) - start_ns[1:]
    length_ns = end_ns - start_ns
    at_once = (at_once_ns > _ROUNDING_NS) & (_BESIDE * at_once_ns > np.minimum(length_ns[:-1], length_ns[1:]))
    number = activities.correlation[rows]
    at_once &= (owner[1:] == owner[:-1]) & ((number[1:] != number[:-1]) | (number[1:] == UNKNOWN))
    collectives = is_collective[rows].astype(np.int64)
    of_two = collectives[:-1] + collectives[1:]
    beside, compute = (int(np.count_nonzero(at_once & (of_two == these))) for these in (1, 0))
    is_told = beside < 2 or _BESIDE * beside <= collectives.sum() or _BESIDE * compute > np.count_nonzero(of_two == 0)
    if is_told:
        return trace
    return replace(trace, activities=replace(activities, lane=constant_column(UNKNOWN, len(lanes))))


_FOLLOWED = "each is taken to end where the next one begins"
_IMPOSSIBLE_TIMES = (
    f"ending after later ones of their stream: {{count:,}}; {_FOLLOWED}",
    f"running on while many later ones of their stream began: {{count:,}}; {_FOLLOWED}",
    (
        "running on beside the next one of their stream: {count:,}, each more than twice as long as all others of its "
        f"name; {_FOLLOWED}"
    ),
    "ending after the host had waited for them: {count:,}; each is taken to end where that wait ends",
    (
        "beginning before others of their stream that were launched before them: {count:,}; the clock of their device "
        "seems to jump back"
    ),
)
"""What is said of each kind of impossible time, in the order in which :func:`cut_overlong_activities` finds them."""


def cut_overlong_activities(trace: Trace) -> Trace:
    """Return the trace in which an activity with an impossible end ends where the next activity of its stream begins.

    The end is impossible if it lies after the ends of the next two activities of the stream. The operations of a stream
    follow each other; with programmatic dependent launch the next one may begin early, but the one after that does not
    end early. Activities that one call launched together, as a CUDA graph, have no order and are not compared, nor are
    those whose stream is not known. Ends are impossible, too, if many activities of one stream run at once
    (:func:`_run_at_once`). An end after the begin of the next activity is impossible, too, if nothing else on
    the stream ends so late, and nothing else of its name takes half as long (:func:`_run_on_beside_the_next`). The last
    two of a stream, which none or one follows, are compared with the waits of the host (:func:`_cut_by_waits`).

    Sorting all activities is what this costs, so what is there again under another number is told here, too, and what
    begins before others of its stream that were launched before it (:mod:`.stream_order`).
    """
    activities, end_ns = trace.activities, trace.activities.end_ns
    found = []
    _, stream = distinct_rows(activities.process, activities.device, activities.lane)
    order = in_file(np.lexsort((activities.start_ns, stream)))
    lane, ends_ns = in_order(stream, order), in_order(end_ns, order)
    del stream  # it is as long as the trace
    start_ns, number = activities.start_ns, activities.correlation
    trace = _warn_of_doubles(trace, order, lane)
    at_jump, disordered = find_disordered(trace, order, lane)
    # A shorter end may make the end of an earlier activity impossible, so this repeats until nothing is found.
    for _ in range(len(order)):
        # The few activities that end after the one after the next; then those of them that also pass the other tests.
        rows = _that_end_late(ends_ns[:-2], ends_ns[2:])
        rows = rows[lane[rows + 2] == lane[rows]]
        rows = rows[activities.lane[order[rows]] != UNKNOWN]
        rows = rows[ends_ns[rows] - ends_ns[rows + 1] > _ROUNDING_NS]
        for at in (1, 2):
            own, after = order[rows], order[rows + at]
            others = (number[after] != number[own]) | (number[own] == UNKNOWN)
            rows = rows[(start_ns[after] > start_ns[own]) & others]
        if not len(rows):
            break
        ends_ns[rows] = start_ns[order[rows + 1]]
        found.append(order[rows])
    at_once = _run_at_once(trace, order, lane, ends_ns)
    ends_ns[at_once] = start_ns[order[at_once + 1]]
    beside = _run_on_beside_the_next(trace, order, lane, ends_ns)
    ends_ns[beside] = start_ns[order[beside + 1]]
    last = np.flatnonzero(np.append(lane[2:] != lane[:-2], [True, True][: len(lane)]))
    outliving, until_ns = _cut_by_waits(trace, order[last])
    too_late = np.unique(np.concatenate([np.empty(0, np.int64), *found]))
    counts = [*map(len, (too_late, at_once, beside, outliving)), disordered]
    warnings = [
        Doubt(f"activities that were recorded as {text.format(count=count)}")
        for count, text in zip(counts, _IMPOSSIBLE_TIMES, strict=True)
        if count
    ]
    if not warnings:
        return trace
    cut_ns = end_ns.copy()
    cut_ns[order] = ends_ns
    cut_ns[outliving] = np.minimum(cut_ns[outliving], until_ns)
    return replace(
        trace,
        activities=replace(activities, end_ns=cut_ns),
        overlong=np.unique(np.concatenate([too_late, order[at_once], order[beside], outliving, at_jump])),
        warnings=(*trace.warnings, *warnings),
    )


def _that_end_late(ends_ns: Ints, than_ns: Ints) -> Ints:
    """Return the rows in which the end is clearly after the other time; there are few, of columns that may be long."""
    late = (ends_ns[part] - than_ns[part] > _ROUNDING_NS for part in parts_of(len(than_ns)))
    return np.flatnonzero(np.concatenate([np.empty(0, np.bool_), *late]))


_MOST_AT_ONCE = 8
"""Largest number of activities of a stream that begin before one ends that is launched before them."""
_MOST_COLLECTIVES_AT_ONCE = 2
"""The same if all of these are collectives, which seldom begin early."""


def _run_at_once(trace: Trace, order: Ints, lane: Ints, ends_ns: Ints) -> Ints:
    """Return which activities run on when the next one of their stream begins, on streams where too many run at once.

    All of them end in the order of their starts, so no end alone is impossible. It is so where durations were recorded
    in a wrong unit. Arguments and result are those of :func:`_run_on_beside_the_next`.
    """
    activities, start_ns = trace.activities, in_order(trace.activities.start_ns, order)
    number, category, stream = activities.correlation, activities.category, activities.lane
    streams = [np.empty(0, lane.dtype)]
    for most in (_MOST_COLLECTIVES_AT_ONCE, _MOST_AT_ONCE):
        rows = _that_end_late(ends_ns[: -most - 1], start_ns[most + 1 :])
        rows = rows[(lane[rows + most + 1] == lane[rows]) & (stream[order[rows]] != UNKNOWN)]
        for at in range(most + 1):
            own, after = order[rows + at], order[rows + at + 1]
            is_other = (number[after] != number[own]) | (number[own] == UNKNOWN)
            is_other &= start_ns[rows + at + 1] > start_ns[rows + at]
            if most == _MOST_COLLECTIVES_AT_ONCE:
                is_other &= (category[own] == Category.COMMUNICATION) & (category[after] == Category.COMMUNICATION)
            rows = rows[is_other]
        streams.append(lane[rows])
    if not (found := distinct(np.concatenate(streams))):
        return np.empty(0, np.int64)
    rows = _that_end_late(ends_ns[:-1], start_ns[1:])
    rows = rows[is_in(lane[rows], found) & (lane[rows + 1] == lane[rows])]
    own, after = number[order[rows]], number[order[rows + 1]]
    at_once: Ints = rows[(start_ns[rows + 1] > start_ns[rows]) & ((after != own) | (own == UNKNOWN))]
    return at_once


_AWAITED_NS = 50_000
"""An activity outlives a wait of the host if it ends more than this after the wait's end."""
_LEAST_LIKE_IT = 3
"""Smallest number of others of its name that must all take less than half as long as one with an impossible end."""


_MOST_BESIDE = 8
"""Largest number of activities of a trace that run on beside the next one of their stream by mistake."""


def _run_on_beside_the_next(trace: Trace, order: Ints, lane: Ints, ends_ns: Ints) -> Ints:
    """Return which activities run on when the next one of their stream has begun, although they cannot.

    They take more than twice as long as all others of their name, and no other activity of the stream does so, as with
    programmatic dependent launch.

    Args:
        trace: The trace.
        order: Its activities by stream and start; the result holds indices of ``order``.
        lane: The stream of each activity in that order.
        ends_ns: The end of each activity in that order.
    """
    activities, none = trace.activities, np.empty(0, np.int64)
    start_ns, number = in_order(activities.start_ns, order), activities.correlation
    rows = _that_end_late(ends_ns[:-1], start_ns[1:])
    rows = rows[lane[rows + 1] == lane[rows]]
    rows = rows[(start_ns[rows + 1] > start_ns[rows]) & (activities.lane[order[rows]] != UNKNOWN)]
    own, after = number[order[rows]], number[order[rows + 1]]
    rows = rows[(after != own) | (own == UNKNOWN)]
    if not 0 < len(rows) <= _MOST_BESIDE:
        return none
    too_long = np.array([_is_much_longer_than_its_like(trace, row) for row in order[rows].tolist()])
    found: Ints = rows[~np.isin(lane[rows], lane[rows[~too_long]])]
    return found


def _is_much_longer_than_its_like(trace: Trace, row: int) -> bool:
    """Return whether an activity takes more than twice as long as all others of its name and process, if they are some.

    ``row`` is its row of the activities.
    """
    activities = trace.activities
    alike = np.flatnonzero(
        (activities.name_id == activities.name_id[row]) & (activities.process == activities.process[row])
    )
    lasts_ns = activities.end_ns[alike] - activities.start_ns[alike]
    longest_ns = int(lasts_ns[alike != row].max(initial=0))
    return len(alike) > _LEAST_LIKE_IT and int(activities.end_ns[row] - activities.start_ns[row]) > 2 * longest_ns


def _cut_by_waits(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """Return which of these activities end after the host had waited for them, and when the host had.

    Clocks that disagree look alike, so these must have begun before the wait ended, and last more than twice as long as
    all others of their name. In a process with several devices it is not known for which of them the host waits.
    """
    activities, calls = trace.activities, trace.synchronizations
    waits = select(calls, is_in(calls.kind, (SyncKind.HOST_WAIT_DEVICE, SyncKind.HOST_WAIT_STREAM)))
    found, until_ns = [], []
    for row in rows[trace.launching_calls[rows] != UNKNOWN].tolist():
        process, start_ns, end_ns = activities.process[row], int(activities.start_ns[row]), int(activities.end_ns[row])
        is_for_it = (waits.kind == SyncKind.HOST_WAIT_DEVICE) | (waits.stream == activities.lane[row])
        is_for_it &= (waits.process == process) & (waits.start_ns > trace.calls.start_ns[trace.launching_calls[row]])
        if not is_for_it.any() or (waited_ns := int(waits.end_ns[is_for_it].min())) + _AWAITED_NS >= end_ns:
            continue
        is_on_one_device = len(distinct(activities.device[activities.process == process])) == 1
        if start_ns < waited_ns and is_on_one_device and _is_much_longer_than_its_like(trace, row):
            found.append(row)
            until_ns.append(waited_ns)
    return np.array(found, np.int64), np.array(until_ns, np.int64)


def _warn_of_doubles(trace: Trace, order: Ints, lane: Ints) -> Trace:
    """Return the trace, with a warning if activities are in it again, at the same time, under other launches' numbers.

    Of collectives :mod:`ddp_prof.analyze.quality` tells it.

    Args:
        trace: The trace.
        order: Its activities by stream and start.
        lane: The stream of each activity in that order.
    """
    activities, start_ns = trace.activities, trace.activities.start_ns[order]
    rows = np.flatnonzero((start_ns[1:] == start_ns[:-1]) & (lane[1:] == lane[:-1]))
    first, again = order[rows], order[rows + 1]
    is_double = activities.correlation[first] != activities.correlation[again]
    is_double &= activities.end_ns[again] - activities.start_ns[again] > _ROUNDING_NS
    is_double &= activities.category[again] != Category.COMMUNICATION
    for name in ("end_ns", "name_id"):
        column = getattr(activities, name)
        is_double &= column[first] == column[again]
    if not (doubles := int(is_double.sum())):
        return trace
    warning = (
        f"duplicate activities under other correlation numbers: {doubles:,} of {len(activities):,}; they are counted "
        "twice, also in sums of durations"
    )
    return replace(trace, warnings=(*trace.warnings, Doubt(warning)))


def name_ranks(trace: Trace) -> Trace:
    """Return the trace with ranks and world size from its ``process|rank=...|world=...`` ranges, if there are any.

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
    """Return the trace with the launch shape of each kernel, for example ``grid 256x1x1 block 128x1x1``, and registers.

    Args:
        trace: The trace; its kernels are the first activities.
        columns: One column for each of :data:`SHAPE_COLUMNS` and the registers per thread, with a row for each kernel;
            ``UNKNOWN`` if the profiler did not record them.
    """
    *sizes, registers = columns
    names = NameTable(trace.names)
    first, which = distinct_rows(*sizes)  # each distinct shape is named once
    used = np.stack([size[first] for size in sizes], axis=1)
    index = [
        UNKNOWN if UNKNOWN in row else names.intern("grid {}x{}x{} block {}x{}x{}".format(*row))
        for row in used.tolist()
    ]
    of_shape = np.array(index, np.int64)

    def of_kernels(value: Callable[[slice], Ints]) -> Ints:
        """Return a column with these values of the kernels, and ``UNKNOWN`` for the activities that follow them."""

        def compute(rows: slice) -> Ints:
            found = value(rows)
            return np.append(found, np.full(rows.stop - rows.start - len(found), UNKNOWN))

        return in_parts(len(trace.activities), compute)

    return replace(
        trace,
        names=tuple(names),
        shape_id=of_kernels(lambda rows: of_shape[which[rows]]),
        registers=of_kernels(lambda rows: registers[rows]),
    )
