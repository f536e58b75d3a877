"""Finds the files that a trace is read from, and tells whether they have changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ddp_prof.atomic_file import is_file
from ddp_prof.file_kinds import REPORT_SUFFIXES
from ddp_prof.ingest.nsys_program import find_nsys, is_exported
from ddp_prof.manifest import manifest_path

_END_BYTES = 1 << 16
"""Number of bytes at each end of a file that are hashed, to tell whether its content has changed."""
_TICK_S = 0.05
"""The modification times of files are at least this exact on the file systems of machines that record traces."""


def files_of(trace: Path) -> Iterator[Path]:
    """Yield the paths of all files that belong to a trace, even if they do not exist.

    They are the trace, its manifest, the files of a folder of tables, and an SQLite export with its journals.
    """
    yield from (trace, manifest_path(trace))
    if trace.is_dir():
        yield from trace.iterdir()
        return
    for export in (trace, trace.with_suffix(".sqlite")):
        yield from (export, *(export.with_name(export.name + side) for side in ("-journal", "-wal", "-shm")))


def file_state(path: Path) -> dict[str, Any]:
    """Return the state of each file of a trace by path; two equal results mean that the trace has not changed.

    The state of a file is its size, times, inode and a hash of its ends; ``None`` if it does not exist. For a report
    without an export, the version of the nsys that would export it is an entry, too.

    A file that was written a moment ago may be written again without a change of its modification time, because that
    is not exact. In this case the function waits for 0.05 s and looks again.
    """
    files = dict.fromkeys(_files_read(path))
    found = {str(file): _state_of(file) for file in files}
    newest_s = max((one["times"][1] for one in found.values() if one), default=0) / 1e9
    if 0 <= time.time() - newest_s < _TICK_S:
        time.sleep(_TICK_S)
        found = {str(file): _state_of(file) for file in files}
    if path.suffix in REPORT_SUFFIXES and is_file(path) and not is_exported(path):
        nsys = find_nsys()  # whose releases export the same report differently
        return {**found, "nsys": nsys and nsys.version}
    return found


def _state_of(file: Path) -> dict[str, Any] | None:
    """Return size, times, inode and a hash of the ends of a file; ``None`` if it cannot be read."""
    try:
        status = file.stat()
        digest = blake2b(digest_size=16)
        if is_file(file):
            with file.open("rb") as opened:
                digest.update(opened.read(_END_BYTES))
                opened.seek(max(0, status.st_size - _END_BYTES))
                digest.update(opened.read(_END_BYTES))
    except OSError:
        return None
    times = [status.st_mtime_ns, status.st_ctime_ns]
    return {"size": status.st_size, "times": times, "inode": [status.st_dev, status.st_ino], "ends": digest.hexdigest()}


def _files_read(path: Path) -> Iterator[Path]:
    """Yield the paths of all files that are read for a trace, or would be read if they existed."""
    yield from files_of(path)
    yield from files_of(path.resolve())  # a journal lies beside the file that a link leads to
    yield from (path.with_suffix(suffix) for suffix in REPORT_SUFFIXES)
