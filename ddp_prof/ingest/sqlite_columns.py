"""Reads integer columns from a SQLite file: read-only, in C, without a Python object per row."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, process_time
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from ddp_prof.atomic_file import is_file
from ddp_prof.bounded_file import copy_data, held_bytes
from ddp_prof.errors import TraceError
from ddp_prof.ingest.growing_column import GrowingColumn
from ddp_prof.table import UNKNOWN, Ints

Read = TypeVar("Read")

LEAST_S, BYTES_PER_SECOND = 20, 2_000_000
"""Time limit for reading a file: a constant plus its bytes at a fiftieth of the speed of a slow machine."""
LEAST_BYTES_PER_ROW = 6
"""Smallest row in SQLite's format, which limits how many rows a file has room for."""
MOST_BYTES_PER_VALUE = 1 << 26
_HINT = "export the report again with nsys export"
_TABLE = re.compile(r"""CREATE TABLE\s*(?:"((?:[^"]|"")*)"|'((?:[^']|'')*)'|`([^`]*)`|\[([^]]*)\]|([^\s("'`[]+))""")
"""How the schema describes a table: SQLite itself writes the first two words."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_LOG_MAGICS = (bytes.fromhex("377f0682"), bytes.fromhex("377f0683"))
_LOG_HEADER, _FRAME_HEADER = 32, 24
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_BATCH_ROWS = 1 << 14
"""Rows per batch: few enough that each batch reuses the memory of the previous one."""
_LATE_MISMATCH = re.compile(r"Type mismatch in column (\d+): expected INT64")
"""ADBC's message for a value whose type differs from that of the first batch."""


@contextmanager
def open_sqlite(path: Path) -> Iterator[SqliteFile]:
    """Open a database without changing it or its folder.

    With 'immutable', SQLite takes no lock and leaves no other file, but ignores a journal or log beside the database,
    whose content belongs to it. If there is one, both are copied, the journal is applied, and the copy is read. The
    journal of a transaction over several databases is refused: it names another file, which SQLite would delete.
    """
    real = path.resolve()
    journals = [real.with_name(real.name + suffix) for suffix in ("-wal", "-journal")]
    journals = [journal for journal in journals if is_file(journal) and _used_bytes(journal)]
    more = 0
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") if journals else nullcontext() as folder:
        if folder:
            used = {real: None, **{journal: _used_bytes(journal) for journal in journals}}
            more = sum(min(held_bytes(journal), _used_bytes(journal)) for journal in journals)
            require_disk_space(path, Path(folder), held_bytes(real) + more)
            for source, most in used.items():
                copy_data(source, Path(folder) / source.name, most)
            if any(_has_super_journal(Path(folder) / journal.name) for journal in journals):
                reason = "the journal beside it belongs to a transaction over several databases, which nsys never makes"
                raise TraceError(path, reason, f"delete {journals[-1].name} if it is not yours, or {_HINT}")
            real = Path(folder) / real.name
        file = SqliteFile(path, real, more)
        if folder:
            file.run_with_deadline(file.apply_journal)
        file.run_with_deadline(file.read_schema)
        yield file


def _used_bytes(journal: Path) -> int:
    """Return how many bytes of a journal or log SQLite would use: 0 if it ignores the file.

    A log is a header of 32 bytes and frames of 24 bytes and a page each; a frame counts as long as it repeats the salt
    of the header and numbers its page. What follows may be of any size, but is of an earlier use of the file, or holes.
    """
    with journal.open("rb") as file:
        if journal.name.endswith("-journal"):
            return file.seek(0, os.SEEK_END) if file.read(8) == _JOURNAL_MAGIC else 0
        header = file.read(_LOG_HEADER)
        page = int.from_bytes(header[8:12], "big")
        if header[:4] not in _LOG_MAGICS or page not in _PAGE_SIZES:
            return 0
        used = _LOG_HEADER
        while (frame := file.read(_FRAME_HEADER))[8:16] == header[16:24] and any(frame[:4]):
            used += _FRAME_HEADER + page
            file.seek(used)
        return min(used, file.seek(0, os.SEEK_END)) if used > _LOG_HEADER else 0


def _has_super_journal(journal: Path) -> bool:
    """Whether a journal names a super-journal: then it ends with the eight bytes with which every journal begins."""
    with journal.open("rb") as file:
        file.seek(-min(8, journal.stat().st_size), os.SEEK_END)
        return file.read() == _JOURNAL_MAGIC


