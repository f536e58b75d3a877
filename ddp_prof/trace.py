"""The trace in the middle: three tables of columns that are never mixed.

``Activities`` are what a device did, ``Spans`` what the program said, ``Calls`` what the host asked of the device.
Times are int64 nanoseconds on the trace's own clock, half-open ``[start, end)``. A trace is never changed after it was
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import numpy as np

from ddp_prof.manifest import Manifest

# What a reader of traces needs of tables, too.
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
"""What torch calls the threads in which autograd computes backward, before their number."""

SYNC_IN_PARTS = "the capture was read in parts, in which waits are not followed"
"""Why dependencies are not known in a part of a capture."""

SOURCE_NAMES = {"nsys-sqlite": "nsys", "nsys-report": "nsys", "nsys-tables": "nsys", "kineto": "torch.profiler"}
"""The program that recorded a trace, as it is shown to users, where :attr:`Trace.source` does not name it."""


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
    UNKNOWN = 4  # a kernel whose name the trace does not tell


@dataclass(frozen=True)
class Activities(Table):
    """What a device did: a kernel, a copy, a memory set, a CUDA graph recorded whole.

    Attributes:
        device: CUDA ordinal, as the process counts.
        lane: CUDA stream id.
        name_id: Index into :attr:`Trace.names`.
        kind, category: A :class:`Kind` and a :class:`Category`.
        correlation: Id that the launching call carries too, unique within a process; ``UNKNOWN`` where none.
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
    """What the program said: a range of time with a name.

    Attributes:
        lane: Thread that opened the range.
        is_start_end: 1 for a start/end range, which may overlap others of its thread and end on another one;
            0 for a push/pop range, which nests.
        is_open: 1 for a range that was still open when recording stopped: its end is the last event of the capture,
            and nobody knows how long it would have lasted.
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
    """What the host asked: a CUDA API call that launched something; ``lane`` is the thread that made it."""

    start_ns: Ints
    process: Ints
    lane: Ints
    correlation: Ints


@dataclass(frozen=True)
class CallDetails(Table):
    """When each call ended, and its name without the version that CUDA adds; rows as those of :class:`Calls`."""

    end_ns: Ints
    name_id: Ints


class SyncKind(IntEnum):
    """What a call does to the order of work."""

    RECORD = 0  # marks a place in a stream
    STREAM_WAIT = 1  # a stream waits for such a place
    HOST_WAIT_EVENT = 2  # the host waits for such a place
    HOST_WAIT_STREAM = 3  # the host waits for all of a stream
    HOST_WAIT_DEVICE = 4  # the host waits for all of a device
    COPY = 5  # launches a copy, and may return only once it is done


@dataclass(frozen=True)
class Synchronizations(Table):
    """Calls that make a stream or the host wait, or may do so, and those that record the events waited for.

    Attributes:
        kind: A :class:`SyncKind`.
        start_ns: Start of the call on the host; ``end_ns`` its end. ``NO_TIME`` where only its effect was recorded.
        thread: Thread that made the call, ``UNKNOWN`` likewise.
        correlation: Number of the call; calls of a process are numbered in their order.
        stream: The stream that waits, that is waited for by the host, or that the event is recorded on.
        awaits: Of a wait for an event the row of its record, ``UNKNOWN`` where the trace does not tell it.
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


@dataclass(frozen=True)
class CollectiveMetadata(Table):
    """What is known of collectives beside their kernels, where the profiler noted it; ``UNKNOWN`` where not.

    Attributes:
        activity: Row in :class:`Activities` of what the collective launched.
        op_id: Index into :attr:`Trace.names` of the collective's name, as the profiler calls it.
        bytes: Size of the larger one of what goes in and what comes out.
        group_id: Index into :attr:`Trace.names` of the communicator's name, the same on all its ranks.
        sequence: Number of the collective within the communicator.
    """

    activity: Ints
    op_id: Ints
    bytes: Ints
    group_id: Ints
    group_size: Ints
    sequence: Ints


@dataclass(frozen=True)
class Overhead(Table):
    """When the profiler itself was at work, flushing its buffers and the like."""

    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class CollectiveCalls(Table):
    """When the host asked for collectives, by torch's operators of these names."""

    start_ns: Ints
    name_id: Ints


@dataclass(frozen=True)
class Operators(Table):
    """When the host computed: torch's operators, nested ones included, but for those that hold a collective's call.

    ``is_backward`` is 1 for what autograd's engine runs, itself; where that holds a call, for what it runs besides.
    """

    start_ns: Ints
    end_ns: Ints
    is_backward: Ints


@dataclass(frozen=True)
class UnresolvedNames:
    """How many kernels of a trace have no name, so that nobody knows whether they compute or communicate.

    They are ``kernels`` of all ``of_kernels``, and last ``time_ns`` of ``of_time_ns``, both sums of durations.
    """

    kernels: int
    of_kernels: int
    time_ns: int
    of_time_ns: int

    @property
    def share(self) -> float:
        """From 0 to 1: the share in number or in time, whichever is larger."""
        return max(self.kernels / max(1, self.of_kernels), self.time_ns / max(1, self.of_time_ns))


