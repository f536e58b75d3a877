"""Writes traces in Chrome's JSON event format, which Perfetto and chrome://tracing open.

Each process has tracks of nested slices, and counters of communication. From top to bottom: ranges by thread, CUDA
calls by thread, collectives as the host saw them, and the streams of each device.

Viewers drop a slice that crosses another slice of its track, so crossing slices get separate tracks. Times are in
microseconds; they are written from integers with three decimals and lose no nanosecond. Arrows ("flows") lead
from each call to the work that it launched, and from a collective to the operation that waited for it. Viewers attach
their ends to the slices open at that time, so arrows follow the slices in the file.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from ddp_prof import __version__
from ddp_prof.analyze.core.attribution import CollectiveRanges
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.intervals import EVER
from ddp_prof.analyze.why_unknown import INCOMPLETE_COMMUNICATES, NOTHING_LEFT, WARMUP_COMMUNICATES
from ddp_prof.atomic_file import atomic_write
from ddp_prof.present.text import gpu_name
from ddp_prof.present.timeline.model import Source, captured_times, drift_text, line_up
from ddp_prof.range_names import PHASES
from ddp_prof.table import empty, fill, select, take_or_unknown
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Ints, Table, Trace, distinct

_ARGUMENTS = ("bytes", "bucket", "step", "occurrence", "correlation")
"""Columns of :class:`Slices` that a viewer shows beside a selected slice."""
_KNOWN = (None, *NOTHING_LEFT, WARMUP_COMMUNICATES, INCOMPLETE_COMMUNICATES)
"""Values of a rank's ``reason`` with which its compute and communication are known, although the ratio may not be."""
_SLICES_AT_ONCE = 65_536
"""Slices that are formatted at once, so that a trace with millions of events takes little memory."""
_COMPRESSION = 3  # level of gzip


