"""Reads and copies files within limits: a file's size may be far more than its data, or more than memory holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ddp_prof.errors import TraceError

_CHUNK = 1 << 20


def data_extents(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield start and end, in bytes, of each stretch of a file that holds data; holes of a sparse file are left out.

    On systems and file systems that do not know holes the whole file counts as data.
    """
    size, at = os.fstat(file.fileno()).st_size, 0
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size
        return
    while at < size:
        try:
            start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        except OSError:  # no data follows, or the file system cannot tell
            return
        yield start, at


def held_bytes(path: Path) -> int:
    """Return how many bytes of a file are data, without its holes: a file of 40 GB may hold nothing."""
    with path.open("rb", buffering=0) as file:
        return sum(end - start for start, end in data_extents(file))


def copy_data(source: Path, target: Path, most: int | None = None) -> None:
    """Copy a file, or its first ``most`` bytes. Its holes stay holes, so the copy takes no more room on the disk."""
    with source.open("rb") as read, target.open("wb") as written:
        size = os.fstat(read.fileno()).st_size
        size = size if most is None else min(size, most)
        written.truncate(size)  # a hole of the whole size, into which the data is written
        for start, end in list(data_extents(read)):
            read.seek(start)
            written.seek(start)
            left = min(end, size) - start
            while left > 0 and (chunk := read.read(min(left, _CHUNK))):
                written.write(chunk)
                left -= len(chunk)


def read_at_most(path: Path, most: int, what: str, hint: str) -> bytes:
    """Return a file's bytes; raise TraceError, with ``hint``, if it has more than ``most`` bytes.

    ``what`` says what kind of file it is, for the message: "a run.json of ddp_prof".
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        size = path.stat().st_size
        raise TraceError(path, f"it has {size:,} bytes, and {what} has at most {most:,}", hint)
    return data


def free_memory() -> int | None:
    """Return the bytes of memory that this process can get without swapping; ``None`` if not known.

    In a container that is what the machine or the container has left, whichever is less.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    of_container = _free_memory_of_container()
    return free if of_container is None or free is None else min(free, of_container)


def _free_memory_of_container() -> int | None:
    """Return the bytes that the limit of the control group (version 2) leaves; ``None`` without a limit.

    Cached pages of files count as free, as the system can drop them.
    """
    folder = Path("/sys/fs/cgroup")
    try:
        most, used = (int((folder / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        rows = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = next((int(value) for name, value in rows if name == "inactive_file"), 0)
    except (OSError, ValueError):  # no such interface, or no limit ("max")
        return None
    return max(0, most - used + cached)
