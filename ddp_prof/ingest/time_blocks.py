"""An index of a large table: smallest and largest time and correlation id per block of rows.

Exports have no indexes. One pass over a table notes what each block of consecutive rows holds; a question for a span of
time or ids then reads the blocks that may answer it. Rows may lie in any order: of a table in none, each question reads
all of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.errors import DdpProfError
from ddp_prof.trace import UNKNOWN, Ints, Mask

BLOCK_ROWS = 1 << 16
END = 'max(start, coalesce("end", start))'
"""When a row ends, in SQL: not before it starts, and where it starts if it has no end."""


class CannotSplitError(DdpProfError):
    """A capture that has to be read as a whole, and why: ``it has no steps``."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one table that hold rows, in the order of the file.

    Attributes:
        first: The least row id of each block; the largest is ``first + BLOCK_ROWS - 1``.
        rows: How many rows it holds.
        end_ns: The latest end; the latest start where the table has no ends.
        least_id: The least correlation id; ``most_id`` the largest.
    """

    table: str
    first: Ints
    rows: Ints
    start_ns: Ints
    last_start_ns: Ints
    end_ns: Ints
    least_id: Ints
    most_id: Ints

    def overlapping(self, start_ns: int, end_ns: int) -> Mask:
        """Mask of the blocks that may hold events that overlap a span of time, or end where it starts."""
        found: Mask = (self.start_ns < end_ns) & (self.end_ns >= start_ns)
        return found

    def with_ids(self, least: int, most: int) -> Mask:
        """The blocks that may hold correlation ids from the least to the most."""
        found: Mask = (self.least_id <= most) & (self.most_id >= least)
        return found

    def where(self, chosen: Mask) -> str:
        """The SQL condition that limits a query to the chosen blocks."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
        runs = [
            f"rowid BETWEEN {self.first[low]} AND {self.first[high - 1] + BLOCK_ROWS - 1}"
            for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
        return f"({' OR '.join(runs)})" if runs else "0"


def scan_blocks(
    database: sqlite3.Connection, table: str, columns: Sequence[str], max_id_gap: int, condition: str = "1"
) -> Blocks:
    """Look at all rows of a table once.

    Args:
        database: A connection, to which the table's database is attached as ``whole``.
        table: The table, with a column ``start``.
        columns: Those that it has.
        max_id_gap: So far apart may the numbers of its rows be.
        condition: Which rows count.

    Raises:
        CannotSplitError: A row has no start, or not a number for one, or rows are numbered by no order.
    """
    end = END if "end" in columns else "start"
    number = "correlationId" if "correlationId" in columns else "NULL"
    query = (
        f"SELECT count(*), sum(typeof(start) = 'integer' AND start != {UNKNOWN}), min(start), max(start), max({end}), "
        f"coalesce(min({number}), 0), coalesce(max({number}), -1) "
        f'FROM whole."{table}" WHERE rowid BETWEEN ? AND ? AND {condition}'
    )
    low, high = database.execute(f'SELECT min(rowid), max(rowid) FROM whole."{table}"').fetchone()
    if high - low > max_id_gap:
        raise CannotSplitError(f"{table} has rows whose numbers are far apart")
    found = []
    for first in range(low, high + 1, BLOCK_ROWS):
        rows, starts, *edges = database.execute(query, (first, first + BLOCK_ROWS - 1)).fetchone()
        if rows and (starts != rows or not all(isinstance(edge, int) for edge in edges)):
            raise CannotSplitError(f"{table} has rows without a start")
        if rows:
            found.append((first, rows, *edges))
    return Blocks(table, *np.array(found, np.int64).reshape(len(found), 7).T)
