"""From the tables of a trace to ranks: which step and phase each event belongs to."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby, pairwise, permutations

from ddp_prof.trace import Category, Kind, Trace
from tests.oracle.recorded import Recorded, clocks_disagree, launches_of, lost_launches, read

MOST_UNNAMED = 0.01
LEAST_ALIKE = 3
PHASES = ("forward", "backward", "synchronize", "optimizer")
LONG_AGO = -(10**9)
"""Before any event."""


@dataclass
class Range:
    name: str
    start: int
    end: int
    lane: int
    is_open: bool


@dataclass
class Step:
    number: int | None
    start: int
    end: int
    is_warmup: bool


@dataclass
class Event:
    """What a device did, or what a rank did on the CPU. ``step`` is the step itself, ``None`` outside of any."""

    start: int
    end: int
    category: Category
    stream: int | None
    launch: int | None
    thread: int | None
    is_kernel: bool
    step: Step | None = None
    phase: str | None = None
    exposed: Counter = field(default_factory=Counter)
    exposed_wait: int = 0
    overlapped: int = 0
    wait: int | None = None
    transfer: int | None = None
    bucket: int | None = None
    operation: str = "all_reduce"
    call: int | tuple[str, int] | None = None
    has_launch: bool = True
    does: str = ""
    """The operation by the name of the activity alone."""
    parts: list[Event] = field(default_factory=list)
    """Of an operation, what it consists of."""
    launched_by: int | None = None
    """The call that launched it, also of a copy whose range makes it one operation with others."""
    place: int | None = None
    """Of its launch among those of its process: by the call's number or, where a thread's numbers shrink, its time."""

    @property
    def instants(self) -> set[int]:
        return set(range(self.start, self.end))

    is_unfinished: bool = False
    """Whether it belongs to a step that did not end, behind the others."""
    called: int | None = None
    """When it was launched, by the host's clock, also if that is not the device's."""

    @property
    def at(self) -> int:
        """When it was launched, or when it began if that is not known."""
        return self.start if self.called is None else self.called


@dataclass
class Pass:
    """A pass of backward; communication is its own from the launch at ``begins`` on."""

    compute: list[Event]
    begins: int
    following: list[Event] = field(default_factory=list)
    """What of the compute waits for reduced gradients, and makes backward end no later."""

    @property
    def end(self) -> int | None:
        return max((e.end for e in self.compute if e not in self.following), default=None)


@dataclass
class Rank:
    process: int
    device: int | None
    rank: int | None
    file: str
    events: list[Event]
    steps: list[Step]
    has_steps: bool
    synchronize: list[Range]
    is_blind: bool
    world_size: int | None
    epoch: int | None
    all_steps: list[Step]
    incomplete: list[Step] = field(default_factory=list)
    """Steps that were not recorded as they were, which are in no figure."""
    beside: list[Event] = field(default_factory=list)
    """What was launched in these: it ran, beside what counts."""
    clocks_disagree: bool = False
    lacks_names: bool = field(default=False, kw_only=True)
    """Whether kernels have no names, so that it is not known which of them communicate."""
    is_unnamed: bool = False
    """Whether ranges name collectives, of which the rank recorded none."""
    communicates_elsewhere: bool = False
    """Whether communication of steps that do not count takes any time."""
    is_silent: bool = False
    """Whether nothing of it communicates, in no step."""
    is_lost: bool = False
    may_have_lost: bool = False
    """Whether it lost work in steps that do not count, and nothing tells that it does not communicate."""
    """Whether it launched work, and none of it was recorded."""
    at: dict[int, list[tuple[bool, bool]]] = field(default_factory=dict)
    """Of each exposed instant, for each collective that it belongs to, whether it waits, and whether it is its tail."""
    operations: list[Event] | None = None
    ranges: list[Range] = field(default_factory=list)
    backward_ranges: list[Range] = field(default_factory=list)

    def select_category(self, category: Category, step: Step | None = None) -> list[Event]:
        return [e for e in self.events if e.category == category and (step is None or e.step is step)]

    def instants(self, category: Category, step: Step | None = None) -> set[int]:
        """Of all steps, also compute and copies of steps that do not count: communication ran beside them."""
        others = [e for e in self.beside if e.category == category and category != Category.COMMUNICATION]
        return united(self.select_category(category, step) + ([] if step else others))

    def backward(self, step: Step | None = None) -> list[Event]:
        return [e for e in self.select_category(Category.COMPUTE, step) if e.phase == "backward"]

    def passes(self, step: Step) -> list[Pass]:
        """Compute of backward in the order of launch, parted by what :meth:`_parts` says and by ranges of backward."""
        found: list[Pass] = []
        own = [e for e in self.events if e.step is step]
        opened = self._main_backward_starts()
        with_forward = any(e.phase == "forward" for e in own)
        last: Event | None = None
        following = self._follow_reductions()
        rows = [e for e in own if e.category == Category.COMPUTE and (e.phase == "backward" or self._parts(e, own))]
        for e in sorted(rows, key=lambda e: (e.at, e.phase == "backward")):
            if e.phase == "backward":
                if last is None or last.phase != "backward" or any(last.at < at <= e.at for at in opened):
                    begins = self._begin(own, found, e, opened, with_forward=with_forward)
                    found.append(Pass([], begins, following))
                found[-1].compute.append(e)
            last = e
        return found

    def _follow_reductions(self) -> list[Event]:
        """Compute of backward behind a reduction of its step on a stream, with no collective of backward behind it.

        Not on the stream that computes most. Nothing that is drawn records what streams wait for.
        """
        busy: Counter[int] = Counter()
        for e in self.select_category(Category.COMPUTE):
            busy[e.stream] += e.end - e.start
        most = min((stream for stream in busy if busy[stream] == max(busy.values()) > 0), default=None)
        found = []
        for stream in {e.stream for e in self.events if e.stream is not None} - {most}:
            on_stream = sorted((e for e in self.events if e.stream == stream and e.place), key=lambda e: e.place)
            for _, run in groupby(on_stream, key=lambda e: id(e.step)):
                events = list(run)
                sends = [e.category == Category.COMMUNICATION and e.phase == "backward" for e in events]
                reduces = [sent and e.does == "all_reduce" for sent, e in zip(sends, events, strict=True)]
                found += [
                    e
                    for i, e in enumerate(events)
                    if e.category == Category.COMPUTE and e.phase == "backward"
                    if any(reduces[:i]) and not any(sends[i:])
                ]
        return found

    def _begin(
        self, own: list[Event], found: list[Pass], first: Event, opened: list[int], *, with_forward: bool
    ) -> int:
        """The first launch of forward after the pass before; else the start of its range, or its own first launch."""
        if not found:
            return first.at
        before = max(e.at for e in found[-1].compute)
        begins = [at for at in opened if before < at <= first.at][-1:] or [first.at]
        if with_forward:
            begins += [e.at for e in own if e.phase == "forward" and e.at > before]
        else:
            begins += [
                e.at
                for e in own
                if e.category == Category.COMPUTE and e.phase is None and self._parts(e, own) and e.at > before
            ]
        return min(begins)

    def _parts(self, e: Event, own: list[Event]) -> bool:
        """Whether compute parts two passes: in forward; outside of backward by the main thread."""
        if e.phase == "forward":
            return True
        if self.device is None:
            return e.phase is None and not any(o.phase == "forward" and o.category == Category.COMPUTE for o in own)
        return e.phase in (None, "optimizer") and e.thread == self.main_thread

    @property
    def main_thread(self) -> int:
        """That which opens most ranges where steps begin."""
        lanes = Counter(r.lane for r in self.ranges if any(r.start == s.start for s in self.steps))
        return min((lane for lane in lanes if lanes[lane] == max(lanes.values())), default=self.process)

    def _main_backward_starts(self) -> list[int]:
        ranges = [r for r in self.backward_ranges if r.lane == self.main_thread]
        return [start for start, _ in stretches({t for r in ranges for t in range(r.start, r.end)})]

    def pass_of(self, collective: Event) -> Pass | None:
        """The last pass that had begun when it was launched, else the first; not known without steps."""
        if collective.step is None or not self.has_steps:
            return None
        passes = self.passes(collective.step)
        begun = [one for one in passes if one.begins <= collective.at]
        return begun[-1] if begun else passes[0] if passes else None

    def key(self, step: Step) -> int:
        """The step's number, or its position where numbers come again or it has none."""
        measured = [s for s in self.all_steps if not s.is_warmup]
        numbers = [s.number for s in measured if s.number is not None]
        position = measured.index(step)
        return position if len(set(numbers)) < len(numbers) or step.number is None else step.number

    def collectives(self) -> list[Event]:
        """Operations: those outside of steps first, then step by step, in the order of launch."""
        where = {id(step): index for index, step in enumerate(self.steps)}

        def order(e: Event) -> tuple[int, int, int]:
            return (-1 if e.step is None else where[id(e.step)], LONG_AGO if e.launch is None else e.launch, e.start)

        if self.operations is None:
            self.operations = sorted(_joined(self.select_category(Category.COMMUNICATION)), key=order)
        return self.operations


