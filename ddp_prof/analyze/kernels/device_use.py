"""How the devices of a run spent their time, as shown by ``ddp-prof kernels``.

*What hid communication*: compute that ran at the same time. If compute of several phases did, an instant belongs to the
first of them in :data:`PHASE_ORDER`, and among kinds of compute of this phase to the first by name::

    communication  ..########..
    backward       ####..####..     hid 2 + 4
    optimizer      ........####     hides nothing: backward comes first

*Why a device was idle*: until the operation that ends the idle stretch was launched, the host was late, and its phase
at each instant is the cause. After the launch, the operation was launched, but had not begun::

    device    ####..............####
    launch               ^              of the operation that ends the stretch
    host      ffffffbbbbbbbbbbbbbbbb    in forward (f), then in backward (b)
    cause         ffbbbbb|------|       forward, backward, then: launched, not begun

On a CPU nothing is launched: all idle time is divided by the host's phase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE
from ddp_prof.analyze.core.blocking import NO_COPIES, NO_SETS
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.recording import LOST_CALLS
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.kernels.kernel_times import KernelTime, kind_of_compute
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame
from ddp_prof.analyze.why_unknown import (
    LOST_LAUNCHES,
    NOT_TIMED,
    NOTHING_LEFT,
    has_no_usable_events,
    hides_compute,
    hides_work,
    lacks_times_of_communication,
    loses_launches,
    why_unknown,
    why_unknown_work,
)
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES, SYNCHRONIZE
from ddp_prof.trace import NEVER, NO_TIME, UNKNOWN, Category, Ints, concatenate

HOST = "host"
"""Kind of compute on a CPU, where no kernels are known."""

PHASE_ORDER = (BACKWARD, FORWARD, OPTIMIZER, SYNCHRONIZE, None)


@dataclass(frozen=True, slots=True)
class HiddenTime:
    """Communication of a rank that compute of one phase and kind (:data:`HOST` or one of ``KINDS``) hid."""

    phase: str | None
    kind: str
    overlapped_ns: int


def measure_hidden(rank: RankEvents) -> tuple[HiddenTime, ...]:
    """Return a rank's overlapped time by the phase and kind of compute that hid it.

    The parts sum to the overlapped time exactly. Empty parts are left out.
    """
    trace, events = rank.trace, rank.events
    if rank.beside is not None:  # compute of steps that do not count hides communication, too
        events = concatenate(events, rank.beside)
    rows = np.flatnonzero(events.category == Category.COMPUTE)
    left = rank.union_of(Category.COMPUTE) & rank.union_of(Category.COMMUNICATION)
    name_id = np.full(len(rows), UNKNOWN) if rank.device is None else trace.activities.name_id[events.activity[rows]]
    used, which = np.unique(name_id, return_inverse=True)
    kind_of_name = [HOST if number == UNKNOWN else kind_of_compute(trace.names[number]) for number in used.tolist()]
    kinds = sorted(set(kind_of_name))
    kind = np.array([kinds.index(name) for name in kind_of_name], np.int64)[which]
    found = []
    # Each phase and kind takes its part of the time that is left.
    for phase in PHASE_ORDER:
        in_phase = events.phase[rows] == (UNKNOWN if phase is None else PHASES.index(phase))
        for number in np.unique(kind[in_phase]).tolist():
            own = rows[in_phase & (kind == number)]
            part = left & union(events.start_ns[own], events.end_ns[own])
            if len(part):
                found.append(HiddenTime(phase, kinds[number], part.length_ns))
                left = left - part
    return tuple(found)


OTHER_STEP = "communication of another step"
PROFILER = "the profiler at work"
NOT_BEGUN = "launched, not begun"
HOST_IN = {phase: f"host in {phase}" for phase in (SYNCHRONIZE, FORWARD, BACKWARD, OPTIMIZER)}
HOST_OUTSIDE = "host outside of named phases"
UNKNOWN_CAUSE = "unknown"

CAUSES = (OTHER_STEP, PROFILER, NOT_BEGUN, *HOST_IN.values(), HOST_OUTSIDE, UNKNOWN_CAUSE)
"""Causes of idle time. If several apply to an instant, the first one counts."""


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Idle time of a rank's steps, and its causes.

    Attributes:
        idle_ns: The sum over all steps; ``None`` if not known.
        causes: Pairs of a cause, one of :data:`CAUSES`, and its time in nanoseconds; they sum to ``idle_ns`` exactly.
        reason: Why idle time is not known; ``None`` if it is.
    """

    idle_ns: int | None
    causes: tuple[tuple[str, int], ...]
    reason: str | None


def _why_idle_unknown(rank: RankEvents) -> str | None:
    """Return why the idle time of a rank is not known; ``None`` if it is."""
    if has_no_usable_events(rank) or rank.why_left_out:
        return why_unknown_work(rank)
    if (reason := why_unknown(rank)) in NOT_TIMED:
        return reason
    if rank.lacks_copies:
        return NO_COPIES
    if rank.lacks_sets:
        return NO_SETS
    if rank.has_steps and (rank.recording.lacks_calls or loses_launches(rank)):
        # What ran in the gaps of a step may be its own.
        return LOST_CALLS if rank.recording.lacks_calls else LOST_LAUNCHES
    if hides_work(rank):
        return why_unknown_work(rank) or "some kernels have no name, so what ran is not known"
    if rank.device is not None and len(rank.events) == 1:
        return "a single kernel or copy was recorded, and nothing lies between the first and the last"
    return None


