"""Reads a ``torch.profiler`` document in parts of some MiB, so that its size does not matter.

A part is some whole events. Where a part may end is guessed and then proven: if the text from the beginning of an event
is JSON when it is put between ``[`` and ``]``, then no string, list or object is open at its end::

    {"schemaVersion": 1, "traceEvents": [     the head: JSON with ]} after it
        {"ph": "X", ...}, {"ph": "X", ...}    a part: JSON between [ and ]
        ,
        {"ph": "X", ...}], "traceName": ""}   the rest: JSON with {"traceEvents":[ before it

A document that cannot be read like this is read as a whole by :mod:`.kineto_document`, which also reports errors in it.
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

PART_BYTES = 1 << 20
"""Number of bytes that are read for a part."""
_NEAR, _WINDOW = 1 << 12, 1 << 16
"""Numbers of bytes at the end of a text that often, and nearly always, hold the end of an event."""
_MOST_TRIES = 8
"""Most positions of each kind that are tried as the end of a part."""
_MOST_PARTS = 4
"""Longest event, in parts; a document with a longer one is read as a whole."""
_CACHED_BYTES = 1 << 15
"""Number of bytes in which objects are counted at once, so that they fit into the processor's cache."""
_EVENTS_KEY = re.compile(rb'[{,]\s*"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"\s*\[")
# A comma between two objects: of which the second one begins with "ph", as events do; or of any kind.
_BETWEEN_EVENTS, _BETWEEN_OBJECTS = (re.compile(rb"\}\s*,(?=\s*\{" + key + rb")") for key in (rb'\s*"ph"', rb""))
_ESCAPED_KEY = re.compile(rb'\\u[0-9a-fA-F]{4}[^"]*"\s*:')
_INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Gatherer(Protocol):
    """An object that takes the events of a document, part by part."""

    def add(self, events: Sequence[Event]) -> None:
        """Take the next events."""


AnyGatherer = TypeVar("AnyGatherer", bound=Gatherer)


class _NotInPartsError(Exception):
    """The document has to be read as a whole."""


class _InexactError(Exception):
    """A float64 of microseconds does not hold the times of the document."""


def read_events(path: Path, begin: Callable[[], AnyGatherer]) -> tuple[Header, AnyGatherer]:
    """Read a document; return its header and the gatherer that has taken all its events.

    Times are exact to the nanosecond.

    Args:
        path: The file, gzipped or not.
        begin: Makes an empty gatherer. It is called again if the document must be read again from its start.

    Raises:
        TraceError: The file is cut off, is no JSON or is no trace.
    """
    # In parts with times as floats, else in parts with exact decimals, else as a whole.
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
    """One pass over a document.

    Args:
        path: The file.
        add: Takes the events of each part.
        exact: Whether times are decoded as decimals, which is slower; else as floats.
    """

    def __init__(self, path: Path, add: Callable[[Sequence[Event]], None], *, exact: bool) -> None:
        self._path, self._add, self._exact = path, add, exact
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            list[ExactEvent] if exact else list[Event], strict=False
        )
        self._bytes = self._objects = 0
        self._keys = Counter[bytes]()
        self._is_escaped = False

    def read(self) -> Header:
        """Pass all events on to ``add``, and return the header.

        Raises:
            TraceError: The document is cut off, or a large part of the file was never written.
            _InexactError: Times are too large to be decoded as floats.
            _NotInPartsError: The document is small, or cannot be read in parts for any reason.
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
        """Do what :meth:`read` does, from an open file of ``most`` uncompressed bytes at most (``None``: no limit)."""
        # The head, up to the "[" of the list of events.
        size = PART_BYTES
        text, is_end = _read_more(file, b"", size)
        head = _EVENTS_KEY.search(text) if text.lstrip()[:1] == b"{" else _BARE_LIST.match(text)
        if not head:
            raise _NotInPartsError
        header = self._decode_head(text[: head.end()])
        # Parts, until the end of the file is in the text.
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
        """Return the header in the text before the events; ``None`` if the document is a bare list of events."""
        self._count(text, _count_objects(text))
        self._count_keys(text)
        if text.lstrip() == b"[":
            return None
        _refuse_escaped_keys(text)
        try:
            return msgspec.json.decode(text + b"]}", type=Header, strict=False)
        except _INVALID as error:
            raise _NotInPartsError from error

    def _take_part(self, text: bytearray) -> int:
        """Pass on the whole events at the beginning of ``text``; return the position at which the next event begins.

        It returns 0 if not even one event ends in the text.
        """
        # Try some commas as the end of the part, until the text before one is a list of events in JSON.
        places = _commas_between_events(text)
        for place, is_escaped in _tries(places):
            part = b"".join((b"[", memoryview(text)[:place], b"]"))
            objects = _count_objects(part)
            if objects > len(part) // BYTES_PER_OBJECT:  # would take too much memory, as no trace does
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
        """Pass on the last events in ``text``, and return the header that follows them.

        ``is_bare``: whether the document is a bare list of events, so that no header follows.
        """
        self._count(text, _count_objects(text))
        self._count_keys(text)
        # The whole document has been counted: refuse repeated keys, and too many objects.
        if any(count > 1 for count in self._keys.values()):
            raise _NotInPartsError
        if self._bytes > FEW_BYTES and self._objects > self._bytes // BYTES_PER_OBJECT:
            raise _NotInPartsError
        _refuse_escaped_keys(text)
        document, events = (ExactDocument, list[ExactEvent]) if self._exact else (Document, list[Event])
        kind: Any = events if is_bare else document
        # Decode the rest as a document of its own; a document that is cut off is reported here.
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
        """Pass events on to ``add``; raise _InexactError if their times need decimals."""
        if not self._exact and are_inexact(events):
            raise _InexactError
        self._add(events)

    def _count(self, text: bytes | bytearray, objects: int) -> None:
        """Add a text to the numbers of bytes and of objects."""
        self._bytes += len(text)
        self._objects += objects

    def _count_keys(self, text: bytes | bytearray) -> None:
        """Count the keys that must occur once; a part needs no look, as whole events hold no key of the document."""
        for key in ONCE:
            self._keys[key] += count_key(key, text)


def _read_more(file: BinaryIO, before: bytes | bytearray, size: int) -> tuple[bytearray, bool]:
    """Return ``before`` followed by the next ``size`` bytes of the file, and whether the file ends there."""
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
    """Return the positions of a few commas that may stand between two events, the best candidates first.

    A comma before ``{"ph"`` is more likely than one between any two objects, and a later comma is better than an
    earlier one. More of the text is searched only if nothing is found near its end.
    """
    places: dict[int, None] = {}  # an ordered set
    both = (_BETWEEN_EVENTS, _BETWEEN_OBJECTS)
    for length, patterns in ((_NEAR, (_BETWEEN_EVENTS,)), (_WINDOW, both), (len(text), both)):
        for pattern in patterns:
            ends = [found.end() - 1 for found in pattern.finditer(text, max(0, len(text) - length))]
            places |= dict.fromkeys(ends[-_MOST_TRIES:][::-1])
        if places:
            break
    return list(places)


def _tries(places: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield (position at which a part may end, whether to escape invalid JSON in it); the slow escaping comes last."""
    yield from ((place, False) for place in places)
    yield from ((place, True) for place in places[:1])


def _count_objects(text: bytes | bytearray) -> int:
    """Return how many braces and brackets open in a text, which is at least the number of its objects and lists."""
    values = np.frombuffer(text, np.uint8)
    blocks = (values[at : at + _CACHED_BYTES] for at in range(0, len(values), _CACHED_BYTES))
    return sum(int(np.count_nonzero((block | 0x20) == ord("{"))) for block in blocks)  # [ differs from { in this bit


def _refuse_escaped_keys(text: bytes | bytearray) -> None:
    """Raise _NotInPartsError if a key holds an escaped character: then a search for keys would not find it."""
    if b"\\u" in text and _ESCAPED_KEY.search(text):
        raise _NotInPartsError


def _merged(header: Header | None, rest: Header) -> Header:
    """Return the document's top-level fields: those after its events, and of those before them what the former lack.

    ``rest`` holds the fields after the list of events, ``header`` those before it; it may be ``None``.
    """
    for name in Header.__struct_fields__ if header else ():
        if getattr(rest, name) is msgspec.UNSET:
            setattr(rest, name, getattr(header, name))
    return rest
