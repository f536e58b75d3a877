"""Starts processes of ``multiprocessing`` that run only functions of this package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_main_module() -> Iterator[None]:
    """Keep processes that are started in the block from running the main module of this program.

    By default ``multiprocessing`` runs the main module in each new process, since functions to call may be in it. If it
    is a script without ``if __name__ == "__main__"``, each worker then runs the whole script.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # has no file that a new process could run
    try:
        yield
    finally:
        sys.modules["__main__"] = main
