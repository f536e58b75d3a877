"""The 95 % interval of a figure, by the bootstrap (B. Efron, 1979), and the steps that stand out.

From the steps of a run, as many steps as it has are drawn with replacement. The ranks of a step wait for each other, so
they are drawn together. The figure is computed for a thousand such draws, and the middle 95 % of the results are its
interval. The seed is fixed. An example with the median of four steps (in ms)::

    steps   12 10 11 15      draws   10 10 15 12 -> 11     11 15 11 12 -> 11.5     12 12 10 11 -> 11.5   ...

Of few units this interval is too narrow, so it is widened: see :func:`_widen`. Steps that resemble the step before, as
at changing clocks or beside other programs, tell less than as many independent ones: see :func:`_count_independent`.
Other units than steps may be drawn, such as the runs of a study; they must be independent of each other. The figure is
the median, or the mean if parts must sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddp_prof.table import Ints

LEAST_STEPS = 3
"""An interval needs at least this number of steps, or other units."""

FEW_STEPS = "too few steps for an interval"
WORTH = 0.01
"""What takes less than this fraction of a step is worth no finding and no advice."""

EACH_ALONE = "each interval is for itself: about one in twenty misses the true value"
"""Note under a table with several ratios and their intervals."""

_DRAWS = 1000
_PERCENTILES = (2.5, 97.5)
_BATCH_VALUES = 2**20
"""Largest number of values that are drawn at once, to limit the memory."""

Numbers = NDArray[Any]
Statistic = Callable[[Numbers], Any]
"""Returns the figure of each draw, from an array of shape (draws, units, values of a unit)."""

median_per_draw: Statistic = partial(np.median, axis=(1, 2))
mean_per_draw: Statistic = partial(np.mean, axis=(1, 2))


IN_TWENTIETH, IN_FORTIETH = 0.05, 0.025
"""Parts of all values that lie beyond one end of an interval of 90 %, and beyond one end of an interval of 95 %."""

MISSES = 2 * IN_FORTIETH
"""How often an interval of 95 % misses the true value."""

_QUANTILES = {
    IN_TWENTIETH: (1.644854, (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)),
    IN_FORTIETH: (1.959964, (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)),
}
"""The value above which such a part lies: of the normal distribution, and of Student's t for 1, 2, ... degrees of
freedom."""


def student_t(freedom: int, above: float = IN_FORTIETH) -> float:
    """Return the value above which the part ``above`` of Student's t with ``freedom`` degrees of freedom lies.

    Beyond the table it is the normal distribution's, with the first two terms of the expansion by E. Cornish and R.
    Fisher (1937), which is right to 0.002.
    """
    z, table = _QUANTILES[above]
    if freedom <= len(table):
        return table[freedom - 1]
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def bootstrap_interval(
    units: Numbers | Sequence[Any], statistic: Statistic = median_per_draw, *, are_consecutive: bool = False
) -> tuple[float, float] | None:
    """Return the 95 % interval of a figure; ``None`` for fewer than :data:`LEAST_STEPS` units.

    A unit (such as a step) is a single value, or a row of values (such as one value per rank). If units
    ``are_consecutive``, as the steps of a run in their order are, they may resemble each other.
    """
    if len(units) < LEAST_STEPS:
        return None
    course = table = np.asarray(units, float).reshape(len(units), -1)
    # A faster way with the same result: draw ranks, which are small integers, instead of values.
    if statistic is median_per_draw and not np.isnan(table).any():
        ordered = np.sort(table, axis=None)
        course = _middle_ranks(table, ordered)  # of ranks, a few outliers hide no likeness
        table, statistic = _ranks(table), partial(_median_of_ranks, ordered)
    figures = np.concatenate([statistic(table[drawn]) for drawn in _draws(len(table), table.shape[1])])
    independent = _count_independent(course.mean(axis=1)) if are_consecutive else len(table)
    return _interval(figures, len(table), independent)


def intervals_of_sums(
    units: Numbers, figures: Sequence[Callable[[Numbers], Numbers]]
) -> list[tuple[float, float] | None]:
    """Return the 95 % interval of each figure, which is made of the sums of the drawn units; as bootstrap_interval.

    Args:
        units: Rows of values, one row per unit. Whole numbers, such as times in nanoseconds, are added exactly.
        figures: Each returns the figure of each draw from the sums; shape (draws, values of a unit).
    """
    if len(units) < LEAST_STEPS:
        return [None] * len(figures)
    # The sum of a draw is how often it holds each unit, times the units: much faster than to add what was drawn.
    sums = np.concatenate([_count_units(drawn) @ units for drawn in _draws(len(units))])
    return [_interval(figure(sums), len(units), len(units)) for figure in figures]


def _interval(figures: Numbers, units: int, independent: float) -> tuple[float, float]:
    """Return the middle 95 % of the figures of all draws, widened for what ``units`` units tell."""
    low, high = np.percentile(figures, _PERCENTILES)
    middle, half_width = (low + high) / 2, _widen(units, independent) * (high - low) / 2
    return float(middle - half_width), float(middle + half_width)


def _widen(units: int, independent: float) -> float:
    """Return by which factor the bootstrap's interval of a figure of ``units`` units is too narrow.

    Draws scatter as if the variance were divided by ``units``. But it is divided by what is known: by ``independent -
    1``, where ``independent`` is ``units`` or, of units that resemble each other, fewer. And their scatter is itself
    known only from few units, for which Student's t stands (T. Hesterberg, What Teachers Should Know About the
    Bootstrap, The American Statistician 69, 2015). The factor is 2.7 for three units, 1.4 for six, 1.04 for fifty. Of
    units that resemble each other, Student's t is that of all units: with that of the independent ones, ten steps of
    which the first few are slow had an interval four times as wide, which let a fourfold exposed time pass.
    """
    return math.sqrt(units / (independent - 1)) * student_t(units - 1) / _QUANTILES[IN_FORTIETH][0]


LEAST_FOR_LIKENESS = 8
"""The least number of units of which likeness is told; fewer are taken as independent."""


def _count_independent(values: Numbers) -> float:
    """Return how many independent units tell as much about a mean as these, which follow each other; at least three.

    If each of n units has the correlation r with the next one and no other memory (an autoregressive process of first
    order), they tell as much as ``n (1 - r) / (1 + r)`` (G. Bayley and J. Hammersley, Supplement to the Journal of the
    Royal Statistical Society 8, 1946): 25 with r = 0.6 are like 6. Units that alternate are not counted as more than
    there are.

    A bootstrap of blocks of consecutive units (H. Künsch, 1989) serves no better: of 400 drawn runs of 12, 20 and 60
    steps with r = 0.6, its 95 % interval of the mean held the truth in 82, 85 and 88 %, this one in 83, 88 and 90 %.
    """
    count, like = len(values), likeness(values - values.mean())
    return max(LEAST_STEPS, count * (1 - like) / (1 + like)) if like else count


def likeness(off: Numbers) -> float:
    """Return the correlation of each value with the next one; 0 if it is negative or cannot be told.

    ``off`` has the distances of the values from their mean. It may have several columns, each a course of its own.
    """
    spread = float((off**2).sum())
    if len(off) < LEAST_FOR_LIKENESS or not spread > 0:  # nor if a value is not a number
        return 0.0
    return max(0.0, float((off[1:] * off[:-1]).sum()) / spread)


def _draws(units: int, values: int = 1) -> Iterator[Ints]:
    """Yield batches of draws, as numbers of the drawn units; shape (draws, units). ``values`` is those of a unit."""
    generator = np.random.default_rng(0)
    batch = max(1, _BATCH_VALUES // (units * values))
    for first in range(0, _DRAWS, batch):
        yield generator.integers(0, units, (min(batch, _DRAWS - first), units))


def _count_units(drawn: Ints) -> Ints:
    """Return how often each draw holds each unit; shape (draws, units), as that of ``drawn``."""
    first = np.arange(0, drawn.size, drawn.shape[1])  # so that each draw has its own numbers for the units
    return np.bincount((drawn + first[:, None]).ravel(), minlength=drawn.size).reshape(drawn.shape)


def _ranks(table: Numbers) -> Numbers:
    """Return the rank of each value, from 0: small integers, whose median is found several times faster."""
    ranks = np.empty(table.size, np.int16 if table.size < 1 << 15 else np.int32)
    ranks[np.argsort(table, axis=None)] = np.arange(table.size)
    return ranks.reshape(table.shape)


def _middle_ranks(table: Numbers, ordered: Numbers) -> Numbers:
    """Return the rank of each value among all, ``ordered``; equal values have one, in the middle of theirs.

    One after another, as by :func:`_ranks`, equal values would seem to grow.
    """
    ranks: Numbers = (np.searchsorted(ordered, table) + np.searchsorted(ordered, table, "right") - 1) / 2
    return ranks


def _median_of_ranks(ordered: Numbers, drawn: Numbers) -> Numbers:
    """Return the median value of each draw.

    Args:
        ordered: The values in ascending order.
        drawn: For each draw the ranks of the drawn values; shape (draws, units, values of a unit).
    """
    ranks, middle = drawn.reshape(len(drawn), -1), ((len(ordered) - 1) // 2, len(ordered) // 2)
    # NumPy sorts numbers of 16 bits by counting, which is faster than to partition them.
    is_short = ranks.dtype == np.int16
    ranks = np.sort(ranks, axis=1, kind="stable") if is_short else np.partition(ranks, middle, axis=1)
    median_values: Numbers = ordered[ranks[:, middle]].sum(axis=1) / 2
    return median_values


def half_width_of_steps(
    ranks: Sequence[Sequence[float] | Numbers],
    statistic: Statistic = median_per_draw,
    keys: Sequence[Sequence[int] | Numbers] = (),
) -> float | None:
    """Return how far a figure's 95 % interval reaches from it, from the steps that all ranks have in common.

    It is the distance to the farther end. If steps are short or long in about equal numbers, the median is one of both,
    and the interval reaches from it to the other. ``None`` if there are too few steps.

    Args:
        ranks: For each rank, the values of its steps.
        statistic: The figure.
        keys: For each rank, the keys of its steps. Without keys, or if too few are in common, steps are identified by
            their position.
    """
    known = [np.asarray(of_rank) for of_rank in ranks if len(of_rank)]
    if not known:
        return None
    positions = [np.arange(len(of_rank)) for of_rank in known]
    step_keys = [np.asarray(of_rank) for of_rank in keys if len(of_rank)] or positions
    if len(reduce(np.intersect1d, step_keys)) < LEAST_STEPS:
        step_keys = positions
    common = reduce(np.intersect1d, step_keys)
    # For each rank, the values of the common steps in the order of their keys.
    units = [
        of_rank[np.argsort(key)][np.isin(np.sort(key), common)] for of_rank, key in zip(known, step_keys, strict=True)
    ]
    table = np.array(units, float).T
    interval = bootstrap_interval(table, statistic, are_consecutive=True)
    if interval is None:
        return None
    figure = float(statistic(table[None])[0])
    return max(figure - interval[0], interval[1] - figure)


def half_width_of_mean(values: Numbers) -> float:
    """Return half of the width of the 95 % interval of the mean of consecutive steps, at least :data:`LEAST_STEPS`.

    ``values`` has one value per step, in their order; the result is in the same unit.
    """
    interval = bootstrap_interval(values, mean_per_draw, are_consecutive=True)
    assert interval is not None
    low, high = interval
    return (high - low) / 2


def half_width_of_change(before: float, after: float) -> float:
    """Return how far the interval reaches for the difference, or the sum, of two independent figures.

    ``before`` and ``after`` are the same of the two figures.
    """
    return math.hypot(before, after)


@dataclass(frozen=True, slots=True)
class StepFigure:
    """The median of the steps of all ranks, and how far its 95 % interval reaches from it.

    ``half_width`` is ``None`` for too few steps.
    """

    value: float
    half_width: float | None


def median_of_steps(ranks: Sequence[Sequence[float]], keys: Sequence[Sequence[int]] = ()) -> StepFigure | None:
    """Return the median over the steps of all ranks; ``None`` without values.

    The arguments are those of :func:`half_width_of_steps`.
    """
    values = [value for of_rank in ranks for value in of_rank]
    return StepFigure(float(np.median(values)), half_width_of_steps(ranks, keys=keys)) if values else None


@dataclass(frozen=True, slots=True)
class RatioOfRepeats:
    """The geometric mean of a ratio over repeats, and its 95 % interval by Student's t of the logarithms.

    ``repeats`` is their number.
    """

    value: float
    low: float
    high: float
    repeats: int

    @property
    def half_width(self) -> float:
        """Half of the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1 <= self.high


