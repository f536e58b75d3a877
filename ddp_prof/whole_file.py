"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A new file to write: at the end it takes the place of ``path``, and where writing fails it is removed.

    The folders of ``path`` are made; a device or a pipe is written as it is. Each process has a file of its own, so of
    two that write one path at once the last one wins.

    Raises:
        OSError: The disk is full, say; it names ``path``.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        yield real
        return
    partial = real.with_name(f".{real.name}.{os.getpid()}.partial")
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(real)
    except OSError as error:
        if error.errno is None or error.filename not in {None, str(partial)}:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
