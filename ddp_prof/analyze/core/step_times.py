"""What filled the host's time of each step, as far as one rank tells by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.analyze.core.attribution import SYNCHRONIZE_PHASE
from ddp_prof.analyze.core.steps import find_phases
from ddp_prof.trace import Category, Table, empty

if TYPE_CHECKING:
    from ddp_prof.analyze.core.attribution import RankEvents
    from ddp_prof.trace import Ints, Trace


@dataclass(frozen=True)
class StepTimes(Table):
    """A row a measured step; none where the trace tells no steps.

    Attributes:
        host_ns: Length of the host's range.
        compute_ns: Compute of the rank in it.
        calls_ns: In ``synchronize``, what neither compute nor communication fills: the host's work round its calls.
    """

    host_ns: Ints
    compute_ns: Ints
    calls_ns: Ints


def find_step_times(trace: Trace, rank: RankEvents) -> StepTimes:
    """Look at each step of a rank."""
    if not rank.has_steps:
        return empty(StepTimes)
    start, end = rank.steps.start_ns, rank.steps.end_ns
    compute = rank.union_of(Category.COMPUTE)
    busy = compute | rank.union_of(Category.COMMUNICATION)
    waiting = find_phases(trace, rank.process).union_of(SYNCHRONIZE_PHASE)
    return StepTimes(end - start, compute.covered_ns(start, end), (waiting - busy).covered_ns(start, end))