def ratio_of_repeats(ratios: Sequence[float]) -> RatioOfRepeats | None:
    """Return the mean and interval of a ratio that was measured in a few independent repeats.

    ``None`` for fewer than three repeats, and if a ratio is not positive.

    Repeats must be independent: other processes, or another day; steps of one run are not.
    """
    if len(ratios) < LEAST_STEPS or min(ratios) <= 0:
        return None
    logarithms = np.log(np.asarray(ratios, float))
    middle, error = float(logarithms.mean()), float(logarithms.std(ddof=1)) / math.sqrt(len(ratios))
    half = student_t(len(ratios) - 1) * error
    low, high = middle - half, middle + half
    return RatioOfRepeats(math.exp(middle), math.exp(low), math.exp(high), len(ratios))


LARGE_SHARE = 1 / 5
"""A step or collective with a larger fraction of all exposed time may be an outlier."""

TIMES_MEDIAN = 3
"""Smallest ratio of an outlier to the median of the others, so that none of four equal steps is an outlier."""

Key = TypeVar("Key", bound="Hashable")


@dataclass(frozen=True, slots=True)
class Outliers:
    """Steps that stand out, and the run's figures with and without them.

    Attributes:
        steps: The key and exposed time, over all ranks, of each step that stands out; the largest first.
        exposed_ns: Exposed time of all steps.
        overlap_ratio: Fraction of all steps' communication that compute hides, 0 to 1.
        exposed_without_ns: Exposed time of the steps that do not stand out.
        overlap_ratio_without: Overlap ratio of these other steps; ``None`` if they do not communicate.
        are_positions: Whether keys are positions, because steps have no numbers, or numbers that repeat.
        comm_ns: Communication of all steps if the steps stand out by that, and not by exposed time; else ``None``.
        held_comm_ns: Communication of the steps that stand out; ``None`` as ``comm_ns``.
    """

    steps: tuple[tuple[int, int], ...]
    exposed_ns: int
    overlap_ratio: float | None
    exposed_without_ns: int
    overlap_ratio_without: float | None
    are_positions: bool = False
    comm_ns: int | None = None
    held_comm_ns: int | None = None


