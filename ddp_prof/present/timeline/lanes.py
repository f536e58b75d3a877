"""The lanes of one rank: what its trace holds within a view, as boxes."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddp_prof.analyze.intervals import union
from ddp_prof.present import theme
from ddp_prof.present.text import milliseconds, percent
from ddp_prof.present.timeline.model import COMMUNICATION, COMPUTE, COPIES, GRAPHS, HOST, STRIP, UNNAMED, Boxes, Lane
from ddp_prof.range_names import PHASES
from ddp_prof.trace import UNKNOWN, Category, concatenate, empty, select

if TYPE_CHECKING:
    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.intervals import Intervals
    from ddp_prof.trace import Ints, Mask

_CODE = {category: code for code, category in enumerate(theme.CATEGORIES)}
_KINDS = {
    Category.COMPUTE: COMPUTE,
    Category.COMMUNICATION: COMMUNICATION,
    Category.MEMORY: COPIES,
    Category.OTHER: GRAPHS,
    Category.UNKNOWN: UNNAMED,
}
_TITLES = {GRAPHS: "CUDA graphs", UNNAMED: "unnamed kernels"}
_DRAWN_AS = {
    Category.COMMUNICATION: theme.COMMUNICATION,
    Category.MEMORY: theme.MEMORY,
    Category.OTHER: theme.GRAPH,
    Category.UNKNOWN: theme.UNNAMED,
}
_STRIP_TITLE = "where time goes"
_PHASE_CODE = np.array([*(_CODE[phase] for phase in PHASES), _CODE[theme.COMPUTE]], np.int64)


def stack(start_ns: Ints, end_ns: Ints) -> Ints:
    """The row of each interval: the topmost that is free where it starts.

    0000..333
    .1111.....
    ..222222..
    """
    level = np.zeros(len(start_ns), np.int64)
    order = np.argsort(start_ns, kind="stable")
    if np.all(start_ns[order][1:] >= end_ns[order][:-1]):
        return level
    busy: list[tuple[int, int]] = []  # (end, row)
    free: list[int] = []
    for item in order.tolist():
        while busy and busy[0][0] <= start_ns[item]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        level[item] = row
        heapq.heappush(busy, (int(end_ns[item]), row))
    return level


def divide(windows: Intervals, compute: Intervals, communication: Intervals, memory: Intervals) -> dict[str, Intervals]:
    """The parts of steps' windows by category, as ``analyze.partition`` measures them; their lengths sum to them.

    Args:
        windows: The windows.
        compute: All compute of the device.
        communication: What the steps launched; it lies in the windows.
        memory: All copies and memory sets of the device.
    """
    busy = compute | communication
    return {
        theme.COMPUTE_ONLY: (compute & windows) - communication,
        theme.OVERLAPPED: communication & compute,
        theme.EXPOSED: communication - compute,
        theme.EXPOSED_MEMORY: (memory & windows) - busy,
        theme.IDLE: windows - (busy | memory),
    }


class View(NamedTuple):
    """What is shown of a trace, in its own nanoseconds."""

    zero_ns: int
    start_ns: int
    end_ns: int

    def holds(self, start_ns: Ints, end_ns: Ints) -> Mask:
        """Which intervals are seen, if only in part."""
        seen: Mask = (start_ns < self.end_ns) & (end_ns > self.start_ns)
        return seen


def lanes_of(rank: RankEvents, view: View) -> tuple[Lane, ...]:
    """The lanes of a rank, top to bottom; without those that would be empty."""
    lanes = [_host_lane(rank, view)]
    if rank.device is None:
        lanes += [_host_compute_lane(rank, view), _host_communication_lane(rank, view)]
    else:
        lanes += _device_lanes(rank, view)
        if not np.any(_on_device(rank) & (rank.trace.activities.category == Category.COMMUNICATION)):
            lanes.append(_host_communication_lane(rank, view))
    lanes.append(_strip_lane(rank, view))
    return tuple(lane for lane in lanes if len(lane.boxes))


def _boxes(view: View, start_ns: Ints, end_ns: Ints, category: Ints, **columns: Ints) -> Boxes:
    """Boxes on the panel's own time; columns not given hold ``UNKNOWN``, levels are those of a stack."""
    unknown = np.full(len(start_ns), UNKNOWN, np.int64)
    optional = dict.fromkeys(("name_id", "step", "bucket", "bytes"), unknown)
    level = columns.pop("level") if "level" in columns else stack(start_ns, end_ns)
    return Boxes(
        start_ns=start_ns - view.zero_ns,
        end_ns=end_ns - view.zero_ns,
        category=category,
        level=level,
        **(optional | columns),
    )


