"""The times of each collective on one rank (ready, launch, start, end), and which collectives reduce gradients.

    gradient kernels  ###ggg|                        g computes the last gradient of the bucket, which is then ready
    host                        L                    the host launches the collective
    stream                          |CCCCCCCC|       the device (or gloo) works on it
                            ready   start    end

*Ready* is the end of backward's last kernel that the same thread launched before the collective. This is autograd's
thread, whose hook launches the collective. On a CPU it is the time of the hook itself, the start of ddp_prof's range.
On a GPU it is known only for collectives launched in backward, or after it and before the optimizer: collectives of
forward do not wait for gradients, nor do all-gathers and broadcasts, which carry parameters. It is not known in two
more cases:

- In a CUDA graph, because a single call launches all its kernels.
- If the collective began before that kernel ended: the gradient then belongs to another collective.

The *input* of a collective is the operation whose result it sends, such as the copy of gradients into a bucket, or the
compute before an all-gather in forward. It is inferred: a collective waits for the stream that is current at its
launch, and the last operation on that stream is the one that the same thread launched last.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ddp_prof.analyze.core.attribution import (
    BACKWARD_PHASE,
    OPTIMIZER_PHASE,
    SYNCHRONIZE_PHASE,
    CollectiveRanges,
    Events,
    Launched,
    find_operations,
    last_by_step,
)
from ddp_prof.analyze.core.operations import Pauses, find_pauses
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import DevicePhases, StepTimes, find_device_phases, sum_by_group
from ddp_prof.analyze.core.steps import Steps
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.result_bases import RankResult
from ddp_prof.analyze.why_unknown import lacks_names, loses_launches, why_unknown, why_unknown_work
from ddp_prof.communication import (
    ALL_GATHER,
    BROADCAST,
    DEVICE_BARRIER,
    OPERATIONS,
    PEER_COPY,
    POINT_TO_POINT,
)
from ddp_prof.range_names import parse_range
from ddp_prof.table import positions
from ddp_prof.trace import (
    NEVER,
    NO_TIME,
    UNKNOWN,
    Category,
    CollectiveMetadata,
    Ints,
    Kind,
    Mask,
    Table,
    Trace,
    distinct,
    distinct_rows,
    select,
    take_or_unknown,
)

BLOCKING = (None, "after_backward", "compute_stream")
"""Why the program waits for a collective: launched after backward, or on the compute stream; ``None``: it does not."""

PLACES = (None, "before_backward", "after_optimizer")
"""Where no gradient is reduced: before the first compute of backward, or after the last compute of the optimizer that
followed its pass of backward."""

FEW_BYTES = 64 * 1024
"""Below this size, a collective's duration hardly depends on its size."""

READY_SOURCES = ("kernel", "hook")
"""The source of the ready time: the end of the last gradient kernel, or the hook that launched the collective."""

_WITHOUT_GRADIENTS = [
    OPERATIONS.index(operation) for operation in (ALL_GATHER, BROADCAST, POINT_TO_POINT, PEER_COPY, DEVICE_BARRIER)
]
"""Operations that do not wait for gradients."""


