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
from ddp_prof.analyze.core.recording import CLOCKS, LEAST_ALIKE, Recording, find_recording, name_steps
from ddp_prof.analyze.core.step_breakdown import (
    Lead,
    StepBreakdown,
    StepTimes,
    covered_by_each,
    find_device_steps,
    find_windows,
    measure_breakdown,
    measure_step_times,
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
from ddp_prof.range_names import COLLECTIVES, PHASES, PROCESS, parse_ranges
from ddp_prof.table import Brief, begins_run, parts_of, rows_of
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

ONLY_BESIDE = "no step of this trace was recorded completely, with all that may have run beside it (record fewer steps)"

UNMARKED = "communication is the ranges of collectives: those without a range, such as barriers, are in no figure"


@dataclass(frozen=True)
class RankEvents(Brief):
    """One rank: a process and, on GPUs, one of its devices.

    Attributes:
        device: CUDA ordinal within the process, ``None`` on a CPU.
        rank: Number of the rank in the job; ``None`` if not known.
        events: Its events, without those of warm-up steps and of incomplete steps (that were not recorded completely).
            If the clocks of host and device disagree, no launch has a time.
        steps: The measured steps. If no steps were found, one step without a number: the whole capture.
        is_followed: For each step, whether the next row of ``steps`` is the step that followed it in the program.
        phases, collective_ranges: Ranges of the host, including those of warm-up steps.
        has_steps: Whether steps were found.
        warmup_steps: Number of steps that were left out because they are warm-up.
        backward: How events were attributed to backward: ``ranges``, ``inferred`` (by thread) or ``none``.
        step_notes: What was left out or cut when steps and communication were found, a line each.
        recording: What was recorded of its process; it decides which steps count, and whether the clocks agree.
        dependencies: Returns the dependencies between operations of the trace, which all ranks share.
        with_warmup: The same rank including the steps that are left out; ``None`` if no step is left out.
        incomplete_steps: Number of steps that were left out because they were not recorded completely.
        own_keys: The keys of its steps, if they are not ``steps.keys`` because incomplete steps were left out.
        beside: The events of the incomplete steps; ``None`` if there are none.
        follows_lost: For each step, whether an incomplete step directly precedes it; ``None`` if there are none.
        raised: A number that is added to its step keys, because another rank's recording began earlier.
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
        """The same rank including the steps that are left out; itself if no step is left out."""
        return self.with_warmup or self

    def rekey_steps(self, keys: Ints) -> RankEvents:
        """Return the rank with these keys for its measured steps, one per step; see :func:`.align_unnumbered_steps`.

        If its steps have no numbers, the keys become their numbers. Else all keys must differ from the present ones by
        the same amount.
        """
        if not self.has_steps or np.array_equal(self.step_keys, keys):
            return self
        if np.all(self.steps.number == UNKNOWN) and self.own_keys is None:
            return replace(self, steps=replace(self.steps, number=keys))
        # The numbers of the steps repeat, so keys are positions: the numbers stay, and all keys are raised by one
        # amount.
        raised, whole = self.raised + int(keys[0] - self.step_keys[0]), self.with_warmup
        return replace(self, raised=raised, with_warmup=whole and replace(whole, raised=raised))

    def select_category(self, category: Category) -> Events:
        """Return the events of this category."""
        return select(self.events, self.events.category == category)

    def union_of(self, category: Category) -> Intervals:
        """Return when the rank did work of this category.

        Compute and copies of incomplete steps count, too, because they ran beside the communication of other steps.
        """
        if category not in self._unions:
            found = self.events.union_of(category)
            if self.beside is not None and category != Category.COMMUNICATION:
                found |= self.beside.union_of(category)
            self._unions[category] = found
        return self._unions[category]

    @cached_property
    def breakdown(self) -> StepBreakdown:
        """What filled the window of each step."""
        return measure_breakdown(self.events, self.windows, self.union_of)

    @cached_property
    def windows(self) -> tuple[Ints, Ints]:
        """The start and the end of the window of each step; a window may be empty."""
        return find_windows(self.events, self.steps, on_host=self.device is None)

    def time_by_part(self, window: Intervals) -> dict[str, Intervals]:
        """Return a window divided by what the rank did in it: by the name of the part, when it was.

        It does not matter which step launched the work. Each instant of the window is in exactly one part.
        """
        compute, communication, memory = (
            self.union_of(category) & window for category in (Category.COMPUTE, Category.COMMUNICATION, Category.MEMORY)
        )
        return {
            "compute_only": compute - communication,
            "overlapped": communication & compute,
            "exposed": communication - compute,
            "exposed_memory": memory - compute - communication,
            "idle": window - compute - (communication | memory),
        }

    @cached_property
    def lead(self) -> Lead:
        """How far the host is ahead of the device in the steps.

        An operation whose launch was not recorded counts for the step that began last before it.
        """
        events, steps = self.events, self.steps
        followed = find_device_steps(events, steps, self.is_followed)[2]
        step = events.step.copy()
        alone = np.flatnonzero(step == UNKNOWN)
        alone = alone[take_or_unknown(self.trace.launching_calls, events.activity[alone]) == UNKNOWN]
        step[alone] = np.searchsorted(steps.start_ns, events.start_ns[alone], side="right") - 1
        rows = rows_of((step != UNKNOWN) & (events.activity != UNKNOWN))
        start, end, step = events.start_ns[rows], events.end_ns[rows], step[rows]
        work_ns = within_ns = 0
        for part in parts_of(len(step)):
            first_ns, last_ns, own = start[part], end[part], step[part]
            work_ns += int((last_ns - first_ns).sum())
            inside = np.minimum(last_ns, steps.end_ns[own]) - np.maximum(first_ns, steps.start_ns[own])
            within_ns += int(np.maximum(0, inside).sum())
        # By step: held_ns; by gap between two steps: between_ns.
        every = self.including_warmup.events
        on_device = rows_of(every.activity != UNKNOWN)
        held_ns = covered_by_each(every.start_ns[on_device], every.end_ns[on_device], steps.start_ns, steps.end_ns)
        next_ns = np.append(steps.start_ns[1:], NO_TIME)
        is_apart = np.flatnonzero(self.is_followed & (next_ns > steps.end_ns))
        between_ns = covered_by_each(start, end, steps.end_ns[is_apart], next_ns[is_apart])
        sums = (int(column.sum()) for column in (between_ns, held_ns, followed))
        return Lead(work_ns, work_ns - within_ns, *sums)

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the host runs ahead of the device, so that the device's clock measures the lengths of steps."""
        if self.clocks_disagree:  # only the time between two steps on the device can be measured
            return self.has_steps
        return self.has_steps and self.lead.is_ahead

    @cached_property
    def step_times(self) -> StepTimes:
        """How long each step took, and what ran meanwhile; no rows in a capture without steps."""
        if not self.has_steps:
            return empty(StepTimes)
        device_follows = self.is_followed if self.runs_ahead else None
        phases = empty(Phases) if self.clocks_disagree else self.phases
        times = measure_step_times(self.events, self.steps, phases, self.union_of, device_follows)
        if self.follows_lost is None or device_follows is not None or not self.lead.outside_ns:
            return times
        # Work of a step may reach into the host's range of the next step. That of an incomplete step was not recorded,
        # so what ran in the range of the step after it is not known.
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
        if self.lacks_copies:
            return unknown_blocking(self.events, len(self.steps), NO_COPIES)
        # If the device communicates, recorded dependencies tell what waits; if the host does, its own waits.
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
        """When communication may block something, as far as launches tell; no known dependencies are needed.

        That is communication while an operation had been launched, and its stream was idle, or while the host waited.
        ``None`` if launches, copies or waits of the host are not recorded::

            collective    ..CCCCCCCC..
            kernels       kkk.......kk
            launches      ^.....^         of the kernels
            may block     ......####..
        """
        trace, events = self.trace, self.including_warmup.events
        calls, communicates = trace.synchronizations, events.category == Category.COMMUNICATION
        computes = np.isin(events.lane, distinct(events.lane[events.category == Category.COMPUTE]))
        rows = np.flatnonzero(~communicates & computes)
        waits = (calls.process == self.process) & np.isin(calls.kind, HOST_WAITS)
        if self.device is None or not waits.any() or self.lacks_copies:
            return None
        if NO_TIME in events.launch_ns[rows]:
            return None
        # `could_ns`: when each operation could have started: after its launch and the operation before it on its
        # stream.
        rows = rows[np.lexsort((events.start_ns[rows], events.lane[rows]))]
        lane, could_ns = events.lane[rows], events.launch_ns[rows]
        # Kernels of a CUDA graph have the same launch, and need not run one after the other.
        follows = (lane[1:] == lane[:-1]) & (could_ns[1:] > could_ns[:-1])
        np.maximum(could_ns[1:], events.end_ns[rows[:-1]], out=could_ns[1:], where=follows)
        start_ns, communication = events.start_ns[rows], self.union_of(Category.COMMUNICATION)
        waited = communication.covered_ns(could_ns, np.maximum(could_ns, start_ns)) > 0
        pending = union(could_ns[waited], start_ns[waited])
        return communication & (pending | union(calls.start_ns[waits], calls.end_ns[waits]))

    @property
    def lacks_copies(self) -> bool:
        """Whether the process made calls that launch copies, and no copy was recorded."""
        calls, activities = self.trace.synchronizations, self.trace.activities
        is_called = np.any((calls.kind == SyncKind.COPY) & (calls.process == self.process))
        return bool(is_called and not np.any((activities.kind == Kind.COPY) & (activities.process == self.process)))

    def _find_host_waits(self) -> Intervals:
        """Return when the host waits for communication: in ``synchronize``.

        With gloo's own events, it also waits while no operator computes and a collective runs that it needs at once.
        These are collectives launched outside of backward, and operations that do not reduce gradients. If ddp_prof's
        ranges mark some collectives, these carry the gradients, so the host needs all other collectives at once.
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
        """Whether the clocks of host and device disagree: no time from a call to an activity means anything then."""
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
        if not self.incomplete_steps:
            return ONLY_WARMUP
        is_left_out = self.recording.is_incomplete | self.including_warmup.steps.warmup
        return ONLY_INCOMPLETE if is_left_out.all() else ONLY_BESIDE

    @property
    def is_lost(self) -> bool:
        """Whether its process launched work on a device, and no activity of this work was recorded."""
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
        """Whether torch's operators were recorded completely, as far as their number tells."""
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
        """The calls in which its host could wait for its device."""
        work = self.dependencies().in_order
        is_mine = self.is_mine[work]
        return HostCalls(self.trace, self.dependencies(), work if is_mine.all() else work[is_mine])

    @cached_property
    def is_backward(self) -> Mask:
        """Mask of the events that are compute of backward."""
        rows: Mask = (self.events.phase == BACKWARD_PHASE) & (self.events.category == Category.COMPUTE)
        return rows

    @cached_property
    def is_kernel(self) -> Mask:
        """Mask of the events that are kernels."""
        rows: Mask = take_or_unknown(self.trace.activities.kind, self.events.activity) == Kind.KERNEL
        return rows

    @cached_property
    def operation_parts(self) -> OperationParts:
        """To which operation of communication each event belongs."""
        return find_operation_parts(self.trace, self.events)

    @cached_property
    def is_collective(self) -> Mask:
        """Mask of the events that are counted as collectives: one event of each operation of communication."""
        return self.operation_parts.is_head

    @cached_property
    def gradient_threads(self) -> frozenset[int]:
        """The threads that launch compute of backward."""
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
        """The passes of backward. In a capture without steps, which may contain many passes, one row stands for all."""
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
        """The operations of communication in the order of :attr:`operation_rows`.

        The times are those of the whole operation, from its first to its last event.
        """
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
        """The times in which autograd launched backward, each from its first to its last launch.

        A launch of another phase ends such a time, so a step may have several. There are none if ranges mark backward,
        and in a capture without steps.
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
        """A unique number for each step, see ``Steps.keys``; ``UNKNOWN`` in a capture without steps."""
        keys = self.own_keys if self.own_keys is not None else self.steps.keys if self.has_steps else self.steps.number
        return np.where(keys == UNKNOWN, UNKNOWN, keys + self.raised)

    def step_at(self, time_ns: Ints) -> Ints:
        """Return the key of the measured step whose host range contains each time, ``UNKNOWN`` outside of all steps."""
        return take_or_unknown(self.step_keys, self.steps.index_at(time_ns))


def _find_launches(trace: Trace) -> frozenset[tuple[int, ...]]:
    """Return the combinations of process, device, category and launching thread (or ``UNKNOWN``) of all activities."""
    activities, thread = trace.activities, take_or_unknown(trace.calls.lane, trace.launching_calls)
    columns = (activities.process, activities.device, activities.category, thread)
    first, _ = distinct_rows(*columns)
    return frozenset(zip(*(column[first].tolist() for column in columns), strict=True))


def find_rank_events(
    trace: Trace, step_range: str | None = None, backward_range: str | None = None
) -> tuple[RankEvents, ...]:
    """Return the ranks of a trace, ordered by rank, process and device, without warm-up and incomplete steps.

    Args:
        trace: The trace.
        step_range: The user's regular expression for the names of steps; ``None`` for the usual names.
        backward_range: The same for the names of backward.

    Raises:
        TraceError: One of the two expressions matches no range.
    """
    launches = _find_launches(trace)
    on_devices = {process for process, *_ in launches}
    # The devices that compute or communicate; a process may use others only for copies.
    working = {(process, device) for process, device, category, _ in launches if category != Category.MEMORY}
    found: list[RankEvents] = []
    dependencies = cache(partial(find_dependencies, trace))  # all ranks share them
    for process in sorted({*trace.processes, *on_devices}):
        builder = _Builder(trace, process, step_range, backward_range, launches, dependencies)
        if process in on_devices:
            ranks = builder.device_ranks()
            # A device that only copies is no rank if other devices compute, for example that of a data loader.
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
    """Makes the ranks of one process.

    ``launches`` is what :func:`_find_launches` returns; the other arguments are those of :func:`find_rank_events`.
    """

    def __init__(
        self,
        trace: Trace,
        process: int,
        step_range: str | None,
        backward_range: str | None,
        launches: frozenset[tuple[int, ...]],
        dependencies: Callable[[], Dependencies],
    ) -> None:
        """Find the steps, phases and ranges of the process, and what was recorded of it."""
        self.trace, self.process = trace, process
        self.launches = [launch for owner, *launch in launches if owner == process]
        self.steps, self.step_notes = find_steps(trace, process, step_range)
        self.phases = find_phases(trace, process, backward_range)
        self.ranges = find_collective_ranges(trace, process, self.phases)
        self.dependencies = dependencies
        self._leave_out_unfinished_step()
        self.recording = find_recording(trace, process, self.steps, self.phases)
        self.is_gloo = are_gloo_events(trace, self.ranges)
        if len(self.steps) and not self.is_gloo.all():
            # Beside ranges of ddp_prof, gloo's own events count only in steps, and only if one lies in a measured step:
            # a barrier in warm-up does not count.
            step = self.steps.index_at(self.ranges.launch_or_start_ns)
            is_measured = np.append(~self.steps.warmup, False)[step]  # the additional last element is for UNKNOWN
            counts = ~self.is_gloo | ((step != UNKNOWN) & np.any(self.is_gloo & is_measured))
            self.ranges, self.is_gloo = select(self.ranges, counts), self.is_gloo[counts]

    def _leave_out_unfinished_step(self) -> None:
        """Drop the last step, with a note, if the program or the recording seems to have ended in it.

        That is so if it has no phase and all other steps have one, or if it lacks a phase that all other steps have, at
        least :data:`LEAST_ALIKE` of them. This happens in loops in which a step begins as soon as the one before ends,
        as with torch.profiler. The range of an optimizer often reaches into the next step, since the hook that counts
        steps runs within it. Therefore a phase belongs to the last step only if they share half of the shorter one.
        """
        steps, phases = self.steps, self.phases
        if len(steps) < 2:
            return
        start_ns, end_ns = steps.start_ns[-1], steps.end_ns[-1]
        within_ns = np.minimum(phases.end_ns, end_ns) - np.maximum(phases.start_ns, start_ns)
        shorter_ns = np.minimum(phases.end_ns - phases.start_ns, end_ns - start_ns)
        begins_in_last = (phases.start_ns >= start_ns) & (phases.start_ns < end_ns)
        is_of_last = ((within_ns > 0) | begins_in_last) & (2 * within_ns >= shorter_ns)  # it may take no time at all
        kinds = distinct(phases.kind) if len(steps) > LEAST_ALIKE else []
        for name, rows in (
            ("phase", np.ones(len(phases), np.bool_)),
            *((PHASES[kind], phases.kind == kind) for kind in kinds),
        ):
            others = steps.index_at(phases.start_ns[rows])
            if not is_of_last[rows].any() and np.isin(np.arange(len(steps) - 1), others).all():
                what = f"it has no {name}" + ("" if name == "phase" else ", as all other steps have")
                self.step_notes += (f"{steps.names[-1]} left out: {what}, so the program seems to have ended in it",)
                self.steps = select(steps, np.arange(len(steps) - 1))
                return

    def device_ranks(self) -> list[RankEvents]:
        """Return one rank for each device of the process, with its warm-up and incomplete steps."""
        # The threads that launch communication, and those that launch compute.
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
        """Return the rank of a CPU run, with its warm-up steps.

        If no ranges of ddp_prof separate waiting from computing, compute is the time of torch's operators.
        """
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
        """Return a note on when gloo's communication of tensors on a GPU begins.

        ``without_copy`` is the number of collectives that do not begin with a copy.
        """
        communication = self._describe_gloo() or "the ranges of collectives"
        if not without_copy:
            return f"communication is {communication}; each collective begins with its copy from the GPU to the host"
        return (
            f"communication is {communication}; its times may include waiting for the GPU: no copy to the host was "
            f"recorded for {without_copy:,} of {len(self.ranges):,} collectives"
        )

    def _describe_gloo(self) -> str:
        """Return words for gloo's own events as the source of communication; empty if there are none."""
        if not self.is_gloo.any():
            return ""
        is_by_caller = np.isin(self.trace.spans.lane[self.ranges.span[self.is_gloo]], self.phases.lane).any()
        begin = "is called" if is_by_caller else "is taken up by a thread of gloo"
        ours = "" if self.is_gloo.all() else "the ranges of collectives, and beside them "
        return f"{ours}the 'gloo:' events, each from when it {begin}"

    def _declared(self, field: str) -> set[str]:
        """Return the values of a field in the names of the ranges by which ddp_prof describes this process.

        A range without the field has an empty text.
        """
        ids = np.unique(self.trace.spans.name_id[self.trace.spans.process == self.process]).tolist()
        names = [self.trace.names[name_id] for name_id in ids]
        return {range_.text(field) or "" for range_ in parse_ranges(names, PROCESS).values()}

    def _rank(self, device: int | None, events: Events, backward: str) -> RankEvents:
        """Return a rank of the process with these events; without steps, one step contains all of them."""
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
            is_followed=_are_followed(steps),
            phases=self.phases,
            collective_ranges=self.ranges,
            has_steps=has_steps,
            warmup_steps=0,
            backward=backward,
            step_notes=self.step_notes,
            recording=self.recording,
            dependencies=self.dependencies,
        )


