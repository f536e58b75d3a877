"""The life of each collective on one rank: ready, launch, start, end; and which of them reduce gradients.

    gradient kernels  ###ggg|                        the last gradient of the bucket is ready
    host                 .      L                    the host launches the collective
    stream                          |CCCCCCCC|       the device (or gloo) works on it
                            ready   start    end

*Ready* is the end of the last kernel of backward that was launched before the collective was, by the same thread
(autograd's, whose hook launches the collective). On a CPU it is the hook's own time, the start of our range. It is
known of what backward launched, and of what follows it before the optimizer: what forward launches waits for no
gradient. Nor does an all-gather or a broadcast, as those of parameters. It is not known within a CUDA graph, whose
kernels are launched by one call, nor of what began earlier: there the gradient belongs to another collective.

*Input* is whatever feeds a collective, such as the copy of gradients into a bucket, or the compute before an all-gather
in forward. It is inferred: a collective waits for the stream that is current where it is launched, and the last
operation there is the one that the same thread launched last.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ddp_prof.analyze.core.attribution import (
    ALL_REDUCE,
    BACKWARD_PHASE,
    NOTIFY,
    OPERATIONS,
    POINT_TO_POINT,
    SYNCHRONIZE_PHASE,
    Events,
    find_operations,
    last_by_step,
)
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import DevicePhases, StepTimes, find_device_phases, sum_by_group
from ddp_prof.analyze.core.steps import Steps
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.quality import why_unknown, why_unknown_work
from ddp_prof.analyze.result_bases import RankResult
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import positions
from ddp_prof.trace import (
    NO_TIME,
    UNKNOWN,
    Category,
    CollectiveMetadata,
    Ints,
    Mask,
    Table,
    Trace,
    distinct,
    distinct_rows,
    select,
    take_or_unknown,
)

BLOCKING = (None, "after_backward", "compute_stream")
"""Why the program waits for a collective, ``None`` where it does not: launched after backward, on compute's stream."""

READY_SOURCES = ("kernel", "hook")
"""Where the time of readiness is from: the last gradient kernel's end, or the hook that launched the collective."""

_OF_NONE = [OPERATIONS.index(operation) for operation in ("all_gather", "broadcast", POINT_TO_POINT)]
"""Operations that wait for no gradient."""


@dataclass(frozen=True)
class CollectiveTimings(Table):
    """One row per collective, by step and then by launch. What the trace does not tell is ``UNKNOWN``, or ``NO_TIME``.

    Attributes:
        step: Index into the rank's steps.
        lane: CUDA stream; ``UNKNOWN`` on a CPU.
        ready_source: Index into :data:`READY_SOURCES`.
        phase: Phase that launched it, an index into ``range_names.PHASES``; ``UNKNOWN`` outside of any.
        blocking: Index into :data:`BLOCKING`: whether the program waits for it before it goes on, so that by design it
            hides under nothing that comes later.
        operation: Index into ``attribution.OPERATIONS``.
        bucket, bytes: From our range; bytes else from the arguments that the profiler noted.
        group: Index into :attr:`RankCollectives.groups`; ``sequence`` is the number within it that the profiler noted.
        input_ns: When what feeds it ended; not after its start.
        slack_ns, held_by: As of ``blocking.Consumers``.
        consumer: Index into :attr:`RankCollectives.consumers` of the consumer's name.
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
    blocking_ns: Ints
    slack_ns: Ints
    consumer: Ints
    consumer_lane: Ints
    consumer_start_ns: Ints
    held_by: Ints

    @property
    def index(self) -> Ints:
        return np.arange(len(self)) - np.searchsorted(self.step, self.step, side="left")


@dataclass(frozen=True)
class RankCollectives(RankResult):
    """The collectives of one rank with what they are measured against; all that comparing ranks needs of a trace.

    Attributes:
        clock: The file; ranks read from one file share a clock.
        epoch_ns: UTC nanoseconds of the clock's 0, ``None`` where unknown.
        groups: Names of communicators; ``consumers`` those of operations that need collectives.
        step_numbers: The steps' own numbers, ``UNKNOWN`` where they carry none.
        step_keys: As of ``Steps.keys``; a capture without steps counts as step 0, beside ranks with steps as none.
        backward_end_ns: As of ``RankEvents``; ``host_waits`` as of ``DependencyCoverage``.
        compute: Compute of the rank, at least all that runs while its collectives do.
        reason: Why it is not known how much of its communication hides; ``None`` where it is.
        unknown_work: Why it is not known what it did; ``None`` where it is, even if that is nothing.
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
    backward_end_ns: Ints
    device_phases: DevicePhases
    compute: Intervals
    times: StepTimes
    qualifier: str = ""
    of_several: bool = False
    reason: str | None = None
    unknown_work: str | None = None
    consumers: tuple[str, ...] = ()
    host_waits: int = 0

    @property
    def marks_steps(self) -> bool:
        """Whether the trace tells steps, of which those of warm-up are not measured."""
        return len(self.times) == len(self.step_keys)

    @property
    def step_names(self) -> dict[int, str]:
        numbers = np.where(self.step_numbers == UNKNOWN, self.step_keys, self.step_numbers)
        return dict(zip(self.step_keys.tolist(), Steps.from_numbers(numbers).names, strict=True))

    @property
    def keys(self) -> Ints:
        """The key of each collective's step, ``UNKNOWN`` outside of any."""
        return take_or_unknown(self.step_keys, self.timings.step)

    def sum_by_step(self, values: Ints) -> tuple[Ints, Ints]:
        """The keys of the steps that have collectives, and the sum of their values in each."""
        is_in_step = self.keys != UNKNOWN
        key, which = np.unique(self.keys[is_in_step], return_inverse=True)
        return key, sum_by_group(values[is_in_step], which, len(key))