@dataclass(frozen=True)
class CollectiveTimings(Table, Launched):
    """One row per collective, ordered by step and launch. Unknown values are ``UNKNOWN``, unknown times ``NO_TIME``.

    Attributes:
        step: Index into the rank's steps.
        lane: Stream on which it runs.
        ready_ns: When its gradients were ready, from the source ``ready_source``, an index into :data:`READY_SOURCES`.
        launch_ns: When the host launched it.
        phase: Phase that launched it, an index into ``range_names.PHASES``.
        blocking: Why the program waits for it, an index into :data:`BLOCKING`.
        operation: Index into ``communication.OPERATIONS``.
        bucket: Number of its bucket, from ddp_prof's range.
        bytes: Size of its message, from ddp_prof's range or, without a range, from the arguments that the profiler
            recorded.
        group: Communicator, an index into :attr:`RankCollectives.groups`.
        group_size: Number of ranks in the communicator.
        sequence: Its number within the group, if the profiler recorded it and no other collective of the group has it.
        input_ns: End of its input, which is not after its start.
        graph_input_ns: If a CUDA graph launched it beside other work, whose order is not recorded: the latest end of
            this work that may be its input, as it is not after its start.
        place: Where it was launched, an index into :data:`PLACES`; 0 in a capture without steps, and where the clocks
            of host and device disagree.
        backward_end_ns: End of the last compute in its pass of backward; not known in a capture without steps.
        updates: How much compute of optimizers had been launched before it: where this differs between two collectives,
            parameters were updated between them.
        blocking_ns: How long streams (on a CPU: the host) stood still for it.
        slack_ns, held_by: See ``blocking.Consumers``.
        consumer: Name of what needs it first, an index into :attr:`RankCollectives.consumers`.
        consumer_lane, consumer_start_ns: Stream and start of its consumer.
        consumer_bytes: Size of its consumer if that is a copy.
        needed_by_backward: 1 if its consumer is compute of backward, or other compute on the stream with most compute
            that backward goes on behind, such as that of an optimizer that steps in backward; else 0.
    """

    step: Ints
    lane: Ints
    ready_ns: Ints
    ready_source: Ints
    launch_ns: Ints
    start_ns: Ints
    end_ns: Ints
    phase: Ints
    blocking: Ints
    operation: Ints
    bucket: Ints
    bytes: Ints
    group: Ints
    group_size: Ints
    sequence: Ints
    input_ns: Ints
    graph_input_ns: Ints
    place: Ints
    backward_end_ns: Ints
    updates: Ints
    blocking_ns: Ints
    slack_ns: Ints
    consumer: Ints
    consumer_lane: Ints
    consumer_start_ns: Ints
    consumer_bytes: Ints
    needed_by_backward: Ints
    held_by: Ints

    @property
    def index(self) -> Ints:
        """The position of each collective in its step, from 0."""
        return np.arange(len(self)) - np.searchsorted(self.step, self.step, side="left")


@dataclass(frozen=True)
class RankCollectives(RankResult):
    """The collectives of one rank, and everything else that is needed to compare ranks; see also ``RankEvents``.

    Attributes:
        clock: The file; ranks read from the same file share a clock.
        epoch_ns: UTC nanoseconds of the clock's 0, ``None`` if unknown.
        groups: Names of communicators.
        consumers: Names of the operations that need collectives.
        step_numbers: Number of each step, ``UNKNOWN`` if it has none.
        step_keys: See ``Steps.keys``. A capture without steps is step 0, or no step if other ranks have steps.
        times: How long its steps took; no rows in a capture without steps.
        begins_on_host: Whether its steps begin where their ranges on the host do, not with their work on the device.
        host_waits: How often its host waited until a collective ended.
        compute: Compute of the rank, at least all that overlaps its collectives.
        pauses: When its collectives paused.
        reason: Why its overlapped communication is not known; ``None`` if it is.
        loses_launches: Whether so many launches of its communication are lost that its steps get no figures.
        unknown_work: Why its events are not known; ``None`` if they are, even if there are none.
        lacks_names: Whether its kernels have no names, so that it is not known which of them communicate.
        lost_share: Which fraction of all launches of its process seems to be lost one by one; 0 if that is not known.
    """

    process: int
    device: int | None
    rank: int | None
    clock: Path
    epoch_ns: int | None
    world_size: int | None
    timings: CollectiveTimings
    groups: tuple[str, ...]
    step_numbers: Ints
    step_keys: Ints
    device_phases: DevicePhases
    compute: Intervals
    times: StepTimes
    compute_stream: int
    has_subgroups: bool
    pauses: Pauses
    qualifier: str = ""
    of_several: bool = False
    reason: str | None = None
    loses_launches: bool = False
    unknown_work: str | None = None
    consumers: tuple[str, ...] = ()
    host_waits: int = 0
    clocks_disagree: bool = False
    lacks_names: bool = False
    lost_share: float = 0.0
    begins_on_host: bool = True

    @property
    def marks_steps(self) -> bool:
        """Whether steps were found in the rank's trace."""
        return len(self.times) == len(self.step_keys)

    @property
    def step_names(self) -> dict[int, str]:
        """The name of each step by its key."""
        numbers = np.where(self.step_numbers == UNKNOWN, self.step_keys, self.step_numbers)
        return dict(zip(self.step_keys.tolist(), Steps.from_numbers(numbers).names, strict=True))

    @cached_property
    def keys(self) -> Ints:
        """The key of each collective's step, ``UNKNOWN`` outside of all steps."""
        return take_or_unknown(self.step_keys, self.timings.step)

    def sum_by_step(self, values: Ints) -> tuple[Ints, Ints]:
        """Return the keys of the steps with collectives, and the sum of the collectives' values in each such step."""
        is_in_step = self.keys != UNKNOWN
        key, which = np.unique(self.keys[is_in_step], return_inverse=True)
        return key, sum_by_group(values[is_in_step], which, len(key))


