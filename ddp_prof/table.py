"""Tables of columns, and functions on columns; a column is a one-dimensional NumPy array with one element per row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddp_prof.growing_column import Ints as Ints
from ddp_prof.growing_column import in_order, in_parts, joined

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
_MOST_FLAGS = 1 << 20
"""Values that span less than this are numbered, or translated, by a table and not by sorting; see :func:`_codes`."""
_MOST_FLAGS_PER_ROW = 16
"""With more flags than this for each row, the table takes longer than sorting."""
_MOST_FLAGS_PER_OTHER = 4
"""Values are looked for by flags if that takes at most so many more than _MOST_FLAGS for each row that is searched."""
_PART = 1 << 16
"""Rows of a column that are looked at at once, so that intermediate results stay in the processor's cache."""
_FIRST_PART = 1 << 14
"""Rows that are looked at first when the first rows of few values are looked for."""
UNKNOWN = -1
"""Stands in a column where there is no value (no correlation, no name, size not known)."""
NO_TIME = -(2**62)
"""Stands in a column of times where a time is not known. It is less than any time of a trace, which may be negative."""
NEVER = 2**62
"""Stands in a column of times for what never comes: more than any time, and not too far from any for int64."""


class Brief:
    """Base of dataclasses whose repr is one short line.

    It has the lengths of collections instead of their values, and leaves out what has its default.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # As an attribute of its own, or else the dataclass would make one that lists all values.
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        items = [item for item in fields(self) if item.repr]  # type: ignore[arg-type]
        shown = [item.name for item in items if getattr(self, item.name) is not item.default]
        values = (f"{name}={_brief(getattr(self, name))}" for name in shown)
        return f"{type(self).__name__}({', '.join(values)})"


def _brief(value: object) -> str:
    """Return a short repr of a value: the class of a dataclass, the length of a collection, else the usual repr."""
    if is_dataclass(value) and not isinstance(value, Table):
        return f"<{type(value).__name__}>"
    if isinstance(value, Sized) and not isinstance(value, str | Table):
        return f"[{len(value)}]"
    return repr(value)


@dataclass(frozen=True)
class Table(Brief):
    """A dataclass whose fields are columns of equal length; raises ValueError if the lengths differ."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} rows>"

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in column_names(type(self))}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of unequal length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, column_names(type(self))[0]))


def column_names(kind: type[Table]) -> tuple[str, ...]:
    """Return the names of a table's columns; they are kept, as ``fields`` is slow."""
    if kind not in _COLUMN_NAMES:
        _COLUMN_NAMES[kind] = tuple(item.name for item in fields(kind))
    return _COLUMN_NAMES[kind]


_COLUMN_NAMES: dict[type, tuple[str, ...]] = {}


AnyTable = TypeVar("AnyTable", bound=Table)


def select(table: AnyTable, rows: Mask | Ints) -> AnyTable:
    """Return a table of the chosen rows, given as a mask or as row numbers; the table itself if a mask chooses all."""
    if rows.dtype == np.bool_ and rows.all():
        return table
    chosen: Ints = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)
    columns = {}
    for name in column_names(type(table)):
        column = getattr(table, name)
        # A column with a stride of 0 holds one value for all rows and takes no memory; it stays such a column.
        is_constant = len(column) and not column.strides[0]
        columns[name] = np.broadcast_to(column[0], len(chosen)) if is_constant else _take(column, chosen)
    return type(table)(**columns)


def _take(column: NDArray[Any], rows: Ints) -> NDArray[Any]:
    """Return the column's value at each of the rows; a long column of integers goes to a file."""
    return in_order(column, rows) if column.dtype == np.int64 else column[rows]


def row_numbers(rows: int) -> Ints:
    """Return 0, 1, 2, ... as a column; if it is long, in a file."""
    return in_parts(rows, lambda part: np.arange(part.start, part.stop))


def rows_of(chosen: Mask) -> Ints | slice:
    """Return the numbers of the chosen rows; if all are chosen, a slice of all, with which indexing copies nothing."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def at_rows(column: Ints, rows: Ints | slice) -> Ints:
    """Return the column's values at the rows that :func:`rows_of` returned; if they are many, in a file."""
    return column[rows] if isinstance(rows, slice) else in_order(column, rows)


def constant_column(value: int, rows: int) -> Ints:
    """Return a read-only column in which all rows have one value: a view with stride 0, which takes no memory."""
    return np.broadcast_to(np.int64(value), rows)


