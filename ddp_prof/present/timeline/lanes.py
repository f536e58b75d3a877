"""Makes the lanes of one rank: the events of its trace within a view, as boxes on rows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.intervals import Intervals, union_of_one
from ddp_prof.analyze.overlap import RankOverlap
from ddp_prof.columns import milliseconds, percent
from ddp_prof.growing_column import in_file, in_order, in_parts, joined
from ddp_prof.present import theme
from ddp_prof.present.timeline import model
from ddp_prof.present.timeline.model import Boxes, Lane, RankExposure
from ddp_prof.range_names import PHASES, PROCESS
from ddp_prof.table import (
    concatenate,
    concatenate_columns,
    constant_column,
    distinct,
    empty,
    fill,
    positions,
    select,
    take_in_parts,
    take_or_unknown,
)
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Ints, Mask, Trace

_SHOWN_AS = {
    Category.COMPUTE: (model.COMPUTE, "compute", theme.COMPUTE),  # coloured by the phase that launched it
    Category.COMMUNICATION: (model.COMMUNICATION, "communication", theme.COMMUNICATION),
    Category.MEMORY: (model.COPIES, "copies", theme.MEMORY),
    Category.OTHER: (model.GRAPHS, "CUDA graphs", theme.GRAPH),
    Category.UNKNOWN: (model.UNNAMED, "unnamed kernels", theme.UNNAMED),
}
"""For each category of activities: kind and title of its lanes, category of its boxes."""
_STRIP_TITLE, _WAITING_TITLE = "where time goes", "waits for communication"
_NOTHING = "nothing"
"""Time of which it is not known whether the device was idle."""


def lanes_of(rank: RankEvents, view: View, explained: RankExposure, overlap: RankOverlap) -> tuple[Lane, ...]:
    """Return the lanes of a rank that have boxes in the view, from top to bottom.

    Args:
        rank: The rank.
        view: The interval that is shown.
        explained: The collectives of the rank.
        overlap: The overlap of the rank and of its steps.
    """
    lanes = [host_lane(rank, view, overlap), *range_lanes(rank, view), *call_lanes(rank, view)]
    if rank.device is None:
        lanes += [_host_compute_lane(rank, view), _host_communication_lane(rank, view, explained)]
    else:
        lanes += _device_lanes(rank, view, explained)
        # On a GPU without recorded communication, as with gloo, our ranges on the host show it.
        if not np.any(rank.is_mine & (rank.trace.activities.category == Category.COMMUNICATION)):
            lanes.append(_host_communication_lane(rank, view, explained))
    lanes += [_waiting_lane(rank, view, explained), _strip_lane(rank, view, overlap)]
    return tuple(lane for lane in lanes if len(lane.boxes))


def _host_compute_lane(rank: RankEvents, view: View) -> Lane:
    """Return the lane of compute on a CPU, coloured by phase."""
    rank = rank.including_warmup
    events = rank.select_category(Category.COMPUTE)
    events = select(events, view.is_visible(events.start_ns, events.end_ns))
    steps = take_or_unknown(rank.step_keys, events.step)
    boxes = make_boxes(view, (events.start_ns, events.end_ns), PHASE_CODE[events.phase], step=steps)
    return Lane("compute", model.COMPUTE, boxes)


def _host_communication_lane(rank: RankEvents, view: View, explained: RankExposure) -> Lane:
    """Return the lane of communication on the host: our ranges around collectives, from launch to completion."""
    ranges = rank.collective_ranges
    ranges = select(ranges, view.is_visible(ranges.start_ns, ranges.end_ns))
    boxes = make_boxes(
        view,
        (ranges.start_ns, ranges.end_ns),
        theme.COMMUNICATION,
        name_id=ranges.name_id,
        step=rank.step_at(ranges.start_ns),
        bucket=ranges.bucket,
        bytes=ranges.bytes,
        # Work of the host has no stream.
        collective=_collectives(explained, ranges.start_ns, ranges.end_ns, np.full(len(ranges), UNKNOWN)),
    )
    return Lane("communication", model.COMMUNICATION, boxes, rank.trace.names, from_launch=True)


def _device_lanes(rank: RankEvents, view: View, explained: RankExposure) -> list[Lane]:
    """Return the lanes of what a GPU did: one per stream for each category, and one for all copies."""
    rank = rank.including_warmup
    activities = rank.trace.activities
    event_of = positions(rank.events.activity, len(activities))  # row in events; UNKNOWN for activities of other ranks
    seen = np.flatnonzero(view.is_visible(activities.start_ns, activities.end_ns) & rank.is_mine)
    # For each activity, the row of the first collective that it needs.
    consumer_of = np.full(len(activities), UNKNOWN, np.int64)
    needed = np.flatnonzero(explained.consumer != UNKNOWN)[::-1]  # reversed: the first collective is written last
    consumer_of[explained.consumer[needed]] = needed
    lanes = []
    for category, (kind, title, _) in _SHOWN_AS.items():
        of_kind = seen[activities.category[seen] == category]
        # All copies share one lane (UNKNOWN: all streams), because many streams copy a little each.
        streams = [UNKNOWN] if kind == model.COPIES else distinct(activities.lane[of_kind])
        for stream in streams:
            rows = of_kind if stream == UNKNOWN else of_kind[activities.lane[of_kind] == stream]
            boxes = _device_boxes(rank, view, explained, category, rows, event_of[rows], consumer_of[rows])
            name = title if stream == UNKNOWN else f"{title}, stream {stream}"
            lanes.append(Lane(name, kind, boxes, rank.trace.names))
    return lanes


def _device_boxes(
    rank: RankEvents,
    view: View,
    explained: RankExposure,
    category: Category,
    rows: Ints,
    event: Ints,
    consumer: Ints,
) -> Boxes:
    """Return a box for each of some activities, all of one category.

    Args:
        rank: The rank, including its warm-up steps.
        view: The interval that is shown.
        explained: The collectives of the rank.
        category: The category of the activities.
        rows: Rows of the activities in ``Trace.activities``.
        event: For each activity, its row in ``rank.events``.
        consumer: For each activity, the row in ``explained`` of the first collective that it needs.
    """
    trace, activities = rank.trace, rank.trace.activities
    start, end = in_order(activities.start_ns, rows), in_order(activities.end_ns, rows)
    ranges, launched_in = rank.collective_ranges, rank.collective_ranges.ranges_of_activities(trace, rows)
    phase, recorded = take_in_parts(rank.events.phase, event), in_order(activities.bytes, rows)
    columns = {
        "name_id": in_order(activities.name_id, rows),
        "step": take_in_parts(rank.step_keys, take_in_parts(rank.events.step, event)),
        "bucket": take_in_parts(ranges.bucket, launched_in),
        "bytes": np.where(recorded == UNKNOWN, take_or_unknown(ranges.bytes, launched_in), recorded),
        "phase": phase,
        # Where the clocks disagree, a launch has no place on the device's clock.
        "call": constant_column(UNKNOWN, len(rows)) if rank.clocks_disagree else in_order(trace.launching_calls, rows),
    }
    if trace.shape_id is not None and trace.registers is not None:
        columns |= {"shape": in_order(trace.shape_id, rows), "registers": in_order(trace.registers, rows)}
    # A collective is found by the times and the stream of its whole operation, which may be several activities.
    if category == Category.COMMUNICATION:
        parts = rank.operation_parts
        first, last = (take_or_unknown(column, event, NO_TIME) for column in (parts.start_ns, parts.end_ns))
        stream = take_or_unknown(rank.events.lane, take_or_unknown(parts.head, event))
        found = columns["collective"] = _collectives(explained, first, last, stream)
        for name in ("bucket", "bytes"):  # measured collectives have the values of the tables
            columns[name] = np.where(
                found == UNKNOWN, columns[name], take_or_unknown(getattr(explained.timings, name), found)
            )
    else:
        columns["consumer"] = consumer
    drawn_as = PHASE_CODE[phase] if category == Category.COMPUTE else _SHOWN_AS[category][2]
    return make_boxes(view, (start, end), drawn_as, **columns)


def _collectives(explained: RankExposure, start_ns: Ints, end_ns: Ints, stream: Ints) -> Ints:
    """Return for each operation the row in ``explained`` of the collective with the same times and stream.

    ``UNKNOWN`` if there is none, because only collectives of measured steps have a row, not those of warm-up.
    """
    known = explained.timings
    keys = zip(known.start_ns.tolist(), known.end_ns.tolist(), known.lane.tolist(), strict=True)
    rows = {key: row for row, key in enumerate(keys)}
    wanted = zip(start_ns.tolist(), end_ns.tolist(), stream.tolist(), strict=True)
    return np.array([rows.get(key, UNKNOWN) for key in wanted], np.int64)


def _strip_lane(rank: RankEvents, view: View, overlap: RankOverlap) -> Lane:
    """Return the lane ``where time goes``, whose boxes cover each instant of the view of which anything is known, once.

    It is empty if it is not known how any step divides, unless graphs or kernels without a name take the time. It has
    gaps where a part of that is not known, and in a step that was recorded in part, and is left out, where nothing
    tells idle time from work that was lost.

    A box belongs to the measured step whose window contains it. Windows overlap if work of a step was launched before
    the step before it was done; then the box belongs to the step that began last.
    """
    unknown = set() if _has_unknown_work(rank) else unknown_parts(overlap)
    if not len(rank.including_warmup.events) or rank.hides_backward or {*theme.STRIP} <= unknown:
        return Lane(_STRIP_TITLE, model.STRIP, empty(Boxes))
    divided = divide(rank.including_warmup, view)
    nothing = divided[theme.IDLE] & rank.recorded_in_part
    divided = {**divided, theme.IDLE: divided[theme.IDLE] - nothing, _NOTHING: nothing}
    # Such as the time beside communication in which a host without marked waits may have computed or waited.
    codes = {name: UNKNOWN if name in unknown else CODE.get(name, UNKNOWN) for name in divided}
    start = concatenate_columns([part.start_ns for part in divided.values()])
    category = concatenate_columns([constant_column(codes[name], len(part)) for name, part in divided.items()])
    del divided
    order = np.argsort(start, kind="stable")
    start, category = in_order(start, order), in_order(category, order)
    del order
    # Boxes are cut where a step, or a gap between steps, begins, so that each lies in one step or in none.
    begins, owners = _owners(rank)
    at = np.searchsorted(start, begins, side="right")
    is_inside = (at > 0) & (begins < view.end_ns)
    is_inside[is_inside] = start[at[is_inside] - 1] != begins[is_inside]
    at = at[is_inside]
    start, category = np.insert(start, at, begins[is_inside]), np.insert(category, at, category[at - 1])
    # The parts leave no gap: each box ends where the next one starts. A step has the boxes up to where the next begins.
    end = joined([start[1:], np.full(min(1, len(start)), view.end_ns)])
    borders = np.concatenate([[0], np.searchsorted(start, begins), [len(start)]])
    step = np.repeat(np.append(UNKNOWN, owners), np.diff(borders))
    if len(nothing) or unknown:
        rows = np.flatnonzero(category != UNKNOWN)
        start, end, category, step = (in_order(column, rows) for column in (start, end, category, step))
    level = np.broadcast_to(np.int64(0), len(start))
    return Lane(_STRIP_TITLE, model.STRIP, make_boxes(view, (start, end), category, step=step, level=level))


def unknown_parts(overlap: RankOverlap) -> set[str]:
    """Return the parts of a rank's time that are not known of any step, because its communication is not."""
    if overlap.reason is None:
        return set()
    return {part for part in theme.STRIP if all(getattr(step, f"{part}_ns") is None for step in overlap.steps)}


