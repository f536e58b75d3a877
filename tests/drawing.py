"""Traces and sets of instants drawn with characters: one character is one nanosecond, if nothing else is said."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.trace import UNKNOWN, Activities, CallDetails, Calls, Category, Kind, Overhead, Spans, Table, Trace, empty

PID = 4242
MAIN = 4242
BLANK = " ."


def runs(picture: str) -> list[tuple[str, int, int]]:
    """(character, start, end) of each run of equal characters that is not blank."""
    found, position = [], 0
    for character, group in groupby(picture):
        length = len(list(group))
        if character not in BLANK:
            found.append((character, position, position + length))
        position += length
    return found


def instants(picture: str) -> Intervals:
    """The set drawn: ``"##..#"`` holds 0, 1 and 4."""
    drawn = runs(picture)
    return union(column(start for _, start, _ in drawn), column(end for _, _, end in drawn))


def picture_of(intervals: Intervals, length: int) -> str:
    """The inverse of :func:`instants`."""
    characters = ["."] * length
    for start, end in zip(intervals.start_ns, intervals.end_ns, strict=True):
        characters[start:end] = "#" * int(end - start)
    return "".join(characters)


def column(values) -> np.ndarray:
    return np.array(list(values), np.int64)


def with_details(trace: Trace, length: int = 2) -> Trace:
    """The same with names and ends of its calls, each of so many nanoseconds."""
    names = (*trace.names, "cudaLaunchKernel")
    ends, name_id = trace.calls.start_ns + length, np.full(len(trace.calls), len(trace.names))
    return replace(trace, names=names, call_details=CallDetails(ends, name_id))


def table(kind: type[Table], rows: list[dict[str, int]]) -> Table:
    return kind(**{name: column(row[name] for row in rows) for name in kind.__dataclass_fields__})


def draw_trace(
    *,
    ranges: dict[str, str] | list[tuple[str, str]] = (),
    launches: dict[str, str] | None = None,
    streams: dict[int, str] | None = None,
    device: int = 0,
    ranks: dict[int, int] | None = None,
    world_size: int | None = None,
    path: str = "drawn.sqlite",
    first_ns: int = 0,
    character_ns: int = 1,
) -> Trace:
    """One process.

    Args:
        first_ns: Time of the first character of each picture.
        character_ns: What a character lasts.
        ranges: Name and picture; all on the main thread.
        launches: Picture by thread name (``main`` is the main thread): each character, anywhere in any of them, is
            the launch of the activity drawn with it.
        streams: Picture by stream: a lower-case letter is a compute kernel, an upper-case one a collective, a digit
            a copy. Each activity has a character of its own.
    """
    names: list[str] = []

    def name_id(name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)

    activities, spans, calls, threads = [], [], [], {}
    for stream, picture in (streams or {}).items():
        for character, start, end in runs(picture):
            start, end = start * character_ns + first_ns, end * character_ns + first_ns
            category = Category.MEMORY if character.isdigit() else Category.COMPUTE
            category = Category.COMMUNICATION if character.isupper() else category
            activities.append(
                {
                    "start_ns": start,
                    "end_ns": end,
                    "process": PID,
                    "device": device,
                    "lane": stream,
                    "name_id": name_id(f"{category.name.lower()} {character}"),
                    "kind": Kind.COPY if character.isdigit() else Kind.KERNEL,
                    "category": category,
                    "correlation": ord(character),
                    "bytes": UNKNOWN,
                }
            )
    for number, (thread, picture) in enumerate((launches or {}).items()):
        lane = MAIN if thread == "main" else MAIN + 1 + number
        threads[PID, lane] = thread
        for character, start, end in runs(picture):
            assert end == start + 1, "a launch is one character"
            calls.append(
                {
                    "start_ns": start * character_ns + first_ns,
                    "process": PID,
                    "lane": lane,
                    "correlation": ord(character),
                }
            )
    for name, picture in ranges.items() if isinstance(ranges, dict) else ranges:
        for _, start, end in runs(picture):
            spans.append(
                {
                    "start_ns": start * character_ns + first_ns,
                    "end_ns": end * character_ns + first_ns,
                    "process": PID,
                    "lane": MAIN,
                    "name_id": name_id(name),
                    "is_start_end": 0,
                    "is_open": 0,
                }
            )
    return Trace(
        path=Path(path),
        source="nsys-sqlite",
        producer=None,
        activities=table(Activities, activities),
        spans=table(Spans, spans),
        calls=table(Calls, calls),
        threads=threads,
        ranks=ranks or {},
        world_size=world_size,
        overhead=empty(Overhead),
        names=tuple(names),
    )