def _codes(category: str, rows: int) -> Ints:
    return np.full(rows, _CODE[category], np.int64)


def _host_lane(rank: RankEvents, view: View) -> Lane:
    """Steps on the upper row, their phases below."""
    seen = view.holds(rank.steps.start_ns, rank.steps.end_ns) & rank.has_steps
    numbers = rank.step_keys[seen]
    steps = _boxes(
        view,
        rank.steps.start_ns[seen],
        rank.steps.end_ns[seen],
        _codes(theme.STEP, len(numbers)),
        name_id=np.arange(len(numbers), dtype=np.int64),
        step=numbers,
    )
    phases = select(rank.phases, view.holds(rank.phases.start_ns, rank.phases.end_ns))
    ranges = _boxes(
        view,
        phases.start_ns,
        phases.end_ns,
        _PHASE_CODE[phases.kind],
        step=_step_at(rank, phases.start_ns),
        level=stack(phases.start_ns, phases.end_ns) + steps.level.max(initial=-1) + 1,
    )
    parts = select(rank.breakdown, seen)
    names = map(_step_title, numbers.tolist(), parts.comm_ns.tolist(), parts.overlapped_ns.tolist())
    return Lane("host", HOST, concatenate(steps, ranges), tuple(names))


def _step_title(number: int, comm_ns: int, overlapped_ns: int) -> str:
    if not comm_ns:
        return f"step {number}"
    share = percent(overlapped_ns / comm_ns)
    return f"step {number}: {share} of {milliseconds(comm_ns)} communication overlapped"


def _step_at(rank: RankEvents, time_ns: Ints) -> Ints:
    """Number of the step whose host range holds each instant."""
    numbers: Ints = np.append(rank.step_keys, UNKNOWN)[rank.steps.index_at(time_ns)]
    return numbers


def _host_compute_lane(rank: RankEvents, view: View) -> Lane:
    events = rank.of(Category.COMPUTE)
    events = select(events, view.holds(events.start_ns, events.end_ns))
    numbers = np.append(rank.step_keys, UNKNOWN)[events.step]
    return Lane(
        "compute", COMPUTE, _boxes(view, events.start_ns, events.end_ns, _PHASE_CODE[events.phase], step=numbers)
    )


def _host_communication_lane(rank: RankEvents, view: View) -> Lane:
    """Our ranges round collectives, from launch to completion."""
    ranges = rank.collective_ranges
    ranges = select(ranges, view.holds(ranges.start_ns, ranges.end_ns))
    boxes = _boxes(
        view,
        ranges.start_ns,
        ranges.end_ns,
        _codes(theme.COMMUNICATION, len(ranges)),
        name_id=ranges.name_id,
        step=_step_at(rank, ranges.start_ns),
        bucket=ranges.bucket,
        bytes=ranges.bytes,
    )
    return Lane("communication", COMMUNICATION, boxes, rank.trace.names, from_launch=True)


def _device_lanes(rank: RankEvents, view: View) -> list[Lane]:
    """A lane for each stream and what it does there."""
    trace = rank.trace
    mine = view.holds(trace.activities.start_ns, trace.activities.end_ns) & _on_device(rank)
    activities = select(trace.activities, mine)
    event = _event_of(rank)[mine]
    ranges, launched_in = rank.collective_ranges, _launching_range(rank, mine)
    columns = {
        "category": _category_codes(activities.category, np.append(rank.events.phase, UNKNOWN)[event]),
        "name_id": activities.name_id,
        "step": np.append(rank.step_keys, UNKNOWN)[np.append(rank.events.step, UNKNOWN)[event]],
        "bucket": ranges.of_rows("bucket", launched_in),
        "bytes": np.where(activities.bytes == UNKNOWN, ranges.of_rows("bytes", launched_in), activities.bytes),
    }
    lanes = []
    for category, kind in _KINDS.items():
        of_kind = activities.category == category
        # Copies share a lane: many streams copy, each a little.
        streams = [UNKNOWN] if kind == COPIES else np.unique(activities.lane[of_kind]).tolist()
        for stream in streams:
            rows = of_kind if stream == UNKNOWN else of_kind & (activities.lane == stream)
            own = {name: column[rows] for name, column in columns.items()}
            boxes = _boxes(view, activities.start_ns[rows], activities.end_ns[rows], **own)
            title = _TITLES.get(kind, kind)
            lanes.append(Lane(title if stream == UNKNOWN else f"{title}, stream {stream}", kind, boxes, trace.names))
    return lanes