def _has_unknown_work(rank: RankEvents) -> bool:
    """Return whether CUDA graphs recorded as a whole, or kernels without a name, take some of the rank's time."""
    return any(len(rank.union_of(category)) for category in (Category.OTHER, Category.UNKNOWN))


def _waiting_lane(rank: RankEvents, view: View, explained: RankExposure) -> Lane:
    """Return the lane of the waiting boxes: when a stream, or the host, stood still for communication.

    If blocking is known for only some collectives, grey boxes show when the others ran. If it is known for none, the
    lane has no boxes.
    """
    rank = rank.including_warmup
    events, blocking = rank.events, rank.blocking
    stretches = blocking.known_stretches
    stretches = select(stretches, view.is_visible(stretches.start_ns, stretches.end_ns))
    # The collective that was waited for, a row of events.
    of = stretches.collective
    waits = make_boxes(
        view,
        (stretches.start_ns, stretches.end_ns),
        theme.BLOCKING,
        step=take_or_unknown(rank.step_keys, take_or_unknown(events.step, of)),
        collective=_collectives(explained, events.start_ns[of], events.end_ns[of], events.lane[of]),
        level=np.zeros(len(stretches), np.int64),
    )
    if not np.any((events.category == Category.COMMUNICATION) & blocking.is_known):
        return Lane(_WAITING_TITLE, model.WAITING, waits)
    unknown = blocking.unknown_times(events) & union_of_one(view.start_ns, view.end_ns)
    maybe = make_boxes(view, (unknown.start_ns, unknown.end_ns), theme.MAYBE_BLOCKING)
    return Lane(_WAITING_TITLE, model.WAITING, concatenate(waits, maybe))


