"""Leaves ddp_prof's frames out of tracebacks and warnings of a program, because it neither failed nor was warned there.

The functions of this folder that wrap torch's are on the stack of the program, but are of no use to its reader.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_OWN = str(Path(__file__).parent)
"""Folder of the source files whose frames are left out."""
_is_installed = False


def unseen(function: Function) -> Function:
    """Let warnings of what ``function`` calls name the line of the program, not ours; filters see its module, too.

    Python leaves frames out of this whose file has two words in its name, those of its own import.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename} (importlib._bootstrap)")
    return function


def stands_for(original: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator as ``functools.wraps``, for a function that takes the place of torch's: it is unseen, too."""

    def decorate(function: Function) -> Function:
        return wraps(original)(unseen(function))  # type: ignore[return-value]  # wraps returns the function itself

    return decorate


def hide_own_frames() -> None:
    """Leave our frames out of the tracebacks of exceptions that end the program or one of its threads, from now on.

    Tracebacks that the program prints itself are not changed.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    of_program, of_thread = sys.excepthook, threading.excepthook  # called with the cleaned traceback

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Show an exception that ends the program, without our frames; replaces ``sys.excepthook``."""
        _clean_chain(error)
        of_program(kind, error, _without_own(traceback))

    def show_of_thread(args: threading.ExceptHookArgs) -> None:
        """Clean an exception that ends a thread, and show it as before; replaces ``threading.excepthook``."""
        if args.exc_value is not None:
            _clean_chain(args.exc_value)
        cleaned = args.exc_type, args.exc_value, _without_own(args.exc_traceback), args.thread
        of_thread(threading.ExceptHookArgs(cleaned))

    sys.excepthook, threading.excepthook = show, show_of_thread


def _clean_chain(error: BaseException) -> None:
    """Remove our frames from the traceback of an exception, and of the exceptions that it was raised from or during."""
    seen: set[int] = set()  # ids: a chain may have a cycle
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without_own(one.__traceback__)
            rest += [one.__cause__, one.__context__]


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our frames; unchanged if its last frame is ours, because then the fault is ours."""
    kept = []
    entry = traceback
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_OWN):
            kept.append(entry)
        entry = entry.tb_next
    if traceback is None or not kept or _last(traceback) is not kept[-1]:
        return traceback
    for one, following in pairwise(kept):  # link the entries that stay
        one.tb_next = following
    return kept[0]


def _last(traceback: TracebackType) -> TracebackType:
    """Return the innermost entry of a traceback, where the exception was raised."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback
