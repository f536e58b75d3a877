"""Integer columns out of a SQLite file: read-only, in C, without a Python object a row."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.trace import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddp_prof.trace import Ints

_WAY_OUT = "export the report again with nsys export"
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_BATCH_ROWS = 1 << 14
"""So few rows at a time that each batch lies in the memory of the one before: new memory costs more than the copy."""
_LATE_MISMATCH = re.compile(r"Type mismatch in column (\d+): expected INT64")
"""What is said of a value that does not fit the type of those in the first batch."""


@contextmanager
def open_sqlite(path: Path) -> Iterator[SqliteFile]:
    """Open a database so that neither it nor the folder it lies in is changed.

    'immutable' takes no lock and leaves no side file, but ignores a journal or log beside the file, whose content
    belongs to the database. Where there is one, both are copied, put together, and the copy is read.

    Raises:
        TraceError: There is no room for the copy; or the journal is one of a transaction over several databases: it
            names a file, anywhere, which SQLite deletes when it puts the copy together.
    """
    real = path.resolve()
    journals = [real.with_name(real.name + suffix) for suffix in ("-wal", "-journal")]
    journals = [journal for journal in journals if journal.is_file() and journal.stat().st_size]
    if not journals:
        yield SqliteFile(path, _immutable(real))
        return
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        require_room(path, Path(folder), sum(file.stat().st_size for file in (real, *journals)))
        for file in (real, *journals):
            shutil.copyfile(file, Path(folder) / file.name)
        copy = Path(folder) / real.name
        if any(_names_a_file(Path(folder) / journal.name) for journal in journals):
            reason = "the journal beside it belongs to a transaction over several databases, which nsys never makes"
            raise TraceError(path, reason, f"delete {journals[-1].name} if it is not yours, or {_WAY_OUT}")
        with suppress(sqlite3.Error), closing(sqlite3.connect(copy)) as database:  # what is damaged is told below
            database.execute("PRAGMA journal_mode=DELETE")
        yield SqliteFile(path, _immutable(copy))


def _names_a_file(journal: Path) -> bool:
    """Whether it ends as journals do that name one: with the same eight bytes as all begin."""
    with journal.open("rb") as file:
        file.seek(-min(8, journal.stat().st_size), os.SEEK_END)
        return file.read() == _JOURNAL_MAGIC


def require_room(path: Path, folder: Path, needed: int) -> None:
    """Refuse to begin what would fill the disk.

    Args:
        path: The file that is to be read.
        folder: Where something is to be written for that.
        needed: About how many bytes.

    Raises:
        TraceError: There are fewer.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"reading it takes about {needed / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB are free"
        raise TraceError(path, reason, "make room there, or set TMPDIR where it is a temporary folder")


def _immutable(path: Path) -> str:
    return f"file:{quote(str(path))}?mode=ro&immutable=1"


