"""Traces in Chrome's JSON event format, which Perfetto and chrome://tracing open.

Viewers drop a slice that crosses another one of its track, so crossing slices come on tracks of their own. Times are
microseconds in this format; they are written from integers, with three decimals, and so lose no nanosecond. Arrows
("flows") lead from each call to what it launched, and from a collective to what waited for it: viewers bind their ends
to the slices open at their times, so they follow these in the file.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np

from ddp_prof import __version__
from ddp_prof.atomic_file import atomic_write
from ddp_prof.present.perfetto.tracks import CALL, CATEGORIES, Counter, Slices, Track, make_tracks
from ddp_prof.present.timeline.model import Source
from ddp_prof.trace import UNKNOWN, Ints, select

_ARGUMENTS = ("bytes", "bucket", "step", "occurrence", "correlation")
_ROWS = 65_536
_COMPRESSION = 3


def write_perfetto(sources: Sequence[Source], path: Path) -> None:
    """Write traces as one file, gzipped where its name ends in ``.gz``; it is there whole or not at all.

    Time counts from the first event; of several traces the first measured steps are lined up. Ids of processes and
    threads are the file's own, since those of two traces may collide; titles tell the real ones.
    """
    zeros = _zero_times(sources)
    with atomic_write(path) as partial, _open_output(partial, compressed=path.suffix == ".gz") as file:
        file.write(
            f'{{"displayTimeUnit":"ns","otherData":{json.dumps(_metadata_header(sources, zeros))},"traceEvents":['
        )
        separator = "\n"
        for events in _events(sources, zeros):
            file.write(separator + ",\n".join(events))
            separator = ",\n"
        file.write("\n]}\n")


@contextmanager
def _open_output(path: Path, *, compressed: bool) -> Iterator[IO[str]]:
    if not compressed:
        with path.open("w", encoding="ascii") as file:
            yield file
        return
    # Without name and time, the same trace gives the same bytes.
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="ascii") as file,
    ):
        yield file


def _zero_times(sources: Sequence[Source]) -> list[int]:
    """The instant of each trace that is the file's time 0; no event lies before it."""
    firsts = []
    for source in sources:
        tables = (source.trace.activities, source.trace.spans, source.trace.calls)
        firsts.append(min((int(table.start_ns.min()) for table in tables if len(table)), default=0))
    if len(sources) == 1:
        return firsts
    anchors = [
        min((int(rank.steps.start_ns.min()) for rank in source.ranks if rank.has_steps), default=first)
        for source, first in zip(sources, firsts, strict=True)
    ]
    lead = max((anchor - first for anchor, first in zip(anchors, firsts, strict=True)), default=0)
    return [anchor - lead for anchor in anchors]


def _metadata_header(sources: Sequence[Source], zeros: Sequence[int]) -> dict[str, object]:
    """What the file was made from; viewers show it as the trace's metadata."""
    return {
        "made by": f"ddp-prof {__version__}",
        "device": ", ".join(sorted({source.trace.device for source in sources})),
        "caveats": list(dict.fromkeys(caveat for source in sources for caveat in source.caveats)),
        "time 0": {
            f"{source.title} ({source.trace.path.name})": f"{zero} ns"
            for source, zero in zip(sources, zeros, strict=True)
        },
    }


def _events(sources: Sequence[Source], zeros: Sequence[int]) -> Iterator[list[str]]:
    """All events as JSON, some at a time."""
    processes, threads = count(1), count(1)
    first_calls = np.cumsum([0, *(len(source.trace.calls) for source in sources)]).tolist()
    first_activities = np.cumsum([0, *(len(source.trace.activities) for source in sources)]).tolist()
    for source, zero_ns, first_call, first_activity in zip(sources, zeros, first_calls, first_activities, strict=False):
        for process in make_tracks(source.trace, source.ranks):
            title = process.title if len(sources) == 1 else f"{source.title}: {process.title}"
            pid = next(processes)
            yield [
                _metadata("process_name", pid, 0, name=title),
                _metadata("process_sort_index", pid, 0, sort_index=pid),
            ]
            for counter in process.counters:
                yield _counter_events(counter, pid, zero_ns)
            for lane in process.tracks:
                tid = next(threads)
                yield [
                    _metadata("thread_name", pid, tid, name=lane.title),
                    _metadata("thread_sort_index", pid, tid, sort_index=tid),
                ]
                yield from _lane_events(lane, pid, tid, zero_ns, first_call, first_activity)


