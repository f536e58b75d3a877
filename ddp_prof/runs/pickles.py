"""Pickles of tasks and results, in which paths have the names that they have where they are read.

A worker of another folder or machine knows a file by its absolute path; its results name the file as the user did.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return str(value) if isinstance(value, Path) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Mapping[str, Path]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def persistent_load(self, path: str) -> Path:
        return self._names.get(path) or Path(path)


def packed(value: Any) -> bytes:
    """A task or a result as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes, names: Mapping[str, Path] | None = None) -> Any:
    """What :func:`packed` made bytes of; some paths get other names."""
    return _Unpickler(data, names or {}).load()