def consumer_activities(rank: RankEvents) -> Ints:
    """Return, for each collective, the earliest activity on the device that depends on its result.

    The result holds rows of the trace's activities, ``UNKNOWN`` where none is known, in the order of
    ``rank.operation_rows``.
    """
    blocking = rank.blocking
    return take_or_unknown(blocking.consumers.consumer, blocking.consumer_of_event[rank.operation_rows])


def find_timings(rank: RankEvents) -> RankCollectives:
    """Return the collectives of a rank with their times, and everything else that is needed to compare ranks."""
    trace = rank.trace
    rows, events = rank.operation_rows, rank.operations
    names, needs = _consumer_columns(rank, rows)
    # What the profiler recorded of each collective besides its kernel; ``UNKNOWN`` where it recorded nothing.
    at = take_or_unknown(positions(trace.collective_metadata.activity, len(trace.activities)), events.activity)
    recorded = CollectiveMetadata(
        *(take_or_unknown(getattr(trace.collective_metadata, one.name), at) for one in fields(CollectiveMetadata))
    )
    # `follows`: launched after backward and in no phase. `row`: the host's range in which each collective was launched.
    blocking = _find_blocking_reason(rank, events)
    follows = (blocking == BLOCKING.index("after_backward")) & (events.phase == UNKNOWN)
    ranges = rank.collective_ranges
    row = np.where(events.activity == UNKNOWN, _ranges_of_host(ranges, events), ranges.launched_in(events.launch_ns))
    operation = _find_operations(trace, events, recorded, take_or_unknown(ranges.operation, row))
    of_gradients = np.isin(events.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE)) | follows
    of_gradients &= ~np.isin(operation, _WITHOUT_GRADIENTS)
    ready, source = _find_ready_times(rank, events, of_gradients)
    own_bytes = take_or_unknown(ranges.bytes, row)
    groups, group = _find_groups(trace, recorded.group_id, take_or_unknown(ranges.named_by, row))
    timings = CollectiveTimings(
        step=events.step,
        lane=events.lane,
        ready_ns=ready,
        ready_source=source,
        launch_ns=events.launch_ns,
        start_ns=events.start_ns,
        end_ns=events.end_ns,
        phase=events.phase,
        blocking=blocking,
        operation=operation,
        bucket=take_or_unknown(ranges.bucket, row),
        bytes=np.where(own_bytes != UNKNOWN, own_bytes, recorded.bytes),
        group=group,
        group_size=np.where(recorded.group_id == UNKNOWN, take_or_unknown(ranges.group_size, row), recorded.group_size),
        sequence=np.where(_repeats(recorded, events.start_ns), UNKNOWN, recorded.sequence),
        input_ns=_input_ends(rank, events),
        graph_input_ns=_graph_input_ends(rank, events),
        place=_find_places(rank),
        backward_end_ns=rank.backward_end_of_operation_ns,
        updates=_count_updates(rank.events, events),
        **needs,
    )
    return RankCollectives(
        process=rank.process,
        device=rank.device,
        rank=rank.rank,
        clock=trace.path,
        epoch_ns=trace.epoch_ns,
        world_size=trace.world_size,
        timings=timings,
        consumers=names,
        groups=groups,
        step_numbers=rank.steps.number,
        step_keys=rank.step_keys if rank.own_keys is not None else rank.steps.keys,
        device_phases=find_device_phases(rank.events, len(rank.steps)),
        compute=rank.union_of(Category.COMPUTE),
        times=rank.step_times,
        compute_stream=rank.compute_stream,
        has_subgroups=trace.has_subgroups,
        pauses=find_pauses(rank.events, rank.operation_parts),
        reason=why_unknown(rank),
        loses_launches=loses_launches(rank),
        unknown_work=why_unknown_work(rank),
        host_waits=rank.blocking.coverage.host_waits,
        clocks_disagree=rank.clocks_disagree,
        lacks_names=lacks_names(rank),
        lost_share=rank.recording.lost_share,
        begins_on_host=not rank.runs_ahead,
    )


