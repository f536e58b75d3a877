"""Reads an export that is a folder with one file per table: ``nsys export --type parquetdir`` or ``arrowdir``.

Only the columns that are asked for are uncompressed, batch by batch. Text stays encoded as in the file, each distinct
text once with the numbers that refer to it: a few bytes of Parquet may stand for a billion rows of one text.
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
"""Start of the names of the tables that are read; other tables, such as samples of the CPU, may be much larger."""
_MOST_VALUES_PER_BYTE = 32
"""A table with more values per byte of its file is refused."""
_MOST_UNPACKED_PER_BYTE, _LEAST_UNPACKED_BYTES = 100, 1 << 26
"""Largest plausible compression; a table that claims more is refused before it is uncompressed, unless it is small."""
_BATCH_ROWS = 1 << 16
"""Most rows in a batch."""


class TableFolder(ExportTables):
    """The tables of a folder; ``bytes`` is the size of the files of the tables that are read.

    Raises:
        TraceError: A table cannot be read, or claims to hold more than its file has room for.
    """

    source = "nsys-tables"
    kind = "a folder of tables"

    def __init__(self, path: Path) -> None:
        """Look at each file of a table that is read; ``path`` is the folder."""
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
        """Return rows of a small table; arguments and result as in :class:`ExportTables`."""
        if not self.has_columns(table, *integers, *others, *order, *filled):
            return []
        # Rows in which one of ``filled`` is not NULL, or all rows if ``filled`` is empty.
        used = tuple(dict.fromkeys((*integers, *others, *order, *filled)))
        rows: list[dict[str, Any]] = []
        for batch in self._batches(table, used):
            chosen = np.full(len(batch[used[0]]), not filled, np.bool_)
            for name in filled:
                chosen |= _is_valid(batch[name])
            columns = [_values(batch[name], chosen) for name in used]
            rows += (dict(zip(used, values, strict=True)) for values in zip(*columns, strict=True))
        rows = [row for row in rows if all(isinstance(row[name], int) for name in integers)]
        rows.sort(key=lambda row: [(row[name] is not None, row[name]) for name in order])  # NULL comes first
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
        """Yield a table in batches; arguments as in :class:`ExportTables`. All rows are read, not ``only`` some."""
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
        """Yield columns of a table as ``pyarrow`` arrays by name, in batches of rows; see :func:`_plain`."""
        file = self._files[table]
        with _naming(file.path):
            for batch in file.read(file.path, columns):
                self.check_not_stopped()
                yield {name: _plain(batch.column(name)) for name in columns}


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn errors of ``pyarrow`` and of the system within a ``with`` block into a TraceError that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise TraceError(file, f"cannot be read ({str(error).splitlines()[0]})", HINT) from error


@dataclass(frozen=True)
class _TableFile:
    """The file of one table.

    Attributes:
        path: The file.
        columns: Names of the columns that have supported types.
        is_filled: Whether the table may hold rows.
        read: Yields the given columns of the file in batches of rows.
    """

    path: Path
    columns: tuple[str, ...]
    is_filled: bool
    read: Callable[[Path, Sequence[str]], Iterator[Any]]


def _open(file: Path) -> _TableFile:
    """Look at the file of a table, and return what it holds; TraceError if it cannot be read."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise TraceError(file, "not a regular file", HINT)
    with _naming(file):
        opened = _KINDS[file.suffix](file)
    if len({name.lower() for name in opened.columns}) < len(opened.columns):
        raise TraceError(file, "cannot be read (two of its columns have one name)", HINT)
    return opened


