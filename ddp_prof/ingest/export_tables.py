"""The tables of an export of Nsight Systems, in a database or in a folder of files: what its reader asks of both.

Releases and exporters differ in their tables and columns. A table without rows counts as absent, and a column that a
table lacks as NULL in all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from threading import Thread
from time import monotonic, process_time
from typing import Any, ClassVar, TypeVar

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.ingest.growing_column import GrowingColumn
from ddp_prof.table import UNKNOWN, Ints

Read = TypeVar("Read")

LEAST_S, BYTES_PER_SECOND = 20, 2_000_000
"""Time limit for reading an export: a constant plus its bytes at a fiftieth of the speed of a slow machine."""
HINT = "export the report again with nsys export"
HOLDS = "holds"
"""Column that tells which of some columns are not NULL: the first of them has bit 0."""

Only = tuple[str, tuple[int, ...]]
"""Rows of a table: those with one of the values in a column."""


class ExportTables(ABC):
    """The tables of one export, which errors name by ``path``.

    A damaged or hostile export can be small and seem endless, so :meth:`run_with_deadline` stops reading after a time
    limit.

    Attributes:
        source: Value of :attr:`~ddp_prof.trace.Trace.source`.
        kind: What it is, in words.
        columns: The columns of each table that holds rows; some exporters create all tables.
        bytes: What it holds on disk.
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
        """Return columns of a table with few rows, or its distinct rows; none if the table lacks a column.

        The rows are those with integers in ``integers`` and something in at least one of ``filled``, if there are any.
        ``order`` names columns to sort by, NULL first. Bytes of texts that are no UTF-8 are replaced.
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
        """Yield columns that the table has, as ``pyarrow`` arrays by name; each batch is valid only until the next one.

        Of rows other than ``only``, which the caller leaves out, a source may hold NULL: anything may stand there.

        With ``holds`` there is also :data:`HOLDS` of these columns, and with ``text`` that column, as text; no text
        there may be NULL or an empty one.
        """

    def text_batches(self, table: str, text: str, only: Only) -> Iterator[tuple[Ints, list[bytes]]]:
        """Yield the texts of the rows in ``only``, in batches: numbers of distinct texts, and these.

        The distinct ones are in the order in which they first occur. Of no text the number is ``UNKNOWN``, or that of
        an empty one.
        """
        return number_texts(self.record_batches(table, only[:1], text=text, only=only), text, only)

    def stop(self) -> None:
        """Let threads that read end; nothing can be read from now on."""
        self._is_stopped = True

    def run_with_deadline(self, read: Callable[[], Read]) -> Read:
        """Call a function that reads this export; raise TraceError if it takes too long for its size.

        Processor time counts, too: on a busy machine or a slow disk, a good file may take longer than the limit. The
        function runs in a thread of its own, because neither signals nor timers interrupt SQLite.
        """
        limit_s = left_s = LEAST_S + self.bytes / BYTES_PER_SECOND
        begun_s, begun_cpu_s = monotonic(), process_time()
        future = self.start(read)
        try:
            while left_s > 0 and not future.done():
                wait([future], left_s)
                left_s = limit_s - min(monotonic() - begun_s, process_time() - begun_cpu_s)
            return future.result(0)
        except BaseException as error:
            self.stop()
            if future.done() or not isinstance(error, FutureTimeoutError):
                raise
            reason = f"reading it takes more than {limit_s:.0f} s, which no export of its size does"
            raise TraceError(self.path, reason, HINT) from None

    def start(self, read: Callable[..., Read], *arguments: object) -> Future[Read]:
        """Call a function in a thread of its own, which does not delay the end of the program."""
        future = Future[Read]()

        def call() -> None:
            try:
                future.set_result(read(*arguments))
            except BaseException as error:  # raised again by future.result()
                future.set_exception(error)

        Thread(target=call, daemon=True).start()
        return future

    def has_columns(self, table: str, *columns: str) -> bool:
        """Whether the table holds rows and has all these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def require(self, table: str, *columns: str) -> None:
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
        """Yield the same in batches of rows, with :data:`HOLDS` of columns; each is valid only until the next one."""
        present = [column for column in columns if self.has_columns(table, column)]
        for batch in self.integer_batches(table, present, holds, only) if present else ():
            absent = constant_column(UNKNOWN, len(batch[present[0]]))
            yield batch | {name: absent for name in columns if name not in present}

    def integer_batches(
        self, table: str, columns: Sequence[str], holds: Sequence[str], only: Only | None
    ) -> Iterator[dict[str, Ints]]:
        """Yield the same of columns that the table has."""
        for batch in self.record_batches(table, columns, holds=holds, only=only):
            yield self.integers_of(batch, columns, holds)

    def integers_of(self, batch: Mapping[str, Any], columns: Sequence[str], holds: Sequence[str]) -> dict[str, Ints]:
        found = {name: self._integers(name, batch[name]) for name in columns}
        return found | ({HOLDS: integer_array(batch[HOLDS])} if holds else {})

    def _integers(self, name: str, column: Any) -> Ints:
        try:
            return integer_array(column)
        except TypeError as error:
            raise self.not_integer_error(name) from error

    def not_integer_error(self, column: str) -> TraceError:
        return TraceError(self.path, f"column {column} holds something that is no integer", HINT)

    def check_not_stopped(self) -> None:
        if self._is_stopped:
            raise TraceError(self.path, "reading it was stopped", HINT)


