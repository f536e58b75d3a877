"""The life of each collective on one rank: ready, launch, start, end.

    gradient kernels  ###ggg|                        the last gradient of the bucket is ready
    host                 .      L                    the host launches the collective
    stream                          |CCCCCCCC|       the device (or gloo) works on it
                            ready   start    end

*Ready* is the end of the last kernel of backward that was launched before the collective was, by the same thread
(autograd's, whose hook launches the collective). On a CPU it is the hook's own time, the start of our range. It is
known of what backward launched, and of what follows it before the optimizer: what forward launches waits for no
gradient. Nor does an all-gather or a broadcast, as those of parameters. It is not known within a CUDA graph, whose
kernels are launched by one call, nor of what began earlier: that kernel's gradient was another one's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE, last_by_step
from ddp_prof.analyze.core.device_phases import find_device_phases
from ddp_prof.analyze.core.operations import OPERATIONS, POINT_TO_POINT, operation_of
from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.quality.unknown_work import why_unknown
from ddp_prof.analyze.ranks import Ranked
from ddp_prof.trace import UNKNOWN, Category, CollectiveMetadata, Table, looked_up, select

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from ddp_prof.analyze.core.attribution import Events
    from ddp_prof.analyze.core.device_phases import DevicePhases
    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.core.step_breakdown import StepTimes
    from ddp_prof.analyze.intervals import Intervals
    from ddp_prof.trace import Ints, Mask, Trace

BLOCKING = (None, "after_backward", "compute_stream")
"""Why the program waits for a collective, ``None`` where it does not: launched after backward, on compute's stream."""

READY_SOURCES = ("kernel", "hook")
"""Where the time of readiness is from: the last gradient kernel's end, or the hook that launched the collective."""

_OF_NONE = [OPERATIONS.index(operation) for operation in ("all_gather", "broadcast", POINT_TO_POINT)]
"""Operations that wait for no gradient."""


@dataclass(frozen=True)
class CollectiveTimings(Table):
    """A row a collective, by step and then by launch. ``UNKNOWN`` stands for what the trace does not tell.

    Attributes:
        step: Index into the rank's steps.
        lane: CUDA stream; ``UNKNOWN`` on a CPU.
        ready_source: Index into :data:`READY_SOURCES`.
        phase: Phase that launched it, an index into ``range_names.PHASES``; ``UNKNOWN`` outside of any.
        blocking: Index into :data:`BLOCKING`: whether the program waits for it before it goes on, so that by design it
            hides under nothing that comes later.
        operation: Index into ``operations.OPERATIONS``.
        bucket, bytes: From our range; bytes else from the arguments that the profiler noted.
        group: Index into :attr:`RankCollectives.groups`.
        sequence: Number within the group, where the profiler noted it.
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

    @property
    def index(self) -> Ints:
        """The position of each in its step."""
        return np.arange(len(self)) - np.searchsorted(self.step, self.step, side="left")


@dataclass(frozen=True)
class RankCollectives(Ranked):
    """The collectives of one rank with what they are measured against; all that comparing ranks needs of a trace.

    Attributes:
        clock: The file; ranks read from one file share a clock.
        epoch_ns: UTC nanoseconds of the clock's 0, ``None`` where unknown.
        world_size: Ranks in the job, ``None`` where unknown.
        groups: Names of communicators.
        step_numbers: The steps' own numbers, ``UNKNOWN`` where they carry none.
        step_keys: A number for each step that no other one has; see ``Steps.keys``.
        backward_end_ns: End of the last compute of backward in each step, ``UNKNOWN`` where none is known, as in a
            capture without steps.
        device_phases: The phase of the rank at each instant.
        compute: Compute of the rank, at least all that runs while its collectives do.
        times: What filled its steps.
        reason: Why it is not known how much of its communication hides; ``None`` where it is.
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

    @property
    def keys_of_steps(self) -> Ints:
        """The key of each step; a capture without steps counts as step 0."""
        return np.where(self.step_keys == UNKNOWN, np.arange(len(self.step_keys)), self.step_keys)

    @property
    def keys(self) -> Ints:
        """The key of each collective's step, ``UNKNOWN`` outside of any."""
        return looked_up(self.keys_of_steps, self.timings.step)


def find_timings(rank: RankEvents) -> RankCollectives:
    """The collectives of a rank."""
    trace = rank.trace
    events = rank.of(Category.COMMUNICATION)
    events = select(events, np.lexsort((events.start_ns, events.launch_ns, events.step)))
    backward = select(rank.events, rank.is_backward)
    noted = _noted(trace.collective_metadata, events)
    groups = [int(group) for group in np.unique(noted.group_id) if group != UNKNOWN]
    return RankCollectives(
        process=rank.process,
        device=rank.device,
        rank=rank.rank,
        clock=trace.path,
        epoch_ns=trace.epoch_ns,
        world_size=trace.world_size,
        timings=_timings(rank, events, backward, noted, groups),
        groups=tuple(trace.names[group] for group in groups),
        step_numbers=rank.steps.number,
        step_keys=rank.step_keys,
        backward_end_ns=rank.backward_end_ns,
        device_phases=find_device_phases(rank.events, len(rank.steps)),
        compute=rank.union_of(Category.COMPUTE),
        times=rank.step_times,
        reason=why_unknown(rank),
    )