def _owners(rank: RankEvents) -> tuple[Ints, Ints]:
    """Divide time among the measured steps.

    Returns:
        Ascending times, and for each of them the key of the step to which the time from there to the next one belongs
        (``UNKNOWN`` for none).
    """
    start, end = rank.windows
    rows = np.flatnonzero(end > start)
    rows = rows[np.argsort(start[rows], kind="stable")]
    # The latest end of the windows so far: windows may overlap.
    start, over = start[rows], np.maximum.accumulate(end[rows])
    # Windows that are followed by a gap, which belongs to no step.
    is_last = over < np.append(start[1:], np.iinfo(np.int64).max)
    times = np.concatenate([start, over[is_last]])
    owners = np.concatenate([rank.step_keys[rows], np.full(int(is_last.sum()), UNKNOWN)])
    order = np.argsort(times, kind="stable")
    return times[order], owners[order]


def divide(rank: RankEvents, view: View) -> dict[str, Intervals]:
    """Divide the view by what the rank did; return the instants of each category, whose lengths sum to the view's.

    A CUDA graph that was recorded as a whole may compute and communicate. So all of its time counts as graph, except
    where known kernels compute and communicate at the same instant. Kernels without a name get only the time without
    other work; where figures are known, such kernels are few.
    """
    shown = union_of_one(view.start_ns, view.end_ns)
    parts = rank.time_by_part(shown)
    graphs = (rank.union_of(Category.OTHER) & shown) - parts[theme.OVERLAPPED]
    parts = {name: instants - graphs for name, instants in parts.items()}
    unnamed = parts[theme.IDLE] & rank.union_of(Category.UNKNOWN)
    return parts | {theme.GRAPH: graphs, theme.UNNAMED: unnamed, theme.IDLE: parts[theme.IDLE] - unnamed}


