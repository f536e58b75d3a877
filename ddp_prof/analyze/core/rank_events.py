"""The events of each rank with their steps and phases; all figures are measured from these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import numpy as np

from ddp_prof.analyze.core.attribution import (
    BACKWARD_PHASE,
    OPTIMIZER_PHASE,
    SYNCHRONIZE_PHASE,
    CollectiveRanges,
    Events,
    are_gloo_events,
    begin_with_copies,
    device_events,
    find_collective_ranges,
    find_operations,
    host_communication,
    host_events,
    last_by_step,
)
from ddp_prof.analyze.core.blocking import (
    NO_COPIES,
    NO_HOST_WAITS,
    RankBlocking,
    device_blocking,
    host_blocking,
    unknown_blocking,
)
from ddp_prof.analyze.core.edges import Dependencies, HostCalls, find_dependencies
from ddp_prof.analyze.core.operations import OperationParts, find_operation_parts
from ddp_prof.analyze.core.passes import Passes, find_passes, launch_or_start_ns, whole_passes
from ddp_prof.analyze.core.recording import CLOCKS, Recording, find_recording
from ddp_prof.analyze.core.step_breakdown import (
    Lead,
    StepBreakdown,
    StepTimes,
    covered_by_each,
    find_device_steps,
    measure_breakdown,
    measure_step_times,
    sum_by_group,
)
from ddp_prof.analyze.core.steps import (
    Phases,
    Steps,
    describe_ranges,
    find_phases,
    find_steps,
)
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.communication import OPERATIONS, POINT_TO_POINT
from ddp_prof.errors import TraceError
from ddp_prof.range_names import COLLECTIVES, PROCESS, parse_ranges
from ddp_prof.table import Brief, begins_run
from ddp_prof.trace import (
    HOST_WAITS,
    NO_TIME,
    UNKNOWN,
    Category,
    Ints,
    Kind,
    Mask,
    SyncKind,
    Trace,
    concatenate,
    distinct,
    distinct_rows,
    empty,
    select,
    take_or_unknown,
)
from ddp_prof.variants import VARIANTS

ONLY_WARMUP = "all steps of this trace are warm-up, which is left out (record more steps)"

ONLY_INCOMPLETE = "no step of this trace was recorded completely (record it again, with fewer steps)"

UNMARKED = "communication is the ranges of collectives: those without a range, such as barriers, are in no figure"


@dataclass(frozen=True)
class RankEvents(Brief):
    """One rank: a process and, on GPUs, one of its devices.

    Attributes:
        device: CUDA ordinal within the process, ``None`` on a CPU.
        events: Its events, without those of warm-up steps and of steps that were not recorded completely. If the
            clocks of host and device disagree, no launch has a time.
        steps: The measured steps. If no steps were found, one step without a number: the whole capture.
        recording: What was recorded of its process; it decides which steps count, and whether the clocks agree.
        is_followed: For each step, whether the next row of ``steps`` is the step that followed it.
        phases, collective_ranges: Ranges of the host, including those of warm-up steps.
        backward: How events were attributed to backward: ``ranges``, ``inferred`` (by thread) or ``none``.
        step_notes: What was left out or cut when steps and communication were found, a line each.
        with_warmup: The same rank including the steps that are left out, if there are any.
        incomplete_steps: Number of steps that were left out because they were not recorded completely.
        beside: The events of these steps.
        follows_lost: Which of its steps directly follow one of these.
        own_keys: The keys of its steps, if they are not those of ``steps`` because steps between them were left out.
        raised: How much is added to its step keys, because another rank's recording began earlier.
    """

    trace: Trace
    process: int
    device: int | None
    rank: int | None
    events: Events
    steps: Steps
    is_followed: Mask
    phases: Phases
    collective_ranges: CollectiveRanges
    has_steps: bool
    warmup_steps: int
    backward: str
    step_notes: tuple[str, ...]
    recording: Recording
    dependencies: Callable[[], Dependencies] = None  # type: ignore[assignment]  # never None once the rank is made
    with_warmup: RankEvents | None = None
    incomplete_steps: int = 0
    own_keys: Ints | None = None
    beside: Events | None = None
    follows_lost: Mask | None = None
    raised: int = 0
    _unions: dict[Category, Intervals] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def including_warmup(self) -> RankEvents:
        return self.with_warmup or self

    def rekey_steps(self, keys: Ints) -> RankEvents:
        """The rank with these keys for its measured steps; see :func:`.align_unnumbered_steps`.

        Steps without numbers, which are never warm-up, get their keys as numbers.
        """
        if not self.has_steps or np.array_equal(self.step_keys, keys):
            return self
        if np.all(self.steps.number == UNKNOWN) and self.own_keys is None:
            return replace(self, steps=replace(self.steps, number=keys))
        # Numbers repeat, so keys are positions.
        raised, whole = self.raised + int(keys[0] - self.step_keys[0]), self.with_warmup
        return replace(self, raised=raised, with_warmup=whole and replace(whole, raised=raised))

    def select_category(self, category: Category) -> Events:
        return select(self.events, self.events.category == category)

    def union_of(self, category: Category) -> Intervals:
        """When the rank did it. Compute and copies of steps that are left out count: they ran beside the others."""
        if category not in self._unions:
            events = select(self.events, self.events.category == category)
            if self.beside is not None and category != Category.COMMUNICATION:
                events = concatenate(events, select(self.beside, self.beside.category == category))
            self._unions[category] = union(events.start_ns, events.end_ns)
        return self._unions[category]

    @cached_property
    def breakdown(self) -> StepBreakdown:
        return measure_breakdown(self.events, self.steps, self.union_of, on_host=self.device is None)

    def time_by_part(self, window: Intervals) -> dict[str, Intervals]:
        """Divide a window by what the rank did in it, whichever step launched it; each instant is in one part."""
        compute, communication, memory = (
            self.union_of(category) & window for category in (Category.COMPUTE, Category.COMMUNICATION, Category.MEMORY)
        )
        busy = compute | communication
        return {
            "compute_only": compute - communication,
            "overlapped": communication & compute,
            "exposed": communication - compute,
            "exposed_memory": memory - busy,
            "idle": window - (busy | memory),
        }

    @cached_property
    def lead(self) -> Lead:
        """How far the host is ahead of the device in the steps.

        Work without a recorded launch counts for the step that began last before it.
        """
        events, steps = self.events, self.steps
        step = events.step.copy()
        alone = np.flatnonzero(step == UNKNOWN)
        alone = alone[take_or_unknown(self.trace.launching_calls, events.activity[alone]) == UNKNOWN]
        step[alone] = np.searchsorted(steps.start_ns, events.start_ns[alone], side="right") - 1
        rows = np.flatnonzero((step != UNKNOWN) & (events.activity != UNKNOWN))
        start, end, step = events.start_ns[rows], events.end_ns[rows], step[rows]
        work_ns = sum_by_group(end - start, step, len(steps))
        within_ns = np.maximum(0, np.minimum(end, steps.end_ns[step]) - np.maximum(start, steps.start_ns[step]))
        outside_ns = work_ns - sum_by_group(within_ns, step, len(steps))
        every = self.including_warmup.events
        on_device = every.activity != UNKNOWN
        held_ns = covered_by_each(every.start_ns[on_device], every.end_ns[on_device], steps.start_ns, steps.end_ns)
        next_ns = np.append(steps.start_ns[1:], NO_TIME)
        is_apart = np.flatnonzero(self.is_followed & (next_ns > steps.end_ns))
        between_ns = covered_by_each(start, end, steps.end_ns[is_apart], next_ns[is_apart])
        followed = find_device_steps(events, steps, self.is_followed)[2]
        columns = (work_ns, outside_ns, between_ns, held_ns, followed)
        return Lead(*(int(column.sum()) for column in columns))

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the host runs ahead of the device, so that the device's clock measures steps."""
        if self.clocks_disagree:  # then only periods of one clock are lengths
            return self.has_steps
        return self.has_steps and self.lead.is_ahead

    @cached_property
    def step_times(self) -> StepTimes:
        if not self.has_steps:
            return empty(StepTimes)
        device_follows = self.is_followed if self.runs_ahead else None
        phases = empty(Phases) if self.clocks_disagree else self.phases
        times = measure_step_times(self.events, self.steps, phases, self.union_of, device_follows)
        if self.follows_lost is None or device_follows is not None or not self.lead.outside_ns:
            return times
        # Work of a step reaches into the range of the next one, here also that of steps that were lost.
        lost = self.follows_lost
        parts = {name: np.where(lost, 0, getattr(times, name)) for name in StepTimes.__dataclass_fields__}
        parts |= {
            "start_ns": np.where(lost, NO_TIME, times.start_ns),
            "length_ns": np.where(lost, UNKNOWN, times.length_ns),
        }
        return StepTimes(**parts)

    @cached_property
    def blocking(self) -> RankBlocking:
        """How long its streams (on a CPU, its host) stood still for communication."""
        if self.clocks_disagree:
            return unknown_blocking(self.events, len(self.steps), CLOCKS)
        if self._lacks_copies:
            return unknown_blocking(self.events, len(self.steps), NO_COPIES)
        communicates = self.events.category == Category.COMMUNICATION
        if self.device is not None and not np.any(communicates & (self.events.activity == UNKNOWN)):
            return device_blocking(
                self.trace, self.dependencies(), self.host_calls, self.is_mine, self.events, self.steps
            )
        waits = int((self.phases.kind == SYNCHRONIZE_PHASE).sum())
        if not waits and communicates.any():
            return unknown_blocking(self.events, len(self.steps), NO_HOST_WAITS)
        waiting = self._find_host_waits()
        if self.device is not None:  # a device still computes what was launched before the host began to wait
            waiting -= self.union_of(Category.COMPUTE)
        return host_blocking(waiting, waits, self.events, len(self.steps))

    @property
    def may_block(self) -> Intervals | None:
        """Communication that may block, as launches tell: work waited on an idle stream, or the host waited.

        ``None`` if launches, copies or waits of the host are not recorded::

            collective    ..CCCCCCCC..
            kernels       kkk.......kk
            launches      ^.....^
            may block     ......####..
        """
        trace, events = self.trace, self.including_warmup.events
        calls, communicates = trace.synchronizations, events.category == Category.COMMUNICATION
        computes = np.isin(events.lane, distinct(events.lane[events.category == Category.COMPUTE]))
        rows = np.flatnonzero(~communicates & computes)
        waits = (calls.process == self.process) & np.isin(calls.kind, HOST_WAITS)
        if self.device is None or not waits.any() or self._lacks_copies:
            return None
        if NO_TIME in events.launch_ns[rows]:
            return None
        rows = rows[np.lexsort((events.start_ns[rows], events.lane[rows]))]
        lane, could_ns = events.lane[rows], events.launch_ns[rows]
        # Kernels of a CUDA graph have one launch, and need not run in an order.
        follows = (lane[1:] == lane[:-1]) & (could_ns[1:] > could_ns[:-1])
        np.maximum(could_ns[1:], events.end_ns[rows[:-1]], out=could_ns[1:], where=follows)
        start_ns, communication = events.start_ns[rows], self.union_of(Category.COMMUNICATION)
        waited = communication.covered_ns(could_ns, np.maximum(could_ns, start_ns)) > 0
        pending = union(could_ns[waited], start_ns[waited])
        return communication & (pending | union(calls.start_ns[waits], calls.end_ns[waits]))

    @property
    def _lacks_copies(self) -> bool:
        """Whether the process called for copies, and none was recorded."""
        calls, activities = self.trace.synchronizations, self.trace.activities
        is_called = np.any((calls.kind == SyncKind.COPY) & (calls.process == self.process))
        return bool(is_called and not np.any((activities.kind == Kind.COPY) & (activities.process == self.process)))

    def _find_host_waits(self) -> Intervals:
        """When the host waits for communication: in ``synchronize``.

        With gloo's own events it also waits, while no operator computes, for collectives launched outside of backward
        and for those whose result backward needs at once. If gradients have ranges of ours, all others are needed so.
        """
        waiting, ranges = self.phases.union_of(SYNCHRONIZE_PHASE), self.collective_ranges
        is_gloo = are_gloo_events(self.trace, ranges)
        if not is_gloo.any():
            return waiting
        in_backward = np.isin(self.events.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE))
        others = (self.events.category == Category.COMMUNICATION) & ~in_backward
        of_gradients = [OPERATIONS.index(name) for name in ("all_reduce", "reduce_scatter")]
        needed = ~np.isin(ranges.operation, of_gradients) | (is_gloo & ~is_gloo.all())
        waiting |= union(self.events.start_ns[others], self.events.end_ns[others])
        waiting |= union(ranges.launch_or_start_ns[needed], ranges.end_ns[needed])
        return waiting - self.union_of(Category.COMPUTE)

    @property
    def clocks_disagree(self) -> bool:
        """Whether no time between a call of the host and an activity of its device means anything."""
        return self.device is not None and self.recording.clocks_disagree

    @property
    def mixes_clocks(self) -> bool:
        """Whether the clocks disagree, and the host communicates while the device computes, as with gloo."""
        return self.clocks_disagree and bool(
            np.any((self.events.category == Category.COMMUNICATION) & (self.events.activity == UNKNOWN))
        )

    @property
    def why_left_out(self) -> str | None:
        """Why none of its steps is measured; ``None`` if some are, or if it has none."""
        if len(self.steps) or not (self.warmup_steps or self.incomplete_steps):
            return None
        return ONLY_INCOMPLETE if self.incomplete_steps else ONLY_WARMUP

    @property
    def is_lost(self) -> bool:
        """Whether its process launched work, and no activity of it was recorded."""
        recording = self.recording
        return self.device is None and recording.lost > 0 and recording.lost == recording.launches

    @property
    def hides_waits(self) -> bool:
        """Whether compute on a CPU may include waits for communication, because nothing marks the waits."""
        if self.device is not None or SYNCHRONIZE_PHASE in self.phases.kind:
            return False
        if self._has_operators:  # then operators count as compute, not phases
            return False
        return bool((self.union_of(Category.COMPUTE) & self.union_of(Category.COMMUNICATION)).length_ns)

    @property
    def _has_operators(self) -> bool:
        return len(self.trace.operators) >= len(self.collective_ranges)

    @property
    def hides_backward(self) -> bool:
        """Whether a rank on a CPU trains, or may train, and its backward is not known.

        A rank that communicates may train, unless its operators and the launches of all its collectives are known.
        """
        if self.device is not None or self.backward != "none":
            return False
        launch_ns = self.select_category(Category.COMMUNICATION).launch_ns
        is_recorded = self._has_operators and NO_TIME not in launch_ns
        trains = np.isin(self.phases.kind, (SYNCHRONIZE_PHASE, OPTIMIZER_PHASE)).any()
        return bool(trains or (len(launch_ns) and not is_recorded))

    @cached_property
    def host_calls(self) -> HostCalls:
        work = self.dependencies().in_order
        is_mine = self.is_mine[work]
        return HostCalls(self.trace, self.dependencies(), work if is_mine.all() else work[is_mine])

    @cached_property
    def is_backward(self) -> Mask:
        rows: Mask = (self.events.phase == BACKWARD_PHASE) & (self.events.category == Category.COMPUTE)
        return rows

    @cached_property
    def is_kernel(self) -> Mask:
        rows: Mask = take_or_unknown(self.trace.activities.kind, self.events.activity) == Kind.KERNEL
        return rows

    @cached_property
    def operation_parts(self) -> OperationParts:
        return find_operation_parts(self.trace, self.events)

    @property
    def is_collective(self) -> Mask:
        """Mask of the events that are counted as collectives: one of each operation."""
        return self.operation_parts.is_head

    @cached_property
    def gradient_threads(self) -> frozenset[int]:
        return frozenset(distinct(self.events.launcher[self.is_backward]))

    @property
    def is_mine(self) -> Mask:
        """Mask of the trace's activities that are the rank's, including warm-up."""
        activities = self.trace.activities
        mine: Mask = (activities.process == self.process) & (activities.device == self.device)
        return mine

    @cached_property
    def main_thread(self) -> int:
        """The thread that opens the ranges of steps; without steps, the process's first thread."""
        spans = self.trace.spans
        lanes = spans.lane[(spans.process == self.process) & np.isin(spans.start_ns, self.steps.start_ns)]
        threads, times = np.unique(lanes, return_counts=True)
        return int(threads[times.argmax()]) if len(lanes) and self.has_steps else self.process

    @cached_property
    def passes(self) -> Passes:
        """Passes of backward. In a capture without steps, which may contain many, there is one for all."""
        if not self.has_steps:
            return whole_passes(self.events, len(self.steps))
        phases, main = (empty(Phases) if self.clocks_disagree else self.phases), self.main_thread
        ranges = select(phases, phases.lane == main).union_of(BACKWARD_PHASE)
        return find_passes(self.events, len(self.steps), ranges, main, on_host=self.device is None)

    @cached_property
    def operation_rows(self) -> Ints:
        """Rows of the events that stand for operations of communication, ordered by step and launch."""
        rows, parts = np.flatnonzero(self.is_collective), self.operation_parts
        return rows[np.lexsort((parts.start_ns[rows], parts.launch_ns[rows], self.events.step[rows]))]

    @cached_property
    def operations(self) -> Events:
        """The operations of communication in the order of :attr:`operation_rows`, with the times of all parts."""
        rows = self.operation_rows
        parts = select(self.operation_parts, rows)
        return replace(
            select(self.events, rows), start_ns=parts.start_ns, end_ns=parts.end_ns, launch_ns=parts.launch_ns
        )

    @cached_property
    def pass_of_operation(self) -> Ints:
        """The row in :attr:`passes` of each of :attr:`operations`; ``UNKNOWN`` if its step has no known backward."""
        operations, passes = self.operations, self.passes
        is_point_to_point = np.zeros(len(operations), np.bool_)
        if passes.any_several:
            by_kernel = find_operations(self.trace, take_or_unknown(self.trace.activities.name_id, operations.activity))
            ranges = self.collective_ranges
            on_host = take_or_unknown(ranges.operation, ranges.launched_in(operations.start_ns))
            operation = np.where(operations.activity == UNKNOWN, on_host, by_kernel)
            is_point_to_point = operation == OPERATIONS.index(POINT_TO_POINT)
        return passes.of_launches(operations.step, operations.phase, launch_or_start_ns(operations), is_point_to_point)

    @property
    def backward_end_of_operation_ns(self) -> Ints:
        """End of the last compute in the pass of backward of each of :attr:`operations`; ``NO_TIME`` if not known.

        It is not known in a capture without steps, which may contain many passes.
        """
        if not self.has_steps:
            return np.full(len(self.operations), NO_TIME)
        return take_or_unknown(self.passes.end_ns, self.pass_of_operation, NO_TIME)

    @cached_property
    def inferred_backward(self) -> Phases:
        """The times, from first to last launch, in which autograd launched backward; empty if ranges mark backward.

        A launch of another phase ends such a time, so a step may have several. A capture without steps has none.
        """
        events = self.events
        known = (events.launch_ns != NO_TIME) & (events.phase != UNKNOWN) & (events.step != UNKNOWN)
        if self.backward != "inferred" or not self.has_steps or not known.any():
            return empty(Phases)
        events = select(events, np.flatnonzero(known)[np.argsort(events.launch_ns[known], kind="stable")])
        is_backward = events.phase == BACKWARD_PHASE
        first = np.flatnonzero(begins_run(is_backward, events.step))
        last = np.append(first[1:], len(events)) - 1
        first, last = first[is_backward[first]], last[is_backward[first]]
        return Phases(events.launch_ns[first], events.launch_ns[last], events.phase[first], events.launcher[first])

    @cached_property
    def compute_stream(self) -> int:
        """The stream with most compute time; ``UNKNOWN`` if there is none, as on a CPU."""
        rows = np.flatnonzero((self.events.category == Category.COMPUTE) & (self.events.lane != UNKNOWN))
        if not len(rows):
            return UNKNOWN
        lane = self.events.lane[rows]
        first, which = distinct_rows(lane)
        busy_ns = np.bincount(which, weights=self.events.end_ns[rows] - self.events.start_ns[rows])
        return int(lane[first[busy_ns.argmax()]]) if busy_ns.any() else UNKNOWN

    @cached_property
    def step_keys(self) -> Ints:
        """A unique number for each step; ``UNKNOWN`` in a capture without steps."""
        keys = self.own_keys if self.own_keys is not None else self.steps.keys if self.has_steps else self.steps.number
        return np.where(keys == UNKNOWN, UNKNOWN, keys + self.raised)

    def step_at(self, time_ns: Ints) -> Ints:
        """Key of the measured step whose host range contains each instant, ``UNKNOWN`` outside of all steps."""
        return take_or_unknown(self.step_keys, self.steps.index_at(time_ns))


