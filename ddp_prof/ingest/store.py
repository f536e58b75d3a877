"""Writes traces as Arrow files, and reads them; the columns are memory-mapped instead of read.

A file has one row. Each of its columns holds one list: the values of a column of one of the trace's tables, such as
``activities.start_ns``, or of an array of the trace. If all values are equal, the list holds the value once. The
metadata of the schema hold everything else as JSON, and a checksum of each column: a damaged file is never used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ddp_prof.manifest import Manifest
from ddp_prof.notes import Doubt
from ddp_prof.table import Table
from ddp_prof.trace import Trace

_FACTS, _CHECK = b"ddp_prof", b"ddp_prof.crc32"
"""Keys of the metadata: for the JSON text, and for the checksum of this text."""
_NOT_KEPT = ("path", "manifest")
"""Fields of a trace that are not written: they may change without a change of the trace's file."""
_TYPES = {"int64": np.dtype(np.int64), "bool": np.dtype(np.bool_)}
"""Types of columns by the names that the file has for them."""


def stored_bytes(trace: Trace) -> int:
    """Return about how many bytes the file of a trace takes."""
    columns = sum(len(values) * values.dtype.itemsize for values in map(_without_repeats, _arrays(trace).values()))
    return columns + sum(map(len, trace.names)) + (1 << 16)


def write_trace(trace: Trace, target: Path, key: Mapping[str, Any]) -> None:
    """Write a trace to the file ``target``.

    ``key`` is written, too: :func:`read_trace` returns the trace only for an equal key.

    Raises:
        OSError: The file cannot be written.
    """
    import pyarrow

    columns, told = {}, {}  # Arrow's columns, and what JSON tells of each
    for name, values in _arrays(trace).items():
        kept = _without_repeats(values)
        told[name] = {"type": values.dtype.name, "rows": len(values), "values": len(kept), "crc32": _check(kept)}
        columns[name] = _list_of(kept)
    # All else goes into the metadata as JSON, with a checksum of its own.
    facts = {name: _plain(getattr(trace, name)) for name in _plain_fields()}
    text = json.dumps({"key": key, "columns": told, "facts": facts}, default=_python_number).encode()
    schema = pyarrow.schema(
        [pyarrow.field(name, column.type) for name, column in columns.items()],
        {_FACTS: text, _CHECK: str(zlib.crc32(text)).encode()},
    )
    batch = pyarrow.RecordBatch.from_arrays(list(columns.values()), schema=schema)
    with target.open("wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)


def read_trace(
    file: Path, key: Mapping[str, Any], path: Path, manifest: Manifest | None, *, is_new: bool = False
) -> Trace | None:
    """Return the trace in a file; ``None`` if it was written with another key, or is damaged.

    The columns of the trace are memory-mapped and read-only.

    Args:
        file: The file.
        key: The key with which it must have been written.
        path: Becomes the ``path`` of the trace.
        manifest: Becomes the ``manifest`` of the trace.
        is_new: Whether this process has just written the file. Then its columns are not compared with their checksums:
            that would bring them all into memory beside those that were written.
    """
    opened = _open(file)
    if opened is None or opened[0]["key"] != key:
        return None
    told, batch = opened
    values: dict[str, Any] = {}
    for name, column in told["columns"].items():
        found = _column(batch, name, column, is_new=is_new)
        if found is None:
            return None
        table, _, own = name.rpartition(".")  # "activities.start_ns"
        if table:
            values.setdefault(table, {})[own] = found
        else:
            values[own] = found
    values |= {name: kind(**values[name]) for name, kind in _tables().items() if name in values}
    values |= {name: _parsed(value) for name, value in told["facts"].items()}
    return Trace(path=path, manifest=manifest, **values)


def read_key(file: Path) -> dict[str, Any] | None:
    """Return the key with which a file was written; ``None`` if it is damaged."""
    opened = _open(file)
    return opened[0]["key"] if opened else None


def _open(file: Path) -> tuple[dict[str, Any], Any] | None:
    """Return the JSON of a file and its only ``pyarrow`` batch; ``None`` if it is damaged."""
    import pyarrow

    damaged = (pyarrow.ArrowException, OSError, ValueError, KeyError)
    with suppress(*damaged), pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_file(source) as reader:
        metadata = reader.schema.metadata or {}
        text = metadata[_FACTS]
        if zlib.crc32(text) == int(metadata[_CHECK]) and reader.num_record_batches == 1:
            return json.loads(text), reader.get_batch(0)
    return None


def _column(batch: Any, name: str, told: Mapping[str, Any], *, is_new: bool) -> NDArray[Any] | None:
    """Return a column of the file; ``None`` if its values are not those that were written.

    Args:
        batch: The ``pyarrow`` batch of the file.
        name: Name of the column.
        told: What the file's JSON tells of the column: type, number of rows and of values, checksum.
        is_new: See :func:`read_trace`.
    """
    position = batch.schema.get_field_index(name)
    buffer = batch.column(position).values.buffers()[1] if position >= 0 else None
    size = told["values"] * _TYPES[told["type"]].itemsize
    if size and (buffer is None or buffer.size < size):
        return None
    values: NDArray[Any] = np.frombuffer(buffer if buffer and size else b"", _TYPES[told["type"]], told["values"])
    if not is_new and _check(values) != told["crc32"]:
        return None
    return values if told["rows"] == told["values"] else np.broadcast_to(values[0], told["rows"])


def _check(values: NDArray[Any]) -> int:
    return zlib.crc32(values.data)


def _list_of(values: NDArray[Any]) -> Any:
    """Return an Arrow array whose only element is a list of these values; the values are not copied."""
    import pyarrow

    kind = pyarrow.int64() if values.dtype == np.int64 else pyarrow.uint8()
    items = pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(values)])
    offsets = pyarrow.py_buffer(np.array([0, len(values)], np.int64))
    return pyarrow.Array.from_buffers(pyarrow.large_list(kind), 1, [None, offsets], children=[items])


