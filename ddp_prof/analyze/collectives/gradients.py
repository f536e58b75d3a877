"""Which collectives reduce gradients: what buckets and hooks are about."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE
from ddp_prof.analyze.core.collective_ranges import ALL_REDUCE, NOTIFY, OPERATIONS
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, distinct_rows, take_or_unknown

_REDUCTIONS = (UNKNOWN, OPERATIONS.index(ALL_REDUCE), OPERATIONS.index("reduce_scatter"))
"""Operations that gradients may be reduced by; ``UNKNOWN`` where the trace does not tell the operation."""


def carry_gradients(rank: RankCollectives) -> Mask:
    """Which collectives of a rank may be taken for reductions of gradients.

    A bucket of ours is one. Of others, a reduction that backward launched; or one that was launched after it, where
    backward launched none in the step: else it is that of a norm or a loss. Where forward launches the same, it is of
    tensors; where no phase is known, as in a trace of inference, nothing says that it is of gradients.
    """
    timings = rank.timings
    is_reduction = np.isin(timings.operation, _REDUCTIONS)
    _, step = distinct_rows(timings.step)
    _, alike = distinct_rows(timings.step, timings.operation, timings.group)
    knows_backward = take_or_unknown(rank.backward_end_ns, timings.step, NO_TIME) != NO_TIME
    tells_phase = (timings.phase != UNKNOWN) & (timings.operation != OPERATIONS.index(NOTIFY))
    in_backward = timings.phase == BACKWARD_PHASE
    is_late = ~_are_with_any(step, is_reduction & in_backward)
    of_tensors = _are_with_any(alike, timings.phase == PHASES.index(FORWARD))
    is_launched_so = (in_backward | is_late) & ~of_tensors & _are_with_any(step, knows_backward | tells_phase)
    found: Mask = is_reduction & ((timings.bucket != UNKNOWN) | is_launched_so)
    return found


def _are_with_any(group: Ints, chosen: Mask) -> Mask:
    """Which rows have a chosen one in their group."""
    found: Mask = (np.bincount(group[chosen], minlength=int(group.max(initial=-1)) + 1) > 0)[group]
    return found