def _are_followed(steps: Steps) -> Mask:
    """Return for each step whether the next one followed it in the program.

    It did not if its number is further away than usual: steps between them are missing in the trace, as where the
    profiler paused.
    """
    number = steps.number
    by = np.diff(number)
    is_later = (number[1:] != UNKNOWN) & (number[:-1] != UNKNOWN) & (by > 0)
    is_far = is_later & (by > np.median(by[is_later], keepdims=True)) if is_later.any() else is_later
    return np.append(~is_far, False)[: len(steps)]


def _without_uncounted(rank: RankEvents) -> RankEvents:
    """Return the rank without warm-up steps and incomplete steps, and without their events.

    Complete steps that may have run beside the lost work of an incomplete step are left out with it.
    """
    is_incomplete, step_notes = np.zeros(len(rank.steps), np.bool_), rank.step_notes
    if rank.has_steps and rank.device is not None:
        is_incomplete = rank.recording.is_incomplete
        if is_incomplete.any():
            is_beside = _run_beside_lost_work(rank, is_incomplete)
            if (is_named := is_beside & ~rank.steps.warmup).any():
                which, beside = name_steps(rank.steps.names, is_named), "it" if is_named.sum() == 1 else "them"
                step_notes += (
                    f"{which} left out: work of a step that was recorded in part may have run beside {beside}",
                )
            is_incomplete = is_incomplete | is_beside
    measured: Mask = ~(rank.steps.warmup | is_incomplete)
    if measured.all():
        return rank
    # Index UNKNOWN (-1), an event outside of all steps, selects the appended last element: such events stay.
    renumbered = np.where(measured, np.cumsum(measured) - 1, UNKNOWN)
    step = _steps_of_events(rank, is_incomplete)
    events = select(rank.events, np.append(measured, True)[step])
    return replace(
        rank,
        events=replace(events, step=take_or_unknown(renumbered, events.step)),
        steps=select(rank.steps, measured),
        is_followed=np.append(measured[1:], False)[measured],
        warmup_steps=int(rank.steps.warmup.sum()),
        incomplete_steps=int((is_incomplete & ~rank.steps.warmup).sum()),
        own_keys=rank.steps.keys[measured] if is_incomplete.any() else None,
        beside=select(rank.events, np.append(is_incomplete, False)[step]) if is_incomplete.any() else None,
        follows_lost=np.append(False, is_incomplete[:-1])[measured] if is_incomplete.any() else None,
        with_warmup=rank,
        step_notes=step_notes,
    )