INFERRED = "backward (inferred: launched by autograd's threads)"
"""Title of a phase that no range marks."""


def host_lane(rank: RankEvents, view: View, overlap: RankOverlap) -> Lane:
    """Return the lane of the host: the rank's steps, and in rows below them the phases.

    The text of a step includes its overlap, where that is known. Phases that were inferred have a name that says so.
    """
    rank = rank.including_warmup
    seen = np.flatnonzero(view.is_visible(rank.steps.start_ns, rank.steps.end_ns) & rank.has_steps)
    steps = make_boxes(
        view,
        (rank.steps.start_ns[seen], rank.steps.end_ns[seen]),
        theme.STEP,
        name_id=np.arange(len(seen), dtype=np.int64),
        step=rank.step_keys[seen],
    )
    marked, inferred = (
        select(item, view.is_visible(item.start_ns, item.end_ns)) for item in (rank.phases, rank.inferred_backward)
    )
    phases = concatenate(marked, inferred)
    ranges = make_boxes(
        view,
        (phases.start_ns, phases.end_ns),
        PHASE_CODE[phases.kind],
        # The names are those of the steps, then INFERRED.
        name_id=np.repeat([UNKNOWN, len(seen)], [len(marked), len(inferred)]),
        step=rank.step_at(phases.start_ns),
        # Below all rows of steps; -1 + 1 if there are none.
        level=stack(phases.start_ns, phases.end_ns) + steps.level.max(initial=-1) + 1,
    )
    shares = {
        step.step_key: f": {percent(step.overlap_ratio)} of {milliseconds(step.comm_ns)} communication overlapped"
        for step in overlap.steps
        if step.comm_ns and not overlap.reason
    }
    keys, names = rank.step_keys.tolist(), rank.steps.names
    titles = [names[row] + shares.get(keys[row], "") for row in seen.tolist()]
    return Lane("host", model.HOST, concatenate(steps, ranges), (*titles, INFERRED))