def _count_updates(events: Events, operations: Events) -> Ints:
    """Return ``CollectiveTimings.updates``."""
    is_update = (events.category == Category.COMPUTE) & (events.phase == OPTIMIZER_PHASE)
    launched_ns = np.sort(events.launch_or_start_ns[is_update])
    return np.searchsorted(launched_ns, operations.launch_or_start_ns)


def _find_places(rank: RankEvents) -> Ints:
    """Return ``CollectiveTimings.place``."""
    events, operations = rank.events, rank.operations
    if not rank.has_steps or rank.clocks_disagree:
        return np.zeros(len(operations), np.int64)
    first, last = (
        take_or_unknown(column, rank.pass_of_operation, NO_TIME)
        for column in (rank.passes.first_ns, rank.passes.last_ns)
    )
    is_known = (operations.launch_ns != NO_TIME) & (first != NO_TIME)
    is_before = is_known & (operations.launch_ns < first)
    updates = (events.category == Category.COMPUTE) & (events.phase == OPTIMIZER_PHASE) & (events.launch_ns != NO_TIME)
    updates &= events.step != UNKNOWN
    updated = last_by_step(events.launch_ns[updates], events.step[updates], len(rank.steps))
    updated = take_or_unknown(updated, operations.step, NO_TIME)
    is_after = is_known & (updated > last) & (operations.launch_ns > updated)
    return np.select([is_before, is_after], [1, 2], 0)


def _ranges_of_host(ranges: CollectiveRanges, events: Events) -> Ints:
    """Return the row of the range from which each event of the host's communication was made.

    Such an event has the start and the end of its range, so these two times identify the range. A search for the range
    that is open at the start would miss a range whose start was moved to its end (with its copy). Other events get
    ``UNKNOWN``.
    """
    spans = zip(ranges.start_ns.tolist(), ranges.end_ns.tolist(), strict=True)
    rows = {span: row for row, span in enumerate(spans)}
    asked = zip(events.start_ns.tolist(), events.end_ns.tolist(), strict=True)
    return np.array([rows.get(span, UNKNOWN) for span in asked], np.int64)


def _find_groups(trace: Trace, recorded: Ints, named_by: Ints) -> tuple[tuple[str, ...], Ints]:
    """Return the names of the communicators, and for each collective the index of its communicator's name among them.

    - ``recorded``: Index into the trace's names of the name that the profiler recorded for each collective, or
      ``UNKNOWN``.
    - ``named_by``: Index of the name of ddp_prof's range that tells the communicator, used where none was recorded.
    """
    texts = {name_id: trace.names[name_id] for name_id in set(distinct(recorded)) - {UNKNOWN}}
    texts |= {
        name_id: parse_range(trace.names[name_id]).text("group") or ""
        for name_id in set(distinct(named_by[recorded == UNKNOWN])) - {UNKNOWN}
    }
    names = sorted(set(texts.values()))
    number = {UNKNOWN: UNKNOWN} | {name_id: names.index(text) for name_id, text in texts.items()}
    group = [number[name_id] for name_id in np.where(recorded == UNKNOWN, named_by, recorded).tolist()]
    return tuple(names), np.array(group, np.int64)


def trim_compute(found: RankCollectives, *, to_draw: bool) -> RankCollectives:
    """Return the rank without compute that is neither beside collectives nor in a gap of their queue.

    That changes neither exposed time nor the cost of a late rank, without which a collective would begin in the gap.

    With ``to_draw``, all compute is kept from the first known time of a step's collectives to their last end.
    """
    timings = found.timings
    kept = union(timings.start_ns - BACK_TO_BACK_NS, timings.end_ns + BACK_TO_BACK_NS)
    if to_draw and len(timings):
        steps, row = np.unique(timings.step, return_inverse=True)
        first, last = np.full(len(steps), NEVER), np.full(len(steps), NO_TIME)
        for time in (timings.ready_ns, timings.launch_ns, timings.start_ns):
            np.minimum.at(first, row[time != NO_TIME], time[time != NO_TIME])
        np.maximum.at(last, row, timings.end_ns)
        kept = union(first, last)
    return replace(found, compute=found.compute & kept)


