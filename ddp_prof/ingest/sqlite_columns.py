"""Integer columns out of a SQLite file: read-only, in C, without a Python object per row."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from ddp_prof.atomic_file import is_file
from ddp_prof.errors import TraceError
from ddp_prof.trace import UNKNOWN, Ints

Read = TypeVar("Read")

LEAST_S, BYTES_PER_SECOND = 20, 2_000_000
"""Time limit for reading a file: a constant plus its bytes at a fiftieth of the speed of a slow machine."""
LEAST_BYTES_PER_ROW = 6
"""Of SQLite's format: no table has more rows than the file has room for."""
MOST_BYTES_PER_VALUE = 1 << 26
_HINT = "export the report again with nsys export"
_TABLE = re.compile(r"""CREATE TABLE\s*(?:"((?:[^"]|"")*)"|'((?:[^']|'')*)'|`([^`]*)`|\[([^]]*)\]|([^\s("'`[]+))""")
"""How SQLite notes a table: it writes the first two words itself, whatever the statement was."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_BATCH_ROWS = 1 << 14
"""Rows per batch: few enough that each batch reuses the memory of the previous one."""
_LATE_MISMATCH = re.compile(r"Type mismatch in column (\d+): expected INT64")
"""ADBC's message for a value whose type differs from that of the first batch."""


@contextmanager
def open_sqlite(path: Path) -> Iterator[SqliteFile]:
    """Open a database so that neither it nor the folder it lies in is changed.

    'immutable' takes no lock and leaves no side file, but ignores a journal or log beside the file, whose content
    belongs to the database. Where there is one, both are copied, put together, and the copy is read. Refused is the
    journal of a transaction over several databases: it names a file, anywhere, which SQLite then deletes.
    """
    real = path.resolve()
    journals = [real.with_name(real.name + suffix) for suffix in ("-wal", "-journal")]
    journals = [journal for journal in journals if is_file(journal) and journal.stat().st_size]
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") if journals else nullcontext() as folder:
        if folder:
            require_disk_space(path, Path(folder), sum(file.stat().st_size for file in (real, *journals)))
            for source in (real, *journals):
                shutil.copyfile(source, Path(folder) / source.name)
            if any(_has_super_journal(Path(folder) / journal.name) for journal in journals):
                reason = "the journal beside it belongs to a transaction over several databases, which nsys never makes"
                raise TraceError(path, reason, f"delete {journals[-1].name} if it is not yours, or {_HINT}")
            real = Path(folder) / real.name
        file = SqliteFile(path, real)
        if folder:
            file.run_with_deadline(file.apply_journal)
        file.run_with_deadline(file.read_schema)
        yield file


def _has_super_journal(journal: Path) -> bool:
    """Whether it ends as journals do that name one: with the same eight bytes as all begin."""
    with journal.open("rb") as file:
        file.seek(-min(8, journal.stat().st_size), os.SEEK_END)
        return file.read() == _JOURNAL_MAGIC


