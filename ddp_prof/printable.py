"""Makes text from files, such as names of kernels, ranges and tables, safe for a terminal."""

from __future__ import annotations

import re

_NOT_PRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters of ASCII and Latin-1, line separators, marks that reverse the direction, lone surrogates."""


def printable(text: str) -> str:
    r"""The text on one line, with ``\x1b``, ``\n`` or ``\u202e`` written out in the place of what controls a terminal.

    Everything of a trace that is printed to a terminal or into an error message passes through here. JSON needs it
    not: it has escapes of its own. CSV holds the text as it is: it is for programs.
    """
    return _NOT_PRINTABLE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """The same of several lines, which stay."""
    return "\n".join(map(printable, text.split("\n")))
