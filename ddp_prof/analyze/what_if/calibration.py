"""By how much communication slows compute, from two captures of one job that overlap unequal parts of it.

Up to the end of backward, both captures do the same work, so ``time - slowed * beside`` is equal in both; ``beside`` is
how long compute ran at the same time as collectives. The two equations give ``slowed``. On a CPU, where ranks and gloo
share cores, one capture alone does not tell it.
"""

from __future__ import annotations

from math import hypot

import numpy as np

from ddp_prof.analyze.statistics import Numbers, half_width_of_mean
from ddp_prof.analyze.step_cost import Slowed
from ddp_prof.analyze.what_if.structure import RankStructure

LEAST_DIFFERENCE = 0.05
"""The communication that the captures overlap must differ by this fraction of the time up to the end of backward."""

TOO_ALIKE = (
    "both captures hide about as much communication, {one:.1f} and {other:.1f} ms per step, so by how "
    "much it slows compute does not show: calibrate with a capture that {differs}"
)
HIDES_LESS = "waits for each collective, such as naive"
HIDES_MORE = "hides more of it, as with smaller buckets"
IMPOSSIBLE = (
    "the two captures differ by more than communication explains ({share:.0f} % of the time beside it): record both "
    "again, one directly after the other"
)


def calibrate(one: RankStructure, other: RankStructure) -> Slowed:
    """Return the fraction of the time beside communication that compute loses, from one rank of each of two captures.

    The result has no fraction but a reason where the captures are too alike, or differ by more than communication can
    explain.
    """

    def times(structure: RankStructure) -> Numbers:
        """Return an array of shape (steps, 2): see ``first`` of :func:`slowed_between`."""
        return np.stack([structure.backward_end_ns - structure.begins_ns, structure.beside_ns["backward_end"]], axis=1)

    return slowed_between(times(one), times(other))


def slowed_between(first: Numbers, second: Numbers) -> Slowed:
    """Return the same as :func:`calibrate`, from the times of the steps of the two captures.

    Args:
        first: For each step of one capture, how long it took up to the end of backward, and how long compute ran beside
            collectives in that time; nanoseconds, shape (steps, 2).
        second: The same for the other capture.
    """
    (took, beside), (other_took, other_beside) = first.mean(axis=0), second.mean(axis=0)
    if abs(beside - other_beside) < LEAST_DIFFERENCE * took:
        differs = HIDES_LESS if beside >= LEAST_DIFFERENCE * took else HIDES_MORE  # none hides less than nothing
        return Slowed(None, None, None, TOO_ALIKE.format(one=beside / 1e6, other=other_beside / 1e6, differs=differs))
    share = float((took - other_took) / (beside - other_beside))
    # The interval: by how much the steps of each capture vary in ``took - share * beside``; both add as variances do.
    halves = (half_width_of_mean(of[:, 0] - share * of[:, 1]) for of in (first, second))
    half = hypot(*halves) / abs(beside - other_beside)
    if share + half < 0 or share - half > 1:
        return Slowed(None, None, None, IMPOSSIBLE.format(share=100 * share))
    # What estimates say beyond what can be is cut off: nothing is sped up, and compute never quite stops.
    low, high, share = (float(min(0.95, max(0.0, value))) for value in (share - half, share + half, share))
    return Slowed(share, low, high, None)
