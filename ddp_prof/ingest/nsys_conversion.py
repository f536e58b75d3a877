"""Converts other files of Nsight Systems to SQLite exports, and reads these.

The nsys of this machine exports a raw report (``.nsys-rep``, ``.qdrep``). The export is written beside the report with
the suffix ``.sqlite``, as ``nsys stats`` does, and is used again as long as it is newer than the report. If that folder
is read-only, each reading exports into a temporary folder.

A folder with one file per table (``nsys export --type parquetdir``, ``arrowdir``) holds the tables of the SQLite
export. They are written into a database in a temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddp_prof.atomic_file import partial_path
from ddp_prof.bounded_file import held_bytes
from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.cached import load_cached
from ddp_prof.ingest.nsys_export import load_nsys_sqlite
from ddp_prof.ingest.nsys_program import find_nsys, is_exported, recording_version
from ddp_prof.ingest.sqlite_columns import integer_array, require_disk_space, sqlite_uri
from ddp_prof.trace import Trace

EXPORT_TO_REPORT = 4
"""Assumed ratio of the sizes of an export and its report; measured: 3.2 to 3.4."""


def load_nsys_report(path: Path, options: ReadOptions) -> Trace:
    """Read a raw report without changing it; arguments and errors as of :func:`ddp_prof.ingest.load.load_trace`."""
    beside = path.with_suffix(".sqlite")

    def of_report(trace: Trace) -> Trace:
        return replace(trace, path=path, source="nsys-report", recorder=recording_version(path) or trace.recorder)

    if is_exported(path):
        return of_report(load_cached(load_nsys_sqlite, beside, options))
    if os.access(path.parent, os.W_OK):
        _export(path, beside)
        trace = of_report(load_cached(load_nsys_sqlite, beside, options))
        note = f"exported to {beside.name}, which lies beside the report and is read from now on"
        return replace(trace, warnings=(*trace.warnings, note))
    return load_cached(lambda _path, _options: of_report(_load_from_temporary_export(path, options)), path, options)


def _load_from_temporary_export(path: Path, options: ReadOptions) -> Trace:
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        export = Path(folder) / path.with_suffix(".sqlite").name
        _export(path, export)
        return load_nsys_sqlite(export, options, path)


def _export(report: Path, target: Path) -> None:
    """Export to ``target``; a failure leaves no file."""
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(
            report, "a raw report, and there is no nsys here to export it", "install nsys or set NSYS=PATH"
        )
    require_disk_space(report, target.parent, EXPORT_TO_REPORT * held_bytes(report))
    folder = partial_path(target)
    folder.mkdir()
    try:
        unfinished = folder / "export.sqlite"
        lines = [line.strip() for line in nsys.export(report, unfinished).splitlines() if line.strip()]
        if unfinished.is_file():
            unfinished.replace(target)
            return
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    reason = next((line for line in lines if "error" in line.lower() or "version" in line.lower()), "")
    made_by = (recording_version(report) or "0").rpartition(".")[0] or "0"
    made_by_numbers, own_numbers = ([int(part) for part in one.split(".")] for one in (made_by, nsys.version))
    if made_by_numbers > own_numbers:
        raise TraceError(
            report,
            f"made by nsys {made_by}, and the nsys found here is {nsys.version} ({nsys.path})",
            f"export it with nsys {made_by} or newer, or set NSYS=PATH",
        )
    raise TraceError(
        report, f"nsys {nsys.version} cannot export it ({reason[:200]})", "record it again, or set NSYS=PATH"
    )


FOLDER_TO_EXPORT = 6
"""Assumed ratio of the sizes of the database and the compressed tables."""
_READ = re.compile(r"(CUPTI_ACTIVITY_|NVTX_|TARGET_INFO_|(EXPORT_)?META_DATA|MPI_RANKS|StringIds|ThreadNames|PRO\w+)")
"""The tables that are read; others, such as samples of the CPU, may be many times larger."""
MOST_VALUES_PER_BYTE = 32
MOST_TEXT_PER_BYTE, LEAST_TEXT_BYTES = 100, 1 << 26
"""Largest plausible compression; a table that claims more is refused before it is unpacked."""
_HINT = "export the report again"


def load_nsys_table_folder(path: Path, options: ReadOptions) -> Trace:
    """Read a folder of tables; arguments and errors as of :func:`ddp_prof.ingest.load.load_trace`."""
    tables = [file for file in sorted(path.iterdir()) if file.suffix in _READERS and _READ.match(file.name)]
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        require_disk_space(
            path, Path(folder), FOLDER_TO_EXPORT * sum(held_bytes(file) for file in tables if file.is_file())
        )
        export = Path(folder) / "export.sqlite"
        _write_database(tables, export)
        try:
            trace = load_nsys_sqlite(export, options, path)
        except TraceError as error:
            raise TraceError(path if error.path == export else error.path, error.reason, error.hint) from error
    return replace(trace, path=path, source="nsys-tables")


def _write_database(tables: Sequence[Path], export: Path) -> None:
    from adbc_driver_sqlite import dbapi
    from pyarrow import ArrowException

    if len({file.stem for file in tables}) < len(tables):
        twice = next(file for file in tables if file.with_suffix(".arrow") in tables and file.suffix == ".parquet")
        raise TraceError(twice, "the table is there as Parquet and as Arrow", "delete the one or the other")
    with closing(dbapi.connect(sqlite_uri(export))) as connection, closing(connection.cursor()) as cursor:
        for file in tables:
            if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
                raise TraceError(file, "not a regular file", _HINT)
            try:
                table = _READERS[file.suffix](file)
                if table.num_rows and table.num_columns:
                    cursor.adbc_ingest(file.stem, table, mode="create")
            except (ArrowException, OSError, dbapi.Error) as error:
                raise TraceError(file, f"cannot be read ({str(error).splitlines()[0]})", _HINT) from error
        connection.commit()


def _read_parquet(file: Path) -> Any:
    """Read the columns of supported types.

    Text stays dictionary-encoded, because a few bytes of Parquet may stand for a billion rows of one text.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        columns = [field.name for field in opened.schema_arrow if _is_supported_type(field.type)]
        _refuse_too_many(file, opened.metadata.num_rows, len(columns))
    with ParquetFile(file, read_dictionary=columns) as opened:
        return _to_sqlite_types(file, opened.read(columns))


