"""Two tables of strings: that of a trace, which grows while it is read, and ``StringIds`` of an nsys export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2s
from typing import Any

import numpy as np

from ddp_prof.ingest.sqlite_columns import integer_array
from ddp_prof.trace import UNKNOWN, Ints, distinct

MOST_LETTERS = 4096
"""Longest name that is kept: the time of some regular expressions grows with the square of the length."""
_MOST_SLOTS = 1 << 24


class NameTable:
    """The names of a trace: each string once, numbered in the order of arrival; becomes ``Trace.names``."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._index: dict[str, int] = {name: index for index, name in enumerate(names)}

    def intern(self, name: str) -> int:
        """The number of a string, a new one where it is new; one that is too long ends with a digest of the whole."""
        if len(name) > MOST_LETTERS:
            name = f"{name[: MOST_LETTERS - 20]}…{blake2s(name.encode(errors='replace'), digest_size=8).hexdigest()}"
        return self._index.setdefault(name, len(self._index))

    def fill_unknown(self, name_id: Ints, name: str) -> Ints:
        """Replace ``UNKNOWN`` by the index of ``name``."""
        is_unknown = name_id == UNKNOWN
        return np.where(is_unknown, self.intern(name), name_id) if is_unknown.any() else name_id

    def as_tuple(self) -> tuple[str, ...]:
        return tuple(self._index)


class NsysStringIds:
    """The table ``StringIds`` of an export: strings by the ids that its other tables refer to."""

    def __init__(self, rows: Iterable[tuple[object, object]]) -> None:
        self._values = {key: value for key, value in rows if isinstance(value, str) and value}

    def text(self, string_id: int | None) -> str:
        """The string, empty where the id is absent or unknown."""
        return self._values.get(string_id, "") if string_id is not None else ""

    def intern(self, string_ids: Ints, names: NameTable, shorten: Callable[[str], str] = str) -> Ints:
        """Indices into ``names`` for a column of string ids; ``UNKNOWN`` for ids that the table does not hold.

        Strings that are not used stay out of ``names``.
        """
        used = distinct(string_ids)
        texts = [shorten(self.text(value)) for value in used]
        index = np.array([names.intern(text) if text else UNKNOWN for text in texts], np.int64)
        if not used or used[-1] - used[0] > _MOST_SLOTS:
            return index[np.searchsorted(used, string_ids)]
        slots = np.full(used[-1] - used[0] + 1, UNKNOWN, np.int64)
        slots[np.array(used) - used[0]] = index
        return slots[string_ids - used[0]]


def intern_texts(column: Any, names: NameTable) -> Ints:
    """Indices into ``names`` for an Arrow array of text; ``UNKNOWN`` for an empty one."""
    import pyarrow

    # pyarrow.compute makes a Python function of each kernel when it is imported, which takes longer than all this.
    from pyarrow._compute import call_function

    encoded = call_function("dictionary_encode", [column])
    texts = [text.decode(errors="replace") for text in encoded.dictionary.view(pyarrow.binary()).to_pylist()]
    index = np.array([names.intern(text) if text else UNKNOWN for text in texts], np.int64)
    return index[integer_array(encoded.indices)]
