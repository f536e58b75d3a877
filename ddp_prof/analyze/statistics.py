"""The statistic of all figures of a step: the median with its interval; the mean only where parts must sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEAST_STEPS = 3
"""Steps from which a scatter can be told."""

NOTCH = 1.57
"""Half of a median's interval, in interquartile ranges over the root of the number of values (McGill, Tukey and Larsen,
"Variations of Box Plots", The American Statistician 32, 1978): medians whose intervals do not meet differ with about
95 % confidence."""

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class StepMedian:
    """The median of a figure over the steps of all ranks.

    Attributes:
        value: The median.
        half_width: Half of its interval; ``None`` where fewer than :data:`LEAST_STEPS` steps tell it. The ranks of a
            step wait for one another, so that n is the number of steps.
    """

    value: float
    half_width: float | None


def median_of_steps(ranks: Sequence[Sequence[float]]) -> StepMedian | None:
    """The median of a figure of the steps of each rank, over all of them; ``None`` without values."""
    values = [value for of_rank in ranks for value in of_rank]
    if not values:
        return None
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    steps = min(len(of_rank) for of_rank in ranks if of_rank)
    return StepMedian(median, NOTCH * (high - low) / steps**0.5 if steps >= LEAST_STEPS else None)


def student_t(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The value that Student's t exceeds to either side with probability ``1 - confidence``."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


def half_width_of_mean(values: NDArray[np.floating[Any]]) -> int:
    """Half of the 95 % interval of the mean of independent values, by Student's t."""
    count = len(values)
    half_width: float = student_t(count - 1) * float(np.std(values, ddof=1)) / count**0.5
    return round(half_width)
