"""A column that grows while it is read or computed: in memory while it is short, then in a temporary file.

At the end the file is memory-mapped. In this way a capture that is larger than the memory can be read: the system
frees pages of a mapped file when it needs memory, and reads them again later. If the disk has no room for the file, the
column stays in memory.
"""

from __future__ import annotations

import errno
import mmap
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MOST_ROWS_IN_MEMORY = 1 << 20
"""A column with more rows goes to a file, if there is room."""
LEAST_FREE_BYTES = 1 << 31
"""A disk with less free space is not written to: other programs may need it."""
_FEW_ROWS = 1 << 16
"""A column with more rows gets room for all rows that may be in memory; room takes no memory until it is used."""
_PART_ROWS = 1 << 16
"""Number of rows of a long column that are computed at once: few enough that they stay in the processor's cache."""


def in_parts(rows: int, compute: Callable[[slice], Ints]) -> Ints:
    """Return a column of ``rows`` rows that is computed part by part; if it is long, in a memory-mapped file.

    ``compute`` returns the rows in a slice. What it needs beside its result takes the memory of a part only, and stays
    in the processor's cache.
    """
    if rows <= _PART_ROWS:
        return compute(slice(0, rows))
    found = GrowingColumn(rows)
    for at in range(0, rows, _PART_ROWS):
        found.add(compute(slice(at, min(rows, at + _PART_ROWS))))
    return found.values()


def in_file(column: Ints) -> Ints:
    """Return a column that is to be kept; if it is long, in a memory-mapped file."""
    takes_none = not column.strides[0] or isinstance(getattr(column.base, "obj", None), mmap.mmap)
    return column if takes_none or len(column) <= MOST_ROWS_IN_MEMORY else in_parts(len(column), column.__getitem__)


def in_order(values: Ints, order: Ints) -> Ints:
    """Return ``values[order]``; if it is long, in a memory-mapped file."""
    return in_parts(len(order), lambda rows: values[order[rows]])


def filtered(values: Ints, keep: Callable[[Ints], NDArray[np.bool_]]) -> Ints:
    """Return the values that ``keep``, which is called with parts of them, keeps; if they are many, in a file."""
    found = GrowingColumn()
    for at in range(0, len(values), _PART_ROWS):
        part = values[at : at + _PART_ROWS]
        found.add(part[keep(part)])
    return found.values()


def joined(columns: Sequence[Ints]) -> Ints:
    """Return the rows of all columns, one column after another; if they are many, in a memory-mapped file."""
    rows = sum(map(len, columns))
    if rows <= MOST_ROWS_IN_MEMORY:
        return np.concatenate(columns)
    found = GrowingColumn(rows)
    for column in columns:
        for at in range(0, len(column), _PART_ROWS):
            found.add(column[at : at + _PART_ROWS])
    return found.values()


class GrowingColumn:
    """Integers of 64 bits that are added batch by batch.

    Args:
        expected: How many rows will be added, if that is known: a long column is then in its file from the start.
    """

    def __init__(self, expected: int = 0) -> None:
        self.rows = 0
        # The rows, and room for more, which takes no memory until it is used.
        self._memory = np.empty(min(expected, MOST_ROWS_IN_MEMORY), np.int64)
        self._file: BinaryIO | None = None
        self._may_spill = True  # whether it was not tried yet to begin a file
        if expected > MOST_ROWS_IN_MEMORY:
            self._begin_file()

    def add(self, values: Ints) -> None:
        """Add rows at the end."""
        if self._may_spill and self.rows >= MOST_ROWS_IN_MEMORY:
            self._begin_file()
        end = self.rows + len(values)
        if self._file is None or not self._write(np.ascontiguousarray(values, np.int64)):
            if end > len(self._memory):
                # Twice as much; or at once as much as memory may hold, so that a long column is hardly copied.
                room = 2 * len(self._memory)
                room = max(room, MOST_ROWS_IN_MEMORY) if end > _FEW_ROWS else room
                larger = np.empty(max(end, room), np.int64)
                larger[: self.rows] = self._memory[: self.rows]
                self._memory = larger
            self._memory[self.rows : end] = values
        self.rows = end

    def values(self) -> Ints:
        """Return all rows; nothing is to be added afterwards. The array can be written to, which changes no file.

        Raises:
            MemoryError: The limit of the process's address space does not allow the mapping.
        """
        if self._file is None:
            return self._memory[: self.rows]
        with self._file as file:
            return _mapped(file, self.rows)

    def _begin_file(self) -> None:
        """Move the rows into a temporary file, if there is room; this is tried once."""
        self._may_spill = False
        with suppress(OSError):  # there is no folder for temporary files
            _require_room()
            self._file = cast("BinaryIO", tempfile.TemporaryFile(prefix="ddp_prof.", buffering=0))  # noqa: SIM115
            if self._write(self._memory[: self.rows], rows_before=0):
                self._memory = np.empty(0, np.int64)

    def _write(self, values: Ints, rows_before: int | None = None) -> bool:
        """Append rows to the file and return ``True``; if there is no room, give up the file and return ``False``.

        Giving up the file means that the rows in it (``rows_before``, or all rows by default) are read into memory.
        """
        assert self._file
        try:
            added = values.view(np.uint8).data
            while added:  # a write may take only a part of the bytes
                _require_room()
                added = added[self._file.write(added) :]
        except OSError:
            rows = self.rows if rows_before is None else rows_before
            with self._file as file:
                if rows:
                    self._memory = _mapped(file, rows).copy()
            self._file = None
            return False
        return True


def _require_room() -> None:
    """Raise OSError if the disk has too little free space; called for each write, because many columns grow at once."""
    if shutil.disk_usage(tempfile.gettempdir()).free < LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, "others may need the rest of the disk")


def _mapped(file: BinaryIO, rows: int) -> Ints:
    """Return the first ``rows`` rows of a file, memory-mapped: a single read would return 2 GiB at most."""
    try:
        return np.frombuffer(mmap.mmap(file.fileno(), 8 * rows, access=mmap.ACCESS_COPY), np.int64)
    except OSError as error:
        raise MemoryError(str(error)) from error
