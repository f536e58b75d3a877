from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from ddp_prof.benchmark.statistics import Effect, Estimate, combine, estimate_all, half_width, student_t

# Any table of Student's t, two-sided 95 %.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "expected"), TABLE.items())
def test_students_t_is_that_of_the_tables(freedom: int, expected: float) -> None:
    assert student_t(freedom) == pytest.approx(expected, abs=5e-4)


def estimates(samples: dict[str, list[list[float]]], pools: Callable[[str], tuple[str, ...]] = lambda _: ("all",)):
    """Of settings that all do the same work; the n-th run of each is its repeat n."""
    named = {key: {str(repeat): steps for repeat, steps in enumerate(runs)} for key, runs in samples.items()}
    return estimate_all(named, lambda _: "work", pools)


def test_the_scatter_of_settings_is_pooled() -> None:
    found = estimates({"a": [[100.0], [102.0]], "b": [[195.0], [205.0]]})
    # Squares of 1 % and 2.5 %, twice each, over two degrees of freedom.
    scatter = ((2 * 0.01**2 + 2 * 0.025**2) / 2) ** 0.5
    relative = lambda value: abs(value) * scatter * TABLE[2] / 2**0.5  # noqa: E731
    a = 101 * ((2 * (1 / 101) ** 2 + 2 * 0.025**2) / 2) ** 0.5 * TABLE[2] / 2**0.5
    assert found["a"].value == 101
    assert found["a"].half_width == pytest.approx(a, rel=1e-3)
    assert found["b"].half_width == pytest.approx(relative(200), rel=1e-2)
    assert found["b"].is_between_runs


def test_a_median_is_told_worse_than_a_mean() -> None:
    assert half_width(100, 3, 0.01, 30) == pytest.approx(100 * 0.01 * 2.042 * 1.2533 / 3**0.5, rel=1e-3)
    assert half_width(100, 2, 0.01, 30) == pytest.approx(100 * 0.01 * 2.042 / 2**0.5, rel=1e-3)


def test_what_slows_a_whole_repeat_is_spread_but_no_doubt_in_comparisons() -> None:
    slow = (1.0, 1.3, 0.9, 1.1)
    samples = {key: [[base * item] for item in slow] for key, base in (("a", 100.0), ("b", 80.0), ("c", 60.0))}
    found = estimates(samples)
    assert found["a"].half_width > 10
    assert found["a"].paired_half_width == pytest.approx(0, abs=1e-9)


def test_runs_may_be_missing() -> None:
    found = estimates({"a": [[100.0], [120.0], [90.0]], "b": [[50.0], [60.0]], "c": [[70.0]]})
    assert found["c"].half_width == pytest.approx(found["a"].half_width * 0.7 * 3**0.5 / 1.2533, rel=1e-2)
    assert [len(found[key].medians) for key in "abc"] == [3, 2, 1]


def test_one_run_tells_only_how_its_steps_differ() -> None:
    found = estimates({"a": [[10.0, 11.0, 12.0, 13.0]], "b": [[5.0, 5.0]], "c": [[]]})
    assert found["a"] == Estimate(11.5, 1.5, False, None, {"0": 11.5})
    assert estimates({"a": [[1.0], [2.0]]})["a"].paired_half_width == estimates({"a": [[1.0], [2.0]]})["a"].half_width
    assert found["b"].half_width is None
    assert "c" not in found


def test_a_small_pool_gives_way_to_a_wider_one() -> None:
    quiet = {f"q{index}": [[100.0], [100.0], [100.0]] for index in range(3)}
    samples = {**quiet, "loud": [[100.0], [150.0]]}
    by_kind = estimates(samples, lambda key: (key[0], "all"))
    assert by_kind["q0"].half_width == pytest.approx(0, abs=1e-9)  # six degrees of freedom of its own
    assert 0 < by_kind["loud"].half_width < 100  # one of its own would give t = 12.7


def test_two_sweeps_agree_within_the_spread_they_print() -> None:
    """As the note under the table has it: within 1.4 times the spread, in about 95 of 100 cases."""
    random.seed(1)
    agreed = total = 0
    for _ in range(150):
        one, other = (
            estimates({str(key): [[key * random.gauss(1, 0.05)] for _ in range(3)] for key in range(100, 105)})
            for _ in range(2)
        )
        for key, first in one.items():
            second = other[key]
            agreed += abs(first.value - second.value) <= np.hypot(first.half_width, second.half_width)
            total += 1
    assert 0.93 < agreed / total < 0.995


class TestGather:
    def test_the_mean_of_settings_with_spreads_is_known_better_than_each(self) -> None:
        found = combine([Estimate(value, paired_half_width=4.0) for value in (10.0, 20.0, 30.0, 40.0)])
        assert found == Effect(25.0, 23.0, 27.0, 4, is_by_repeats=True)

    def test_the_best_of_several_is_doubted_more(self) -> None:
        one, best = (combine([Estimate(10.0, paired_half_width=4.0)], choices=choices) for choices in (1, 6))
        assert one.low == 6.0
        assert 10 - best.low == pytest.approx(4 * 2.638 / 1.960, rel=1e-3)

    def test_and_the_more_so_the_fewer_runs_tell_the_spread(self) -> None:
        found = combine([Estimate(10.0, paired_half_width=4.0, paired_freedom=4)], choices=3)
        assert 10 - found.low == pytest.approx(4 * 3.961 / 2.776, rel=1e-3), "t of 4 degrees, at 1 - 0.05 / 6 and 0.975"

    @pytest.mark.parametrize(
        ("count", "interval"), [(4, (None, None)), (5, (0.0, 4.0)), (6, (0.0, 5.0)), (10, (1.0, 8.0))]
    )
    def test_without_spreads_order_statistics_hold_the_median(self, count: int, interval: tuple) -> None:
        found = combine([Estimate(float(value)) for value in reversed(range(count))])
        assert (found.low, found.high, found.is_by_repeats) == (*interval, False)
        assert found.value == (count - 1) / 2

    def test_of_nothing_is_nothing(self) -> None:
        assert combine([]) is None


@pytest.mark.parametrize(
    ("low", "high", "above", "below"),
    [(1.0, 2.0, "yes", "no"), (-2.0, -1.0, "no", "yes"), (-1.0, 1.0, "cannot tell", "cannot tell"),
     (None, None, "cannot tell", "cannot tell"), (0.0, 1.0, "cannot tell", "cannot tell")],
)  # fmt: skip
def test_beyond_is_beyond_the_spread(low: float | None, high: float | None, above: str, below: str) -> None:
    effect = Effect(0.5, low, high, 3, is_by_repeats=True)
    assert (effect.is_beyond("above", 0), effect.is_beyond("below", 0)) == (above, below)
