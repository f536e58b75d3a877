"""By how much communication slows compute, from two captures of one job that hide unequal parts of it.

Up to the end of backward both do the same work: ``time - slowed * beside`` is equal, where ``beside`` is how long
compute ran beside collectives. One capture alone does not tell that on a CPU, where ranks and gloo share cores.
"""

from __future__ import annotations

from math import hypot

import numpy as np

from ddp_prof.analyze.statistics import Numbers
from ddp_prof.analyze.step_cost import Slowed
from ddp_prof.analyze.what_if.blocks import half_of_blocks
from ddp_prof.analyze.what_if.structure import RankStructure

LEAST_DIFFERENCE = 0.05
"""What they hide must differ by so large a share of the time up to the end of backward."""

TOO_ALIKE = (
    "both captures hide about as much communication, {one:.1f} and {other:.1f} ms per step, so what it slows does not "
    "show: calibrate with one that waits for each collective, such as naive"
)
IMPOSSIBLE = (
    "the two captures differ by more than communication explains ({share:.0f} % of the time beside it): record both "
    "again, one directly after the other"
)


def calibrate(one: RankStructure, other: RankStructure) -> Slowed:
    """The share of the time beside communication that compute loses; without one, the reason."""

    def times(structure: RankStructure) -> Numbers:
        return np.stack([structure.backward_end_ns - structure.begins_ns, structure.beside_ns["backward_end"]], axis=1)

    return slowed_between(times(one), times(other))


def slowed_between(first: Numbers, second: Numbers) -> Slowed:
    """The same from steps of two captures.

    Args:
        first: How long a step took up to the end of backward, and how long of that compute ran beside collectives;
            nanoseconds, shape (steps, 2).
        second: The same of the other capture.
    """
    (took, beside), (other_took, other_beside) = first.mean(axis=0), second.mean(axis=0)
    if abs(beside - other_beside) < LEAST_DIFFERENCE * took:
        return Slowed(None, None, None, TOO_ALIKE.format(one=beside / 1e6, other=other_beside / 1e6))
    share = float((took - other_took) / (beside - other_beside))
    halves = (half_of_blocks(of[:, 0] - share * of[:, 1], most=95) for of in (first, second))
    half = hypot(*halves) / abs(beside - other_beside)
    if share + half < 0 or share - half > 1:
        return Slowed(None, None, None, IMPOSSIBLE.format(share=100 * share))
    low, high, share = (float(min(0.95, max(0.0, value))) for value in (share - half, share + half, share))
    return Slowed(share, low, high, None)
