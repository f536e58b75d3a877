"""Atomic writing of files, and protection of the files that are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_prof.errors import TraceError

_PROTECTED: list[dict[str | tuple[int, int], Path]] = []


@contextmanager
def protect_files(files: Iterable[Path]) -> Iterator[None]:
    """Context in which nothing is written to these files, by any name or link, nor into folders among them.

    They need not be there: what would be taken for one of them is not made, either.
    """
    keys = {key: file for file in files for key in _keys(file)}
    _PROTECTED.append(keys)
    try:
        yield
    finally:
        _PROTECTED.remove(keys)


def refuse_protected(path: Path) -> None:
    """Refuse, by a TraceError, to write a protected file or to replace a capture."""
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        for key in _keys(place):
            if found := next((keys[key] for keys in _PROTECTED if key in keys), None):
                relation = "is" if place == real else "would lie in"
                raise TraceError(path, f"it {relation} {found}, which is only read", "write to another place")
    if not real.is_file():
        return
    with real.open("rb") as file:
        head = file.read(4096)
    if head.startswith(b"SQLite format 3\0") or b"Profiler Report" in head:
        raise TraceError(path, "a capture or a database is there", "write to another place, or move it away first")


def _keys(path: Path) -> Iterator[str | tuple[int, int]]:
    yield os.path.realpath(path)
    with suppress(OSError):
        status = path.stat()
        yield status.st_dev, status.st_ino


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A new file to write: at the end it takes the place of ``path``, and where writing fails it is removed.

    The folders of ``path`` are made; a device or a pipe is written as it is. Each process has a file of its own, so of
    two that write one path at once the last one wins.

    Raises:
        OSError: The disk is full, say; it names ``path``.
        TraceError: What is read is there.
    """
    refuse_protected(path)
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        yield real
        return
    partial = real.with_name(f".{real.name}.{os.getpid()}.partial")
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(real)
    except OSError as error:
        if error.errno is None or error.filename not in {None, str(partial)}:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Whether it is a file; one whose name is too long is not there, as is what would lie beside a long name."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
