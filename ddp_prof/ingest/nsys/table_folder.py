"""Exports of Nsight Systems as a folder with a file a table: ``nsys export --type parquetdir`` and ``arrowdir``.

The tables are those of the SQLite export, so they are written into one, in a temporary folder, and read as such.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_prof.errors import TraceError
from ddp_prof.ingest.nsys.sqlite_export import load_nsys_sqlite
from ddp_prof.ingest.sqlite_columns import require_room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.trace import Trace

FOLDER_TO_EXPORT = 6
"""So many times larger than the compressed tables their database is taken to be."""
_READ = re.compile(r"(CUPTI_ACTIVITY_|NVTX_|TARGET_INFO_|META_DATA_|EXPORT_META_DATA|StringIds|ThreadNames|PRO\w+)")
"""The tables that a trace is made of; others, such as samples of the CPU, may be many times larger."""
_WAY_OUT = "export the report again"


def load_nsys_table_folder(path: Path, *, extra_patterns: Sequence[str] = (), with_launches: bool = False) -> Trace:
    """Read a folder of tables.

    Args:
        path: The folder; it stays as it is.
        extra_patterns: Regular expressions for communication kernels unknown to the classifier.
        with_launches: Read shapes of kernels, names and ends of calls, too.

    Raises:
        TraceError: A table cannot be read, or the folder is no export of Nsight Systems.
    """
    tables = [file for file in sorted(path.iterdir()) if file.suffix in _READERS and _READ.match(file.name)]
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        require_room(
            path, Path(folder), FOLDER_TO_EXPORT * sum(file.stat().st_size for file in tables if file.is_file())
        )
        export = Path(folder) / "export.sqlite"
        _write(tables, export)
        try:
            trace = load_nsys_sqlite(export, extra_patterns=extra_patterns, run=path, with_launches=with_launches)
        except TraceError as error:
            raise TraceError(path if error.path == export else error.path, error.reason, error.way_out) from error
    return replace(trace, path=path, source="nsys-tables")


def _write(tables: Sequence[Path], export: Path) -> None:
    from adbc_driver_sqlite import dbapi
    from pyarrow import ArrowException

    with closing(dbapi.connect(str(export))) as connection, closing(connection.cursor()) as cursor:
        for file in tables:
            if file.exists() and not file.is_file():  # to open a pipe would wait for its writer
                raise TraceError(file, "not a regular file", _WAY_OUT)
            try:
                table = _as_sqlite_has_it(_READERS[file.suffix](file))
                if table.num_rows and table.num_columns:
                    cursor.adbc_ingest(file.stem, table, mode="create")
            except (ArrowException, OSError, dbapi.Error) as error:
                raise TraceError(file, f"cannot be read ({str(error).splitlines()[0]})", _WAY_OUT) from error
        connection.commit()


def _read_parquet(file: Path) -> Any:
    from pyarrow.parquet import read_table

    return read_table(file)


def _read_arrow(file: Path) -> Any:
    from pyarrow import ipc

    with file.open("rb") as source:
        return ipc.open_stream(source).read_all()


_READERS = {".parquet": _read_parquet, ".arrow": _read_arrow}


def _as_sqlite_has_it(table: Any) -> Any:
    """Unsigned integers as the signed ones with the same bits; columns that are no numbers or text are left out."""
    from pyarrow import int64, string, types

    columns = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        if types.is_integer(field.type):
            columns[field.name] = column.cast(int64(), safe=False)
        elif types.is_large_string(field.type):  # as other programs write text
            columns[field.name] = column.cast(string())
        elif types.is_floating(field.type) or types.is_string(field.type):
            columns[field.name] = column
    return type(table).from_pydict(columns)