def take_or_unknown(column: Ints, rows: Ints, missing: int = UNKNOWN) -> Ints:
    """Return the column's value at each of the rows; ``missing`` where the row is ``UNKNOWN``."""
    if not len(column):
        return np.full_like(rows, missing)
    found = column[rows]
    found[rows == UNKNOWN] = missing
    return found


def translate(column: Ints, number_of: Callable[[int], int]) -> Ints:
    """Return a column with each value replaced by the result of ``number_of``; if it is long, in a file.

    The function is called once for each distinct value, in ascending order.
    """
    values = distinct(column)
    numbers = np.array([number_of(value) for value in values], np.int64)
    if len(values) == 1:
        return np.broadcast_to(numbers[0], len(column))
    if not values or values[-1] - values[0] >= _MOST_FLAGS:
        return in_parts(len(column), lambda rows: numbers[np.searchsorted(values, column[rows])])
    table = np.zeros(values[-1] - values[0] + 1, np.int64)
    table[np.array(values) - values[0]] = numbers
    return in_parts(len(column), lambda rows: table[column[rows] - values[0]])


def take_in_parts(column: Ints, rows: Ints, missing: int = UNKNOWN) -> Ints:
    """Return what :func:`.take_or_unknown` returns; if it is long, in a file."""
    return in_parts(len(rows), lambda part: take_or_unknown(column, rows[part], missing))


def parts_of(rows: int) -> Iterator[slice]:
    """Yield slices of so few rows that intermediate results of these stay in the processor's cache."""
    for at in range(0, rows, _PART):
        yield slice(at, min(rows, at + _PART))


def is_in(column: Ints, values: Collection[int] | Ints) -> Mask:
    """Return for each row of a long column whether it is one of a few values, as ``np.isin`` does."""
    chosen, found = np.fromiter(values, np.int64, len(values)), np.zeros(len(column), np.bool_)
    low, high = _range(chosen)
    if high - low >= _MOST_FLAGS:
        for rows in parts_of(len(column)):
            found[rows] = np.isin(column[rows], chosen)
    elif len(chosen):
        # A flag for each value from the least to the largest one; before and after these one for all other values.
        flags, before = np.zeros(high - low + 3, np.bool_), low - 1
        flags[chosen - before] = True
        for rows in parts_of(len(column)):
            np.take(flags, column[rows] - before, mode="clip", out=found[rows])
    return found


def is_among(values: Ints, others: Ints) -> Mask:
    """Return for each of the values whether it occurs in ``others``, which may be long and in any order.

    Unlike ``np.isin`` it never sorts ``others``.
    """
    low, high = _range(values)
    if high - low < _MOST_FLAGS + _MOST_FLAGS_PER_OTHER * len(others):
        # A flag for each value as in is_in: those of the others are set, and then looked up.
        flags, before = np.zeros(high - low + 3, np.bool_), low - 1
        for rows in parts_of(len(others)):
            flags[np.clip(others[rows] - before, 0, len(flags) - 1)] = True
        return flags[values - before]
    ordered, which = np.unique(values, return_inverse=True)
    # Look up each element of ``others`` among the sorted values, and mark the values that are found.
    at = np.minimum(np.searchsorted(ordered, others), len(ordered) - 1)
    found = np.zeros(len(ordered), np.bool_)
    found[at[ordered[at] == others]] = True
    return found[which]


def positions(rows: Ints, length: int) -> Ints:
    """Return the inverse of ``rows``: for each number from 0 to ``length - 1`` its position in ``rows``.

    It is ``UNKNOWN`` for numbers that ``rows`` does not hold. ``rows`` may hold ``UNKNOWN``.
    """
    found = np.full(length, UNKNOWN, np.int64)
    for part in parts_of(len(rows)):
        known = np.flatnonzero(rows[part] != UNKNOWN)
        found[rows[part][known]] = part.start + known
    return found


