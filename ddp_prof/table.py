"""Tables of columns: a column is a one-dimensional NumPy array with one element a row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_MOST_FLAGS = 1 << 20
UNKNOWN = -1
"""In a column: no value (no correlation, no name, size not known)."""


@dataclass(frozen=True)
class Table:
    """Columns of equal length."""

    def __post_init__(self) -> None:
        lengths = {column.name: len(getattr(self, column.name)) for column in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of unequal length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))


AnyTable = TypeVar("AnyTable", bound=Table)


def select(table: AnyTable, rows: Mask | Ints) -> AnyTable:
    """The chosen rows, as a table of the same kind; the very same where all are chosen."""
    if rows.dtype == np.bool_ and rows.all():
        return table
    chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    return type(table)(**{column.name: _chosen(getattr(table, column.name), chosen) for column in fields(table)})


def _chosen(column: Ints, rows: Mask | Ints) -> Ints:
    """The chosen rows; of a column of one value, which takes no memory, another such column."""
    return column[rows] if column.strides[0] or not len(column) else np.broadcast_to(column[0], len(rows))


def looked_up(column: Ints, rows: Ints) -> Ints:
    """The column's values at the rows, ``UNKNOWN`` where the row is."""
    return np.where(rows == UNKNOWN, UNKNOWN, column[rows]) if len(column) else np.full_like(rows, UNKNOWN)


def distinct(column: Ints) -> list[int]:
    """The values that occur, ascending; quickest where they are small, as ids of processes, devices and streams are."""
    if not len(column):
        return []
    low, high = int(column.min()), int(column.max())
    if high - low > 1 << 24:
        return [int(value) for value in np.unique(column)]
    return [low + row for row in np.flatnonzero(np.bincount(column - low)).tolist()]


def distinct_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """The first row of each distinct combination, and for each row which combination it is."""
    which = np.zeros(len(columns[0]), np.int64)
    combinations = 1
    for column in columns:
        codes = _codes(column)
        values = int(codes.max(initial=0)) + 1
        if values > 1:
            which = codes if combinations == 1 else _codes(which * values + codes)
            combinations = int(which.max()) + 1
    first = np.zeros(which.max(initial=-1) + 1, np.int64)
    first[which[::-1]] = np.arange(len(which))[::-1]  # of several rows of a combination the last one written stays
    return first, which


def _codes(column: Ints) -> Ints:
    """Distinct values as 0, 1, 2, ...; several times as fast as sorting where they are small, as sizes are."""
    low, high = int(column.min(initial=0)), int(column.max(initial=0))
    if low == high:
        return np.zeros_like(column)
    if high - low > _MOST_FLAGS:
        return np.asarray(np.unique(column, return_inverse=True)[1], np.int64)
    place = column - low
    seen = np.zeros(high - low + 1, np.int64)
    seen[place] = 1
    codes: Ints = (np.cumsum(seen) - 1)[place]
    return codes


def concatenate(first: AnyTable, *others: AnyTable) -> AnyTable:
    """The rows of all tables, one after the other."""
    tables = (first, *others)
    return type(first)(*(_joined([getattr(t, column.name) for t in tables]) for column in fields(first)))


def _joined(parts: Sequence[Ints]) -> Ints:
    """The parts one after the other; where one value is all they hold, a column that takes no memory."""
    some = [part for part in parts if len(part)]
    if some and not any(part.strides[0] for part in some) and len({int(part[0]) for part in some}) == 1:
        return np.broadcast_to(some[0][0], sum(map(len, some)))
    return np.concatenate(parts)


def empty(kind: type[AnyTable]) -> AnyTable:
    """A table without rows."""
    return kind(**{item.name: np.empty(0, np.int64) for item in fields(kind)})
