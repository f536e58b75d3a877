"""Writes the log of a monitor: one line of JSON per measurement, appended to the lines of earlier starts of the job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]


class LogFile:
    """Appends records to a file, and tells whether another running process writes to it.

    Args:
        file: The log; its folder need not exist yet.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._open: int | None = None

    def is_another_job_s(self) -> bool:
        """Try to lock the file for this process; return whether another running process has locked it.

        The lock ends with the process, however that ends.
        """
        if fcntl is None or not self.file.exists():
            return False
        self._reopen()
        assert self._open is not None
        try:
            fcntl.lockf(self._open, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:  # a file system without locks
            return False
        return False

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record as a line of JSON, in one write if possible, so that lines of several processes do not mix.

        Raises:
            OSError: The file cannot be written. If a part of the line was written, the next call ends that line.
        """
        self._reopen()
        assert self._open is not None
        end = os.lseek(self._open, 0, os.SEEK_END)
        is_cut = end > 0 and os.pread(self._open, 1, end - 1) != b"\n"  # a full disk, or a killed process
        line = (b"\n" if is_cut else b"") + json.dumps(record).encode() + b"\n"
        while line:  # os.write may write only a part, and returns its length
            line = line[os.write(self._open, line) :]

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def _reopen(self) -> None:
        """Open the file if it is not open; open it anew if it was removed or replaced while the job ran."""
        if self._open is not None:
            try:
                if os.path.samestat(os.fstat(self._open), self.file.stat()):
                    return
            except OSError:
                pass
            self.close()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._open = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