@dataclass(frozen=True)
class Trace(Brief):
    """Everything read from one capture.

    Attributes:
        source: Format of the file; see :data:`SOURCE_NAMES`.
        producer: The profiler's version, ``None`` where the file does not say.
        names: The string table that every ``name_id`` points into.
        threads: Name of a thread by (process, lane), where known.
        operators: When the host computed, where the trace holds nothing of a device; empty where it does not tell.
        collective_calls: When it asked for collectives, likewise.
        sync_source: Where synchronizations are from: ``cuda_events``, ``event_sync_ids``, ``kineto`` or ``none``.
        sync_reason: Why it is not known, or not all of it; ``None`` where it is.
        launching_calls: Row in ``calls`` of the call that launched each activity, ``UNKNOWN`` where the trace holds
            none. Joined when the trace is built, and kept by ``replace``: who replaces the rows of activities or calls
            must hand over ``None``, which joins again.
        shape_id: For each activity the index into ``names`` of its launch shape, ``UNKNOWN`` where it has none;
            ``None`` where shapes were not asked for.
        registers: For each activity the registers a thread of it uses; ``None`` where launches were not asked for, as
            is ``call_details``.
        epoch_ns: UTC nanoseconds of the trace's time 0; ``None`` where unknown.
        warnings: What the reader could not know or had to assume, a line each.
        gpus: Name of the GPU by (process, device), where the trace tells it.
        gpu_ids: The machine's number of the GPU likewise; the same for two processes that share it.
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
    operators: Operators = field(default_factory=lambda: empty(Operators))
    collective_calls: CollectiveCalls = field(default_factory=lambda: empty(CollectiveCalls))
    sync_source: str = "none"
    sync_reason: str | None = None
    launching_calls: Ints = None  # type: ignore[assignment]  # never None once the trace is built
    shape_id: Ints | None = None
    registers: Ints | None = None
    call_details: CallDetails | None = None
    world_size: int | None = None
    epoch_ns: int | None = None
    manifest: Manifest | None = None
    warnings: tuple[str, ...] = ()
    node: str | None = None
    gpus: Mapping[tuple[int, int], str] = field(default_factory=dict)
    gpu_ids: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.launching_calls is None:
            object.__setattr__(self, "launching_calls", join_launches(self.activities, self.calls)[0])
        if len(self.launching_calls) != len(self.activities):
            raise ValueError("launching_calls were joined for other activities")

    @cached_property
    def has_ambiguous_launch(self) -> Mask:
        """Mask of the activities with several earlier calls of their number; the last of these is taken."""
        is_one_number_each = all(
            _are_unique(self.calls.correlation[_rows(self.calls.process == process)])
            for process in distinct(self.calls.process)
        )
        nothing: Mask = np.zeros(len(self.activities), np.bool_)
        return nothing if is_one_number_each else join_launches(self.activities, self.calls)[1]

    @property
    def device(self) -> str:
        """``cuda`` where it holds activities of a device, else ``cpu``."""
        return "cuda" if len(self.activities) else "cpu"

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
        """From the first event to the last; 0 for a trace without any."""
        tables = [table for table in (self.activities, self.spans) if len(table)]
        return int(max(t.end_ns.max() for t in tables) - min(t.start_ns.min() for t in tables)) if tables else 0


def join_launches(activities: Activities, calls: Calls) -> tuple[Ints, Mask]:
    """Row in ``calls`` of the call that launched each activity, and whether that is one of several with its number.

    Joined on process *and* correlation: the ids of two processes collide. Where a process uses a number again, the last
    call before the activity counts::

        calls         5.......5........     both of number 5
        activities    ..5.......5......     each launched by the call before it

    Of a runtime call and the driver call in it, which may carry one number, the first counts.
    """
    row, is_one_of_several = np.full(len(activities), UNKNOWN, np.int64), np.zeros(len(activities), np.bool_)
    for process in distinct(activities.process):
        asked, offered = _rows(activities.process == process), _rows(calls.process == process)
        keys, wanted = calls.correlation[offered], activities.correlation[asked]
        if not len(keys):
            continue
        order = None if np.all(keys[1:] >= keys[:-1]) else np.argsort(keys, kind="stable")
        ordered = keys if order is None else keys[order]
        if _are_unique(ordered):
            at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
            found = np.where(ordered[at] == wanted, at if order is None else order[at], UNKNOWN)
        else:
            times = calls.start_ns[offered], activities.start_ns[asked]
            found, is_one_of_several[asked] = _last_before(keys, calls.lane[offered], wanted, *times)
        found[wanted == UNKNOWN] = UNKNOWN
        row[asked] = found if isinstance(offered, slice) else np.append(offered, UNKNOWN)[found]
    return row, is_one_of_several & (row != UNKNOWN)


def _are_unique(keys: Ints) -> bool:
    ordered = keys if np.all(keys[1:] >= keys[:-1]) else np.sort(keys)
    return bool(np.all(ordered[1:] != ordered[:-1]))


def _rows(chosen: Mask) -> Ints | slice:
    """The chosen rows; all of them as a slice, which copies nothing."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _last_before(keys: Ints, lanes: Ints, wanted: Ints, call_ns: Ints, activity_ns: Ints) -> tuple[Ints, Mask]:
    """Position of the last call with each wanted key before the activity, and whether others are before it, too.

    Where none is, as clocks of host and device may differ, it is the first one after it; ``UNKNOWN`` where none has it.
    A call that follows one of its key on its thread, with no activity of that key between, is a part of that one.
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
    # Places in the order: of the last call at or before each, of the next one after it, of the first of its key.
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