def _joined(events: list[Event]) -> list[Event]:
    """The operations that events are parts of, in the order of the event that each is named after.

    The copies of one range or call are one, named after the last to end. What prepares an all-to-all is part of the one
    that comes next on its stream, if nothing else does and both are of one step.
    """
    are_copies = [not e.is_kernel and e.call is not None for e in events]
    groups = [[e] for e, is_copy in zip(events, are_copies, strict=True) if not is_copy and not _prepares(e)]
    calls: dict[int | tuple[str, int], list[Event]] = {}
    for e, is_copy in zip(events, are_copies, strict=True):
        if is_copy:
            calls.setdefault(e.call, []).append(e)
    groups += [sorted(of_call, key=lambda e: e.end) for of_call in calls.values()]
    kernels = [e for e in events if e.is_kernel]
    for e in events:
        if _prepares(e):
            mine = sorted(
                (one for one in kernels if one.stream == e.stream and one.step is e.step), key=lambda x: x.start
            )
            place = next(index for index, one in enumerate(mine) if one is e)
            after = next((one for one in mine[place:] if one.does != "notify"), None)
            if after is not None and after.does == "all_to_all":
                next(group for group in groups if group[-1] is after).insert(0, e)
            else:
                groups.append([e])
    where = {id(e): place for place, e in enumerate(events)}
    return [_operation(group) for group in sorted(groups, key=lambda group: where[id(group[-1])])]


