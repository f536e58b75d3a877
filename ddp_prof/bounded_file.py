"""How much a file really holds, and how much of it can be read: sizes of files may lie, and memory ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ddp_prof.errors import TraceError

_CHUNK = 1 << 20


def data_extents(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield start and end, in bytes, of each stretch of a file that holds data; holes of a sparse file are left out.

    Systems and file systems that know of no holes say that all of a file is data.
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
    """Return how many bytes of a file are data: a file of 40 GB may hold nothing."""
    with path.open("rb", buffering=0) as file:
        return sum(end - start for start, end in data_extents(file))


def copy_data(source: Path, target: Path, most: int | None = None) -> None:
    """Copy a file, or its first ``most`` bytes; its holes stay holes, so the copy takes no more room than it."""
    with source.open("rb") as read, target.open("wb") as written:
        size = os.fstat(read.fileno()).st_size
        size = size if most is None else min(size, most)
        written.truncate(size)
        for start, end in list(data_extents(read)):
            read.seek(start)
            written.seek(start)
            left = min(end, size) - start
            while left > 0 and (chunk := read.read(min(left, _CHUNK))):
                written.write(chunk)
                left -= len(chunk)


def read_at_most(path: Path, most: int, what: str, hint: str) -> bytes:
    """Return a file's bytes; raise TraceError if it is larger than ``most``, which ``what`` never is."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        size = path.stat().st_size
        raise TraceError(path, f"it has {size:,} bytes, and {what} has at most {most:,}", hint)
    return data


def free_memory() -> int | None:
    """Bytes of memory available without swapping, to the machine and to its container; ``None`` if not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    of_container = _free_memory_of_container()
    return free if of_container is None or free is None else min(free, of_container)


def _free_memory_of_container() -> int | None:
    """What the control group leaves, by version 2 of its interface; pages of files that were read can be dropped."""
    folder = Path("/sys/fs/cgroup")
    try:
        most, used = (int((folder / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        rows = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = next((int(value) for name, value in rows if name == "inactive_file"), 0)
    except (OSError, ValueError):  # no such interface, or no limit ("max")
        return None
    return max(0, most - used + cached)
