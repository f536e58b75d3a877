"""How glibc keeps the memory of this process. Other C libraries are left as they are."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

_M_ARENA_MAX, _M_MMAP_MAX, _M_TRIM_THRESHOLD = -8, -4, -1
"""Numbers of parameters of ``mallopt``: most heaps, most arrays outside of a heap, most free memory that is kept."""


def share_one_heap() -> None:
    """Let all threads of this program, and Arrow, take memory from one heap.

    By default glibc has a heap for each thread, and Arrow a heap of its own. Memory that is free in one heap is of no
    use to the others: reading an export by several threads took a fifth more memory, and no less time. By default it
    also returns the memory of each large array at once, and the system has to clear memory for the next one.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
                ctypes.CDLL(None).mallopt(parameter, value)


def return_free_memory() -> None:
    """Return all free memory of the heap to the system, also what lies between arrays that are in use."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