def _prepares(e: Event) -> bool:
    """By its kernel's name, whatever a range round its launch says."""
    return e.does == "notify"


def _operation(parts: list[Event]) -> Event:
    launches = [e.launch for e in parts if e.launch is not None]
    return replace(
        parts[-1],
        start=min(e.start for e in parts),
        end=max(e.end for e in parts),
        launch=min(launches, default=None),
        called=min((e.called for e in parts if e.called is not None), default=None),
        parts=parts,
        exposed=Counter(),
    )


def united(events: list[Event]) -> set[int]:
    return set().union(*(e.instants for e in events)) if events else set()


def ranks_of(*traces: Trace) -> list[Rank]:
    """The ranks of a run, by rank number, those without a number last."""
    found = [rank for trace in traces for rank in sorted(_ranks_of_trace(trace), key=_order)]
    return sorted(found, key=lambda rank: (rank.rank is None, rank.rank or 0))


def _order(rank: Rank) -> tuple[bool, int, int, int]:
    return rank.rank is None, rank.rank or 0, rank.process, rank.device or 0


def _ranks_of_trace(trace: Trace) -> list[Rank]:
    recorded = read(trace)
    trace = recorded.trace
    rows = trace.activities
    used = [(int(p), int(d), c) for p, d, c in zip(rows.process, rows.device, rows.category, strict=True)]
    works = {(process, device) for process, device, category in used if category != Category.MEMORY}
    on_device = {process for process, *_ in used}
    processes = sorted(on_device | {int(p) for p in trace.spans.process})
    found = []
    for process in processes:
        if process in on_device:
            devices = {device for owner, device in works if owner == process}
            if not devices and (not works or process in trace.ranks):  # beside others that work it is no rank
                devices = {device for owner, device, _ in used if owner == process}
            found += [_rank(recorded, process, device) for device in sorted(devices)]
        elif process in trace.ranks or not (on_device or trace.ranks):
            found.append(_rank(recorded, process, None))
    return found


