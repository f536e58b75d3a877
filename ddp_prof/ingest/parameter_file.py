"""Reads a file with the sizes of a model's parameters: one line for each parameter, with its bytes and its name."""

from __future__ import annotations

from pathlib import Path

from ddp_prof.bounded_file import read_at_most
from ddp_prof.errors import TraceError

_MOST_BYTES = 1 << 26
"""Largest file that is read."""
_LARGEST = 1 << 50
"""Most bytes of all parameters together: one PiB."""
HOW = "write a line 'BYTES NAME' for each trained parameter; 'ddp-prof whatif --help' shows how"
"""What errors advise."""


def read_parameters(file: Path) -> tuple[int, ...]:
    """Return the bytes of each parameter, in the order of the lines.

    Raises:
        TraceError: The file is no text or holds no parameter, a line does not begin with a number of bytes, or the
            parameters have more than one PiB.
    """
    try:
        lines = read_at_most(file, _MOST_BYTES, "a list of parameters", HOW).decode().splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(file, "it is no text", HOW) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        size = line.split()[0]  # the name that follows is not used
        if not (size.isascii() and size.isdigit() and len(size) < 19 and 0 < int(size) <= _LARGEST):
            raise TraceError(file, f"line {number} does not begin with a number of bytes", HOW)
        found.append(int(size))
    if not found:
        raise TraceError(file, "it holds no parameter", HOW)
    if sum(found) > _LARGEST:
        raise TraceError(file, "its parameters have more bytes than any model", HOW)
    return tuple(found)
