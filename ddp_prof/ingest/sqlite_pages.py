"""Decodes columns of integers and texts from the pages of a SQLite table, several times faster than SQLite does.

SQLite and its drivers decode row by row and return value by value. Here NumPy decodes all rows of some hundred pages at
once, column by column, by the `documented format <https://www.sqlite.org/fileformat2.html>`_, which has not changed
since 2004. A table is a tree of pages: *leaves* hold rows, *interior* pages hold the numbers of pages below them::

    leaf     kind of page, number of rows, ...  where each row begins  ...  rows
    row      bytes of the record, number of the row, record
    record   bytes of the header, kind of each value, values

Numbers that may be long are written with 7 bits per byte, of which all but the last one have the highest bit set. Only
the usual case is decoded: rows that lie within their page, in a tree in which no page is used twice. Anything else
raises :class:`UnusualPagesError`. Then the caller lets SQLite read the rest of the table, which also reports damage.
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
"""Bytes of pages that are decoded at once: few enough that all intermediate arrays stay in the processor's cache."""
_LEAF, _INTERIOR = 13, 5
"""Kinds of pages, which are their first byte."""
_MOST_LEVELS = 20
"""A deeper tree counts as damaged."""
_LEAST_ROW, _HEAD_OF_LEAF, _HEAD_OF_INTERIOR = 6, 8, 12
"""Least bytes of a row with its entry in the page, and bytes of the head of a page."""
_PADDING = 64
"""Bytes after the pages in memory, so that reading a little beyond the last page needs no check."""
_UTF_8 = 1
"""The encoding of texts, as the head of a database numbers it."""

_NULL, _ZERO, _ONE, _LONGEST_INTEGER = 0, 8, 9, 6
"""Kinds of values: 0 is NULL, 1 to 6 are integers of 1, 2, 3, 4, 6 and 8 bytes, 7 is a float, 8 and 9 are the constants
0 and 1, which take no bytes. From 12 on, even kinds are bytes and odd kinds texts."""
_RESERVED = (10, 11)
"""Kinds that no file has."""
_LEAST_BYTES = 12
"""From this kind on, values are bytes or texts; their length is (kind - 12) // 2."""
_SHIFTS = np.array([0, 56, 48, 40, 32, 16, 0, 0, 0, 0], np.int64)
"""By kind: number of bits by which the first eight bytes of an integer are shifted right to get its signed value."""
_WIDTHS = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0, *((kind - 12) >> 1 for kind in range(12, 128))], np.int64)
"""By kind: bytes of a value, for the kinds that one byte can hold."""
_CONSTANTS = {_NULL: UNKNOWN, _ZERO: 0, _ONE: 1}
"""Kinds whose value is known without reading it."""

Bytes = NDArray[np.uint8]
Kinds = NDArray[Any]
"""The kind of a column's value in each row: uint8, or int64 if one byte cannot hold some of them."""


class UnusualPagesError(Exception):
    """SQLite must read the rest of a table: its pages are damaged, or hold something that is not decoded here."""