def _ranges(trace: Trace, process: int) -> list[Range]:
    spans = trace.spans
    rows = [row for row in range(len(spans)) if spans.process[row] == process]
    ranges = [
        Range(trace.names[spans.name_id[row]], int(spans.start_ns[row]), int(spans.end_ns[row]), int(spans.lane[row]),
              bool(spans.is_open[row]))
        for row in rows
    ]  # fmt: skip
    return sorted(ranges, key=lambda r: r.start)


def _is_mostly_in(phase: Range, step: Step) -> bool:
    """By at least half of the phase, or of the step; or it begins in it, and ends only with the recording."""
    within = min(phase.end, step.end) - max(phase.start, step.start)
    begins_in_it = step.start <= phase.start < step.end  # it may take no time at all
    if begins_in_it and phase.is_open:
        return True
    return (within > 0 or begins_in_it) and 2 * within >= min(phase.end - phase.start, step.end - step.start)


def _rank(recorded: Recorded, process: int, device: int | None) -> Rank:
    trace = recorded.trace
    ranges = _ranges(trace, process)
    steps = steps_among(ranges)
    phases = [(phase, r) for phase in PHASES for r in ranges if r.name == phase]
    backward = [r for phase, r in phases if phase == "backward"]
    again = [r for phase, r in phases if phase == "forward" and any(b.start <= r.start < b.end for b in backward)]
    found = [r for _, r in phases if r not in again]
    held = [any(s.start <= r.start < s.end for r in found) for s in steps[:-1]]
    is_empty = bool(steps) and not any(_is_mostly_in(r, steps[-1]) for r in found)
    lacks = [
        phase
        for phase in PHASES
        if len(steps) > LEAST_ALIKE
        and all(any(s.start <= r.start < s.end for p, r in phases if p == phase and r in found) for s in steps[:-1])
        and not any(_is_mostly_in(r, steps[-1]) for p, r in phases if p == phase and r in found)
    ]
    unfinished = _behind(steps, ranges)
    if (held and all(held) and is_empty) or lacks:  # the program ended in it
        unfinished.append((steps[-1].start, steps[-1].end))
        steps = steps[:-1]
    collectives = [r for r in ranges if r.name.startswith("all_reduce|")]
    ours = [r.name for r in ranges if r.name.startswith("process|")]
    lost = lost_launches(trace, process)
    hides_device = device is None and any("backend=nccl" in name or "device=cuda" in name for name in ours)
    tells_host = device is None and (collectives or ours) and not (lost or hides_device)
    events = _host_events(collectives, phases) if tells_host else []
    is_off = device is not None and clocks_disagree(recorded, process)
    if device is not None:
        events = _device_events(recorded, process, steps, ranges, phases, device)
        if not any(e.category == Category.COMMUNICATION for e in events) and not any("backend=nccl" in n for n in ours):
            sent = [e for e in _host_events(collectives, phases) if e.category == Category.COMMUNICATION]
            lanes = {r.start: r.lane for r in collectives}
            events += [_from_its_copy(e, lanes, recorded, process) for e in sent]
    for e in events:
        e.step = next((s for s in steps if e.launch is not None and s.start <= e.launch < s.end), None)
        at = e.start if e.launch is None and not is_off else e.launch
        e.is_unfinished = e.step is None and at is not None and any(start <= at < end for start, end in unfinished)
    has_steps = bool(steps)
    incomplete = (
        _incomplete(recorded, process, steps, [(p, r) for p, r in phases if r in found], events, lost, is_off)
        if device is not None
        else []
    )
    for e in events:
        e.called = e.launch
    for e in events if is_off else []:  # the host's and the device's times cannot be compared
        e.launch = e.launch if e.stream is None else None
    if not steps and events:
        whole = Step(None, min(e.start for e in events), max(e.end for e in events), is_warmup=False)
        steps = [whole]
        for e in events:
            e.step = whole
    for e in events:  # of an incomplete step, whatever began in it
        if incomplete and e.step is None and e.stream is not None and not e.has_launch and not is_off:
            e.step = next((s for s in incomplete if s.start <= e.start < s.end), None)
    told = {phase for phase, _ in phases}
    trains = told & {"optimizer", "synchronize"} or any(e.category == Category.COMMUNICATION for e in events)
    hides_backward = device is None and "backward" not in told and trains
    counted = [e for e in events if e.step is None or not (e.step.is_warmup or e.step in incomplete)]
    counted = [e for e in counted if not e.is_unfinished]
    mixes_clocks = is_off and any(e.category == Category.COMMUNICATION and e.stream is None for e in counted)
    is_blind = unnamed_share(trace) > MOST_UNNAMED or bool(hides_backward) or mixes_clocks
    beside = [e for e in events if e.step in incomplete or e.is_unfinished]
    names = {trace.names[row] for row in trace.spans.name_id}
    is_silent = not any(e.category == Category.COMMUNICATION for e in events)
    rows = zip(trace.activities.process, trace.activities.category, trace.activities.device, strict=True)
    is_other = any(owner == process and what == Category.COMMUNICATION and at != device for owner, what, at in rows)
    names_some = "synchronize" in told if device is None else any(name.startswith("nccl:") for name in names)
    is_unnamed = is_silent and not is_other and names_some
    return Rank(
        process, device, trace.ranks.get(process), str(trace.path),
        counted, [s for s in steps if not s.is_warmup and s not in incomplete], has_steps,
        [r for phase, r in phases if phase == "synchronize"], is_blind, trace.world_size,
        trace.epoch_ns,
        steps,
        incomplete,
        beside,
        is_off,
        is_unnamed and trace.world_size != 1,
        any(e.category == Category.COMMUNICATION and e.end > e.start for e in events if e not in counted),
        is_silent,
        hides_device or (device is None and len(lost) > 0 and len(lost) == len(launches_of(trace, process))),
        lacks_names=unnamed_share(trace) > MOST_UNNAMED,
        ranges=ranges,
        backward_ranges=backward,
        may_have_lost=bool(lost)
        and not is_other
        and not any(e.category == Category.COMMUNICATION for e in counted)
        and any(not step.is_warmup for step in incomplete),
    )  # fmt: skip


