"""Writes files so that a file is either complete or unchanged, and protects the files that are only read."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2s
from pathlib import Path

from ddp_prof.errors import TraceError
from ddp_prof.file_kinds import REPORT_HEAD_BYTES, is_report, is_sqlite

_PROTECTED: list[dict[str | tuple[int, int], Path]] = []
"""The protected files of each :func:`protect_files` in use, by all of their keys (see :func:`_keys`)."""


@contextmanager
def protect_files(files: Iterable[Path]) -> Iterator[None]:
    """Return a context in which :func:`atomic_write` refuses these files, under any name or link.

    If one of them is a folder, files in it are refused, too. A file that does not exist cannot be created.
    """
    keys = {key: file for file in files for key in _keys(file)}
    _PROTECTED.append(keys)
    try:
        yield
    finally:
        _PROTECTED.remove(keys)


def refuse_protected(path: Path) -> None:
    """Raise TraceError if ``path`` is protected, or if the file there is a report of nsys or an SQLite database."""
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        for key in _keys(place):
            if found := next((keys[key] for keys in _PROTECTED if key in keys), None):
                relation = "is" if place == real else "would lie in"
                raise TraceError(path, f"it {relation} {found}, which is only read", "write to another place")
    if not real.is_file():
        return
    with real.open("rb") as file:
        head = file.read(REPORT_HEAD_BYTES)
    if is_sqlite(head) or is_report(head):
        raise TraceError(path, "a capture or a database is there", "write to another place, or move it away first")


def _keys(path: Path) -> Iterator[str | tuple[int, int]]:
    """Yield what all paths of one file have in common: the path without links and, if the file exists, its inode."""
    yield os.path.realpath(path)
    with suppress(OSError):
        status = path.stat()
        yield status.st_dev, status.st_ino


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Return a context that gives the path of a new file to write; at the end that file replaces ``path``.

    If the block fails, the new file is removed and ``path`` is unchanged. Missing folders of ``path`` are created. For
    a device, a pipe or ``/dev/stdout`` the given path is ``path`` itself. Each process writes a file of its own, so if
    two processes write the same path, the last one wins. Unfinished files of processes that have died are removed.

    Raises:
        OSError: Writing failed, for example because the disk is full; the error names ``path``.
        TraceError: ``path`` is protected, a capture or a database is there, or it is a link into a missing folder.
    """
    refuse_protected(path)
    if is_stream(path):
        with _naming(path):
            yield path
        return
    # If the path is a link, the file that it leads to is replaced and not the link.
    real = Path(os.path.realpath(path))
    if path.is_symlink():
        with suppress(FileNotFoundError):
            path.stat()  # refuses links that lead to each other
        if not real.parent.is_dir():
            reason = f"a link to {real}, whose folder does not exist"
            raise TraceError(path, reason, "make that folder, or remove the link")
    partial = partial_path(real)
    try:
        with _naming(path, partial):
            real.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(real)
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def _naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Make errors of the system in the block name ``path`` if they name no file or the unfinished file ``partial``."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in {None, str(path), str(partial)}:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_stream(path: Path) -> bool:
    """Whether a path must be written directly: it is a device, a pipe, or a file that the shell has opened.

    A path such as ``/dev/stdout`` or ``/dev/fd/63`` leads to a link of ``/proc`` whose target is not the name of a
    file: ``pipe:[4711]``, or a file to which the shell appends and which must not be replaced.
    """
    if path.exists() and not path.is_file():
        return not path.is_dir()
    # Follow the links one by one, until one lies in a folder of open files.
    place = path
    for _ in range(_MOST_LINKS):
        if re.fullmatch(r"/proc/[^/]+(/task/[^/]+)?/fd|/dev/fd", os.path.realpath(place.parent)):
            return True
        if not place.is_symlink():
            return False
        place = place.parent / place.readlink()
    return False


_MOST_LINKS = 40
"""The number of links that the system follows before it gives up."""
_LONGEST_NAME = 255
"""The most bytes that a file's name may have on all usual file systems."""


def partial_path(real: Path) -> Path:
    """Return the path at which this process writes the file ``real`` until it is complete.

    Unfinished files that dead processes of this host have left for ``real`` are removed. The name holds the process and
    its host, since hosts may share the folder: ``.name.4711@host.partial``.
    """
    # A digest of the name if the name would be too long.
    digest = blake2s(os.fsencode(real.name), digest_size=8).hexdigest()
    ending = f".{os.getpid()}@{socket.gethostname()}.partial"
    fits = len(os.fsencode(f".{real.name}{ending}")) <= _LONGEST_NAME
    own = f".{real.name if fits else digest}{ending}"
    # Remove what this pattern finds: an older version wrote no host into the name.
    written = re.compile(rf"\.(?:{re.escape(real.name)}|{digest})\.(\d{{1,9}})(?:@(.*))?\.partial", re.DOTALL)
    with suppress(OSError):
        for entry in list(os.scandir(real.parent)):
            found = written.fullmatch(entry.name)
            is_here = found and found[2] in (None, socket.gethostname())
            if found and is_here and entry.name != own and not _is_alive(int(found[1])):
                _remove(Path(entry.path))
    return real.with_name(own)


def _is_alive(process: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(process, 0)  # signal 0 is not sent, only checked
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; errors are ignored."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def is_file(path: Path) -> bool:
    """Whether a path is a file. False, not an error, if its name is too long, as it may be after adding a suffix."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
