"""Turn results into bytes and back, to send them to another process or to keep them in the cache.

Paths are stored as absolute names; where they are read, a name can stand for another path.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


class _Pickler(pickle.Pickler):
    """Stores each path as its absolute name, beside the usual pickling of all other objects."""

    def persistent_id(self, value: Any) -> str | None:
        """Return the name that stands for a path; ``None`` to pickle the object as usual."""
        return str(value.absolute()) if isinstance(value, Path) else None


class _Unpickler(pickle.Unpickler):
    """Restores paths; ``names`` maps stored names to paths of this machine, other names are taken as they are."""

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
    """Return the result in ``data``; ``names`` maps stored names of paths to paths of this machine."""
    return _Unpickler(io.BytesIO(data), names or {}).load()


_OF_ARRAYS = {
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
}
"""For each module, the names that pickles of arrays refer to."""
_CONTAINERS = {"collections": {"Counter"}, "builtins": {"set", "frozenset"}}
_OWN = (
    "ddp_prof.analyze.", "ddp_prof.trace", "ddp_prof.table", "ddp_prof.manifest", "ddp_prof.notes",
    "ddp_prof.communication", "ddp_prof.present.html.timeline_page",
)  # fmt: skip
"""The beginnings of the modules whose classes results consist of."""


class _ResultUnpickler(_Unpickler):
    """Unpickles results of the analysis only: bytes from another source cannot make it call other functions."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that results consist of, or a function that makes an array; refuse all others."""
        # "." in a name would reach an attribute of an object of the module, which may belong to another module.
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
    """Write a result and then its checksum; the pickled bytes are not collected in memory."""
    summing = _Summing(file)
    _Pickler(summing, pickle.HIGHEST_PROTOCOL).dump(result)
    file.write(summing.crc32.to_bytes(_SUM_BYTES, "little"))


def read_result(file: BinaryIO, names: Mapping[str, Path]) -> Any:
    """Read a result from the file's position; ``names`` maps stored names of paths to paths of this machine.

    Raises:
        pickle.UnpicklingError: It is damaged, or names a class or function that no result needs.
    """
    # The checksum is compared before anything is unpickled.
    begin, end, crc32 = file.tell(), file.seek(0, os.SEEK_END) - _SUM_BYTES, 0
    file.seek(begin)
    while chunk := file.read(max(0, min(_CHUNK, end - file.tell()))):
        crc32 = zlib.crc32(chunk, crc32)
    if file.read() != crc32.to_bytes(_SUM_BYTES, "little"):
        raise pickle.UnpicklingError("its checksum does not match")
    file.seek(begin)
    return _ResultUnpickler(file, names).load()


_SUM_BYTES, _CHUNK = 4, 1 << 20
"""Bytes of a checksum, and bytes that are read at once."""