class TablePages:
    """The pages of one table.

    Args:
        path: The database; a journal beside it is not applied.
        root: Number of the table's first page, the root of its tree.

    Raises:
        UnusualPagesError: The pages cannot be found.
    """

    def __init__(self, path: Path, root: int) -> None:
        self._path, self._root = path, root

    def batches(self, columns: Sequence[int]) -> Iterator[PageRows]:
        """Yield the rows of the table in batches, in their order.

        Args:
            columns: Positions of the columns that will be asked for.

        Raises:
            UnusualPagesError: SQLite must read the rows that were not yielded.
        """
        with self._path.open("rb", buffering=0) as file:
            head = _read_head(file)
            leaves = _find_leaves(file, head, self._root)
            most = max(1, BATCH_BYTES // head.page_bytes)
            buffer = np.zeros(most * head.page_bytes + _PADDING, np.uint8)
            for at in range(0, len(leaves), most):
                data = _read_pages(file, head, leaves[at : at + most], buffer)
                rows = PageRows(data, head, columns, may_be_empty=len(leaves) == 1)
                if len(rows):
                    yield rows


class _Head(NamedTuple):
    """What the head of a database tells: bytes of a page, used bytes of a page, number of pages, encoding of texts."""

    page_bytes: int
    used_bytes: int
    pages: int
    encoding: int


def _read_head(file: BinaryIO) -> _Head:
    """Read the head of a database, its first 100 bytes; UnusualPagesError if it is damaged."""
    head = file.read(100)
    if len(head) < 100:
        raise UnusualPagesError

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(head[at : at + size], "big")

    page_bytes = number(16, 2)
    page_bytes = 1 << 16 if page_bytes == 1 else page_bytes  # 65536 does not fit into two bytes
    if page_bytes < 512 or page_bytes & (page_bytes - 1):
        raise UnusualPagesError
    held = file.seek(0, 2) // page_bytes
    # The number of pages counts if two counters of changes agree: old releases change one of them and count no pages.
    told = number(28) if number(24) == number(92) else 0
    if told > held:
        raise UnusualPagesError
    return _Head(page_bytes, page_bytes - head[20], told or held, number(56))


def _read_pages(file: BinaryIO, head: _Head, pages: Ints, buffer: Bytes | None = None) -> Bytes:
    """Return the bytes of pages, one page after another, and ``_PADDING`` more bytes.

    Pages that follow each other in the file are read at once.

    Args:
        file: The database.
        head: Its head.
        pages: Numbers of the pages, which count from 1.
        buffer: Memory for the result; ``None`` to take new memory.
    """
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
    """Return the numbers of the leaves of a table, in the order of their rows; ``root`` is the table's first page.

    It goes down the tree level by level. All leaves are on one level.
    """
    level = used = np.array([root], np.int64)
    for _ in range(_MOST_LEVELS):
        ordered = np.sort(used)  # no page may be used twice, be the first page, or lie beyond the file
        if np.any(ordered[1:] == ordered[:-1]) or ordered[0] < 2 or ordered[-1] > head.pages:
            break
        if _read_pages(file, head, level[:1])[0] == _LEAF:
            return level
        level = _children(_read_pages(file, head, level), head)
        used = np.concatenate([used, level])
    raise UnusualPagesError


def _children(data: Bytes, head: _Head) -> Ints:
    """Return the numbers of the pages below interior pages, in order: one in each entry, and one more per page.

    ``data`` holds the interior pages. The number of the last page below is in the head of a page, not in an entry.
    """
    base, count, row = _find_rows(data, head, _INTERIOR, _HEAD_OF_INTERIOR)
    last = np.cumsum(count + 1) - 1
    found = np.empty(len(row) + len(base), np.int64)
    is_last = np.zeros(len(found), np.bool_)
    is_last[last] = True
    found[last] = _number(data, base + 8, 4)
    found[~is_last] = _number(data, row, 4)
    return found


def _find_rows(data: Bytes, head: _Head, kind: int, head_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Return where each page begins in ``data``, its number of rows, and where each row of all pages begins.

    Args:
        data: The pages, and padding.
        head: Head of the database.
        kind: Kind that all the pages must have.
        head_bytes: Bytes of the head of such a page; the positions of its rows follow.
    """
    base = np.arange(0, len(data) - _PADDING, head.page_bytes)
    count = _number(data, base + 3, 2)
    if np.any(data[base] != kind) or np.any(head_bytes + _LEAST_ROW * count > head.page_bytes):
        raise UnusualPagesError
    pages = data[: len(data) - _PADDING].reshape(len(base), head.page_bytes)
    # Read as many positions from each page as the fullest page has, and keep those that the page has.
    most = int(count.max())
    row = pages[:, head_bytes : head_bytes + 2 * most].copy().view(">u2") + base[:, None]
    return base, count, row[np.arange(most) < count[:, None]]


def _number(data: Bytes, at: Ints, size: int) -> Ints:
    """Return the unsigned numbers of ``size`` bytes that begin at the positions ``at``."""
    found = np.zeros(len(at), np.int64)
    for byte in range(size):
        found <<= 8
        found |= data.take(at + byte, mode="clip")
    return found


class _Value(NamedTuple):
    """Where the values of a column are in the bytes of some pages.

    Attributes:
        kind: The kind of the value in each row, or one kind for all rows.
        at, more: The value of a row begins at its ``at`` plus ``more``, which is the same for all rows.
    """

    kind: Kinds | int
    at: Ints
    more: int


class PageRows:
    """The rows of some leaves; ``len`` is their number. Columns are given by their positions in the table.

    Args:
        data: The leaves, and padding.
        head: Head of the database.
        columns: The columns that can be asked for.
        may_be_empty: Whether a leaf may have no row, as the only one of a table without rows.

    Raises:
        UnusualPagesError: A row is damaged, goes on in other pages, or lacks a column; or a leaf lacks its rows.
    """

    def __init__(self, data: Bytes, head: _Head, columns: Sequence[int], *, may_be_empty: bool) -> None:
        """Find where each row, its record and the values of the columns begin; see the class for the parameters."""
        self._data, self._encoding = data, head.encoding
        base, count, row = _find_rows(data, head, _LEAF, _HEAD_OF_LEAF)
        if not may_be_empty and not count.all():
            raise UnusualPagesError
        self._count = len(row)
        self._values: dict[int, _Value] = {}
        if not self._count:
            return
        # A row is the size of its record (the payload), the number of the row, and the record.
        payload, record = _skip_size(data, row)
        record = _skip_number(data, record)
        end = record + payload
        if payload.max() > head.used_bytes - 35 or np.any(end > np.repeat(base + head.used_bytes, count)):
            raise UnusualPagesError  # longer records go on in other pages
        header = data.take(record, mode="clip")  # a record begins with the size of its header
        if header.max() >= 128:
            raise UnusualPagesError
        self._find_values(record, record + header, end, columns)

    def __len__(self) -> int:
        return self._count

    def _find_values(self, record: Ints, body: Ints, end: Ints, columns: Sequence[int]) -> None:
        """Find where the values of some columns are in each row.

        It goes through the kinds in the headers of all records, column by column, and adds up the lengths of the values
        on the way. As long as a length is the same in all rows, a single number is added and no array.

        Args:
            record: Where each record begins.
            body: Where the values of each record begin.
            end: Where each record ends.
            columns: The columns.
        """
        # In each row the next kind is at kinds + next_kind, and the next value at of_values + values.
        kinds, next_kind, of_values, values = record, 1, body, 0
        for column in range(max(columns) + 1):
            found: Kinds = self._data.take(kinds + next_kind, mode="clip")
            next_kind += 1
            low, high = int(found.min()), int(found.max())
            # The length of the values: an array if it differs between rows.
            width: Ints | int
            if high >= 128:  # kinds of two bytes, for long texts
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
        after_kind, after_value = kinds + next_kind, of_values + values
        if np.any(after_kind > body) or np.any(after_value > end):
            raise UnusualPagesError  # a row with fewer columns, added to a table that had rows
        if np.any((after_kind == body) & (after_value != end)):
            raise UnusualPagesError  # a damaged row: its values do not fill its record

    def _long_kinds(self, kind: Kinds, after: Ints) -> tuple[Kinds, Mask]:
        """Return the kinds of a column if some take two bytes, and which rows' kinds do.

        Args:
            kind: First byte of each kind.
            after: Position of the byte after it.
        """
        is_long: Mask = kind >= 128
        low = self._data.take(after, mode="clip")
        if np.any(is_long & (low >= 128)):
            raise UnusualPagesError
        return np.where(is_long, (kind.astype(np.int64) & 127) << 7 | low, kind), is_long

    def is_null(self, column: int) -> Mask:
        """Return a mask of the rows that hold NULL in a column."""
        kind = self._values[column].kind
        return np.full(self._count, kind == _NULL) if isinstance(kind, int) else kind == _NULL  # no reserved kinds

    def integers(self, column: int, wanted: Mask | None = None) -> Ints:
        """Return a column of integers, with ``UNKNOWN`` for NULL. If all rows hold the same constant, it is read-only.

        Args:
            column: The column.
            wanted: The rows whose values are used; in the other rows the result may hold anything. ``None``: all rows.

        Raises:
            UnusualPagesError: A wanted row holds neither an integer nor NULL.
        """
        kind, at, more = self._values[column]
        if isinstance(kind, int):  # the same kind in all rows
            if kind in _CONSTANTS:
                return np.broadcast_to(np.int64(_CONSTANTS[kind]), self._count)
            if kind > _LONGEST_INTEGER:
                if wanted is None or wanted.any():
                    raise UnusualPagesError
                return np.broadcast_to(np.int64(UNKNOWN), self._count)
            return self._big_endian(at, more) >> int(_SHIFTS[kind])
        # The kind differs between rows: read all as integers, then put in the constants.
        is_other = (kind > _LONGEST_INTEGER) & (kind != _ZERO) & (kind != _ONE)
        if np.any(is_other if wanted is None else is_other & wanted):
            raise UnusualPagesError
        found = self._big_endian(at, more) >> _SHIFTS.take(kind, mode="clip")
        for constant, value in _CONSTANTS.items():
            found[kind == constant] = value
        return found

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        """All bytes as numbers of eight bytes; the files are big-endian."""
        return self._data.view(">u8").astype(np.uint64)

    def _big_endian(self, at: Ints, more: int) -> Ints:
        """Return the eight bytes from each position ``at + more`` on, as a signed big-endian number.

        They may lie in two words: the number is the end of the one and the beginning of the next.
        """
        at = at + more
        word, bits = at >> 3, ((at & 7) << 3).view(np.uint64)
        high, low = (self._words.take(one, mode="clip") for one in (word, word + 1))
        high <<= bits
        low >>= np.uint64(1)  # in two parts, since a processor does not shift by 64 bits
        low >>= np.uint64(63) - bits
        high |= low
        return high.view(np.int64)

    def texts(self, column: int, wanted: Ints) -> tuple[Ints, list[bytes]]:
        """Return for each wanted row an index into the distinct texts, and these texts; an empty text stands for NULL.

        A text ends at its first zero byte. ``wanted`` holds the numbers of the rows.

        Raises:
            UnusualPagesError: A wanted value is a number, texts are not in UTF-8, or rows share the bytes of texts.
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
    """Return the size of each row's record, and the position after it; ``at`` is where the rows begin.

    UnusualPagesError if a size takes more than two bytes.
    """
    size = data.take(at, mode="clip").astype(np.int64)
    if size.max() < 128:
        return size, at + 1
    is_long, low = size >= 128, data.take(at + 1, mode="clip")
    if np.any(is_long & (low >= 128)):
        raise UnusualPagesError
    return np.where(is_long, (size & 127) << 7 | low, size), at + 1 + is_long


def _skip_number(data: Bytes, at: Ints) -> Ints:
    """Return the positions after the numbers at positions ``at``.

    A number ends with its first byte without the highest bit, or with its ninth byte.
    """
    goes_on = data.take(at, mode="clip") >= 128
    for _ in range(8):
        if not goes_on.any():
            break
        at = at + goes_on
        goes_on &= data.take(at, mode="clip") >= 128
    return at + 1
