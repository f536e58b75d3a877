"""Numbers the names of a trace, and tells the category of a kernel by its name.

A kernel communicates if its name is that of a library of :data:`.LIBRARIES`, or if torch.profiler recorded a
collective's arguments with it; else it computes. A kernel without a name is UNKNOWN. For copies, memory sets, graph
launches, streams and threads the name does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2s

import numpy as np

from ddp_prof.communication import LIBRARIES, MOST_NAMES
from ddp_prof.errors import TraceError
from ddp_prof.ingest.export_tables import ExportTables
from ddp_prof.table import UNKNOWN, Ints, translate
from ddp_prof.trace import Category, SyncKind

MOST_LETTERS = 4096
"""Longer names are cut: the time of some regular expressions grows with the square of the length."""


class NameTable(dict[str, int]):
    """The names of a trace: the number of each string, in the order in which they were added.

    ``tuple(table)`` becomes ``Trace.names``, in which the number of a string is its index.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__((name, number) for number, name in enumerate(names))

    def intern(self, name: str) -> int:
        """Return the number of a string, which is added if it is new. A hash replaces the end of a very long string."""
        if len(name) > MOST_LETTERS:
            name = f"{name[: MOST_LETTERS - 20]}…{blake2s(name.encode(errors='replace'), digest_size=8).hexdigest()}"
        return self.setdefault(name, len(self))

    def intern_texts(self, texts: Iterable[bytes]) -> Ints:
        """Return the number of each text, ``UNKNOWN`` for an empty one, and one more ``UNKNOWN``, which is at index -1.

        Bytes that are no UTF-8 are replaced.
        """
        decoded = (text.decode(errors="replace")[:MOST_LETTERS] for text in texts)
        return np.array([*(self.intern(text) if text else UNKNOWN for text in decoded), UNKNOWN], np.int64)

    def fill_unknown(self, name_id: Ints, name: str) -> Ints:
        """Return a column of numbers of names in which ``UNKNOWN`` is replaced by the number of ``name``."""
        is_unknown = name_id == UNKNOWN
        return np.where(is_unknown, self.intern(name), name_id) if is_unknown.any() else name_id

    def intern_ids(self, string_ids: Ints, strings: Mapping[int, str], shorten: Callable[[str], str] = str) -> Ints:
        """Return the number of each row's string, ``UNKNOWN`` if it has none.

        Args:
            string_ids: A column of ids of strings in an export.
            strings: The strings of the export by id.
            shorten: Is applied to each string before it is added.
        """

        def number_of(string_id: int) -> int:
            text = shorten(strings.get(string_id, ""))
            return self.intern(text) if text else UNKNOWN

        return translate(string_ids, number_of)


def read_strings(file: ExportTables) -> dict[int, str]:
    """Return the strings of an export by id, without empty strings.

    Raises:
        TraceError: An id has two strings, as in a database that was put together from several exports.
    """
    strings: dict[int, str] = {}
    for key, text in file.few_rows("StringIds", ("id",), ("value",)):
        if isinstance(text, str) and text and strings.setdefault(key, text) != text:
            reason = f"two strings have the number {key}: it is put together from several exports"
            raise TraceError(file.path, reason, "give each export as a file of its own")
    return strings


_ORDERING_CALLS = {
    "EventRecord": SyncKind.RECORD,
    "StreamWaitEvent": SyncKind.STREAM_WAIT,
    "EventSynchronize": SyncKind.HOST_WAIT_EVENT,
    "StreamSynchronize": SyncKind.HOST_WAIT_STREAM,
    "DeviceSynchronize": SyncKind.HOST_WAIT_DEVICE,
    "CtxSynchronize": SyncKind.HOST_WAIT_DEVICE,
    "Memcpy": SyncKind.COPY,
    "Memset": SyncKind.SET,
}
"""API calls that order work, or launch copies and memory sets: start of their names, and what they do.

Before that stands ``cuda``, ``cu``, ``hip`` or ``musa``.
"""
_ORDERING_CALL = re.compile(f"(?:cu(?:da)?|hip|musa)({'|'.join(_ORDERING_CALLS)})")


def ordering_kind(call: str) -> SyncKind | None:
    """Return what a call with this name does, such as ``cudaStreamWaitEvent_v3020``; ``None`` if it orders no work."""
    found = _ORDERING_CALL.match(call)
    return _ORDERING_CALLS[found[1]] if found else None


def kernel_categories(names: Iterable[str], comm_patterns: Iterable[str] = ()) -> Ints:
    """Return COMMUNICATION or COMPUTE for each kernel's name, and one more UNKNOWN, which is at index -1.

    Args:
        names: Names of kernels.
        comm_patterns: Regular expressions for names of kernels that communicate, besides the known ones.
    """
    patterns = (*(library.pattern for library in LIBRARIES), *comm_patterns)
    communicating = "|".join(f"(?:{pattern})" for pattern in patterns)
    found = (Category.COMMUNICATION if _matches(communicating, name) else Category.COMPUTE for name in names)
    return np.array([*found, Category.UNKNOWN], np.int64)


@lru_cache(MOST_NAMES)  # traces of all ranks have the same names
def _matches(pattern: str, name: str) -> bool:
    return re.search(pattern, name, re.IGNORECASE) is not None