def range_lanes(rank: RankEvents, view: View) -> Iterator[Lane]:
    """Yield one lane for each thread with ranges of the program, without our range around the whole process.

    Push/pop ranges are on top, each below the range that contains it; start/end ranges are stacked below them.
    """
    trace, spans = rank.trace, rank.trace.spans
    is_named = np.array([not name.startswith(f"{PROCESS}|") for name in trace.names], np.bool_)[spans.name_id]
    seen = np.flatnonzero((spans.process == rank.process) & is_named & view.is_visible(spans.start_ns, spans.end_ns))
    for thread in distinct(spans.lane[seen]):
        own = seen[spans.lane[seen] == thread]
        nested, crossing = own[spans.is_start_end[own] == 0], own[spans.is_start_end[own] == 1]
        # Rows of start/end ranges begin below the deepest push/pop range (-1 + 1: at the top, if there is none).
        depth = nest(spans.start_ns[nested], spans.end_ns[nested])
        below = stack(spans.start_ns[crossing], spans.end_ns[crossing]) + depth.max(initial=-1) + 1
        rows = np.concatenate([nested, crossing])
        boxes = make_boxes(
            view,
            (spans.start_ns[rows], spans.end_ns[rows]),
            theme.RANGE,
            name_id=spans.name_id[rows],
            step=rank.step_at(spans.start_ns[rows]),
            level=np.concatenate([depth, below]),
        )
        yield Lane(f"ranges, {thread_name(trace, rank.process, thread)}", model.RANGES, boxes, trace.names)


def call_lanes(rank: RankEvents, view: View) -> Iterator[Lane]:
    """Yield one lane for each thread with CUDA calls; none if the names and ends of calls were not recorded.

    Calls are included if they lie in the view, or if they launched something that does.
    """
    trace, calls, details = rank.trace, rank.trace.calls, rank.trace.call_details
    if details is None:
        return
    is_seen = view.is_visible(calls.start_ns, details.end_ns)
    launchers = trace.launching_calls[view.is_visible(trace.activities.start_ns, trace.activities.end_ns)]
    is_seen[launchers[launchers != UNKNOWN]] = True
    seen = np.flatnonzero(is_seen & (calls.process == rank.process))
    for thread in distinct(calls.lane[seen]):
        rows = seen[calls.lane[seen] == thread]
        start, end = in_order(calls.start_ns, rows), in_order(details.end_ns, rows)
        boxes = make_boxes(
            view,
            (start, end),
            theme.CALL,
            name_id=in_order(details.name_id, rows),
            step=rank.step_at(start),
            call=rows,
            level=nest(start, end),
        )
        yield Lane(f"CUDA calls, {thread_name(trace, rank.process, thread)}", model.CALLS, boxes, trace.names)


def thread_name(trace: Trace, process: int, thread: int) -> str:
    """Return the name of a thread for a lane's title.

    It includes the thread's number, because many threads have the same name.
    """
    if thread == process:
        return "main thread"
    name = trace.threads.get((process, thread), f"thread {thread}")
    return name if str(thread) in name else f"{name} ({thread})"


CODE = {category: code for code, category in enumerate(theme.CATEGORIES)}
"""The number by which boxes refer to a category."""
PHASE_CODE = np.array([*(CODE[phase] for phase in PHASES), CODE[theme.COMPUTE]], np.int64)
"""Category of a compute box, by the phase that launched it. The last element is for ``UNKNOWN``, which is index -1."""