CHANGES_OVERLAP = 0.05
"""Steps that stand out by their communication alone are named if the overlap differs by more without them."""


def find_outlier_keys(exposed_ns: Mapping[Key, int]) -> list[Key]:
    """Return the keys whose value is more than a fifth of the sum, and at least three times the median of the others.

    The largest value comes first.
    """
    total = sum(exposed_ns.values())
    found = []
    for key, value in exposed_ns.items():
        others = [other for name, other in exposed_ns.items() if name != key] if value > LARGE_SHARE * total else []
        if others and value >= TIMES_MEDIAN * median(others):
            found.append(key)
    return sorted(found, key=lambda key: -exposed_ns[key])


def find_outliers(steps: Iterable[tuple[int | None, int | None, int, int]]) -> Outliers | None:
    """Return the steps of a run that stand out by their exposed time; ``None`` if there are none.

    If none does, steps count that stand out by their communication, such as one in which compute waited, too, if the
    overlap of the run depends on them. ``steps`` holds for each step of each rank: its key, its own number, its
    communication time and its exposed time (in ns). Entries without a key belong to no step and are ignored.
    """
    # By key of the step, summed over the ranks; steps that do not communicate do not count.
    exposed: dict[int, int] = {}
    communicated: dict[int, int] = {}
    are_positions = False
    for key, number, comm_ns, exposed_ns in steps:
        if comm_ns and key is not None:
            are_positions |= key != number
            exposed[key] = exposed.get(key, 0) + exposed_ns
            communicated[key] = communicated.get(key, 0) + comm_ns
    keys = find_outlier_keys(exposed)
    by_comm = not keys
    keys = keys or find_outlier_keys(communicated)
    if not keys:
        return None
    rest = [key for key in exposed if key not in keys]
    rest_ns, rest_exposed_ns = (sum(of[key] for key in rest) for of in (communicated, exposed))
    all_exposed_ns, all_ns = sum(exposed.values()), sum(communicated.values())
    ratio, without = 1 - all_exposed_ns / all_ns, 1 - rest_exposed_ns / rest_ns if rest_ns else None
    if by_comm and (without is None or abs(ratio - without) <= CHANGES_OVERLAP):
        return None
    return Outliers(
        steps=tuple((key, exposed[key]) for key in keys),
        exposed_ns=all_exposed_ns,
        overlap_ratio=ratio,
        exposed_without_ns=rest_exposed_ns,
        overlap_ratio_without=without,
        are_positions=are_positions,
        comm_ns=all_ns if by_comm else None,
        held_comm_ns=all_ns - rest_ns if by_comm else None,
    )
