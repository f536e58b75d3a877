"""The tables of an export that is a folder with one file per table: ``nsys export --type parquetdir``, ``arrowdir``.

Only the columns that are asked for are unpacked, batch by batch. Text stays as it is held, once, with numbers that
refer to it: a few bytes of Parquet may stand for a billion rows of one text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddp_prof.bounded_file import held_bytes
from ddp_prof.errors import TraceError
from ddp_prof.ingest.export_tables import HINT, HOLDS, ExportTables, Only, integer_array
from ddp_prof.table import UNKNOWN, Ints, Mask

_READ = re.compile(
    r"(CUPTI_ACTIVITY_|NVTX_|TARGET_INFO_|(EXPORT_)?META_DATA|MPI_RANKS|StringIds|ThreadNames|DIAGNOSTIC_EVENT|PRO\w+)"
)
"""The tables that are looked at; others, such as samples of the CPU, may be many times larger."""
_MOST_VALUES_PER_BYTE = 32
_MOST_UNPACKED_PER_BYTE, _LEAST_UNPACKED_BYTES = 100, 1 << 26
"""Largest plausible compression; a table that claims more is refused before it is unpacked."""
_BATCH_ROWS = 1 << 16


class TableFolder(ExportTables):
    """The tables of a folder; ``bytes`` are those of the tables that are looked at.

    Raises:
        TraceError: A table cannot be read, or claims to hold more than its bytes.
    """

    source = "nsys-tables"
    kind = "a folder of tables"

    def __init__(self, path: Path) -> None:
        files = [file for file in sorted(path.iterdir()) if file.suffix in _KINDS and _READ.match(file.name)]
        if len({file.stem for file in files}) < len(files):
            twice = next(file for file in files if file.with_suffix(".arrow") in files and file.suffix == ".parquet")
            raise TraceError(twice, "the table is there as Parquet and as Arrow", "delete the one or the other")
        super().__init__(path, sum(held_bytes(file) for file in files if file.is_file()))
        self._files = {file.stem: _open(file) for file in files}
        self.columns = {name: file.columns for name, file in self._files.items() if file.is_filled and file.columns}

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
        if not self.has_columns(table, *integers, *others, *order, *filled):
            return []
        used = tuple(dict.fromkeys((*integers, *others, *order, *filled)))
        rows: list[dict[str, Any]] = []
        for batch in self._batches(table, used):
            chosen = np.full(len(batch[used[0]]), not filled, np.bool_)
            for name in filled:
                chosen |= _is_valid(batch[name])
            columns = [_values(batch[name], chosen) for name in used]
            rows += (dict(zip(used, values, strict=True)) for values in zip(*columns, strict=True))
        rows = [row for row in rows if all(isinstance(row[name], int) for name in integers)]
        rows.sort(key=lambda row: [(row[name] is not None, row[name]) for name in order])
        found = [tuple(row[name] for name in (*integers, *others)) for row in rows]
        return list(dict.fromkeys(found)) if distinct else found

    def record_batches(
        self,
        table: str,
        columns: Sequence[str],
        *,
        holds: Sequence[str] = (),
        text: str | None = None,
        only: Only | None = None,  # noqa: ARG002 - a column of these files has one type in all rows
    ) -> Iterator[Mapping[str, Any]]:
        present = [(bit, name) for bit, name in enumerate(holds) if self.has_columns(table, name)]
        wanted = (*columns, *(name for _, name in present), *([text] if text else []))
        for batch in self._batches(table, tuple(dict.fromkeys(wanted))):
            found = {name: _integers(batch[name]) for name in columns}
            if holds:
                bits = np.zeros(len(batch[wanted[0]]), np.int64)
                for bit, name in present:
                    bits |= _is_valid(batch[name]).astype(np.int64) << bit
                found[HOLDS] = _array_of(bits)
            yield found | ({text: batch[text]} if text else {})

    def _batches(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        file = self._files[table]
        with _naming(file.path):
            for batch in file.read(file.path, columns):
                self.check_not_stopped()
                yield {name: _plain(batch.column(name)) for name in columns}


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Let errors of ``pyarrow`` name the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise TraceError(file, f"cannot be read ({str(error).splitlines()[0]})", HINT) from error


@dataclass(frozen=True)
class _TableFile:
    """One table: its columns of supported types, whether it holds rows, and how columns of it are read in batches."""

    path: Path
    columns: tuple[str, ...]
    is_filled: bool
    read: Callable[[Path, Sequence[str]], Iterator[Any]]


def _open(file: Path) -> _TableFile:
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise TraceError(file, "not a regular file", HINT)
    with _naming(file):
        opened = _KINDS[file.suffix](file)
    if len({name.lower() for name in opened.columns}) < len(opened.columns):
        raise TraceError(file, "cannot be read (two of its columns have one name)", HINT)
    return opened


def _open_parquet(file: Path) -> _TableFile:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        told = opened.metadata
        columns = tuple(field.name for field in opened.schema_arrow if _is_supported(field.type))
        unpacked = sum(told.row_group(group).total_byte_size for group in range(told.num_row_groups))
    _refuse_too_many(file, told.num_rows, len(columns))
    _refuse_too_large(file, unpacked)
    return _TableFile(file, columns, told.num_rows > 0, _read_parquet)


def _read_parquet(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file, read_dictionary=list(columns)) as opened:
        yield from opened.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False)


def _open_arrow(file: Path) -> _TableFile:
    import pyarrow

    unpacked, is_filled = _survey(file)
    _refuse_too_large(file, unpacked)
    with file.open("rb") as source, pyarrow.ipc.open_stream(source) as reader:
        return _TableFile(
            file, tuple(field.name for field in reader.schema if _is_supported(field.type)), is_filled, _read_arrow
        )


def _read_arrow(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the batches of a stream; refuse buffers that reach beyond the file."""
    import pyarrow

    rows = 0
    with file.open("rb") as source, pyarrow.ipc.open_stream(source) as reader:
        for batch in reader:
            rows += batch.num_rows
            _refuse_too_many(file, rows, len(columns))
            chosen = batch.select(columns)
            for column in chosen.columns:  # checks where texts lie, not whether they are UTF-8
                (column.view(_BYTES[str(column.type)]) if str(column.type) in _BYTES else column).validate(full=True)
            yield from (chosen.slice(at, _BATCH_ROWS) for at in range(0, batch.num_rows, _BATCH_ROWS))


