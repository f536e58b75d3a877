"""What one rank did: its events with their steps and phases, from which all figures are measured."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_prof.analyze.core.attribution import (
    BACKWARD_PHASE,
    Events,
    device_events,
    host_communication,
    host_events,
    last_by_step,
)
from ddp_prof.analyze.core.collective_ranges import CollectiveRanges, find_collective_ranges
from ddp_prof.analyze.core.phases import Phases, find_phases
from ddp_prof.analyze.core.step_breakdown import StepBreakdown, StepTimes, measure_breakdown, measure_step_times
from ddp_prof.analyze.core.steps import NO_PATTERNS, RangePatterns, Steps, find_steps, name_ranges
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.errors import TraceError
from ddp_prof.range_names import PROCESS, ranges_among
from ddp_prof.trace import UNKNOWN, Category, concatenate, distinct, distinct_rows, empty, looked_up, select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_prof.trace import Ints, Mask, Trace


@dataclass(frozen=True)
class RankEvents:
    """One rank: a process and, on GPUs, one of its devices.

    Attributes:
        trace: Where the events are from.
        device: CUDA ordinal as the process counts, ``None`` on a CPU.
        rank: Rank in the job, ``None`` where the trace does not tell.
        events: What it did; what belongs to warm-up steps is left out.
        steps: The measured steps; where the trace tells none, the whole capture as a single one without a number.
        phases: The host's ranges of phases, those of warm-up steps included.
        collective_ranges: Our ranges round collectives, likewise.
        has_steps: Whether the trace tells steps.
        warmup_steps: How many steps were left out.
        backward: How events were attributed to backward: ``ranges``, ``inferred`` (by thread) or ``none``.
        step_notes: Which ranges that could be steps were left out or cut, a line each.
        other_gradient_threads: Threads that launch compute of backward in other parts of the capture.
    """

    trace: Trace
    process: int
    device: int | None
    rank: int | None
    events: Events
    steps: Steps
    phases: Phases
    collective_ranges: CollectiveRanges
    has_steps: bool
    warmup_steps: int
    backward: str
    step_notes: tuple[str, ...]
    other_gradient_threads: frozenset[int] = frozenset()

    def of(self, category: Category) -> Events:
        """The events of one category."""
        return select(self.events, self.events.category == category)

    def union_of(self, category: Category) -> Intervals:
        """The time covered by the events of one category."""
        if category not in self._unions:
            rows = self.events.category == category
            self._unions[category] = union(self.events.start_ns[rows], self.events.end_ns[rows])
        return self._unions[category]

    @cached_property
    def breakdown(self) -> StepBreakdown:
        """Where the time of each step went."""
        return measure_breakdown(self.events, self.steps, self.union_of, on_host=self.device is None)

    @cached_property
    def step_times(self) -> StepTimes:
        """What filled the host's time of each step; nothing for a capture without steps."""
        return measure_step_times(self.steps, self.phases, self.union_of) if self.has_steps else empty(StepTimes)

    @cached_property
    def is_backward(self) -> Mask:
        """Which events are compute of backward."""
        rows: Mask = (self.events.phase == BACKWARD_PHASE) & (self.events.category == Category.COMPUTE)
        return rows

    @cached_property
    def gradient_threads(self) -> frozenset[int]:
        """The threads that launch compute of backward."""
        return self.other_gradient_threads | frozenset(distinct(self.events.launcher[self.is_backward]))

    @cached_property
    def backward_end_ns(self) -> Ints:
        """End of the last compute of backward of each step; ``UNKNOWN`` where none is known.

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
        known = (events.launch_ns != UNKNOWN) & (events.phase != UNKNOWN) & (events.step != UNKNOWN)
        if self.backward != "inferred" or not self.has_steps or not known.any():
            return empty(Phases)
        events = select(events, np.flatnonzero(known)[np.argsort(events.launch_ns[known], kind="stable")])
        is_backward = events.phase == BACKWARD_PHASE
        changes = np.flatnonzero((np.diff(is_backward) != 0) | (np.diff(events.step) != 0))
        first, last = np.append(0, changes + 1), np.append(changes, len(events) - 1)
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
        return self.steps.keys if self.has_steps else self.steps.number

    def step_at(self, time_ns: Ints) -> Ints:
        """Key of the measured step whose host range holds each instant, ``UNKNOWN`` outside of any."""
        return looked_up(self.step_keys, self.steps.index_at(time_ns))

    @cached_property
    def _unions(self) -> dict[Category, Intervals]:
        return {}


@dataclass(frozen=True)
class Known:
    """What is known of a capture that is looked at in parts.

    Attributes:
        devices: The devices that have activities, by process.
        launchers: The threads that launch collectives, by process; ``computing`` those that launch compute.
        gradient_threads: Those that launch compute of backward, by process and device.
    """

    devices: Mapping[int, frozenset[int]] = field(default_factory=dict)
    launchers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    computing: Mapping[int, frozenset[int]] = field(default_factory=dict)
    gradient_threads: Mapping[tuple[int, int | None], frozenset[int]] = field(default_factory=dict)

    def __or__(self, other: Known) -> Known:
        return Known(*(_joined(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)))


def _joined(one: Mapping[Any, frozenset[int]], other: Mapping[Any, frozenset[int]]) -> Mapping[Any, frozenset[int]]:
    return {key: one.get(key, frozenset()) | other.get(key, frozenset()) for key in (*one, *other)}


def look_round(trace: Trace) -> Known:
    """What a trace tells of the whole capture that it is a part of."""
    activities, devices = trace.activities, {}
    launchers: dict[int, frozenset[int]] = {}
    computing: dict[int, frozenset[int]] = {}
    is_launched = trace.launching_calls != UNKNOWN
    for process in distinct(activities.process):
        mine = activities.process == process
        devices[process] = frozenset(distinct(activities.device[mine]))
        for found, category in ((launchers, Category.COMMUNICATION), (computing, Category.COMPUTE)):
            call = trace.launching_calls[mine & is_launched & (activities.category == category)]
            found[process] = frozenset(distinct(looked_up(trace.calls.lane, call)))
    return Known(devices, launchers, computing)


def find_rank_events(
    trace: Trace, patterns: RangePatterns = NO_PATTERNS, known: Known | None = None
) -> tuple[RankEvents, ...]:
    """What each rank in a trace did, in the order of rank, process and device.

    Args:
        trace: The trace.
        patterns: How the user's own ranges are named.
        known: What is known beside the trace, where it is part of a capture: ranks that did nothing in it are found.

    Raises:
        TraceError: No range is named as the user says that steps are.
    """
    known = known or look_round(trace)
    on_devices = set(known.devices)
    found: list[RankEvents] = []
    for process in sorted({*trace.processes, *on_devices}):
        builder = _Builder(trace, process, patterns, known)
        if process in on_devices:
            found += builder.device_ranks()
        elif process in trace.ranks or not (on_devices or trace.ranks):
            found.append(builder.host_rank())
    if patterns.step is not None and not any(rank.has_steps or rank.step_notes for rank in found):
        reason = f"no range matches --step-range '{patterns.step}'"
        raise TraceError(trace.path, reason, f"the ranges there are: {name_ranges(trace)}")
    return tuple(sorted(map(_without_warmup, found), key=_order))


def _order(rank: RankEvents) -> tuple[bool, int, int, int]:
    return rank.rank is None, rank.rank or 0, rank.process, rank.device or 0


class _Builder:
    """Makes the ranks of one process."""

    def __init__(self, trace: Trace, process: int, patterns: RangePatterns, known: Known) -> None:
        self.trace, self.process, self.known = trace, process, known
        self.steps, self.step_notes = find_steps(trace, process, patterns.step)
        self.phases = find_phases(trace, process, patterns.backward)
        self.ranges = find_collective_ranges(trace, process)

    def device_ranks(self) -> list[RankEvents]:
        launchers = self.known.launchers[self.process] & self.known.computing[self.process]
        events, backward = device_events(self.trace, self.process, self.steps, self.phases, launchers)
        device_of = self.trace.activities.device[events.activity]
        result = []
        for device in sorted(self.known.devices[self.process]):
            own = select(events, device_of == device)
            if not np.any(own.category == Category.COMMUNICATION) and not self._said().intersection({"nccl"}):
                # gloo with CUDA tensors: the host communicates
                own = concatenate(own, host_communication(self.ranges, self.steps, self.phases))
            result.append(self._rank(device, own, backward))
        return result

    def host_rank(self) -> RankEvents:
        """Others' ranges do not tell waiting from computing, so that without ours nothing is known."""
        is_told = bool(len(self.ranges) or self._said())
        events = host_events(self.ranges, self.steps, self.phases) if is_told else empty(Events)
        return self._rank(None, events, "ranges")

    def _said(self) -> set[str]:
        """The backends that ranges of ours round the process name; a backend not named is empty text."""
        ids = np.unique(self.trace.spans.name_id[self.trace.spans.process == self.process]).tolist()
        names = [self.trace.names[name_id] for name_id in ids]
        return {range_.text("backend") or "" for range_ in ranges_among(names, PROCESS).values()}

    def _rank(self, device: int | None, events: Events, backward: str) -> RankEvents:
        steps, has_steps = self.steps, bool(len(self.steps))
        if not has_steps and len(events):
            steps = Steps.whole(int(events.start_ns.min()), int(events.end_ns.max()))
            events = replace(events, step=np.zeros(len(events), np.int64))
        return RankEvents(
            trace=self.trace,
            process=self.process,
            device=device,
            rank=self.trace.ranks.get(self.process),
            events=events,
            steps=steps,
            phases=self.phases,
            collective_ranges=self.ranges,
            has_steps=has_steps,
            warmup_steps=0,
            backward=backward,
            step_notes=self.step_notes,
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
        events=replace(events, step=looked_up(renumbered, events.step)),
        steps=select(rank.steps, measured),
        warmup_steps=int((~measured).sum()),
    )
