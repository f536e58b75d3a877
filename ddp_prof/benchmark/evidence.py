"""A figure of several settings together, and whether it is beyond a threshold by more than its spread."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ddp_prof.benchmark.spread import CONFIDENCE, student_t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.benchmark.spread import Estimate

LEAST_COVERAGE = 0.93
"""Of an interval of order statistics, whose coverage comes in steps: that of the extremes of five is 93.75 %."""

MANY = 1000
"""Degrees of freedom with which Student's t is as good as the normal distribution."""

Truth = Literal["yes", "no", "cannot tell"]
Side = Literal["above", "below"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A figure of several settings together.

    Attributes:
        value: Mean over the settings where each has a spread between runs, else their median.
        low: Lower end of its interval; ``None`` where nothing tells one.
        high: Upper end.
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

    def negated(self) -> Evidence:
        """The same of the figure's opposite: what is added where this says what is taken off."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return replace(self, value=-self.value, low=low, high=high)

    def is_within(self, limit: float) -> bool:
        """Whether the whole interval lies between ``-limit`` and ``limit``."""
        return self.low is not None and self.high is not None and -limit < self.low and self.high < limit


def gather(estimates: Sequence[Estimate], *, choices: int = 1) -> Evidence | None:
    """Several settings together, and how far that may be off; ``None`` without settings.

    Where each setting has a spread between runs, this is their mean, whose error follows from theirs. Where they have
    none, it is their median, between the order statistics that hold that of such settings in 93 or more of 100 cases
    (W. J. Conover, "Practical Nonparametric Statistics").

    Args:
        estimates: One of each setting.
        choices: Of how many candidates the figure is that of the best: picking the best favours luck, so the interval
            is made as wide as Bonferroni asks.
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
        return Evidence(mean, mean - reach, mean + reach, count, is_by_repeats=True)
    median = float(np.median(values))
    rank = _order_statistic(count, 1 - (1 - LEAST_COVERAGE) / choices)
    if rank is None:
        return Evidence(median, None, None, count, is_by_repeats=False)
    return Evidence(median, float(values[rank]), float(values[-1 - rank]), count, is_by_repeats=False)


def _widening(choices: int, freedom: int) -> float:
    """How much wider an interval must be to hold for each of so many choices at once."""
    if choices == 1:
        return 1.0
    return student_t(freedom, 1 - (1 - CONFIDENCE) / choices) / student_t(freedom)


def _order_statistic(count: int, coverage: float) -> int | None:
    """How many values from either end the interval of a median starts; ``None`` where even the extremes are too few."""
    found, tail = None, 0.0
    for rank in range((count + 1) // 2):
        tail += math.comb(count, rank) / 2**count
        if 1 - 2 * tail < coverage:
            break
        found = rank
    return found
