"""Reads the tables of an export that is a SQLite file: read-only, and without a Python object for each row.

Large tables are read as columns: from the pages of the file if possible (:mod:`.sqlite_pages`), else by ADBC, SQLite's
driver for Arrow. Small tables are read by Python's ``sqlite3``.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from ddp_prof.atomic_file import is_file
from ddp_prof.bounded_file import copy_data, held_bytes
from ddp_prof.errors import TraceError, lacks_memory
from ddp_prof.ingest.export_tables import HINT, HOLDS, ExportTables, Only, number_texts
from ddp_prof.ingest.names import MOST_LETTERS
from ddp_prof.ingest.sqlite_pages import PageRows, TablePages, UnusualPagesError
from ddp_prof.table import Ints, is_in

LEAST_BYTES_PER_ROW = 6
"""Smallest row in SQLite's format, which limits how many rows a file has room for."""
MOST_BYTES_PER_VALUE = 1 << 26
"""SQLite refuses larger texts and blobs."""
_TABLE = re.compile(r"""CREATE TABLE\s*(?:"((?:[^"]|"")*)"|'((?:[^']|'')*)'|`([^`]*)`|\[([^]]*)\]|([^\s("'`[]+))""")
"""Start of a statement in the schema that describes a table: SQLite itself writes the first two words, then follows the
name, with any of SQLite's quotes or without."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""First bytes of a rollback journal (``-journal``)."""
_LOG_MAGICS = (bytes.fromhex("377f0682"), bytes.fromhex("377f0683"))
"""First bytes of a write-ahead log (``-wal``)."""
_LOG_HEADER, _FRAME_HEADER = 32, 24
"""Bytes of the header of a log, and of the header of each page in it."""
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_BATCH_ROWS = 1 << 14
"""Rows per batch: few enough that each batch reuses the memory of the previous one."""
_LATE_MISMATCH = re.compile(r"Type mismatch in column (\d+): expected INT64")
"""ADBC's message for a value whose type differs from that of the first batch."""


@contextmanager
def open_sqlite(path: Path) -> Iterator[SqliteFile]:
    """Open a database, without changing it or its folder, for the length of a ``with`` block.

    With 'immutable', SQLite takes no lock and leaves no other file, but ignores a journal or log beside the database,
    whose content belongs to it. If there is one, both files are copied to a temporary folder, the journal is applied,
    and the copy is read.

    Raises:
        TraceError: It is no readable database, or its journal is of a transaction over several databases: such a
            journal names another file, which SQLite would delete.
    """
    real = path.resolve()
    journals = [real.with_name(real.name + suffix) for suffix in ("-wal", "-journal")]
    journals = [journal for journal in journals if is_file(journal) and _used_bytes(journal)]
    more = 0
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") if journals else nullcontext() as folder:
        if folder:
            # Copy the database and its journals, of which only so many bytes are used; None: all bytes.
            used = {real: None, **{journal: _used_bytes(journal) for journal in journals}}
            more = sum(min(held_bytes(journal), _used_bytes(journal)) for journal in journals)
            require_disk_space(path, Path(folder), held_bytes(real) + more)
            for source, most in used.items():
                copy_data(source, Path(folder) / source.name, most)
            if any(_has_super_journal(Path(folder) / journal.name) for journal in journals):
                reason = "the journal beside it belongs to a transaction over several databases, which nsys never makes"
                raise TraceError(path, reason, f"move {journals[-1].name} away if no program uses it, or {HINT}")
            real = Path(folder) / real.name
        file = SqliteFile(path, real, more)
        if folder:
            file.run_with_deadline(file.apply_journal)
        file.run_with_deadline(file.read_schema)
        yield file


