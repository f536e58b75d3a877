"""Notes beside figures: which of them change how the figures are to be read."""

from __future__ import annotations


class Doubt(str):
    """A note that changes how figures are to be read.

    It says that something was recorded wrongly, that figures are uncertain, or that they stand only for some of the
    steps or ranks. Any other note is a plain ``str``: it says what a program did, or what was chosen or inferred.
    """

    __slots__ = ()


def prefixed(beginning: str, note: str) -> str:
    """Return a note with words before it; a doubt stays one."""
    return type(note)(f"{beginning}{note}")