def _steps_of_events(rank: RankEvents, is_incomplete: Mask) -> Ints:
    """Return the step of each event; of one without a recorded launch, the incomplete step in which it began, if any.

    Other work of such a step may be lost, so what such an event ran beside is not known.
    """
    step = rank.events.step
    if not is_incomplete.any() or rank.clocks_disagree:
        return step
    rows = np.flatnonzero((step == UNKNOWN) & (rank.events.activity != UNKNOWN))
    rows = rows[rank.trace.launching_calls[rank.events.activity[rows]] == UNKNOWN]
    at = rank.steps.index_at(rank.events.start_ns[rows])
    found: Ints = step.copy()
    found[rows] = np.where(np.append(is_incomplete, False)[at], at, UNKNOWN)
    return found


def _run_beside_lost_work(rank: RankEvents, is_incomplete: Mask) -> Mask:
    """Return a mask of the complete steps beside which work of an incomplete step may have run, which was lost.

    These are steps whose work on the device had not ended when an incomplete step began on the host. If steps of this
    rank overlap on the device, they are also steps that follow an incomplete step::

        step 4 on the host    |------|
        step 4 on the device     ########
        step 5 on the host           |------|   its work was lost
        doubtful                     ####       so step 4 is left out, too

    If the clocks of host and device disagree, both neighbours of an incomplete step are doubtful if steps overlap.
    """
    # When the next incomplete step after each step begins: the minimum of such starts, from the last step on.
    never = np.iinfo(np.int64).max
    begins_ns = np.where(is_incomplete, rank.steps.start_ns, never)
    next_lost_ns = np.append(np.minimum.accumulate(begins_ns[::-1])[::-1][1:], never)
    ended_ns = last_by_step(rank.events.end_ns, rank.events.step, len(rank.steps))
    rows = rank.events.step != UNKNOWN
    begun_ns = np.full(len(rank.steps), never)
    np.minimum.at(begun_ns, rank.events.step[rows], rank.events.start_ns[rows])
    # Whether two complete steps that follow each other overlap on the device.
    pairs = ~is_incomplete[:-1] & ~is_incomplete[1:] & (begun_ns[1:] != never)
    overlap = np.any(pairs & (ended_ns[:-1] > begun_ns[1:]))
    follows = np.append(False, is_incomplete[:-1]) & overlap
    before = np.append(is_incomplete[1:], False) & overlap if rank.clocks_disagree else ended_ns > next_lost_ns
    doubtful: Mask = ~is_incomplete & (before | follows)
    return doubtful