def begins_run(*columns: NDArray[Any]) -> Mask:
    """Return for each row whether it differs from the row before in any of the columns; the first row does."""
    begins = np.ones(len(columns[0]), np.bool_)
    begins[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return begins


def are_repeated(*columns: Ints) -> Mask:
    """Return which rows are equal to an earlier row in all columns; fast if the first column is nearly in order."""
    first, found = columns[0], np.zeros(len(columns[0]), np.bool_)
    ordered = np.sort(first, kind="stable")  # takes one pass if the column is in order
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return found
    rows = np.flatnonzero(again[np.minimum(np.searchsorted(again, first), len(again) - 1)] == first)
    mixed = np.zeros(len(rows), np.int64)
    for column in columns:  # equal rows get equal numbers; different rows seldom do
        mixed = mixed * _MIXES + column[rows]
    order = np.argsort(mixed, kind="stable")
    begins = np.append(True, mixed[order[1:]] != mixed[order[:-1]])
    alone = begins & np.append(begins[1:], True)
    asked = np.sort(rows[order[~alone]])
    first_rows, _ = distinct_rows(*(column[asked] for column in columns))
    is_again = np.ones(len(asked), np.bool_)
    is_again[first_rows] = False
    found[asked] = is_again
    return found


_MIXES = np.int64(0x2545F4914F6CDD1D)
"""An odd number by which products wrap around, so that small differences change all bits above them."""


def distinct(column: Ints) -> list[int]:
    """Return the distinct values in ascending order; fast if they lie close together, such as ids of streams."""
    if not len(column):
        return []
    low, high = _range(column)
    if low == high:
        return [low]
    if high - low > 1 << 24:  # a flag for each number in between would take too much memory
        return [int(value) for value in np.unique(column)]
    seen = np.zeros(high - low + 1, np.bool_)
    for rows in parts_of(len(column)):
        seen[column[rows] - low] = True
    return [low + row for row in np.flatnonzero(seen).tolist()]


def distinct_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Number the distinct combinations of values in a row 0, 1, 2, ...

    Returns the first row of each combination, and for each row the number of its combination.
    """
    # ``which`` is the number of the combination of the columns so far, below ``values``. For each further column it is
    # combined with the number of the column's value, below ``more``. Numbers without gaps are made only when needed.
    which: Ints | None = None
    values = 1
    for column in columns:
        low, high = _range(column)
        if low == high:  # a column of one value distinguishes no rows
            continue
        codes, more = _codes(column, low, high)
        if which is not None:
            if values * more > _MOST_FLAGS:
                which, values = _compact(which, values)
            codes += which * more
            codes, more = _codes(codes, 0, values * more - 1)
        which, values = codes, more
    if which is None:  # all rows are equal
        return np.zeros(min(1, len(columns[0])), np.int64), np.zeros(len(columns[0]), np.int64)
    which, values = _compact(which, values)
    return _first_rows(which, values), which


def _first_rows(which: Ints, values: int) -> Ints:
    """Return the first row of each of the numbers from 0 to ``values - 1``, all of which occur.

    If there are few, most occur in the first rows: ever larger parts of the rows are looked at until all are found.
    """
    first = np.full(values, UNKNOWN, np.int64)
    begin, size = 0, _FIRST_PART if values < _FIRST_PART else len(which)
    while begin < len(which):
        part, found = which[begin : begin + size], np.full(values, UNKNOWN, np.int64)
        found[part[::-1]] = np.arange(begin, begin + len(part))[::-1]  # a number's first row is written last
        first = np.where(first == UNKNOWN, found, first)
        if first.min() != UNKNOWN:
            break
        begin, size = begin + size, 2 * size
    return first


def _range(column: Ints) -> tuple[int, int]:
    """Return the least and the largest value; at once for a column that holds one value for all rows (stride 0)."""
    if not len(column):
        return 0, 0
    return (int(column[0]),) * 2 if not column.strides[0] else (int(column.min()), int(column.max()))


def _codes(column: Ints, low: int, high: int) -> tuple[Ints, int]:
    """Return for each row a number from 0 on for its value, in the order of the values, and a bound above all numbers.

    ``low`` and ``high`` are the least and the largest value. Some numbers may not occur.
    """
    if high - low < _MOST_FLAGS:
        return column - low, high - low + 1
    is_far = column >= low + _MOST_FLAGS
    if 2 * is_far.sum() > len(column):
        return _number_by_sorting(column)
    # Sort only the few values that are far from the others, such as an id of -1 in 32 bits.
    near, count = _compact(column[~is_far] - low, _MOST_FLAGS)
    far, more = _number_by_sorting(column[is_far])
    together = np.empty(len(column), np.int64)
    together[~is_far], together[is_far] = near, count + far
    return together, count + more


def _compact(codes: Ints, values: int) -> tuple[Ints, int]:
    """Renumber codes 0, 1, 2, ... without gaps, in the same order; return the new codes and how many there are.

    The codes are below ``values``. Unless these are very many, that is several times faster than sorting.
    """
    if values > _MOST_FLAGS_PER_ROW * len(codes):
        return _number_by_sorting(codes)
    seen = np.zeros(values, np.bool_)
    seen[codes] = True
    if seen.all():
        return codes, values
    # The new code of each code. There may be many more codes than rows, and 32 bits suffice for their numbers.
    code = np.cumsum(seen, dtype=np.int32)
    code -= 1
    return in_parts(len(codes), lambda rows: code[codes[rows]].astype(np.int64)), int(np.count_nonzero(seen))


def _number_by_sorting(column: Ints) -> tuple[Ints, int]:
    """Number the distinct values 0, 1, 2, ... in their order; return the number of each row's value, and how many.

    It is fast if the column is nearly in order, such as ids that a profiler counted up.
    """
    order = np.argsort(column, kind="stable")
    number = np.cumsum(begins_run(column[order])) - 1
    found = np.empty(len(column), np.int64)
    found[order] = number
    return found, int(number[-1]) + 1 if len(column) else 0


def count_before(group: Ints) -> Ints:
    """Return for each row how many rows of its group come before it."""
    order = np.argsort(group, kind="stable")  # groups one after another, the rows of a group in their order
    first = np.flatnonzero(begins_run(group[order]))
    nth = np.arange(len(group))
    nth -= np.repeat(first, np.diff(first, append=len(group)))
    found = np.empty(len(group), np.int64)
    found[order] = nth
    return found


def concatenate(first: AnyTable, *others: AnyTable) -> AnyTable:
    """Return a table with the rows of all tables, in this order."""
    tables = (first, *others)
    return type(first)(*(concatenate_columns([getattr(t, name) for t in tables]) for name in column_names(type(first))))


def concatenate_columns(parts: Sequence[Ints]) -> Ints:
    """Concatenate columns; if each holds one value for all rows, and all the same, the result takes no memory."""
    some = [part for part in parts if len(part)]
    if len(some) == 1:
        return some[0]
    if some and not any(part.strides[0] for part in some) and len({int(part[0]) for part in some}) == 1:
        return np.broadcast_to(some[0][0], sum(map(len, some)))
    return joined(parts) if parts[0].dtype == np.int64 else np.concatenate(parts)


def empty(kind: type[AnyTable]) -> AnyTable:
    return kind(**{name: np.empty(0, np.int64) for name in column_names(kind)})


def fill(kind: type[AnyTable], rows: int, /, **columns: Ints) -> AnyTable:
    """Return a table with these columns; all others hold ``UNKNOWN`` and take no memory."""
    unknown = constant_column(UNKNOWN, rows)
    return kind(**{name: columns.get(name, unknown) for name in column_names(kind)})


class Sequences:
    """An index that finds, within a group of rows, the row before or after a given place, for example a time.

    Args:
        group: Group of each row, a small number from 0 on.
        place: Place of each row within its group, a whole number by which the rows of a group are ordered.

    Raises:
        ValueError: The places are too far apart for keys of 64 bits.
    """

    def __init__(self, group: Ints, place: Ints) -> None:
        # A key of 64 bits holds group and place: group * span + place, so that keys sort by group, then place.
        self._low, high = (int(place.min()), int(place.max())) if len(place) else (0, 0)
        self._span = high - self._low + 3
        if self._span * (int(group.max(initial=0)) + 2) >= 1 << 63:
            raise ValueError("places are too far apart")
        key = self._key(group, place)
        is_sorted = bool(np.all(key[1:] >= key[:-1]))
        self.order = row_numbers(len(key)) if is_sorted else np.argsort(key, kind="stable")
        """The row numbers, sorted by group, then by place."""
        self._keys = key if is_sorted else key[self.order]
        self._group = group

    def _key(self, group: Ints, place: Ints) -> Ints:
        """Return the keys; a place before or after all rows of the index is clipped to just before or after them."""
        key: Ints = place - (self._low - 1)
        np.clip(key, 0, self._span - 1, out=key)
        key += group * self._span
        return key

    def last_before(self, group: Ints, place: Ints) -> Ints:
        """Return for each pair of a group and a place the group's last row before that place, else ``UNKNOWN``."""
        return self._checked(np.searchsorted(self._keys, self._key(group, place)) - 1, group)

    def first_after(self, group: Ints, place: Ints) -> Ints:
        """Return for each pair of a group and a place the group's first row after that place, else ``UNKNOWN``."""
        return self._checked(np.searchsorted(self._keys, self._key(group, place), side="right"), group)

    def _checked(self, at: Ints, group: Ints) -> Ints:
        """Return the rows at positions of the index; ``UNKNOWN`` if outside of it or if the row is of another group."""
        if not len(self.order):
            return np.full(len(at), UNKNOWN, np.int64)
        row = self.order[np.clip(at, 0, len(self.order) - 1)]
        is_there = (at >= 0) & (at < len(self.order)) & (self._group[row] == group)
        return np.where(is_there, row, UNKNOWN)
