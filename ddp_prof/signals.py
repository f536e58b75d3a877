"""Handles signals that ask a process to end: the first one ends it, later ones do not interrupt the clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a process to end."""


CLEAN_UP_S = 3.0
"""Seconds after a signal in which further ones do not interrupt the clean-up of a command."""


class Stopped(Exception):  # noqa: N818  # not an error
    """Raised when a signal asks this process to end; ``number`` is the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise :class:`Stopped` in the block if a signal asks this process to end; further such signals are ignored."""
    before = handle_stopping(_raise_stopped)
    try:
        yield
    except Stopped:  # go on ignoring signals, which would interrupt the clean-up
        before = {}
        ignore_stopping()
        raise
    finally:
        handle_signals(before)


def _raise_stopped(number: int, _frame: FrameType | None) -> None:
    """Handle a signal by raising :class:`Stopped`; further signals that ask this process to end do nothing."""
    do_nothing_on_stopping()
    raise Stopped(number)


def handle_stopping(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Call ``handler`` for the signals that ask this process to end; return the former handler of each signal.

    A signal that is ignored stays ignored, such as SIGHUP under nohup, and SIGINT in a background job of a script.
    """
    return {
        number: signal.signal(number, handler) for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN
    }


def handle_signals(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def do_nothing_on_stopping() -> None:
    """Let a function that does nothing handle the signals that ask this process to end; for handlers of signals.

    Python may have noted another signal already and call its handler later. If that is ``SIG_IGN`` by then, Python
    prints a traceback: "Signal 2 ignored due to race condition".
    """
    handle_signals(dict.fromkeys(STOPPING, _do_nothing))


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    pass


def ignore_stopping() -> None:
    """Ignore the signals that ask this process to end, also while Python ends, when its handlers are gone.

    Not for handlers of signals: see :func:`do_nothing_on_stopping`.
    """
    do_nothing_on_stopping()
    handle_signals(dict.fromkeys(STOPPING, signal.SIG_IGN))  # signal.signal first calls the handlers of noted signals


class Interruption:
    """Raises KeyboardInterrupt, with the signal's number as argument, at a signal that asks this process to end.

    Further signals do nothing for :data:`CLEAN_UP_S` seconds; then a signal interrupts what still runs.

    Attributes:
        number: Number of the first signal; ``None`` before. The exception may be lost: Python only prints it if the
            signal comes while a destructor or a callback of a library runs.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._at_s = 0.0

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal; for :func:`handle_stopping`."""
        now_s = time.monotonic()
        if self.number is not None and now_s < self._at_s + CLEAN_UP_S:
            return
        self.number, self._at_s = self.number or number, now_s
        raise KeyboardInterrupt(number)


def wait_for_end(process: subprocess.Popen[Any]) -> None:
    """Wait until a child process has ended, also after a signal has interrupted ``process.wait`` or ``communicate``.

    With a time limit these take a lock just before the block that releases it. If the handler of a signal raises an
    exception in between, the lock stays taken, and another ``process.wait`` would wait for ever.
    """
    if process.returncode is None:
        with suppress(ChildProcessError):  # somebody else has waited for it
            _, status = os.waitpid(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
