"""What one rank did, event by event: the one form in which GPU and CPU captures are measured.

On a GPU an event is an activity. It belongs to the step and the phase whose host range holds the start of its launch
call, in the same process, *on any thread*: autograd launches the kernels of backward from threads of its own.

On a CPU (gloo) there are no activities: communication is our ``all_reduce`` ranges, and compute is the time in
``forward``, ``backward`` and ``optimizer`` outside ``synchronize``, where the rank waits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.intervals import Intervals, union
from ddp_prof.analyze.core.steps import Phases, Steps, find_phases, find_steps, innermost
from ddp_prof.range_names import ALL_REDUCE, BACKWARD, PHASES, PROCESS, SYNCHRONIZE, parse_range
from ddp_prof.trace import UNKNOWN, Category, Kind, Table, concatenate, distinct, empty, select

if TYPE_CHECKING:
    from ddp_prof.trace import Ints, Mask, Trace

BACKWARD_PHASE = PHASES.index(BACKWARD)
SYNCHRONIZE_PHASE = PHASES.index(SYNCHRONIZE)


@dataclass(frozen=True)
class Events(Table):
    """Events of one rank.

    Attributes:
        lane: CUDA stream; ``UNKNOWN`` for work of the host.
        category: A ``Category``.
        step: Index into the rank's steps, ``UNKNOWN`` outside of any.
        phase: Index into ``range_names.PHASES``, ``UNKNOWN`` outside of any.
        kernel: 1 for a kernel, 0 for anything else.
        activity: Row in the trace's activities; ``UNKNOWN`` for work of the host.
    """

    start_ns: Ints
    end_ns: Ints
    lane: Ints
    category: Ints
    step: Ints
    phase: Ints
    kernel: Ints
    activity: Ints


@dataclass(frozen=True)
class LaunchedEvents(Events):
    """Events with their launches, which take memory and are looked up only where they are needed.

    Attributes:
        launch_ns: When the host asked for it, ``UNKNOWN`` where the trace does not tell; on a CPU its start.
        launcher: Thread that asked; ``UNKNOWN`` likewise, and on a CPU.
    """

    launch_ns: Ints
    launcher: Ints


@dataclass(frozen=True)
class RankEvents:
    """One rank: a process and, on GPUs, one of its devices.

    Attributes:
        device: CUDA ordinal as the process counts, ``None`` on a CPU.
        rank: Rank in the job, ``None`` where the trace does not tell.
        events: What it did; what belongs to warm-up steps is left out.
        steps: The measured steps; where the trace tells none, the whole capture as a single one without a number.
        has_steps: Whether the trace tells steps.
        warmup_steps: How many steps were left out.
        backward: How events were attributed to backward: ``ranges``, ``inferred`` (by thread) or ``none``.
    """

    process: int
    device: int | None
    rank: int | None
    events: Events
    steps: Steps
    has_steps: bool
    warmup_steps: int
    backward: str

    def of(self, category: Category) -> Events:
        """The events of one category."""
        return select(self.events, self.events.category == category)

    def union_of(self, category: Category) -> Intervals:
        """The time covered by the events of one category."""
        if category not in self._unions:
            rows = self.events.category == category
            self._unions[category] = union(self.events.start_ns[rows], self.events.end_ns[rows])
        return self._unions[category]

    @property
    def step_numbers(self) -> Ints:
        """The steps' own numbers, their positions where they carry none; ``UNKNOWN`` for a capture without steps."""
        if not self.has_steps:
            return self.steps.number
        position = np.arange(len(self.steps), dtype=np.int64)
        return np.where(self.steps.number == UNKNOWN, position, self.steps.number)

    @cached_property
    def _unions(self) -> dict[Category, Intervals]:
        return {}


