"""The confidence interval of the mean of steps, by the moving-block bootstrap (H. Künsch, 1989).

A step is like the step before it, so single steps must not be drawn as if they were independent: blocks of consecutive
steps are drawn instead.
"""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.statistics import Numbers

_DRAWS = 1000
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Student's t for 1, 2, ..., 10 degrees of freedom: 5 % of all values lie above it."""
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 1, 2, ..., 10 degrees of freedom: 2.5 % of all values lie above it."""


def t_95(freedom: float) -> float:
    """Return Student's t with 5 % of all values above it; beyond 10 degrees of freedom that for 10, a bit too large."""
    return _T_95[_row_of(freedom)]


def t_975(freedom: float) -> float:
    """Return Student's t with 2.5 % of all values above it; beyond 10 degrees of freedom that for 10."""
    return _T_975[_row_of(freedom)]


def _row_of(freedom: float) -> int:
    """Return the position in the tables of t: they begin with 1 degree of freedom and end with 10."""
    return min(max(int(freedom), 1), len(_T_95)) - 1


def half_of_blocks(values: Numbers, *, most: int = 90) -> float:
    """Return half the width of the confidence interval of the mean of ``values``, in their unit.

    A block has as many steps as the cube root of their number, or more where consecutive steps are much alike. Few
    blocks show less variance than there is: Student's t for the number of blocks corrects that.

    Args:
        values: One value per step, in order; at least two.
        most: The confidence level in percent: 90 or 95.
    """
    count = len(values)
    length = max(1, int(count ** (1 / 3) + 1e-9), _length_by_likeness(values))  # 1e-9: the cube root of 8 is 2
    blocks = count / length
    generator = np.random.default_rng(0)
    # Each draw strings together blocks that begin anywhere, -(-count // length) of them (rounded up), cut to ``count``.
    starts = generator.integers(0, count - length + 1, (_DRAWS, -(-count // length)))
    rows = (starts[..., None] + np.arange(length)).reshape(_DRAWS, -1)[:, :count]
    deviation = float(values[rows].mean(axis=1).std())
    quantile = {90: t_95, 95: t_975}[most]
    return float(quantile(blocks - 1) * deviation * np.sqrt(blocks / (blocks - 1)))


def _length_by_likeness(values: Numbers) -> int:
    """Return the best length of a block where each step is like the step before it; at most 1 where it is not.

    The formula is that of D. Andrews (1991) for an AR(1) process; ``like`` is the correlation of a step with the next.
    """
    count, off = len(values), values - values.mean()
    spread = float((off**2).sum())
    if count < _LEAST_FOR_LIKENESS or not spread:
        return 1
    like = min(_MOST_LIKE, max(0.0, float((off[1:] * off[:-1]).sum()) / spread))
    return min(count // 5, int(1.1447 * (count * (2 * like / (1 - like**2)) ** 2) ** (1 / 3)))


_LEAST_FOR_LIKENESS, _MOST_LIKE = 12, 0.95
"""The least number of steps whose correlation is estimated, and the largest correlation that is used."""