def constant_column(value: int, rows: int) -> Ints:
    """Return a read-only column of one value, which takes no memory."""
    return np.broadcast_to(np.int64(value), rows)


def integer_array(column: Any) -> Ints:
    """Convert a ``pyarrow`` array of integers to int64, NULL to ``UNKNOWN``; raise TypeError for other types.

    This reads Arrow's buffers (validity bits, values) itself: pyarrow's own conversions import pandas, which takes
    longer than reading a million rows.
    """
    import pyarrow

    if not pyarrow.types.is_integer(column.type):
        raise TypeError(f"{column.type} is no integer")
    validity, values = column.buffers()
    rows = slice(column.offset, column.offset + len(column))
    sign = "i" if column.type.bit_width == 64 or pyarrow.types.is_signed_integer(column.type) else "u"
    array: Ints = np.frombuffer(values, f"{sign}{column.type.bit_width // 8}")[rows].astype(np.int64, copy=False)
    if not column.null_count:
        return array
    is_valid = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[rows].view(np.bool_)
    return np.where(is_valid, array, UNKNOWN)


def number_texts(batches: Iterable[Mapping[str, Any]], text: str, only: Only) -> Iterator[tuple[Ints, list[bytes]]]:
    """Yield the texts in Arrow arrays as :meth:`ExportTables.text_batches` does."""
    import pyarrow

    # Not pyarrow.compute: importing it takes longer than all of this.
    from pyarrow._compute import call_function

    column, values = only
    for batch in batches:
        rows = np.isin(integer_array(batch[column]), values)
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
    """Return each column of all batches; it takes no memory if all its rows have one value."""
    gathered = GatheredColumns(columns)
    for batch in batches:
        gathered.add(batch)
    return gathered.columns()


class GatheredColumns:
    """Columns that grow batch by batch; one whose rows all have one value takes no memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self._rows = 0
        self._constant: dict[str, int] = {}
        self._grown = {name: GrowingColumn() for name in names}

    def add(self, batch: Mapping[str, Ints]) -> None:
        """Add rows; the batch may hold other columns, too."""
        rows = 0
        for name, grown in self._grown.items():
            values = batch[name]
            rows = len(values)
            if not rows:
                continue
            if not grown.rows:
                value = int(values[0])
                if self._constant.get(name, value) == value and _is_constant(values):
                    self._constant[name] = value
                    continue
                if self._rows:
                    grown.add(np.full(self._rows, self._constant[name], np.int64))
            grown.add(values)
        self._rows += rows

    def columns(self) -> dict[str, Ints]:
        return {
            name: grown.values() if grown.rows or not self._rows else constant_column(self._constant[name], self._rows)
            for name, grown in self._grown.items()
        }


def _is_constant(values: Ints) -> bool:
    return not values.strides[0] or bool(np.all(values == values[0]))
