"""Calls a function of the program, or of a tracker, in a thread of its own: one that hangs holds up nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

_MOST_WAITING = 100
"""Records that wait for a function that does not return; more are left out."""


class Messenger:
    """Passes records on, in their order.

    Args:
        function: Takes a record.
        fail: Is called with a record's step and the reason why it was not passed on.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object], fail: Callable[[int, str], None]) -> None:
        self._function, self._fail = function, fail
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if there is none; not at the end of the process, where Python starts none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddp_prof.monitor.log", daemon=True)
            self._thread.start()

    def pass_on(self, record: dict[str, Any]) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._fail(record["step"], f"{_MOST_WAITING} records before it are waiting")

    def close(self, patience_s: float) -> None:
        """Wait until all is passed on, but no longer than ``patience_s``."""
        if self._thread is not None:
            try:
                self._records.put(None, timeout=patience_s)
            except queue.Full:
                return
            self._thread.join(patience_s)
            self._thread = None

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            self._call(record)

    def _call(self, record: dict[str, Any]) -> None:
        try:
            self._function(record)
        except Exception as error:
            self._fail(record["step"], f"{type(error).__name__}: {error}")