def _open_parquet(file: Path) -> _TableFile:
    """Return what a Parquet file holds, by its metadata; TraceError if it claims more than it has room for."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        told = opened.metadata
        columns = tuple(field.name for field in opened.schema_arrow if _is_supported(field.type))
        unpacked = sum(told.row_group(group).total_byte_size for group in range(told.num_row_groups))
    _refuse_too_many(file, told.num_rows, len(columns))
    _refuse_too_large(file, unpacked)
    return _TableFile(file, columns, told.num_rows > 0, _read_parquet)


def _read_parquet(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Yield columns of a Parquet file in batches of rows."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file, read_dictionary=list(columns)) as opened:
        yield from opened.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False)


def _open_arrow(file: Path) -> _TableFile:
    """Return what a file with an Arrow stream holds; TraceError if it would uncompress to more than is plausible."""
    import pyarrow

    unpacked, is_filled = _survey(file)
    _refuse_too_large(file, unpacked)
    with file.open("rb") as source, pyarrow.ipc.open_stream(source) as reader:
        return _TableFile(
            file, tuple(field.name for field in reader.schema if _is_supported(field.type)), is_filled, _read_arrow
        )


def _read_arrow(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Yield columns of an Arrow stream in batches of rows; raise an error if buffers reach beyond the file."""
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
"""What looks at a file, by its suffix."""
_BYTES = {"string": "binary", "large_string": "large_binary"}
"""Types of text in Arrow, and the types of bytes with the same layout, which need not be UTF-8."""


def _survey(file: Path) -> tuple[int, bool]:
    """Return the uncompressed size of the buffers in an Arrow stream that are compressed, and whether it may hold rows.

    pyarrow checks neither before it takes the memory. Both are in the headers of the stream, which is a sequence of
    messages. A message is 8 bytes (a mark and the length of its header), a header, which is a FlatBuffers table, and a
    body. The header of a batch of rows tells the number of rows, where each buffer lies in the body, and whether
    buffers are compressed. A compressed buffer begins with its uncompressed length.
    """
    total, has_rows = 0, False
    with file.open("rb") as source, suppress(*_DAMAGED):  # the reader reports damage
        while start := source.read(8):
            mark, size = struct.unpack("<Ii", start)
            if mark == _CONTINUES and size == 0:
                return total, has_rows
            if mark != _CONTINUES or size < 0:
                return total, True
            # The fields of a message are its version (0), kind (1), header (2) and the length of its body (3).
            table, body = source.read(size), source.tell()
            (message,) = struct.unpack_from("<I", table)
            kind, length = (_field(table, message, number) for number in (1, 3))
            header = _follow_offset(table, _field(table, message, 2))
            # The fields of a batch are its rows (0), nodes (1), buffers (2) and compression (3); a dictionary (the
            # distinct texts) has a batch in its field 1.
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
    """Return the uncompressed size of the buffers of one batch.

    Args:
        source: The file.
        body: Position of the body of the message in the file.
        table: Header of the message.
        buffers: Position in ``table`` of the list of buffers: their number, then offset and length of each.
    """
    total = 0
    (count,) = struct.unpack_from("<I", table, buffers)
    for number in range(count):
        at, held = struct.unpack_from("<qq", table, buffers + 4 + 16 * number)
        if held:
            source.seek(body + at)
            total += max(held, *struct.unpack("<q", source.read(8)))
    return total


