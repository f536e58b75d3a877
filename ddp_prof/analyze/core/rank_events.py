"""What one rank did: its events with their steps and phases, from which all figures are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial

import numpy as np

from ddp_prof.analyze.core.attribution import (
    BACKWARD_PHASE,
    GLOO,
    NOTIFY,
    OPERATIONS,
    OPTIMIZER_PHASE,
    SYNCHRONIZE_PHASE,
    CollectiveRanges,
    Events,
    are_gloos,
    device_events,
    find_collective_ranges,
    host_communication,
    host_events,
    last_by_step,
    operation_of,
)
from ddp_prof.analyze.core.blocking import NO_HOST_WAITS, RankBlocking, device_blocking, host_blocking, unknown_blocking
from ddp_prof.analyze.core.edges import Dependencies, HostCalls, find_dependencies
from ddp_prof.analyze.core.step_breakdown import (
    StepBreakdown,
    StepTimes,
    is_ahead,
    measure_breakdown,
    measure_step_times,
    sum_by_group,
)
from ddp_prof.analyze.core.steps import (
    NO_PATTERNS,
    Phases,
    RangePatterns,
    Steps,
    describe_ranges,
    find_phases,
    find_steps,
    rows_named,
)
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.errors import TraceError
from ddp_prof.range_names import COLLECTIVES, PROCESS, parse_ranges
from ddp_prof.table import Brief, begins_run
from ddp_prof.trace import (
    NO_TIME,
    SYNC_IN_PARTS,
    UNKNOWN,
    Category,
    Ints,
    Kind,
    Mask,
    Trace,
    concatenate,
    distinct,
    distinct_rows,
    empty,
    select,
    take_or_unknown,
)


@dataclass(frozen=True)
class RankEvents(Brief):
    """One rank: a process and, on GPUs, one of its devices.

    Attributes:
        device: CUDA ordinal as the process counts, ``None`` on a CPU.
        events: What it did; what belongs to warm-up steps is left out.
        steps: The measured steps; where the trace tells none, the whole capture as a single one without a number.
        is_followed: Of each step whether the one after it is the next of ``steps``, and not one of warm-up.
        phases: The host's ranges of phases, those of warm-up steps included; ``collective_ranges`` likewise.
        backward: How events were attributed to backward: ``ranges``, ``inferred`` (by thread) or ``none``.
        step_notes: Which ranges that could be steps were left out or cut, a line each.
        other_gradient_threads: Threads that launch compute of backward in other parts of the capture.
        assumed_ahead: Whether the host runs ahead in the whole capture; ``None`` where this is not a part of one.
        with_warmup: The same rank with what belongs to warm-up steps, where there are any.
        raised: By how much the keys of its steps are raised, since another rank's recording began earlier.
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
    other_gradient_threads: frozenset[int] = frozenset()
    assumed_ahead: bool | None = None
    dependencies: Callable[[], Dependencies] = None  # type: ignore[assignment]  # never None once the rank is made
    with_warmup: RankEvents | None = None
    raised: int = 0

    @property
    def including_warmup(self) -> RankEvents:
        """The rank including its warm-up steps, as it is drawn; this one is what is measured."""
        return self.with_warmup or self

    def rekey_steps(self, keys: Ints) -> RankEvents:
        """The rank with these keys of its measured steps: other ranks may have begun earlier.

        They become the numbers of steps without any. See :func:`.align_unnumbered_steps`.
        """
        if not self.has_steps or np.array_equal(self.step_keys, keys):
            return self
        raised, whole = int(keys[0]), self.with_warmup
        if np.any(self.steps.number != UNKNOWN):  # which come again, so that keys are positions
            return replace(self, raised=raised, with_warmup=whole and replace(whole, raised=raised))
        numbered = replace(self, steps=replace(self.steps, number=keys))
        if whole is None:
            return numbered
        number = np.where(whole.steps.warmup, UNKNOWN, keys[np.cumsum(~whole.steps.warmup) - 1])
        return replace(numbered, with_warmup=replace(whole, steps=replace(whole.steps, number=number)))

    def select_category(self, category: Category) -> Events:
        return select(self.events, self.events.category == category)

    def union_of(self, category: Category) -> Intervals:
        if category not in self._unions:
            rows = self.events.category == category
            self._unions[category] = union(self.events.start_ns[rows], self.events.end_ns[rows])
        return self._unions[category]

    @cached_property
    def breakdown(self) -> StepBreakdown:
        return measure_breakdown(self.events, self.steps, self.union_of, on_host=self.device is None)

    def time_by_part(self, window: Intervals) -> dict[str, Intervals]:
        """A window by what the rank did in it, each instant in one part, whatever step it belongs to."""
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
    def lead_ns(self) -> tuple[Ints, Ints]:
        """For each step: its work on the device, and how much of it is outside the host's range of the step."""
        events, steps = self.events, self.steps
        rows = (events.step != UNKNOWN) & (events.activity != UNKNOWN)
        start, end, step = events.start_ns[rows], events.end_ns[rows], events.step[rows]
        work_ns = sum_by_group(end - start, step, len(steps))
        np.minimum(end, steps.end_ns[step], out=end)
        np.maximum(start, steps.start_ns[step], out=start)
        return work_ns, work_ns - sum_by_group(np.maximum(0, end - start), step, len(steps))

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the host runs ahead of the device: most device work of its steps lies outside their host ranges."""
        if self.assumed_ahead is not None:
            return self.assumed_ahead
        work_ns, outside_ns = self.lead_ns
        return self.has_steps and is_ahead(int(work_ns.sum()), int(outside_ns.sum()))

    @cached_property
    def step_times(self) -> StepTimes:
        """How long each step took, and what filled that time; nothing for a capture without steps."""
        if not self.has_steps:
            return empty(StepTimes)
        device_follows = self.is_followed if self.runs_ahead else None
        return measure_step_times(self.events, self.steps, self.phases, self.union_of, device_follows)

    @cached_property
    def blocking(self) -> RankBlocking:
        """How long its streams, on a CPU its host, stood still for communication."""
        if self.trace.sync_reason == SYNC_IN_PARTS:
            return unknown_blocking(self.events, len(self.steps), SYNC_IN_PARTS)
        is_by_host = np.any((self.events.category == Category.COMMUNICATION) & (self.events.activity == UNKNOWN))
        if self.device is None or is_by_host:
            waits = int((self.phases.kind == SYNCHRONIZE_PHASE).sum())
            if not waits and np.any(self.events.category == Category.COMMUNICATION):
                return unknown_blocking(self.events, len(self.steps), NO_HOST_WAITS)
            waiting = self.phases.union_of(SYNCHRONIZE_PHASE)
            if are_gloos(self.trace, self.collective_ranges):
                # Beside backward, and of what backward itself needs, operators alone tell how long the host waits.
                in_backward = np.isin(self.events.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE))
                others = (self.events.category == Category.COMMUNICATION) & ~in_backward
                waiting |= union(self.events.start_ns[others], self.events.end_ns[others])
                ranges = self.collective_ranges
                sums = [OPERATIONS.index(name) for name in ("all_reduce", "reduce_scatter")]
                needed = ~np.isin(ranges.operation, sums)
                asked_ns = np.where(ranges.launch_ns == NO_TIME, ranges.start_ns, ranges.launch_ns)
                waiting |= union(asked_ns[needed], ranges.end_ns[needed])
                waiting -= self.union_of(Category.COMPUTE)
            return host_blocking(waiting, waits, self.events, len(self.steps))
        return device_blocking(self.trace, self.dependencies(), self.host_calls, self.is_mine, self.events, self.steps)

    @property
    def is_warmup(self) -> bool:
        """Whether all of its steps are warm-up."""
        return bool(self.warmup_steps) and not len(self.steps)

    @property
    def hides_waits(self) -> bool:
        """Whether phases of a CPU count as compute although it may have waited in them for communication."""
        if self.device is not None or SYNCHRONIZE_PHASE in self.phases.kind:
            return False
        if self._has_operators:  # these compute, not phases
            return False
        return bool((self.union_of(Category.COMPUTE) & self.union_of(Category.COMMUNICATION)).length_ns)

    @property
    def _has_operators(self) -> bool:
        return len(self.trace.operators) >= len(self.collective_ranges)

    @property
    def hides_backward(self) -> bool:
        """Whether nothing tells what backward computed on a CPU that trains, or may.

        One that communicates may, unless operators tell what it computed and which of them asked for each collective.
        """
        if self.device is not None or self.backward != "none":
            return False
        asked_ns = self.select_category(Category.COMMUNICATION).launch_ns
        is_told = self._has_operators and NO_TIME not in asked_ns
        trains = np.isin(self.phases.kind, (SYNCHRONIZE_PHASE, OPTIMIZER_PHASE)).any()
        return bool(trains or (len(asked_ns) and not is_told))

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
    def is_collective(self) -> Mask:
        """Which events are collectives, each counted once: what only prepares another one is a part of that."""
        rows: Mask = self.events.category == Category.COMMUNICATION
        parts = [row for row, name in enumerate(self.trace.names) if NOTIFY in name and operation_of(name) == NOTIFY]
        is_part = np.isin(take_or_unknown(self.trace.activities.name_id, self.events.activity), parts)
        return rows & ~is_part if parts else rows

    @cached_property
    def gradient_threads(self) -> frozenset[int]:
        return self.other_gradient_threads | frozenset(distinct(self.events.launcher[self.is_backward]))

    @property
    def is_mine(self) -> Mask:
        """Which of the trace's activities are the rank's, warm-up included."""
        activities = self.trace.activities
        mine: Mask = (activities.process == self.process) & (activities.device == self.device)
        return mine

    @cached_property
    def main_thread(self) -> int:
        """The thread that opens the ranges of steps; where there are none, the process's first one."""
        spans = self.trace.spans
        lanes = spans.lane[(spans.process == self.process) & np.isin(spans.start_ns, self.steps.start_ns)]
        return int(np.bincount(lanes).argmax()) if len(lanes) and self.has_steps else self.process

    @cached_property
    def backward_end_ns(self) -> Ints:
        """End of the last compute of backward of each step; ``NO_TIME`` where none is known.

        Nor is it in a capture without steps, which may hold many backward passes.
        """
        rows = self.is_backward & self.has_steps
        return last_by_step(self.events.end_ns[rows], self.events.step[rows], len(self.steps))

    @cached_property
    def inferred_backward(self) -> Phases:
        """When autograd launched backward, where no range of the host tells it, from the first launch to the last.

        Launches of another phase end it. A step may hold several, a capture without steps has none.
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
        """The stream on which most compute time is spent, ``UNKNOWN`` where there is none, as on a CPU."""
        rows = np.flatnonzero((self.events.category == Category.COMPUTE) & (self.events.lane != UNKNOWN))
        if not len(rows):
            return UNKNOWN
        lane = self.events.lane[rows]
        first, which = distinct_rows(lane)
        busy_ns = np.bincount(which, weights=self.events.end_ns[rows] - self.events.start_ns[rows])
        return int(lane[first[busy_ns.argmax()]]) if busy_ns.any() else UNKNOWN

    @cached_property
    def step_keys(self) -> Ints:
        """A number for each step that no other step of the rank has; ``UNKNOWN`` for a capture without steps."""
        keys = self.steps.keys if self.has_steps else self.steps.number
        return np.where(keys == UNKNOWN, UNKNOWN, keys + self.raised)

    def step_at(self, time_ns: Ints) -> Ints:
        """Key of the measured step whose host range holds each instant, ``UNKNOWN`` outside of any."""
        return take_or_unknown(self.step_keys, self.steps.index_at(time_ns))

    @cached_property
    def _unions(self) -> dict[Category, Intervals]:
        return {}


@dataclass(frozen=True)
class CaptureFacts:
    """Facts about a whole capture that is read in parts, by process; by process and device the threads of backward."""

    devices: Mapping[int, frozenset[int]] = field(default_factory=dict)
    launchers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    computing: Mapping[int, frozenset[int]] = field(default_factory=dict)
    gradient_threads: Mapping[tuple[int, int | None], frozenset[int]] = field(default_factory=dict)

    def __or__(self, other: CaptureFacts) -> CaptureFacts:
        found = []
        for item in fields(self):
            own, others = getattr(self, item.name), getattr(other, item.name)
            found.append({key: own.get(key, frozenset()) | others.get(key, frozenset()) for key in (*own, *others)})
        return CaptureFacts(*found)


def collect_capture_facts(trace: Trace) -> CaptureFacts:
    """Collect from one part the facts that concern the whole capture."""
    activities, devices = trace.activities, {}
    launchers: dict[int, frozenset[int]] = {}
    computing: dict[int, frozenset[int]] = {}
    is_launched = trace.launching_calls != UNKNOWN
    for process in distinct(activities.process):
        mine = activities.process == process
        devices[process] = frozenset(distinct(activities.device[mine]))
        for found, category in ((launchers, Category.COMMUNICATION), (computing, Category.COMPUTE)):
            call = trace.launching_calls[mine & is_launched & (activities.category == category)]
            found[process] = frozenset(distinct(take_or_unknown(trace.calls.lane, call)))
    return CaptureFacts(devices, launchers, computing)


def find_rank_events(
    trace: Trace, patterns: RangePatterns = NO_PATTERNS, known: CaptureFacts | None = None
) -> tuple[RankEvents, ...]:
    """What each rank in a trace did, in the order of rank, process and device.

    ``known`` is what is known beside a trace that is part of a capture: ranks that did nothing in it are found.

    Raises:
        TraceError: No range is named as the user says that steps, or backward, are.
    """
    known = known or collect_capture_facts(trace)
    on_devices = set(known.devices)
    found: list[RankEvents] = []
    dependencies = cache(partial(find_dependencies, trace))  # all ranks share them
    for process in sorted({*trace.processes, *on_devices}):
        builder = _Builder(trace, process, patterns, known, dependencies)
        if process in on_devices:
            found += builder.device_ranks()
        elif process in trace.ranks or not (on_devices or trace.ranks):
            found.append(builder.host_rank())
    for option, pattern, is_found in (
        ("--step-range", patterns.step, any(rank.has_steps or rank.step_notes for rank in found)),
        ("--backward-range", patterns.backward, any(BACKWARD_PHASE in rank.phases.kind for rank in found)),
    ):
        if pattern is not None and not is_found:
            reason = f"no range matches {option} '{pattern}'"
            raise TraceError(trace.path, reason, f"the ranges there are: {describe_ranges(trace)}")
    found.sort(key=lambda rank: (rank.rank is None, rank.rank or 0, rank.process, rank.device or 0))
    return tuple(map(_without_warmup, found))


class _Builder:
    """Makes the ranks of one process."""

    def __init__(
        self,
        trace: Trace,
        process: int,
        patterns: RangePatterns,
        known: CaptureFacts,
        dependencies: Callable[[], Dependencies],
    ) -> None:
        self.trace, self.process, self.known = trace, process, known
        self.steps, self.step_notes = find_steps(trace, process, patterns.step)
        self.phases = find_phases(trace, process, patterns.backward)
        self.ranges = find_collective_ranges(trace, process, self.phases)
        self.dependencies = dependencies
        self._leave_out_unfinished_step()

    def _leave_out_unfinished_step(self) -> None:
        """The last step where it holds no phase and each other one does: the program ended in it.

        So end loops in which a step begins where the one before it ends, as torch.profiler's. A phase that only ends in
        it, by less than half of both, is the one before's: a hook that counts steps runs within the optimizer's range.
        """
        steps, phases = self.steps, self.phases
        if len(steps) < 2:
            return
        start_ns, end_ns = steps.start_ns[-1], steps.end_ns[-1]
        within_ns = np.minimum(phases.end_ns, end_ns) - np.maximum(phases.start_ns, start_ns)
        if np.any((within_ns > 0) & (2 * within_ns >= np.minimum(phases.end_ns - phases.start_ns, end_ns - start_ns))):
            return
        if np.isin(np.arange(len(steps) - 1), steps.index_at(phases.start_ns)).all():
            self.step_notes += (f"{self.steps.names[-1]} left out: it has no phase, as where the program ended in it",)
            self.steps = select(self.steps, np.arange(len(self.steps) - 1))

    def device_ranks(self) -> list[RankEvents]:
        launchers = self.known.launchers[self.process] & self.known.computing[self.process]
        events, backward = device_events(self.trace, self.process, self.steps, self.phases, launchers)
        device_of = self.trace.activities.device[events.activity]
        result = []
        for device in sorted(self.known.devices[self.process]):
            own = select(events, device_of == device)
            if not np.any(own.category == Category.COMMUNICATION) and "nccl" not in self._declared_backends():
                # gloo with CUDA tensors: the host communicates
                own = concatenate(own, host_communication(self.ranges, self.steps, self.phases))
            result.append(self._rank(device, own, backward))
        return result

    def host_rank(self) -> RankEvents:
        """The rank of a CPU run. Only our ranges separate waiting from computing; without them operators are used."""
        operators, backward = self.trace.operators, "ranges" if BACKWARD_PHASE in self.phases.kind else "none"
        is_ours = bool(self._declared_backends() or parse_ranges(self.trace.names, *COLLECTIVES))
        # Fewer operators than collectives were recorded in part: what else computed is not known.
        marks_waits = is_ours and SYNCHRONIZE_PHASE in self.phases.kind and not are_gloos(self.trace, self.ranges)
        if 0 < len(self.ranges) <= len(operators) and not marks_waits:
            events = host_events(self.ranges, self.steps, self.phases, operators)
            if backward == "none" and operators.is_backward.any():
                backward = "inferred"
            told = self._describe_gloo() or "the ranges of collectives"
            self.step_notes += (f"communication is {told}; compute is torch's operators",)
        elif is_ours:
            events = host_events(self.ranges, self.steps, self.phases)
            if told := self._describe_gloo():
                self.step_notes += (f"communication is {told}",)
        else:
            events = empty(Events)
        spans, gloos = self.trace.spans, [index for index, name in enumerate(self.trace.names) if name.startswith(GLOO)]
        start_ns = spans.start_ns[rows_named(spans, spans.process == self.process, gloos)]
        left_out = ~union(self.ranges.start_ns, self.ranges.end_ns).holds(start_ns)
        if count := int(np.count_nonzero(left_out & (self.steps.index_at(start_ns) != UNKNOWN))):
            self.step_notes += (f"communication in steps that no range tells is left out: {count:,} 'gloo:' events",)
        return self._rank(None, events, backward)

    def _describe_gloo(self) -> str:
        """What tells the communication, where that is gloo's own events."""
        if not are_gloos(self.trace, self.ranges):
            return ""
        is_by_caller = np.isin(self.trace.spans.lane[self.ranges.span], self.phases.lane).any()
        begin = "is called" if is_by_caller else "is taken up by a thread of gloo"
        return f"the 'gloo:' events, each from when it {begin}"

    def _declared_backends(self) -> set[str]:
        """The backends that ranges of ours round the process name; a backend not named is empty text."""
        ids = np.unique(self.trace.spans.name_id[self.trace.spans.process == self.process]).tolist()
        names = [self.trace.names[name_id] for name_id in ids]
        return {range_.text("backend") or "" for range_ in parse_ranges(names, PROCESS).values()}

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
            dependencies=self.dependencies,
            other_gradient_threads=self.known.gradient_threads.get((self.process, device), frozenset()),
        )


def _without_warmup(rank: RankEvents) -> RankEvents:
    measured: Mask = ~rank.steps.warmup
    if measured.all():
        return rank
    renumbered = np.where(measured, np.cumsum(measured) - 1, UNKNOWN)
    events = select(rank.events, np.append(measured, True)[rank.events.step])
    return replace(
        rank,
        events=replace(events, step=take_or_unknown(renumbered, events.step)),
        steps=select(rank.steps, measured),
        is_followed=np.append(measured[1:], False)[measured],
        warmup_steps=int((~measured).sum()),
        with_warmup=rank,
    )