class View(NamedTuple):
    """The interval of a trace that is shown, and the time that the panel calls 0; all in the trace's own times."""

    zero_ns: int
    start_ns: int
    end_ns: int

    def is_visible(self, start_ns: Ints, end_ns: Ints) -> Mask:
        """Return which intervals lie in the view, if only in part; an interval without length counts as 1 ns."""
        seen: Mask = (start_ns < self.end_ns) & (np.maximum(end_ns, start_ns + 1) > self.start_ns)
        return seen


def stack(start_ns: Ints, end_ns: Ints) -> Ints:
    """Return the row of each interval: the topmost row that is free at its start.

    Here each line is a row, and the four intervals are numbered in the order of their starts::

        0000..333.
        .1111.....
        ..222222..
    """
    # Intervals that follow each other all have row 0.
    if np.all(start_ns[1:] >= end_ns[:-1]):
        return constant_column(0, len(start_ns))
    order = np.argsort(start_ns, kind="stable")
    if np.all(start_ns[order][1:] >= end_ns[order][:-1]):
        return constant_column(0, len(start_ns))
    level = np.zeros(len(start_ns), np.int64)
    # Only an interval that meets another one can have a row below the first: it starts before the end of an earlier
    # one, or the next one starts before its end or that of an earlier one.
    start, end = start_ns[order], end_ns[order]
    meets = start[1:] < np.maximum.accumulate(end)[:-1]
    meeting = np.flatnonzero(np.append(False, meets) | np.append(meets, False))
    busy: list[tuple[int, int]] = []  # heap of (end, row): the rows in use
    free: list[int] = []  # heap of the rows that were used before
    rows = []
    for begins, ends in zip(start[meeting].tolist(), end[meeting].tolist(), strict=True):
        while busy and busy[0][0] <= begins:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        rows.append(row)
        heapq.heappush(busy, (ends, row))
    level[order[meeting]] = rows
    return level


def nest(start_ns: Ints, end_ns: Ints) -> Ints:
    """Return the row of each interval: one below the interval that contains it.

    Here each line is a row, whose number is drawn over the length of its intervals::

        000000000..
        .1111.1111.
        ..2........

    If intervals cross, which push/pop ranges of a thread never do, all are placed by :func:`stack` instead.
    """
    if np.all(start_ns[1:] >= np.maximum(end_ns, start_ns + 1)[:-1]):
        return constant_column(0, len(start_ns))
    order = np.lexsort((-end_ns, start_ns))
    start, end = start_ns[order], end_ns[order]
    # The row is the number of intervals that began before and have not ended.
    ended = np.searchsorted(np.sort(np.maximum(end, start + 1)), start, side="right")
    level = np.empty(len(order), np.int64)
    level[order] = np.arange(len(order)) - ended
    # Intervals that cross overlap in a row.
    for row in range(int(level.max(initial=0)) + 1):
        own = level[order] == row
        if np.any(start[own][1:] < end[own][:-1]):
            return stack(start_ns, end_ns)
    return level


def make_boxes(view: View, times: tuple[Ints, Ints], category: Ints | str, **columns: Ints) -> Boxes:
    """Return boxes with times that count from the panel's time 0.

    Args:
        view: Defines that time 0.
        times: Starts and ends of the boxes, in the trace's own times.
        category: Category of all boxes, or for each box its index into ``theme.CATEGORIES``.
        columns: Other columns of :class:`Boxes`. If ``level`` is missing, boxes are placed by :func:`stack`; other
            missing columns hold ``UNKNOWN``.
    """
    start_ns, end_ns = times
    if isinstance(category, str):
        category = np.broadcast_to(np.int64(CODE[category]), len(start_ns))
    if "level" not in columns:
        columns["level"] = stack(start_ns, end_ns)
    own = {
        "start_ns": in_parts(len(start_ns), lambda rows: start_ns[rows] - view.zero_ns),
        "end_ns": in_parts(len(end_ns), lambda rows: end_ns[rows] - view.zero_ns),
        "category": category,
    }
    return fill(Boxes, len(start_ns), **{name: in_file(column) for name, column in {**own, **columns}.items()})