def _find_launches(trace: Trace) -> frozenset[tuple[int, ...]]:
    """Return process, device, category and launching thread (or ``UNKNOWN``) of all activities."""
    activities, thread = trace.activities, take_or_unknown(trace.calls.lane, trace.launching_calls)
    columns = (activities.process, activities.device, activities.category, thread)
    first, _ = distinct_rows(*columns)
    return frozenset(zip(*(column[first].tolist() for column in columns), strict=True))


def find_rank_events(
    trace: Trace, step_range: str | None = None, backward_range: str | None = None
) -> tuple[RankEvents, ...]:
    """Return the ranks of a trace, ordered by rank, process and device.

    ``step_range`` and ``backward_range`` are the user's regular expressions, ``None`` for the usual names; a TraceError
    says that one of them matches no range.
    """
    launches = _find_launches(trace)
    on_devices = {process for process, *_ in launches}
    working = {(process, device) for process, device, category, _ in launches if category != Category.MEMORY}
    found: list[RankEvents] = []
    dependencies = cache(partial(find_dependencies, trace))  # all ranks share them
    for process in sorted({*trace.processes, *on_devices}):
        builder = _Builder(trace, process, step_range, backward_range, launches, dependencies)
        if process in on_devices:
            ranks = builder.device_ranks()
            # What only copies is no rank beside devices that work, for example the process of a data loader.
            at_work = [rank for rank in ranks if (process, rank.device) in working]
            found += at_work if at_work or (working and process not in trace.ranks) else ranks
        elif process in trace.ranks or not (on_devices or trace.ranks):
            found.append(builder.host_rank())
    for option, pattern, is_found in (
        ("--step-range", step_range, any(rank.has_steps or rank.step_notes for rank in found)),
        ("--backward-range", backward_range, any(BACKWARD_PHASE in rank.phases.kind for rank in found)),
    ):
        if pattern is not None and not is_found:
            reason = f"no range matches {option} '{pattern}'"
            raise TraceError(trace.path, reason, f"the ranges there are: {describe_ranges(trace)}")
    found.sort(key=lambda rank: (rank.rank is None, rank.rank or 0, rank.process, rank.device or 0))
    return tuple(map(_without_uncounted, found))