def _used_bytes(journal: Path) -> int:
    """Return how many bytes of a journal or log SQLite would use: 0 if it ignores the file.

    A log is a header of 32 bytes, and frames, each of which is a header of 24 bytes and a page. A frame is valid as
    long as it repeats the salt (random bytes) of the log's header and has a page number. What follows the last valid
    frame may be of any size, but is left from an earlier use of the file.
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
    """Return whether a journal names a super-journal, which belongs to a transaction over several databases.

    Such a journal ends with the eight bytes with which every journal begins.
    """
    with journal.open("rb") as file:
        file.seek(-min(8, journal.stat().st_size), os.SEEK_END)
        return file.read() == _JOURNAL_MAGIC


def require_disk_space(path: Path, folder: Path, needed: int) -> None:
    """Raise TraceError if fewer than ``needed`` bytes are free in ``folder``, which reading ``path`` takes there."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"reading it takes about {needed / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB are free"
        raise TraceError(path, reason, "make room there, or set TMPDIR to a folder with more room")


class SqliteFile(ExportTables):
    """The tables of a SQLite file; made by :func:`open_sqlite`.

    A damaged or hostile file can be small and seem endless: many pages may point to the same page, rows may share their
    text, a view may have the name of a table, a sparse file may have any size. So views are ignored, and a query that
    returns more rows or text than the file has room for raises a TraceError.

    Args:
        path: The export, which errors name.
        real: The file to read: the export itself or its copy.
        more_bytes: Bytes of a journal that will be applied to it.

    Attributes:
        uri: Address of the database for SQLite.
        most_rows: Upper bound of the rows of a table, from the size of the file.
    """

    source = "nsys-sqlite"
    kind = "a SQLite database"

    def __init__(self, path: Path, real: Path, more_bytes: int = 0) -> None:
        """Note the file; :meth:`read_schema` is to be called next. The class describes the parameters."""
        super().__init__(path, held_bytes(real) + more_bytes)
        self.uri = sqlite_uri(real, "?mode=ro&immutable=1")
        self.most_rows = self.bytes // LEAST_BYTES_PER_ROW
        self._real = real
        self._open: set[sqlite3.Connection] = set()  # connections that stop() interrupts
        self._pages: dict[str, _PlacedTable] = {}  # the tables whose pages can be read directly

    def read_schema(self) -> None:
        """Find the tables; raise TraceError if the file is no database, or is damaged."""
        query = (
            "SELECT name, sql, rootpage FROM sqlite_master "
            "WHERE type = 'table' AND rootpage > 0 AND typeof(name) = 'text'"
        )
        # Tables whose statement names them as SQLite writes it, with the number of their first page (root). Tables
        # without rows are left out.
        with self.connect(self.uri) as database:
            roots = {
                name: root
                for name, statement, root in self._fetch(database, query)
                if _name_of_table(statement) == name
            }
            filled = [name for name in roots if self._fetch(database, f"SELECT 1 FROM {quote_name(name)} LIMIT 1")]
            columns = {name: self._fetch(database, f"PRAGMA table_xinfo({quote_name(name)})") for name in filled}
        # Hidden columns are generated ones: a table that has some is read by SQLite only.
        for name, rows in columns.items():
            described = list(starmap(_Column, rows))
            self.columns[name] = tuple(one.name for one in described if not one.hidden)
            if not any(one.hidden for one in described):
                places = {one.name: one.position for one in described if one.is_as_stored}
                self._pages[name] = _PlacedTable(TablePages(self._real, roots[name]), places)

    def apply_journal(self) -> None:
        """Let SQLite apply the journal or log beside the file, which is a copy; damage is reported when it is read."""
        with suppress(sqlite3.Error), self.connect(sqlite_uri(self._real)) as database:
            database.execute("PRAGMA journal_mode=DELETE")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return all rows of a query that returns few rows; bytes of texts that are no UTF-8 are replaced."""
        with self.connect(self.uri) as database:
            return self._fetch(database, query)

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
        """Return rows of a small table, selected by one query; arguments and result as in :class:`ExportTables`."""
        if not self.has_columns(table, *integers, *others, *order, *filled):
            return []
        wanted = ", ".join(map(quote_name, (*integers, *others)))
        used = ", ".join(map(quote_name, dict.fromkeys((*integers, *others, *order, *filled))))
        conditions = [f"typeof({quote_name(name)}) = 'integer'" for name in integers]  # any column holds any type
        if filled:
            # The names come twice because coalesce needs two arguments at least.
            conditions.append(f"coalesce({', '.join(map(quote_name, (*filled, *filled)))}) IS NOT NULL")
        # At most one row more than the file has room for: then _fetch finds out.
        bounded = f"(SELECT {used} FROM {quote_name(table)} NOT INDEXED LIMIT {self.most_rows + 1})"
        select = "SELECT DISTINCT" if distinct else "SELECT"
        query = f"{select} {wanted} FROM {bounded} WHERE {' AND '.join(conditions) or 'TRUE'}"
        return self.rows(f"{query} ORDER BY {', '.join(map(quote_name, order)) or 'NULL'}")

    def _fetch(self, database: sqlite3.Connection, query: str) -> list[tuple[Any, ...]]:
        """Return all rows of a query; TraceError if they take more bytes than the file holds."""
        found, held = [], 0
        for row in database.execute(query):
            held += LEAST_BYTES_PER_ROW + sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if held > self.bytes:
                raise self._endless_error()
            found.append(row)
        return found

    def _endless_error(self) -> TraceError:
        return TraceError(self.path, "it holds more rows or text than it has room for: pages of it are shared", HINT)

    @contextmanager
    def connect(self, uri: str) -> Iterator[sqlite3.Connection]:
        """Open a connection for the length of a ``with`` block; :meth:`stop` can interrupt it.

        Errors of SQLite become TraceErrors.
        """
        try:
            with closing(sqlite3.connect(uri, uri=True)) as database:
                if sys.version_info >= (3, 11):
                    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES_PER_VALUE)
                database.text_factory = lambda text: text.decode(errors="replace")
                self._open.add(database)
                try:
                    self.check_not_stopped()
                    yield database
                finally:
                    self._open.discard(database)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if SQLite quotes bytes that are no text
            raise TraceError(self.path, f"not a readable SQLite database ({error})", HINT) from error

    def stop(self) -> None:
        super().stop()
        for database in tuple(self._open):
            database.interrupt()

    def integer_batches(
        self, table: str, columns: Sequence[str], holds: Sequence[str], only: Only | None
    ) -> Iterator[dict[str, Ints]]:
        """Yield columns of integers in batches; arguments as of :meth:`ExportTables.batches`."""
        present = {name: 1 << bit for bit, name in enumerate(holds) if self.has_columns(table, name)}
        # Decode the pages of the table; if some are unusual, SQLite reads the rows after the first ``after`` ones.
        after = 0
        with suppress(UnusualPagesError, OSError):
            for rows, place in self._page_rows(table, (*columns, *present, *(only[:1] if only else ()))):
                wanted = is_in(rows.integers(place[only[0]]), only[1]) if only else None
                found = {name: rows.integers(place[name], wanted) for name in columns}
                if holds:
                    found[HOLDS] = _held(rows, {place[name]: bit for name, bit in present.items()})
                yield found
                after += len(rows)
            return
        for batch in self.record_batches(table, columns, holds=holds, only=only, after=after):
            yield self.integers_of(batch, columns, holds)

    def text_batches(self, table: str, text: str, only: Only) -> Iterator[tuple[Ints, list[bytes]]]:
        """Yield a column of texts in batches; arguments and result as in :class:`ExportTables`."""
        column, values = only
        after = 0  # rows that were decoded from pages; SQLite reads the rows after these
        with suppress(UnusualPagesError, OSError):
            for rows, place in self._page_rows(table, (column, text)):
                wanted = np.flatnonzero(is_in(rows.integers(place[column]), values))
                yield rows.texts(place[text], wanted)
                after += len(rows)
            return
        yield from number_texts(self.record_batches(table, (column,), text=text, only=only, after=after), text, only)

    def _page_rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[PageRows, Mapping[str, int]]]:
        """Yield batches of rows, decoded from the pages of a table, each with the positions of the columns by name.

        Raises:
            UnusualPagesError: The rows that were not yielded must be read by SQLite.
        """
        placed = self._pages.get(table)
        if placed is None or not placed.places.keys() >= set(columns):
            raise UnusualPagesError
        for rows in placed.pages.batches(sorted({placed.places[name] for name in columns})):
            self.check_not_stopped()
            yield rows, placed.places

    def record_batches(
        self,
        table: str,
        columns: Sequence[str],
        *,
        holds: Sequence[str] = (),
        text: str | None = None,
        only: Only | None = None,
        after: int = 0,
    ) -> Iterator[Mapping[str, Any]]:
        """Yield a table in batches, read by SQLite; arguments as in :class:`ExportTables`.

        ``after`` is the number of rows at the start of the table that are left out.
        """
        # Expressions in SQL, one for each column of the batches.
        wanted = [quote_name(name) for name in columns]
        if only:
            chosen = f"{quote_name(only[0])} IN ({', '.join(map(str, only[1]))})"
            wanted = [f"CASE WHEN {chosen} THEN {name} END AS {name}" for name in wanted]
        if holds:
            present = [(bit, name) for bit, name in enumerate(holds) if self.has_columns(table, name)]
            bits = [f"({quote_name(name)} IS NOT NULL) * {1 << bit}" for bit, name in present]
            wanted.append(f"{' + '.join(bits) or '0'} AS {HOLDS}")
        if text:
            name = quote_name(text)  # never NULL: a first batch without any text would be taken for one of integers
            wanted.append(f"coalesce(substr(CAST({name} AS TEXT), 1, {MOST_LETTERS}), '') AS {name}")
        for batch in self._query(f"SELECT {', '.join(wanted)} FROM {quote_name(table)}", after):
            yield dict(zip(batch.schema.names, batch.columns, strict=True))

    def _query(self, query: str, after: int) -> Iterator[Any]:
        """Yield the result of a query as batches (``pyarrow.RecordBatch``), read outside Python's global lock.

        A column that is NULL throughout the first batch is taken for integers.

        Args:
            query: Selects from one table, and ends with the table's name.
            after: Number of rows at the start of the table that are left out.

        Raises:
            TraceError: The table cannot be read, a column of integers holds something else, or the table has more rows
                than the file has room for.
            MemoryError: There is not enough memory.
        """
        import pyarrow
        from adbc_driver_manager import Error

        # Without an index, because the limit applies to rows of the table itself.
        most = max(0, self.most_rows + 1 - after)
        try:
            with self._reader(f"{query} NOT INDEXED LIMIT {most} OFFSET {after}") as reader:
                names, rows_read = reader.schema.names, after
                for batch in reader:
                    rows_read += batch.num_rows
                    self._refuse_to_go_on(rows_read)
                    yield batch
        except (Error, pyarrow.ArrowException, OSError) as error:
            reason = str(error).strip().splitlines()[0]  # errors are shown on one line
            if lacks_memory(error):
                raise MemoryError(reason) from error
            if late := _LATE_MISMATCH.search(reason):
                raise self.not_integer_error(names[int(late[1])]) from error
            raise TraceError(self.path, f"cannot be read ({reason})", HINT) from error

    @contextmanager
    def _reader(self, query: str) -> Iterator[Any]:
        """Return a context with the result of a query, as ``pyarrow.RecordBatchReader``."""
        import adbc_driver_sqlite
        import pyarrow
        from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement

        with (
            closing(AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=self.uri)) as database,
            closing(AdbcConnection(database)) as connection,
            closing(AdbcStatement(connection)) as statement,
        ):
            statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
            statement.set_sql_query(query)
            stream, _ = statement.execute_query()
            with pyarrow.RecordBatchReader.from_stream(stream) as reader:
                yield reader

    def _refuse_to_go_on(self, rows_read: int) -> None:
        """Raise TraceError if reading was stopped, or more rows of a table were read than the file has room for."""
        self.check_not_stopped()
        if rows_read > self.most_rows:
            raise self._endless_error()


def _held(rows: PageRows, bits: Mapping[int, int]) -> Ints:
    """Return for each row the sum of the bits of the columns that are not NULL; ``bits`` has the bit of each column."""
    found = np.zeros(len(rows), np.int64)
    for column, bit in bits.items():
        found |= np.where(rows.is_null(column), 0, bit)
    return found


class _Column(NamedTuple):
    """A column of a table: a row of ``PRAGMA table_xinfo``, whose fields are in this order."""

    position: int
    name: str
    type: str
    is_filled: int
    default: object
    key: int
    hidden: int

    @property
    def is_as_stored(self) -> bool:
        """Whether the pages hold the column's values as SQLite returns them.

        They do not for columns of floats, of which some are stored as integers, nor for keys, which may be the numbers
        of the rows.
        """
        return not self.key and not any(part in self.type.upper() for part in ("REAL", "FLOA", "DOUB"))


class _PlacedTable(NamedTuple):
    """The pages of a table, and the position of each of its columns by name."""

    pages: TablePages
    places: Mapping[str, int]


def _name_of_table(statement: object) -> str | None:
    """Return the name in a CREATE TABLE statement; ``None`` for other statements, as for a virtual table."""
    found = _TABLE.match(statement) if isinstance(statement, str) else None
    if not found:
        return None
    quote_sign = found[0].rstrip()[-1]  # within quotes, it is written twice
    name = next(name for name in found.groups() if name is not None)
    return name.replace(2 * quote_sign, quote_sign)


def sqlite_uri(path: Path, options: str = "") -> str:
    """Return the URI of a database for SQLite and ADBC; the path may hold any bytes, such as ``?`` or Latin-1."""
    return f"file:{quote(os.fsencode(path))}{options}"


def quote_name(name: str) -> str:
    """Return the name of a table or column in quotes, for SQL."""
    return '"' + name.replace('"', '""') + '"'
