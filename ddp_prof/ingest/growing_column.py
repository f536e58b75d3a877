"""A column that grows while a file is read: in memory while it is short, then in a temporary file that is mapped.

So a capture that is larger than the memory can be read: the system writes pages of mapped files out, and reads them
again, as it needs the memory. Where there is no room for the file, the column stays in memory.
"""

from __future__ import annotations

import errno
import mmap
import shutil
import tempfile
from array import array
from contextlib import suppress
from typing import BinaryIO, cast

import numpy as np

from ddp_prof.table import Ints

MOST_ROWS_IN_MEMORY = 1 << 22
LEAST_FREE_BYTES = 1 << 31
"""A disk with less room is not written to: others may need it."""
_CHUNK_ROWS = 1 << 18


def in_order(values: Ints, order: Ints) -> Ints:
    """Return ``values[order]``, in a mapped file where it is long."""
    found = GrowingColumn()
    for at in range(0, len(order), _CHUNK_ROWS):
        found.add(values[order[at : at + _CHUNK_ROWS]])
    return found.values()


class GrowingColumn:
    """Integers of 64 bits that are added batch by batch."""

    def __init__(self) -> None:
        self.rows = 0
        self._memory = array("q")  # grows in place, so that no column is ever held twice
        self._file: BinaryIO | None = None
        self._may_spill = True

    def add(self, values: Ints) -> None:
        added = np.ascontiguousarray(values, np.int64).view(np.uint8).data
        if self._may_spill and self.rows >= MOST_ROWS_IN_MEMORY:
            self._begin_file()
        if self._file is None or not self._write(added):
            self._memory.frombytes(added)
        self.rows += len(values)

    def values(self) -> Ints:
        """Return all values; nothing is to be added afterwards. They can be changed, which changes no file.

        Raises:
            MemoryError: The process may not take as many addresses.
        """
        if self._file is None:
            return np.frombuffer(self._memory, np.int64)
        with self._file as file:
            return _mapped(file, self.rows)

    def _begin_file(self) -> None:
        self._may_spill = False
        with suppress(OSError):  # there is no folder for temporary files
            _require_room()
            self._file = cast("BinaryIO", tempfile.TemporaryFile(prefix="ddp_prof.", buffering=0))  # noqa: SIM115
            held = memoryview(self._memory).cast("B")
            if self._write(held, rows_before=0):
                held.release()
                self._memory = array("q")

    def _write(self, added: memoryview, rows_before: int | None = None) -> bool:
        """Add to the file; if it has no room, take the rows that were there before into memory, and return False."""
        assert self._file
        try:
            while added:
                _require_room()
                added = added[self._file.write(added) :]
        except OSError:
            rows = self.rows if rows_before is None else rows_before
            with self._file as file:
                if rows:
                    self._memory.frombytes(_mapped(file, rows).view(np.uint8).data)
            self._file = None
            return False
        return True


def _require_room() -> None:
    """Raise OSError if a file is to take no more of the disk; asked each time, because many columns grow at once."""
    if shutil.disk_usage(tempfile.gettempdir()).free < LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, "others may need the rest of the disk")


def _mapped(file: BinaryIO, rows: int) -> Ints:
    """Return the first rows of a file, of any length: a call that reads returns 2 GiB at most."""
    try:
        return np.frombuffer(mmap.mmap(file.fileno(), 8 * rows, access=mmap.ACCESS_COPY), np.int64)
    except OSError as error:
        raise MemoryError(str(error)) from error
