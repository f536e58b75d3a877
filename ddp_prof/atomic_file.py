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
    """Return a context in which nothing can write to these files, under any name or link, nor into these folders.

    A file need not exist: then it cannot be created.
    """
    keys = {key: file for file in files for key in _keys(file)}
    _PROTECTED.append(keys)
    try:
        yield
    finally:
        _PROTECTED.remove(keys)


def refuse_protected(path: Path) -> None:
    """Raise TraceError if ``path`` is protected, or if a capture or a database is there."""
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
    """Return a context with a new file to write, which replaces ``path`` at the end and is removed if writing fails.

    Missing folders of ``path`` are created. A device or a pipe is written directly. Each process writes a file of its
    own, so if two processes write the same path, the last one wins.

    Raises:
        OSError: Writing failed, for example because the disk is full; the error names ``path``.
        TraceError: ``path`` is protected, or a capture or a database is there.
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
        with suppress(OSError):
            partial.unlink()


def is_file(path: Path) -> bool:
    """Whether it is a file; a path whose name is too long is none, for example a name with a suffix added."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
