"""Tables of columns; a column is a one-dimensional NumPy array with one element per row."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_MOST_FLAGS = 1 << 20
UNKNOWN = -1
"""In a column: no value (no correlation, no name, size not known)."""
NO_TIME = -(2**62)
"""In a column of times: not known. It is earlier than all times of traces, which may be negative."""


class Brief:
    """A dataclass whose repr is one short line, with the lengths of its collections instead of their values."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # As an attribute of its own, or else the dataclass would make one that lists all values.
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        shown = [item.name for item in fields(self) if item.repr]  # type: ignore[arg-type]
        values = (f"{name}={_brief(getattr(self, name))}" for name in shown)
        return f"{type(self).__name__}({', '.join(values)})"


def _brief(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, Table):
        return f"<{type(value).__name__}>"
    if isinstance(value, Sized) and not isinstance(value, str | Table):
        return f"[{len(value)}]"
    return repr(value)


@dataclass(frozen=True)
class Table(Brief):
    """Columns of equal length."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} rows>"

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in column_names(type(self))}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of unequal length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, column_names(type(self))[0]))


def column_names(kind: type[Table]) -> tuple[str, ...]:
    if kind not in _COLUMN_NAMES:
        _COLUMN_NAMES[kind] = tuple(item.name for item in fields(kind))
    return _COLUMN_NAMES[kind]


_COLUMN_NAMES: dict[type, tuple[str, ...]] = {}


AnyTable = TypeVar("AnyTable", bound=Table)


def select(table: AnyTable, rows: Mask | Ints) -> AnyTable:
    """Return a table of the chosen rows; the same object if a mask chooses all."""
    if rows.dtype == np.bool_ and rows.all():
        return table
    chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    columns = {}
    for name in column_names(type(table)):
        column = getattr(table, name)
        # A column of one value, which takes no memory, stays such a column.
        is_constant = len(column) and not column.strides[0]
        columns[name] = np.broadcast_to(column[0], len(chosen)) if is_constant else column[chosen]
    return type(table)(**columns)


def take_or_unknown(column: Ints, rows: Ints, missing: int = UNKNOWN) -> Ints:
    """Return the column's values at the rows, ``missing`` if the row is ``UNKNOWN``."""
    return np.where(rows == UNKNOWN, missing, column[rows]) if len(column) else np.full_like(rows, missing)


def is_among(values: Ints, others: Ints) -> Mask:
    """Return which of the values occur among the others. Unlike ``np.isin`` it sorts the values, not the others."""
    ordered, which = np.unique(values, return_inverse=True)
    if not len(ordered):
        return np.zeros(0, np.bool_)
    at = np.minimum(np.searchsorted(ordered, others), len(ordered) - 1)
    found = np.zeros(len(ordered), np.bool_)
    found[at[ordered[at] == others]] = True
    return found[which]


def positions(rows: Ints, length: int) -> Ints:
    """Return the position in ``rows`` of each number below ``length``, ``UNKNOWN`` for numbers that it lacks.

    ``rows`` may hold ``UNKNOWN``.
    """
    found = np.full(length, UNKNOWN, np.int64)
    known = np.flatnonzero(rows != UNKNOWN)
    found[rows[known]] = known
    return found


