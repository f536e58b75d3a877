"""How well the mean of some steps is known: an interval by blocks of following steps (H. Künsch, 1989)."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.statistics import Numbers

_DRAWS = 1000
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Student's t for 1, 2, ... degrees of freedom, of which 5 % of values lie above."""
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The same for 2.5 %."""


def t_95(freedom: float) -> float:
    """Student's t that 5 % of values lie above; for many degrees of freedom a little more."""
    return _T_95[_row_of(freedom)]


def t_975(freedom: float) -> float:
    """Student's t that 2.5 % of values lie above; for many degrees of freedom a little more."""
    return _T_975[_row_of(freedom)]


def _row_of(freedom: float) -> int:
    return min(max(int(freedom), 1), len(_T_95)) - 1


def half_of_blocks(values: Numbers, *, most: int = 90) -> float:
    """Half of the interval of the mean of some steps, that of ``most`` percent: 90 or 95; at least two steps.

    Steps near each other are alike; a block has the cube root of their number, or more where following steps are much
    alike. Few blocks differ less than all would: Student's t for their number makes up for that.
    """
    count = len(values)
    length = max(1, int(count ** (1 / 3) + 1e-9), _length_by_likeness(values))
    blocks = count / length
    generator = np.random.default_rng(0)
    starts = generator.integers(0, count - length + 1, (_DRAWS, -(-count // length)))
    rows = (starts[..., None] + np.arange(length)).reshape(_DRAWS, -1)[:, :count]
    deviation = float(values[rows].mean(axis=1).std())
    quantile = {90: t_95, 95: t_975}[most]
    return float(quantile(blocks - 1) * deviation * np.sqrt(blocks / (blocks - 1)))


def _length_by_likeness(values: Numbers) -> int:
    """The length of a block for steps each of which is like the one before (D. Andrews, 1991, for an AR(1) process)."""
    count, off = len(values), values - values.mean()
    spread = float((off**2).sum())
    if count < _LEAST_FOR_LIKENESS or not spread:
        return 1
    like = min(_MOST_LIKE, max(0.0, float((off[1:] * off[:-1]).sum()) / spread))
    return min(count // 5, int(1.1447 * (count * (2 * like / (1 - like**2)) ** 2) ** (1 / 3)))


_LEAST_FOR_LIKENESS, _MOST_LIKE = 12, 0.95