_KINDS = {".parquet": _open_parquet, ".arrow": _open_arrow}
_BYTES = {"string": "binary", "large_string": "large_binary"}


def _survey(file: Path) -> tuple[int, bool]:
    """Return the unpacked size of a stream's buffers, and whether it may hold rows; pyarrow checks neither beforehand.

    Both are in its headers. A message is a FlatBuffers table and a body. The table of a batch tells its rows, where
    each buffer lies in the body, and whether buffers are packed. A packed buffer begins with its unpacked length.
    """
    total, has_rows = 0, False
    with file.open("rb") as source, suppress(*_DAMAGED):  # the reader reports damage
        while start := source.read(8):
            mark, size = struct.unpack("<Ii", start)
            if mark == _CONTINUES and size == 0:
                return total, has_rows
            if mark != _CONTINUES or size < 0:
                return total, True
            table, body = source.read(size), source.tell()
            (message,) = struct.unpack_from("<I", table)
            kind, length = (_field(table, message, number) for number in (1, 3))
            header = _follow_offset(table, _field(table, message, 2))
            if kind and table[kind] == _RECORD_BATCH and (rows := _field(table, header, 0)):
                has_rows |= struct.unpack_from("<q", table, rows)[0] != 0
            if kind and table[kind] == _DICTIONARY_BATCH:
                header = _follow_offset(table, _field(table, header, 1))
            if kind and table[kind] in {_DICTIONARY_BATCH, _RECORD_BATCH} and _field(table, header, 3):
                total += _unpacked_bytes(source, body, table, _follow_offset(table, _field(table, header, 2)))
            source.seek(body + (max(0, *struct.unpack_from("<q", table, length)) if length else 0))
        return total, has_rows
    return total, True


