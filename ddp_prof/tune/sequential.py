"""Computes the gain of a try with an interval that stays valid however often one looks at it (a confidence sequence).

A round runs each setting once, in an order that is drawn anew, so what disturbs a round (a busy machine, a falling
clock frequency) affects all settings alike. A pair is the step length with today's settings and with a try, of one
round. Its value is the logarithm of their ratio, ``x = ln(today / try)``: 0.02 is a step that takes 2 % less.

    round     1      2      3      4      5      6
    today   100.0  103.1   99.2  100.4  108.0  100.9
    try      97.9  101.2   97.0   98.5  105.7   98.6
    x        .021   .019   .022   .019   .022   .023      mean .021, and the slow fifth round does no harm

*Test.* For n pairs with mean m and standard deviation s, ``t = sqrt(n) (m - m0) / s`` tests whether the true mean is
m0. If x is normal with mean m0 and any spread (standard deviation), the Bayes factor with the right Haar measure for
the spread, and an effect that is drawn from ``N(0, g)``, in units of the spread,

    B(n) = (1 + n g)**-1/2 * ((1 + t**2 / (n - 1)) / (1 + t**2 / ((n - 1) (1 + n g))))**(n / 2),

is a test martingale that begins with 1 (J. N. Rouder et al., 2009, for the formula; M. F. Pérez-Ortiz et al., 2024, and
H. Wang and A. Ramdas, 2024, for the martingale). By Ville's inequality it ever reaches ``1 / error`` with a probability
of at most ``error``, after whichever pair one stops, and for whichever reason. The interval contains each m0 that the
test has not rejected. Solved for t, it is ``m ± s * half_width_in_spreads(n, error)``.

*Several tries.* Each try gets an equal part of the error (C. E. Bonferroni), so all intervals hold at once in 95 of 100
tunings, and so do the verdicts "faster", "slower" and "no difference".

*Noise that is not normal.* Slow changes of the machine within a round, and runs that resemble the run before them, do
not shift x to one side, since the order is drawn. Outliers widen the interval. ``tests/tune`` simulates both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ddp_prof.benchmark.findings import LEAST_PAIRS

ERROR = 0.05
"""The probability that at any time any interval of a tuning does not contain the true gain."""
_EFFECT = 4.0
"""The g of the formula. It is chosen for intervals that are narrow at 6 to 20 pairs; they hold with any g."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What a try takes off a step, as a fraction of today's step, with its interval.

    Attributes:
        value: The gain: 0.02 is a step that takes 2 % less, -0.02 one that takes 2 % more.
        low: Lower end of the interval, which holds at any number of pairs; ``None`` for fewer than :data:`LEAST_PAIRS`
            pairs, for which it would be too wide to tell anything.
        high: Upper end of the interval; ``None`` as ``low``.
        pairs: Number of pairs: rounds in which both today's settings and the try were measured.
        spread: Standard deviation over the pairs of ``ln(today / try)``; ``None`` as ``low``: a few pairs may be alike
            by chance, and would promise that more of them show a tiny gain.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    spread: float | None


def half_width_in_spreads(pairs: int, error: float) -> float:
    """Return half of the interval's width, in standard deviations of a pair; infinite for few pairs.

    ``error`` is the probability that the interval ever leaves the true mean out.
    """
    if pairs < 2:
        return math.inf
    # B(n) = 1 / error of the module's docstring, solved for t / sqrt(n).
    scale = 1 + pairs * _EFFECT
    bound = (math.sqrt(scale) / error) ** (2 / pairs)
    return math.sqrt((bound - 1) / (1 - bound / scale) * (pairs - 1) / pairs) if bound < scale else math.inf


def measure_gain(pairs: Sequence[tuple[float, float]], tries: int) -> Gain | None:
    """Return the gain of a try by its pairs (today's step length, the try's step length); ``None`` without pairs.

    ``tries`` is the number of tries in the tuning, among which the error is divided.
    """
    if not pairs:
        return None
    logs = [math.log(today / tried) for today, tried in pairs]
    mean, spread = fmean(logs), None
    low = high = None
    if len(logs) >= LEAST_PAIRS:
        spread = stdev(logs)
        half = spread * half_width_in_spreads(len(logs), ERROR / max(1, tries))
        low, high = share_of(mean - half), share_of(mean + half)
    return Gain(share_of(mean), low, high, len(logs), spread)


def share_of(log_ratio: float) -> float:
    """Return the gain, as a fraction of today's step, for ``log_ratio = ln(today / try)``: 1 - try / today."""
    return -math.expm1(-log_ratio)


def smallest_shown(spread: float, pairs: int, tries: int) -> float:
    """Return the smallest gain whose interval would exclude 0, for ``pairs`` pairs with this spread.

    It is 1 if there are too few pairs for any gain. ``tries`` is the number of tries in the tuning.
    """
    return share_of(spread * half_width_in_spreads(pairs, ERROR / max(1, tries)))