def _metadata(kind: str, pid: int, tid: int, **values: str | int) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": values}, separators=(",", ":"))


def _counter_events(counter: Counter, pid: int, zero_ns: int) -> list[str]:
    """Two steps between 0 and 1: their integrals are the rank's overlapped and exposed time."""
    sets = (counter.overlapped, counter.exposed)
    times = np.unique(np.concatenate([edges for intervals in sets for edges in (intervals.start_ns, intervals.end_ns)]))
    overlapped, exposed = (intervals.covered_ns(times, times + 1).tolist() for intervals in sets)
    head = f'{{"ph":"C","name":{json.dumps(counter.title)},"pid":{pid},"ts":'
    return [
        f'{head}{time},"args":{{"overlapped":{hidden},"exposed":{bare}}}}}'
        for time, hidden, bare in zip(_microseconds(times - zero_ns), overlapped, exposed, strict=True)
    ]


def _lane_events(
    lane: Track, pid: int, tid: int, zero_ns: int, first_call: int, first_activity: int
) -> Iterator[list[str]]:
    """One complete event ("X") per slice; viewers take the first of those that start together for the outer one.

    Behind them the ends of arrows, at the starts of the slices that they belong to.
    """
    head = f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":'
    names = {
        value: json.dumps("" if value == UNKNOWN else lane.names[value])
        for value in np.unique(lane.slices.name_id).tolist()
    }
    for first in range(0, len(lane.slices), _ROWS):
        slices = select(lane.slices, np.arange(first, min(first + _ROWS, len(lane.slices))))
        yield [
            f'{head}{start},"dur":{duration},"name":{names[name]},"cat":"{CATEGORIES[category]}"{arguments}}}'
            for start, duration, name, category, arguments in zip(
                _microseconds(slices.start_ns - zero_ns),
                _microseconds(slices.end_ns - slices.start_ns),
                slices.name_id.tolist(),
                slices.category.tolist(),
                _arguments(slices),
                strict=True,
            )
        ]
        launched = (slices.call != UNKNOWN) & (slices.category != CALL)
        arrows = (
            ("launch", '"s"', slices.category == CALL, slices.call + first_call),
            ("launch", '"f","bp":"e"', launched, slices.call + first_call),
            ("needed by", '"s"', slices.feeds != UNKNOWN, slices.feeds + first_activity),
            ("needed by", '"f","bp":"e"', slices.needs != UNKNOWN, slices.needs + first_activity),
        )
        for name, end, rows, arrow in arrows:
            linked = np.flatnonzero(rows & ((slices.call != UNKNOWN) | (name != "launch")))
            if len(linked):
                times = _microseconds(slices.start_ns[linked] - zero_ns)
                yield [
                    f'{{"ph":{end},"pid":{pid},"tid":{tid},"ts":{start},"id":{number},"name":"{name}","cat":"{name}"}}'
                    for start, number in zip(times, arrow[linked].tolist(), strict=True)
                ]


def _arguments(slices: Slices) -> list[str]:
    """What is known of each slice, as the end of its event."""
    columns = []
    for key in _ARGUMENTS:
        values = getattr(slices, key)
        if np.any(values != UNKNOWN):
            columns.append([f'"{key}":{value}' if value != UNKNOWN else "" for value in values.tolist()])
    if not columns:
        return [""] * len(slices)
    return [f',"args":{{{",".join(filter(None, row))}}}' for row in zip(*columns, strict=True)]


def _microseconds(times_ns: Ints) -> list[str]:
    """Times that are not negative, as decimal numbers."""
    whole, rest = np.divmod(times_ns, 1000)
    return [f"{micro}.{nano:03d}" for micro, nano in zip(whole.tolist(), rest.tolist(), strict=True)]
