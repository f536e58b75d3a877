"""Reads a ``torch.profiler`` document in parts of some MiB, so that its size does not matter.

A part ends with an event. That it does is not guessed but proven: if the text from the beginning of an event, between
``[`` and ``]``, is JSON, then no string, list or object is open at its end::

    {"schemaVersion": 1, "traceEvents": [     the head: JSON with ]} behind it
        {"ph": "X", ...}, {"ph": "X", ...}    a part: JSON between [ and ]
        ,
        {"ph": "X", ...}], "traceName": ""}   the rest: JSON behind {"traceEvents":[

What cannot be read like this is read as a whole, which also says what is wrong with it.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import msgspec
import numpy as np

from ddp_prof.ingest.kineto_document import (
    BYTES_PER_OBJECT,
    CUT_OFF,
    FEW_BYTES,
    ONCE,
    Document,
    Event,
    ExactDocument,
    ExactEvent,
    Header,
    are_inexact,
    count_key,
    escape_invalid_json,
    is_packed,
    most_unpacked,
    no_trace,
    read_document,
    refuse_unwritten,
)

PART_BYTES = 1 << 21
_WINDOW = 1 << 16
"""So many bytes hold the end of an event, as a rule."""
_MOST_TRIES = 8
_MOST_PARTS = 4
"""A document with an event that is longer than so many parts is read as a whole."""
_CACHED_BYTES = 1 << 15
_EVENTS_KEY = re.compile(rb'[{,]\s*"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"\s*\[")
_BETWEEN_EVENTS, _BETWEEN_OBJECTS = (re.compile(rb"\}\s*,(?=\s*\{" + key + rb")") for key in (rb'\s*"ph"', rb""))
_ESCAPED_KEY = re.compile(rb'\\u[0-9a-fA-F]{4}[^"]*"\s*:')
_INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Gatherer(Protocol):
    """What takes the events of a document."""

    def add(self, events: Sequence[Event]) -> None:
        """Take the next events."""


AnyGatherer = TypeVar("AnyGatherer", bound=Gatherer)


class _NotInPartsError(Exception):
    """The document has to be read as a whole."""


class _InexactError(Exception):
    """A float64 of microseconds does not hold the times of the document."""


def read_events(path: Path, begin: Callable[[], AnyGatherer]) -> tuple[Header, AnyGatherer]:
    """Return what a document holds besides its events, and what ``begin`` returned last, which has taken them all.

    ``begin`` is called again if the document is read again from its start. Times are exact to the nanosecond. Raises
    TraceError for a file that is cut off, no JSON or no trace.
    """
    for exact in (False, True):
        gatherer = begin()
        try:
            return _Stream(path, gatherer.add, exact=exact).read(), gatherer
        except _InexactError:
            continue
        except _NotInPartsError:
            break
    document, gatherer = read_document(path), begin()
    gatherer.add(document.traceEvents)
    return document, gatherer


class _Stream:
    """One pass over a document."""

    def __init__(self, path: Path, add: Callable[[Sequence[Event]], None], *, exact: bool) -> None:
        self._path, self._add, self._exact = path, add, exact
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            list[ExactEvent] if exact else list[Event], strict=False
        )
        self._bytes = self._objects = 0
        self._keys = Counter[bytes]()
        self._is_escaped = False

    def read(self) -> Header:
        """Hand over all events, and return the rest.

        Raises TraceError for a document that is cut off or a size that lies, and _NotInPartsError for any other error.
        """
        packed = is_packed(self._path)
        if not packed and self._path.stat().st_size <= PART_BYTES:
            raise _NotInPartsError
        held = refuse_unwritten(self._path)
        most = most_unpacked(held) if packed else None
        try:
            with cast("BinaryIO", gzip.open(self._path)) if packed else self._path.open("rb", buffering=0) as file:
                return self._read(file, most)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _NotInPartsError from error

    def _read(self, file: BinaryIO, most: int | None) -> Header:
        size = PART_BYTES
        text, is_end = _read_more(file, b"", size)
        head = _EVENTS_KEY.search(text) if text.lstrip()[:1] == b"{" else _BARE_LIST.match(text)
        if not head:
            raise _NotInPartsError
        header = self._decode_head(text[: head.end()])
        text = text[head.end() :]
        while not is_end:
            end = self._take_part(text)
            if most is not None and self._bytes > most:
                raise _NotInPartsError
            size = PART_BYTES if end else 2 * size  # an event is longer than a part
            text, is_end = _read_more(file, text[end:], size)
        rest = self._take_rest(text, is_bare=header is None)
        return _merged(header, rest)

    def _decode_head(self, text: bytearray) -> Header | None:
        """Return what the text before the events holds; ``None`` if they are a bare list."""
        self._count(text, _count_objects(text))
        if text.lstrip() == b"[":
            return None
        _refuse_escaped_keys(text)
        try:
            return msgspec.json.decode(text + b"]}", type=Header, strict=False)
        except _INVALID as error:
            raise _NotInPartsError from error

    def _take_part(self, text: bytearray) -> int:
        """Hand over the events that end in the text, which begins with one; return the place behind the comma.

        Returns 0 if none ends there.
        """
        places = _commas_between_events(text)
        for place, is_escaped in _tries(places):
            part = b"".join((b"[", memoryview(text)[:place], b"]"))
            objects = _count_objects(part)
            if objects > len(part) // BYTES_PER_OBJECT:
                continue
            try:
                events = self._decoder.decode(escape_invalid_json(part) if is_escaped else part)
            except _INVALID:
                continue
            self._is_escaped |= is_escaped
            self._count(part, objects)
            self._hand_over(events)
            return place + 1
        if len(text) > _MOST_PARTS * PART_BYTES:
            raise _NotInPartsError
        return 0

    def _take_rest(self, text: bytearray, *, is_bare: bool) -> Header:
        """Hand over the last events; return what follows them."""
        self._count(text, _count_objects(text))
        if any(count > 1 for count in self._keys.values()):
            raise _NotInPartsError
        if self._bytes > FEW_BYTES and self._objects > self._bytes // BYTES_PER_OBJECT:
            raise _NotInPartsError
        _refuse_escaped_keys(text)
        document, events = (ExactDocument, list[ExactEvent]) if self._exact else (Document, list[Event])
        kind: Any = events if is_bare else document
        whole = b"".join((b"[" if is_bare else b'{"traceEvents":[', text))
        try:
            found = msgspec.json.decode(whole, type=kind, strict=False)
        except _INVALID as error:
            if CUT_OFF in str(error) and not self._is_escaped:
                raise no_trace(self._path, error) from error
            raise _NotInPartsError from error
        if is_bare:
            self._hand_over(found)
            return Header()
        self._hand_over(found.traceEvents)
        return cast("Header", found)

    def _hand_over(self, events: Sequence[Event]) -> None:
        if not self._exact and are_inexact(events):
            raise _InexactError
        self._add(events)

    def _count(self, text: bytes | bytearray, objects: int) -> None:
        self._bytes += len(text)
        self._objects += objects
        for key in ONCE:
            self._keys[key] += count_key(key, text)


def _read_more(file: BinaryIO, before: bytes | bytearray, size: int) -> tuple[bytearray, bool]:
    """Return what is there already and the next bytes, and whether they are the last ones."""
    text = bytearray(len(before) + size)
    text[: len(before)] = before
    at = len(before)
    with memoryview(text) as view:
        while at < len(text) and (count := file.readinto(view[at:])):  # type: ignore[attr-defined]
            at += count
    is_end = at < len(text)
    del text[at:]
    return text, is_end


def _commas_between_events(text: bytearray) -> list[int]:
    """Return the places of a few commas that may stand between two events, likely ones first."""
    places: dict[int, None] = {}
    for start in (max(0, len(text) - _WINDOW), 0):
        for pattern in (_BETWEEN_EVENTS, _BETWEEN_OBJECTS):
            ends = [found.end() - 1 for found in pattern.finditer(text, start)]
            places |= dict.fromkeys(ends[-_MOST_TRIES:][::-1])
        if places:
            break
    return list(places)


def _tries(places: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield where to end a part, and whether to escape what is no JSON in it, which takes long."""
    yield from ((place, False) for place in places)
    yield from ((place, True) for place in places[:1])


def _count_objects(text: bytes | bytearray) -> int:
    """Return how many objects and lists begin in a text."""
    values = np.frombuffer(text, np.uint8)
    blocks = (values[at : at + _CACHED_BYTES] for at in range(0, len(values), _CACHED_BYTES))
    return sum(int(np.count_nonzero((block | 0x20) == ord("{"))) for block in blocks)  # [ differs from { in this bit


def _refuse_escaped_keys(text: bytes | bytearray) -> None:
    """Leave a document whose keys may be written otherwise than they are searched for to the whole reader."""
    if b"\\u" in text and _ESCAPED_KEY.search(text):
        raise _NotInPartsError


def _merged(header: Header | None, rest: Header) -> Header:
    """Return what is told before and behind the events; of a key that is told twice, the last one counts."""
    for name in Header.__struct_fields__ if header else ():
        if getattr(rest, name) is msgspec.UNSET:
            setattr(rest, name, getattr(header, name))
    return rest