def write_perfetto(sources: Sequence[Source], path: Path) -> None:
    """Write traces to one file, gzipped if its name ends in ``.gz``; if that fails, there is no file.

    Time 0 of the file is the first event. Several traces are aligned by their first measured steps, ranks of one run by
    their clocks. Processes and threads get new numbers, because those of two traces may collide; their titles contain
    the recorded numbers.
    """
    zeros = _zero_times(sources)
    # What the file says about itself: its origin, caveats, time 0 of each trace, and clock drifts that remain.
    titles = [f"{source.title} ({source.trace.path.name})" for source in sources]
    header = {
        "made by": f"ddp-prof {__version__}",
        "device": ", ".join(sorted({source.trace.device for source in sources})),
        "caveats": _caveats(sources),
        "time 0": {title: f"{zero} ns" for title, zero in zip(titles, zeros, strict=True)},
        "clocks": {
            title: text
            for title, source in zip(titles, sources, strict=True)
            for text in drift_text(source, *captured_times(source.trace))
        },
    }
    with atomic_write(path) as partial, partial.open("wb") as raw:
        # Without a name and a time in the gzip header, the same trace gives the same bytes.
        packed = gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) if path.suffix == ".gz" else raw
        with io.TextIOWrapper(packed, encoding="ascii") as file:
            file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(header)},"traceEvents":[')
            separator = "\n"
            for events in _events(sources, zeros):
                file.write(separator + ",\n".join(events))
                separator = ",\n"
            file.write("\n]}\n")


def _caveats(sources: Sequence[Source]) -> list[str]:
    """Return the caveats of the traces; of several traces, one that does not hold for all names its trace."""
    return list(
        dict.fromkeys(
            caveat if all(caveat in other.caveats for other in sources) else f"{source.title}: {caveat}"
            for source in sources
            for caveat in source.caveats
        )
    )


def _zero_times(sources: Sequence[Source]) -> list[int]:
    """Return for each trace the time, in its own times, that is time 0 of the file; no event is before it."""
    firsts = [captured_times(source.trace)[0] for source in sources]
    if len(sources) == 1:
        return firsts
    starts = [
        min((int(rank.steps.start_ns.min()) for rank in source.ranks if len(rank.steps)), default=first)
        for source, first in zip(sources, firsts, strict=True)
    ]
    anchors = line_up(sources, starts)
    # How long before its aligned step the earliest event of any trace lies.
    lead = max((anchor - first for anchor, first in zip(anchors, firsts, strict=True)), default=0)
    return [anchor - lead for anchor in anchors]


def _events(sources: Sequence[Source], zeros: Sequence[int]) -> Iterator[list[str]]:
    """Yield the events of the file as lists of JSON texts.

    They come process by process: its name, its counters, then each track with its slices and arrows.
    """
    # Numbers of the file's own. Ids of arrows are rows of calls and activities, counted over all traces.
    pids, tids = count(1), count(1)
    first_call = first_activity = 0
    for source, zero_ns in zip(sources, zeros, strict=True):
        trace = source.trace
        of_ranks = [rank.process for rank in source.ranks]
        for process in dict.fromkeys((*of_ranks, *trace.processes, *distinct(trace.calls.process))):
            ranks = [rank for rank in source.ranks if rank.process == process]
            title, pid = _process_title(process, ranks), next(pids)
            yield _names("process", pid, 0, title if len(sources) == 1 else f"{source.title}: {title}")
            # Ranks whose compute and communication are known have counters.
            known = [
                rank
                for rank, overlap in zip(source.ranks, source.overlap.ranks, strict=True)
                if rank.process == process and overlap.reason in _KNOWN
            ]
            yield from _counters(known, pid, zero_ns, is_alone=len(ranks) == 1)
            for track_title, slices, names in _Process(trace, process, ranks).tracks():
                tid = next(tids)
                yield _names("thread", pid, tid, track_title)
                yield from _slice_events(slices, names, pid, tid, zero_ns, first_call, first_activity)
        first_call += len(trace.calls)
        first_activity += len(trace.activities)


def _names(kind: str, pid: int, tid: int, title: str) -> list[str]:
    """Return the two events that give a process or a thread (the ``kind``) its title and its place among the others."""
    return [
        json.dumps(
            {"ph": "M", "name": f"{kind}_{key}", "pid": pid, "tid": tid, "args": {key: value}}, separators=(",", ":")
        )
        for key, value in (("name", title), ("sort_index", tid or pid))
    ]


def _counters(ranks: Sequence[RankEvents], pid: int, zero_ns: int, *, is_alone: bool) -> Iterator[list[str]]:
    """Yield two counters per rank that are 0 or 1; their integrals are the rank's overlapped and exposed time.

    Ranks without communication have none, because an exposed time of 0 would mean that all communication was hidden.
    Ranks with CUDA graphs that were recorded as a whole have none, because it is not known what these computed.

    Args:
        ranks: The ranks of a process whose compute and communication are known.
        pid: The process in the file.
        zero_ns: Time 0 of the file, in the trace's own times.
        is_alone: Whether the process has one rank, so that the title need not name its GPU.
    """
    for events in (rank.including_warmup for rank in ranks):
        if not len(events.union_of(Category.COMMUNICATION)) or len(events.union_of(Category.OTHER)):
            continue
        title = "communication" if is_alone else f"communication, {gpu_name(events.device)}"
        parts = events.time_by_part(EVER)
        sets = (parts["overlapped"], parts["exposed"])
        times = np.unique(
            np.concatenate([ends for intervals in sets for ends in (intervals.start_ns, intervals.end_ns)])
        )
        # Whether each time begins an overlapped, or an exposed, stretch: the nanosecond that follows is covered or not.
        overlapped, exposed = (intervals.covered_ns(times, times + 1).tolist() for intervals in sets)
        head = f'{{"ph":"C","name":{json.dumps(title)},"pid":{pid},"ts":'
        yield [
            f'{head}{time},"args":{{"overlapped":{hidden},"exposed":{bare}}}}}'
            for time, hidden, bare in zip(_microseconds(times - zero_ns), overlapped, exposed, strict=True)
        ]


def _slice_events(
    track: Slices, names: Sequence[str], pid: int, tid: int, zero_ns: int, first_call: int, first_activity: int
) -> Iterator[list[str]]:
    """Yield the events of a track: a complete event ("X") per slice, and the ends of arrows at the starts of slices.

    Outer slices come before those in them. ``pid`` and ``tid`` are the numbers of process and thread in the file,
    ``zero_ns`` is its time 0 in the trace's own times. ``first_call`` and ``first_activity`` are the numbers of calls
    and activities in the traces before: ids of arrows count on from there.
    """
    head = f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":'
    encoded = {value: json.dumps("" if value == UNKNOWN else names[value]) for value in distinct(track.name_id)}
    for first in range(0, len(track), _SLICES_AT_ONCE):
        slices = select(track, np.arange(first, min(first + _SLICES_AT_ONCE, len(track))))
        yield [
            f'{head}{start},"dur":{duration},"name":{encoded[name]},"cat":"{CATEGORIES[category]}"{arguments}}}'
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
        # Name and end of the arrows (s: start, f: finish; bp e: at the slice that is open then), which slices have such
        # an end, and the id that joins both ends.
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
    """Return the arguments of each slice as JSON, with a comma before; empty if nothing is known."""
    columns = []
    for key in _ARGUMENTS:
        values = getattr(slices, key)
        if np.any(values != UNKNOWN):
            columns.append([f'"{key}":{value}' if value != UNKNOWN else "" for value in values.tolist()])
    if not columns:
        return [""] * len(slices)
    return [f',"args":{{{",".join(filter(None, row))}}}' for row in zip(*columns, strict=True)]


def _microseconds(times_ns: Ints) -> list[str]:
    """Format times, which must not be negative, as decimal numbers of microseconds."""
    whole, rest = np.divmod(times_ns, 1000)
    return [f"{micro}.{nano:03d}" for micro, nano in zip(whole.tolist(), rest.tolist(), strict=True)]


CATEGORIES = (*(category.name.lower() for category in Category), "range", "call")
"""The category of a slice: one of the activities' categories, or a range or a call of the host."""

_RANGE, CALL = CATEGORIES.index("range"), CATEGORIES.index("call")


@dataclass(frozen=True)
class Slices(Table):
    """The slices of one lane, sorted by start; of slices that start together the longest, the outer one, is first.

    Attributes:
        name_id: Index into the names of the trace, or of phases.
        category: Index into :data:`CATEGORIES`.
        step: Number of the measured step that launched it, ``UNKNOWN`` for none.
        occurrence: Position among the steps with the same number, from 1; ``UNKNOWN`` if the number is unique.
        call: Row in ``Trace.calls`` of its launch call (the slice of a call has its own row here); ``UNKNOWN`` if there
            is no arrow.
        feeds: For a collective that its consumer waited for last, its row in ``Trace.activities``; else ``UNKNOWN``.
        needs: For a consumer, the row in ``Trace.activities`` of the collective that it waited for last; else
            ``UNKNOWN``.
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


def separate_crossing(start_ns: Ints, end_ns: Ints) -> Ints:
    """Return the lane of each slice: the first lane on which all slices that are open at its start contain it.

    Here each line is a slice, drawn with the number of its lane::

        000000000000..
        .0000.........
        ...1111.......    starts in the second slice and ends after it
        .....0........
        ........111111    ends after the first slice
    """
    lane = np.zeros(len(start_ns), np.int64)
    order = np.lexsort((-end_ns, start_ns))
    # Slices that follow each other, which is the usual case, need one lane.
    if np.all(start_ns[order][1:] >= np.maximum.accumulate(end_ns[order])[:-1]):
        return lane
    open_ends: list[list[int]] = []  # for each lane the ends of its open slices, innermost last
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        number = next((at for at, ends in enumerate(open_ends) if not ends or ends[-1] >= end), len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(end)
        lane[row] = number
    return lane


def _process_title(process: int, rank_events: Sequence[RankEvents]) -> str:
    """Return a title such as ``rank 0 (pid 17, GPU 0)`` for a process and its ranks."""
    rank = next((f"rank {events.rank}" for events in rank_events if events.rank is not None), None)
    where = [f"pid {process}"] if process else []
    where += [gpu_name(events.device) for events in rank_events]
    return " ".join(filter(None, (rank or "process", f"({', '.join(where)})" if where else "")))


Lane = tuple[str, Slices, Sequence[str]]
"""A title, slices, and the names that their ``name_id`` indexes."""


class _Process:
    """The tracks of a process.

    Args:
        trace: The trace.
        process: The number of the process in it.
        ranks: The ranks of the process, one per device; there may be none.
    """

    def __init__(self, trace: Trace, process: int, ranks: Sequence[RankEvents]) -> None:
        self.trace, self.process, self.ranks = trace, process, ranks
        self.collectives = ranks[0].collective_ranges if ranks else empty(CollectiveRanges)
        self.activities = np.flatnonzero(trace.activities.process == process)

    def tracks(self) -> Iterator[Lane]:
        """Yield tracks in which any two slices are nested or disjoint; none is empty.

        The crossing slices of a lane get further tracks, whose titles are numbered.
        """
        lanes = (self._ranges, self._calls, self._collective_ranges, self._host_compute, self._streams)
        for title, slices, names in (lane for make in lanes for lane in make()):
            slices = select(slices, np.lexsort((-slices.end_ns, slices.start_ns)))
            track = separate_crossing(slices.start_ns, slices.end_ns)
            for number in range(int(track.max(initial=-1)) + 1):
                yield title if number == 0 else f"{title} ({number + 1})", select(slices, track == number), names

    def _ranges(self) -> Iterator[Lane]:
        """Yield the ranges of each thread, without those of collectives.

        Start/end ranges, which may cross, are apart from push/pop ranges.
        """
        spans = self.trace.spans
        mine = spans.process == self.process
        mine[self.collectives.span] = False
        for thread in self._sort_threads(spans.lane[mine]):
            for is_start_end, suffix in ((0, ""), (1, ", start/end ranges")):
                own = select(spans, mine & (spans.lane == thread) & (spans.is_start_end == is_start_end))
                slices = self._slices(own.start_ns, own.end_ns, own.name_id, _RANGE)
                yield self._thread_title(thread) + suffix, slices, self.trace.names

    def _calls(self) -> Iterator[Lane]:
        """Yield the CUDA calls of each thread; nothing if names and ends of calls were not read."""
        calls, details = self.trace.calls, self.trace.call_details
        if details is None:
            return
        own = np.flatnonzero(calls.process == self.process)
        launches = np.zeros(len(calls) + 1, np.bool_)  # the last one is for UNKNOWN (-1): work without a call
        launches[self.trace.launching_calls] = True
        for thread in self._sort_threads(calls.lane[own]):
            rows = own[calls.lane[own] == thread]
            slices = self._slices(
                calls.start_ns[rows],
                details.end_ns[rows],
                details.name_id[rows],
                CALL,
                correlation=calls.correlation[rows],
                call=np.where(launches[rows], rows, UNKNOWN),
            )
            yield f"CUDA calls, {self._thread_title(thread)}", slices, self.trace.names

    def _collective_ranges(self) -> Iterator[Lane]:
        """Yield the host's ranges of collectives; they count as communication if no device communicates."""
        on_device = np.any(self.trace.activities.category[self.activities] == Category.COMMUNICATION)
        category = _RANGE if on_device else int(Category.COMMUNICATION)
        ranges = self.collectives
        columns = {"bytes": ranges.bytes, "bucket": ranges.bucket}
        slices = self._slices(ranges.start_ns, ranges.end_ns, ranges.name_id, category, **columns)
        yield "collectives, launch to completion", slices, self.trace.names

    def _host_compute(self) -> Iterator[Lane]:
        """Yield the compute of a rank on a CPU, with the names of its phases."""
        for rank in self.ranks:
            if rank.device is None:
                events = rank.including_warmup.select_category(Category.COMPUTE)
                yield "compute", self._slices(events.start_ns, events.end_ns, events.phase, Category.COMPUTE), PHASES

    def _streams(self) -> Iterator[Lane]:
        """Yield the streams of each device; the title names the category that takes most of a stream's time."""
        # Communication takes bucket and bytes from the range in which it was launched.
        activities = select(self.trace.activities, self.activities)
        call = self.trace.launching_calls[self.activities]
        launch_ns = take_or_unknown(self.trace.calls.start_ns, call, NO_TIME)
        row = self.collectives.ranges_of_activities(self.trace, self.activities)
        own_bytes = take_or_unknown(self.collectives.bytes, row)
        feeds, needs = self._feeds_and_needs()
        disagree = any(rank.clocks_disagree for rank in self.ranks)  # then an arrow from a call has no meaning
        slices = self._slices(
            activities.start_ns,
            activities.end_ns,
            activities.name_id,
            activities.category,
            launch_ns,
            bytes=np.where(activities.bytes == UNKNOWN, own_bytes, activities.bytes),
            bucket=take_or_unknown(self.collectives.bucket, row),
            correlation=activities.correlation,
            call=call if self.trace.call_details and not disagree else np.full_like(call, UNKNOWN),
            feeds=feeds[self.activities],
            needs=needs[self.activities],
        )
        # Each pair of device and stream becomes a lane.
        for device, stream in np.unique(np.stack([activities.device, activities.lane]), axis=1).T.tolist():
            on_stream = select(slices, (activities.device == device) & (activities.lane == stream))
            time_ns = np.bincount(on_stream.category, weights=on_stream.end_ns - on_stream.start_ns)
            title = f"{gpu_name(device)}, stream {stream}: {CATEGORIES[int(time_ns.argmax())]}"
            yield title, on_stream, self.trace.names

    def _feeds_and_needs(self) -> tuple[Ints, Ints]:
        """Return the columns ``feeds`` and ``needs`` of :class:`Slices` for all activities of the trace.

        An operation that waited for several collectives needs the one with the least slack.
        """
        feeds, needs = np.full((2, len(self.trace.activities)), UNKNOWN)
        for rank in self.ranks:
            found = rank.blocking.consumers
            order = np.lexsort((-found.slack_ns, found.consumer))  # the collective with least slack is written last
            needs[found.consumer[order]] = rank.events.activity[found.collective[order]]
        consumers = np.flatnonzero(needs != UNKNOWN)
        feeds[needs[consumers]] = needs[consumers]
        return feeds, needs

    def _sort_threads(self, threads: Ints) -> list[int]:
        """Return the distinct threads in ascending order, the main thread first; its number is that of the process."""
        return sorted(distinct(threads), key=lambda thread: (thread != self.process, thread))

    def _thread_title(self, thread: int) -> str:
        """Return the name of a thread with its number, which torch.profiler's names already hold."""
        name = self.trace.threads.get((self.process, thread), "thread")
        if thread == self.process:
            return f"main thread {thread}"
        return name if str(thread) in name.split() else f"{name} {thread}"

    def _slices(
        self,
        start_ns: Ints,
        end_ns: Ints,
        name_id: Ints,
        category: Ints | int,
        launch_ns: Ints | None = None,
        **columns: Ints,
    ) -> Slices:
        """Return slices from their columns; missing columns hold ``UNKNOWN``.

        A slice belongs to the measured step whose host range contains its launch, ``launch_ns`` (by default its start).
        The steps are those of the process's first rank; a process without a rank has none. ``occurrence`` tells apart
        several steps with the same number, and is ``UNKNOWN`` if the number is unique. ``category`` is one category for
        all slices, or one for each.
        """
        if self.ranks and self.ranks[0].has_steps:
            steps = self.ranks[0].steps
            row, (which, times) = steps.index_at(start_ns if launch_ns is None else launch_ns), steps.occurrence
            columns["step"] = take_or_unknown(steps.display_number, row)
            columns["occurrence"] = take_or_unknown(np.where(times > 1, which, UNKNOWN), row)
        category = np.broadcast_to(np.asarray(category, np.int64), len(start_ns))
        return fill(
            Slices, len(start_ns), start_ns=start_ns, end_ns=end_ns, name_id=name_id, category=category, **columns
        )