def _incomplete(
    recorded: Recorded,
    process: int,
    steps: list[Step],
    phases: list[tuple[str, Range]],
    events: list[Event],
    lost: list[int],
    is_off: bool,
) -> list[Step]:
    """Steps with a launch that was lost or work that is impossible, and those that lost work may have run beside."""
    trace = recorded.trace
    launches = [
        recorded.launches[row][0] for row in recorded.impossible if int(trace.activities.process[row]) == process
    ]
    doubtful = [at for at in (*lost, *launches) if at is not None]
    found = [s for s in steps if any(s.start <= at < s.end for at in doubtful)]
    overlong = [s for s in steps if any(at is not None and s.start <= at < s.end for at in launches)]
    timeless = _steps_of(steps, _timeless_launches(recorded, process))
    if len(timeless) == len(steps):
        timeless = _steps_of(steps, _timeless_launches(recorded, process, usually_last=True))
    other = _without_calls(recorded, process, steps, phases) + timeless
    are_most = 2 * len(overlong) > len(steps) > 1
    found = [s for s in steps if s in found or s in other or are_most]
    whole = [s for s in steps if s not in found]
    if not found:
        return []
    ends = {id(s): max((e.end for e in events if e.step is s), default=LONG_AGO) for s in steps}
    begins = {id(s): min((e.start for e in events if e.step is s), default=None) for s in steps}
    both = [(one, other) for one, other in pairwise(steps) if one in whole and other in whole]
    overlap = any(begins[id(b)] is not None and ends[id(a)] > begins[id(b)] for a, b in both)
    beside = []
    for one, other in pairwise(steps):
        if one in found and other in whole and overlap:
            beside.append(other)
        if other in found and one in whole and overlap and is_off:
            beside.append(one)
    if not is_off:
        reach = max(
            (b - a for a, b in combinations(range(len(steps)), 2) if _overlap(steps[a], steps[b], whole, begins, ends)),
            default=0,
        )
        is_known = any(begins[id(b)] is not None for _, b in both)
        for place, one in enumerate(steps):
            later = steps[place + 1 : place + 1 + reach] if is_known else steps[place + 1 :]
            if one in whole and any(other in found and ends[id(one)] > other.start for other in later):
                beside.append(one)
    return [s for s in steps if s in found or s in beside]