def _read_arrow(file: Path) -> Any:
    """Read the columns of supported types, batch by batch; refuse buffers that reach beyond the file."""
    import pyarrow

    most = max(LEAST_TEXT_BYTES, MOST_TEXT_PER_BYTE * held_bytes(file))
    if (total := _unpacked_bytes(file)) > most:
        raise TraceError(file, f"it unpacks to {total:,} bytes, which no capture has", _HINT)
    batches, rows = [], 0
    with file.open("rb") as source, pyarrow.ipc.open_stream(source) as reader:
        names = [field.name for field in reader.schema if _is_supported_type(field.type)]
        for batch in reader:
            rows += batch.num_rows
            _refuse_too_many(file, rows, len(names))
            batches.append(batch.select(names))
            for column in batches[-1].columns:  # checks where texts lie, not whether they are UTF-8
                (column.view(_BYTES[str(column.type)]) if str(column.type) in _BYTES else column).validate(full=True)
        empty = pyarrow.schema([field for field in reader.schema if field.name in names])
    return _to_sqlite_types(file, pyarrow.Table.from_batches(batches, empty))


def _unpacked_bytes(file: Path) -> int:
    """Return the unpacked size of a stream's buffers from its headers; pyarrow does not check it before unpacking.

    A message is a FlatBuffers table and a body. The table of a batch tells where each buffer lies in the body, and
    whether buffers are packed. A packed buffer begins with its unpacked length.
    """
    total = 0
    with file.open("rb") as source, suppress(*_DAMAGED):  # the reader reports damage
        while True:
            mark, size = struct.unpack("<Ii", source.read(8))
            if mark != _CONTINUES or size <= 0:
                return total
            table, body = source.read(size), source.tell()
            (message,) = struct.unpack_from("<I", table)
            kind, length = (_field(table, message, number) for number in (1, 3))
            header = _follow_offset(table, _field(table, message, 2))
            if kind and table[kind] == _DICTIONARY_BATCH:
                header = _follow_offset(table, _field(table, header, 1))
            if kind and table[kind] in {_DICTIONARY_BATCH, _RECORD_BATCH} and _field(table, header, 3):
                buffers = _follow_offset(table, _field(table, header, 2))
                (count,) = struct.unpack_from("<I", table, buffers)
                for number in range(count):
                    at, held = struct.unpack_from("<qq", table, buffers + 4 + 16 * number)
                    if held:
                        source.seek(body + at)
                        total += max(held, *struct.unpack("<q", source.read(8)))
            source.seek(body + (max(0, *struct.unpack_from("<q", table, length)) if length else 0))
    return total


