"""Waiting in tests: for an event, never for a time. How long a test may take is said once, by pytest-timeout."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(is_so: Callable[[], object]) -> None:
    while not is_so():
        time.sleep(0.02)


def has_ended(noted: Path) -> bool:
    """Whether a process has ended that notes its number in a file; where it had no time for that, it has."""
    number = noted.read_text().strip() if noted.exists() else ""
    return not number or not is_running(int(number))


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False
    return state != "Z"  # of a child of this test nobody may have taken note yet


def ignores(process: int, number: signal.Signals) -> bool:
    """Whether a process that runs ignores a signal."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)  # a bit for each signal; the lowest is that of signal 1
    return bool(mask >> (number - 1) & 1)
