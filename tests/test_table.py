"""Tables of columns: what is one and the same in several of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof import table
from ddp_prof.table import (
    NEVER,
    UNKNOWN,
    are_repeated,
    begins_run,
    count_before,
    distinct_rows,
    is_among,
    is_in,
    positions,
)

VALUES = st.integers(-3, 3) | st.sampled_from((-(2**62), 2**21, 2**62))
ROWS = st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[VALUES] * width), min_size=1, max_size=20))


@given(ROWS, st.sampled_from([1, 2, 4, 1 << 14]))
def test_distinct_rows_are_the_first_of_each_combination(rows: list[tuple[int, ...]], first_part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_FIRST_PART", first_part)
        first, which = distinct_rows(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))
    assert sorted(first.tolist()) == [at for at, row in enumerate(rows) if row not in rows[:at]]
    assert [rows[first[combination]] for combination in which.tolist()] == rows


def test_no_row_is_no_combination() -> None:
    nothing = np.empty(0, np.int64)
    first, which = distinct_rows(nothing, nothing)
    assert (len(first), len(which)) == (0, 0)


@given(ROWS)
def test_a_run_begins_where_any_column_differs(rows: list[tuple[int, ...]]) -> None:
    begins = begins_run(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))
    assert begins.tolist() == [at == 0 or row != rows[at - 1] for at, row in enumerate(rows)]
    assert len(begins_run(np.empty(0, np.int64))) == 0


@given(ROWS)
def test_a_row_is_repeated_that_is_equal_to_an_earlier_one(rows: list[tuple[int, ...]]) -> None:
    repeated = are_repeated(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))
    assert repeated.tolist() == [row in rows[:at] for at, row in enumerate(rows)]


NEAR_AND_FAR = st.lists(st.integers(-2, 9)) | st.lists(st.integers(-2, 9) | st.sampled_from([-NEVER, 1 << 25, NEVER]))


@given(st.lists(st.integers(-2, 9)))
def test_each_row_tells_how_many_of_its_group_come_before_it(group: list[int]) -> None:
    counted = [group[:at].count(one) for at, one in enumerate(group)]
    assert count_before(np.array(group, np.int64)).tolist() == counted


@given(NEAR_AND_FAR, NEAR_AND_FAR)
def test_values_are_among_others_as_numpy_finds_them(values: list[int], others: list[int]) -> None:
    one, other = np.array(values, np.int64), np.array(others, np.int64)
    assert is_among(one, other).tolist() == is_in(one, other).tolist() == np.isin(one, other).tolist()


def test_positions_are_those_of_what_is_known() -> None:
    assert positions(np.array([3, UNKNOWN, 0]), 4).tolist() == [2, UNKNOWN, UNKNOWN, 0]