def _category_codes(category: Ints, phase: Ints) -> Ints:
    """What each activity is drawn as; compute by the phase that launched it."""
    codes: Ints = np.select(
        [category == Category.COMPUTE, *(category == other for other in _DRAWN_AS)],
        [_PHASE_CODE[phase], *(_CODE[name] for name in _DRAWN_AS.values())],
        UNKNOWN,
    )
    return codes


def _on_device(rank: RankEvents) -> Mask:
    """The activities of a rank."""
    activities = rank.trace.activities
    rows: Mask = (activities.process == rank.process) & (activities.device == rank.device)
    return rows


def _event_of(rank: RankEvents) -> Ints:
    """Row of the event that each activity is, ``UNKNOWN`` for what is not measured, such as warm-up."""
    event = np.full(len(rank.trace.activities), UNKNOWN, np.int64)
    measured = rank.events.activity != UNKNOWN
    event[rank.events.activity[measured]] = np.flatnonzero(measured)
    return event


def _launching_range(rank: RankEvents, mine: Mask) -> Ints:
    """For each of the activities the row of our range that its launch lies in, if it is a collective."""
    trace = rank.trace
    launch_ns = np.append(trace.calls.start_ns, UNKNOWN)[trace.launching_calls[mine]]
    row = rank.collective_ranges.launched_in(launch_ns)
    return np.where(trace.activities.category[mine] == Category.COMMUNICATION, row, UNKNOWN)


def _strip_lane(rank: RankEvents, view: View) -> Lane:
    if not len(rank.events):  # nothing is known of what it did, not even that it was idle
        return Lane(_STRIP_TITLE, STRIP, empty(Boxes))
    parts = rank.breakdown
    # Windows of a device may cross, where a step's work was launched before the last step's was done.
    level = stack(parts.start_ns, parts.end_ns)
    seen = view.holds(parts.start_ns, parts.end_ns) & (parts.window_ns > 0)
    tables = [_strip_row(rank, np.flatnonzero(seen & (level == row)), row, view) for row in np.unique(level[seen])]
    return Lane(_STRIP_TITLE, STRIP, concatenate(*tables) if tables else empty(Boxes))


def _strip_row(rank: RankEvents, rows: Ints, level: int, view: View) -> Boxes:
    """The windows of some steps, which do not cross, divided all at once."""
    parts = rank.breakdown
    communication = rank.of(Category.COMMUNICATION)
    launched = select(communication, np.isin(communication.step, rows))
    # A step's communication lies in its window, so that of all these steps divides each window like its own.
    divided = divide(
        union(parts.start_ns[rows], parts.end_ns[rows]),
        rank.union_of(Category.COMPUTE),
        union(launched.start_ns, launched.end_ns),
        rank.union_of(Category.MEMORY),
    )
    for category in (Category.OTHER, Category.UNKNOWN):  # it is not known what runs, but the device is not idle
        running = rank.union_of(category)
        divided[_DRAWN_AS[category]] = divided[theme.IDLE] & running
        divided[theme.IDLE] = divided[theme.IDLE] - running
    rows = rows[np.argsort(parts.start_ns[rows], kind="stable")]
    numbers = rank.step_keys[rows]
    tables = []
    for name, part in divided.items():
        start, end = cut(part, parts.start_ns[rows])
        shown = view.holds(start, end)
        start, end = start[shown], end[shown]
        step = numbers[np.searchsorted(parts.start_ns[rows], start, side="right") - 1]
        levels = np.full(len(start), level, np.int64)
        tables.append(_boxes(view, start, end, _codes(name, len(start)), step=step, level=levels))
    return concatenate(*tables)


def cut(intervals: Intervals, at_ns: Ints) -> tuple[Ints, Ints]:
    """Starts and ends of the intervals, each cut in two wherever one of the times lies in it."""
    begun = np.searchsorted(intervals.start_ns, at_ns, side="left")
    ended = np.searchsorted(intervals.end_ns, at_ns, side="right")
    inside = at_ns[begun > ended]
    return np.sort(np.concatenate([intervals.start_ns, inside])), np.sort(np.concatenate([intervals.end_ns, inside]))