def _overlap(one: Step, other: Step, whole: list[Step], begins: dict[int, int | None], ends: dict[int, int]) -> bool:
    """Whether both are complete, and the later one had begun on the device before the end of the other's work."""
    begin = begins[id(other)]
    return one in whole and other in whole and begin is not None and begin < ends[id(one)]


def _steps_of(steps: list[Step], launches: list[int | None]) -> list[Step]:
    return [step for step in steps if any(at is not None and step.start <= at < step.end for at in launches)]


def _timeless_launches(recorded: Recorded, process: int, *, usually_last: bool = False) -> list[int | None]:
    """When the kernels that take no time were launched, but not those that may take less than the clock tells.

    With ``usually_last``, only those of whose name most take 2 us or more.
    """
    table = recorded.trace.activities
    rows = [row for row in range(len(table)) if table.process[row] == process and table.kind[row] == Kind.KERNEL]
    took = {row: int(table.end_ns[row] - table.start_ns[row]) for row in rows}
    if all(int(table.start_ns[row]) % 1000 == 0 == took[row] % 1000 for row in rows):
        long = {int(table.name_id[row]) for row in rows if took[row] > 1000}
    else:
        long = {int(table.name_id[row]) for row in rows}
    if usually_last:
        of_name = {name: [took[row] >= 2000 for row in rows if table.name_id[row] == name] for name in long}
        long = {name for name, lasts in of_name.items() if 2 * sum(lasts) > len(lasts)}
    return [recorded.launches[row][0] for row in rows if not took[row] and int(table.name_id[row]) in long]


def _without_calls(recorded: Recorded, process: int, steps: list[Step], phases: list[tuple[str, Range]]) -> list[Step]:
    """Steps without a launch, if others have some; beside them, those with fewer than all others; without a phase's."""
    trace = recorded.trace
    launches = launches_of(trace, process)
    work = [
        launch
        for row in range(len(trace.activities))
        if trace.activities.process[row] == process and (launch := recorded.launches[row][0]) is not None
    ]
    has = [sum(s.start <= at < s.end for at in launches) for s in steps]
    if not any(has):
        return []
    places = range(len(steps))
    silent = [at for at in places if not any(steps[at].start <= one < steps[at].end for one in (*launches, *work))]
    beside = [at for at in places if at not in silent and {at - 1, at + 1} & {*silent}]
    others = [has[at] for at in places if at not in (*silent, *beside)]
    partial = [at for at in beside if others and has[at] < min(others)]
    for phase in dict.fromkeys(phase for phase, _ in phases):
        counts: dict[int, int] = {}
        for name, one in phases:
            for at in places:
                if name == phase and at not in silent and steps[at].start <= one.start < steps[at].end:
                    counts[at] = counts.get(at, 0) + sum(one.start <= launch < one.end for launch in launches)
        idle = [at for at, count in counts.items() if not count]
        if len(idle) == 1 and len(counts) > LEAST_ALIKE:
            partial += idle
    return [steps[at] for at in places if at in silent or at in partial]


