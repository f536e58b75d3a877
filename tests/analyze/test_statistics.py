"""The interval of a figure by bootstrap: against a slow one, against theory, and what must not change it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_prof.analyze import statistics
from ddp_prof.analyze.statistics import (
    bootstrap_interval,
    half_width_of_change,
    half_width_of_steps,
    intervals_of_sums,
    mean_per_draw,
    median_of_steps,
    median_per_draw,
)

VALUES = st.lists(st.integers(0, 10_000), min_size=3, max_size=40)


WIDER = {3: 2.6887, 4: 1.8749, 5: 1.5837, 6: 1.4367, 7: 1.3484, 15: 1.1327, 50: 1.0357}
"""By which factor the interval of so many steps is wider than that of the bootstrap: that of Student's t (SciPy's
``t.ppf(0.975, steps - 1)``) over that of the normal distribution, times the root of steps / (steps - 1)."""


@pytest.mark.parametrize(
    ("steps", "interval"),
    [
        ([1, 2, 9], (1, 9)),  # 7 of 27 draws have the median 1, as many 9
        ([1, 2, 3, 4, 9], (1, 9)),  # 5.8 % of the draws have the median 1, more than the 2.5 % that are cut off
        ([1, 2, 3, 4, 5, 6, 30], (2, 6)),  # 1.0 % have the median 1, 9.4 % at most 2
    ],
)
def test_the_interval_of_a_median_by_all_draws_there_are(steps: list[int], interval: tuple[int, int]) -> None:
    middle, half_width = sum(interval) / 2, WIDER[len(steps)] * (interval[1] - interval[0]) / 2
    assert bootstrap_interval(steps) == pytest.approx((middle - half_width, middle + half_width), abs=1e-2)
    if len(steps) < 7:  # 7**7 draws would take a while
        medians = [sorted(draw)[len(steps) // 2] for draw in product(steps, repeat=len(steps))]
        assert tuple(np.percentile(medians, (2.5, 97.5))) == interval


@pytest.mark.parametrize(("statistic", "factor"), [(mean_per_draw, 1.0), (median_per_draw, np.sqrt(np.pi / 2))])
def test_the_interval_of_many_normal_steps_is_that_of_theory(statistic: statistics.Statistic, factor: float) -> None:
    """1.96 standard errors to either side; that of a median is larger by sqrt(pi / 2)."""
    steps = np.random.default_rng(1).normal(0, 1, 4_000)
    low, high = bootstrap_interval(steps, statistic) or (0, 0)
    assert (high - low) / 2 == pytest.approx(1.96 * factor * steps.std() / len(steps) ** 0.5, rel=0.06)


@pytest.mark.parametrize(
    ("freedom", "above", "quantile"),
    [
        (3, statistics.IN_TWENTIETH, 2.353),
        (30, statistics.IN_TWENTIETH, 1.697),
        (3, statistics.IN_FORTIETH, 3.182),
        (30, statistics.IN_FORTIETH, 2.042),
    ],
)
def test_the_quantiles_of_students_t_are_those_of_the_tables(freedom: int, above: float, quantile: float) -> None:
    assert statistics.student_t(freedom, above) == pytest.approx(quantile, abs=0.001)


@pytest.mark.parametrize(("steps", "wider"), WIDER.items())
def test_the_interval_of_few_steps_is_wider_as_students_t_is(steps: int, wider: float) -> None:
    assert statistics._widen(steps, steps) == pytest.approx(wider, rel=1e-3)


SIZES = (3, 4, 5, 6, 8, 12, 25)


@pytest.mark.slow
@pytest.mark.parametrize("statistic", [mean_per_draw, median_per_draw])
@pytest.mark.parametrize("steps", SIZES)
def test_how_often_the_interval_holds_the_figure(steps: int, statistic: statistics.Statistic) -> None:
    """In 95 of 100 cases, or a little less often; not widened, that of a mean of 3 steps would in 82."""
    samples = np.random.default_rng(0).normal(100, 10, (200, steps))
    intervals = [bootstrap_interval(sample, statistic) or (0, 0) for sample in samples]
    assert np.mean([low <= 100 <= high for low, high in intervals]) > 0.91


@pytest.mark.slow
@pytest.mark.parametrize("statistic", [mean_per_draw, median_per_draw])
@pytest.mark.parametrize("steps", [3, 6, 25])
def test_equal_runs_are_seldom_called_different(steps: int, statistic: statistics.Statistic) -> None:
    """Not widened, 14 (means) and 9 (medians) of 100 pairs of runs with 3 steps each were."""
    noise, pairs, different = np.random.default_rng(1), 300, 0
    for _ in range(pairs):
        runs = noise.normal(100, 1, (2, steps))
        figures = [float(statistic(run.reshape(1, -1, 1))[0]) for run in runs]
        halves = [half_width_of_steps([run], statistic) or 0 for run in runs]
        different += abs(figures[1] - figures[0]) > half_width_of_change(*halves)
    assert different / pairs < 0.08


def test_the_same_steps_have_the_same_interval_however_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = np.random.default_rng(3).exponential(1, (50, 3))
    whole = bootstrap_interval(steps)
    monkeypatch.setattr(statistics, "_BATCH_VALUES", 7 * steps.size)
    assert bootstrap_interval(steps) == whole == bootstrap_interval(steps)


@pytest.mark.parametrize("steps", [(3, 2), (40, 3), (2_000, 20)])
def test_the_median_of_many_ranks_is_that_of_all_values_drawn(steps: tuple[int, int]) -> None:
    """Equal values among them; the last has more values than 16 bits number."""
    values = np.random.default_rng(4).integers(0, 50, steps) / 4

    def slowly(drawn: statistics.Numbers) -> statistics.Numbers:
        return np.array(np.median(drawn, axis=(1, 2)))

    assert bootstrap_interval(values) == bootstrap_interval(values, slowly)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**40)), max_size=12), st.integers(1, 100))
def test_the_intervals_of_figures_of_sums_are_those_of_the_steps_drawn(
    steps: list[tuple[int, int]], batch: int
) -> None:
    """Both are exact, for halves of nanoseconds, too, as medians are."""
    values = np.array(steps, float).reshape(len(steps), 2) / 2
    figures = [lambda sums: sums[..., 0] / sums[..., 1], lambda sums: sums.sum(axis=-1)]
    of_draws = [bootstrap_interval(values, lambda drawn, of=figure: of(drawn.sum(axis=1))) for figure in figures]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_BATCH_VALUES", batch * max(1, len(steps)))
        assert intervals_of_sums(values, figures) == of_draws


def test_two_steps_tell_no_scatter_and_none_no_median() -> None:
    found = median_of_steps([[4, 8]])
    assert found is not None
    assert (found.value, found.half_width) == (6, None)
    assert median_of_steps([[]]) is None
    assert bootstrap_interval([]) is None


@given(VALUES, st.integers(1, 9), st.integers(0, 1_000))
def test_another_unit_and_another_zero_change_nothing_else(values: list[int], unit: int, zero: int) -> None:
    plain = median_of_steps([values])
    moved = median_of_steps([[unit * value + zero for value in values]])
    assert plain is not None
    assert moved is not None
    assert moved.value == pytest.approx(unit * plain.value + zero)
    assert moved.half_width == pytest.approx(unit * (plain.half_width or 0), abs=1e-6)


def test_equal_steps_do_not_resemble_each_other_more_than_others() -> None:
    """They were ranked in their order, as if they grew: of steps of which every fourth one is exposed, too."""
    exposed = [0, 0, 0, 1] * 2
    assert bootstrap_interval(exposed, are_consecutive=True) == bootstrap_interval(exposed)


@given(VALUES, st.integers(2, 4))
@example([0, 0, 0, 1, 0, 0, 0, 1], 3)
def test_ranks_of_a_step_that_wait_for_one_another_count_once(values: list[int], ranks: int) -> None:
    """Each value once more for each rank: no more is known than of one rank."""
    for statistic in (mean_per_draw, median_per_draw):
        one, many = half_width_of_steps([values], statistic), half_width_of_steps([values] * ranks, statistic)
        assert many == pytest.approx(one)


def test_ranks_of_a_step_are_drawn_together() -> None:
    """By step the ranks' mean is 20 each time: there is no scatter, though each rank's steps differ."""
    assert half_width_of_steps([[10, 30, 10, 30], [30, 10, 30]], mean_per_draw) == 0


def test_steps_of_two_ranks_are_the_same_by_their_keys() -> None:
    """One rank began to record a step later: each of its steps was drawn with another one's."""
    first, second = [10, 30, 10, 30, 10, 30], [30, 10, 30, 10, 30]
    apart = half_width_of_steps([first, second], mean_per_draw)
    paired = half_width_of_steps([first, second], mean_per_draw, [range(6), range(1, 6)])
    assert (apart, paired) == (0, half_width_of_steps([second], mean_per_draw))
    assert half_width_of_steps([first, second], mean_per_draw, [range(6), range(10, 15)]) == apart, "numbered apart"


