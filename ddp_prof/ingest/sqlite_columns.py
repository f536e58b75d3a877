"""Integer columns out of a SQLite file: read-only, in C, without a Python object a row."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.trace import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddp_prof.trace import Ints

_BATCH_ROWS = 1 << 24
"""All rows in one batch, as a rule: a column is then used where it lies, without copying it together."""


class SqliteFile:
    """A SQLite file that is only ever read.

    Args:
        path: The file; it must exist.

    Raises:
        TraceError: The file is no database, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # 'immutable' takes no lock and leaves no side file, but would ignore a journal that lies beside the file.
        has_journal = any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal"))
        self.uri = f"file:{quote(str(path.absolute()))}?mode=ro" + ("" if has_journal else "&immutable=1")
        self.columns = self._schema()

    def _schema(self) -> dict[str, tuple[str, ...]]:
        """Column names by table, of the tables that hold rows: an exporter may also create all tables empty."""
        tables = [str(name) for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled = [name for name in tables if self.rows(f"SELECT 1 FROM {_quoted(name)} LIMIT 1")]
        return {name: tuple(row[1] for row in self.rows(f"PRAGMA table_info({_quoted(name)})")) for name in filled}

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table holds rows and has all these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query that returns few."""
        try:
            with closing(sqlite3.connect(self.uri, uri=True)) as database:
                return database.execute(query).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise TraceError(
                self.path, f"not a readable SQLite database ({error})", "export the report again with nsys export"
            ) from error

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
        try:
            for name in names:
                columns[name] = integer_array(found.column(name))
                found = found.drop_columns([name])  # where it was copied, the original can go
        except TypeError as error:
            way_out = "export the report again with nsys export"
            raise TraceError(self.path, f"column {name} holds what is no integer", way_out) from error
        return columns

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
            raise TraceError(
                self.path, f"cannot be read ({reason})", "export the report again with nsys export"
            ) from error


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
