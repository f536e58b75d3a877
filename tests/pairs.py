"""Fewer rows of a product of settings: what two settings do together is tried, not what all of them do."""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

Row = TypeVar("Row", bound="tuple[Any, ...]")


def one_of_each(rows: Iterable[Row], kind: Callable[[Row], Hashable]) -> list[Row]:
    """One row of each kind: that whose values, alone and in twos, were chosen least before; of equal ones the first.

    So the values that do not tell the kind come in turns.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(kind(row), []).append(row)
    chosen: list[Row] = []
    seen = Counter[Any]()
    for group in groups.values():
        chosen.append(min(group, key=lambda row: sum(seen[part] for part in _parts(row))))
        seen.update(_parts(chosen[-1]))
    return chosen


def _parts(row: tuple[Any, ...]) -> list[Any]:
    """The values of a row, and each two of them, with their columns."""
    values = [*enumerate(row)]
    return [*chain(values, combinations(values, 2))]
