"""A trace: everything read from one capture, in tables of columns.

The three main tables are ``Activities``, what a device did; ``Spans``, the ranges that the program marked; and
``Calls``, by which the host launched work. Times are int64 nanoseconds on the trace's own clock; a time interval
includes its start and not its end. A trace is immutable.

In all tables ``process`` is the number of the process to which a row belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from ddp_prof.communication import NCCL_RANGE
from ddp_prof.growing_column import in_parts
from ddp_prof.manifest import Manifest
from ddp_prof.range_names import PROCESS, parse_ranges, works_on_device

# Users of traces also need these names of tables.
from ddp_prof.table import NEVER as NEVER
from ddp_prof.table import NO_TIME as NO_TIME
from ddp_prof.table import UNKNOWN as UNKNOWN
from ddp_prof.table import Brief, constant_column, is_in, rows_of
from ddp_prof.table import Ints as Ints
from ddp_prof.table import Mask as Mask
from ddp_prof.table import Table as Table
from ddp_prof.table import concatenate as concatenate
from ddp_prof.table import distinct as distinct
from ddp_prof.table import distinct_rows as distinct_rows
from ddp_prof.table import empty as empty
from ddp_prof.table import select as select
from ddp_prof.table import take_or_unknown as take_or_unknown

AUTOGRAD = "pt_autograd"
"""Start of the names of torch's threads in which autograd computes backward; a number follows."""

SOURCE_NAMES = {"nsys-sqlite": "nsys", "nsys-report": "nsys", "nsys-tables": "nsys", "kineto": "torch.profiler"}
"""The name of the profiler, as users see it, for each :attr:`Trace.source`."""


class Kind(IntEnum):
    """What an activity was."""

    KERNEL = 0
    COPY = 1
    MEMORY_SET = 2
    GRAPH = 3