def collective_rows(rank: RankEvents) -> Ints:
    """Rows of a rank's events that are collectives, by step and then by launch."""
    events = rank.events
    rows = np.flatnonzero(events.category == Category.COMMUNICATION)
    return rows[np.lexsort((events.start_ns[rows], events.launch_ns[rows], events.step[rows]))]


def consumer_activities(rank: RankEvents) -> Ints:
    blocking = rank.blocking
    return take_or_unknown(blocking.consumers.consumer, blocking.consumer_of_event[collective_rows(rank)])


def find_timings(rank: RankEvents) -> RankCollectives:
    trace = rank.trace
    rows = collective_rows(rank)
    events = select(rank.events, rows)
    names, needs = _consumer_columns(rank, rows)
    told = take_or_unknown(positions(trace.collective_metadata.activity, len(trace.activities)), events.activity)
    noted = CollectiveMetadata(
        *(take_or_unknown(getattr(trace.collective_metadata, one.name), told) for one in fields(CollectiveMetadata))
    )
    groups = np.unique(noted.group_id[noted.group_id != UNKNOWN])
    blocking = _find_blocking_reason(rank, events)
    follows = (blocking == BLOCKING.index("after_backward")) & (events.phase == UNKNOWN)
    ranges = rank.collective_ranges
    row = ranges.launched_in(np.where(events.activity == UNKNOWN, events.start_ns, events.launch_ns))
    operation = _find_operations(trace, events, noted, take_or_unknown(ranges.operation, row))
    of_gradients = np.isin(events.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE)) | follows
    of_gradients &= ~np.isin(operation, _OF_NONE)
    ready, source = _find_ready_times(rank, events, of_gradients)
    own_bytes = take_or_unknown(ranges.bytes, row)
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
        bytes=np.where(own_bytes != UNKNOWN, own_bytes, noted.bytes),
        group=np.where(noted.group_id == UNKNOWN, UNKNOWN, np.searchsorted(groups, noted.group_id)),
        group_size=noted.group_size,
        sequence=noted.sequence,
        input_ns=_input_ends(rank, events),
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
        groups=tuple(trace.names[group] for group in groups.tolist()),
        step_numbers=rank.steps.number,
        step_keys=rank.steps.keys,
        backward_end_ns=rank.backward_end_ns,
        device_phases=find_device_phases(rank.events, len(rank.steps)),
        compute=rank.union_of(Category.COMPUTE),
        times=rank.step_times,
        reason=why_unknown(rank),
        unknown_work=why_unknown_work(rank),
        host_waits=rank.blocking.coverage.host_waits,
    )