def _without_repeats(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values as a contiguous array; for a column that repeats one value (with stride 0), only that value."""
    is_constant = len(values) > 1 and not values.strides[0]
    return np.ascontiguousarray(values[:1] if is_constant else values)


@cache
def _tables() -> dict[str, type[Table]]:
    """Return the class of each field of a trace that is a table, by the name of the field."""
    found = {}
    for name, hint in get_type_hints(Trace).items():
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and issubclass(kind, Table):
                found[name] = kind
    return found


_ARRAYS = ("inferred", "launching_calls", "has_ambiguous_launch", "is_launch", "overlong", "shape_id", "registers")
"""Fields of a trace that are arrays, or ``None``."""


def _plain_fields() -> Iterator[str]:
    """Yield the names of the fields of a trace that JSON can hold."""
    for item in fields(Trace):
        if item.name not in {*_NOT_KEPT, *_ARRAYS, *_tables()}:
            yield item.name


def _arrays(trace: Trace) -> dict[str, NDArray[Any]]:
    """Return all arrays of a trace, the columns of its tables included, by name: ``activities.start_ns``."""
    found = {name: getattr(trace, name) for name in _ARRAYS}
    for name in _tables():
        if (table := getattr(trace, name)) is not None:
            found |= {f"{name}.{item.name}": getattr(table, item.name) for item in fields(table)}
    return {name: values for name, values in found.items() if values is not None}


def _plain(value: Any) -> Any:
    """Return a value for JSON.

    For a mapping, whose keys may be tuples, that is an object with a list of pairs; for a doubt, one with its text.
    """
    if isinstance(value, Mapping):
        return {"items": [[key, value[key]] for key in value]}
    if isinstance(value, Doubt):
        return {"doubt": value}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _parsed(value: Any) -> Any:
    """Return the value that :func:`_plain` made a value for JSON of; lists become tuples."""
    if isinstance(value, dict):
        if "doubt" in value:
            return Doubt(value["doubt"])
        return {tuple(key) if isinstance(key, list) else key: item for key, item in value["items"]}
    return tuple(map(_parsed, value)) if isinstance(value, list) else value


def _python_number(value: Any) -> Any:
    """Return a NumPy number as a Python number, for JSON; raise TypeError for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be kept")
