"""Integer columns out of a SQLite file: read-only, in C, without a Python object a row."""

from __future__ import annotations

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
_BATCH_ROWS = 1 << 24
"""All rows in one batch, as a rule: a column is then used where it lies, without copying it together."""


@contextmanager
def open_sqlite(path: Path) -> Iterator[SqliteFile]:
    """Open a database so that neither it nor the folder it lies in is changed.

    'immutable' takes no lock and leaves no side file, but ignores a journal or log beside the file, whose content
    belongs to the database. Where there is one, both are copied, put together, and the copy is read.
    """
    real = path.resolve()
    journals = [real.with_name(real.name + suffix) for suffix in ("-wal", "-journal")]
    journals = [journal for journal in journals if journal.is_file() and journal.stat().st_size]
    if not journals:
        yield SqliteFile(path, _immutable(real))
        return
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        for file in (real, *journals):
            shutil.copyfile(file, Path(folder) / file.name)
        copy = Path(folder) / real.name
        with suppress(sqlite3.Error), closing(sqlite3.connect(copy)) as database:  # what is damaged is told below
            database.execute("PRAGMA journal_mode=DELETE")
        yield SqliteFile(path, _immutable(copy))


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
        tables = [str(name) for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled = [name for name in tables if self.rows(f"SELECT 1 FROM {_quoted(name)} LIMIT 1")]
        return {name: tuple(row[1] for row in self.rows(f"PRAGMA table_info({_quoted(name)})")) for name in filled}

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table holds rows and has all these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def require(self, table: str, *columns: str) -> None:
        """Refuse a table with rows that lacks one of these columns."""
        for column in columns:
            if table in self.columns and column not in self.columns[table]:
                raise TraceError(self.path, f"{table} has no column {column}", _WAY_OUT)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query that returns few; what is no UTF-8 in texts is replaced."""
        try:
            with closing(sqlite3.connect(self.uri, uri=True)) as database:
                database.text_factory = lambda text: text.decode(errors="replace")
                return database.execute(query).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is no text
            raise TraceError(self.path, f"not a readable SQLite database ({error})", _WAY_OUT) from error

    def selection(self, table: str, columns: Sequence[str], **constants: int) -> str:
        """A query for some columns of a table, and constants beside them; columns that it lacks are ``UNKNOWN``.

        Empty where the table is absent: exporters leave out what was not recorded.
        """
        if table not in self.columns:
            return ""
        parts = [_quoted(item) if self.has(table, item) else f"{UNKNOWN} AS {_quoted(item)}" for item in columns]
        parts += [f"{value} AS {_quoted(name)}" for name, value in constants.items()]
        return f"SELECT {', '.join(parts)} FROM {_quoted(table)}"

    def integers(self, names: Sequence[str], *selections: str) -> dict[str, Ints]:
        """The columns of all selections, one after the other, as int64 and NULL as ``UNKNOWN``.

        Args:
            names: What the columns of each selection are called, in their order.
            selections: Made by :meth:`selection`; SQLite puts their rows together.
        """
        queries = [item for item in selections if item]
        if not queries:
            return {name: np.empty(0, np.int64) for name in names}
        found = self.query(" UNION ALL ".join(queries))
        columns = {}
        for name in names:
            columns[name] = self.integer_column(found, name)
            found = found.drop_columns([name])  # where it was copied, the original can go
        return columns

    def integer_column(self, found: Any, name: str) -> Ints:
        """A column of a query's result as int64, NULL as ``UNKNOWN``."""
        try:
            return integer_array(found.column(name))
        except TypeError as error:
            raise TraceError(self.path, f"column {name} holds what is no integer", _WAY_OUT) from error

    def query(self, query: str) -> Any:
        """The result of a query as a ``pyarrow.Table``; runs outside Python's global lock."""
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
                return pyarrow.RecordBatchReader.from_stream(stream).read_all()
        except (Error, pyarrow.ArrowException) as error:
            reason = str(error).strip().splitlines()[0]
            raise TraceError(self.path, f"cannot be read ({reason})", _WAY_OUT) from error


def integer_array(column: Any) -> Ints:
    """A ``pyarrow`` column of integers as int64, NULL as ``UNKNOWN``.

    Reads Arrow's buffers (validity bits, values) itself: pyarrow's own conversions import pandas, which takes longer
    than reading a million rows.

    Raises:
        TypeError: The column holds something else.
    """
    import pyarrow

    if not pyarrow.types.is_integer(column.type):
        raise TypeError(f"{column.type} is no integer")
    chunks = [_chunk_array(chunk) for chunk in column.chunks]
    if len(chunks) == 1:
        return chunks[0]
    return np.concatenate(chunks) if chunks else np.empty(0, np.int64)


def _chunk_array(chunk: Any) -> Ints:
    validity, values = chunk.buffers()
    rows = slice(chunk.offset, chunk.offset + len(chunk))
    array: Ints = np.frombuffer(values, f"i{chunk.type.bit_width // 8}")[rows].astype(np.int64, copy=False)
    if not chunk.null_count:
        return array
    is_valid = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[rows].view(np.bool_)
    return np.where(is_valid, array, UNKNOWN)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
