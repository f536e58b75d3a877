"""Intervals of measured figures: of one setting, of ratios between settings, of several settings together.

*One setting.* Runs of one setting differ by more than the steps of one run. Three runs or so are too few to know their
scatter, so it is pooled: relative standard deviations of runs about their setting's mean, over settings that are
assumed to scatter alike, weighted by degrees of freedom. That is the error mean square of an analysis of variance
(R. A. Fisher, "Statistical Methods for Research Workers", 1925). The 95 % interval of the median of n runs is then
+- t * s / sqrt(n), with Student's t of the pooled degrees of freedom; from three runs on, times sqrt(pi / 2), the ratio
of the scatter of a median of many normal values to that of their mean.

*Ratios.* A machine that is busy for a while slows all runs of that while. So the sweep runs the variants one after the
other and repeats the round: the runs of one *block*, one repeat of the same work, are near in time. Figures are
compared within blocks, as ratios. Their error is the residual of an additive model of settings and blocks (Fisher's
randomized blocks). The interval of a single figure includes the blocks' part.

*Several settings.* An :class:`Effect` is the mean of one figure over settings, with the interval that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from ddp_prof.analyze.statistics import median_of_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

CONFIDENCE = 0.95

LEAST_FREEDOM = 4
"""Degrees of freedom of a pool, below which a wider pool is taken."""

LEAST_COVERAGE = 0.93
"""Of an interval of order statistics, whose coverage comes in steps: that of the extremes of five is 93.75 %."""

MANY = 1000
"""Degrees of freedom with which Student's t is as good as the normal distribution."""

Truth = Literal["yes", "no", "cannot tell"]
Side = Literal["above", "below"]


Key = TypeVar("Key", bound="Hashable")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured figure.

    Attributes:
        value: Median over runs of the medians of each run's steps, in the unit of the field that holds it.
        half_width: Half of its 95 % interval; ``None`` where it is not known.
        is_between_runs: Whether the interval is from the scatter between runs; else it is from the steps of one run,
            and another run may differ by more.
        paired_half_width: The same for comparisons with figures of the same blocks; ``None`` where it is not known.
        medians: Of each run, by its block.
        paired_freedom: Degrees of freedom of ``paired_half_width``; ``None`` where it is not known.
    """

    value: float
    half_width: float | None = None
    is_between_runs: bool = False
    paired_half_width: float | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    paired_freedom: int | None = None


@dataclass(frozen=True, slots=True)
class Effect:
    """A figure of several settings together.

    Attributes:
        value: Mean over the settings where each has a spread between runs, else their median.
        low: Lower end of its interval; ``None`` where it is not known.
        high: Upper end of it.
        settings: Number of settings that it is of.
        is_by_repeats: Whether the interval follows from the spread of each setting; else, where these have none, from
            how the settings differ among themselves.
    """

    value: float
    low: float | None
    high: float | None
    settings: int
    is_by_repeats: bool

    def is_beyond(self, side: Side, threshold: float) -> Truth:
        """Whether the figure is above, or below, the threshold by more than its spread."""
        if self.low is None or self.high is None:
            return "cannot tell"
        above, below = self.low > threshold, self.high < threshold
        if not (above or below):
            return "cannot tell"
        return "yes" if above == (side == "above") else "no"

    def negated(self) -> Effect:
        """The same of the figure's opposite: what is added where this says what is taken off."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return replace(self, value=-self.value, low=low, high=high)

    def is_within(self, limit: float) -> bool:
        """Whether the whole interval lies between ``-limit`` and ``limit``."""
        return self.low is not None and self.high is not None and -limit < self.low and self.high < limit


