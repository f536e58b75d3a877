"""Why a device was idle, each nanosecond once.

An idle stretch ends with the work that starts next. Until that work was launched the host was late, and the host's
phase says at what; from then on it was launched and had not begun::

    device    ####..............####
    launch               ^              of the work that ends the stretch
    host      ffffffbbbbbbbbbbbbbbbb    in forward, then in backward
    cause         ffbbbbb|------|       the last part: launched, not begun

On a CPU nothing is launched: all is by the host's phase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.quality.unknown_work import hides_work, is_blind
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES, SYNCHRONIZE
from ddp_prof.trace import NO_TIME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddp_prof.analyze.core.rank_events import RankEvents

OTHER_STEP = "communication of another step"
PROFILER = "the profiler at work"
NOT_BEGUN = "launched, not begun"
HOST_IN = {phase: f"host in {phase}" for phase in (SYNCHRONIZE, FORWARD, BACKWARD, OPTIMIZER)}
HOST_OUTSIDE = "host outside of named phases"
UNKNOWN_CAUSE = "unknown"

CAUSES = (OTHER_STEP, PROFILER, NOT_BEGUN, *HOST_IN.values(), HOST_OUTSIDE, UNKNOWN_CAUSE)
"""In the order in which an instant is given to them."""


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Idle time of a rank's steps.

    Attributes:
        idle_ns: Sum of its steps' ``idle_ns``; ``None`` where it is not known, with a reason.
        causes: Each cause with its time; they sum to ``idle_ns`` exactly. Those of no time are left out.
    """

    idle_ns: int | None
    causes: tuple[tuple[str, int], ...]
    reason: str | None


def measure_idle(rank: RankEvents) -> IdleTime:
    """Divide the idle time of a rank's steps by cause."""
    if is_blind(rank):
        return IdleTime(None, (), "the trace does not tell what the rank did")
    if hides_work(rank):
        return IdleTime(None, (), "CUDA graphs were recorded whole, or kernels have no name: what ran is not known")
    if rank.device is not None and len(rank.events) == 1:
        return IdleTime(
            None, (), "a single kernel or copy was recorded, and nothing lies between the first and the last"
        )
    parts = rank.breakdown
    if not len(parts):
        return IdleTime(None, (), "no step was measured")
    totals = Counter({OTHER_STEP: int(parts.other_comm_ns.sum())})
    for cause, instants in _divide(rank):
        # Windows of steps may overlap: what is idle in both counts in both, as in their figures.
        totals[cause] += int(instants.covered_ns(parts.start_ns, parts.end_ns).sum())
    causes = tuple((cause, totals[cause]) for cause in CAUSES if totals[cause])
    return IdleTime(int(parts.idle_ns.sum()), causes, None)


def _divide(rank: RankEvents) -> Iterator[tuple[str, Intervals]]:
    """All time in which the rank's device does nothing, cause by cause, none of it twice."""
    gaps, pending, undecided = _gaps(rank)
    for cause, instants in (
        (PROFILER, union(rank.trace.overhead.start_ns, rank.trace.overhead.end_ns)),
        (NOT_BEGUN, pending),
        (UNKNOWN_CAUSE, undecided),
        *((name, rank.phases.innermost_of(PHASES.index(phase))) for phase, name in HOST_IN.items()),
        (HOST_IN[BACKWARD], rank.inferred_backward.innermost_of(BACKWARD_PHASE)),
    ):
        part = gaps & instants
        yield cause, part
        gaps = gaps - part
    yield HOST_OUTSIDE, gaps


def _gaps(rank: RankEvents) -> tuple[Intervals, Intervals, Intervals]:
    """The time between a rank's events, and two parts of it: after the launch of what ends it, and without one."""
    events, parts = rank.events, rank.breakdown
    busy, nothing = union(events.start_ns, events.end_ns), union(events.start_ns[:0], events.end_ns[:0])
    edges = np.concatenate([parts.start_ns, parts.end_ns, events.start_ns, events.end_ns])
    gaps = union(edges.min(keepdims=True), edges.max(keepdims=True)) - busy
    if rank.device is None:
        return gaps, nothing, nothing
    rows = np.flatnonzero(events.end_ns > events.start_ns)
    launch = np.where(events.launch_ns == NO_TIME, np.iinfo(np.int64).max, events.launch_ns)[rows]
    rows = rows[np.lexsort((launch, events.start_ns[rows]))]  # of those that start together the one launched first
    # The one that starts when the gap ends; after the last one there is none.
    ending = np.append(rows, -1)[np.searchsorted(events.start_ns[rows], gaps.end_ns)]
    launched = np.where(ending < 0, NO_TIME, events.launch_ns[ending])
    is_known = launched != NO_TIME
    pending = union(np.maximum(gaps.start_ns, launched)[is_known], gaps.end_ns[is_known])
    return gaps, pending, Intervals(gaps.start_ns[~is_known], gaps.end_ns[~is_known])
