"""Reads a trace from the cache if it is there and its files have not changed since; else from its files.

The cache holds the trace as its reader returned it, with its warnings, so results are the same with and without the
cache. A cached trace is valid for one state of the trace's files (their sizes, times and inodes, and a hash of the
first and the last bytes of each) and for one version of the readers' code.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ddp_prof.atomic_file import is_file
from ddp_prof.errors import printable
from ddp_prof.file_kinds import PACKED_SUFFIXES
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.cache_folder import COLUMNS, CacheFolder, find_cache_folder, mark_used
from ddp_prof.ingest.trace_files import file_state
from ddp_prof.manifest import load_manifest, manifest_path
from ddp_prof.trace import Trace

_LOG = logging.getLogger(__name__)

LEAST_BYTES, LEAST_BYTES_PACKED = 1 << 24, 1 << 20
"""Traces of smaller files are not cached: 16 MiB, or 1 MiB for compressed files, which are 10 to 25 times smaller.

From these sizes on, the cache at least halves the time of a second command: on an export of 18 MB it took 0.36 s of
processor time instead of 0.84 s."""
_PACKAGE = Path(__file__).parents[1]

Load = Callable[[Path, ReadOptions], Trace]
"""A function that reads a trace from its files."""


def load_cached(load: Load, path: Path, options: ReadOptions) -> Trace:
    """Return the trace that ``load`` would return: from the cache if it is there; else call ``load`` and cache it.

    Exceptions of ``load`` are not cached. The columns of a trace from the cache are memory-mapped and read-only.
    """
    kept = cache_for(path, options)
    if kept is None:
        return load(path, options)
    state = file_state(path)
    # A trace that was cached with launches serves without them, too: it only holds more.
    for one in dict.fromkeys((options, replace(options, with_launches=True))):
        if found := _find(kept, path, state, one):
            return found if options.with_launches else without_launches(found)
    trace = load(path, options)
    return _keep(kept, trace, path, state, options) or trace


def cache_for(path: Path, options: ReadOptions) -> CacheFolder | None:
    """Return the cache for a trace; ``None`` if it is switched off, or the trace is small."""
    folder = find_cache_folder() if options.use_cache and _is_worth_it(path) else None
    return CacheFolder(folder) if folder else None


def without_launches(trace: Trace) -> Trace:
    """Return the trace without what is read only with launches; ``names`` keeps unused names."""
    return replace(trace, shape_id=None, registers=None, call_details=None)


def _find(
    kept: CacheFolder, path: Path, state: dict[str, Any], options: ReadOptions, *, is_new: bool = False
) -> Trace | None:
    """Return the trace from the cache; ``None`` if it is not there for this state of its files and these options.

    ``is_new``: see :func:`~ddp_prof.ingest.store.read_trace`.
    """
    from ddp_prof.ingest.store import read_trace

    key = _key(path, state, options)
    place = _place(kept, key)
    if not kept.has(place):
        return None
    started = time.perf_counter()
    trace = read_trace(place, key, path, load_manifest(manifest_path(path)), is_new=is_new)
    if trace:
        mark_used(place)
        seconds = time.perf_counter() - started
        _LOG.info("%s: %s in the cache, found in %.2f s", printable(str(path)), place.name, seconds)
    return trace


def _keep(kept: CacheFolder, trace: Trace, path: Path, state: dict[str, Any], options: ReadOptions) -> Trace | None:
    """Write a trace to the cache and return it as read from there; ``None`` if it cannot be cached.

    ``state`` is the state of its files before they were read: if they have changed since, the trace is not cached.
    """
    from ddp_prof.ingest.store import stored_bytes, write_trace

    if file_state(path) != state:
        return None
    key = _key(path, state, options)
    place = _place(kept, key)
    if not kept.keep(place, stored_bytes(trace), lambda target: write_trace(trace, target, key)):
        return None
    return _find(kept, path, state, options, is_new=True)


def _place(kept: CacheFolder, key: dict[str, Any]) -> Path:
    """Return the path in the cache of the trace with this key."""
    of = [key["path"], key["options"]["comm_patterns"]]  # a trace with launches replaces the same trace without them
    return kept.path(of, key, COLUMNS)


def _key(path: Path, state: dict[str, Any], options: ReadOptions) -> dict[str, Any]:
    """Return the key of a cached trace: all that its content depends on.

    It is written into the cached file and compared when the file is read, so it holds only types that JSON gives back
    unchanged.
    """
    read = {"comm_patterns": list(options.comm_patterns), "with_launches": options.with_launches}
    return {"path": os.path.abspath(path), "options": read, "files": state, "code": code_version(READERS)}  # noqa: PTH100


READERS = ("*.py*", "ingest/*.py*")
"""Patterns for the files of the code that reads traces: ``ddp_prof.ingest`` and the modules directly in the package."""


@cache
def code_version(patterns: tuple[str, ...]) -> str:
    """Return a hash of the files of this package that match the patterns, and of the machine's byte order.

    So a change of the code makes cached files invalid without a version number that somebody must change.
    """
    digest = blake2b(sys.byteorder.encode(), digest_size=16)
    for file in sorted({file for pattern in patterns for file in _PACKAGE.glob(pattern)}):
        if file.parent.name != "__pycache__":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_worth_it(path: Path) -> bool:
    """Return whether a trace is large enough to be cached, and is not a copy in one of our temporary folders.

    Such a copy is not there the next time.
    """
    try:
        real = path.absolute()
        # The name decides first: a machine without any folder for temporary files has none to ask for.
        if any(part.startswith("ddp_prof.") for part in real.parts[:-1]) and real.is_relative_to(tempfile.gettempdir()):
            return False
        if path.is_dir():
            return sum(file.stat().st_size for file in path.iterdir()) >= LEAST_BYTES_PACKED
        least = LEAST_BYTES_PACKED if path.suffix in PACKED_SUFFIXES else LEAST_BYTES
        return is_file(path) and path.stat().st_size >= least
    except OSError:  # its reader says what is wrong
        return False