class Category(IntEnum):
    """What an activity was for; decided once, when the trace is read."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2
    OTHER = 3
    UNKNOWN = 4  # a kernel without a name


@dataclass(frozen=True)
class Activities(Table):
    """What a device did: kernels, copies, memory sets, and CUDA graphs that were recorded as one activity each.

    Attributes:
        device: Number of the device within the process (CUDA ordinal).
        lane: CUDA stream id.
        name_id: Index of the name in :attr:`Trace.names`.
        kind: A :class:`Kind`.
        category: A :class:`Category`.
        correlation: The id that the call that launched the activity also has, in the same process; ``UNKNOWN`` if none
            was recorded.
        bytes: Size of a copy or a memory set; ``UNKNOWN`` for kernels.
    """

    start_ns: Ints
    end_ns: Ints
    process: Ints
    device: Ints
    lane: Ints
    name_id: Ints
    kind: Ints
    category: Ints
    correlation: Ints
    bytes: Ints


@dataclass(frozen=True)
class Spans(Table):
    """The ranges that the program marked, each with a name.

    Attributes:
        lane: Thread that opened the range.
        is_start_end: 1 for a start/end range, which may overlap others of its thread and end on another thread;
            0 for a push/pop range, which nests.
        is_open: 1 for a range that was still open when recording stopped: it ends with the last event of the capture,
            and its real duration is not known.
    """

    start_ns: Ints
    end_ns: Ints
    process: Ints
    lane: Ints
    name_id: Ints
    is_start_end: Ints
    is_open: Ints


@dataclass(frozen=True)
class Calls(Table):
    """API calls, of CUDA or another runtime; ``lane`` is the calling thread, :attr:`Trace.is_launch` tells launches."""

    start_ns: Ints
    process: Ints
    lane: Ints
    correlation: Ints


@dataclass(frozen=True)
class CallDetails(Table):
    """For each row of :class:`Calls` its end, and the index of its name, without the version that CUDA adds."""

    end_ns: Ints
    name_id: Ints


class SyncKind(IntEnum):
    """What a call does to the order of work."""

    RECORD = 0  # records an event in a stream
    STREAM_WAIT = 1  # a stream waits for an event
    HOST_WAIT_EVENT = 2  # the host waits for an event
    HOST_WAIT_STREAM = 3  # the host waits for all work of a stream
    HOST_WAIT_DEVICE = 4  # the host waits for all work of a device
    COPY = 5  # launches a copy, and may wait for its end
    SET = 6  # launches a memory set, and orders nothing


HOST_WAITS = (SyncKind.HOST_WAIT_EVENT, SyncKind.HOST_WAIT_STREAM, SyncKind.HOST_WAIT_DEVICE)
"""The kinds of calls in which the host waits."""


@dataclass(frozen=True)
class Synchronizations(Table):
    """Calls that make, or may make, a stream or the host wait, and calls that record the events for which they wait.

    Attributes:
        kind: A :class:`SyncKind`.
        start_ns: Start of the call on the host; ``NO_TIME`` if the call itself was not recorded.
        end_ns: End of the call on the host; ``NO_TIME`` if the call itself was not recorded.
        thread: Thread that made the call; ``UNKNOWN`` if the call itself was not recorded.
        correlation: Number of the call; a process numbers its calls in their order.
        stream: The stream that waits, the stream that the host waits for, or the stream of the recorded event;
            :data:`NO_WORK` for a stream without work whose number is not known.
        awaits: For a wait for an event, the row of this table with the call that recorded the event; ``UNKNOWN`` if the
            trace does not hold that call.
    """

    kind: Ints
    start_ns: Ints
    end_ns: Ints
    process: Ints
    thread: Ints
    correlation: Ints
    device: Ints
    stream: Ints
    awaits: Ints


NO_WORK = -2
"""Stands for the number of a stream without work, which the profiler leaves out."""


@dataclass(frozen=True)
class CollectiveMetadata(Table):
    """Facts about collectives that the profiler recorded besides their kernels; a fact is ``UNKNOWN`` if it did not.

    Attributes:
        activity: Row in :class:`Activities` of the collective's kernel or copy; ``UNKNOWN`` for a collective of gloo.
        op_id: Index in :attr:`Trace.names` of the operation, as the profiler names it.
        bytes: Size of the input or the output, whichever is larger.
        group_id: Index in :attr:`Trace.names` of the communicator's name, which is the same on all its ranks.
        group_size: Number of ranks of the communicator.
        sequence: Number of the collective within the communicator.
        span: For a copy, the row in :class:`Spans` of the range that launched it: all copies of that range are one
            operation. For a collective of gloo, the row in :class:`Spans` of its range.
    """

    activity: Ints
    op_id: Ints
    bytes: Ints
    group_id: Ints
    group_size: Ints
    sequence: Ints
    span: Ints


@dataclass(frozen=True)
class Overhead(Table):
    """When the profiler itself worked, for example flushed its buffers."""

    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class CollectiveCalls(Table):
    """When the host called collectives: the start and the index of the name of each of torch's operators for it."""

    start_ns: Ints
    name_id: Ints


@dataclass(frozen=True)
class Operators(Table):
    """When the host computed: torch's operators, including nested ones, except those that call a collective.

    ``is_backward`` is 1 for operators of autograd's engine. An operator of the engine that calls a collective is not in
    the table, but the other operators that it calls are, with 1.
    """

    start_ns: Ints
    end_ns: Ints
    is_backward: Ints


@dataclass(frozen=True)
class UnresolvedNames:
    """How many kernels of a trace have no name, so that it is unknown whether they compute or communicate.

    Attributes:
        kernels: Number of kernels without a name.
        of_kernels: Number of all kernels.
        time_ns: Sum of the durations of the kernels without a name.
        of_time_ns: Sum of the durations of all kernels.
    """

    kernels: int
    of_kernels: int
    time_ns: int
    of_time_ns: int

    @property
    def share(self) -> float:
        """The fraction of kernels, or of the time of kernels, that has no name, whichever is larger, from 0 to 1."""
        return max(self.kernels / max(1, self.of_kernels), self.time_ns / max(1, self.of_time_ns))


