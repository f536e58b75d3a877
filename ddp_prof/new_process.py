"""How a process of ``multiprocessing`` is started that only runs functions of this package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_main_module() -> Iterator[None]:
    """Let a process that is started here not run the main module of this program.

    By default ``multiprocessing`` runs it in each new process, since functions to call may be in it. A script without
    ``if __name__ == "__main__"`` is then run as a whole by each worker, and nothing is read before these have ended.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # has no file that a new process could run
    try:
        yield
    finally:
        sys.modules["__main__"] = main