def _field(table: bytes, at: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table, 0 if the field is absent.

    Args:
        table: The bytes that hold the table.
        at: Position of the table in them.
        number: Number of the field.
    """
    # A table begins with the distance back to its list of fields: 4 bytes of sizes, then the offset of each field.
    fields = at - struct.unpack_from("<i", table, at)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", table, fields)[0]:
        return 0
    offset: int = struct.unpack_from("<H", table, fields + 4 + 2 * number)[0]
    return at + offset if offset else 0


def _follow_offset(table: bytes, at: int) -> int:
    """Return the position to which the offset at a position refers."""
    offset: int = struct.unpack_from("<I", table, at)[0]
    return at + offset


_DAMAGED = (struct.error, ValueError, IndexError, OverflowError, OSError)
"""Errors that a damaged header may cause."""
_CONTINUES, _DICTIONARY_BATCH, _RECORD_BATCH = 0xFFFFFFFF, 2, 3
"""The mark at the start of a message, and two kinds of messages."""


def _refuse_too_many(file: Path, rows: int, columns: int) -> None:
    """Raise TraceError if a file has too few bytes for its numbers of rows and columns to be true."""
    size = held_bytes(file)
    if rows > size or rows * columns > _MOST_VALUES_PER_BYTE * size:
        raise TraceError(file, f"{rows:,} rows in {size:,} bytes, which no capture has", HINT)


def _refuse_too_large(file: Path, unpacked: int) -> None:
    """Raise TraceError if a file has too few bytes to uncompress to ``unpacked`` bytes."""
    if unpacked > max(_LEAST_UNPACKED_BYTES, _MOST_UNPACKED_PER_BYTE * held_bytes(file)):
        raise TraceError(file, f"it unpacks to {unpacked:,} bytes, which no capture has", HINT)


def _is_supported(kind: Any) -> bool:
    """Return whether a column of this ``pyarrow`` type holds integers, floats or text, encoded or not."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_integer, types.is_floating, types.is_string, types.is_large_string)
    return any(is_so(kind) for is_so in tests)


def _plain(column: Any) -> Any:
    """Return a column as integers, floats or text; text may stay encoded as distinct texts and numbers of them."""
    from pyarrow import string, types

    if types.is_dictionary(column.type):
        if types.is_string(column.type.value_type) and not column.dictionary.null_count:
            return column
        column = column.dictionary_decode()
    return column.cast(string()) if types.is_large_string(column.type) else column


def _integers(column: Any) -> Any:
    """Return a column of integers; one without any value becomes a column of ``UNKNOWN``.

    Other columns are returned as they are: who converts them to integers raises the error.
    """
    import pyarrow

    if pyarrow.types.is_integer(column.type) or _is_valid(column).any():
        return column
    return _array_of(np.full(len(column), UNKNOWN))


def _array_of(values: Ints) -> Any:
    """Return integers as a ``pyarrow`` array that shares their memory.

    ``pyarrow``'s own conversion imports pandas, which takes longer than reading.
    """
    import pyarrow

    return pyarrow.Array.from_buffers(pyarrow.int64(), len(values), [None, pyarrow.py_buffer(values)])


def _is_valid(column: Any) -> Mask:
    """Return a mask of the values that are not NULL. NaN counts as NULL, as in an export to SQLite."""
    import pyarrow

    rows = slice(column.offset, column.offset + len(column))
    # Arrow's first buffer has a bit for each value; the second one holds the values.
    if column.null_count in (0, len(column)):
        found = np.full(len(column), not column.null_count, np.bool_)
    else:
        found = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")[rows].view(np.bool_)
    if found.any() and pyarrow.types.is_floating(column.type):
        found &= ~np.isnan(np.frombuffer(column.buffers()[1], f"f{column.type.bit_width // 8}")[rows])
    return found


def _values(column: Any, rows: Mask) -> list[Any]:
    """Return the values of the chosen rows of a ``pyarrow`` column, ``None`` for NULL.

    Texts are strings, in which bytes that are no UTF-8 are replaced. Of an encoded column, equal texts are one object.
    """
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        held = [*_values(column.dictionary, np.ones(len(column.dictionary), np.bool_)), None]
        # The number of NULL is UNKNOWN, -1, which selects the None at the end.
        return [held[number] for number in integer_array(column.indices)[rows].tolist()]
    if pyarrow.types.is_string(column.type):
        texts = column.view(pyarrow.binary()).to_pylist()
        return [None if texts[row] is None else texts[row].decode(errors="replace") for row in np.flatnonzero(rows)]
    chosen = np.flatnonzero(rows)
    # SQLite's integers are signed, so unsigned values are taken as signed ones with the same bits: by integer_array.
    if pyarrow.types.is_integer(column.type):
        is_valid = _is_valid(column)[chosen].tolist()
        values = integer_array(column)[chosen].tolist()
        return [value if known else None for value, known in zip(values, is_valid, strict=True)]
    values = column.to_pylist()
    return [values[row] for row in chosen]
