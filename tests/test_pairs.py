from __future__ import annotations

from itertools import product

from tests.pairs import all_pairs, pairs

ROWS = [row for row in product("abcdef", "vwxyz", (1, 2, 3), (False, True)) if row[:2] != ("b", "x")]


def test_every_pair_of_values_is_in_a_row() -> None:
    chosen = all_pairs(ROWS, 0, 1)
    assert set(chosen) <= set(ROWS)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, ROWS))


def test_there_is_one_row_a_pair_of_the_columns_with_most_values() -> None:
    assert len(ROWS) == 29 * 6
    assert len(all_pairs(ROWS, 0, 1)) == 29
