"""The errors of this package: each message says on one printable line what is wrong, where, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import ClassVar

_LONGEST_REASON = 400
MORE_MEMORY = "free some, take a larger machine, or leave steps of the capture out"


class DdpProfError(Exception):
    """Base of all errors that a user can act on. Programs show it in one line and exit with ``exit_code``."""

    exit_code: ClassVar[int] = 1


class TraceError(DdpProfError):
    """A trace that cannot be read or measured: the file, what is wrong with it, what the user can do about it."""

    def __init__(self, path: Path | str, reason: str, hint: str) -> None:
        super().__init__(path, reason, hint)
        self.path = Path(path)
        self.reason = reason
        self.hint = hint

    def __str__(self) -> str:
        reason, hint = (" ".join(text.split()) for text in (self.reason, self.hint))
        shown = reason if len(reason) <= _LONGEST_REASON else reason[: _LONGEST_REASON - 3] + "..."
        return printable(f"{shown_path(self.path)}: {shown}: {hint}")


@contextmanager
def naming_limits(path: Path) -> Iterator[None]:
    """Raise a TraceError for ``path``, a trace, if the block lacks memory or recurses too deep; other errors pass."""
    try:
        yield
    except RecursionError as error:
        raise TraceError(path, "something in it is nested too deep", "record it again") from error
    except (MemoryError, *MAY_LACK_MEMORY) as error:
        if not lacks_memory(error):
            raise
        raise TraceError(path, "there is not enough memory", MORE_MEMORY) from error


MAY_LACK_MEMORY = (ImportError, RuntimeError)
"""Errors besides MemoryError whose cause may be a lack of memory; :func:`lacks_memory` tells."""
_NO_MEMORY = re.compile(r"failed to map segment|[Cc]annot allocate memory|can't start new thread")


def lacks_memory(error: BaseException) -> bool:
    """Whether the cause of an error is a lack of memory, also when a library could not be loaded or a thread started.

    False for errors of this package.
    """
    if isinstance(error, DdpProfError):  # its message says what is wrong
        return False
    return isinstance(error, MemoryError) or bool(_NO_MEMORY.search(str(error)))


class InterruptedReadingError(TraceError):
    """Reading many traces was interrupted; ``path`` is the first trace that was not read. What was read is shown."""

    def __init__(self, path: Path, unread: int, traces: int) -> None:
        super().__init__(path, f"interrupted: {unread} of {traces} traces were not read", "run the command again")


class CommunicationError(DdpProfError):
    """A collective failed, usually because a peer ended; the message names the rank, the collective and the cause."""


class UsageError(DdpProfError):
    """An invalid setting or argument."""

    exit_code = 2


class WorkloadError(DdpProfError):
    """The workload cannot run with these settings: fewer GPUs than ranks, a missing backend."""


class OutOfMemoryError(WorkloadError):
    """A rank needs more memory than its device, the machine or a limit gives it."""

    exit_code = 4  # 3 is the exit code of a gate that is not met


def shell_quote(name: object) -> str:
    r"""Return a name quoted for a shell, on one line: ``'a b'``, or ``$'a\x0ab'`` if it holds control characters."""
    text = str(name)
    if printable(text) == text:
        return quote(text)
    written = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{''.join(written)}'"


STDIN = "ddp_prof.stdin."
"""How the name of the temporary folder begins that holds what came from stdin."""


def is_from_stdin(path: object) -> bool:
    """Whether a trace is the temporary file of what came from stdin."""
    return Path(str(path)).parent.name.startswith(STDIN)


def shown_path(path: object) -> str:
    """Return the path of a trace as it was given: ``-`` for stdin, whose temporary file has another name each time."""
    return "-" if is_from_stdin(path) else str(path)


def shell_path(path: object) -> str:
    """Return the path of a trace quoted for a shell, as an argument that stands for this trace in another command.

    A name that begins with ``-`` would be an option, so ``./`` comes before it. What came from stdin is ``-``: its
    temporary file is gone when the command is run.
    """
    text = str(path)
    if is_from_stdin(path):
        return "-"
    return shell_quote(f"./{text}" if text.startswith("-") else text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


_NOT_PRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters of ASCII and Latin-1, line separators, marks that reverse the direction, lone surrogates."""


def printable(text: str) -> str:
    r"""Return the text on one line, with ``\x1b``, ``\n`` or ``\u202e`` in place of characters that control a terminal.

    All text of a trace that is printed to a terminal, in an error message or as CSV passes through here. JSON escapes
    such characters itself.
    """
    return _NOT_PRINTABLE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """Return the text with each of its lines made :func:`printable`; the lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))
