"""Fewer rows of a product of settings: what two settings do together is tried, not what all of them do."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

Row = TypeVar("Row", bound="tuple[Any, ...]")


def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """Each two values of a row, with their columns."""
    return set(combinations(enumerate(row), 2))


def all_pairs(rows: Iterable[Row], first: int, second: int) -> list[Row]:
    """Of the rows one for each pair of values in the columns ``first`` and ``second``.

    The row is the one with most pairs, of any two columns, that no chosen row has; of equal ones the first. For the
    pairs that are missing in the end one row more each: each pair of values that is in a row is in a chosen one.
    """
    rows = list(rows)
    of_pair: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        of_pair.setdefault((row[first], row[second]), []).append(row)
    chosen: list[Row] = []
    seen: set[tuple[Any, ...]] = set()
    for group in of_pair.values():
        chosen.append(max(group, key=lambda row: len(pairs(row) - seen)))
        seen |= pairs(chosen[-1])
    for row in rows:
        if pairs(row) - seen:
            chosen.append(row)
            seen |= pairs(row)
    return chosen