def require_disk_space(path: Path, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"reading it takes about {needed / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB are free"
        raise TraceError(path, reason, "make room there, or set TMPDIR where it is a temporary folder")


class SqliteFile:
    """The tables of a SQLite file, which errors name by ``path``; made by :func:`open_sqlite`.

    A damaged or hostile file can be small and seem endless: pages may point to one child, rows may share their text, a
    view may have the name of a table, a sparse file may have any size. So views are ignored, no query returns more rows
    or text than the file holds bytes, and :meth:`run_with_deadline` stops reading after a time limit. ``columns`` holds
    tables with rows only, since some exporters create all tables. ``most_rows`` is the upper bound of a table's rows,
    from the bytes that the file holds; ``more_bytes`` are those of a journal that is to be applied.
    """

    def __init__(self, path: Path, real: Path, more_bytes: int = 0) -> None:
        self.path = path
        self.uri = sqlite_uri(real, "?mode=ro&immutable=1")
        self.columns: dict[str, tuple[str, ...]] = {}
        self.bytes = held_bytes(real) + more_bytes
        self.most_rows = self.bytes // LEAST_BYTES_PER_ROW
        self._real = real
        self._open: set[sqlite3.Connection] = set()
        self._is_stopped = False

    def read_schema(self) -> None:
        """Find the tables; raise TraceError if the file is no database, or is damaged."""
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND typeof(name) = 'text'"
        with self.connect(self.uri) as database:
            names = [name for name, statement in self._fetch(database, query) if _name_of_table(statement) == name]
            filled = [name for name in names if self._fetch(database, f"SELECT 1 FROM {quote_name(name)} LIMIT 1")]
            columns = {name: self._fetch(database, f"PRAGMA table_info({quote_name(name)})") for name in filled}
        self.columns = {name: tuple(row[1] for row in rows) for name, rows in columns.items()}

    def apply_journal(self) -> None:
        """Let SQLite apply the journal or log beside the file; reading reports damage later."""
        with suppress(sqlite3.Error), self.connect(sqlite_uri(self._real)) as database:
            database.execute("PRAGMA journal_mode=DELETE")

    def run_with_deadline(self, read: Callable[[], Read]) -> Read:
        """Call a function that reads this file; raise TraceError if it takes too long for the size of the file.

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
            self._is_stopped = True
            for database in tuple(self._open):
                database.interrupt()
            if future.done() or not isinstance(error, FutureTimeoutError):
                raise
            reason = f"reading it takes more than {limit_s:.0f} s, which no export of its size does"
            raise TraceError(self.path, reason, _HINT) from None

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

    def columns_or_null(self, table: str, *columns: str) -> tuple[str, ...]:
        return tuple(column if self.has_columns(table, column) else "NULL" for column in columns)

    def require(self, table: str, *columns: str) -> None:
        for column in columns:
            if table in self.columns and column not in self.columns[table]:
                raise TraceError(self.path, f"{table} has no column {column}", _HINT)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return all rows of a query that returns few; bytes of texts that are no UTF-8 are replaced."""
        with self.connect(self.uri) as database:
            return self._fetch(database, query)

    def few_rows(
        self, table: str, integers: Sequence[str], others: Sequence[str] = (), order: str = "NULL"
    ) -> list[tuple[Any, ...]]:
        """Return columns of a table with few rows: all rows with integers in some; none if the table lacks a column."""
        if not self.has_columns(table, *integers, *others):
            return []
        columns = ", ".join((*integers, *others))
        condition = f"WHERE {are_integers(*integers)}" if integers else ""
        return self.rows(f"SELECT {columns} FROM {self.bounded_table(table)} {condition} ORDER BY {order}")

    def _fetch(self, database: sqlite3.Connection, query: str) -> list[tuple[Any, ...]]:
        found, held = [], 0
        for row in database.execute(query):
            held += LEAST_BYTES_PER_ROW + sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if held > self.bytes:
                raise self._endless_error()
            found.append(row)
        return found

    def bounded_table(self, table: str) -> str:
        """Return SQL for a table that reads one row more than the file has room for, at most."""
        return f"(SELECT * FROM {quote_name(table)} NOT INDEXED LIMIT {self.most_rows + 1})"

    def _endless_error(self) -> TraceError:
        return TraceError(self.path, "it holds more rows or text than it has room for: pages of it are shared", _HINT)

    @contextmanager
    def connect(self, uri: str) -> Iterator[sqlite3.Connection]:
        """Open a connection that :meth:`run_with_deadline` can interrupt; errors of SQLite become TraceErrors."""
        try:
            with closing(sqlite3.connect(uri, uri=True)) as database:
                if sys.version_info >= (3, 11):
                    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES_PER_VALUE)
                database.text_factory = lambda text: text.decode(errors="replace")
                self._open.add(database)
                try:
                    self._check_not_stopped()
                    yield database
                finally:
                    self._open.discard(database)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if SQLite quotes bytes that are no text
            raise TraceError(self.path, f"not a readable SQLite database ({error})", _HINT) from error

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise TraceError(self.path, "reading it was stopped", _HINT)

    def read_integers(self, table: str, columns: Sequence[str]) -> dict[str, Ints]:
        """Return columns of a table as int64, with ``UNKNOWN`` for NULL and for columns that the table lacks.

        The columns of an absent table are empty: exporters leave out tables of events that were not recorded.
        """
        return gather_batches(columns, self.batches(table, columns))

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Ints]]:
        """Yield the same in batches of rows; a batch is valid only until the next one."""
        present = [column for column in columns if self.has_columns(table, column)]
        for batch in self.query(", ".join(map(quote_name, present)), table) if present else ():
            absent = constant_column(UNKNOWN, batch.num_rows)
            yield {name: self.batch_integers(batch, name) if name in present else absent for name in columns}

    def batch_integers(self, batch: Any, name: str) -> Ints:
        """Return a column of a batch of rows as int64, with ``UNKNOWN`` for NULL."""
        try:
            return integer_array(batch.column(name))
        except TypeError as error:
            raise self._not_integer_error(name) from error

    def _not_integer_error(self, column: str) -> TraceError:
        return TraceError(self.path, f"column {column} holds something that is no integer", _HINT)

    def query(self, wanted: str, table: str, where: str | None = None) -> Iterator[Any]:
        """Yield the rows of a table as batches, ``pyarrow.RecordBatch``, read outside Python's global lock.

        A column that is NULL throughout the first batch is taken for integers.
        """
        # An endless table may have no row that meets the condition, so count its rows first.
        if where and self.rows(f"SELECT 1 FROM {quote_name(table)} NOT INDEXED LIMIT 1 OFFSET {self.most_rows}"):
            raise self._endless_error()
        import adbc_driver_sqlite
        import pyarrow
        from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement, Error

        try:
            with (
                closing(AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=self.uri)) as database,
                closing(AdbcConnection(database)) as connection,
                closing(AdbcStatement(connection)) as statement,
            ):
                statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
                bound = f"WHERE {where}" if where else f"LIMIT {self.most_rows + 1}"
                # Without an index, because the limit applies to rows of the table itself.
                statement.set_sql_query(f"SELECT {wanted} FROM {quote_name(table)} NOT INDEXED {bound}")
                stream, _ = statement.execute_query()
                with pyarrow.RecordBatchReader.from_stream(stream) as reader:
                    names, rows_read = reader.schema.names, 0
                    for batch in reader:
                        self._check_not_stopped()
                        rows_read += batch.num_rows
                        if rows_read > self.most_rows:
                            raise self._endless_error()
                        yield batch
        except (Error, pyarrow.ArrowException, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            if late := _LATE_MISMATCH.search(reason):
                raise self._not_integer_error(names[int(late[1])]) from error
            raise TraceError(self.path, f"cannot be read ({reason})", _HINT) from error


def are_integers(*columns: str) -> str:
    """Return an SQL condition that all columns hold integers; SQLite allows any type in any column."""
    return " AND ".join(f"typeof({column}) = 'integer'" for column in columns)


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
    array: Ints = np.frombuffer(values, f"i{column.type.bit_width // 8}")[rows].astype(np.int64, copy=False)
    if not column.null_count:
        return array
    is_valid = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[rows].view(np.bool_)
    return np.where(is_valid, array, UNKNOWN)


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


def _name_of_table(statement: object) -> str | None:
    """Return the name in a CREATE TABLE statement; ``None`` for any other, such as that of a virtual table."""
    found = _TABLE.match(statement) if isinstance(statement, str) else None
    if not found:
        return None
    quote_sign = found[0].rstrip()[-1]
    name = next(name for name in found.groups() if name is not None)
    return name.replace(2 * quote_sign, quote_sign)


def sqlite_uri(path: Path, options: str = "") -> str:
    """Return the address of a database for SQLite and ADBC; its name may hold any bytes, such as ``?`` or Latin-1."""
    return f"file:{quote(os.fsencode(path))}{options}"


def quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
