"""Decodes the JSON document that ``torch.profiler`` (Kineto) writes into events."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from ddp_prof.bounded_file import free_memory, held_bytes
from ddp_prof.errors import TraceError
from ddp_prof.file_kinds import GZIP

_UNZIPPED_BYTES, _UNZIPPED_RATIO = 1 << 28, 100  # gzip makes traces 10 to 25 times smaller
FEW_BYTES, BYTES_PER_OBJECT = 1 << 24, 24  # an object of a trace has about a hundred bytes, at least 40
_LEAST_BYTES_TO_DOUBT, _LEAST_MEMORY_PER_BYTE = 1 << 28, 2  # measured: 3.6 bytes of memory per byte of JSON
CUT_OFF = "truncated"
"""Word in msgspec's errors for text that ends too early."""
_SAFE_US = 2.0**43  # below, a float64 of microseconds still distinguishes nanoseconds
_NO_CONTROLS = bytes.maketrans(bytes(range(32)), b" " * 32)
# Text that JSON does not allow, see escape_invalid_json: a backslash that begins no escape; see below; a number that is
# none; the name of an event, between its category and its pid; a quote without a backslash before it.
_BACKSLASH = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_SURROGATES = re.compile(rb"(\\\\)|(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F]..")
"""An escaped backslash, or a pair of escaped surrogates, or a single surrogate, which stands for no character."""
_NO_NUMBER = re.compile(rb":\s*(?:-?(?:inf|nan)(?:inity)?|n/a)(?=\s*[,}\]])", re.IGNORECASE)
_NAME = re.compile(rb'("ph": "X", "cat": "\w+",\s*"name": ")((?:[^"]|"(?!ph": "))*?)(?=", "pid": )')
_QUOTE = re.compile(rb'(?<!\\)"')
ONCE = (b"traceEvents", b"distributedInfo")
"""Keys that a document must hold at most once: if a key occurs twice, a JSON decoder silently takes the last value."""


class EventArguments(msgspec.Struct, gc=False):
    """The fields of an event's ``args`` that are read; each may have any type, and the default if it is absent."""

    name: Any = None
    device: Any = None
    stream: Any = None
    original_stream: Any = None  # if the event is drawn on another one
    correlation: Any = None
    bytes: Any = None
    copy_kind: Any = msgspec.field(default=None, name="copy kind")
    grid: msgspec.Raw = msgspec.Raw()  # decoded only if launch shapes are read
    block: msgspec.Raw = msgspec.Raw()
    registers: Any = msgspec.field(default=None, name="registers per thread")
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    element_type: Any = msgspec.field(default=None, name="dtype")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    sequence: Any = msgspec.field(default=None, name="Seq")
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")  # decoded for collectives only
    element_types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    awaited_stream: Any = msgspec.field(default=None, name="wait_on_stream")
    awaited_record: Any = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    awaited_event: Any = msgspec.field(default=None, name="wait_on_cuda_event_id")
    critical: Any = None  # 1: HolisticTraceAnalysis found the event on a critical path


NO_ARGUMENTS = EventArguments()


