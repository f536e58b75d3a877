from __future__ import annotations

from collections import Counter
from itertools import product

from tests.pairs import one_of_each

ROWS = [row for row in product("abcdef", "vwxyz", (1, 2, 3), (False, True)) if row[:2] != ("b", "x")]


def test_there_is_one_row_of_each_kind() -> None:
    chosen = one_of_each(ROWS, lambda row: row[:2])
    assert [row[:2] for row in chosen] == [*dict.fromkeys(row[:2] for row in ROWS)]
    assert set(chosen) <= set(ROWS)


def test_other_values_come_in_turns_alone_and_in_twos() -> None:
    chosen = one_of_each(ROWS, lambda row: row[:2])
    assert sorted(Counter(row[2] for row in chosen).values()) == [9, 10, 10]
    assert {(row[0], row[2]) for row in chosen} == {*product("abcdef", (1, 2, 3))}
    assert {(row[1], row[3]) for row in chosen} == {*product("vwxyz", (False, True))}
    assert {row[2:] for row in chosen} == {*product((1, 2, 3), (False, True))}