def beside_collectives(found: RankCollectives, *, to_draw: bool) -> RankCollectives:
    """The same with only that compute which runs while collectives do, of which no exposed time is lost.

    Args:
        found: The collectives of a rank.
        to_draw: Keep what runs between the collectives of a step, too, from the first time known of any of them.
    """
    timings = found.timings
    kept = union(timings.start_ns, timings.end_ns)
    if to_draw and len(timings):
        steps, row = np.unique(timings.step, return_inverse=True)
        first, last = np.full(len(steps), np.iinfo(np.int64).max), np.zeros(len(steps), np.int64)
        for time in (timings.ready_ns, timings.launch_ns, timings.start_ns):
            np.minimum.at(first, row[time != UNKNOWN], time[time != UNKNOWN])
        np.maximum.at(last, row, timings.end_ns)
        kept = union(first, last)
    return replace(found, compute=found.compute & kept)


def _timings(
    rank: RankEvents, events: Events, backward: Events, noted: CollectiveMetadata, groups: Sequence[int]
) -> CollectiveTimings:
    blocking = _blocking(rank, events, backward)
    follows = (blocking == BLOCKING.index("after_backward")) & (events.phase == UNKNOWN)
    ranges = rank.collective_ranges
    row = ranges.launched_in(events.launch_ns)
    operation = _operations(rank.trace, events, noted, looked_up(ranges.operation, row))
    of_gradients = (np.isin(events.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE)) | follows) & ~np.isin(
        operation, _OF_NONE
    )
    ready, source = _ready(events, backward, rank.gradient_threads, of_gradients)
    own_bytes = looked_up(ranges.bytes, row)
    group = np.searchsorted(np.array(groups, np.int64), noted.group_id)
    return CollectiveTimings(
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
        bucket=looked_up(ranges.bucket, row),
        bytes=np.where(own_bytes != UNKNOWN, own_bytes, noted.bytes),
        group=np.where(noted.group_id == UNKNOWN, UNKNOWN, group),
        group_size=noted.group_size,
        sequence=noted.sequence,
    )


def _ready(
    events: Events, backward: Events, gradient_threads: Collection[int], of_gradients: Mask
) -> tuple[Ints, Ints]:
    """When the gradients of each collective were ready, and by which of :data:`READY_SOURCES` that is known."""
    ready = np.full(len(events), UNKNOWN, np.int64)
    source = ready.copy()
    on_host = events.activity == UNKNOWN
    ready[on_host], source[on_host] = events.launch_ns[on_host], READY_SOURCES.index("hook")
    for launcher in np.unique(events.launcher[~on_host]).tolist():
        asked = np.flatnonzero(of_gradients & ~on_host & (events.launcher == launcher) & (events.step != UNKNOWN))
        gradients = select(backward, backward.launcher == launcher) if launcher in gradient_threads else backward
        gradients = select(gradients, np.argsort(gradients.launch_ns, kind="stable"))
        last = np.searchsorted(gradients.launch_ns, events.launch_ns[asked], side="right") - 1
        found = (last >= 0) & (looked_up(gradients.step, last) == events.step[asked])
        found &= looked_up(gradients.launch_ns, last) < events.launch_ns[asked]
        found &= looked_up(gradients.end_ns, last) <= events.start_ns[asked]
        ready[asked[found]] = gradients.end_ns[last[found]]
        source[asked[found]] = READY_SOURCES.index("kernel")
    return ready, source


def _blocking(rank: RankEvents, events: Events, backward: Events) -> Ints:
    """Launched while the host synchronizes, or, where no range tells that, after all of backward was launched."""
    last = looked_up(last_by_step(backward.launch_ns, backward.step, len(rank.steps)), events.step)
    after = (last != UNKNOWN) & (events.launch_ns > last) & (events.phase != BACKWARD_PHASE)
    on_compute_stream = (events.lane != UNKNOWN) & (events.lane == rank.compute_stream)
    codes = np.select([(events.phase == SYNCHRONIZE_PHASE) | after, on_compute_stream], [1, 2], 0)
    return codes.astype(np.int64)


def _noted(arguments: CollectiveMetadata, events: Events) -> CollectiveMetadata:
    """The arguments of each event, ``UNKNOWN`` all over where none were noted."""
    by_activity = {activity: row for row, activity in enumerate(arguments.activity.tolist())}
    rows = np.array([by_activity.get(activity, UNKNOWN) for activity in events.activity.tolist()], np.int64)
    return CollectiveMetadata(*(looked_up(getattr(arguments, column.name), rows) for column in fields(arguments)))


def _operations(trace: Trace, events: Events, noted: CollectiveMetadata, by_range: Ints) -> Ints:
    """As it was noted, else by the kernel's name; by our range's, where that tells nothing or send and receive.

    NCCL carries out several operations by its kernel ``SendRecv``.
    """

    def code(name_id: int) -> int:
        operation = operation_of(trace.names[name_id]) if name_id != UNKNOWN else None
        return UNKNOWN if operation is None else OPERATIONS.index(operation)

    def codes(name_ids: Ints) -> Ints:
        known = {value: code(value) for value in np.unique(name_ids).tolist()}
        return np.array([known[name_id] for name_id in name_ids.tolist()], np.int64)

    by_kernel = codes(looked_up(trace.activities.name_id, events.activity))
    says_little = (by_kernel == UNKNOWN) | (by_kernel == OPERATIONS.index(POINT_TO_POINT))
    told = np.where(says_little & (by_range != UNKNOWN), by_range, by_kernel)
    by_note = codes(noted.op_id)
    return np.where(by_note == UNKNOWN, told, by_note)