class _Builder:
    """Makes the ranks of one process."""

    def __init__(
        self,
        trace: Trace,
        process: int,
        step_range: str | None,
        backward_range: str | None,
        launches: frozenset[tuple[int, ...]],
        dependencies: Callable[[], Dependencies],
    ) -> None:
        self.trace, self.process = trace, process
        self.launches = [launch for owner, *launch in launches if owner == process]
        self.steps, self.step_notes = find_steps(trace, process, step_range)
        self.phases = find_phases(trace, process, backward_range)
        self.ranges = find_collective_ranges(trace, process, self.phases)
        self.dependencies = dependencies
        self._leave_out_unfinished_step()
        self.recording = find_recording(trace, process, self.steps)
        self.is_gloo = are_gloo_events(trace, self.ranges)
        if len(self.steps) and not self.is_gloo.all():  # beside ranges of ours, a barrier in warm-up does not count
            step = self.steps.index_at(self.ranges.launch_or_start_ns)
            is_measured = np.append(~self.steps.warmup, False)[step]  # the additional last element is for UNKNOWN
            counts = ~self.is_gloo | ((step != UNKNOWN) & np.any(self.is_gloo & is_measured))
            self.ranges, self.is_gloo = select(self.ranges, counts), self.is_gloo[counts]

    def _leave_out_unfinished_step(self) -> None:
        """Leave out the last step if it has no phase and all other steps have one: the program ended in it.

        This happens in loops in which a step begins as soon as the one before ends, as with torch.profiler. The range
        of an optimizer often reaches into the next step, since the hook that counts steps runs within it. Therefore a
        phase belongs to the last step only if they share half of the shorter one.
        """
        steps, phases = self.steps, self.phases
        if len(steps) < 2:
            return
        start_ns, end_ns = steps.start_ns[-1], steps.end_ns[-1]
        within_ns = np.minimum(phases.end_ns, end_ns) - np.maximum(phases.start_ns, start_ns)
        if np.any((within_ns > 0) & (2 * within_ns >= np.minimum(phases.end_ns - phases.start_ns, end_ns - start_ns))):
            return
        if np.isin(np.arange(len(steps) - 1), steps.index_at(phases.start_ns)).all():
            self.step_notes += (
                f"{self.steps.names[-1]} left out: it has no phase, so the program seems to have ended in it",
            )
            self.steps = select(self.steps, np.arange(len(self.steps) - 1))

    def device_ranks(self) -> list[RankEvents]:
        communicating, computing = (
            frozenset(thread for _, category, thread in self.launches if category == one and thread != UNKNOWN)
            for one in (Category.COMMUNICATION, Category.COMPUTE)
        )
        self.step_notes += self.recording.notes(self.steps.names)
        events, backward = device_events(self.trace, self.process, self.steps, self.phases, communicating, computing)
        if self.recording.clocks_disagree:
            events = replace(events, launch_ns=np.full(len(events), NO_TIME))
        device_of = self.trace.activities.device[events.activity]
        result = []
        for device in sorted({device for device, *_ in self.launches}):
            own = select(events, device_of == device)
            if not np.any(own.category == Category.COMMUNICATION) and "nccl" not in self._declared("backend"):
                # gloo with CUDA tensors: the host communicates
                self.ranges, without_copy = begin_with_copies(self.trace, self.ranges, self.phases)
                own = concatenate(own, host_communication(self.ranges, self.steps, self.phases))
                if len(self.ranges):
                    self.step_notes += (self._describe_copies(without_copy),)
            result.append(self._rank(device, own, backward))
        return result

    def host_rank(self) -> RankEvents:
        """The rank of a CPU run. Without our ranges, which separate waiting from computing, operators are used."""
        operators, backward = self.trace.operators, "ranges" if BACKWARD_PHASE in self.phases.kind else "none"
        is_ours = bool(self._declared("backend") or parse_ranges(self.trace.names, *COLLECTIVES))
        # If there are fewer operators than collectives, operators were not recorded completely.
        marks_waits = is_ours and SYNCHRONIZE_PHASE in self.phases.kind and not self.is_gloo.any()
        if 0 < len(self.ranges) <= len(operators) and not marks_waits:
            events = host_events(self.ranges, self.steps, self.phases, operators)
            if backward == "none" and operators.is_backward.any():
                backward = "inferred"
            communication = self._describe_gloo() or "the ranges of collectives"
            self.step_notes += (f"communication is {communication}; compute is torch's operators",)
        elif is_ours and not self.recording.lost:
            events = host_events(self.ranges, self.steps, self.phases)
            if communication := self._describe_gloo():
                self.step_notes += (f"communication is {communication}",)
            # Nsys records no events of gloo, and only our variants mark each of their collectives.
            elif len(self.ranges) and not len(operators) and not self._declared("variant") & VARIANTS.keys():
                self.step_notes += (UNMARKED,)
        else:
            events = empty(Events)
        return self._rank(None, events, backward)

    def _describe_copies(self, without_copy: int) -> str:
        """Say when communication of tensors on a GPU begins."""
        communication = self._describe_gloo() or "the ranges of collectives"
        if not without_copy:
            return f"communication is {communication}; each collective begins with its copy from the GPU to the host"
        return (
            f"communication is {communication}; its times may include waiting for the GPU: no copy to the host was "
            f"recorded for {without_copy:,} of {len(self.ranges):,} collectives"
        )

    def _describe_gloo(self) -> str:
        """Words for gloo's own events as the source of communication; empty if it is our ranges."""
        if not self.is_gloo.any():
            return ""
        is_by_caller = np.isin(self.trace.spans.lane[self.ranges.span[self.is_gloo]], self.phases.lane).any()
        begin = "is called" if is_by_caller else "is taken up by a thread of gloo"
        ours = "" if self.is_gloo.all() else "the ranges of collectives, and beside them "
        return f"{ours}the 'gloo:' events, each from when it {begin}"

    def _declared(self, field: str) -> set[str]:
        """The values of a field in the names of the ranges by which ddp_prof describes this process.

        A range without the field has an empty text.
        """
        ids = np.unique(self.trace.spans.name_id[self.trace.spans.process == self.process]).tolist()
        names = [self.trace.names[name_id] for name_id in ids]
        return {range_.text(field) or "" for range_ in parse_ranges(names, PROCESS).values()}

    def _rank(self, device: int | None, events: Events, backward: str) -> RankEvents:
        steps, has_steps = self.steps, bool(len(self.steps))
        if not has_steps and len(events):
            start_ns, end_ns = events.start_ns.min(keepdims=True), events.end_ns.max(keepdims=True)
            steps = Steps(np.array([UNKNOWN]), start_ns, end_ns, np.zeros(1, np.bool_))
            events = replace(events, step=np.zeros(len(events), np.int64))
        return RankEvents(
            trace=self.trace,
            process=self.process,
            device=device,
            rank=self.trace.ranks.get(self.process),
            events=events,
            steps=steps,
            is_followed=np.arange(1, len(steps) + 1) < len(steps),
            phases=self.phases,
            collective_ranges=self.ranges,
            has_steps=has_steps,
            warmup_steps=0,
            backward=backward,
            step_notes=self.step_notes,
            recording=self.recording,
            dependencies=self.dependencies,
        )


