"""The events of each rank with their steps and phases; all figures are measured from these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ddp_prof.analyze.core.attribution import (
    BACKWARD_PHASE,
    OPTIMIZER_PHASE,
    SYNCHRONIZE_PHASE,
    CollectiveRanges,
    Events,
    are_gloo_events,
    find_operations,
)
from ddp_prof.analyze.core.blocking import (
    NO_COPIES,
    NO_HOST_WAITS,
    NO_LAUNCHES,
    NO_SETS,
    NO_STREAMS,
    RankBlocking,
    device_blocking,
    host_blocking,
    unknown_blocking,
)
from ddp_prof.analyze.core.clocks import CLOCKS
from ddp_prof.analyze.core.edges import Dependencies, HostCalls
from ddp_prof.analyze.core.operations import OperationParts, find_operation_parts
from ddp_prof.analyze.core.passes import Passes, find_passes, whole_passes
from ddp_prof.analyze.core.recording import Recording, are_launched_earlier
from ddp_prof.analyze.core.reduced_gradients import need_reduced_gradients
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
from ddp_prof.analyze.core.steps import Phases, Steps
from ddp_prof.analyze.core.unlaunched import find_unlaunched
from ddp_prof.analyze.core.work import Work, find_work
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.communication import ALL_REDUCE, OPERATIONS, POINT_TO_POINT, REDUCE_SCATTER
from ddp_prof.table import Brief, at_rows, begins_run, is_among, is_in, parts_of, positions, rows_of
from ddp_prof.trace import (
    HOST_WAITS,
    NEVER,
    NO_TIME,
    UNKNOWN,
    Category,
    Ints,
    Kind,
    Mask,
    SyncKind,
    Trace,
    distinct,
    distinct_rows,
    empty,
    numbers_grow,
    select,
    take_or_unknown,
)

ONLY_WARMUP = "all steps of this trace are warm-up, which is left out (record more steps)"

ONLY_INCOMPLETE = "no step of this trace was recorded completely (record it again, with fewer steps)"

ONLY_BESIDE = "no step of this trace was recorded completely, with all that may have run beside it (record fewer steps)"


@dataclass(frozen=True)
class RankEvents(Brief):
    """One rank: a process and, on GPUs, one of its devices.

    Attributes:
        device: CUDA ordinal within the process, ``None`` on a CPU.
        rank: Number of the rank in the job; ``None`` if not known.
        events: Its events, without those of warm-up steps and of incomplete steps (that were not recorded completely,
            or did not end).
            If the clocks of host and device disagree, no launch has a time.
        steps: The measured steps. If no steps were found, one step without a number: the whole capture.
        is_followed: For each step, whether the next row of ``steps`` is the step that followed it in the program.
        phases, collective_ranges: Ranges of the host, including those of warm-up steps.
        has_steps: Whether steps were found.
        warmup_steps: Number of steps that were left out because they are warm-up.
        backward: How events were attributed to backward: ``ranges``, ``inferred`` (by thread) or ``none``.
        step_notes: What was left out or cut when steps and communication were found, a line each.
        ranges_left_out: Number of ranges of its process that have the name of a step and are left out.
        recording: What was recorded of its process; it decides which steps count, and whether the clocks agree.
        dependencies: Returns the dependencies between operations of the trace, which all ranks share.
        unfinished: When the program was in a step, behind those, that did not end.
        with_warmup: The same rank including the steps that are left out; ``None`` if no step is left out.
        incomplete_steps: Number of steps that were left out because they were not recorded completely.
        own_keys: The keys of its steps, if they are not ``steps.keys`` because incomplete steps were left out.
        beside: The events of the incomplete steps, and of one that did not end; ``None`` if there are none.
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
    ranges_left_out: int
    recording: Recording
    dependencies: Callable[[], Dependencies]
    unfinished: Intervals
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

        An operation whose launch was not recorded counts for the step that began last before it, unless it was launched
        after the last recorded call.
        """
        events, steps = self.events, self.steps
        followed = self.device_steps[2]
        step = events.step.copy()
        alone = np.flatnonzero(step == UNKNOWN)
        alone = alone[take_or_unknown(self.trace.launching_calls, events.activity[alone]) == UNKNOWN]
        alone = alone[~self._are_launched_later(events.activity[alone])]
        step[alone] = np.searchsorted(steps.start_ns, events.start_ns[alone], side="right") - 1
        rows = rows_of((step != UNKNOWN) & (events.activity != UNKNOWN))
        start, end, step = (at_rows(column, rows) for column in (events.start_ns, events.end_ns, step))
        work_ns = within_ns = 0
        for part in parts_of(len(step)):
            first_ns, last_ns, own = start[part], end[part], step[part]
            work_ns += int((last_ns - first_ns).sum())
            inside = np.minimum(last_ns, steps.end_ns[own]) - np.maximum(first_ns, steps.start_ns[own])
            within_ns += int(np.maximum(0, inside).sum())
        # By step: held_ns; by gap between two steps: between_ns. Columns of all events are held no longer than needed.
        del rows, step
        next_ns = np.append(steps.start_ns[1:], NO_TIME)
        is_apart = np.flatnonzero(self.is_followed & (next_ns > steps.end_ns))
        between_ns = covered_by_each(start, end, steps.end_ns[is_apart], next_ns[is_apart])
        del start, end
        every = self.including_warmup.events
        on_device = rows_of(every.activity != UNKNOWN)
        start, end = at_rows(every.start_ns, on_device), at_rows(every.end_ns, on_device)
        held_ns = covered_by_each(start, end, steps.start_ns, steps.end_ns)
        sums = (int(column.sum()) for column in (between_ns, held_ns, followed))
        return Lead(work_ns, work_ns - within_ns, *sums)

    def _are_launched_later(self, activities: Ints) -> Mask:
        """Return which activities (rows, or ``UNKNOWN``) of the rank were launched after its last recorded call.

        None if some of these began before that call, as their numbers are then none of the process.
        """
        calls, none = self.trace.calls, np.zeros(len(activities), np.bool_)
        if not len(activities) or not len(calls) or not numbers_grow(calls):
            return none
        last, last_ns = UNKNOWN, NO_TIME
        for part in parts_of(len(calls)):
            own = calls.process[part] == self.process
            last = max(last, int(calls.correlation[part][own].max(initial=UNKNOWN)))
            last_ns = max(last_ns, int(calls.start_ns[part][own].max(initial=NO_TIME)))
        later: Mask = take_or_unknown(self.trace.activities.correlation, activities) > last
        if last == UNKNOWN or np.any(self.trace.activities.start_ns[activities[later]] < last_ns):
            return none
        return later

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the host runs ahead of the device, so that the device's clock measures the lengths of steps."""
        if self.clocks_disagree:  # only the time between two steps on the device can be measured
            return self.has_steps
        return self.has_steps and self.lead.is_ahead

    @cached_property
    def device_steps(self) -> tuple[Ints, Ints, Mask]:
        """When each step begins on the device, when the next one does, and whether these times are a length."""
        return find_device_steps(self.events, self.steps, self.is_followed)

    @cached_property
    def step_times(self) -> StepTimes:
        """How long each step took, and what ran meanwhile; no rows in a capture without steps."""
        if not self.has_steps:
            return empty(StepTimes)
        phases = empty(Phases) if self.clocks_disagree else self.phases
        times = measure_step_times(self.steps, phases, self.union_of, self.device_steps if self.runs_ahead else None)
        # Else whether the host waited for the device is not known, nor what ran in its ranges.
        if self.is_unrecorded or self.units_differ:
            lost = np.ones(len(self.steps), np.bool_)
        elif self.follows_lost is None or self.runs_ahead or not self.lead.outside_ns:
            return times
        else:
            # Work of a step may reach into the host's range of the next step. That of an incomplete step was not
            # recorded, so what ran in the range of the step after it is not known.
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
        if self.lacks_sets:
            return unknown_blocking(self.events, len(self.steps), NO_SETS)
        if np.any((self.events.lane == UNKNOWN) & (self.events.activity != UNKNOWN)):
            return unknown_blocking(self.events, len(self.steps), NO_STREAMS)
        if self._lacks_launches:
            return unknown_blocking(self.events, len(self.steps), NO_LAUNCHES)
        # If the device communicates, recorded dependencies tell what waits; if the host does, its own waits.
        if self.device is not None and not self._host_communicates:
            return device_blocking(
                self.trace, self.dependencies(), self.host_calls, self.is_mine, self.events, self.steps
            )
        waits = int((self.phases.kind == SYNCHRONIZE_PHASE).sum())
        if not waits and np.any(self.events.category == Category.COMMUNICATION):
            return unknown_blocking(self.events, len(self.steps), NO_HOST_WAITS)
        waiting = self._find_host_waits()
        if self.device is not None:  # a device still computes what was launched before the host began to wait
            waiting -= self.union_of(Category.COMPUTE)
        return host_blocking(waiting, waits, self.events, len(self.steps))

    @property
    def may_block(self) -> Intervals | None:
        """When communication may block something, as far as launches tell; no known dependencies are needed.

        That is communication while an operation had been launched, and its stream was idle, or while the host waited.
        What was launched before the recording began may have been launched at any time. ``None`` if other launches, or
        copies or waits of the host, are not recorded; or if the host communicates, since CUDA does not record for what
        else it waits::

            collective    ..CCCCCCCC..
            kernels       kkk.......kk
            launches      ^.....^         of the kernels
            may block     ......####..
        """
        trace, events = self.trace, self.including_warmup.events
        calls, communicates = trace.synchronizations, events.category == Category.COMMUNICATION
        computes = np.isin(events.lane, distinct(events.lane[events.category == Category.COMPUTE]))
        rows = np.flatnonzero(~communicates & computes)
        waits = (calls.process == self.process) & is_in(calls.kind, HOST_WAITS)
        if self.device is None or not waits.any() or self.lacks_copies or self._host_communicates:
            return None
        unknown = rows[events.launch_ns[rows] == NO_TIME]
        if len(unknown) and not np.all(are_launched_earlier(trace)[events.activity[unknown]]):
            return None
        # `could_ns`: when each operation could have started: after its launch and the operation before it on its
        # stream.
        rows = rows[np.lexsort((events.start_ns[rows], events.lane[rows]))]
        lane, could_ns = events.lane[rows], events.launch_ns[rows]
        # Kernels of a CUDA graph have the same launch, and need not run one after the other.
        is_later = (could_ns[1:] > could_ns[:-1]) | (could_ns[1:] == NO_TIME)
        follows = (lane[1:] == lane[:-1]) & is_later
        np.maximum(could_ns[1:], events.end_ns[rows[:-1]], out=could_ns[1:], where=follows)
        start_ns, communication = events.start_ns[rows], self.union_of(Category.COMMUNICATION)
        waited = communication.covered_ns(could_ns, np.maximum(could_ns, start_ns)) > 0
        pending = union(could_ns[waited], start_ns[waited])
        return communication & (pending | union(calls.start_ns[waits], calls.end_ns[waits]))

    @property
    def _host_communicates(self) -> bool:
        """Whether the host communicates, as with gloo: such communication is no activity of a device."""
        is_of_host = self.events.activity == UNKNOWN
        return bool(np.any(is_of_host & (self.events.category == Category.COMMUNICATION)))

    @property
    def lacks_copies(self) -> bool:
        """Whether so many copies were lost that no figure that needs them is known; see :attr:`.hides_copies`."""
        return self.lacks_all_copies or self.recording.hides_copies

    @property
    def lacks_all_copies(self) -> bool:
        """Whether the process made calls that launch copies, and no copy was recorded."""
        calls, activities = self.trace.synchronizations, self.trace.activities
        is_called = np.any((calls.kind == SyncKind.COPY) & (calls.process == self.process))
        return bool(is_called and not np.any((activities.kind == Kind.COPY) & (activities.process == self.process)))

    @property
    def lacks_sets(self) -> bool:
        """Whether the process made calls that set memory, and none of these has an activity."""
        calls, activities = self.trace.synchronizations, self.trace.activities
        numbers = calls.correlation[(calls.kind == SyncKind.SET) & (calls.process == self.process)]
        mine = activities.process == self.process
        among = (mine & (activities.kind == Kind.MEMORY_SET), mine)  # a kernel may set memory, too
        return bool(len(numbers)) and not any(is_among(numbers, activities.correlation[rows]).any() for rows in among)

    @property
    def _lacks_launches(self) -> bool:
        """Whether the device communicates since the first step by what no recorded call launched.

        Else all calls are missing, or it was launched before the recording began.
        """
        events, trace = self.events, self.trace
        rows = np.flatnonzero((events.category == Category.COMMUNICATION) & (events.activity != UNKNOWN))
        rows = rows[events.start_ns[rows] >= self.steps.start_ns.min(initial=NEVER)]
        lost = events.activity[rows][trace.launching_calls[events.activity[rows]] == UNKNOWN]
        return bool(len(trace.calls) and len(lost) and not are_launched_earlier(trace)[lost].all())

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
        of_gradients = [OPERATIONS.index(name) for name in (ALL_REDUCE, REDUCE_SCATTER)]
        needed = ~np.isin(ranges.operation, of_gradients) | (is_gloo & ~is_gloo.all())
        waiting |= union(self.events.start_ns[others], self.events.end_ns[others])
        waiting |= union(ranges.launch_or_start_ns[needed], ranges.end_ns[needed])
        return waiting - self.union_of(Category.COMPUTE)

    @property
    def clocks_disagree(self) -> bool:
        """Whether the clocks of host and device disagree: no time from a call to an activity means anything then."""
        return self.device is not None and self.recording.clocks_disagree

    @property
    def units_differ(self) -> bool:
        """Whether the times of host and device are in different units: no time of the device means anything then."""
        return self.device is not None and self.recording.units_differ

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
    def recorded_in_part(self) -> Intervals:
        """When its host was in steps that were recorded in part: then its device is not known to be idle."""
        steps = self.including_warmup.steps
        rows = np.flatnonzero(self.recording.is_incomplete & self.has_steps & (self.device is not None))
        return union(steps.start_ns[rows], steps.end_ns[rows])

    @property
    def is_lost(self) -> bool:
        """Whether its process launched work on a device, and no activity of this work was recorded."""
        recording = self.recording
        return self.device is None and recording.lost > 0 and recording.lost == recording.launches

    @property
    def is_unrecorded(self) -> bool:
        """Whether its process worked on a device, as it says or launched, of which no activity was recorded."""
        return self.is_lost or (self.device is None and self.process in self.trace.on_devices)

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
    def work(self) -> Work:
        """The operations of its device, and what delayed each of them."""
        return find_work(self.trace, self.dependencies(), self.host_calls, self.training_threads)

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

    @cached_property
    def training_threads(self) -> frozenset[int]:
        """The main thread and those that launch compute of backward.

        One of them works at a time: the main thread waits for a backward, and autograd's threads have none meanwhile.
        """
        return self.gradient_threads | {self.main_thread}

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
        lanes = spans.lane[(spans.process == self.process) & is_in(spans.start_ns, self.steps.start_ns)]
        threads, times = np.unique(lanes, return_counts=True)
        return int(threads[times.argmax()]) if len(lanes) and self.has_steps else self.process

    @cached_property
    def passes(self) -> Passes:
        """The passes of backward. In a capture without steps, which may contain many passes, one row stands for all."""
        events = self.launched_events
        if not self.has_steps:
            return whole_passes(events, len(self.steps), self._follows_reductions)
        main = self.main_thread
        ranges = select(self.phases, self.phases.lane == main).union_of(BACKWARD_PHASE)
        follows, on_host = self._follows_reductions, self.device is None
        return find_passes(events, len(self.steps), follows, ranges, main, on_host=on_host)

    @property
    def launched_events(self) -> Events:
        """The events with all launches that were recorded, also if the host's clock is not that of the device.

        A launch that was lost, of a known step, counts at the time of the call before it, by its number. Such launches
        may be compared with times of the host alone.
        """
        events, launch_ns = self.events, self.events.launch_ns
        if self.clocks_disagree:
            call = take_or_unknown(self.trace.launching_calls, events.activity)
            recorded_ns = take_or_unknown(self.trace.calls.start_ns, call, NO_TIME)
            launch_ns = np.where(call == UNKNOWN, launch_ns, recorded_ns)
        if (is_lost := self._lost_its_call & (events.step != UNKNOWN)).any():
            unlaunched = find_unlaunched(self.trace, self.process)
            row = take_or_unknown(positions(unlaunched.activity, len(self.trace.activities)), events.activity)
            after_ns = take_or_unknown(unlaunched.after_ns, row, NO_TIME)
            launch_ns = np.where(is_lost & (row != UNKNOWN), after_ns, launch_ns)
        return events if launch_ns is events.launch_ns else replace(events, launch_ns=launch_ns)

    @property
    def _lost_its_call(self) -> Mask:
        """Which events are work of a device of which no call was recorded."""
        activity = self.events.activity
        found: Mask = (activity != UNKNOWN) & (take_or_unknown(self.trace.launching_calls, activity) == UNKNOWN)
        return found

    @property
    def number_of_placed(self) -> int:
        """Number of its events whose call was lost, and whose step is known all the same."""
        return int((self._lost_its_call & (self.events.step != UNKNOWN)).sum()) if self.has_steps else 0

    @cached_property
    def lacks_phase(self) -> Mask:
        """For each step, whether it is not known of some work if it was in backward, because its call was lost.

        Without steps, that is told as far as it is known.
        """
        events = self.events
        is_asked = (events.step != UNKNOWN) & (events.phase == UNKNOWN)
        if self.backward == "inferred":
            is_asked &= events.launcher == UNKNOWN
        is_asked &= is_in(events.category, (Category.COMPUTE, Category.COMMUNICATION))
        found = np.zeros(len(self.steps), np.bool_)
        if self.has_steps and is_asked.any():
            found[events.step[is_asked & self._lost_its_call]] = True
        return found

    @property
    def _follows_reductions(self) -> Mask:
        """Mask of the events that are compute of backward on another stream, and wait for reduced gradients."""
        elsewhere = self.is_backward & (self.events.lane != self.compute_stream)
        if self.device is None or not elsewhere.any():  # dependencies take time
            return np.zeros(len(self.events), np.bool_)
        return need_reduced_gradients(self.trace, self.dependencies(), self.events, elsewhere)

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
        parts = self.operation_parts
        if self.clocks_disagree:
            parts = find_operation_parts(self.trace, self.launched_events)
        launch_ns = parts.launch_ns[self.operation_rows]
        launch_ns = np.where(launch_ns == NO_TIME, operations.start_ns, launch_ns)
        return passes.of_launches(operations.step, operations.phase, launch_ns, is_point_to_point)

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
        rows = np.flatnonzero(known)[np.argsort(events.launch_ns[known], kind="stable")]
        is_backward = events.phase[rows] == BACKWARD_PHASE
        first = np.flatnonzero(begins_run(is_backward, events.step[rows]))
        last = np.append(first[1:], len(rows)) - 1
        first, last = rows[first[is_backward[first]]], rows[last[is_backward[first]]]
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