def unnamed_share(trace: Trace) -> float:
    """Kernels without a name, by number or by time, whichever share is larger."""
    rows = [row for row in range(len(trace.activities)) if trace.activities.kind[row] == Kind.KERNEL]
    unnamed = [row for row in rows if trace.activities.category[row] == Category.UNKNOWN]

    def time(of: list[int]) -> int:
        return sum(int(trace.activities.end_ns[row] - trace.activities.start_ns[row]) for row in of)

    return max(len(unnamed) / max(1, len(rows)), time(unnamed) / max(1, time(rows)))


def steps_among(ranges: list[Range]) -> list[Step]:
    """Ours, else others'; open ones are none; of overlapping ones the busiest thread's, the inner, cut.

    Of ranges of one kind of which most hold others none is an inner one.
    """
    ours = [r for r in ranges if r.name.startswith("step|")]
    found = ours or [r for r in ranges if re.fullmatch(r"step \d+", r.name)]
    found = [r for r in found if not r.is_open]
    if any(a.start < b.end and b.start < a.end for i, a in enumerate(found) for b in found[i + 1 :]):
        lanes = Counter(r.lane for r in found)
        busiest = min(lane for lane in lanes if lanes[lane] == max(lanes.values()))
        found = [r for r in found if r.lane == busiest]
        inner = [r for i, r in enumerate(found) if not _holds_another(r, i, found)]
        kinds, of_inner = (Counter(_kind(r.name) for r in some) for some in (found, inner))
        found = [r for r in inner if 2 * of_inner[_kind(r.name)] >= kinds[_kind(r.name)]] or inner
    ends = [min([r.end, *(other.start for other in found if other.start > r.start)]) for r in found]
    return [Step(_number(r.name), r.start, end, "warmup=1" in r.name) for r, end in zip(found, ends, strict=True)]


def _behind(steps: list[Step], ranges: list[Range]) -> list[tuple[int, int]]:
    """When a range like those of steps was open that did not end, behind them on their thread."""
    like = [r for r in ranges if r.name.startswith("step|")] or [r for r in ranges if re.fullmatch(r"step \d+", r.name)]
    lanes = {r.lane for r in like if r.start in {s.start for s in steps}}
    last = max((s.end for s in steps), default=None)
    return [(r.start, r.end) for r in like if r.is_open and last is not None and r.start >= last and r.lane in lanes]


def _holds_another(outer: Range, place: int, ranges: list[Range]) -> bool:
    return any(
        outer.start <= r.start and r.end <= outer.end and ((r.start, r.end) != (outer.start, outer.end) or place < i)
        for i, r in enumerate(ranges)
        if r is not outer
    )


