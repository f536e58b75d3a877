"""A folder of files that can be made again: bounded in size, in the place where the system keeps such files.

Nothing depends on it: where it cannot be written or read, its user does without.
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
"""Environment variable with the folder, or with one of ``OFF``."""
OFF = ("0", "off")
MOST_BYTES, MOST_SHARE_OF_FREE = 5 * 10**9, 10
"""The files take at most so many bytes, and at most one part in so many of what would be free without them."""
COLUMNS, RESULTS = ".arrow", ".results"
"""Suffixes of files with the columns of a trace, and with what was measured of it."""
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}(?:\.arrow|\.results)")
_UNFINISHED = re.compile(rf"\.{_NAME.pattern}\..*\.partial")
_ABANDONED_S = 3600
"""An unfinished file that was not written to for so long belongs to a process that has ended."""


def find_cache_folder() -> Path | None:
    """Return the folder of the cache, which may not exist; ``None`` if it is switched off, or the user has no home."""
    if os.environ.get(VARIABLE, "").lower() in OFF:
        return None
    with suppress(RuntimeError, OSError):  # no home is known, or the working directory is gone
        folder = _named_folder()
        return folder if folder.is_absolute() else None  # a home that is none would be beside the trace
    return None


def _named_folder() -> Path:
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
    """A file of the cache: its size, and when it was last used, in nanoseconds since 1970."""

    path: Path
    bytes: int
    used_ns: int


@dataclass(frozen=True)
class CacheFolder:
    """The files of one folder that are named as this module names them; it never touches others."""

    folder: Path

    def path(self, of: object, state: object, suffix: str) -> Path:
        """Return where the file for something in some state is kept; JSON must be able to hold both."""
        one, other = (blake2b(json.dumps(part, sort_keys=True).encode()).hexdigest() for part in (of, state))
        return self.folder / f"{one[:16]}-{other[:32]}{suffix}"

    def has(self, path: Path) -> bool:
        """Whether a file is there, and can be seen: the home of another user may be closed."""
        return os.path.isfile(path)  # noqa: PTH113 - that of a path raises where it may not look

    def files(self) -> list[Kept]:
        """Return the complete files, the one that was used last at the end."""
        return self._find(_NAME)

    def _find(self, name: re.Pattern[str]) -> list[Kept]:
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
        """Let ``write`` make a file of ``size`` bytes or more that replaces those of other states; whether it is there.

        The files that were not used for longest make room for it. A process that is killed leaves an unfinished file,
        which is no file of the cache and is deleted later.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(path, size):
                return False
            with atomic_write(path) as partial:
                write(partial)
                if not self._make_room(path, partial.stat().st_size):
                    raise OSError(errno.EFBIG, "larger than the cache", str(path))  # so the file is deleted
        except (OSError, TraceError) as error:  # it is full, or cannot be written, or holds the trace itself
            _LOG.info("not kept in the cache: %s", printable(str(error)))
            return False
        return True

    def _make_room(self, path: Path, size: int) -> bool:
        now = time.time()
        for file in self._find(_UNFINISHED):
            if now - file.used_ns / 1e9 > _ABANDONED_S:
                _delete(file.path)
        others = [file for file in self.files() if file.path != path]
        for file in [file for file in others if file.path.name[:17] == path.name[:17]]:
            _delete(file.path)
            others.remove(file)
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
    with suppress(OSError):
        os.utime(path)


def _delete(path: Path) -> None:
    with suppress(OSError):  # gone already; or, on Windows, mapped by another process
        path.unlink()