def trim_compute(found: RankCollectives, *, to_draw: bool) -> RankCollectives:
    """Drop compute that does not run beside collectives; exposed time does not change.

    With ``to_draw`` what runs between the collectives of a step stays, too, from the first time known of any of them.
    """
    timings = found.timings
    kept = union(timings.start_ns, timings.end_ns)
    if to_draw and len(timings):
        steps, row = np.unique(timings.step, return_inverse=True)
        first, last = np.full(len(steps), np.iinfo(np.int64).max), np.full(len(steps), NO_TIME)
        for time in (timings.ready_ns, timings.launch_ns, timings.start_ns):
            np.minimum.at(first, row[time != NO_TIME], time[time != NO_TIME])
        np.maximum.at(last, row, timings.end_ns)
        kept = union(first, last)
    return replace(found, compute=found.compute & kept)


def _consumer_columns(rank: RankEvents, rows: Ints) -> tuple[tuple[str, ...], dict[str, Ints]]:
    blocking, activities = rank.blocking, rank.trace.activities
    needed = blocking.consumer_of_event[rows]
    consumer = consumer_activities(rank)
    name_id = take_or_unknown(activities.name_id, consumer)
    used = np.unique(name_id[name_id != UNKNOWN])
    return tuple(rank.trace.names[name] for name in used.tolist()), {
        "blocking_ns": blocking.by_event_ns[rows],
        "slack_ns": take_or_unknown(blocking.consumers.slack_ns, needed, NO_TIME),
        "consumer": np.where(name_id == UNKNOWN, UNKNOWN, np.searchsorted(used, name_id)),
        "consumer_lane": take_or_unknown(activities.lane, consumer),
        "consumer_start_ns": take_or_unknown(activities.start_ns, consumer, NO_TIME),
        "held_by": take_or_unknown(blocking.consumers.held_by, needed),
    }


def _find_ready_times(rank: RankEvents, events: Events, of_gradients: Mask) -> tuple[Ints, Ints]:
    """When the gradients of each collective were ready, and the source of this in :data:`READY_SOURCES`."""
    ready, source = np.full(len(events), NO_TIME), np.full(len(events), UNKNOWN)
    on_host = events.activity == UNKNOWN
    ready[on_host], source[on_host] = events.launch_ns[on_host], READY_SOURCES.index("hook")
    for launcher in np.unique(events.launcher[~on_host]).tolist():
        asked = np.flatnonzero(of_gradients & ~on_host & (events.launcher == launcher) & (events.step != UNKNOWN))
        gradients = rank.is_backward
        if launcher in rank.gradient_threads:
            gradients = gradients & (rank.events.launcher == launcher)
        ready[asked] = _end_of_last_before(rank.events, gradients, select(events, asked))
    source[~on_host & (ready != NO_TIME)] = READY_SOURCES.index("kernel")
    return ready, source


def _input_ends(rank: RankEvents, events: Events) -> Ints:
    """When what feeds each collective ended: what its thread launched last before it, of the same step."""
    ends = np.full(len(events), NO_TIME)
    is_input = (rank.events.category != Category.COMMUNICATION) & (rank.events.launch_ns != NO_TIME)
    asked = (events.activity != UNKNOWN) & (events.step != UNKNOWN)
    for launcher in distinct(events.launcher[asked]):
        rows = np.flatnonzero(asked & (events.launcher == launcher))
        work = is_input & (rank.events.launcher == launcher)
        ends[rows] = _end_of_last_before(rank.events, work, select(events, rows))
    return ends


def _end_of_last_before(events: Events, is_work: Mask, collectives: Events) -> Ints:
    """The end of the work that was launched last before each collective, in its step.

    ``NO_TIME`` where that is not done when the collective starts, or where one call launched both, as a graph's does.
    """
    work = np.flatnonzero(is_work)
    work = work[np.lexsort((events.end_ns[work], events.launch_ns[work]))]
    last = take_or_unknown(work, np.searchsorted(events.launch_ns[work], collectives.launch_ns, side="right") - 1)
    end_ns = take_or_unknown(events.end_ns, last, NO_TIME)
    is_before = (take_or_unknown(events.launch_ns, last) < collectives.launch_ns) & (end_ns <= collectives.start_ns)
    return np.where((take_or_unknown(events.step, last) == collectives.step) & is_before, end_ns, NO_TIME)


