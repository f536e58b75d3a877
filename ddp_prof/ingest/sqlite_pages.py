"""Columns of integers and texts out of the pages of a SQLite table, several times faster than SQLite hands them over.

SQLite and its drivers decode row by row and hand over value by value. Here NumPy decodes all rows of some hundred pages
at once, column by column, by the `documented format <https://www.sqlite.org/fileformat2.html>`_, which has not changed
since 2004::

    page     kind, number of rows, ...  where each row begins  ...  rows
    row      bytes of the record, number of the row, record
    record   bytes of the header, kind of each value, values

Only what is usual is decoded: rows that lie within their page, in a tree in which no page is used twice. Anything else
raises :class:`UnusualPagesError`, and SQLite is to read the table from there on; so it also finds the words for damage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_prof.table import UNKNOWN, Ints, Mask

BATCH_BYTES = 1 << 20
"""Bytes of pages that are decoded at once: few enough that what is computed of them stays in the processor's cache."""
_LEAF, _INTERIOR = 13, 5
_MOST_LEVELS = 20
_LEAST_ROW, _HEAD_OF_LEAF, _HEAD_OF_INTERIOR = 6, 8, 12
_PADDING = 64
_UTF_8 = 1

_NULL, _ZERO, _ONE, _LONGEST_INTEGER = 0, 8, 9, 6
"""Kinds of values: NULL, the constants 0 and 1, integers of 1, 2, 3, 4, 6 and 8 bytes (from 1 to 6), and 7 for a float.
Kinds from 12 on are bytes (even) and texts (odd)."""
_RESERVED = (10, 11)
_LEAST_BYTES = 12
_SHIFTS = np.array([0, 56, 48, 40, 32, 16, 0, 0, 0, 0], np.int64)
_WIDTHS = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0, *((kind - 12) >> 1 for kind in range(12, 128))], np.int64)
_CONSTANTS = {_NULL: UNKNOWN, _ZERO: 0, _ONE: 1}

Bytes = NDArray[np.uint8]
Kinds = NDArray[Any]
"""Bytes or, where some of them take more than one, int64."""


class UnusualPagesError(Exception):
    """The rest of a table is to be read by SQLite: its pages are damaged, or hold what is not decoded here."""