def estimate_all(
    samples: Mapping[Key, Mapping[str, Sequence[float]]],
    work_of: Callable[[Key], Hashable],
    pools_of: Callable[[Key], Sequence[Hashable]],
) -> dict[Key, Estimate]:
    """Estimate a figure of all settings of one machine.

    Args:
        samples: Of each setting the values of each run's steps, by the run's repeat; what has none is left out.
        work_of: Settings of the same work share their blocks, one for each repeat.
        pools_of: The pools that a setting belongs to, the narrowest first: settings with the same pool are taken to
            scatter alike, relative to their means.
    """
    medians = {
        key: {repeat: float(np.median(steps)) for repeat, steps in runs.items() if len(steps)}
        for key, runs in samples.items()
    }
    medians = {key: runs for key, runs in medians.items() if runs}
    repeated = {key: runs for key, runs in medians.items() if len(runs) > 1 and np.mean(list(runs.values())) > 0}
    alone = _pool(*_residuals(repeated, lambda *_: None), pools_of)
    paired = _pool(*_residuals(repeated, lambda key, repeat: (work_of(key), repeat)), pools_of)
    found = {}
    for key, runs in medians.items():
        value, pools = float(np.median(list(runs.values()))), pools_of(key)
        half_width, freedom = _interval(value, len(runs), alone, pools)
        between = half_width is not None
        if not between:
            steps = next(steps for steps in samples[key].values() if len(steps))
            of_run = median_of_steps([steps])
            half_width = of_run.half_width if of_run else None
        # Where too few settings share blocks to estimate the blocks' part, it stays in.
        of_pairs, freedom_of_pairs = _interval(value, len(runs), paired, pools)
        if of_pairs is None and between:
            of_pairs, freedom_of_pairs = half_width, freedom
        found[key] = Estimate(value, half_width, between, of_pairs, runs, freedom_of_pairs)
    return found


def half_width(value: float, runs: int, scatter: float, freedom: int) -> float:
    """Half the 95 % interval of a median of so many runs, see the module."""
    factor = math.sqrt(math.pi / 2) if runs > 2 else 1.0
    return student_t(freedom) * scatter * factor * abs(value) / math.sqrt(runs)


Pools = dict["Hashable", tuple[float, float]]
"""Sum of squares and degrees of freedom of each pool."""


def _residuals(
    medians: Mapping[Key, Mapping[str, float]], block_of: Callable[[Key, str], Hashable]
) -> tuple[list[Key], np.ndarray, int]:
    """Of each run its setting and its residual, relative to the setting's mean; and the degrees of freedom.

    The parts of settings and of blocks are removed by least squares, so runs may be missing.
    """
    keys = [key for key, runs in medians.items() for _ in runs]
    if not keys:
        return [], np.array([]), 0
    relative = np.concatenate(
        [np.array(list(runs.values())) / np.mean(list(runs.values())) for runs in medians.values()]
    )
    blocks = [block_of(key, repeat) for key, runs in medians.items() for repeat in runs]
    design = np.column_stack([_indicators(keys), _indicators(blocks)])
    fit, _, rank, _ = np.linalg.lstsq(design, relative, rcond=None)
    return keys, relative - design @ fit, len(keys) - int(rank)


def _indicators(labels: Sequence[Hashable]) -> np.ndarray:
    """A column for each label, 1 where it is."""
    columns = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    found = np.zeros((len(labels), len(columns)))
    found[np.arange(len(labels)), [columns[label] for label in labels]] = 1
    return found


def _pool(
    keys: Sequence[Key], residuals: np.ndarray, freedom: int, pools_of: Callable[[Key], Sequence[Hashable]]
) -> Pools:
    """The pools; each has the part of the degrees of freedom that it has of the runs."""
    found: Pools = {}
    for key, residual in zip(keys, residuals.tolist(), strict=True):
        for pool in pools_of(key):
            squares, own = found.get(pool, (0.0, 0.0))
            found[pool] = squares + residual**2, own + freedom / len(keys)
    return found


def _interval(
    value: float, runs: int, pools: Pools, names: Sequence[Hashable]
) -> tuple[float, int] | tuple[None, None]:
    """Half the interval, and its degrees of freedom.

    From the narrowest pool that is large enough, else from the widest; ``None`` where that has no freedom left.
    """
    known = [pools[name] for name in names if name in pools]
    squares, freedom = next((value for value in known if value[1] >= LEAST_FREEDOM), known[-1] if known else (0.0, 0.0))
    if round(freedom, 6) < 1:
        return None, None
    whole = int(freedom + 1e-6)
    return half_width(value, runs, math.sqrt(squares / freedom), whole), whole