class Event(msgspec.Struct, gc=False):
    """One event, with the names of Chrome's format: ``ts`` is the start and ``dur`` the duration, in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: Any = ""
    pid: Any = 0
    tid: Any = 0
    ts: int | float = 0
    dur: int | float = -1  # if the event has none
    args: EventArguments | None = None


class ExactEvent(Event, gc=False):
    """An event whose times are exact decimals, for times too large for a float64; it is slower to decode."""

    ts: Decimal = Decimal(0)  # type: ignore[assignment]
    dur: Decimal = Decimal(-1)  # type: ignore[assignment]


class Header(msgspec.Struct):
    """The fields of a document that are read besides the events; a field that it lacks is ``UNSET``."""

    baseTimeNanoseconds: int | float | msgspec.UnsetType | None = msgspec.UNSET  # noqa: N815
    distributedInfo: Any = msgspec.UNSET  # noqa: N815
    deviceProperties: Any = msgspec.UNSET  # noqa: N815
    WARNING: Any = msgspec.UNSET  # what torch.profiler logged while it recorded
    ERROR: Any = msgspec.UNSET


class Document(Header, kw_only=True):
    """All parts of a file that are read: the header and the events."""

    traceEvents: list[Event]  # noqa: N815


class ExactDocument(Document, kw_only=True):
    traceEvents: list[ExactEvent]  # type: ignore[assignment]  # noqa: N815


def read_document(path: Path) -> Document:
    """Return the document in a file, gzipped or not, with times exact to the nanosecond.

    Raises:
        TraceError: The file is cut off, is no JSON or no trace, or is put together from several traces.
    """
    data = _read_bytes(path)
    if len(data) > FEW_BYTES and data.count(b"{") + data.count(b"[") > len(data) // BYTES_PER_OBJECT:
        reason = f"it holds more objects than one in {BYTES_PER_OBJECT} bytes, which no trace does"
        raise TraceError(path, reason, "record it again with torch.profiler")
    try:
        document = _decode_events(path, data)
    except TraceError as error:
        with suppress(TraceError):  # else the first error is raised
            return _decode_events(path, escape_invalid_json(data))
        raise error
    _refuse_repeated_keys(path, data)
    return document


def _refuse_repeated_keys(path: Path, data: bytes) -> None:
    """Raise TraceError if the text of a document holds a key of :data:`ONCE` more than once."""
    for key in ONCE:
        if count_key(key, data) > 1:
            reason = f"it holds '{key.decode()}' more than once: it is put together from several traces"
            raise TraceError(path, reason, "give each of them as a file of its own")


def count_key(key: bytes, data: bytes | bytearray) -> int:
    """Return how often a key with a list or an object as its value occurs in the text of a document.

    If the quoted key occurs once, its value is not looked at: the result is 1.
    """
    quoted = b'"' + key + b'"'
    count = data.count(quoted)  # much faster than the regular expression
    return count if count < 2 else len(re.findall(rb"(?<!\\)" + quoted + rb"\s*:\s*[\[{]", data))


def escape_invalid_json(data: bytes) -> bytes:
    """Return the document with text replaced that some releases of torch write although JSON does not allow it.

    This is ``inf``, ``nan`` and ``N/A``, and names with control characters, single backslashes, quotes, bytes that are
    no UTF-8, or halves of a character in UTF-16.
    """
    text = data.translate(_NO_CONTROLS).decode(errors="replace").encode()
    text = _BACKSLASH.sub(lambda found: found[0] if found[1] else rb"\\", text)
    text = _SURROGATES.sub(lambda found: found[0] if found[1] or found[2] else rb"\ufffd", text)
    text = _NAME.sub(lambda found: found[1] + _QUOTE.sub(rb'\\"', found[2]), text)
    return _NO_NUMBER.sub(b":null", text)


def _decode_events(path: Path, data: bytes) -> Document:
    """Return the decoded document, with exact times if a float64 does not suffice."""
    document = _decode(path, data, exact=False)
    return _decode(path, data, exact=True) if are_inexact(document.traceEvents) else document


def are_inexact(events: Sequence[Event]) -> bool:
    """Return whether a start is a float so large that a float64 of microseconds does not distinguish nanoseconds."""
    try:
        largest = np.fromiter(map(attrgetter("ts"), events), np.float64, len(events))
    except OverflowError:  # integers of hundreds of digits
        rows = range(len(events))
    else:
        rows = np.flatnonzero(largest >= _SAFE_US).tolist()
    return any(isinstance(events[row].ts, float) and events[row].ts >= _SAFE_US for row in rows)


def _read_bytes(path: Path) -> bytes:
    """Return the bytes of the document in a file, uncompressed.

    Raises:
        TraceError: The file is damaged, or would need more memory than is free. Without this check there would be no
            error: the system kills a program that takes too much memory.
    """
    # How many bytes the document may take in memory; free is None if that is not known.
    held, size, free = refuse_unwritten(path), path.stat().st_size, free_memory()
    most_in_memory = size + 1 if free is None else max(free // _LEAST_MEMORY_PER_BYTE, _LEAST_BYTES_TO_DOUBT)
    if not is_packed(path):
        return path.read_bytes() if size <= most_in_memory else _refuse_large(path, f"its {size / 1e9:,.1f} GB")
    # Uncompress no more bytes than are plausible and fit into memory.
    most = most_unpacked(held)
    if free is not None:
        most = min(most, most_in_memory)
    try:
        with gzip.open(path) as unzipped:
            data = unzipped.read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, f"damaged or cut off ({error})", "copy or record it again") from error
    if len(data) > most == most_in_memory:
        _refuse_large(path, f"more than {most / 1e9:,.1f} GB unpacked")
    if len(data) > most:
        reason = f"it unpacks to more than {most >> 20:,} MiB, which no trace of its size does"
        raise TraceError(path, reason, "unpack it with gunzip, if you trust it, and give the .json")
    return data


def refuse_unwritten(path: Path) -> int:
    """Return how many bytes a file holds on disk; raise TraceError if most of its size was never written."""
    size, held = path.stat().st_size, held_bytes(path)
    if size > _LEAST_BYTES_TO_DOUBT and 2 * held < size:
        reason = f"it holds {held:,} bytes, and {size - held:,} zeros that were never written"
        raise TraceError(path, f"damaged or cut off ({reason})", "copy or record it again")
    return held


def is_packed(path: Path) -> bool:
    """Return whether a file is compressed by gzip, which its first two bytes tell."""
    with path.open("rb") as file:
        return file.read(len(GZIP)) == GZIP


def most_unpacked(held: int) -> int:
    """Return how many bytes a gzip file of ``held`` bytes may hold uncompressed, before it counts as damaged."""
    return max(_UNZIPPED_BYTES, _UNZIPPED_RATIO * held)


def _refuse_large(path: Path, what: str) -> NoReturn:
    """Raise TraceError because there is not enough memory; ``what`` says how large the document is."""
    free = (free_memory() or 0) / 1e9
    reason = f"there is not enough memory: {what} take several times as much, and {free:,.1f} GB are free"
    raise TraceError(path, reason, "take a larger machine, or record fewer steps")


def _decode(path: Path, data: bytes, *, exact: bool) -> Document:
    """Return the decoded document, with times as decimals if ``exact``; raise TraceError if it cannot be decoded."""
    document, events = (ExactDocument, list[ExactEvent]) if exact else (Document, list[Event])
    wanted: Any = document if data.lstrip()[:1] == b"{" else events  # Chrome's format allows the bare list, too
    try:
        found = msgspec.json.decode(data, type=wanted, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise no_trace(path, error) from error
    return found if isinstance(found, Document) else document(traceEvents=found)


def no_trace(path: Path, error: Exception) -> TraceError:
    """Return a TraceError that says what a decoder's error means: the file is damaged, or it is no trace."""
    reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
    is_no_json = isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError)
    what = "damaged or cut off" if is_no_json else "not a PyTorch profiler trace"
    hint = "record it again with torch.profiler, each process to a file of its own"
    return TraceError(path, f"{what} ({reason})", hint)
