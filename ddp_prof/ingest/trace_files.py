"""The files that a trace is read from, and what tells whether they have changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ddp_prof.atomic_file import is_file
from ddp_prof.ingest.nsys_program import REPORT_SUFFIXES, find_nsys, is_exported
from ddp_prof.manifest import manifest_path

_END_BYTES = 1 << 16
"""So many bytes at both ends of a file tell its content."""
_TICK_S = 0.05
"""Times of files are this exact at least, on file systems of hosts that record."""


def files_of(trace: Path) -> Iterator[Path]:
    """Yield all files that belong to a trace, including files that would be read with it if they existed."""
    yield from (trace, manifest_path(trace))
    if trace.is_dir():
        yield from trace.iterdir()
        return
    for export in (trace, trace.with_suffix(".sqlite")):
        yield from (export, *(export.with_name(export.name + side) for side in ("-journal", "-wal", "-shm")))


def file_state(path: Path) -> dict[str, Any]:
    """Return what tells whether a trace's files have changed, by name; ``None`` for a file that is not there.

    Of a report without its export, the version of the nsys that would export it is a part.

    A file that was written a moment ago may be written again at what its file system calls the same time: so this waits
    until it is not.
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
    """Yield the files that a trace is read from, and those that would be read with it if they existed."""
    yield from files_of(path)
    yield from files_of(path.resolve())  # a journal lies beside the file that a link leads to
    yield from (path.with_suffix(suffix) for suffix in REPORT_SUFFIXES)
