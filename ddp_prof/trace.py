"""A trace: everything read from one capture, in tables of columns.

The three main tables are ``Activities``, what a device did; ``Spans``, the ranges that the program marked; and
``Calls``, what the host launched. Times are int64 nanoseconds on the trace's own clock, half-open ``[start, end)``.
A trace is immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import numpy as np

from ddp_prof.manifest import Manifest

# Users of traces also need these names of tables.
from ddp_prof.table import NO_TIME as NO_TIME
from ddp_prof.table import UNKNOWN as UNKNOWN
from ddp_prof.table import Brief
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
"""Start of torch's names for the threads in which autograd computes backward; a number follows."""

SOURCE_NAMES = {"nsys-sqlite": "nsys", "nsys-report": "nsys", "nsys-tables": "nsys", "kineto": "torch.profiler"}
"""Names of profilers as users see them, by :attr:`Trace.source`."""


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
        device: CUDA ordinal within the process.
        lane: CUDA stream id.
        name_id: Index into :attr:`Trace.names`.
        kind, category: A :class:`Kind` and a :class:`Category`.
        correlation: Id that the launching call of the same process also has; ``UNKNOWN`` if none was recorded.
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
    """CUDA API calls that launched something; ``lane`` is the calling thread."""

    start_ns: Ints
    process: Ints
    lane: Ints
    correlation: Ints


@dataclass(frozen=True)
class CallDetails(Table):
    """The end of each row of :class:`Calls`, and its name without the version that CUDA adds."""

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


HOST_WAITS = (SyncKind.HOST_WAIT_EVENT, SyncKind.HOST_WAIT_STREAM, SyncKind.HOST_WAIT_DEVICE)


@dataclass(frozen=True)
class Synchronizations(Table):
    """Calls that make, or may make, a stream or the host wait, and calls that record the events waited for.

    Attributes:
        kind: A :class:`SyncKind`.
        start_ns, end_ns: Start and end of the call on the host; ``NO_TIME`` if the call itself was not recorded.
        thread: Thread that made the call; ``UNKNOWN`` if the call itself was not recorded.
        correlation: Number of the call; a process numbers its calls in their order.
        stream: The stream that waits, the stream that the host waits for, or the stream of the recorded event;
            :data:`NO_WORK` for a stream without work whose number is not known.
        awaits: For waits for an event: the row of its record, ``UNKNOWN`` if the trace does not hold it.
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
"""A stream without work, whose number the profiler leaves out."""


@dataclass(frozen=True)
class CollectiveMetadata(Table):
    """Facts about collectives that the profiler recorded besides their kernels; ``UNKNOWN`` if it did not.

    Attributes:
        activity: Row in :class:`Activities` of the collective's kernel or copy; ``UNKNOWN`` for one of gloo.
        op_id: Index into :attr:`Trace.names` of the operation, as the profiler names it.
        bytes: Size of the input or the output, whichever is larger.
        group_id: Index into :attr:`Trace.names` of the communicator's name, the same on all its ranks.
        sequence: Number of the collective within the communicator.
        span: Of a copy, the row in :class:`Spans` of the range that launched it: all copies of that range are one
            operation. Of a collective of gloo, its own row there.
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
    """When the host called collectives: starts and names of torch's operators."""

    start_ns: Ints
    name_id: Ints


@dataclass(frozen=True)
class Operators(Table):
    """When the host computed: torch's operators, including nested ones, except those that call a collective.

    ``is_backward`` is 1 for operators of autograd's engine. If such an operator calls a collective, it is 1 for the
    other operators that it calls.
    """

    start_ns: Ints
    end_ns: Ints
    is_backward: Ints


@dataclass(frozen=True)
class UnresolvedNames:
    """How many kernels of a trace have no name, so that it is unknown whether they compute or communicate.

    They are ``kernels`` of ``of_kernels`` kernels; their durations sum to ``time_ns`` of ``of_time_ns``.
    """

    kernels: int
    of_kernels: int
    time_ns: int
    of_time_ns: int

    @property
    def share(self) -> float:
        """Their share of all kernels or of the time, whichever is larger, from 0 to 1."""
        return max(self.kernels / max(1, self.of_kernels), self.time_ns / max(1, self.of_time_ns))