def _without_uncounted(rank: RankEvents) -> RankEvents:
    """The rank without warm-up steps and steps that were not recorded completely, and without their events."""
    is_incomplete = np.zeros(len(rank.steps), np.bool_)
    if rank.has_steps and rank.device is not None:
        is_incomplete = rank.recording.is_incomplete
        if is_incomplete.any():
            is_incomplete = is_incomplete | _run_beside_lost_work(rank, is_incomplete)
    measured: Mask = ~(rank.steps.warmup | is_incomplete)
    if measured.all():
        return rank
    renumbered = np.where(measured, np.cumsum(measured) - 1, UNKNOWN)
    events = select(rank.events, np.append(measured, True)[rank.events.step])
    return replace(
        rank,
        events=replace(events, step=take_or_unknown(renumbered, events.step)),
        steps=select(rank.steps, measured),
        is_followed=np.append(measured[1:], False)[measured],
        warmup_steps=int(rank.steps.warmup.sum()),
        incomplete_steps=int((is_incomplete & ~rank.steps.warmup).sum()),
        own_keys=rank.steps.keys[measured] if is_incomplete.any() else None,
        beside=select(rank.events, np.append(is_incomplete, False)[rank.events.step]) if is_incomplete.any() else None,
        follows_lost=np.append(False, is_incomplete[:-1])[measured] if is_incomplete.any() else None,
        with_warmup=rank,
    )