class TablePages:
    """The pages of one table.

    Args:
        path: The database; nothing is to be applied to it.
        root: First page of the table.

    Raises:
        UnusualPagesError: The pages cannot be found.
    """

    def __init__(self, path: Path, root: int) -> None:
        self._path, self._root = path, root

    def batches(self, columns: Sequence[int]) -> Iterator[PageRows]:
        """Yield the rows in their order, with columns by their positions in the table.

        Raises:
            UnusualPagesError: What was not yielded is to be read by SQLite.
        """
        with self._path.open("rb", buffering=0) as file:
            head = _read_head(file)
            leaves = _find_leaves(file, head, self._root)
            most = max(1, BATCH_BYTES // head.page_bytes)
            buffer = np.zeros(most * head.page_bytes + _PADDING, np.uint8)
            for at in range(0, len(leaves), most):
                rows = PageRows(_read_pages(file, head, leaves[at : at + most], buffer), head, columns)
                if len(rows):
                    yield rows


class _Head(NamedTuple):
    """The head of a database: bytes of a page, how many of them are used, the pages, the encoding of texts."""

    page_bytes: int
    used_bytes: int
    pages: int
    encoding: int


def _read_head(file: BinaryIO) -> _Head:
    head = file.read(100)
    if len(head) < 100:
        raise UnusualPagesError

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(head[at : at + size], "big")

    page_bytes = number(16, 2)
    page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
    if page_bytes < 512 or page_bytes & (page_bytes - 1):
        raise UnusualPagesError
    held = file.seek(0, 2) // page_bytes
    told = number(28) if number(24) == number(92) else 0  # else an old release has written it, which counts no pages
    if told > held:
        raise UnusualPagesError
    return _Head(page_bytes, page_bytes - head[20], told or held, number(56))


def _read_pages(file: BinaryIO, head: _Head, pages: Ints, buffer: Bytes | None = None) -> Bytes:
    """Return pages end to end, and some bytes more; pages that follow each other in the file are read at once."""
    size = len(pages) * head.page_bytes + _PADDING
    found = np.zeros(size, np.uint8) if buffer is None else buffer[:size]
    view = found.data
    begins = np.flatnonzero(np.diff(pages, prepend=-1) != 1)
    for first, end in zip(begins.tolist(), [*begins[1:].tolist(), len(pages)], strict=True):
        file.seek((int(pages[first]) - 1) * head.page_bytes)
        wanted = view[first * head.page_bytes : end * head.page_bytes]
        while wanted:
            read = file.readinto(wanted)  # type: ignore[attr-defined]
            if not read:
                raise UnusualPagesError
            wanted = wanted[read:]
    return found


def _find_leaves(file: BinaryIO, head: _Head, root: int) -> Ints:
    """Return the pages that hold rows, in the order of the rows."""
    level = used = np.array([root], np.int64)
    for _ in range(_MOST_LEVELS):
        ordered = np.sort(used)
        if np.any(ordered[1:] == ordered[:-1]) or ordered[0] < 2 or ordered[-1] > head.pages:
            break
        if _read_pages(file, head, level[:1])[0] == _LEAF:
            return level
        level = _children(_read_pages(file, head, level), head)
        used = np.concatenate([used, level])
    raise UnusualPagesError


def _children(data: Bytes, head: _Head) -> Ints:
    """Return the pages below interior pages, in order: one of each row, and a last one."""
    base, count, row = _find_rows(data, head, _INTERIOR, _HEAD_OF_INTERIOR)
    last = np.cumsum(count + 1) - 1
    found = np.empty(len(row) + len(base), np.int64)
    is_last = np.zeros(len(found), np.bool_)
    is_last[last] = True
    found[last] = _number(data, base + 8, 4)
    found[~is_last] = _number(data, row, 4)
    return found


def _find_rows(data: Bytes, head: _Head, kind: int, head_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Return where each page begins, its number of rows, and where each row begins."""
    base = np.arange(0, len(data) - _PADDING, head.page_bytes)
    count = _number(data, base + 3, 2)
    if np.any(data[base] != kind) or np.any(head_bytes + _LEAST_ROW * count > head.page_bytes):
        raise UnusualPagesError
    pages = data[: len(data) - _PADDING].reshape(len(base), head.page_bytes)
    most = int(count.max())
    row = pages[:, head_bytes : head_bytes + 2 * most].copy().view(">u2") + base[:, None]
    return base, count, row[np.arange(most) < count[:, None]]


def _number(data: Bytes, at: Ints, size: int) -> Ints:
    """Return unsigned numbers of some bytes."""
    found = np.zeros(len(at), np.int64)
    for byte in range(size):
        found <<= 8
        found |= data.take(at + byte, mode="clip")
    return found


class _Value(NamedTuple):
    """A column: the kind of value in each row, or the one kind of all rows; where the values begin."""

    kind: Kinds | int
    at: Ints
    more: int


class PageRows:
    """Rows of some pages, and where their values are; ``len`` is their number."""

    def __init__(self, data: Bytes, head: _Head, columns: Sequence[int]) -> None:
        self._data, self._encoding = data, head.encoding
        base, count, row = _find_rows(data, head, _LEAF, _HEAD_OF_LEAF)
        self._count = len(row)
        self._values: dict[int, _Value] = {}
        if not self._count:
            return
        payload, record = _skip_size(data, row)
        record = _skip_number(data, record)
        end = record + payload
        if payload.max() > head.used_bytes - 35 or np.any(end > np.repeat(base + head.used_bytes, count)):
            raise UnusualPagesError  # longer records go on in other pages
        header = data.take(record, mode="clip")
        if header.max() >= 128:
            raise UnusualPagesError
        self._find_values(record, record + header, end, columns)

    def __len__(self) -> int:
        return self._count

    def _find_values(self, record: Ints, body: Ints, end: Ints, columns: Sequence[int]) -> None:
        kinds, next_kind, of_values, values = record, 1, body, 0
        for column in range(max(columns) + 1):
            found: Kinds = self._data.take(kinds + next_kind, mode="clip")
            next_kind += 1
            low, high = int(found.min()), int(found.max())
            width: Ints | int
            if high >= 128:
                found, is_long = self._long_kinds(found, kinds + next_kind)
                kinds = kinds + is_long
                width = np.where(found < 128, _WIDTHS[np.minimum(found, 127)], (found - _LEAST_BYTES) >> 1)
            elif low == high:
                width = int(_WIDTHS[low])
            else:
                width = _WIDTHS.take(found)
            kind = low if low == high < 128 else found
            if column in columns:
                if any(np.any(found == reserved) for reserved in _RESERVED):
                    raise UnusualPagesError
                self._values[column] = _Value(kind, of_values, values)
            if isinstance(width, int):
                values += width
            else:
                of_values = of_values + width
        if np.any(kinds + next_kind > body) or np.any(of_values + values > end):
            raise UnusualPagesError  # a row with fewer columns, added to a table that had rows

    def _long_kinds(self, kind: Kinds, after: Ints) -> tuple[Kinds, Mask]:
        """Return kinds of which some take two bytes, and which do."""
        is_long: Mask = kind >= 128
        low = self._data.take(after, mode="clip")
        if np.any(is_long & (low >= 128)):
            raise UnusualPagesError
        return np.where(is_long, (kind.astype(np.int64) & 127) << 7 | low, kind), is_long

    def is_null(self, column: int) -> Mask:
        """Mask of the rows that hold NULL in a column."""
        kind = self._values[column].kind
        return np.full(self._count, kind == _NULL) if isinstance(kind, int) else kind == _NULL  # no reserved kinds

    def integers(self, column: int, wanted: Mask | None = None) -> Ints:
        """Return a column with ``UNKNOWN`` for NULL; a read-only one of one value takes no memory.

        Raises:
            UnusualPagesError: A ``wanted`` row holds neither an integer nor NULL; in others anything may stand.
        """
        kind, at, more = self._values[column]
        if isinstance(kind, int):
            if kind in _CONSTANTS:
                return np.broadcast_to(np.int64(_CONSTANTS[kind]), self._count)
            if kind > _LONGEST_INTEGER:
                if wanted is None or wanted.any():
                    raise UnusualPagesError
                return np.broadcast_to(np.int64(UNKNOWN), self._count)
            return self._big_endian(at, more) >> int(_SHIFTS[kind])
        is_other = (kind > _LONGEST_INTEGER) & (kind != _ZERO) & (kind != _ONE)
        if np.any(is_other if wanted is None else is_other & wanted):
            raise UnusualPagesError
        found = self._big_endian(at, more) >> _SHIFTS.take(kind, mode="clip")
        for constant, value in _CONSTANTS.items():
            found[kind == constant] = value
        return found

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        return self._data.view(">u8").astype(np.uint64)

    def _big_endian(self, at: Ints, more: int) -> Ints:
        """Return the eight bytes from each place on, as a number."""
        at = at + more
        word, bits = at >> 3, ((at & 7) << 3).view(np.uint64)
        high, low = (self._words.take(one, mode="clip") for one in (word, word + 1))
        high <<= bits
        low >>= np.uint64(1)  # in two parts, since a processor does not shift by 64 bits
        low >>= np.uint64(63) - bits
        high |= low
        return high.view(np.int64)

    def texts(self, column: int, wanted: Ints) -> tuple[Ints, list[bytes]]:
        """Return the number of the text in each wanted row, and the distinct texts: an empty one for NULL.

        Raises:
            UnusualPagesError: One of them is a number, texts are not in UTF-8, or they share bytes.
        """
        kind, at, more = self._values[column]
        kinds = np.full(len(wanted), kind) if isinstance(kind, int) else kind[wanted].astype(np.int64)
        if self._encoding != _UTF_8 or np.any((kinds != _NULL) & (kinds < _LEAST_BYTES)):
            raise UnusualPagesError
        size = np.maximum(0, (kinds - _LEAST_BYTES) >> 1)
        if size.sum() > len(self._data):
            raise UnusualPagesError
        begin = at[wanted] + more
        data, places = self._data.tobytes(), zip(begin.tolist(), (begin + size).tolist(), strict=True)
        held = [data[first:end] for first, end in places]
        number = {text: at for at, text in enumerate(dict.fromkeys(held))}
        texts = [text.partition(b"\0")[0] for text in number]
        return np.fromiter(map(number.__getitem__, held), np.int64, len(held)), texts


def _skip_size(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Return the size of a row's record, a number of one or two bytes, and where the next number begins."""
    size = data.take(at, mode="clip").astype(np.int64)
    if size.max() < 128:
        return size, at + 1
    is_long, low = size >= 128, data.take(at + 1, mode="clip")
    if np.any(is_long & (low >= 128)):
        raise UnusualPagesError
    return np.where(is_long, (size & 127) << 7 | low, size), at + 1 + is_long


def _skip_number(data: Bytes, at: Ints) -> Ints:
    """Return where numbers end: before their ninth byte, at the first one without the highest bit."""
    goes_on = data.take(at, mode="clip") >= 128
    for _ in range(8):
        if not goes_on.any():
            break
        at = at + goes_on
        goes_on &= data.take(at, mode="clip") >= 128
    return at + 1
