"""Lays out traces as a timeline: which steps are shown, from when to when, and what is known of each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.present.text import milliseconds
from ddp_prof.present.timeline.boxes import View
from ddp_prof.present.timeline.lanes import lanes_of
from ddp_prof.present.timeline.model import Panel, RankLanes, StepMark, Timeline
from ddp_prof.range_names import PROCESS, ranges_among
from ddp_prof.trace import select

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.core.step_breakdown import StepBreakdown
    from ddp_prof.present.timeline.model import Source
    from ddp_prof.trace import Ints

MAX_BOXES = 20_000
"""About how many boxes a browser draws as a picture within a second or two."""

_NONE = np.empty(0, np.int64)


def build_timeline(
    sources: Sequence[Source],
    *,
    steps: Collection[int] | None = None,
    max_boxes: int | None = None,
) -> Timeline:
    """Lay out traces above each other, their first steps lined up.

    Args:
        sources: The traces, top to bottom.
        steps: Numbers of the steps to show; by default all, or the first that make about ``max_boxes`` boxes.
        max_boxes: See ``steps``; a picture holds about :data:`MAX_BOXES`, a page any number.

    Raises:
        TraceError: A trace has none of the steps asked for.
    """
    share = max_boxes // max(1, len(sources)) if max_boxes else None
    chosen = [_choose(source, steps, share) for source in sources]
    views = [_view(ranks, share) for ranks in chosen]
    # All panels show the same stretch of time, so that none looks empty where another one goes on.
    before = max((view.zero_ns - view.start_ns for view in views), default=0)
    after = max((view.end_ns - view.zero_ns for view in views), default=0)
    views = [View(view.zero_ns, view.zero_ns - before, view.zero_ns + after) for view in views]
    return Timeline(tuple(map(_panel, sources, chosen, views)))


def build_excerpt(sources: Sequence[Source], steps: Collection[int] | None = None) -> Timeline:
    """The timeline of a few steps, of which a picture can be drawn.

    Args:
        sources: As of :func:`build_timeline`.
        steps: Numbers of the steps to show; by default two from the middle.
    """
    shown = steps or steady_steps([rank for source in sources for rank in source.ranks])
    return build_timeline(sources, steps=shown, max_boxes=MAX_BOXES)


def steady_steps(rank_events: Sequence[RankEvents]) -> list[int] | None:
    """Numbers of two steps from the middle of the capture, ``None`` where it has no steps."""
    numbers = next((events.step_keys.tolist() for events in rank_events if events.has_steps), None)
    if numbers is None:
        return None
    first = max(0, (len(numbers) - 1) // 2)
    return list(numbers[first : first + 2])


class _Rank(NamedTuple):
    """A rank, how its steps divide, and the positions of those to show; none where the capture has no steps."""

    events: RankEvents
    parts: StepBreakdown
    rows: Ints


def _panel(source: Source, ranks: Sequence[_Rank], view: View) -> Panel:
    return Panel(
        title=source.title,
        device=source.trace.device,
        facts=_facts(source, ranks, view),
        ranks=tuple(
            RankLanes(
                _rank_title(rank.events),
                overlap,
                lanes_of(rank.events, view, explained),
                explained,
                rank.events.backward,
            )
            for rank, overlap, explained in zip(ranks, source.overlaps, source.explained, strict=True)
        ),
        steps=_step_marks(ranks, view),
        start_ns=view.start_ns - view.zero_ns,
        end_ns=view.end_ns - view.zero_ns,
    )


def _choose(source: Source, steps: Collection[int] | None, max_boxes: int | None) -> list[_Rank]:
    """What to show of each rank.

    Raises:
        TraceError: None of the steps asked for is there.
    """
    fitting = _fitting_steps(source.ranks, max_boxes)
    chosen = [_Rank(events, events.breakdown, _chosen_steps(events, steps, fitting)) for events in source.ranks]
    numbers = [number for events in source.ranks if events.has_steps for number in events.step_keys.tolist()]
    if steps is not None and not numbers:
        raise TraceError(source.trace.path, "it marks no steps", "leave --steps out, or name steps with --step-range")
    if steps is not None and not any(len(rank.rows) for rank in chosen):
        reason = f"none of the steps asked for is among its measured steps {min(numbers)} to {max(numbers)}"
        raise TraceError(source.trace.path, reason, "choose others")
    return chosen


def _fitting_steps(rank_events: Sequence[RankEvents], max_boxes: int | None) -> int:
    """How many steps make about so many boxes: an event makes one in its lane, and up to three where time goes."""
    boxes = 4 * sum(len(events.events) for events in rank_events)
    most = max((len(events.steps) for events in rank_events if events.has_steps), default=0)
    return most if max_boxes is None or boxes <= max_boxes else max(1, most * max_boxes // boxes)


def _chosen_steps(events: RankEvents, steps: Collection[int] | None, fitting: int) -> Ints:
    """Positions of the steps to show; none where the capture has no steps."""
    if not events.has_steps:
        return _NONE
    if steps is None:
        return np.arange(min(fitting, len(events.steps)), dtype=np.int64)
    return np.flatnonzero(np.isin(events.step_keys, list(steps)))


def _view(ranks: Sequence[_Rank], max_boxes: int | None) -> View:
    """From the first start to the last end of the steps chosen, on the host and on the device."""
    starts, ends, zeros = [], [], []
    for events, measured, rows in ranks:
        if len(rows):
            parts = select(measured, rows)
            lasts = parts.window_ns > 0
            starts += [*events.steps.start_ns[rows], *parts.start_ns[lasts]]
            ends += [*events.steps.end_ns[rows], *parts.end_ns[lasts]]
            zeros.append(events.steps.start_ns[rows].min())
    if starts:
        return View(int(min(zeros)), int(min(starts)), int(max(ends)))
    return _view_without_steps([rank.events for rank in ranks], max_boxes)


def _view_without_steps(rank_events: Sequence[RankEvents], max_boxes: int | None) -> View:
    """All of the capture, or the beginning of it that makes about so many boxes."""
    events = [events.events for events in rank_events if len(events.events)]
    if not events:
        return View(0, 0, 1)
    start = np.sort(np.concatenate([event.start_ns for event in events]))
    end = max(int(event.end_ns.max()) for event in events)
    cut_off = max_boxes is not None and len(start) > max_boxes // 4
    return View(int(start[0]), int(start[0]), int(start[(max_boxes or 0) // 4]) if cut_off else end)


def _step_marks(ranks: Sequence[_Rank], view: View) -> tuple[StepMark, ...]:
    marks: dict[int, StepMark] = {}
    for events, parts, rows in ranks:
        for row in rows.tolist():
            number = int(events.step_keys[row])
            start = int(events.steps.start_ns[row]) - view.zero_ns
            end = max(int(events.steps.end_ns[row]), int(parts.end_ns[row])) - view.zero_ns
            known = marks.get(number, StepMark(number, start, end))
            marks[number] = StepMark(number, min(start, known.start_ns), max(end, known.end_ns))
    return tuple(marks[number] for number in sorted(marks))


def _facts(source: Source, ranks: Sequence[_Rank], view: View) -> tuple[str, ...]:
    """What a reader of the figure should know of the run beside its name."""
    trace = source.trace
    said = next(iter(ranges_among(trace.names, PROCESS).values()), None)
    manifest = trace.manifest
    world = manifest.world_size if manifest else said and said.number("world")
    backend = manifest.backend if manifest else said and said.text("backend")
    count = f"{len(ranks)} of {world}" if world and world != len(ranks) else f"{len(ranks)}"
    facts = [*source.caveats, f"{count} {'rank' if count == '1' else 'ranks'}"]
    if backend:
        facts.append(backend)
    if manifest:
        facts.append(f"model {manifest.model_size}, batch {manifest.batch_size} x {manifest.seq_len}")
    numbers = [_begun(events, view) for events, _, rows in ranks if len(rows)]
    if not numbers:
        return (*facts, "no steps are marked in this trace", _shown_without_steps(ranks, view, trace.duration_ns))
    shown, measured = len(numbers[0]), max(len(rank.events.steps) for rank in ranks)
    if not shown:
        return tuple(facts)
    first, last = int(numbers[0].min()), int(numbers[0].max())
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    return (*facts, span if shown == measured else f"{span} shown; percentages over all {measured} measured steps")


def _begun(events: RankEvents, view: View) -> Ints:
    """Numbers of the steps that begin in what is shown: beside a longer panel more than those chosen."""
    begins, end_ns = events.steps.start_ns, max(view.end_ns, view.start_ns + 1)  # a step may have no length
    numbers: Ints = events.step_keys[(begins >= view.start_ns) & (begins < end_ns)]
    return numbers


def _shown_without_steps(ranks: Sequence[_Rank], view: View, captured_ns: int) -> str:
    shown, captured = milliseconds(view.end_ns - view.start_ns), milliseconds(captured_ns)
    if shown == captured:
        return f"all {captured} shown"
    is_cut = any((rank.events.events.end_ns > view.end_ns).any() for rank in ranks)
    part = "beginning" if is_cut else "first to last compute, communication or copy"
    return f"{shown} of {captured} shown: {part}"


def _rank_title(events: RankEvents) -> str:
    if events.rank is not None:
        return f"rank {events.rank}"
    return f"process {events.process}" if events.device is None else f"pid {events.process}, GPU {events.device}"