class SqliteFile:
    """The tables of a SQLite file; made by :func:`open_sqlite`.

    Args:
        path: The file that errors name.
        uri: What is opened.

    Raises:
        TraceError: The file is no database, or is damaged.
    """

    def __init__(self, path: Path, uri: str) -> None:
        self.path = path
        self.uri = uri
        self.columns = self._schema()

    def _schema(self) -> dict[str, tuple[str, ...]]:
        """Column names by table, of the tables that hold rows: an exporter may also create all tables empty."""
        with self._connected() as database:
            query = "SELECT name FROM sqlite_master WHERE type = 'table' AND typeof(name) = 'text'"
            tables = [name for (name,) in database.execute(query)]
            filled = [name for name in tables if database.execute(f"SELECT 1 FROM {_quoted(name)} LIMIT 1").fetchone()]
            columns = {name: database.execute(f"PRAGMA table_info({_quoted(name)})").fetchall() for name in filled}
        return {name: tuple(row[1] for row in rows) for name, rows in columns.items()}

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table holds rows and has all these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def or_null(self, table: str, *columns: str) -> tuple[str, ...]:
        """The columns in a query, NULL for those that the table lacks."""
        return tuple(column if self.has(table, column) else "NULL" for column in columns)

    def require(self, table: str, *columns: str) -> None:
        """Refuse a table with rows that lacks one of these columns."""
        for column in columns:
            if table in self.columns and column not in self.columns[table]:
                raise TraceError(self.path, f"{table} has no column {column}", _WAY_OUT)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query that returns few; what is no UTF-8 in texts is replaced."""
        with self._connected() as database:
            return database.execute(query).fetchall()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.uri, uri=True)) as database:
                database.text_factory = lambda text: text.decode(errors="replace")
                yield database
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is no text
            raise TraceError(self.path, f"not a readable SQLite database ({error})", _WAY_OUT) from error

    def integers(self, table: str, columns: Sequence[str]) -> dict[str, Ints]:
        """Columns of a table as int64, NULL as ``UNKNOWN``, and so are columns that it lacks.

        Without rows where the table is absent: exporters leave out what was not recorded.
        """
        grown = {column: GrowingColumn() for column in columns}
        for batch in self.batches(table, columns):
            for column, values in batch.items():
                grown[column].add(values)
        return {column: values.whole() for column, values in grown.items()}

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Ints]]:
        """The same, some rows at a time; each batch counts until the next one only."""
        present = [column for column in columns if self.has(table, column)]
        query = f"SELECT {', '.join(map(_quoted, present))} FROM {_quoted(table)}"
        for batch in self.query(query) if present else ():
            absent = constant(UNKNOWN, batch.num_rows)
            yield {name: self.integers_of(batch, name) if name in present else absent for name in columns}

    def integers_of(self, batch: Any, name: str) -> Ints:
        """A column of a batch of rows as int64, NULL as ``UNKNOWN``."""
        try:
            return integer_array(batch.column(name))
        except TypeError as error:
            raise self._no_integer(name) from error

    def _no_integer(self, column: str) -> TraceError:
        return TraceError(self.path, f"column {column} holds something that is no integer", _WAY_OUT)

    def query(self, query: str) -> Iterator[Any]:
        """The result of a query as batches of rows, ``pyarrow.RecordBatch``; read outside Python's global lock.

        What is NULL throughout the first batch is taken for integers.
        """
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
                statement.set_sql_query(query)
                stream, _ = statement.execute_query()
                with pyarrow.RecordBatchReader.from_stream(stream) as reader:
                    names = reader.schema.names
                    yield from reader
        except (Error, pyarrow.ArrowException, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            if late := _LATE_MISMATCH.search(reason):
                raise self._no_integer(names[int(late[1])]) from error
            raise TraceError(self.path, f"cannot be read ({reason})", _WAY_OUT) from error


def are_integers(*columns: str) -> str:
    """A condition that holds where SQLite, which lets any column hold anything, has integers."""
    return " AND ".join(f"typeof({column}) = 'integer'" for column in columns)


def constant(value: int, rows: int) -> Ints:
    """A column of one value, which takes no memory; not to be written to."""
    return np.broadcast_to(np.int64(value), rows)


def is_constant(column: Ints) -> bool:
    """Whether it is such a column."""
    return not column.strides[0]


def integer_array(column: Any) -> Ints:
    """A ``pyarrow`` array of integers as int64, NULL as ``UNKNOWN``.

    Reads Arrow's buffers (validity bits, values) itself: pyarrow's own conversions import pandas, which takes longer
    than reading a million rows.

    Raises:
        TypeError: The column holds something else.
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
        self._values = constant(UNKNOWN, 0)
        """With room for more rows than there are, unless of one value."""

    def add(self, values: Ints) -> None:
        """Append rows."""
        before, self._rows = self._rows, self._rows + len(values)
        if is_constant(self._values) and len(values):
            only = self._values[0] if before else values[0]
            if np.all(values == only):
                self._values = constant(only, self._rows)
                return
        if is_constant(self._values) or self._rows > len(self._values):
            grown = np.empty(4 * self._rows, np.int64)  # what is never written to takes no memory
            grown[:before] = self._values[:before]
            self._values = grown
        self._values[before : self._rows] = values

    def whole(self) -> Ints:
        """All rows; not to be written to."""
        return self._values[: self._rows]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