def _unpacked_bytes(source: BinaryIO, body: int, table: bytes, buffers: int) -> int:
    total = 0
    (count,) = struct.unpack_from("<I", table, buffers)
    for number in range(count):
        at, held = struct.unpack_from("<qq", table, buffers + 4 + 16 * number)
        if held:
            source.seek(body + at)
            total += max(held, *struct.unpack("<q", source.read(8)))
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


def _refuse_too_many(file: Path, rows: int, columns: int) -> None:
    size = held_bytes(file)
    if rows > size or rows * columns > _MOST_VALUES_PER_BYTE * size:
        raise TraceError(file, f"{rows:,} rows in {size:,} bytes, which no capture has", HINT)


def _refuse_too_large(file: Path, unpacked: int) -> None:
    if unpacked > max(_LEAST_UNPACKED_BYTES, _MOST_UNPACKED_PER_BYTE * held_bytes(file)):
        raise TraceError(file, f"it unpacks to {unpacked:,} bytes, which no capture has", HINT)


def _is_supported(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_integer, types.is_floating, types.is_string, types.is_large_string)
    return any(is_so(kind) for is_so in tests)


def _plain(column: Any) -> Any:
    """Return a column of integers, floats or text; text may be held once and referred to."""
    from pyarrow import string, types

    if types.is_dictionary(column.type):
        if types.is_string(column.type.value_type) and not column.dictionary.null_count:
            return column
        column = column.dictionary_decode()
    return column.cast(string()) if types.is_large_string(column.type) else column


def _integers(column: Any) -> Any:
    """Return a column of integers, one without any value as such; others are left as they are, to be refused."""
    import pyarrow

    if pyarrow.types.is_integer(column.type) or _is_valid(column).any():
        return column
    return _array_of(np.full(len(column), UNKNOWN))


def _array_of(values: Ints) -> Any:
    """Return integers as an array; ``pyarrow``'s own conversion imports pandas, which takes longer than reading."""
    import pyarrow

    return pyarrow.Array.from_buffers(pyarrow.int64(), len(values), [None, pyarrow.py_buffer(values)])


def _is_valid(column: Any) -> Mask:
    """Mask of the values that are not NULL; SQLite holds NULL for what is no number."""
    import pyarrow

    if pyarrow.types.is_floating(column.type):
        return np.array([value is not None and value == value for value in column.to_pylist()], np.bool_)
    if column.null_count in (0, len(column)):
        return np.full(len(column), not column.null_count, np.bool_)
    rows = slice(column.offset, column.offset + len(column))
    return np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")[rows].view(np.bool_)


def _values(column: Any, rows: Mask) -> list[Any]:
    """Return chosen values; equal texts that are held once are one object."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        held = [*_values(column.dictionary, np.ones(len(column.dictionary), np.bool_)), None]
        return [held[number] for number in integer_array(column.indices)[rows].tolist()]  # the last one for UNKNOWN
    if pyarrow.types.is_string(column.type):
        texts = column.view(pyarrow.binary()).to_pylist()
        return [None if texts[row] is None else texts[row].decode(errors="replace") for row in np.flatnonzero(rows)]
    chosen = np.flatnonzero(rows)
    if pyarrow.types.is_integer(column.type):  # SQLite has signed integers: of unsigned ones the same bits
        is_valid = _is_valid(column)[chosen].tolist()
        values = integer_array(column)[chosen].tolist()
        return [value if known else None for value, known in zip(values, is_valid, strict=True)]
    values = column.to_pylist()
    return [values[row] for row in chosen]
