"""Work in other threads of this process: NumPy, Arrow and SQLite work outside of Python's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_thread(call: Callable[..., Result], *arguments: object) -> Future[Result]:
    """Call ``call(*arguments)`` in a thread that does not delay the end of the program; return its future.

    ``future.result()`` raises what the call raised.
    """
    future = Future[Result]()
    Thread(target=_complete, args=(future, call, *arguments), daemon=True).start()
    return future


def in_threads(*calls: Callable[[], Any], most: int | None = None) -> list[Future[Any]]:
    """Call functions in their order in a few threads; return their futures, see :func:`in_thread`.

    There are at most ``most`` threads, or as many as cores: more would take longer, since each often waits for Python's
    lock, and then for the system to wake it.
    """
    waiting = deque((Future[Any](), call) for call in calls)
    futures = [future for future, _ in waiting]

    def run() -> None:
        with suppress(IndexError):  # another thread took the last one
            while True:
                _complete(*waiting.popleft())

    for _ in range(min(most or count_cores(), len(calls))):
        Thread(target=run, daemon=True).start()
    return futures


def _complete(future: Future[Result], call: Callable[..., Result], *arguments: object) -> None:
    """Put the result of a call into its future, or its exception."""
    try:
        future.set_result(call(*arguments))
    except BaseException as error:
        future.set_exception(error)