def steps_like_the_one_before(like: float, count: int, seed: int) -> list[float]:
    """Steps about 100, each with the correlation ``like`` with the one before."""
    random, steps = np.random.default_rng(seed), []
    deviation = random.normal()
    for _ in range(count):
        steps.append(100 + deviation)
        deviation = like * deviation + (1 - like**2) ** 0.5 * random.normal()
    return steps


@pytest.mark.parametrize("statistic", [mean_per_draw, median_per_draw])
@pytest.mark.parametrize(("like", "count", "least"), [(0.6, 10, 80), (0.6, 25, 84), (0.6, 100, 91), (0.9, 100, 86)])
def test_steps_that_resemble_the_one_before_tell_less(
    like: float, count: int, least: int, statistic: statistics.Statistic
) -> None:
    """As independent ones, 25 steps with a correlation of 0.6 held the figure in 65 to 74 of 100, 100 of 0.9 in 30."""
    holds, alone = 0, 0
    for seed in range(100):
        steps = np.array(steps_like_the_one_before(like, count, seed))
        figure, half = float(statistic(steps.reshape(1, -1, 1))[0]), half_width_of_steps([steps], statistic) or 0
        shuffled = half_width_of_steps([np.random.default_rng(0).permutation(steps)], statistic) or 0
        holds += abs(figure - 100) <= half
        alone += half > 1.2 * shuffled
    assert holds >= least
    assert alone >= (85 if count > 10 else 50), "the same steps, in another order, are independent"


def test_steps_that_alternate_are_no_more_than_there_are_and_few_are_independent() -> None:
    assert statistics._count_independent(np.array([1.0, 9.0] * 20)) == 40
    assert statistics._count_independent(np.arange(7.0)) == 7
    assert statistics._count_independent(np.arange(40.0)) == 3, "a drift: at least as many as an interval needs"
    assert statistics._count_independent(np.full(40, 7.0)) == 40


def test_of_steps_that_are_short_or_long_two_equal_runs_do_not_differ() -> None:
    """Every second of 25 steps reduces gradients. One run begins with such a step, so its median is a long one.

    Each median had half of the interval that reaches from a short step to a long one.
    """
    first, second = ([100.0 + 10 * ((at + begin) % 2) + at / 100 for at in range(25)] for begin in (0, 1))
    halves = [half_width_of_steps([run]) or 0 for run in (first, second)]
    assert abs(np.median(first) - np.median(second)) > 9
    assert abs(np.median(first) - np.median(second)) <= half_width_of_change(*halves)


def test_a_change_is_less_sure_than_either_run() -> None:
    assert half_width_of_change(3, 4) == 5
