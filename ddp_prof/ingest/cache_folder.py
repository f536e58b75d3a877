"""A cache: a folder of files that can be made again, with a limited size, where the system keeps such files.

It may fail: if the folder cannot be written or read, the caller works without the cache.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ddp_prof.atomic_file import atomic_write
from ddp_prof.errors import TraceError, printable

_LOG = logging.getLogger(__name__)
VARIABLE = "DDP_PROF_CACHE"
"""Environment variable with the path of the folder, or with a value of ``OFF``."""
OFF = ("0", "off")
"""Values that switch the cache off."""
MOST_BYTES, MOST_SHARE_OF_FREE = 5 * 10**9, 10
"""The files take at most 5 GB together, and at most a tenth of the space that is free on the disk without them."""
COLUMNS, RESULTS = ".arrow", ".results"
"""Suffixes of files with the columns of a trace, and of files with results that were measured from a trace."""
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}(?:\.arrow|\.results)")
"""Name of a file: a hash of what it is for, a hash of the state in which that was, and a suffix."""
_UNFINISHED = re.compile(rf"\.{_NAME.pattern}\..*\.partial")
"""Name of a temporary file while it is written."""
_ABANDONED_S = 3600
"""An unfinished file that was not written to for so long belongs to a process that has ended."""


def find_cache_folder() -> Path | None:
    """Return the folder of the cache, which may not exist; ``None`` if it is switched off, or the user has no home."""
    if os.environ.get(VARIABLE, "").lower() in OFF:
        return None
    with suppress(RuntimeError, OSError):  # no home is known, or the working directory is gone
        folder = _named_folder()
        return folder if folder.is_absolute() else None  # a relative home would lie in the working directory
    return None


def _named_folder() -> Path:
    """Return the folder of the environment variable, else the system's folder for caches of this user."""
    if given := os.environ.get(VARIABLE, ""):
        return Path(given).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ddp_prof"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local or Path.home() / "AppData" / "Local") / "ddp_prof" / "Cache"
    given = os.environ.get("XDG_CACHE_HOME", "")  # by the specification a relative path is to be ignored
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "ddp_prof"  # noqa: PTH117


@dataclass(frozen=True)
class Kept:
    """A file of the cache: its path, its size in bytes, and when it was last used, in nanoseconds since 1970."""

    path: Path
    bytes: int
    used_ns: int


@dataclass(frozen=True)
class CacheFolder:
    """The cache in one folder. It never touches files whose names are not as :data:`_NAME` describes them."""

    folder: Path

    def path(self, of: object, state: object, suffix: str) -> Path:
        """Return the path of a file of the cache, whether it exists or not.

        Args:
            of: Names what the file is for, for example a trace; files for other states of it are replaced.
            state: All that the content of the file depends on. JSON must be able to hold both.
            suffix: ``COLUMNS`` or ``RESULTS``.
        """
        one, other = (blake2b(json.dumps(part, sort_keys=True).encode()).hexdigest() for part in (of, state))
        return self.folder / f"{one[:16]}-{other[:32]}{suffix}"

    def has(self, path: Path) -> bool:
        """Return whether a file exists; ``False`` if the folder may not be looked into, like another user's home."""
        return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises PermissionError

    def files(self) -> list[Kept]:
        """Return the complete files; the most recently used file comes last."""
        return self._find(_NAME)

    def _find(self, name: re.Pattern[str]) -> list[Kept]:
        """Return the files of the folder whose names match; the most recently used file comes last."""
        found = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if name.fullmatch(entry.name):
                    with suppress(OSError):  # another process may have deleted it
                        status = entry.stat(follow_symlinks=False)
                        found.append(Kept(Path(entry.path), status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda file: file.used_ns)

    def most_bytes(self) -> int:
        """Return how many bytes the files may take together."""
        # The cache's folder may not exist yet: its nearest parent that does is on the same disk. os.path.exists() is
        # False for a folder without permission and for too long a name, where Path.exists() raises.
        place = next(folder for folder in (self.folder, *self.folder.parents) if os.path.exists(folder))  # noqa: PTH110
        free = shutil.disk_usage(place).free + sum(file.bytes for file in self.files())
        return min(MOST_BYTES, free // MOST_SHARE_OF_FREE)

    def keep(self, path: Path, size: int, write: Callable[[Path], None]) -> bool:
        """Let ``write`` make the file ``path``, and return whether it is in the cache afterwards.

        It replaces the files for other states of the same thing, see :meth:`path`. Files are deleted to make room for
        it, the least recently used first. A process that is killed leaves an unfinished file, which does not count as a
        file of the cache and is deleted later.

        Args:
            path: A result of :meth:`path`.
            size: Least number of bytes that the file will take.
            write: Writes the file to the path that it is given, which is not ``path``.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(path, size):
                return False
            with atomic_write(path) as partial:
                write(partial)
                if not self._make_room(path, partial.stat().st_size):
                    raise OSError(errno.EFBIG, "larger than the cache", str(path))  # so atomic_write deletes it
        except (OSError, TraceError) as error:  # the folder is full, or cannot be written, or holds the trace itself
            _LOG.info("not kept in the cache: %s", printable(str(error)))
            return False
        return True

    def _make_room(self, path: Path, size: int) -> bool:
        """Delete files until ``size`` bytes fit in the cache; return whether they do.

        Deleted are unfinished files of processes that have ended, then the files for other states of what ``path`` is
        for, then the least recently used files.
        """
        # Unfinished files that no process writes any more.
        now = time.time()
        for file in self._find(_UNFINISHED):
            if now - file.used_ns / 1e9 > _ABANDONED_S:
                _delete(file.path)
        others = [file for file in self.files() if file.path != path]
        # The first 16 characters and "-" are the same for all states of a thing.
        for file in [file for file in others if file.path.name[:17] == path.name[:17]]:
            _delete(file.path)
            others.remove(file)
        # The other files, the least recently used first, until there is room.
        most, held = self.most_bytes(), sum(file.bytes for file in others)
        if size > most:
            return False
        for file in others:
            if held + size <= most:
                break
            _delete(file.path)
            held -= file.bytes
        return True

    def clear(self) -> list[Kept]:
        """Delete all files, and return those that could not be deleted."""
        for file in [*self.files(), *self._find(_UNFINISHED)]:
            _delete(file.path)
        return self.files()


def mark_used(path: Path) -> None:
    """Set the time of a file to now, so that it counts as the most recently used one."""
    with suppress(OSError):
        os.utime(path)


def _delete(path: Path) -> None:
    with suppress(OSError):  # gone already; or, on Windows, mapped by another process
        path.unlink()
