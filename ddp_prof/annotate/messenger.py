"""Calls a function of the program or of an experiment tracker in a thread of its own, so that it may hang.

A function that does not return holds up neither the training nor the other functions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

_MOST_WAITING = 100
"""Most records that wait for a function that does not return; later records are dropped."""


class Messenger:
    """Calls ``function`` with each record, in the order of the records, in its own thread.

    Args:
        function: Takes a record.
        fail: Is called with a record's step and the reason why it was not passed on.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object], fail: Callable[[int, str], None]) -> None:
        self._function, self._fail = function, fail
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if there is none. Call it before the process ends: then Python starts no thread any more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddp_prof.monitor.log", daemon=True)
            self._thread.start()

    def pass_on(self, record: dict[str, Any]) -> None:
        """Queue a record for the function without waiting; if too many wait, call ``fail`` instead."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._fail(record["step"], f"{_MOST_WAITING} records before it are waiting")

    def close(self, patience_s: float) -> None:
        """Wait until all queued records are passed on; give up after ``patience_s`` seconds, twice that at most."""
        if self._thread is not None:
            try:
                self._records.put(None, timeout=patience_s)  # None ends the thread
            except queue.Full:
                return
            self._thread.join(patience_s)
            self._thread = None

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            self._call(record)

    def _call(self, record: dict[str, Any]) -> None:
        """Call the function with a record; if it raises an exception, report that by ``fail``."""
        try:
            self._function(record)
        except Exception as error:
            self._fail(record["step"], f"{type(error).__name__}: {error}")