@dataclass(frozen=True)
class Trace(Brief):
    """Everything read from one capture.

    Attributes:
        source: Format of the file; see :data:`SOURCE_NAMES`.
        producer: Version of the program that wrote the file: for an export, of the nsys that exported it. ``None`` if
            the file does not hold it.
        names: The string table in which every ``name_id`` is an index.
        threads: Known names of threads by (process, lane).
        ranks: Known ranks by process.
        overhead: When the profiler itself worked.
        recorder: Version of the nsys that recorded it; ``None`` if neither a report nor a manifest tells.
        names_autograd: Whether ``threads`` includes the names of all threads in which autograd ran.
        operators: When the host computed, for traces without activities of a device; else empty.
        sync_source: Source of the synchronizations: ``cuda_events``, ``event_sync_ids``, ``kineto``, ``call_order``
            (some at least are inferred) or ``none``.
        sync_reason: Why the synchronizations are unknown or incomplete; ``None`` if they are known.
        inferred: For each synchronization, whether a part of it is inferred from the order of calls: for a wait, which
            call recorded its event; for a record, its stream. ``None`` if nothing is inferred.
        launching_calls: For each activity, the row in ``calls`` of the call that launched it; ``UNKNOWN`` if that was
            not recorded. It is found when the trace is built, and ``dataclasses.replace`` keeps it. To replace the rows
            of activities or calls, pass ``launching_calls=None``: then it is found again.
        is_launch: For each call, whether it launched a kernel or a graph, so that an activity must have been recorded
            for it; ``None`` if the names of calls were not read.
        overlong: Rows of the activities whose recorded start or end is impossible, or that ran beside those. One with
            an impossible end ends here where the next activity on its stream begins, or a wait of the host for it ends.
        has_ambiguous_launch: For each activity, whether several earlier calls have its number, and not each of them is
            followed by work of its own before the next one; the last of them counts.
        shape_id: For each activity, the index in ``names`` of its launch shape; ``UNKNOWN`` if it has none. ``None`` if
            launches were not read; then ``registers`` and ``call_details`` are ``None``, too.
        registers: For each activity, its registers per thread.
        call_details: Ends and names of the calls.
        has_subgroups: Whether the profiler recorded that the job has process groups of a part of its ranks.
        epoch_ns: UTC nanoseconds of the trace's time 0; ``None`` if unknown.
        warnings: Assumptions of the reader, and facts that it could not find, one line each.
        platform: ``rocm`` if the devices are known to be AMD's, else ``cuda``.
        gpus: Known names of GPUs by (process, device).
        gpu_ids: Known numbers of GPUs, or of parts of these (MIG), in their machine by (process, device).
    """

    path: Path
    source: str
    producer: str | None
    names: tuple[str, ...]
    activities: Activities
    spans: Spans
    calls: Calls
    threads: Mapping[tuple[int, int], str]
    ranks: Mapping[int, int]
    overhead: Overhead
    collective_metadata: CollectiveMetadata = field(default_factory=lambda: empty(CollectiveMetadata))
    synchronizations: Synchronizations = field(default_factory=lambda: empty(Synchronizations))
    recorder: str | None = None
    operators: Operators = field(default_factory=lambda: empty(Operators))
    collective_calls: CollectiveCalls = field(default_factory=lambda: empty(CollectiveCalls))
    sync_source: str = "none"
    sync_reason: str | None = None
    inferred: Mask | None = field(default=None, repr=False)
    names_autograd: bool = False
    # These two are not None once the trace is built.
    launching_calls: Ints = field(default=None, repr=False)  # type: ignore[arg-type]
    has_ambiguous_launch: Mask = field(default=None, repr=False)  # type: ignore[arg-type]
    is_launch: Mask | None = field(default=None, repr=False)
    overlong: Ints = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    shape_id: Ints | None = None
    registers: Ints | None = None
    call_details: CallDetails | None = None
    platform: str = "cuda"
    world_size: int | None = None
    has_subgroups: bool = False
    epoch_ns: int | None = None
    manifest: Manifest | None = None
    warnings: tuple[str, ...] = ()
    node: str | None = None
    gpus: Mapping[tuple[int, int], str] = field(default_factory=dict)
    gpu_ids: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the launching calls if they are not given; raise ValueError if they are of other activities."""
        if self.launching_calls is None:
            launching_calls, has_ambiguous_launch = join_launches(self.activities, self.calls)
            # Past the check of a frozen dataclass, which allows no assignment.
            object.__setattr__(self, "launching_calls", launching_calls)
            object.__setattr__(self, "has_ambiguous_launch", has_ambiguous_launch)
        if len(self.launching_calls) != len(self.activities):
            raise ValueError("launching_calls were joined for other activities")

    @property
    def device(self) -> str:
        """``cuda``, or :attr:`platform`, if there are activities of a device, or launches, or the program tells of one.

        Else ``cpu``.
        """
        launches = self.is_launch is not None and bool(self.is_launch.any())
        return self.platform if launches or len(self.activities) or self.on_devices else "cpu"

    @cached_property
    def on_devices(self) -> frozenset[int]:
        """The processes that say by a range that they communicate by NCCL, or compute on a device."""
        told = [name_id for name_id, one in parse_ranges(self.names, PROCESS).items() if works_on_device(one)]
        told += [name_id for name_id, name in enumerate(self.names) if NCCL_RANGE.match(name)]
        return frozenset(distinct(self.spans.process[is_in(self.spans.name_id, told)]))

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """All processes that left an activity or a span, in ascending order."""
        tables = (self.activities, self.spans)
        return tuple(sorted({value for table in tables for value in distinct(table.process)}))

    @cached_property
    def unresolved_names(self) -> UnresolvedNames:
        """How many kernels have no name."""
        kernels = self.activities.kind == Kind.KERNEL
        unnamed = kernels & (self.activities.category == Category.UNKNOWN)
        duration_ns = self.activities.end_ns - self.activities.start_ns
        return UnresolvedNames(
            int(unnamed.sum()), int(kernels.sum()), int(duration_ns[unnamed].sum()), int(duration_ns[kernels].sum())
        )

    @cached_property
    def duration_ns(self) -> int:
        """Time from the first activity or range to the end of the last; 0 for a trace without any."""
        tables = [table for table in (self.activities, self.spans) if len(table)]
        return int(max(t.end_ns.max() for t in tables) - min(t.start_ns.min() for t in tables)) if tables else 0


def numbers_grow(calls: Calls) -> bool:
    """Whether the correlation numbers of calls tell the order of the calls: on each thread they grow with time."""
    for process in distinct(calls.process):
        of_process = calls.process == process
        for thread in distinct(calls.lane[of_process]):
            rows = np.flatnonzero(of_process & (calls.lane == thread) & (calls.correlation != UNKNOWN))
            number, start_ns = calls.correlation[rows], calls.start_ns[rows]
            if not np.all(number[1:] > number[:-1]):
                start_ns = start_ns[np.lexsort((start_ns, number))]
            if np.any(start_ns[1:] < start_ns[:-1]):
                return False
    return True


def join_launches(activities: Activities, calls: Calls) -> tuple[Ints, Mask]:
    """Return for each activity the row in ``calls`` of the call that launched it, and whether several could have.

    The row is ``UNKNOWN`` if the call was not recorded. Process *and* correlation number must be equal, because two
    processes use the same numbers. If a process uses a number again, the last call before the activity counts::

        calls         5.......5........     both with number 5
        activities    ..5.......5......     each launched by the call before it

    If a runtime call and the driver call within it have the same number, the runtime call counts.
    """
    row, is_one_of_several = constant_column(UNKNOWN, len(activities)), np.zeros(len(activities), np.bool_)
    for process in distinct(activities.process):
        asked, offered = rows_of(activities.process == process), rows_of(calls.process == process)
        keys, wanted = calls.correlation[offered], activities.correlation[asked]
        if not len(keys):
            continue
        order = None if np.all(keys[1:] >= keys[:-1]) else np.argsort(keys, kind="stable")  # None: sorted already
        ordered = keys if order is None else keys[order]
        several = None
        if np.all(ordered[1:] != ordered[:-1]):  # no number is used twice, so a binary search finds the call
            found = in_parts(len(wanted), partial(_search, ordered, order, wanted))
        else:
            times = calls.start_ns[offered], activities.start_ns[asked]
            found, several = _last_before(keys, calls.lane[offered], wanted, *times)
            found[wanted == UNKNOWN] = UNKNOWN
        # Positions among the process's calls become rows of all calls. UNKNOWN is -1: it selects the appended UNKNOWN.
        found = found if isinstance(offered, slice) else np.append(offered, UNKNOWN)[found]
        if isinstance(asked, slice):  # all activities are of one process, as usual: nothing is copied
            row = found
        else:
            row = row if row.strides[0] else row.copy()
            row[asked] = found
        if several is not None:
            is_one_of_several[asked] = several
    return row, is_one_of_several & (row != UNKNOWN)


def _search(ordered: Ints, order: Ints | None, wanted: Ints, rows: slice) -> Ints:
    """Return the positions of some wanted values; ``UNKNOWN`` for those that are not found, and for ``UNKNOWN``.

    Args:
        ordered: Different values in ascending order.
        order: Their positions; ``None`` if these are 0, 1, 2, ...
        wanted: The wanted values.
        rows: Which of them are looked for.
    """
    values = wanted[rows]
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    is_found = (ordered[at] == values) & (values != UNKNOWN)
    return np.where(is_found, at if order is None else order[at], UNKNOWN)


def _last_before(keys: Ints, lanes: Ints, wanted: Ints, call_ns: Ints, activity_ns: Ints) -> tuple[Ints, Mask]:
    """Find for each activity the call that launched it, in a process that uses correlation numbers (keys) repeatedly.

    It is the last call with the activity's key before the activity. If there is none before, as the clocks of host and
    device may differ, it is the first one after. A call that directly follows a call with the same key on the same
    thread, with no activity of that key in between, counts as a part of that call: a driver call in a runtime call.

    Args:
        keys: Correlation number of each call.
        lanes: Thread of each call.
        wanted: Correlation number of each activity.
        call_ns: Start of each call.
        activity_ns: Start of each activity.

    Returns:
        For each activity the position of its call, ``UNKNOWN`` if no call has its key; and whether an earlier call
        with its key, which no other work follows, may have launched it instead.
    """
    # One list of calls and activities, sorted by key, then by time, a call before an activity at the same time.
    is_call = np.arange(len(keys) + len(wanted)) < len(keys)
    key, time = np.concatenate([keys, wanted]), np.concatenate([call_ns, activity_ns])
    order = np.lexsort((~is_call, time, key))
    key, time, is_call = key[order], time[order], is_call[order]
    # Which calls are parts of the call in the row before: the same key and thread, and the next call on this thread.
    on_thread = np.empty(len(keys), np.int64)
    on_thread[np.lexsort((call_ns, lanes))] = np.arange(len(keys))
    call = np.where(is_call, order, 0)
    is_part = np.zeros(len(order), np.bool_)
    is_part[1:] = is_call[1:] & is_call[:-1] & (key[1:] == key[:-1]) & (lanes[call[1:]] == lanes[call[:-1]])
    is_part[1:] &= (on_thread[call[1:]] == on_thread[call[:-1]] + 1) | (time[1:] == time[:-1])
    begins = is_call & ~is_part
    # For each row of the list, positions in the list: of the last call at or before it (running maximum; -1: none), of
    # the next call at or after it (running minimum from the end; the length: none), and of the first row with its key.
    place = np.arange(len(order))
    before = np.maximum.accumulate(np.where(begins, place, -1))
    after = np.minimum.accumulate(np.where(begins, place, len(order))[::-1])[::-1]
    first = np.searchsorted(key, key)
    has_before, has_after = before >= first, (after < len(order)) & (key[np.minimum(after, len(order) - 1)] == key)
    found = np.where(has_before, call[before], np.where(has_after, call[np.minimum(after, len(order) - 1)], UNKNOWN))
    # Whether a call with the same key and without work comes before each row's call: the row may be its work. A call is
    # without work if no activity of its key comes before the next call.
    following = np.append(after[1:], len(order))
    worked = np.append(0, np.cumsum(~is_call))
    is_idle = begins & (worked[following] == worked[place])
    idle_before = np.append(0, np.cumsum(is_idle))
    several_calls = idle_before[np.maximum(before, 0)] > idle_before[first]
    # Back to the order of the activities.
    row, several = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.bool_)
    activity = order[~is_call] - len(keys)
    row[activity], several[activity] = found[~is_call], (has_before & several_calls)[~is_call]
    return row, several
