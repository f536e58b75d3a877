"""Whether the first steps of a run take longer than all others, or the last ones take another time.

Then its figures mix two states of the program, and a median over all steps may stand for neither. Such first steps are
often warm-up that nothing marks: kernels are compiled, memory is allocated. Later a clock may drop::

    ms   83 85 83 82 28 29 28 28      the first 4 of 8 steps take 83, the others 28; the median of all is 55
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.statistics import LEAST_STEPS

_LEAST_RATIO = 1.25
"""Smallest ratio of the two levels."""

_LEAST_DEVIATIONS = 4
"""Smallest distance of the two levels, in standard deviations of a step about its own level.

Of runs of 20 steps whose lengths vary by 20 %, each with the part 0.6 of the step before, 14 in 100 divided into two
levels without this, and 2 with it. Of those in which the first steps take 1.5 times as long, and lengths vary by 3 %,
all do; if they vary by 10 %, six in ten.
"""

_DEVIATIONS_OF_MEDIAN = 1.4826
"""Standard deviation of normal values, as a multiple of the median of their distances from the middle."""

_MOST_ASTRAY = 0.1
"""Largest part of the steps that may be nearer to the level of the other side, such as one that writes a checkpoint."""

_MOVES_MEAN, _MOVES_MEDIAN = 0.1, 0.05
"""By which part mean or median of all steps must differ from those of the side with more steps."""


@dataclass(frozen=True, slots=True)
class LevelChange:
    """The first steps take another time than the others.

    Attributes:
        first: Number of the first steps.
        steps: Number of all steps.
        before_ns: Median length of the first steps.
        after_ns: Median length of the others.
        moves_median: Whether the median of all steps differs from that of the side with more steps.
    """

    first: int
    steps: int
    before_ns: int
    after_ns: int
    moves_median: bool


def find_level_change(lengths_ns: Sequence[int]) -> LevelChange | None:
    """Return where the steps divide into two levels; ``None`` if they do not, or if no figure depends on it.

    The division is the one after which the logarithms of the lengths have the least sum of squares about the means of
    both sides. Both sides need :data:`~ddp_prof.analyze.statistics.LEAST_STEPS` steps, except that fewer first steps
    count if they are longer.

    Args:
        lengths_ns: The lengths of the steps, in their order.
    """
    count = len(lengths_ns)
    if count < LEAST_STEPS or min(lengths_ns) <= 0:
        return None
    lengths = np.asarray(lengths_ns, float)
    logarithms = np.log(lengths / lengths.mean())
    # What both sides together have less of the sum of squares than all steps have, for each number of first steps.
    first = np.arange(1, count)
    sums = np.cumsum(logarithms)[:-1]
    gains = (sums - first * logarithms.mean()) ** 2 * count / (first * (count - first))
    at = int(gains.argmax()) + 1
    before, after = float(np.median(lengths[:at])), float(np.median(lengths[at:]))
    if max(before, after) < _LEAST_RATIO * min(before, after):
        return None
    # Lengths that vary much divide into two levels by chance.
    own_level = np.where(np.arange(count) < at, before, after)
    scatter = _DEVIATIONS_OF_MEDIAN * float(np.median(np.abs(np.log(lengths / own_level))))
    if abs(math.log(before / after)) < _LEAST_DEVIATIONS * scatter:
        return None
    # A step is astray if it is nearer to the level of the other side.
    is_long, is_first = lengths > math.sqrt(before * after), np.arange(count) < at
    is_astray = is_long != (is_first if before > after else ~is_first)
    if is_astray.sum() > _MOST_ASTRAY * count:
        return None
    # Figures depend on the change if those of all steps are not those of the side with more steps.
    most = lengths[:at] if at > count - at else lengths[at:]
    moves_mean = abs(lengths.mean() / most.mean() - 1) > _MOVES_MEAN
    moves_median = bool(abs(np.median(lengths) / np.median(most) - 1) > _MOVES_MEDIAN)
    has_both = min(at, count - at) >= LEAST_STEPS
    is_warmup = at <= count - at and before > after
    if not (moves_mean or moves_median) or not (has_both or is_warmup):
        return None
    return LevelChange(at, count, round(before), round(after), moves_median)
