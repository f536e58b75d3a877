"""Traces in Chrome's JSON event format, which Perfetto and chrome://tracing open.

Per process tracks of nested slices, and counters of communication. From top to bottom: the threads with their ranges,
their CUDA calls, the collectives as the host saw them, the streams of each device.

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
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np

from ddp_prof import __version__
from ddp_prof.analyze.core.attribution import CollectiveRanges
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.intervals import EVER, Intervals
from ddp_prof.atomic_file import atomic_write
from ddp_prof.present.timeline.model import Source
from ddp_prof.range_names import PHASES
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Ints, Table, Trace, distinct, empty, select, take_or_unknown

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


CATEGORIES = (*(category.name.lower() for category in Category), "range", "call")
"""What a slice is: what an activity was for, or a range or a call of the host."""

_RANGE, CALL = CATEGORIES.index("range"), CATEGORIES.index("call")


@dataclass(frozen=True)
class Slices(Table):
    """Slices of one lane by start, of those that start together the longest first: outer ones come before inner ones.

    Attributes:
        name_id: Index into :attr:`Track.names`.
        category: Index into :data:`CATEGORIES`.
        bytes: Bytes that it moves, ``UNKNOWN`` where not told.
        bucket: Bucket that it carries, ``UNKNOWN`` where not told.
        step: Number of the step that launched it, ``UNKNOWN`` where none did, or one of warm-up.
        occurrence: Which step of this number, from 1 on; ``UNKNOWN`` where the number does not come again.
        correlation: Id shared with its launching call, ``UNKNOWN`` for what has none.
        call: Row in ``Trace.calls`` of the call that launched it, or that it is; ``UNKNOWN`` where no arrow is drawn.
        feeds: Of a collective that its consumer waited for last its row in ``Trace.activities``; else ``UNKNOWN``.
        needs: Of what needs collectives that row of the one that it waited for last; ``UNKNOWN`` for all else.
    """

    start_ns: Ints
    end_ns: Ints
    name_id: Ints
    category: Ints
    bytes: Ints
    bucket: Ints
    step: Ints
    occurrence: Ints
    correlation: Ints
    call: Ints
    feeds: Ints
    needs: Ints


@dataclass(frozen=True)
class Track:
    """Slices of which any two are either nested or apart."""

    title: str
    slices: Slices
    names: Sequence[str]


@dataclass(frozen=True)
class Counter:
    """When communication of one device was overlapped, and when exposed."""

    title: str
    overlapped: Intervals
    exposed: Intervals


@dataclass(frozen=True)
class ProcessTracks:
    title: str
    tracks: tuple[Track, ...]
    counters: tuple[Counter, ...]


def make_tracks(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[ProcessTracks]:
    """The processes of a trace, ranks first and in their order."""
    of_ranks = [rank.process for rank in ranks]
    for process in dict.fromkeys((*of_ranks, *trace.processes, *distinct(trace.calls.process))):
        own = [rank for rank in ranks if rank.process == process]
        yield ProcessTracks(_process_title(process, own), _Builder(trace, process, own).tracks(), _counters(own))


def separate_crossing(start_ns: Ints, end_ns: Ints) -> Ints:
    """The lane of each slice: the first on which it lies within every slice that is open when it starts.

    000000000000..
    .0000.........
    ...1111.......    starts in the second slice and outlasts it
    .....0........
    ........111111    outlasts the first
    """
    lane = np.zeros(len(start_ns), np.int64)
    order = np.lexsort((-end_ns, start_ns))
    if np.all(start_ns[order][1:] >= np.maximum.accumulate(end_ns[order])[:-1]):
        return lane
    open_ends: list[list[int]] = []
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        lane[row] = _place(open_ends, start, end)
    return lane


def _place(open_ends: list[list[int]], start: int, end: int) -> int:
    """Add a slice to the first lane where it nests; each lane holds the ends of its open slices, innermost last."""
    for number, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or ends[-1] >= end:
            ends.append(end)
            return number
    open_ends.append([end])
    return len(open_ends) - 1


def _process_title(process: int, rank_events: Sequence[RankEvents]) -> str:
    rank = next((f"rank {events.rank}" for events in rank_events if events.rank is not None), None)
    where = [f"pid {process}"] if process else []
    where += ["CPU" if events.device is None else f"GPU {events.device}" for events in rank_events]
    return " ".join(filter(None, (rank or "process", f"({', '.join(where)})" if where else "")))


def _counters(rank_events: Sequence[RankEvents]) -> tuple[Counter, ...]:
    """Counters of the ranks that communicate; for others zero would mean that all of it was hidden."""
    counters = []
    for events in (rank.including_warmup for rank in rank_events):
        if len(events.union_of(Category.COMMUNICATION)):
            title = "communication" if len(rank_events) == 1 else f"communication, GPU {events.device}"
            parts = events.time_by_part(EVER)
            counters.append(Counter(title, parts["overlapped"], parts["exposed"]))
    return tuple(counters)


class _Builder:
    def __init__(self, trace: Trace, process: int, ranks: Sequence[RankEvents]) -> None:
        self.trace, self.process, self.ranks = trace, process, ranks
        self.collectives = ranks[0].collective_ranges if ranks else empty(CollectiveRanges)
        self.activities = np.flatnonzero(trace.activities.process == process)

    def tracks(self) -> tuple[Track, ...]:
        return tuple(
            lane
            for title, slices, names in (
                *self._ranges(),
                *self._calls(),
                *self._collective_ranges(),
                *self._work_of_host(),
                *self._streams(),
            )
            for lane in _split_into_tracks(title, slices, names)
        )

    def _ranges(self) -> Iterator[tuple[str, Slices, Sequence[str]]]:
        """Ranges by thread; those that may cross others apart from those that nest."""
        spans = self.trace.spans
        mine = spans.process == self.process
        mine[self.collectives.span] = False
        for thread in self._sort_threads(spans.lane[mine]):
            for is_start_end, suffix in ((0, ""), (1, ", start/end ranges")):
                own = select(spans, mine & (spans.lane == thread) & (spans.is_start_end == is_start_end))
                slices = _slices(own.start_ns, own.end_ns, own.name_id, _RANGE, **self._step_at(own.start_ns))
                yield self._thread_title(thread) + suffix, slices, self.trace.names

    def _calls(self) -> Iterator[tuple[str, Slices, Sequence[str]]]:
        """CUDA calls by thread; empty if names and ends of calls were not read."""
        calls, details = self.trace.calls, self.trace.call_details
        if details is None:
            return
        own = np.flatnonzero(calls.process == self.process)
        launches = np.zeros(len(calls) + 1, np.bool_)  # the last one is of what no call launched
        launches[self.trace.launching_calls] = True
        for thread in self._sort_threads(calls.lane[own]):
            rows = own[calls.lane[own] == thread]
            slices = _slices(
                calls.start_ns[rows],
                details.end_ns[rows],
                details.name_id[rows],
                CALL,
                correlation=calls.correlation[rows],
                call=np.where(launches[rows], rows, UNKNOWN),
                **self._step_at(calls.start_ns[rows]),
            )
            yield f"CUDA calls, {self._thread_title(thread)}", slices, self.trace.names

    def _collective_ranges(self) -> Iterator[tuple[str, Slices, Sequence[str]]]:
        """What the host saw of collectives; their only trace where no device communicated."""
        on_device = np.any(self.trace.activities.category[self.activities] == Category.COMMUNICATION)
        category = _RANGE if on_device else int(Category.COMMUNICATION)
        ranges = self.collectives
        slices = _slices(
            ranges.start_ns,
            ranges.end_ns,
            ranges.name_id,
            category,
            bytes=ranges.bytes,
            bucket=ranges.bucket,
            **self._step_at(ranges.start_ns),
        )
        yield "collectives, launch to completion", slices, self.trace.names

    def _work_of_host(self) -> Iterator[tuple[str, Slices, Sequence[str]]]:
        """What a CPU computed, as it is measured."""
        for rank in self.ranks:
            if rank.device is None:
                events = rank.including_warmup.select_category(Category.COMPUTE)
                step = self._step_at(events.start_ns)
                slices = _slices(events.start_ns, events.end_ns, events.phase, Category.COMPUTE, **step)
                yield "compute", slices, PHASES

    def _streams(self) -> Iterator[tuple[str, Slices, Sequence[str]]]:
        """What each device did, by stream."""
        activities = select(self.trace.activities, self.activities)
        call = self.trace.launching_calls[self.activities]
        launch_ns = take_or_unknown(self.trace.calls.start_ns, call, NO_TIME)
        row = self.collectives.ranges_of_activities(self.trace, self.activities)
        own_bytes = take_or_unknown(self.collectives.bytes, row)
        feeds, needs = self._feeds_and_needs()
        slices = _slices(
            activities.start_ns,
            activities.end_ns,
            activities.name_id,
            activities.category,
            bytes=np.where(activities.bytes == UNKNOWN, own_bytes, activities.bytes),
            bucket=take_or_unknown(self.collectives.bucket, row),
            correlation=activities.correlation,
            call=call if self.trace.call_details else np.full_like(call, UNKNOWN),
            feeds=feeds[self.activities],
            needs=needs[self.activities],
            **self._step_at(launch_ns),
        )
        for device, stream in np.unique(np.stack([activities.device, activities.lane]), axis=1).T.tolist():
            on_stream = select(slices, (activities.device == device) & (activities.lane == stream))
            time_ns = np.bincount(on_stream.category, weights=on_stream.end_ns - on_stream.start_ns)
            title = f"GPU {device}, stream {stream}: {CATEGORIES[int(time_ns.argmax())]}"
            yield title, on_stream, self.trace.names

    def _feeds_and_needs(self) -> tuple[Ints, Ints]:
        """For each activity of the trace ``feeds`` and ``needs`` of its slice."""
        feeds, needs = np.full((2, len(self.trace.activities)), UNKNOWN)
        for rank in self.ranks:
            found = rank.blocking.consumers
            order = np.lexsort((-found.slack_ns, found.consumer))  # of several collectives the closest one stays
            needs[found.consumer[order]] = rank.events.activity[found.collective[order]]
        consumers = np.flatnonzero(needs != UNKNOWN)
        feeds[needs[consumers]] = needs[consumers]
        return feeds, needs

    def _sort_threads(self, threads: Ints) -> list[int]:
        """Each of the threads once, the main one first."""
        return sorted(distinct(threads), key=lambda thread: (thread != self.process, thread))

    def _thread_title(self, thread: int) -> str:
        name = self.trace.threads.get((self.process, thread), "thread")
        return f"main thread {thread}" if thread == self.process else f"{name} {thread}"

    def _step_at(self, time_ns: Ints) -> dict[str, Ints]:
        """The measured step whose host range holds each instant; a process that is no rank has none."""
        if not self.ranks or not self.ranks[0].has_steps:
            return {}
        steps = self.ranks[0].steps
        row, (which, times) = steps.index_at(time_ns), steps.occurrence
        return {
            "step": take_or_unknown(steps.display_number, row),
            "occurrence": take_or_unknown(np.where(times > 1, which, UNKNOWN), row),
        }


def _slices(start_ns: Ints, end_ns: Ints, name_id: Ints, category: Ints | int, **columns: Ints) -> Slices:
    """Slices, of one category or of one each; columns not given hold ``UNKNOWN``."""
    unknown = np.full(len(start_ns), UNKNOWN, np.int64)
    category = np.broadcast_to(np.asarray(category, np.int64), len(start_ns))
    optional = dict.fromkeys(
        ("bytes", "bucket", "step", "occurrence", "correlation", "call", "feeds", "needs"), unknown
    )
    return Slices(start_ns, end_ns, name_id, category, **(optional | columns))


def _split_into_tracks(title: str, slices: Slices, names: Sequence[str]) -> Iterator[Track]:
    """As many tracks as it takes for slices to nest; none where there is no slice."""
    slices = select(slices, np.lexsort((-slices.end_ns, slices.start_ns)))
    lane = separate_crossing(slices.start_ns, slices.end_ns)
    for number in range(int(lane.max(initial=-1)) + 1):
        yield Track(title if number == 0 else f"{title} ({number + 1})", select(slices, lane == number), names)