def _kind(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _number(name: str) -> int | None:
    hit = re.search(r"index=(\d+)|step (\d+)", name)
    return int(hit.group(1) or hit.group(2)) if hit else None


def _phase_at(phases: list[tuple[str, Range]], time: int | None) -> str | None:
    """The innermost: of those that hold the instant the one that starts last, then the shortest."""
    holding = [(r.start, -r.end, phase) for phase, r in phases if time is not None and r.start <= time < r.end]
    return max(holding, key=lambda found: found[:2])[2] if holding else None


def _device_events(recorded, process, steps, ranges, phases, device) -> list[Event]:
    trace = recorded.trace
    rows = [row for row in range(len(trace.activities)) if trace.activities.process[row] == process]
    table, events = trace.activities, {}
    numbers_grow, first = _numbers_grow(trace), min(trace.calls.start_ns.tolist(), default=0) - 1
    for row in rows:
        launch, thread, call = recorded.launches[row]
        launched_by = call
        if table.kind[row] == Kind.COPY and row in recorded.ranges:
            call = ("range", recorded.ranges[row])
        events[row] = Event(
            int(table.start_ns[row]), int(table.end_ns[row]), Category(int(table.category[row])), int(table.lane[row]),
            launch, thread, table.kind[row] == Kind.KERNEL, phase=_phase_at(phases, launch), call=call,
            operation=_operation_of(recorded, row), has_launch=launch is not None, does=_does(trace, row),
            launched_by=launched_by,
            place=int(table.correlation[row]) if numbers_grow else launch and launch - first,
        )  # fmt: skip
    if not any(phase == "backward" for phase, _ in phases):
        autograd = _autograd_threads(trace, process, steps, ranges, list(events.values()))
        own = [(phase, r) for phase, r in phases if r.lane in autograd]  # an optimizer in a hook, not round a closure
        for e in events.values():
            if e.thread in autograd and _phase_at(own, e.launch) != "optimizer":
                e.phase = "backward"
    return [e for row, e in events.items() if table.device[row] == device]


def _numbers_grow(trace: Trace) -> bool:
    """Whether of two calls of a thread the one with the larger number never begins earlier."""
    calls = trace.calls
    every = list(zip(calls.process, calls.lane, calls.correlation, calls.start_ns, strict=True))
    return all(
        one[2] >= other[2] or one[3] <= other[3]
        for one, other in permutations([call for call in every if call[2] != -1], 2)
        if one[:2] == other[:2]
    )


def _operation_of(recorded: Recorded, row: int) -> str:
    """That of torch's range around the launch, else by the name of the activity."""
    named = recorded.named(row)
    if named is not None:
        return "all_gather" if "all_gather" in named else "all_reduce"
    return _does(recorded.trace, row)


def _does(trace: Trace, row: int) -> str:
    if trace.activities.kind[row] == Kind.COPY:
        return "peer_copy"
    name = trace.names[trace.activities.name_id[row]]
    return "notify" if "notify" in name else "all_to_all" if "dispatch" in name else "all_reduce"


def _autograd_threads(trace, process, steps, ranges, events) -> set[int]:
    named = {lane for (p, lane), name in trace.threads.items() if p == process and name.startswith("pt_autograd")}
    if named:
        return named
    starts = {s.start for s in steps}
    main = {r.lane for r in ranges if r.start in starts}
    if not main:
        opened = Counter(r.lane for r in ranges)
        main = {lane for lane in opened if opened[lane] == max(opened.values())} | {process}
    sends, computes = (
        {e.thread for e in events if e.category == category and e.thread is not None}
        for category in (Category.COMMUNICATION, Category.COMPUTE)
    )
    found = (sends & computes) - main
    return found if main & {r.lane for r in ranges if r.start in starts} or computes - found else set()


def _from_its_copy(sent: Event, lanes: dict[int, int], recorded: Recorded, process: int) -> Event:
    """Gloo begins with the first copy that the thread launches before its next collective, and before this one ends."""
    trace, lane = recorded.trace, lanes[sent.start]
    until = min([start for start in lanes if start > sent.start and lanes[start] == lane] + [sent.end])
    table, begins = trace.activities, []
    for row in range(len(table)):
        if table.process[row] == process and table.kind[row] == Kind.COPY:
            at, thread, _ = recorded.launches[row]
            begins += [(at, row)] if at is not None and thread == lane and sent.start <= at < until else []
    if not begins:
        return sent
    start = int(table.start_ns[min(begins)[1]])
    return replace(sent, start=min(max(start, sent.start), sent.end))


def _host_events(collectives: list[Range], phases: list[tuple[str, Range]]) -> list[Event]:
    """On a CPU: our ranges communicate, and a phase computes while it does not wait in ``synchronize``."""
    events = [
        Event(r.start, r.end, Category.COMMUNICATION, None, r.start, None, is_kernel=False,
              phase=_phase_at(phases, r.start), bucket=int(re.search(r"bucket=(\d+)", r.name).group(1)))
        for r in collectives
    ]  # fmt: skip
    waiting = {t for phase, r in phases if phase == "synchronize" for t in range(r.start, r.end)}
    for phase in PHASES:
        busy = {t for name, r in phases if name == phase for t in range(r.start, r.end)} - waiting
        for start, end in stretches(busy):
            events.append(Event(start, end, Category.COMPUTE, None, start, None, is_kernel=False, phase=phase))
    return events


def stretches(instants: set[int]) -> list[tuple[int, int]]:
    starts = sorted(t for t in instants if t - 1 not in instants)
    ends = sorted(t + 1 for t in instants if t + 1 not in instants)
    return list(zip(starts, ends, strict=True))