def quotient(above: Estimate, below: Estimate) -> Estimate:
    """A ratio of two figures: the median over the blocks that both have a run in, else that of their medians.

    Its relative error is, to first order, that of both together.
    """
    common = [block for block in above.medians if below.medians.get(block)]
    if not common or above.paired_half_width is None or below.paired_half_width is None:
        return Estimate(above.value / below.value)
    ratio = float(np.median([above.medians[block] / below.medians[block] for block in common]))
    half_width = math.hypot(above.paired_half_width, ratio * below.paired_half_width) / below.value
    fewer = min(len(above.medians), len(below.medians)) / len(common)
    freedom = min((part.paired_freedom for part in (above, below) if part.paired_freedom is not None), default=None)
    return derived(ratio, half_width * math.sqrt(fewer), freedom)


def relative_saving(before: Estimate, after: Estimate) -> Estimate:
    """What the second takes off the first, as a share of that."""
    ratio = quotient(after, before)
    return derived(1 - ratio.value, ratio.paired_half_width, ratio.paired_freedom)


def derived(value: float, half_width: float | None, freedom: int | None = None) -> Estimate:
    """A figure computed from others, with the error that follows from theirs within blocks."""
    return Estimate(value, paired_half_width=half_width, paired_freedom=freedom)


def root_of_squares(*figures: Estimate) -> float | None:
    """Spread of a sum or difference of figures whose errors are independent."""
    halves = [figure.paired_half_width for figure in figures if figure.paired_half_width is not None]
    return math.hypot(*halves) if len(halves) == len(figures) else None


def combine(estimates: Sequence[Estimate], *, choices: int = 1) -> Effect | None:
    """The effect over several settings, with its interval; ``None`` without settings.

    Where each setting has a spread between runs, this is their mean, whose error follows from theirs. Where they have
    none, it is their median, between the order statistics that cover the median with a probability of at least 93 %
    (W. J. Conover, "Practical Nonparametric Statistics").

    Args:
        estimates: One of each setting.
        choices: Number of candidates of which the figure is the best. Picking the best favours chance, so the interval
            is widened by Bonferroni's correction.
    """
    if not estimates:
        return None
    values, count = np.sort([estimate.value for estimate in estimates]), len(estimates)
    halves = [estimate.paired_half_width for estimate in estimates if estimate.paired_half_width is not None]
    if len(halves) == count:
        freedom = min(
            (estimate.paired_freedom for estimate in estimates if estimate.paired_freedom is not None), default=MANY
        )
        mean, reach = float(np.mean(values)), math.hypot(*halves) / count * _widening(choices, freedom)
        return Effect(mean, mean - reach, mean + reach, count, is_by_repeats=True)
    median = float(np.median(values))
    rank = _order_statistic(count, 1 - (1 - LEAST_COVERAGE) / choices)
    if rank is None:
        return Effect(median, None, None, count, is_by_repeats=False)
    return Effect(median, float(values[rank]), float(values[-1 - rank]), count, is_by_repeats=False)


def median_interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of a median, between two order statistics; ``None`` for fewer than six values."""
    rank = _order_statistic(len(values), CONFIDENCE)
    ordered = sorted(values)
    return (None, None) if rank is None else (float(ordered[rank]), float(ordered[-1 - rank]))


def _widening(choices: int, freedom: int) -> float:
    """How much wider an interval must be to hold for each of so many choices at once."""
    if choices == 1:
        return 1.0
    return student_t(freedom, 1 - (1 - CONFIDENCE) / choices) / student_t(freedom)


def _order_statistic(count: int, coverage: float) -> int | None:
    """How many values from either end the interval of a median starts; ``None`` where even the extremes are too few."""
    from scipy.special import bdtr

    ranks = [rank for rank in range((count + 1) // 2) if 1 - 2 * float(bdtr(rank, count, 0.5)) >= coverage]
    return max(ranks, default=None)


def student_t(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The value that Student's t exceeds to either side with probability ``1 - confidence``."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))
