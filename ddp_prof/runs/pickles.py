"""Results as bytes, to send to another process or to keep in the cache; paths in them can be renamed."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return str(value.absolute()) if isinstance(value, Path) else None


class _Unpickler(pickle.Unpickler):
    """Restores paths, by the names that they have on this machine."""

    def __init__(self, file: BinaryIO, names: Mapping[str, Path]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_load(self, path: str) -> Path:
        return self._names.get(path) or Path(path)


def pickle_with_names(value: Any) -> bytes:
    """Pickle a result with absolute paths: the reader may have another working directory."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpickle_with_names(data: bytes, names: Mapping[str, Path] | None = None) -> Any:
    return _Unpickler(io.BytesIO(data), names or {}).load()


_OF_ARRAYS = {
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
}
"""What arrays are made with."""
_CONTAINERS = {"collections": {"Counter"}, "builtins": {"set", "frozenset"}}
_OWN = ("ddp_prof.analyze.", "ddp_prof.trace", "ddp_prof.table", "ddp_prof.manifest", "ddp_prof.communication")


class _ResultUnpickler(_Unpickler):
    """Unpickles results of the analysis only, so that bytes from elsewhere cannot call other functions."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that results consist of, or a function that makes an array; refuse all others."""
        is_known = name in {**_OF_ARRAYS, **_CONTAINERS}.get(module, ())
        if is_known or (module.startswith(_OWN) and "." not in name):
            found = super().find_class(module, name)
            if is_known or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no result")


class _Summing:
    """Writes to a file and computes the checksum of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def write_result(result: Any, file: BinaryIO) -> None:
    """Write a result and its checksum, without a second copy of it in memory."""
    summing = _Summing(file)
    _Pickler(summing, pickle.HIGHEST_PROTOCOL).dump(result)
    file.write(summing.crc32.to_bytes(_SUM_BYTES, "little"))


def read_result(file: BinaryIO, names: Mapping[str, Path]) -> Any:
    """Read a result from the file's position; ``names`` maps stored paths to paths here.

    Raises:
        pickle.UnpicklingError: It is damaged, or names a class or function that no result needs.
    """
    begin, end, crc32 = file.tell(), file.seek(0, os.SEEK_END) - _SUM_BYTES, 0
    file.seek(begin)
    while chunk := file.read(max(0, min(_CHUNK, end - file.tell()))):
        crc32 = zlib.crc32(chunk, crc32)
    if file.read() != crc32.to_bytes(_SUM_BYTES, "little"):
        raise pickle.UnpicklingError("its checksum does not match")
    file.seek(begin)
    return _ResultUnpickler(file, names).load()


_SUM_BYTES, _CHUNK = 4, 1 << 20
