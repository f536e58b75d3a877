"""What a file holds, and what of it can be: events without times, ends that are impossible, lost work, wrong clocks.

Written from what docs/metrics.md says of the steps that count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ddp_prof.trace import HOST_WAITS, Activities, Calls, Category, Kind, Spans, SyncKind, Trace
from tests.drawing import table

MOST_LATE, MOST_EARLY = 60, 5
"""How much later than two others of its stream an activity may end, and how early a wait may return; as is drawn."""
HANDFUL = 3
OF_COPIES = "nccl:_all_gather_base"

Launch = tuple[int | None, int | None, int | None]
"""When, by which thread and by which call something was launched."""


@dataclass
class Recorded:
    """The tables, as lists of rows.

    Attributes:
        impossible: Rows of the activities of which the recorded end is impossible.
        ranges: Of an activity, the row of torch's range around its launch.
        launches: Of an activity, see :func:`_launch_of`.
    """

    trace: Trace
    launches: dict[int, Launch]
    impossible: set[int] = field(default_factory=set)
    ranges: dict[int, int] = field(default_factory=dict)

    def named(self, row: int) -> str | None:
        """The name of the range around the launch of an activity."""
        span = self.ranges.get(row)
        return None if span is None else self.trace.names[self.trace.spans.name_id[span]]


def read(trace: Trace) -> Recorded:
    if trace.source == "kineto":  # its other events are later
        trace = _without_repeated(_without_zeros(trace))
    trace, impossible = _cut(trace)
    launches = {row: _launch_of(trace, row) for row in range(len(trace.activities))}
    found = Recorded(trace, launches, impossible)
    found.ranges = {
        row: span for row, launch in launches.items() if (span := _range_around(trace, row, launch)) is not None
    }
    return _with_copies(found)


def _launch_of(trace: Trace, row: int) -> Launch:
    """Start, thread and row of the last call before the activity that has its number, else of the first one after it.

    A call is part of the one before of its number and thread, as a driver's of the runtime's, if nothing of that number
    starts between them, nor any call of the thread, or if both start at once.
    """
    table, calls = trace.activities, trace.calls
    process, number, start = int(table.process[row]), int(table.correlation[row]), int(table.start_ns[row])
    lanes, numbers = calls.lane.tolist(), calls.correlation.tolist()
    owners = zip(calls.start_ns.tolist(), calls.process.tolist(), strict=True)
    every = [(at, c) for c, (at, owner) in enumerate(owners) if owner == process]
    own = sorted(call for call in every if numbers[call[1]] == number != -1)
    rows = zip(table.start_ns.tolist(), table.process.tolist(), table.correlation.tolist(), strict=True)
    starts = [at for at, owner, its_number in rows if owner == process and its_number == number]
    launches: list[tuple[int, int]] = []
    last = None
    for at, c in own:
        is_part = last is not None and lanes[last[1]] == lanes[c] and not any(last[0] <= t < at for t in starts)
        is_part = is_part and (
            last[0] == at or not any(last < call < (at, c) and lanes[call[1]] == lanes[c] for call in every)
        )
        launches += [] if is_part else [(at, c)]
        last = (at, c)
    before = [call for call in launches if call[0] <= start]
    at, c = (before[-1] if before else launches[0]) if launches else (None, None)
    return at, None if c is None else lanes[c], c


def _rows(of) -> list[dict[str, int]]:
    names = list(of.__dataclass_fields__)
    return [{name: int(getattr(of, name)[row]) for name in names} for row in range(len(of))]


def _without_zeros(trace: Trace) -> Trace:
    def kept(of) -> list[dict[str, int]]:
        return [row for row in _rows(of) if row["start_ns"] != 0 or row.get("end_ns", 0) != 0]

    calls = _rows(trace.calls)
    launches = [int(trace.is_launch[at]) for at, row in enumerate(calls) if row["start_ns"] != 0]
    return replace(
        trace,
        activities=table(Activities, kept(trace.activities)),
        spans=table(Spans, kept(trace.spans)),
        calls=table(Calls, kept(trace.calls)),
        is_launch=launches,
        launching_calls=None,
        has_ambiguous_launch=None,
    )


def _without_repeated(trace: Trace) -> Trace:
    """Of activities and of ranges that are the same in all, and take time, the first one."""

    def kept(of) -> list[dict[str, int]]:
        rows = _rows(of)
        return [row for at, row in enumerate(rows) if row["end_ns"] <= row["start_ns"] or row not in rows[:at]]

    return replace(
        trace,
        activities=table(Activities, kept(trace.activities)),
        spans=table(Spans, kept(trace.spans)),
        launching_calls=None,
        has_ambiguous_launch=None,
    )


def _cut(trace: Trace) -> tuple[Trace, set[int]]:
    """An activity that ends after the two that follow it on its stream ends where the first of these begins."""
    rows, impossible = _rows(trace.activities), set()
    places = {(row["process"], row["device"], row["lane"]) for row in rows}
    for place in places:
        own = [at for at, row in enumerate(rows) if (row["process"], row["device"], row["lane"]) == place]
        own.sort(key=lambda at: (rows[at]["start_ns"], at))
        is_found = True
        while is_found:
            is_found = False
            for index in range(len(own) - 2):
                row, *two = (rows[at] for at in own[index : index + 3])
                if all(_is_overrun(row, other) for other in two):
                    row["end_ns"] = two[0]["start_ns"]
                    impossible.add(own[index])
                    is_found = True
    return replace(trace, activities=table(Activities, rows)), impossible


def _is_overrun(row: dict[str, int], later: dict[str, int]) -> bool:
    begins_later, ends_before = later["start_ns"] > row["start_ns"], row["end_ns"] - later["end_ns"] > MOST_LATE
    return begins_later and ends_before and (later["correlation"] != row["correlation"] or row["correlation"] == -1)


def _range_around(trace: Trace, row: int, launch: Launch) -> int | None:
    at, thread, _ = launch
    return None if at is None else _opened_last(trace, int(trace.activities.process[row]), thread, at, "nccl:")


def _opened_last(trace: Trace, process: int, thread: int, at: int, name: str) -> int | None:
    """The range of such a name that the thread opened last, unless it has ended."""
    spans = trace.spans
    opened = [
        (int(spans.start_ns[row]), row)
        for row in range(len(spans))
        if spans.process[row] == process and spans.lane[row] == thread and spans.start_ns[row] <= at
        and trace.names[spans.name_id[row]].startswith(name)
    ]  # fmt: skip
    if not opened:
        return None
    _, row = max(opened)
    return row if spans.end_ns[row] > at else None


def _with_copies(found: Recorded) -> Recorded:
    """Copies within a device communicate if their range launched no kernel, and if copies can do what it stands for."""
    trace = found.trace
    if trace.world_size == 1:
        return found
    around = {
        row: _opened_last(trace, int(trace.activities.process[row]), thread, at, OF_COPIES)
        for row, (at, thread, _) in found.launches.items()
        if at is not None
    }
    with_kernel = {span for row, span in around.items() if trace.activities.kind[row] == Kind.KERNEL}
    rows = _rows(trace.activities)
    for row, span in around.items():
        within = "DtoD" in trace.names[rows[row]["name_id"]]
        if within and span is not None and span not in with_kernel:
            rows[row]["category"] = Category.COMMUNICATION
    return replace(found, trace=replace(trace, activities=table(Activities, rows)))


def lost_launches(trace: Trace, process: int) -> list[int]:
    """When the process launched kernels or graphs of which there is no activity with that number."""
    numbers = {row["correlation"] for row in _rows(trace.activities) if row["process"] == process}
    calls = _rows(trace.calls)
    found = []
    for at, call in enumerate(calls):
        if call["process"] == process and trace.is_launch[at] and call["correlation"] not in numbers:
            found.append(call | {"row": at})
    own = sorted((call["start_ns"], at) for at, call in enumerate(calls) if call["process"] == process)
    return [call["start_ns"] for call in found if not _is_part(call, own, calls)]


def launches_of(trace: Trace, process: int) -> list[int]:
    """When the process launched kernels or graphs; a call within another one launches nothing itself."""
    numbers = {row["correlation"] for row in _rows(trace.activities) if row["process"] == process}
    calls = [call | {"row": at} for at, call in enumerate(_rows(trace.calls))]
    own = sorted((call["start_ns"], call["row"]) for call in calls if call["process"] == process)
    return [
        call["start_ns"]
        for call in calls
        if call["process"] == process
        and trace.is_launch[call["row"]]
        and (call["correlation"] in numbers or not _is_part(call, own, calls))
    ]


def _is_part(call: dict[str, int], own: list[tuple[int, int]], calls: list[dict[str, int]]) -> bool:
    """Whether the call before it on its thread has its number."""
    on_thread = [at for _, at in own if calls[at]["lane"] == call["lane"]]
    place = on_thread.index(call["row"])
    return place > 0 and calls[on_thread[place - 1]]["correlation"] == call["correlation"]


def count_launches(trace: Trace, process: int) -> int:
    return sum(bool(trace.is_launch[at]) for at in range(len(trace.calls)) if trace.calls.process[at] == process)


def clocks_disagree(recorded: Recorded, process: int) -> bool:
    """Whether more than a handful of activities begin before their launch, or waits return before work has ended."""
    trace = recorded.trace
    rows = [at for at in range(len(trace.activities)) if trace.activities.process[at] == process]
    launched = [(*recorded.launches[at][:2], trace.activities, at) for at in rows]
    launched = [one for one in launched if one[0] is not None]
    if sum(int(table.start_ns[at]) < launch for launch, _, table, at in launched) > HANDFUL:
        return True
    if len({int(table.device[at]) for *_, table, at in launched}) > 1:
        return False
    waits = early = 0
    calls = trace.synchronizations
    for at in range(len(calls)):
        if calls.process[at] == process and calls.kind[at] in HOST_WAITS:
            assert calls.kind[at] == SyncKind.HOST_WAIT_DEVICE, "no others are drawn"
            ends = [
                int(table.end_ns[row])
                for launch, thread, table, row in launched
                if thread == calls.thread[at] and launch < calls.start_ns[at]
            ]
            waits += bool(ends)
            early += max(ends, default=0) > calls.end_ns[at] + MOST_EARLY if ends else 0
    return early > 0 and early >= (0.1 if early > HANDFUL else 0.5) * waits
