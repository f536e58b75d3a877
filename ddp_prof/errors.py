"""The errors of this package: each says on one printable line what is wrong, where, and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

_LONGEST_REASON = 400


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
        return printable(f"{self.path}: {shown}: {hint}")


class InterruptedReadingError(TraceError):
    """Reading many traces was interrupted; ``path`` is the first one that was not read. What was read is shown."""

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

    exit_code = 4  # 3 is that of a gate that is not met


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


_NOT_PRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters of ASCII and Latin-1, line separators, marks that reverse the direction, lone surrogates."""


def printable(text: str) -> str:
    r"""Return the text on one line, with ``\x1b``, ``\n`` or ``\u202e`` in place of characters that control a terminal.

    All text of a trace that is printed to a terminal or in an error message passes through here. JSON escapes such
    characters itself, and CSV keeps them, since programs read it.
    """
    return _NOT_PRINTABLE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """Do the same for each line."""
    return "\n".join(map(printable, text.split("\n")))
