"""The median with its interval, and the interval of a mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.statistics import half_width_of_mean, median_of_steps

VALUES = st.lists(st.integers(0, 10_000), min_size=3, max_size=40)


def test_the_notch_of_eleven_steps() -> None:
    """0 to 10: the quartiles are 2.5 and 7.5."""
    found = median_of_steps([range(11)])
    assert found is not None
    assert (found.value, found.half_width) == (5, pytest.approx(1.57 * 5 / 11**0.5))


def test_two_steps_tell_no_scatter_and_none_no_median() -> None:
    found = median_of_steps([[4, 8]])
    assert found is not None
    assert (found.value, found.half_width) == (6, None)
    assert median_of_steps([[]]) is None


@given(VALUES, st.integers(1, 9), st.integers(0, 1_000))
def test_another_unit_and_another_zero_change_nothing_else(values: list[int], unit: int, zero: int) -> None:
    plain = median_of_steps([values])
    moved = median_of_steps([[unit * value + zero for value in values]])
    assert plain is not None
    assert moved is not None
    assert moved.value == pytest.approx(unit * plain.value + zero)
    assert moved.half_width == pytest.approx(unit * (plain.half_width or 0), abs=1e-6)


@given(VALUES, st.integers(2, 4))
def test_ranks_of_a_step_that_wait_for_one_another_count_once(values: list[int], ranks: int) -> None:
    """Each value once more for each rank: no more is known than of one rank."""
    one = median_of_steps([values])
    many = median_of_steps([values] * ranks)
    assert one is not None
    assert many is not None
    quartiles = np.subtract(*np.percentile(values * ranks, [75, 25]))
    assert many.half_width == pytest.approx(1.57 * quartiles / len(values) ** 0.5)


def test_the_interval_of_a_mean_by_the_table_of_student() -> None:
    """t for 9 degrees of freedom is 2.262; of 0 and 2 by turns the standard deviation is 1.054."""
    values = np.array([0, 2] * 5) * 1_000_000.0
    assert half_width_of_mean(values) == pytest.approx(2.262157 * 1_054_093 / 10**0.5, rel=1e-5)
    assert half_width_of_mean(np.full(5, 7.0)) == 0


def test_the_interval_of_a_mean_holds_it_in_95_of_100_samples() -> None:
    samples = np.random.default_rng(0).normal(100_000, 10_000, (4_000, 6))
    held = [abs(sample.mean() - 100_000) <= half_width_of_mean(sample) for sample in samples]
    assert np.mean(held) == pytest.approx(0.95, abs=0.01)
