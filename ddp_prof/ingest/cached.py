"""Reads a trace from the cache if it is there and its files have not changed since; else from its files.

What is kept is the trace as a reader returns it, with its warnings; so everything that is computed from it, is computed
from the same columns. A trace is kept for a state of its files: their sizes, times and inodes, a hash of the first and
the last bytes of each, and the readers' own code.
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
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.cache_folder import COLUMNS, CacheFolder, find_cache_folder, mark_used
from ddp_prof.ingest.nsys_program import REPORT_SUFFIXES
from ddp_prof.ingest.trace_files import file_state
from ddp_prof.manifest import load_manifest, manifest_path
from ddp_prof.trace import Trace

_LOG = logging.getLogger(__name__)

LEAST_BYTES, LEAST_BYTES_PACKED = 1 << 24, 1 << 20
"""Smallest files that are kept. From here on a second command takes half of the first one's time or less: measured on
an export of 18 MB, 0.36 s of processor time instead of 0.84. Packed files are 10 to 25 times smaller."""
_PACKAGE = Path(__file__).parents[1]

Load = Callable[[Path, ReadOptions], Trace]


def load_cached(load: Load, path: Path, options: ReadOptions) -> Trace:
    """Return what ``load`` returns, from the cache where that holds it; else keep it there.

    What ``load`` raises is raised each time. The columns of a trace that is kept are mapped, and read-only.
    """
    kept = cache_for(path, options)
    if kept is None:
        return load(path, options)
    state = file_state(path)
    # With launches more is read, nothing else.
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
    """Leave out what is read with launches only; ``names`` keeps theirs, which nothing refers to."""
    return replace(trace, shape_id=None, registers=None, call_details=None)


def _find(kept: CacheFolder, path: Path, state: dict[str, Any], options: ReadOptions) -> Trace | None:
    from ddp_prof.ingest.store import read_trace

    key = _key(path, state, options)
    place = _place(kept, key)
    if not kept.has(place):
        return None
    started = time.perf_counter()
    trace = read_trace(place, key, path, load_manifest(manifest_path(path)))
    if trace:
        mark_used(place)
        seconds = time.perf_counter() - started
        _LOG.info("%s: %s in the cache, found in %.2f s", printable(str(path)), place.name, seconds)
    return trace


def _keep(kept: CacheFolder, trace: Trace, path: Path, state: dict[str, Any], options: ReadOptions) -> Trace | None:
    """Keep a trace whose files are as they were before they were read; return it as it will be found."""
    from ddp_prof.ingest.store import stored_bytes, write_trace

    if file_state(path) != state:
        return None
    key = _key(path, state, options)
    place = _place(kept, key)
    if not kept.keep(place, stored_bytes(trace), lambda target: write_trace(trace, target, key)):
        return None
    return _find(kept, path, state, options)


def _place(kept: CacheFolder, key: dict[str, Any]) -> Path:
    of = [key["path"], key["options"]["comm_patterns"]]  # so with launches it replaces the one without
    return kept.path(of, key, COLUMNS)


def _key(path: Path, state: dict[str, Any], options: ReadOptions) -> dict[str, Any]:
    """Return what a trace depends on; as JSON returns it, so that it can be compared with what was written."""
    read = {"comm_patterns": list(options.comm_patterns), "with_launches": options.with_launches}
    return {"path": os.path.abspath(path), "options": read, "files": state, "code": code_version(READERS)}  # noqa: PTH100


READERS = ("*.py*", "ingest/*.py*")
"""The code that reads traces: ``ddp_prof.ingest`` and the modules on the ground floor."""


@cache
def code_version(patterns: tuple[str, ...]) -> str:
    """Return a digest of code of this package, so that whoever changes it need not remember to say so."""
    digest = blake2b(sys.byteorder.encode(), digest_size=16)
    for file in sorted({file for pattern in patterns for file in _PACKAGE.glob(pattern)}):
        if file.parent.name != "__pycache__":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_worth_it(path: Path) -> bool:
    """Whether a trace is large, and no copy in a temporary folder of ours, which is not there the next time."""
    try:
        real = path.absolute()
        # The name decides first: a machine without any folder for temporary files has none to ask for.
        if any(part.startswith("ddp_prof.") for part in real.parts[:-1]) and real.is_relative_to(tempfile.gettempdir()):
            return False
        if path.is_dir():
            return sum(file.stat().st_size for file in path.iterdir()) >= LEAST_BYTES_PACKED
        least = LEAST_BYTES_PACKED if path.suffix in {".gz", *REPORT_SUFFIXES} else LEAST_BYTES
        return is_file(path) and path.stat().st_size >= least
    except OSError:  # its reader says what is wrong
        return False
