"""The interval of paired differences: its formula, and how often it holds if it is looked at after each pair."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from ddp_prof.benchmark.findings import LEAST_PAIRS
from ddp_prof.tune.sequential import half_width_in_spreads, measure_gain, smallest_shown
from ddp_prof.tune.tries import MOST_TRIES
from tests.examples import IS_NIGHTLY
from tests.tune import noise

SIMULATIONS = 1000 if IS_NIGHTLY else 200
ROUNDS, TRIES = 30, 5


def bayes_factor(t: float, n: int, g: float = 4.0) -> float:
    """By the formula of Rouder et al. (2009), written down once more."""
    scale = 1 + n * g
    return float(scale**-0.5 * ((1 + t**2 / (n - 1)) / (1 + t**2 / ((n - 1) * scale))) ** (n / 2))


@pytest.mark.parametrize("pairs", [6, 8, 20, 100])
@pytest.mark.parametrize("error", [0.05, 0.01])
def test_the_interval_ends_where_the_bayes_factor_is_one_over_the_error(pairs: int, error: float) -> None:
    t = half_width_in_spreads(pairs, error) * math.sqrt(pairs)
    assert bayes_factor(t, pairs) == pytest.approx(1 / error)


def test_few_pairs_have_no_interval() -> None:
    assert math.isinf(half_width_in_spreads(1, 0.05))
    assert math.isinf(half_width_in_spreads(3, 0.05))
    gain = measure_gain([(100.0, 98.0)], 1)
    assert gain is not None
    assert (gain.value, gain.low, gain.high, gain.spread) == (pytest.approx(0.02), None, None, None)
    assert measure_gain([], 1) is None
    five = [(100.0, 98.0), (101.0, 98.0), (100.0, 97.0), (100.0, 98.5), (102.0, 99.0)]
    for pairs, is_known in ((five, False), ([*five, (100.0, 98.0)], True)):
        gain = measure_gain(pairs, 1)
        assert gain is not None
        assert (gain.low is not None, gain.high is not None) == (is_known, is_known)


def test_most_tries_still_have_an_interval() -> None:
    assert half_width_in_spreads(LEAST_PAIRS, 0.05 / MOST_TRIES) < 10


def test_more_pairs_show_less_and_more_tries_show_more() -> None:
    assert smallest_shown(0.01, 24, 5) < smallest_shown(0.01, 12, 5) < smallest_shown(0.01, 6, 5)
    assert smallest_shown(0.01, 12, 1) < smallest_shown(0.01, 12, 5)


def test_the_table_of_the_docstring() -> None:
    today = [100.0, 103.1, 99.2, 100.4, 108.0, 100.9]
    tried = [97.9, 101.2, 97.0, 98.5, 105.7, 98.6]
    gain = measure_gain(list(zip(today, tried, strict=True)), 1)
    assert gain is not None
    assert gain.value == pytest.approx(0.021, abs=0.001)
    assert gain.low is not None
    assert gain.low > 0.015, "the slow fifth round does no harm"


def turns(generator: np.random.Generator, of: noise.Noise) -> noise.Numbers:
    """What the noise does to each setting in each round, whose order is drawn: rounds x (1 + tries), today first."""
    runs = of(generator, ROUNDS * (TRIES + 1)).reshape(ROUNDS, TRIES + 1)
    return generator.permuted(runs, axis=1)


@cache
def half_widths(error: float) -> noise.Numbers:
    """In spreads, after each number of pairs from the least on."""
    return np.array([half_width_in_spreads(pairs, error) for pairs in range(LEAST_PAIRS, ROUNDS + 1)])


def ever_excludes(values: noise.Numbers, truth: float, error: float) -> bool:
    """Whether the interval, looked at after each pair from the sixth on, ever leaves out the truth."""
    pairs = np.arange(1, ROUNDS + 1)
    means = values.cumsum() / pairs
    squares = (values**2).cumsum() - pairs * means**2
    seen = slice(LEAST_PAIRS - 1, None)
    spreads = np.sqrt(squares[seen] / (pairs[seen] - 1))
    return bool((abs(means[seen] - truth) > spreads * half_widths(error)).any())


@pytest.mark.parametrize("of", noise.ALL, ids=lambda of: of.__name__)
@pytest.mark.slow
def test_all_intervals_hold_at_once_in_95_of_100_tunings_however_often_one_looks(of: noise.Noise) -> None:
    generator = np.random.default_rng(1)
    wrong = 0
    for _ in range(SIMULATIONS):
        lengths = turns(generator, of)
        differences = lengths[:, :1] - lengths[:, 1:]
        wrong += any(ever_excludes(differences[:, tried], 0.0, 0.05 / TRIES) for tried in range(TRIES))
    assert wrong <= 0.05 * SIMULATIONS


def test_an_interval_for_one_look_would_not_hold() -> None:
    """Why it must be one that stays valid: Student's, looked at after each pair, finds winners where there are none."""
    generator = np.random.default_rng(1)
    student = {6: 2.571, 30: 2.045}  # 97.5 % quantiles; the smaller one would excuse more
    wrong = 0
    for _ in range(200):
        values = generator.normal(size=30)
        wrong += any(
            abs(values[:n].mean()) > values[:n].std(ddof=1) / math.sqrt(n) * student[6] for n in range(LEAST_PAIRS, 31)
        )
    assert wrong > 0.05 * 200
