"""A disk that is full after so many bytes of a file, for this process."""

from __future__ import annotations

import resource
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = 3000
"""How many bytes of a file have room."""


@contextmanager
def full_disk() -> Iterator[None]:
    """Have the system refuse what is longer; Python ignores the signal that comes with it.

    Python does not notice that bytecode was cut off, and every later program would fail on the module.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