def _field(table: bytes, at: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table, 0 if the field is absent."""
    fields = at - struct.unpack_from("<i", table, at)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", table, fields)[0]:
        return 0
    offset: int = struct.unpack_from("<H", table, fields + 4 + 2 * number)[0]
    return at + offset if offset else 0


def _follow_offset(table: bytes, at: int) -> int:
    offset: int = struct.unpack_from("<I", table, at)[0]
    return at + offset


_DAMAGED = (struct.error, ValueError, IndexError, OverflowError, OSError)
_CONTINUES, _DICTIONARY_BATCH, _RECORD_BATCH = 0xFFFFFFFF, 2, 3
_READERS = {".parquet": _read_parquet, ".arrow": _read_arrow}
_BYTES = {"string": "binary", "large_string": "large_binary"}


def _refuse_too_many(file: Path, rows: int, columns: int) -> None:
    size = held_bytes(file)
    if rows > size or rows * columns > MOST_VALUES_PER_BYTE * size:
        raise TraceError(file, f"{rows:,} rows in {size:,} bytes, which no capture has", _HINT)


def _refuse_long_text(file: Path, column: Any) -> None:
    from pyarrow._compute import call_function

    most = max(LEAST_TEXT_BYTES, MOST_TEXT_PER_BYTE * held_bytes(file))
    total = 0
    for chunk in column.chunks:
        length = np.append(integer_array(call_function("binary_length", [chunk.dictionary])), 0)
        total += int(length[integer_array(chunk.indices)].sum())  # the index of no text is -1: the last length, 0
    if total > most:
        raise TraceError(file, f"it unpacks to {total:,} bytes of text, which no capture has", _HINT)


def _is_supported_type(kind: Any) -> bool:
    from pyarrow import types

    kind = _value_type(kind)
    tests = (types.is_integer, types.is_floating, types.is_string, types.is_large_string)
    return any(is_so(kind) for is_so in tests)


def _value_type(kind: Any) -> Any:
    from pyarrow import types

    return kind.value_type if types.is_dictionary(kind) else kind


def _to_sqlite_types(file: Path, table: Any) -> Any:
    """Convert columns to types of SQLite, unsigned integers to signed ones with the same bits; refuse too much text."""
    from pyarrow import int64, string, types

    columns = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = _value_type(field.type)
        if types.is_integer(kind):
            columns[field.name] = column.cast(int64(), safe=False)
        elif types.is_floating(kind):
            columns[field.name] = column.cast(kind)
        else:
            if types.is_dictionary(field.type):
                _refuse_long_text(file, column)
            columns[field.name] = column.cast(string())
    return type(table).from_pydict(columns)