def begins_run(*columns: NDArray[Any]) -> Mask:
    """Return which rows differ from the one before in any of the columns; the first row counts as different."""
    begins = np.ones(len(columns[0]), np.bool_)
    begins[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return begins


def distinct(column: Ints) -> list[int]:
    """Return the distinct values in ascending order; fast if they lie close together, such as ids of streams."""
    if not len(column):
        return []
    low, high = int(column.min()), int(column.max())
    if high - low > 1 << 24:
        return [int(value) for value in np.unique(column)]
    return [low + row for row in np.flatnonzero(np.bincount(column - low)).tolist()]


def distinct_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each distinct combination, and the number of the combination for each row."""
    which, values = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low, high = _range(column)
        if low == high:
            continue
        codes, more = _codes(column, low, high)
        if values > 1:
            if values * more > _MOST_FLAGS:
                which, values = _compact(which, values)
            codes += which * more
            codes, more = _codes(codes, 0, values * more - 1)
        which, values = codes, more
    which, values = _compact(which, values)
    first = np.zeros(values, np.int64)
    first[which[::-1]] = np.arange(len(which))[::-1]  # a combination's first row is written last
    return first, which


def _range(column: Ints) -> tuple[int, int]:
    if not len(column):
        return 0, 0
    return (int(column[0]),) * 2 if not column.strides[0] else (int(column.min()), int(column.max()))


def _codes(column: Ints, low: int, high: int) -> tuple[Ints, int]:
    """Return numbers from 0 on in the order of the values, which are within a range, and how many there may be."""
    if high - low < _MOST_FLAGS:
        return column - low, high - low + 1
    is_far = column >= low + _MOST_FLAGS
    if 2 * is_far.sum() > len(column):
        values, numbers = np.unique(column, return_inverse=True)
        return np.asarray(numbers, np.int64), len(values)
    # Sort only the few values that are far from the others, such as an id of -1 in 32 bits.
    near, count = _compact(column[~is_far] - low, _MOST_FLAGS)
    values, far = np.unique(column[is_far], return_inverse=True)
    together = np.empty(len(column), np.int64)
    together[~is_far], together[is_far] = near, count + far
    return together, count + len(values)


def _compact(codes: Ints, values: int) -> tuple[Ints, int]:
    """Number those of the codes that occur 0, 1, 2, ...; several times faster than sorting."""
    seen = np.zeros(values, np.bool_)
    seen[codes] = True
    if seen.all():
        return codes, values
    return (np.cumsum(seen) - 1)[codes], int(np.count_nonzero(seen))


def count_before(group: Ints) -> Ints:
    """Return for each row how many rows of its group come before it."""
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], group[order])
    found = np.empty(len(group), np.int64)
    found[order] = np.arange(len(group)) - first
    return found


def concatenate(first: AnyTable, *others: AnyTable) -> AnyTable:
    tables = (first, *others)
    return type(first)(*(_joined([getattr(t, name) for t in tables]) for name in column_names(type(first))))


def _joined(parts: Sequence[Ints]) -> Ints:
    """Concatenate columns; if all rows have one value, the result takes no memory."""
    some = [part for part in parts if len(part)]
    if some and not any(part.strides[0] for part in some) and len({int(part[0]) for part in some}) == 1:
        return np.broadcast_to(some[0][0], sum(map(len, some)))
    return np.concatenate(parts)


def empty(kind: type[AnyTable]) -> AnyTable:
    return kind(**{name: np.empty(0, np.int64) for name in column_names(kind)})


def fill(kind: type[AnyTable], rows: int, /, **columns: Ints) -> AnyTable:
    """Return a table with these columns; all others hold ``UNKNOWN`` and take no memory."""
    unknown = np.broadcast_to(np.int64(UNKNOWN), rows)
    return kind(**{name: columns.get(name, unknown) for name in column_names(kind)})


class Sequences:
    """An index of rows by group and place, which finds the rows before and after a place.

    Args:
        group: Group of each row, a small number from 0 on.
        place: Place of each row within its group.
    """

    def __init__(self, group: Ints, place: Ints) -> None:
        self._low = int(place.min(initial=0))
        self._span = int(place.max(initial=0)) - self._low + 3
        if self._span * (int(group.max(initial=0)) + 2) >= 1 << 63:
            raise ValueError("places are too far apart")
        key = self._key(group, place)
        self.order = np.argsort(key, kind="stable")
        """The rows by group and place."""
        self._keys = key[self.order]
        self._group = group

    def _key(self, group: Ints, place: Ints) -> Ints:
        key: Ints = group * self._span + np.clip(place - self._low + 1, 0, self._span - 1)
        return key

    def last_before(self, group: Ints, place: Ints) -> Ints:
        """Return the last row before each place of a group, ``UNKNOWN`` if there is none."""
        return self._checked(np.searchsorted(self._keys, self._key(group, place)) - 1, group)

    def first_after(self, group: Ints, place: Ints) -> Ints:
        """Return the first row after each place of a group, ``UNKNOWN`` if there is none."""
        return self._checked(np.searchsorted(self._keys, self._key(group, place), side="right"), group)

    def _checked(self, at: Ints, group: Ints) -> Ints:
        if not len(self.order):
            return np.full(len(at), UNKNOWN, np.int64)
        row = self.order[np.clip(at, 0, len(self.order) - 1)]
        is_there = (at >= 0) & (at < len(self.order)) & (self._group[row] == group)
        return np.where(is_there, row, UNKNOWN)