def _consumer_columns(rank: RankEvents, rows: Ints) -> tuple[tuple[str, ...], dict[str, Ints]]:
    """Return what needs each collective first, and how long something stood still for it.

    Returns:
        The names of all consumers, and columns of ``CollectiveTimings`` by name; ``consumer`` is an index into the
        names.
    """
    blocking, activities = rank.blocking, rank.trace.activities
    needed = blocking.consumer_of_event[rows]
    consumer = consumer_activities(rank)
    name_id = take_or_unknown(activities.name_id, consumer)
    of_backward = np.zeros(len(activities) + 1, np.int64)  # the last element is for UNKNOWN, which is -1
    of_backward[rank.events.activity[rank.is_backward]] = 1
    of_backward[-1] = 0
    used = np.unique(name_id[name_id != UNKNOWN])
    consumer_lane = take_or_unknown(activities.lane, consumer)
    consumer_start_ns = take_or_unknown(activities.start_ns, consumer, NO_TIME)
    goes_on = (consumer_lane == rank.compute_stream) & (consumer_start_ns < rank.backward_end_of_operation_ns)
    goes_on &= (take_or_unknown(activities.category, consumer) == Category.COMPUTE) & (consumer != UNKNOWN)

    # A collective of several events is one row, that of its head: its blocking is that of all of them, or not known.
    head, by_event_ns = rank.operation_parts.head, blocking.by_event_ns
    parts = np.flatnonzero(head != UNKNOWN)
    by_collective_ns = sum_by_group(by_event_ns[parts], head[parts], len(head))
    by_collective_ns[head[parts[by_event_ns[parts] == UNKNOWN]]] = UNKNOWN

    return tuple(rank.trace.names[name] for name in used.tolist()), {
        "blocking_ns": by_collective_ns[rows],
        "slack_ns": take_or_unknown(blocking.consumers.slack_ns, needed, NO_TIME),
        "consumer": np.where(name_id == UNKNOWN, UNKNOWN, np.searchsorted(used, name_id)),
        "consumer_lane": consumer_lane,
        "consumer_start_ns": consumer_start_ns,
        "consumer_bytes": take_or_unknown(activities.bytes, consumer),
        "needed_by_backward": of_backward[consumer] | goes_on,
        "held_by": take_or_unknown(blocking.consumers.held_by, needed),
    }


def _find_ready_times(rank: RankEvents, events: Events, of_gradients: Mask) -> tuple[Ints, Ints]:
    """Return when the gradients of each collective were ready, and the source of that time (:data:`READY_SOURCES`).

    ``events`` are the collectives; ``of_gradients`` is a mask of those that may wait for gradients.
    """
    ready, source = np.full(len(events), NO_TIME), np.full(len(events), UNKNOWN)
    on_host = events.activity == UNKNOWN
    ready[on_host], source[on_host] = events.launch_ns[on_host], READY_SOURCES.index("hook")
    for launcher in np.unique(events.launcher[~on_host]).tolist():
        rows = np.flatnonzero(of_gradients & ~on_host & (events.launcher == launcher) & (events.step != UNKNOWN))
        # A thread that launches backward waits for its own gradients, another thread for those of all threads.
        gradients = rank.is_backward
        if launcher in rank.gradient_threads:
            gradients = gradients & (rank.events.launcher == launcher)
        ready[rows] = _end_of_last_before(rank.events, gradients, select(events, rows))
    source[~on_host & (ready != NO_TIME)] = READY_SOURCES.index("kernel")
    return ready, source


def _input_ends(rank: RankEvents, events: Events) -> Ints:
    """Return the end of each collective's input: the last operation of the step that its thread launched before it.

    ``events`` are the collectives. The result is ``NO_TIME`` where the input is not known.
    """
    ends = np.full(len(events), NO_TIME)
    is_input = (rank.events.category != Category.COMMUNICATION) & (rank.events.launch_ns != NO_TIME)
    in_step = (events.activity != UNKNOWN) & (events.step != UNKNOWN)
    for launcher in distinct(events.launcher[in_step]):
        rows = np.flatnonzero(in_step & (events.launcher == launcher))
        work = is_input & (rank.events.launcher == launcher)
        ends[rows] = _end_of_last_before(rank.events, work, select(events, rows))
    return ends


