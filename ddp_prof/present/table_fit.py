"""Which columns and rows of a table are shown: those asked for, or on a terminal those that matter and fit."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.errors import DdpProfError
from ddp_prof.present.columns import ALWAYS, Column, columns_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.present.columns import Row, Value
    from ddp_prof.present.table_view import Digest

MOST_ROWS = 24
"""Rows that a table on a terminal shows whole, where it can be made short."""
FIRST_ROWS = 8
"""Rows that it is made short to, beside the one of all others."""

GAP = 3
"""Characters between two columns."""

WORDS = 22
"""Width that a column of words keeps where there is little room; its cells wrap."""

NAMES = frozenset({"run", "variant", "node", "rank", "decided_by"})
"""Columns of names that others gave, of any length."""
LONGEST_NAME = 2 * WORDS


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How tables are printed.

    Attributes:
        form: ``table``, ``markdown``, ``csv`` or ``json``.
        wide: Whether all columns are shown, however wide the table gets.
        columns: Keys of the columns to show, in this order; all where there is none.
        quiet: Whether notes are left out.
    """

    form: str = "table"
    wide: bool = False
    columns: tuple[str, ...] = ()
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """The columns to show.

    Attributes:
        shown: In their order.
        unknown: Left out, since nothing is known in any of their rows.
        zero: Left out for want of room, and 0 in all of their rows.
        narrow: Left out for want of room.
    """

    shown: tuple[Column, ...]
    unknown: tuple[Column, ...] = ()
    zero: tuple[Column, ...] = ()
    narrow: tuple[Column, ...] = ()

    @property
    def note(self) -> str | None:
        """What is left out, and how to see it."""
        parts = [f"{column.heading} (n/a)" for column in self.unknown]
        parts += [f"{column.heading} (0)" for column in self.zero]
        parts += [column.heading for column in self.narrow]
        return f"not shown: {', '.join(parts)}; all columns: --wide" if parts else None


def terminal_width() -> int | None:
    """Characters of a line of the terminal; ``None`` where stdout is none, so that what is piped stays whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def only(rows: Sequence[Row], keys: Sequence[str]) -> Sequence[Row]:
    """The rows with the columns asked for, with all where none is.

    Raises:
        DdpProfError: There is no such column.
    """
    if not keys or not rows:
        return rows
    if missing := [key for key in keys if key not in rows[0]]:
        raise DdpProfError(f"no column '{missing[0]}' in this table: choose from {','.join(rows[0])}")
    return [{key: row[key] for key in keys} for row in rows]


def shorten(rows: Sequence[Row], digest: Digest) -> Sequence[Row]:
    """The rows with the largest figures, then one with the sums over all others; a few rows stay as they are."""
    if len(rows) <= MOST_ROWS:
        return rows
    ordered = sorted(rows, key=lambda row: _number(row[digest.by]), reverse=True)
    first, others = ordered[:FIRST_ROWS], ordered[FIRST_ROWS:]
    rest: Row = dict.fromkeys(rows[0])
    for key in (key for key in digest.summed if key in rest):
        known = [value for row in others if isinstance(value := row[key], (int, float))]
        rest[key] = sum(known) if known else None
    return [*first, {**rest, digest.rest: f"{len(others):,} others"}]


def cut_names(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows, in which no name fills the terminal: names of files differ at their ends, so the middle goes."""
    return [{key: _cut(value) if key in NAMES else value for key, value in row.items()} for row in rows]


def _cut(name: Value) -> Value:
    if not isinstance(name, str) or len(name) <= LONGEST_NAME:
        return name
    return f"{name[: WORDS - 1]}…{name[-WORDS:]}"


def _number(value: Value) -> float:
    """For an order in which what is not known comes last."""
    return float(value) if isinstance(value, (int, float)) else -math.inf


def fit_columns(rows: Sequence[Row], width: int) -> Fitted:
    """The columns that fit: those without any value go first, then those of zeros, then those that matter least."""
    columns = columns_of(rows)
    unknown = tuple(column for column in columns if all(row[column.key] in (None, "") for row in rows))
    left = [column for column in columns if column not in unknown] or list(columns)
    zeros = [column for column in left if not any(row[column.key] for row in rows)]
    dropped: list[Column] = []
    for column in sorted(left, key=lambda column: (column not in zeros, -column.stays, -columns.index(column))):
        if _width(left, rows) <= width:
            break
        if column.stays != ALWAYS:
            dropped.append(column)
            left.remove(column)
    return Fitted(
        tuple(left),
        unknown if len(unknown) < len(columns) else (),
        tuple(column for column in columns if column in dropped and column in zeros),
        tuple(column for column in columns if column in dropped and column not in zeros),
    )


def _width(columns: Sequence[Column], rows: Sequence[Row]) -> int:
    return sum(_least_width(column, rows) for column in columns) + GAP * (len(columns) - 1)


def _least_width(column: Column, rows: Sequence[Row]) -> int:
    """Words of a heading stand below each other; cells wrap only where they hold words."""
    cells = max(len(column.text(row[column.key])) for row in rows)
    heading = max(map(len, column.heading.split()))
    return max(heading, cells if column.is_right(rows) else min(cells, WORDS))