def _find_blocking_reason(rank: RankEvents, events: Events) -> Ints:
    """Launched while the host synchronizes, or, where no range tells that, after all of backward was launched."""
    launches, steps = rank.events.launch_ns[rank.is_backward], rank.events.step[rank.is_backward]
    last = take_or_unknown(last_by_step(launches, steps, len(rank.steps)), events.step, NO_TIME)
    after = (last != NO_TIME) & (events.launch_ns > last) & (events.phase != BACKWARD_PHASE)
    on_compute_stream = (events.lane != UNKNOWN) & (events.lane == rank.compute_stream)
    # One of gloo's whose launch is not known may have been launched in backward, and begun here.
    after |= (events.phase == SYNCHRONIZE_PHASE) & (events.launch_ns != NO_TIME)
    codes = np.select([after, on_compute_stream], [1, 2], 0)
    return codes.astype(np.int64)


def _find_operations(trace: Trace, events: Events, noted: CollectiveMetadata, by_range: Ints) -> Ints:
    """The operation as recorded, else by the kernel's name; by our range's name if that is unknown or send and receive.

    NCCL carries out several operations by its kernel ``SendRecv``.
    """
    by_kernel = find_operations(trace, take_or_unknown(trace.activities.name_id, events.activity))
    says_little = (by_kernel == UNKNOWN) | (by_kernel == OPERATIONS.index(POINT_TO_POINT))
    told = np.where(says_little & (by_range != UNKNOWN), by_range, by_kernel)
    by_note = find_operations(trace, noted.op_id)
    return np.where(by_note == UNKNOWN, told, by_note)


_REDUCTIONS = (UNKNOWN, OPERATIONS.index(ALL_REDUCE), OPERATIONS.index("reduce_scatter"))
"""Operations that gradients may be reduced by; ``UNKNOWN`` where the trace does not tell the operation."""


def carry_gradients(rank: RankCollectives) -> Mask:
    """Which collectives of a rank may be taken for reductions of gradients.

    A bucket of ours is one. Of others, a reduction that backward launched; or one that was launched after it, where
    backward launched none in the step: else it is that of a norm or a loss. Where forward, or what no range names
    before backward's first collective, launches half as many of the same, it is of tensors; fewer may be of a loss.
    Where no phase is known, as in a trace of inference, nothing says that it is of gradients.
    """
    timings = rank.timings
    is_reduction = np.isin(timings.operation, _REDUCTIONS)
    _, step = distinct_rows(timings.step)
    _, alike = distinct_rows(timings.step, timings.operation, timings.group)
    knows_backward = take_or_unknown(rank.backward_end_ns, timings.step, NO_TIME) != NO_TIME
    tells_phase = (timings.phase != UNKNOWN) & (timings.operation != OPERATIONS.index(NOTIFY))
    in_backward = timings.phase == BACKWARD_PHASE
    is_late = ~_are_with_any(step, is_reduction & in_backward)
    first_ns = np.full(int(step.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_ns, step[in_backward], timings.launch_ns[in_backward])
    is_early = (timings.phase == UNKNOWN) & (timings.launch_ns != NO_TIME) & (timings.launch_ns < first_ns[step])
    is_early = (is_early & _are_with_any(step, in_backward)) | (timings.phase == PHASES.index(FORWARD))
    early, late = (np.bincount(alike[rows], minlength=len(alike))[alike] for rows in (is_early, in_backward))
    of_tensors = (early > 0) & (2 * early >= late)
    is_launched_so = (in_backward | is_late) & ~of_tensors & _are_with_any(step, knows_backward | tells_phase)
    found: Mask = is_reduction & ((timings.bucket != UNKNOWN) | is_launched_so)
    return found


def _are_with_any(group: Ints, chosen: Mask) -> Mask:
    """Which rows have a chosen one in their group."""
    found: Mask = (np.bincount(group[chosen], minlength=int(group.max(initial=-1)) + 1) > 0)[group]
    return found