def find_rank_events(
    trace: Trace, *, step_pattern: str | None = None, backward_pattern: str | None = None
) -> tuple[RankEvents, ...]:
    """What each rank in a trace did, in the order of rank, process and device.

    Args:
        trace: The trace.
        step_pattern: See :func:`~ddp_prof.analyze.core.steps.find_steps`.
        backward_pattern: Regular expression for the names of backward ranges.
    """
    on_devices = set(distinct(trace.activities.process))
    found = []
    for process in trace.processes:
        steps = find_steps(trace, process, step_pattern)
        phases = find_phases(trace, process, backward_pattern)
        if process in on_devices:
            found += _device_work(trace, process, steps, phases)
        elif process in trace.ranks or not (on_devices or trace.ranks):
            events = _host_events(trace, process, steps, phases) if _is_ours(trace, process) else empty(Events)
            found.append(_rank(trace, process, None, events, steps, "ranges"))
    return tuple(sorted(map(_without_warmup, found), key=_order))


def _order(rank: RankEvents) -> tuple[bool, int, int, int]:
    return rank.rank is None, rank.rank or 0, rank.process, rank.device or 0


def _device_work(trace: Trace, process: int, steps: Steps, phases: Phases) -> list[RankEvents]:
    mine = trace.activities.process == process
    activities, call = select(trace.activities, mine), trace.launching_calls[mine]
    launch_ns = _looked_up(trace.calls.start_ns, call)
    lane = _looked_up(trace.calls.lane, call)
    phase = phases.kind_at(launch_ns)
    backward = "ranges"
    if BACKWARD_PHASE not in phases.kind:
        by_autograd = np.isin(
            lane, _autograd_lanes(trace, process, lane[activities.category == Category.COMMUNICATION])
        )
        phase[by_autograd] = BACKWARD_PHASE
        backward = "inferred" if by_autograd.any() else "none"
    events = Events(
        activities.start_ns,
        activities.end_ns,
        activities.lane,
        activities.category,
        innermost(steps.start_ns, steps.end_ns, launch_ns),
        phase,
        (activities.kind == Kind.KERNEL).astype(np.int64),
        np.flatnonzero(mine),
    )
    by_host = _host_communication(trace, process, steps, phases)
    result = []
    for device in distinct(activities.device):
        own = select(events, activities.device == device)
        if not np.any(own.category == Category.COMMUNICATION) and not _is_nccls(trace, process):
            own = concatenate(own, by_host)  # gloo with CUDA tensors: the host communicates
        result.append(_rank(trace, process, device, own, steps, backward))
    return result


def _rank(trace: Trace, process: int, device: int | None, events: Events, steps: Steps, backward: str) -> RankEvents:
    has_steps = bool(len(steps))
    if not has_steps and len(events):
        whole = np.array([events.start_ns.min()]), np.array([events.end_ns.max()])
        steps = Steps(np.array([UNKNOWN]), *whole, np.zeros(1, np.bool_))
        events = replace(events, step=np.zeros(len(events), np.int64))
    return RankEvents(process, device, trace.ranks.get(process), events, steps, has_steps, 0, backward)


def _looked_up(column: Ints, rows: Ints) -> Ints:
    """The column's values at the rows, ``UNKNOWN`` where the row is."""
    if not len(column):
        return np.full(len(rows), UNKNOWN, np.int64)
    values: Ints = column[rows]
    values[rows == UNKNOWN] = UNKNOWN
    return values


def _autograd_lanes(trace: Trace, process: int, collective_lanes: Ints) -> list[int]:
    """Autograd's threads: by name, else the threads beside the main one that launch collectives."""
    named = [lane for (pid, lane), name in trace.threads.items() if pid == process and name.startswith("pt_autograd")]
    if named:
        return named
    main = {UNKNOWN, *_main_lanes(trace, process)}
    return [lane for lane in np.unique(collective_lanes).tolist() if lane not in main]


def _main_lanes(trace: Trace, process: int) -> list[int]:
    """The threads that open the ranges of steps; without steps, the one that opens most ranges."""
    mine = trace.spans.process == process
    openers = trace.spans.lane[mine & np.isin(trace.spans.start_ns, find_steps(trace, process).start_ns)]
    lanes, counts = np.unique(trace.spans.lane[mine], return_counts=True)
    busiest = lanes[counts == counts.max(initial=0)]
    return [int(lane) for lane in (openers if len(openers) else np.append(busiest, process))]