def _graph_input_ends(rank: RankEvents, events: Events) -> Ints:
    """Return ``CollectiveTimings.graph_input_ns``; ``events`` are the collectives."""
    trace, ends = rank.trace, np.full(len(events), NO_TIME)
    call = take_or_unknown(trace.launching_calls, rank.events.activity)
    call_of = take_or_unknown(trace.launching_calls, events.activity)
    works = (rank.events.category != Category.COMMUNICATION) & np.isin(call, call_of[call_of != UNKNOWN])
    for graph in distinct(call[works & (call != UNKNOWN)]):
        rows, end_ns = np.flatnonzero(call_of == graph), np.sort(rank.events.end_ns[works & (call == graph)])
        last = np.searchsorted(end_ns, events.start_ns[rows], side="right") - 1
        ends[rows] = take_or_unknown(end_ns, last, NO_TIME)
    return ends


def _end_of_last_before(events: Events, is_work: Mask, collectives: Events) -> Ints:
    """Return the end of the last work that was launched before each collective in its step.

    It is ``NO_TIME`` if there is none, if the work ended after the collective's start, or if the same call launched
    both (a CUDA graph).

    Args:
        events: The events of the rank.
        is_work: Mask of those that count as work.
        collectives: The collectives.
    """
    work = np.flatnonzero(is_work)
    work = work[np.lexsort((events.end_ns[work], events.launch_ns[work]))]
    last = take_or_unknown(work, np.searchsorted(events.launch_ns[work], collectives.launch_ns, side="right") - 1)
    end_ns = take_or_unknown(events.end_ns, last, NO_TIME)
    is_before = (take_or_unknown(events.launch_ns, last) < collectives.launch_ns) & (end_ns <= collectives.start_ns)
    return np.where((take_or_unknown(events.step, last) == collectives.step) & is_before, end_ns, NO_TIME)


def _find_blocking_reason(rank: RankEvents, events: Events) -> Ints:
    """Return why the program waits for each collective, as an index into :data:`BLOCKING`.

    A collective is "after backward" if it was launched in ``synchronize``, or outside of the phase backward and after
    the last launch of compute in its pass of backward.
    """
    last = take_or_unknown(rank.passes.last_ns, rank.pass_of_operation, NO_TIME)
    after = (last != NO_TIME) & (events.launch_ns > last) & (events.phase != BACKWARD_PHASE)
    on_compute_stream = (events.lane != UNKNOWN) & (events.lane == rank.compute_stream)
    after &= not rank.clocks_disagree  # it compares launches of the host with times of the device
    # If the launch of one of gloo's collectives is not known, it may have been in backward.
    after |= (events.phase == SYNCHRONIZE_PHASE) & (events.launch_ns != NO_TIME)
    codes = np.select([after, on_compute_stream], [1, 2], 0)  # the order of BLOCKING
    return codes.astype(np.int64)


def _repeats(recorded: CollectiveMetadata, start_ns: Ints) -> Mask:
    """Return which collectives have a sequence number that other collectives of their group have, too.

    Each replay of a CUDA graph repeats the numbers of its collectives.
    """
    # Sends have a count of their own, hence op_id. A collective may be in a trace twice, then with the same start.
    _, number = distinct_rows(recorded.group_id, recorded.op_id, recorded.sequence)
    apart, _ = distinct_rows(number, start_ns)
    return np.bincount(number[apart], minlength=1)[number] > 1


def _find_operations(trace: Trace, events: Events, recorded: CollectiveMetadata, by_range: Ints) -> Ints:
    """Return the operation of each collective as an index into ``communication.OPERATIONS``.

    It is the operation that the profiler recorded, else that of the kernel's name. If the kernel is unknown or
    ``SendRecv``, which NCCL uses for several operations, it is that of ddp_prof's range (``by_range``), if there is
    one.
    """
    by_kernel = find_operations(trace, take_or_unknown(trace.activities.name_id, events.activity))
    is_vague = (by_kernel == UNKNOWN) | (by_kernel == OPERATIONS.index(POINT_TO_POINT))
    by_name = np.where(is_vague & (by_range != UNKNOWN), by_range, by_kernel)
    by_profiler = find_operations(trace, recorded.op_id)
    found = np.where(by_profiler == UNKNOWN, by_name, by_profiler)
    is_copy = take_or_unknown(trace.activities.kind, events.activity) == Kind.COPY
    # A copy without a recorded span belongs to no collective: it is a copy between devices.
    return np.where(is_copy & (found == UNKNOWN) & (recorded.span == UNKNOWN), OPERATIONS.index(PEER_COPY), found)
