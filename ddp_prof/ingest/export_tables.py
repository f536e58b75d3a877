"""Interface to the tables of an export of Nsight Systems, whether it is a database or a folder of files.

Releases and exporters differ in their tables and columns. A table without rows counts as absent. A column that a table
lacks counts as NULL in all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from pathlib import Path
from time import monotonic, process_time
from typing import Any, ClassVar, TypeVar

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.growing_column import GrowingColumn
from ddp_prof.table import UNKNOWN, Ints, constant_column
from ddp_prof.threads import in_thread

Read = TypeVar("Read")

LEAST_S, BYTES_PER_SECOND = 20, 2_000_000
"""Time limit for reading an export: ``LEAST_S`` plus its size at this speed, a fiftieth of that of a slow machine."""
HINT = "export the report again with nsys export"
"""What errors advise."""
HOLDS = "holds"
"""Name of an additional column that tells which of some columns are not NULL: bit 0 is for the first of them."""

Only = tuple[str, tuple[int, ...]]
"""A choice of rows of a table: the name of a column, and the values in this column that a chosen row may have."""


class ExportTables(ABC):
    """The tables of one export. Subclasses read them from an SQLite database or from a folder of files.

    A damaged or hostile export can be small and seem endless, so :meth:`run_with_deadline` stops reading after a time
    limit.

    Args:
        path: The export, which errors name.
        held: Value of ``bytes``.

    Attributes:
        source: Value of :attr:`~ddp_prof.trace.Trace.source`.
        kind: What the export is, in words.
        columns: Names of the columns of each table that holds rows; a table without rows is not in it.
        bytes: Size of the export on disk.
    """

    source: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, path: Path, held: int) -> None:
        self.path = path
        self.columns: dict[str, tuple[str, ...]] = {}
        self.bytes = held
        self._is_stopped = False

    @abstractmethod
    def few_rows(
        self,
        table: str,
        integers: Sequence[str],
        others: Sequence[str] = (),
        *,
        order: Sequence[str] = (),
        filled: Sequence[str] = (),
        distinct: bool = False,
    ) -> list[tuple[Any, ...]]:
        """Return rows of a small table: tuples with the columns ``integers`` and then ``others``.

        Only rows with an integer in each of ``integers`` are returned; an empty list if the table lacks a column. Bytes
        of texts that are no UTF-8 are replaced.

        Args:
            table: Name of the table.
            integers: Columns that hold integers.
            others: Further columns, of any type.
            order: Columns to sort by, NULL first.
            filled: If given, only rows in which at least one of these columns is not NULL are returned.
            distinct: Whether equal rows are returned once.
        """

    @abstractmethod
    def record_batches(
        self,
        table: str,
        columns: Sequence[str],
        *,
        holds: Sequence[str] = (),
        text: str | None = None,
        only: Only | None = None,
    ) -> Iterator[Mapping[str, Any]]:
        """Yield a table in batches of rows: ``pyarrow`` arrays by name of column. A batch is valid until the next one.

        Args:
            table: Name of the table.
            columns: Columns of integers, which the table must have.
            holds: If given, each batch also has the column :data:`HOLDS` for these columns.
            text: A further column, of texts; a missing text may be NULL or an empty text.
            only: The rows that the caller uses. In the other rows there may be any value or NULL: the caller must leave
                them out by itself.
        """

    def text_batches(self, table: str, text: str, only: Only) -> Iterator[tuple[Ints, list[bytes]]]:
        """Yield the column ``text`` of the rows in ``only``, in batches: (number of each row's text, distinct texts).

        The number is an index into the distinct texts of the same batch, which are bytes, in the order in which they
        first occur. For a row without a text it is ``UNKNOWN``, or the number of an empty text.
        """
        return number_texts(self.record_batches(table, only[:1], text=text, only=only), text, only)

    def stop(self) -> None:
        """Make threads that read this export end with a TraceError; nothing can be read from now on."""
        self._is_stopped = True

    def run_with_deadline(self, read: Callable[[], Read]) -> Read:
        """Call ``read``, which reads this export, and return its result.

        The function runs in a thread of its own, because neither signals nor timers interrupt SQLite.

        Raises:
            TraceError: It takes too long for the size of the export, in real time and in processor time: on a busy
                machine or a slow disk, a good file may take more real time than the limit.
        """
        limit_s = left_s = LEAST_S + self.bytes / BYTES_PER_SECOND
        begun_s, begun_cpu_s = monotonic(), process_time()
        future = in_thread(read)
        try:
            # Real time and processor time must both exceed the limit: the smaller one counts.
            while left_s > 0 and not future.done():
                wait([future], left_s)
                left_s = limit_s - min(monotonic() - begun_s, process_time() - begun_cpu_s)
            return future.result(0)  # raises FutureTimeoutError if it is not done
        except BaseException as error:
            self.stop()
            if future.done() or not isinstance(error, FutureTimeoutError):
                raise
            reason = f"reading it takes more than {limit_s:.0f} s, which no export of its size does"
            raise TraceError(self.path, reason, HINT) from None

    def has_columns(self, table: str, *columns: str) -> bool:
        """Return whether the table holds rows and has all these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def require(self, table: str, *columns: str) -> None:
        """Raise TraceError if the table holds rows but lacks one of these columns."""
        for column in columns:
            if table in self.columns and column not in self.columns[table]:
                raise TraceError(self.path, f"{table} has no column {column}", HINT)

    def read_integers(self, table: str, columns: Sequence[str]) -> dict[str, Ints]:
        """Return columns of a table as int64, with ``UNKNOWN`` for NULL and for columns that the table lacks.

        The columns of an absent table are empty: exporters leave out tables of events that were not recorded.
        """
        return gather_batches(columns, self.batches(table, columns))

    def batches(
        self, table: str, columns: Sequence[str], holds: Sequence[str] = (), only: Only | None = None
    ) -> Iterator[dict[str, Ints]]:
        """Yield the columns as in :meth:`read_integers`, in batches of rows; a batch is valid until the next one.

        Args:
            table: Name of the table.
            columns: The columns.
            holds: If given, each batch also has the column :data:`HOLDS` for these columns.
            only: The rows that the caller uses; the other rows may hold anything.
        """
        present = [column for column in columns if self.has_columns(table, column)]
        for batch in self.integer_batches(table, present, holds, only) if present else ():
            absent = constant_column(UNKNOWN, len(batch[present[0]]))
            yield batch | {name: absent for name in columns if name not in present}

    def integer_batches(
        self, table: str, columns: Sequence[str], holds: Sequence[str], only: Only | None
    ) -> Iterator[dict[str, Ints]]:
        """Yield columns of integers batch by batch, as :meth:`batches` does, of a table that has all these columns."""
        for batch in self.record_batches(table, columns, holds=holds, only=only):
            yield self.integers_of(batch, columns, holds)

    def integers_of(self, batch: Mapping[str, Any], columns: Sequence[str], holds: Sequence[str]) -> dict[str, Ints]:
        """Return columns of a batch of :meth:`record_batches` as int64, with :data:`HOLDS` if ``holds`` names any."""
        found = {name: self._integers(name, batch[name]) for name in columns}
        return found | ({HOLDS: integer_array(batch[HOLDS])} if holds else {})

    def _integers(self, name: str, column: Any) -> Ints:
        """Return a ``pyarrow`` column as int64; raise TraceError with its name if it does not hold integers."""
        try:
            return integer_array(column)
        except TypeError as error:
            raise self.not_integer_error(name) from error

    def not_integer_error(self, column: str) -> TraceError:
        return TraceError(self.path, f"column {column} holds something that is no integer", HINT)

    def check_not_stopped(self) -> None:
        if self._is_stopped:
            raise TraceError(self.path, "reading it was stopped", HINT)


def integer_array(column: Any) -> Ints:
    """Return a ``pyarrow`` array of integers as int64, with ``UNKNOWN`` for NULL.

    It reads Arrow's buffers (validity bits, values) directly: pyarrow's own conversions import pandas, which takes
    longer than reading a million rows.

    Raises:
        TypeError: The array is of another type.
    """
    import pyarrow

    if not pyarrow.types.is_integer(column.type):
        raise TypeError(f"{column.type} is no integer")
    validity, values = column.buffers()
    rows = slice(column.offset, column.offset + len(column))
    # Unsigned values of 64 bits are taken as signed ones with the same bits.
    sign = "i" if column.type.bit_width == 64 or pyarrow.types.is_signed_integer(column.type) else "u"
    array: Ints = np.frombuffer(values, f"{sign}{column.type.bit_width // 8}")[rows].astype(np.int64, copy=False)
    if not column.null_count:
        return array
    is_valid = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[rows].view(np.bool_)
    return np.where(is_valid, array, UNKNOWN)


def number_texts(batches: Iterable[Mapping[str, Any]], text: str, only: Only) -> Iterator[tuple[Ints, list[bytes]]]:
    """Yield the texts of batches as :meth:`ExportTables.text_batches` does.

    Args:
        batches: Batches of :meth:`ExportTables.record_batches`, with the column of ``only`` and the texts.
        text: Name of the column of texts.
        only: The rows whose texts are wanted.
    """
    import pyarrow

    # Not pyarrow.compute: importing it takes longer than all of this.
    from pyarrow._compute import call_function

    column, values = only
    for batch in batches:
        rows = np.isin(integer_array(batch[column]), values)
        # Arrow numbers the distinct texts of all rows; number them anew in the order of the chosen rows.
        encoded = call_function("dictionary_encode", [batch[text]])
        code, held = integer_array(encoded.indices)[rows], encoded.dictionary.view(pyarrow.binary())
        # Both have one element more, the last one, for NULL.
        first, number = np.full(len(held) + 1, len(code)), np.full(len(held) + 1, UNKNOWN, np.int64)
        first[code[::-1]] = np.arange(len(code))[::-1]  # of equal codes, the last assignment counts
        found: list[bytes] = []
        for one in np.argsort(first[:-1])[: np.count_nonzero(first[:-1] < len(code))].tolist():
            if distinct := held[one].as_py():
                number[one] = len(found)
                found.append(distinct)
        yield number[code], found


def gather_batches(columns: Sequence[str], batches: Iterable[Mapping[str, Ints]]) -> dict[str, Ints]:
    """Return each column of ``columns`` with the rows of all batches; one with a single value takes no memory."""
    gathered = GatheredColumns(columns)
    for batch in batches:
        gathered.add(batch)
    return gathered.columns()


class GatheredColumns:
    """Columns that grow batch by batch. A column whose rows all have one value so far takes no memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self._rows = 0
        self._constant: dict[str, int] = {}
        self._grown = {name: GrowingColumn() for name in names}

    def add(self, batch: Mapping[str, Ints]) -> None:
        """Add the rows of a batch, which may hold further columns, too."""
        rows = 0
        for name, grown in self._grown.items():
            values = batch[name]
            rows = len(values)
            if not rows:
                continue
            if not grown.rows:  # so far, all rows of the column have one value
                value = int(values[0])
                if self._constant.get(name, value) == value and _is_constant(values):
                    self._constant[name] = value
                    continue
                if self._rows:  # the first other value: write out the rows before
                    grown.add(np.full(self._rows, self._constant[name], np.int64))
            grown.add(values)
        self._rows += rows

    def columns(self) -> dict[str, Ints]:
        """Return the columns by name; nothing is to be added afterwards."""
        return {
            name: grown.values() if grown.rows or not self._rows else constant_column(self._constant[name], self._rows)
            for name, grown in self._grown.items()
        }


def _is_constant(values: Ints) -> bool:
    return not values.strides[0] or bool(np.all(values == values[0]))  # stride 0: a view of one value