def _run_beside_lost_work(rank: RankEvents, is_incomplete: Mask) -> Mask:
    """Beside which whole steps work may have run of a step whose work was lost, in part or whole.

    That is not known of a step that was still at work on the device when a lost step began, nor, if steps of this rank
    overlap on the device, of one that follows a lost step::

        step 4 on the host    |------|
        step 4 on the device     ########
        step 5 on the host           |------|   its work was lost
        doubtful                     ####

    If the clocks of host and device disagree, both neighbours of a lost step are doubtful where steps overlap.
    """
    never = np.iinfo(np.int64).max
    begins_ns = np.where(is_incomplete, rank.steps.start_ns, never)
    next_lost_ns = np.append(np.minimum.accumulate(begins_ns[::-1])[::-1][1:], never)
    ended_ns = last_by_step(rank.events.end_ns, rank.events.step, len(rank.steps))
    rows = rank.events.step != UNKNOWN
    begun_ns = np.full(len(rank.steps), never)
    np.minimum.at(begun_ns, rank.events.step[rows], rank.events.start_ns[rows])
    pairs = ~is_incomplete[:-1] & ~is_incomplete[1:] & (begun_ns[1:] != never)
    overlap = np.any(pairs & (ended_ns[:-1] > begun_ns[1:]))
    follows = np.append(False, is_incomplete[:-1]) & overlap
    before = np.append(is_incomplete[1:], False) & overlap if rank.clocks_disagree else ended_ns > next_lost_ns
    doubtful: Mask = ~is_incomplete & (before | follows)
    return doubtful