def measure_idle(rank: RankEvents) -> IdleTime:
    """Return the idle time of a rank's steps, divided by cause."""
    if reason := _why_idle_unknown(rank):
        return IdleTime(None, (), reason)
    parts = rank.breakdown
    totals = Counter({OTHER_STEP: int(parts.other_comm_ns.sum())})
    # From all time in which the device does nothing, each cause takes its part of what is left.
    gaps, pending, undecided = _find_gaps(rank)
    if rank.clocks_disagree:  # the host's ranges say nothing about times of the device
        totals[UNKNOWN_CAUSE] = int(gaps.covered_ns(parts.start_ns, parts.end_ns).sum())
        causes = tuple((cause, totals[cause]) for cause in CAUSES if totals[cause])
        return IdleTime(int(parts.idle_ns.sum()), causes, None)
    for cause, instants in (
        (PROFILER, union(rank.trace.overhead.start_ns, rank.trace.overhead.end_ns)),
        (NOT_BEGUN, pending),
        (UNKNOWN_CAUSE, undecided),
        *((name, rank.phases.innermost_of(PHASES.index(phase))) for phase, name in HOST_IN.items()),
        (HOST_IN[BACKWARD], rank.inferred_backward.innermost_of(BACKWARD_PHASE)),
        (HOST_OUTSIDE, gaps),
    ):
        part = gaps & instants
        gaps = gaps - part
        # Windows of steps may overlap: idle time in both counts in both, as in the figures of steps.
        totals[cause] += int(part.covered_ns(parts.start_ns, parts.end_ns).sum())
    causes = tuple((cause, totals[cause]) for cause in CAUSES if totals[cause])
    return IdleTime(int(parts.idle_ns.sum()), causes, None)


def measure_starvation(rank: RankEvents) -> Ints | None:
    """Return for each step the time (ns) in which its device was idle and its next operation had not been launched.

    ``None`` if this is not known.
    """
    if rank.device is None or rank.clocks_disagree or _why_idle_unknown(rank):
        return None
    gaps, pending, undecided = _find_gaps(rank)
    starved = gaps - pending - undecided - union(rank.trace.overhead.start_ns, rank.trace.overhead.end_ns)
    return starved.covered_ns(rank.breakdown.start_ns, rank.breakdown.end_ns)


def _find_gaps(rank: RankEvents) -> tuple[Intervals, Intervals, Intervals]:
    """Return the gaps in which a rank does nothing, and two parts of them that tell a cause.

    Returns:
        All gaps; the parts of the gaps after the launch of the event that ends the gap; the gaps of which this launch
        is not known. The latter two are empty on a CPU.
    """
    events, parts = rank.events, rank.breakdown
    busy, nothing = union(events.start_ns, events.end_ns), union(events.start_ns[:0], events.end_ns[:0])
    if rank.beside is not None:
        busy |= rank.union_of(Category.COMPUTE) | rank.union_of(Category.MEMORY)
    edges = np.concatenate([parts.start_ns, parts.end_ns, events.start_ns, events.end_ns])
    gaps = union(edges.min(keepdims=True), edges.max(keepdims=True)) - busy
    if rank.device is None:
        return gaps, nothing, nothing
    rows = np.flatnonzero(events.end_ns > events.start_ns)
    launch = np.where(events.launch_ns == NO_TIME, NEVER, events.launch_ns)[rows]
    rows = rows[np.lexsort((launch, events.start_ns[rows]))]  # if events start together, the first launch counts
    # The event with whose start a gap ends; -1 after the last event.
    ending = np.append(rows, -1)[np.searchsorted(events.start_ns[rows], gaps.end_ns)]
    launched = np.where(ending < 0, NO_TIME, events.launch_ns[ending])
    is_known = launched != NO_TIME
    pending = union(np.maximum(gaps.start_ns, launched)[is_known], gaps.end_ns[is_known])
    return gaps, pending, Intervals(gaps.start_ns[~is_known], gaps.end_ns[~is_known])


@dataclass(frozen=True)
class RankUse:
    """How the device of one rank spent its time.

    The parts in ``hidden`` sum to ``overlapped_ns``, which is ``None`` if not known.
    """

    process: int
    device: int | None
    rank: int | None
    overlapped_ns: int | None
    hidden: tuple[HiddenTime, ...]
    idle: IdleTime


@dataclass(frozen=True)
class DeviceUse(FrameResult):
    """The ranks of a run, and the kernels of all ranks together."""

    ranks: tuple[RankUse, ...]
    kernels: tuple[KernelTime, ...]

    def to_frame(self) -> DataFrame:
        """Return a table with one row per kernel."""
        return make_frame(KernelTime, self.kernels)


def measure_rank_use(rank: RankEvents) -> RankUse:
    """Return how the device of a rank spent its time."""
    reason, comm_ns = why_unknown(rank), rank.union_of(Category.COMMUNICATION).length_ns
    is_unknown = has_no_usable_events(rank) or rank.hides_waits or (hides_compute(rank) and comm_ns > 0)
    is_unknown |= reason in NOTHING_LEFT and comm_ns > 0
    is_unknown |= reason in NOT_TIMED or lacks_times_of_communication(rank, reason, comm_ns)
    hidden = () if is_unknown else measure_hidden(rank)
    return RankUse(
        process=rank.process,
        device=rank.device,
        rank=rank.rank,
        overlapped_ns=None if is_unknown else sum(part.overlapped_ns for part in hidden),
        hidden=hidden,
        idle=measure_idle(rank),
    )
