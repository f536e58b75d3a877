"""Lays out traces as a timeline: chooses steps and interval, and collects the facts about each run.

In this module, the *home* of a trace is the :class:`View` of the steps to show, or without steps that of the first to
the last work; its *view* is what the panel shows, which may begin earlier and end later. The *key* of a step is a
number that is unique among the measured steps of a rank (see ``Steps.keys``); one step has the same key on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.columns import milliseconds
from ddp_prof.errors import TraceError
from ddp_prof.present.text import gpu_name
from ddp_prof.present.timeline.lanes import View, lanes_of
from ddp_prof.present.timeline.model import (
    Panel,
    RankLanes,
    Source,
    StepMark,
    Timeline,
    captured_times,
    choose_step,
    drift_text,
    line_up,
)
from ddp_prof.range_names import PROCESS, parse_ranges
from ddp_prof.trace import Ints

MAX_BOXES = 20_000
"""About as many boxes as a browser draws as a picture within a second or two."""


def build_timeline(sources: Sequence[Source], steps: Collection[int] | None = None) -> Timeline:
    """Lay out traces from top to bottom with their first steps aligned.

    Files of one run whose clocks can be compared are aligned by these clocks instead.

    Args:
        sources: The traces, one per panel.
        steps: Numbers of the steps to show; ``None`` shows the whole capture.

    Raises:
        TraceError: A trace has none of the steps asked for.
    """
    chosen = [
        [_Rank(rank, _rows(rank, rank.steps.display_number, steps)) for rank in source.ranks] for source in sources
    ]
    # The whole capture.
    if steps is None:
        homes = _homes(sources, chosen)
        views = [View(home.zero_ns, *captured_times(source.trace)) for source, home in zip(sources, homes, strict=True)]
        return _lay_out(sources, chosen, homes, views)
    # Some steps: each trace must have one of them.
    for source, ranks in zip(sources, chosen, strict=True):
        path = source.trace.path
        numbers = [number for rank in source.ranks if rank.has_steps for number in rank.steps.display_number.tolist()]
        if not numbers:
            if reason := _why_left_out(source.ranks):
                raise TraceError(path, reason, "leave --steps out")
            raise TraceError(path, "it marks no whole step", "leave --steps out, or name steps with --step-range")
        if not any(len(rank.rows) for rank in ranks):
            reason = f"none of the steps asked for is among its measured steps {min(numbers)} to {max(numbers)}"
            raise TraceError(path, reason, "choose others")
    return _lay_out_steps(sources, chosen)


def build_excerpt(sources: Sequence[Source], steps: Collection[int] | None = None) -> Timeline:
    """Lay out a part of each trace that has few enough boxes for a picture.

    Args:
        sources: The traces, one per panel.
        steps: Numbers of the steps to show; by default :func:`typical_steps`. A trace without these steps shows the
            beginning of its capture: about ``MAX_BOXES`` boxes, divided equally among the traces.

    Raises:
        TraceError: A trace has none of the steps asked for.
    """
    if steps is not None:
        return build_timeline(sources, steps)
    keys = typical_steps(sources)
    chosen = [[_Rank(rank, _rows(rank, rank.step_keys, keys)) for rank in source.ranks] for source in sources]
    return _lay_out_steps(sources, chosen, MAX_BOXES // max(1, len(sources)))


def typical_steps(sources: Sequence[Source]) -> list[int]:
    """Return the keys of two successive steps: the typical one, on which a page opens, and the next.

    If the typical step is the last one, the step before it comes first. They are chosen in the first trace with steps,
    which may have only one. An empty list means that no trace has steps.
    """
    for source in sources:
        ranks = [_Rank(rank, _rows(rank, rank.step_keys, None)) for rank in source.ranks]
        # Only the order and the lengths of the steps matter here, so any time 0 will do.
        if marks := sorted(_step_marks(ranks, View(0, 0, 0)), key=lambda mark: mark.start_ns):
            keys = [mark.key for mark in marks]
            first = max(0, min(keys.index(choose_step(marks, source.typical_step)), len(keys) - 2))
            return keys[first : first + 2]
    return []


class _Rank(NamedTuple):
    """A rank, and the rows in ``events.steps`` of the steps to show; no rows if the capture has no steps."""

    events: RankEvents
    rows: Ints


def _why_left_out(ranks: Sequence[RankEvents]) -> str | None:
    return next((rank.why_left_out for rank in ranks if rank.why_left_out), None)


def _rows(events: RankEvents, keys: Ints, wanted: Collection[int] | None) -> Ints:
    """Return the rows of a rank's steps whose key or number is wanted.

    Args:
        events: The rank.
        keys: The key or the number of each of its steps.
        wanted: The keys or numbers to choose; ``None`` chooses all steps.
    """
    chosen = True if wanted is None else np.isin(keys, list(wanted))
    return np.flatnonzero(np.broadcast_to(chosen, len(keys)) & events.has_steps)


def _lay_out_steps(
    sources: Sequence[Source], chosen: Sequence[Sequence[_Rank]], most_boxes: int | None = None
) -> Timeline:
    """Lay out some steps of each trace.

    All panels show as much before and after time 0 as the panel that needs most, as far as their captures reach. So a
    panel with shorter steps also shows what follows them, and is not empty there.

    Args:
        sources: The traces.
        chosen: The ranks of each trace with their chosen steps.
        most_boxes: See :func:`_home`.
    """
    homes = _homes(sources, chosen, most_boxes)
    before = max((home.zero_ns - home.start_ns for home in homes), default=0)
    after = max((home.end_ns - home.zero_ns for home in homes), default=0)
    views = []
    for source, (zero, _, _) in zip(sources, homes, strict=True):
        first, last = captured_times(source.trace)
        views.append(View(zero, max(first, zero - before), min(last, zero + after)))
    return _lay_out(sources, chosen, views, views)


def _lay_out(
    sources: Sequence[Source], chosen: Sequence[Sequence[_Rank]], homes: Sequence[View], views: Sequence[View]
) -> Timeline:
    """Make the panels of a timeline, one per trace.

    Pages align panels by steps. So panels of a run on one clock get the same interval for a step: from its earliest
    start to its latest end in these panels.

    Args:
        sources: The traces.
        chosen: The ranks of each trace with their chosen steps.
        homes: The interval of the chosen steps, for each trace.
        views: What each panel shows.
    """
    panels = list(map(_panel, sources, chosen, homes, views))
    # By run and key of the step.
    marks: dict[tuple[int, int], StepMark] = {}
    for source, panel in zip(sources, panels, strict=True):
        for mark in panel.steps if source.clock else ():
            key = (source.run, mark.key)
            known = marks.get(key, mark)
            marks[key] = StepMark(mark.key, min(mark.start_ns, known.start_ns), max(mark.end_ns, known.end_ns))
    return Timeline(
        tuple(
            replace(panel, steps=tuple(marks[source.run, mark.key] for mark in panel.steps)) if source.clock else panel
            for source, panel in zip(sources, panels, strict=True)
        )
    )


def _homes(sources: Sequence[Source], chosen: Sequence[Sequence[_Rank]], most_boxes: int | None = None) -> list[View]:
    """Return the :func:`_home` of each trace, with time 0 shared by the files of a run on one clock."""
    homes = [_home(ranks, most_boxes) for ranks in chosen]
    zeros = line_up(sources, [home.zero_ns for home in homes])
    return [home._replace(zero_ns=zero) for home, zero in zip(homes, zeros, strict=True)]


def _home(ranks: Sequence[_Rank], most_boxes: int | None = None) -> View:
    """Return the interval of the chosen steps on host and device; time 0 is the start of the first step.

    Without steps it is the interval of all events, or of the first ones that make about ``most_boxes`` boxes. Then time
    0 is the start of the first event.
    """
    starts, ends, zeros = [], [], []
    for events, rows in ranks:
        if len(rows):
            first, last = (of_steps[rows] for of_steps in events.windows)
            filled = last > first
            starts += [*events.steps.start_ns[rows], *first[filled]]
            ends += [*events.steps.end_ns[rows], *last[filled]]
            zeros.append(events.steps.start_ns[rows].min())
    # The interval of the steps, if there are any.
    if starts:
        return View(int(min(zeros)), int(min(starts)), int(max(ends)))
    # Without steps: the interval of the events, warm-up included.
    tables = [table for rank in ranks if len(table := rank.events.including_warmup.events)]
    if not tables:
        return View(0, 0, 1)
    start = np.sort(np.concatenate([table.start_ns for table in tables]))
    end = max(int(table.end_ns.max()) for table in tables)
    if most_boxes is not None and len(start) > most_boxes // 4:  # an event makes up to four boxes
        end = int(start[most_boxes // 4])
    return View(int(start[0]), int(start[0]), end)


def _panel(source: Source, ranks: Sequence[_Rank], home: View, view: View) -> Panel:
    """Lay out one trace: the lanes of its ranks within the view, and the facts about its run."""
    lanes = []
    for (events, _), overlap, explained in zip(ranks, source.overlap.ranks, source.explained, strict=True):
        # A rank is named by its number; where that is not known, by its process and GPU.
        title = f"process {events.process}"
        if events.rank is not None:
            title = f"rank {events.rank}"
        elif events.device is not None:
            title = f"pid {events.process}, {gpu_name(events.device)}"
        own = lanes_of(events, view, explained, overlap)
        why_unknown = events.blocking.coverage.reason or overlap.reason
        lanes.append(RankLanes(title, overlap, own, explained, events.backward, why_unknown))
    return Panel(
        title=source.title,
        device=source.trace.device,
        gain=source.gain,
        run=source.run,
        told_of_run=source.told_of_run,
        facts=tuple(_facts(source, ranks, home, view)),
        ranks=tuple(lanes),
        steps=_step_marks(ranks, view),
        step_names={
            key: name
            for events, _ in ranks
            if events.has_steps
            for key, name in zip(events.step_keys.tolist(), events.steps.names, strict=True)
        },
        typical_step=source.typical_step,
        start_ns=view.start_ns - view.zero_ns,
        end_ns=view.end_ns - view.zero_ns,
        home_ns=(home.start_ns - view.zero_ns, home.end_ns - view.zero_ns),
    )


def _step_marks(ranks: Sequence[_Rank], view: View) -> tuple[StepMark, ...]:
    """Return the chosen steps, ordered by key, each with its interval over all ranks.

    The interval lasts from the start on the host to the end on host and device, whichever is later.
    """
    marks: dict[int, StepMark] = {}
    for events, rows in ranks:
        start_ns = events.steps.start_ns[rows] - view.zero_ns
        end_ns = np.maximum(events.steps.end_ns[rows], events.windows[1][rows]) - view.zero_ns
        columns = (column.tolist() for column in (events.step_keys[rows], start_ns, end_ns))
        for key, start, end in zip(*columns, strict=True):
            known = marks.get(key, StepMark(key, start, end))
            marks[key] = StepMark(key, min(start, known.start_ns), max(end, known.end_ns))
    return tuple(marks[key] for key in sorted(marks))


def _facts(source: Source, ranks: Sequence[_Rank], home: View, view: View) -> Iterator[str]:
    """Yield short texts about the run: caveats, ranks, backend, model, the steps shown, and how much is shown."""
    trace = source.trace
    # Our range around the process tells what the manifest does not, if there is no manifest.
    process = next(iter(parse_ranges(trace.names, PROCESS).values()), None)
    manifest = trace.manifest
    world = manifest.world_size if manifest else process and process.number("world")
    backend = manifest.backend if manifest else process and process.text("backend")
    count = f"{len(ranks)} of {world}" if world and world != len(ranks) else f"{len(ranks)}"
    yield from source.caveats
    yield f"{count} {'rank' if count == '1' else 'ranks'}"
    if backend:
        yield backend
    if manifest:
        yield f"model {manifest.model_size}, batch {manifest.batch_size} x {manifest.seq_len}"
    yield from _visible_steps_text(ranks, view)
    yield from _extent_text(source, ranks, home, view)


def _visible_steps_text(ranks: Sequence[_Rank], view: View) -> Iterator[str]:
    """Yield which steps begin in the view, or why there are none.

    Beside a longer panel these may be more steps than the chosen ones.
    """
    rank = next((events for events, rows in ranks if len(rows)), None)
    if rank is None:
        yield _why_left_out([events for events, _ in ranks]) or "no whole step is marked in this trace"
        return
    begins, end_ns = rank.steps.start_ns, max(view.end_ns, view.start_ns + 1)  # a view may have no length
    seen = np.flatnonzero((begins >= view.start_ns) & (begins < end_ns)).tolist()
    first, last = (rank.steps.names[row].removeprefix("step ") for row in (seen[0], seen[-1]))
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    measured = max(len(events.steps) for events, _ in ranks)
    yield span if len(seen) == measured else f"{span} shown; percentages over all {measured} measured steps"


def _extent_text(source: Source, ranks: Sequence[_Rank], home: View, view: View) -> Iterator[str]:
    """Yield how much of the capture the view holds, a note on clock drift, and which events are in no panel."""
    first, last = captured_times(source.trace)
    # Lengths of home, view and capture as texts; the 0 stands in for the time 0 of a View, which is not needed.
    seen, held, captured = (milliseconds(end - start) for _, start, end in (home, view, (0, first, last)))
    has_steps = any(len(rank.rows) for rank in ranks)
    if (view.start_ns, view.end_ns) == (first, last):
        where = "in measured steps" if has_steps else "from the first work to the last"
        yield f"all {captured} captured" + (f", {seen} of it {where}" if home != view else "")
    elif not has_steps:
        yield f"{held} of {captured} shown"
    yield from drift_text(source, view.start_ns, view.end_ns)
    # Ranges and CUDA calls of processes that are no rank have no lane.
    processes = [rank.process for rank in source.ranks]
    others = []
    for name, process in (("ranges", source.trace.spans.process), ("CUDA calls", source.trace.calls.process)):
        if count := int((~np.isin(process, processes)).sum()):
            others.append(f"{count:,} {name}")
    if others:
        yield f"left out: {' and '.join(others)} of processes that are no rank"