def _is_ours(trace: Trace, process: int) -> bool:
    """Whether ranges of ours tell what the process did; others' ranges do not tell waiting from computing."""
    ids = [index for index, name in enumerate(trace.names) if name.startswith((f"{PROCESS}|", f"{ALL_REDUCE}|"))]
    return bool(np.any((trace.spans.process == process) & np.isin(trace.spans.name_id, ids)))


def _is_nccls(trace: Trace, process: int) -> bool:
    """Whether the process said that NCCL communicates: that takes kernels, and a rank without any did nothing."""
    ids = np.unique(trace.spans.name_id[trace.spans.process == process]).tolist()
    said = (parse_range(trace.names[name_id]) for name_id in ids if trace.names[name_id].startswith(f"{PROCESS}|"))
    return any(range_.text("backend") == "nccl" for range_ in said)


def _host_communication(trace: Trace, process: int, steps: Steps, phases: Phases) -> Events:
    """The collectives as the host saw them: our ``all_reduce`` ranges, from launch to completion."""
    rows = find_collective_ranges(trace, process)
    start, end = trace.spans.start_ns[rows], trace.spans.end_ns[rows]
    return _host_work(start, end, Category.COMMUNICATION, phases.kind_at(start), steps)


def find_collective_ranges(trace: Trace, process: int) -> Ints:
    """Rows in the trace's spans of the ``all_reduce`` ranges of a process."""
    ids = [index for index, name in enumerate(trace.names) if name.startswith(f"{ALL_REDUCE}|")]
    return np.flatnonzero((trace.spans.process == process) & np.isin(trace.spans.name_id, ids))


def with_launches(trace: Trace, events: Events) -> LaunchedEvents:
    """Look up the launch of each event."""
    call = _looked_up(trace.launching_calls, events.activity)
    on_host = events.activity == UNKNOWN
    return LaunchedEvents(
        **{column.name: getattr(events, column.name) for column in fields(Events)},
        launch_ns=np.where(on_host, events.start_ns, _looked_up(trace.calls.start_ns, call)),
        launcher=_looked_up(trace.calls.lane, call),
    )


def _host_events(trace: Trace, process: int, steps: Steps, phases: Phases) -> Events:
    """Compute and communication of a CPU run; nothing at all where no range of ours tells of them."""
    waiting = phases.union_of(SYNCHRONIZE_PHASE)
    parts = [_host_communication(trace, process, steps, phases)]
    for kind in range(len(PHASES)):
        busy = phases.union_of(kind) - waiting
        parts.append(_host_work(busy.start_ns, busy.end_ns, Category.COMPUTE, np.full(len(busy), kind), steps))
    return concatenate(*parts)


def _host_work(start_ns: Ints, end_ns: Ints, category: Category, phase: Ints, steps: Steps) -> Events:
    step = innermost(steps.start_ns, steps.end_ns, start_ns)
    rows = len(start_ns)
    return Events(
        start_ns=start_ns,
        end_ns=end_ns,
        lane=np.full(rows, UNKNOWN, np.int64),
        category=np.full(rows, category, np.int64),
        step=step,
        phase=phase,
        kernel=np.zeros(rows, np.int64),
        activity=np.full(rows, UNKNOWN, np.int64),
    )


def _without_warmup(rank: RankEvents) -> RankEvents:
    measured: Mask = ~rank.steps.warmup
    if measured.all():
        return rank
    renumbered = np.where(measured, np.cumsum(measured) - 1, UNKNOWN)
    events = select(rank.events, np.append(measured, True)[rank.events.step])
    return replace(
        rank,
        events=replace(events, step=_looked_up(renumbered, events.step)),
        steps=select(rank.steps, measured),
        warmup_steps=int((~measured).sum()),
    )
