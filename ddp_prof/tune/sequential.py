"""An interval that stays valid however often one looks: the confidence sequence of the mean of paired differences.

A round runs each setting once, in an order that is drawn anew, so what disturbs a round (a busy machine, a clock that
sinks) meets each setting alike. A pair is the step length with a try and with today's settings, of one round; its value
is the logarithm of their ratio, ``x = ln(today / try)``: 0.02 is a step that takes 2 % less.

    round     1      2      3      4      5      6
    today   100.0  103.1   99.2  100.4  108.0  100.9
    try      97.9  101.2   97.0   98.5  105.7   98.6
    x        .021   .019   .022   .019   .022   .023      mean .021, and the slow fifth round does no harm

*Test.* Of n pairs with mean m and standard deviation s, ``t = sqrt(n) (m - m0) / s``. If x is normal with mean m0 and
any spread, the Bayes factor with the right Haar measure for the spread, and an effect of ``N(0, g)`` spreads,

    B(n) = (1 + n g)**-1/2 * ((1 + t**2 / (n - 1)) / (1 + t**2 / ((n - 1) (1 + n g))))**(n / 2),

is a test martingale that begins with 1 (J. N. Rouder et al., 2009, for the formula; M. F. Pérez-Ortiz et al., 2024, and
H. Wang and A. Ramdas, 2024, for the martingale). By Ville's inequality it ever reaches ``1 / error`` with a probability
of at most ``error``: at whichever pair one stops, for whichever reason. The interval holds the m0 that it has not
refused. Solved for t, it is ``m ± s * half_width_in_spreads(n, error)``.

*Several tries.* Each gets an equal part of the error (C. E. Bonferroni), so all intervals hold at once in 95 of 100
tunings, and so do the verdicts: those on the side of being faster, slower and of no difference.

*Noise that is not normal.* What turns leave of a drift, and that runs one after another are alike, does not make x
larger or smaller on one side, since the order is drawn. Outliers widen the interval. ``tests/tune`` simulates both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ddp_prof.benchmark.findings import LEAST_PAIRS

ERROR = 0.05
"""The probability that any interval of a tuning ever leaves out what is true."""
_EFFECT = 4.0
"""g: chosen for intervals that are narrow at 6 to 20 pairs; it does not change how often they hold."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What a try takes off a step, as a share of today's length (0.02: 2 %; negative: it adds), with its interval.

    Attributes:
        low: To ``high``: the interval, which holds at any number of pairs; ``None`` below :data:`LEAST_PAIRS`, where it
            is too wide to tell anything.
        spread: Standard deviation of the pairs, of the logarithm of the ratio.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    spread: float | None


def half_width_in_spreads(pairs: int, error: float) -> float:
    """Half of the interval in standard deviations of a pair; infinite for few pairs."""
    if pairs < 2:
        return math.inf
    scale = 1 + pairs * _EFFECT
    bound = (math.sqrt(scale) / error) ** (2 / pairs)
    return math.sqrt((bound - 1) / (1 - bound / scale) * (pairs - 1) / pairs) if bound < scale else math.inf


def measure_gain(pairs: Sequence[tuple[float, float]], tries: int) -> Gain | None:
    """The gain by pairs of (today's, the try's) step length, one of several ``tries``; ``None`` without pairs."""
    if not pairs:
        return None
    logs = [math.log(today / tried) for today, tried in pairs]
    mean, spread = fmean(logs), stdev(logs) if len(logs) > 1 else None
    low = high = None
    if spread is not None and len(logs) >= LEAST_PAIRS:
        half = spread * half_width_in_spreads(len(logs), ERROR / max(1, tries))
        low, high = share_of(mean - half), share_of(mean + half)
    return Gain(share_of(mean), low, high, len(logs), spread)


def share_of(log_ratio: float) -> float:
    """What a logarithm of today's length over the try's is as a share of today's."""
    return -math.expm1(-log_ratio)


def smallest_shown(spread: float, pairs: int, tries: int) -> float:
    """The smallest gain whose interval would not hold 0, with so many pairs of this spread; 1 for too few pairs."""
    return share_of(spread * half_width_in_spreads(pairs, ERROR / max(1, tries)))