def require_disk_space(path: Path, folder: Path, needed: int) -> None:
    """Raise TraceError where to read ``path`` would fill the disk of ``folder``, by about so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"reading it takes about {needed / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB are free"
        raise TraceError(path, reason, "make room there, or set TMPDIR where it is a temporary folder")


class SqliteFile:
    """The tables of a SQLite file; made by :func:`open_sqlite`.

    A small file may read as if it were endless: pages of a tree may have one child, rows may share their text, and a
    view may stand under the name of a table. So only what SQLite noted as a table is one, no query returns more rows
    or text than the file has bytes, and :meth:`run_with_deadline` ends what takes too long.

    Attributes:
        path: The file that errors name.
        columns: Column names by table, of the tables that hold rows: an exporter may also create all tables empty.
        most_rows: So many rows of a table it has room for.
    """

    def __init__(self, path: Path, real: Path) -> None:
        self.path = path
        self.uri = f"file:{quote(str(real))}?mode=ro&immutable=1"
        self.columns: dict[str, tuple[str, ...]] = {}
        self.bytes = real.stat().st_size
        self.most_rows = self.bytes // LEAST_BYTES_PER_ROW
        self._real = real
        self._open: set[sqlite3.Connection] = set()
        self._is_stopped = False

    def read_schema(self) -> None:
        """Find the tables; raises TraceError where the file is no database, or is damaged."""
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND typeof(name) = 'text'"
        with self.connect(self.uri) as database:
            names = [name for name, made_by in self._fetch(database, query) if _name_of_table(made_by) == name]
            filled = [name for name in names if self._fetch(database, f"SELECT 1 FROM {quote_name(name)} LIMIT 1")]
            columns = {name: self._fetch(database, f"PRAGMA table_info({quote_name(name)})") for name in filled}
        self.columns = {name: tuple(row[1] for row in rows) for name, rows in columns.items()}

    def apply_journal(self) -> None:
        """Let SQLite apply the journal or log beside the file; damage is reported later."""
        with suppress(sqlite3.Error), self.connect(str(self._real)) as database:
            database.execute("PRAGMA journal_mode=DELETE")

    def run_with_deadline(self, read: Callable[[], Read]) -> Read:
        """Call a function that reads this file; that it takes longer than any file of its size is a TraceError.

        It runs in a thread of its own: SQLite heeds neither signals nor a clock.
        """
        limit_s = LEAST_S + self.bytes / BYTES_PER_SECOND
        future = self.start(read)
        try:
            return future.result(limit_s)
        except BaseException as error:
            self._is_stopped = True
            for database in tuple(self._open):
                database.interrupt()
            if future.done() or not isinstance(error, FutureTimeoutError):
                raise
            reason = f"reading it takes more than {limit_s:.0f} s, which no export of its size does"
            raise TraceError(self.path, reason, _HINT) from None

    def start(self, read: Callable[..., Read], *arguments: object) -> Future[Read]:
        """Begin to read side by side with others. Nobody waits for the thread when the program ends."""
        future = Future[Read]()

        def fulfil() -> None:
            try:
                future.set_result(read(*arguments))
            except BaseException as error:  # who waits for the result gets it
                future.set_exception(error)

        Thread(target=fulfil, daemon=True).start()
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
        """All rows of a query that returns few; what is no UTF-8 in texts is replaced."""
        with self.connect(self.uri) as database:
            return self._fetch(database, query)

    def _fetch(self, database: sqlite3.Connection, query: str) -> list[tuple[Any, ...]]:
        found, held = [], 0
        for row in database.execute(query):
            held += LEAST_BYTES_PER_ROW + sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if held > self.bytes:
                raise self._endless_error()
            found.append(row)
        return found

    def bounded_table(self, table: str) -> str:
        """SQL for a table with at most as many rows as the file has room for."""
        return f"(SELECT * FROM {quote_name(table)} NOT INDEXED LIMIT {self.most_rows + 1})"

    def _endless_error(self) -> TraceError:
        return TraceError(self.path, "it holds more rows or text than it has room for: pages of it are shared", _HINT)

    @contextmanager
    def connect(self, uri: str) -> Iterator[sqlite3.Connection]:
        """A connection that :meth:`run_with_deadline` interrupts; SQLite's errors name the file."""
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
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is no text
            raise TraceError(self.path, f"not a readable SQLite database ({error})", _HINT) from error

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise TraceError(self.path, "reading it was stopped", _HINT)

    def read_integers(self, table: str, columns: Sequence[str]) -> dict[str, Ints]:
        """Columns of a table as int64; what is NULL or no column of it is ``UNKNOWN``.

        Without rows where the table is absent: exporters leave out what was not recorded.
        """
        grown = {column: GrowingColumn() for column in columns}
        for batch in self.batches(table, columns):
            for column, values in batch.items():
                grown[column].add(values)
        return {column: values.whole() for column, values in grown.items()}

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Ints]]:
        """The same, some rows at a time; each batch counts until the next one only."""
        present = [column for column in columns if self.has_columns(table, column)]
        for batch in self.query(", ".join(map(quote_name, present)), table) if present else ():
            absent = constant_column(UNKNOWN, batch.num_rows)
            yield {name: self.batch_integers(batch, name) if name in present else absent for name in columns}

    def batch_integers(self, batch: Any, name: str) -> Ints:
        """A column of a batch of rows as int64, NULL as ``UNKNOWN``."""
        try:
            return integer_array(batch.column(name))
        except TypeError as error:
            raise self._not_integer_error(name) from error

    def _not_integer_error(self, column: str) -> TraceError:
        return TraceError(self.path, f"column {column} holds something that is no integer", _HINT)

    def query(self, wanted: str, table: str, where: str | None = None) -> Iterator[Any]:
        """Rows of a table as batches, ``pyarrow.RecordBatch``; read outside Python's global lock.

        What is NULL throughout the first batch is taken for integers.
        """
        # Of an endless table no row might meet the condition.
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
                # Not by an index: what is counted here is the rows of the table.
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
    """SQL condition that all these columns hold integers; SQLite allows any type in any column."""
    return " AND ".join(f"typeof({column}) = 'integer'" for column in columns)


def constant_column(value: int, rows: int) -> Ints:
    """A column of one value, which takes no memory; not to be written to."""
    return np.broadcast_to(np.int64(value), rows)


def is_constant(column: Ints) -> bool:
    return not column.strides[0]


def integer_array(column: Any) -> Ints:
    """A ``pyarrow`` array of integers as int64, NULL as ``UNKNOWN``; TypeError for an array of something else.

    Reads Arrow's buffers (validity bits, values) itself: pyarrow's own conversions import pandas, which takes longer
    than reading a million rows.
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


class GrowingColumn:
    """A column of int64 that grows by some rows at a time; while all are of one value it takes no memory."""

    def __init__(self) -> None:
        self._rows = 0
        self._values = constant_column(UNKNOWN, 0)
        """With room for more rows than there are, unless of one value."""

    def add(self, values: Ints) -> None:
        before, self._rows = self._rows, self._rows + len(values)
        if is_constant(self._values) and len(values):
            only = self._values[0] if before else values[0]
            if np.all(values == only):
                self._values = constant_column(only, self._rows)
                return
        if is_constant(self._values) or self._rows > len(self._values):
            grown = np.empty(4 * self._rows, np.int64)  # what is never written to takes no memory
            grown[:before] = self._values[:before]
            self._values = grown
        self._values[before : self._rows] = values

    def whole(self) -> Ints:
        """All rows; not to be written to."""
        return self._values[: self._rows]


def _name_of_table(made_by: object) -> str | None:
    """The name in a statement that makes a table; ``None`` of one that makes something else, such as a virtual one."""
    found = _TABLE.match(made_by) if isinstance(made_by, str) else None
    if not found:
        return None
    quote_sign = found[0].rstrip()[-1]
    name = next(name for name in found.groups() if name is not None)
    return name.replace(2 * quote_sign, quote_sign)


def quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