@dataclass(frozen=True)
class Trace(Brief):
    """Everything read from one capture.

    Attributes:
        source: Format of the file; see :data:`SOURCE_NAMES`.
        producer: Version of the program that wrote the file, ``None`` if the file does not hold it: of an export, that
            of the nsys that exported it.
        recorder: Version of the nsys that recorded it, ``None`` if neither a report nor a manifest tells.
        names: The string table that every ``name_id`` refers to.
        threads: Known names of threads by (process, lane).
        names_autograd: Whether these include the names of all threads in which autograd ran.
        operators: When the host computed, for traces without activities of a device; else empty.
        sync_source: Source of the synchronizations: ``cuda_events``, ``event_sync_ids``, ``kineto``, ``call_order``
            (some at least are inferred) or ``none``.
        sync_reason: Why they are unknown or incomplete; ``None`` if they are known.
        inferred: Which synchronizations are inferred from the order of calls: of a wait its record, of a record its
            stream; ``None`` if none is.
        launching_calls: Row in ``calls`` of the call that launched each activity, ``UNKNOWN`` if it was not recorded.
            It is joined when the trace is built and kept by ``replace``; to replace the rows of activities or calls,
            pass ``launching_calls=None``, which joins again.
        is_launch: Which calls launched a kernel or a graph, so that an activity of theirs must have been recorded;
            ``None`` if the names of calls were not read.
        overlong: Rows of the activities whose recorded end is impossible; they end where the next one on their stream
            begins.
        has_ambiguous_launch: Which activities have several earlier calls with their number; the last one counts.
        shape_id: Index into ``names`` of each activity's launch shape, ``UNKNOWN`` if it has none. This, the
            ``registers`` per thread and ``call_details`` are ``None`` if launches were not read.
        has_subgroups: Whether the profiler recorded that the job has process groups of a part of its ranks.
        epoch_ns: UTC nanoseconds of the trace's time 0; ``None`` if unknown.
        warnings: Assumptions of the reader and facts that it could not find, a line each.
        platform: What the devices are programmed with, where it is known: ``rocm`` if they are AMD's.
        gpus, gpu_ids: Known names of GPUs, and the machine's numbers of GPUs, by (process, device).
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
    # Neither is None once the trace is built.
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
        if self.launching_calls is None:
            launching_calls, has_ambiguous_launch = join_launches(self.activities, self.calls)
            object.__setattr__(self, "launching_calls", launching_calls)
            object.__setattr__(self, "has_ambiguous_launch", has_ambiguous_launch)
        if len(self.launching_calls) != len(self.activities):
            raise ValueError("launching_calls were joined for other activities")

    @property
    def device(self) -> str:
        """``cuda``, or :attr:`platform`, if the trace holds activities of a device, else ``cpu``."""
        return self.platform if len(self.activities) else "cpu"

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """All processes that left an activity or a span, in ascending order."""
        tables = (self.activities, self.spans)
        return tuple(sorted({value for table in tables for value in distinct(table.process)}))

    @cached_property
    def unresolved_names(self) -> UnresolvedNames:
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
    """Whether the numbers of calls tell their order: those of each thread grow with time."""
    for process in distinct(calls.process):
        of_process = calls.process == process
        for thread in distinct(calls.lane[of_process]):
            rows = np.flatnonzero(of_process & (calls.lane == thread) & (calls.correlation != UNKNOWN))
            order = np.lexsort((calls.start_ns[rows], calls.correlation[rows]))
            if np.any(np.diff(calls.start_ns[rows[order]]) < 0):
                return False
    return True


def join_launches(activities: Activities, calls: Calls) -> tuple[Ints, Mask]:
    """Return the row in ``calls`` of the call that launched each activity, and whether several calls have its number.

    Process *and* correlation must match, because two processes use the same ids. If a process uses a number again, the
    last call before the activity counts::

        calls         5.......5........     both with number 5
        activities    ..5.......5......     each launched by the call before it

    If a runtime call and the driver call within it have the same number, the runtime call counts.
    """
    row, is_one_of_several = np.full(len(activities), UNKNOWN, np.int64), np.zeros(len(activities), np.bool_)
    for process in distinct(activities.process):
        asked, offered = _rows(activities.process == process), _rows(calls.process == process)
        keys, wanted = calls.correlation[offered], activities.correlation[asked]
        if not len(keys):
            continue
        order = None if np.all(keys[1:] >= keys[:-1]) else np.argsort(keys, kind="stable")
        ordered = keys if order is None else keys[order]
        if np.all(ordered[1:] != ordered[:-1]):
            at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
            found = np.where(ordered[at] == wanted, at if order is None else order[at], UNKNOWN)
        else:
            times = calls.start_ns[offered], activities.start_ns[asked]
            found, is_one_of_several[asked] = _last_before(keys, calls.lane[offered], wanted, *times)
        found[wanted == UNKNOWN] = UNKNOWN
        row[asked] = found if isinstance(offered, slice) else np.append(offered, UNKNOWN)[found]
    return row, is_one_of_several & (row != UNKNOWN)


def _rows(chosen: Mask) -> Ints | slice:
    """Return the chosen rows; if all are chosen a slice, which copies nothing."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _last_before(keys: Ints, lanes: Ints, wanted: Ints, call_ns: Ints, activity_ns: Ints) -> tuple[Ints, Mask]:
    """Return the position of the last call with each wanted key before its activity, and whether there are several.

    If there is none before, as clocks of host and device may differ, it is the first one after; ``UNKNOWN`` without any
    call with the key. A call that directly follows one with its key on its thread, with no activity of that key in
    between, counts as part of that call.
    """
    is_call = np.arange(len(keys) + len(wanted)) < len(keys)
    key, time = np.concatenate([keys, wanted]), np.concatenate([call_ns, activity_ns])
    order = np.lexsort((~is_call, time, key))
    key, time, is_call = key[order], time[order], is_call[order]
    on_thread = np.empty(len(keys), np.int64)
    on_thread[np.lexsort((call_ns, lanes))] = np.arange(len(keys))
    call = np.where(is_call, order, 0)
    is_part = np.zeros(len(order), np.bool_)
    is_part[1:] = is_call[1:] & is_call[:-1] & (key[1:] == key[:-1]) & (lanes[call[1:]] == lanes[call[:-1]])
    is_part[1:] &= (on_thread[call[1:]] == on_thread[call[:-1]] + 1) | (time[1:] == time[:-1])
    begins = is_call & ~is_part
    # Positions in this order: of the last call at or before each row, of the next call, of the first row with its key.
    place = np.arange(len(order))
    before = np.maximum.accumulate(np.where(begins, place, -1))
    after = np.minimum.accumulate(np.where(begins, place, len(order))[::-1])[::-1]
    first = np.searchsorted(key, key)
    has_before, has_after = before >= first, (after < len(order)) & (key[np.minimum(after, len(order) - 1)] == key)
    found = np.where(has_before, call[before], np.where(has_after, call[np.minimum(after, len(order) - 1)], UNKNOWN))
    calls_before = np.cumsum(begins) - np.append(0, np.cumsum(begins))[first]
    row, several = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.bool_)
    activity = order[~is_call] - len(keys)
    row[activity], several[activity] = found[~is_call], calls_before[~is_call] > 1
    return row, several
