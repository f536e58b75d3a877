"""Whole runs drawn by Hypothesis: several ranks in one or more files, and much that makes real captures awkward.

Ranks of a run share a plan (how many steps, how they are named, how many collectives each launches). They differ in all
times, or keep one pace: their collectives end together, on the streams of two communicators, which each rank launches
in an order of its own; in some steps one rank is late, in the others none is. Drawn are: hosts that run ahead of their
device, ranges of steps that end before what they launched, streams that idle before a start, times before the clock's
0, captures without steps, several devices and files, files that tell UTC, repeated and missing step numbers, steps that
hold others or are open or on two threads, numbers of calls that come again, graphs and groups (many things launched by
one call), phases that are missing, unnamed autograd threads, kernels without a call, without a name or within a graph
recorded whole, collectives on the stream of compute or launched outside of steps, one stalled collective, gloo on the
CPU and gloo with CUDA tensors, steps of one to four passes of backward, each with collectives or without.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from ddp_prof.trace import (
    UNKNOWN,
    Activities,
    Calls,
    Category,
    Kind,
    Overhead,
    Spans,
    Synchronizations,
    SyncKind,
    Trace,
    empty,
)
from tests.drawing import table

MAIN, AUTOGRAD, OTHER_THREAD = 1, 2, 3
COMPUTE_STREAM, SECOND_STREAM, COMM_STREAM = 7, 8, 9
PHASES = ("forward", "backward", "synchronize", "optimizer")
STALL_NS = 40
ENGINES = ("kernel", "copies", "prepared", "named copies")
COPY_WITHIN = "Memcpy DtoD (Device -> Device)"
OF_COPIES = ("nccl:_all_gather_base", "nccl:_all_gather_base", "nccl:all_reduce")
"""Ranges of torch around a launch; copies alone carry out the first."""
PEER_COPY = "Memcpy PtoP (Device -> Device)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
NOTIFY, DISPATCH = "deep_ep::intranode::notify_dispatch<8>(x)", "deep_ep::intranode::dispatch<8>(x)"


@dataclass(frozen=True)
class Plan:
    """What the ranks of a run have in common.

    Attributes:
        numbers: Of the steps; ``None`` for a capture without steps.
        collectives: Of each pass of backward, in turn.
        passes: Forward, backward, collectives and perhaps an optimizer so many times in each step.
        phases: Those that ranges name.
        warmup: Position of the step that is marked as warm-up, ``None`` for none.
        stalled: Step of which a collective stalls, ``None`` for none.
        has_graph: Whether each step launches a graph by node, or a group of collectives: many things by one call.
        rounds: Steps, or what would be steps where the capture has none.
        pace: Of ranks that keep one, the length of a step, then begin and end of each collective in it, from there on.
        late: Rank that is late in two of three steps of these, ``None`` for none.
        engines: What carries out each collective of a step: a kernel, copies between devices, a kernel that another
            one prepares, or copies within a device that a range of torch names.
        waits: Whether the host waits for the device at the end of each step.
    """

    numbers: tuple[int, ...] | None
    is_ours: bool
    collectives: tuple[int, ...]
    phases: tuple[str, ...]
    device: str
    has_named_autograd: bool
    has_nested: bool
    has_open: bool
    warmup: int | None
    stalled: int | None
    has_graph: bool
    rounds: int
    pace: tuple[int, tuple[tuple[int, int], ...]] | None
    late: int | None
    engines: tuple[str, ...]
    passes: int
    waits: bool


@st.composite
def plans(draw: st.DrawFn, *, has_names: bool = False) -> Plan:
    """With ``has_names``, torch's ranges name collectives that copies carry out, which a reader has to find."""
    engines = ENGINES if has_names else ENGINES[:-1]
    pace = draw(st.one_of(st.none(), paces()))
    count = draw(st.sampled_from([0, 0, 1, 2, 3, 4 if pace is None else 10]))
    numbers = tuple(draw(st.sampled_from([range(count), range(7, 7 + count), [n % 2 for n in range(count)]])))
    return Plan(
        numbers=numbers or None,
        is_ours=draw(st.booleans()),
        collectives=tuple(draw(st.lists(st.integers(0, 4), min_size=5, max_size=5))) * 2,
        phases=tuple(phase for phase in PHASES if draw(st.integers(0, 4))),
        device=draw(st.sampled_from(["cuda", "cuda", "cuda", "gloo", "gloo with cuda"])),
        has_named_autograd=draw(st.booleans()),
        has_nested=draw(st.integers(0, 4)) == 0,
        has_open=draw(st.integers(0, 4)) == 0,
        warmup=draw(st.sampled_from([None] * 8 + [0, 1])),
        stalled=draw(st.sampled_from([None, None, 0, count // 2])),
        has_graph=draw(st.integers(0, 4)) == 0,
        rounds=count or draw(st.integers(1, 4)),
        pace=pace,
        late=draw(st.sampled_from([None, 0, 1, 1])),
        engines=tuple(draw(st.sampled_from([("kernel",) * 4] * 81 + [*itertools.product(engines, repeat=4)]))),
        waits=draw(st.booleans()),
        passes=draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4])) if pace is None else 1,
    )


@st.composite
def paces(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Two collectives of each of two streams, one after the other."""
    times: list[tuple[int, int]] = []
    for bucket in range(4):
        earliest = times[bucket - 2][1] if bucket > 1 else 0
        begin = earliest + draw(st.integers(2, 6))
        times.append((begin, begin + draw(st.integers(4, 9))))
    return max(end for _, end in times) + draw(small(4)), tuple(times)


@dataclass
class _File:
    """Rows of a trace in the making."""

    names: list[str] = field(default_factory=list)
    activities: list[dict[str, int]] = field(default_factory=list)
    spans: list[dict[str, int]] = field(default_factory=list)
    calls: list[dict[str, int]] = field(default_factory=list)
    is_launch: list[bool] = field(default_factory=list)
    waits: list[dict[str, int]] = field(default_factory=list)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    numbers: int = 10**6
    launched: int = 0

    def name_id(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def say(self, process: int, name: str, start: int, end: int, lane: int = MAIN, *, is_open: bool = False) -> None:
        self.spans.append({
            "start_ns": start, "end_ns": end, "process": process, "lane": lane, "name_id": self.name_id(name),
            "is_start_end": 0, "is_open": int(is_open),
        })  # fmt: skip

    def say_all_reduce(self, process: int, bucket: int, start: int, end: int) -> None:
        """No two of a process begin at one instant."""
        begun = {span["start_ns"] for span in self.spans if span["process"] == process and span["lane"] == AUTOGRAD}
        start = next(time for time in itertools.count(start) if time not in begun)
        self.say(process, f"all_reduce|bucket={bucket}|bytes=8|params=1", start, max(start + 1, end), AUTOGRAD)

    def launch(
        self, process: int, thread: int | None, at: int, start: int, length: int, stream: int, category: Category,
        device: int, *, by_last_call: bool = False, name: str = ALL_REDUCE, kind: Kind | None = None,
    ) -> None:  # fmt: skip
        """An activity and, with a thread, the call that launched it, of a number that comes again after some calls."""
        kind = kind or {Category.MEMORY: Kind.COPY, Category.OTHER: Kind.GRAPH}.get(category, Kind.KERNEL)
        if category != Category.COMMUNICATION and name != COPY_WITHIN:
            name = category.name
        self.launched += not by_last_call
        correlation = 100 + self.launched % self.numbers
        self.activities.append({
            "start_ns": start, "end_ns": start + length, "process": process, "device": device, "lane": stream,
            "name_id": UNKNOWN if category == Category.UNKNOWN else self.name_id(name), "kind": kind,
            "category": category, "correlation": correlation, "bytes": UNKNOWN,
        })  # fmt: skip
        if thread is not None and not by_last_call:
            self.calls.append({"start_ns": at, "process": process, "lane": thread, "correlation": correlation})
            self.is_launch.append(kind in (Kind.KERNEL, Kind.GRAPH))

    def wait(self, process: int, thread: int, at: int, until: int) -> None:
        """The host waits for the device."""
        self.waits.append({
            "kind": SyncKind.HOST_WAIT_DEVICE, "start_ns": at, "end_ns": until, "process": process, "thread": thread,
            "correlation": UNKNOWN, "device": 0, "stream": UNKNOWN, "awaits": UNKNOWN,
        })  # fmt: skip

    def trace(self, path: str, world_size: int) -> Trace:
        return Trace(
            path=Path(path), source="nsys-sqlite", producer=None, activities=table(Activities, self.activities),
            spans=table(Spans, self.spans), calls=table(Calls, self.calls), threads=self.threads, ranks=self.ranks,
            overhead=empty(Overhead), names=tuple(self.names), world_size=world_size,
            synchronizations=table(Synchronizations, self.waits), is_launch=np.array(self.is_launch, np.bool_),
        )  # fmt: skip


def small(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most)


COMPUTES = st.lists(
    st.tuples(small(14), st.sampled_from([MAIN, MAIN, *[AUTOGRAD] * 4, OTHER_THREAD, None]), small(6), small(6),
              st.sampled_from([COMPUTE_STREAM, COMPUTE_STREAM, SECOND_STREAM])),
    min_size=2,
    max_size=8,
)  # fmt: skip
"""In a step: when launched, by whom, how much later it starts, how long it lasts, on which stream."""

COLLECTIVE = st.tuples(
    small(16), st.sampled_from([MAIN, *[AUTOGRAD] * 4]), st.one_of(small(6), small(6), small(24)), small(10),
    st.sampled_from([COMM_STREAM] * 5 + [COMM_STREAM + 1, COMPUTE_STREAM]),
)  # fmt: skip
RARE = st.lists(
    st.tuples(small(16), small(10), small(6), st.sampled_from([Category.MEMORY] * 8 + [Category.OTHER])), max_size=2
)
"""Copies and, rarely, graphs recorded whole."""


@st.composite
def runs(draw: st.DrawFn, *, has_names: bool = False) -> tuple[Trace, ...]:
    """The traces of one run, a few hundred nanoseconds each."""
    plan = draw(plans(has_names=has_names))
    ranks, one_file, devices = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.sampled_from([1, 1, 1, 2]))
    first = draw(st.sampled_from([0, 0, -40, -1000]))
    numbers = draw(st.sampled_from([10**6, 10**6, 10**6, 12, 5]))
    files = [_File(numbers=numbers) for _ in range(1 if one_file else ranks)]
    clocks = [first if one_file else first + draw(small(30)) for _ in range(ranks)]
    for rank, clock in enumerate(clocks):
        file = files[0 if one_file else rank]
        _draw_rank(draw, file, plan, rank, clock, devices)
        if draw(st.integers(0, 19)) == 0:
            file.launch(100 + rank, MAIN, first + 20, first + 22, 3, COMPUTE_STREAM, Category.UNKNOWN, 0)
    told = tuple(file.trace(f"rank{index}.sqlite", ranks) for index, file in enumerate(files))
    if draw(st.booleans()):  # UTC, nearly
        return tuple(
            replace(trace, epoch_ns=10_000 - clock + draw(small(2))) for trace, clock in zip(told, clocks, strict=False)
        )
    return told


def _draw_rank(draw: st.DrawFn, file: _File, plan: Plan, rank: int, clock: int, devices: int) -> None:
    process, time, ahead = 100 + rank, 20 + clock, draw(st.sampled_from([0, 0, 8, 40]))
    early = draw(st.sampled_from([0, 0, 0, 3, 8]))
    file.ranks[process] = rank
    backend, device = {"cuda": "nccl"}.get(plan.device, "gloo"), "cpu" if plan.device == "gloo" else "cuda"
    whole = f"process|rank={rank}|world=3|variant=overlap|backend={backend}|device={device}"
    file.say(process, whole, clock, clock + 600)
    file.threads[process, MAIN] = "python"
    if plan.has_named_autograd:
        file.threads[process, AUTOGRAD] = "pt_autograd_0"
    for index in range(plan.rounds):
        lengths = [plan.pace[0]] if plan.pace else [draw(st.integers(12, 20)) for _ in range(plan.passes)]
        if plan.numbers is not None:
            _say_step(draw, file, process, plan, index, time, sum(lengths) - early)
        if plan.pace:
            _draw_paced(draw, file, process, plan, index, time, rank, devices)
        if plan.has_graph and plan.device == "cuda":
            _draw_graph(draw, file, process, time, ahead)
        for nth, length in enumerate(lengths):
            _say_phases(draw, file, process, plan, time, length, steps=nth == len(lengths) - 1 or draw(st.booleans()))
            if plan.device != "gloo":
                _draw_work(draw, file, process, time, ahead, devices)
            if not plan.pace:
                _draw_collectives(draw, file, process, plan, index * plan.passes + nth, time, ahead, devices)
            time += length
        if plan.waits and file.calls:
            _draw_wait(draw, file, process, time)
        time += 2 if plan.pace else draw(small(4))
    if plan.has_open and plan.numbers is not None:
        file.say(process, _step_name(plan, 9), time, clock + 600, is_open=True)


def _draw_wait(draw: st.DrawFn, file: _File, process: int, at: int) -> None:
    """The main thread waits until the device has done what the thread launched."""
    launched = {call["correlation"] for call in file.calls if (call["process"], call["lane"]) == (process, MAIN)}
    ends = [row["start_ns"] for row in file.activities if row["process"] == process]
    ends += [row["end_ns"] for row in file.activities if row["process"] == process and row["correlation"] in launched]
    file.wait(process, MAIN, at, max([at + 1, *ends]) + draw(small(2)))


def _step_name(plan: Plan, number: int) -> str:
    return f"step|index={number}" if plan.is_ours else f"step {number}"


def _say_step(draw: st.DrawFn, file: _File, process: int, plan: Plan, index: int, time: int, length: int) -> None:
    warmup = "|warmup=1" if plan.warmup == index and plan.is_ours else ""
    file.say(process, _step_name(plan, plan.numbers[index]) + warmup, time, time + length)
    if plan.has_nested and index == 0:
        before, after = draw(small(1)), draw(small(1))
        file.say(process, _step_name(plan, 50), time - before, time + length + after)
        if draw(st.booleans()):
            file.say(process, _step_name(plan, 51), time + 2, time + length + 9, OTHER_THREAD)


def _say_phases(draw: st.DrawFn, file: _File, process: int, plan: Plan, time: int, length: int, *, steps: bool) -> None:
    """Phases of a pass in their order; backward is long, as a rule. A hook's optimizer is autograd's.

    With ``steps``, the optimizer steps after the pass; else the program does something else meanwhile.
    """
    forward, synchronize, optimizer = draw(small(5)), draw(st.integers(5, length)), draw(st.integers(9, length))
    borders = [0, forward, min(synchronize, optimizer), optimizer, length]
    for phase, start, end in zip(PHASES, borders, borders[1:], strict=False):
        if phase in plan.phases and end > start and (steps or phase != "optimizer"):
            in_hook = phase == "optimizer" and draw(st.integers(0, 3)) == 0
            file.say(process, phase, time + start, time + end, AUTOGRAD if in_hook else MAIN)


def _draw_work(draw: st.DrawFn, file: _File, process: int, time: int, ahead: int, devices: int) -> None:
    for at, thread, delay, length, stream in draw(COMPUTES):
        device, start = at % devices, time + at + delay + ahead
        file.launch(process, thread, time + at, start, length, stream, Category.COMPUTE, device)
    for at, delay, length, category in draw(RARE):
        file.launch(process, MAIN, time + at, time + at + delay + ahead, length, SECOND_STREAM, category, 0)


def _draw_graph(draw: st.DrawFn, file: _File, process: int, time: int, ahead: int) -> None:
    """One call, and what it launches: compute, two collectives, compute."""
    thread, at = draw(st.sampled_from([MAIN, AUTOGRAD])), time + draw(small(12))
    start = at + ahead
    categories = (Category.COMPUTE, Category.COMMUNICATION, Category.COMMUNICATION, Category.COMPUTE)
    for number, category in enumerate(categories):
        start += draw(small(4))
        stream = COMPUTE_STREAM if category == Category.COMPUTE else COMM_STREAM
        file.launch(process, thread, at, start, draw(small(6)), stream, category, 0, by_last_call=number > 0)


def _draw_paced(
    draw: st.DrawFn, file: _File, process: int, plan: Plan, index: int, time: int, rank: int, devices: int
) -> None:
    """Those of even number are one communicator's, the others another's; a rank may have its streams exchanged."""
    exchanged, is_late = draw(st.integers(0, 5)) == 0, plan.late == rank and index % 3 != 0
    for bucket, (begin, end) in list(enumerate(plan.pace[1]))[: plan.collectives[index]]:
        at = time + begin - draw(st.integers(0, 2))
        start, stop = time + (end - 2 if is_late else begin), time + end + draw(st.sampled_from([0, 0, 0, 1]))
        if plan.device == "cuda":
            stream = COMM_STREAM + (bucket + exchanged) % 2
            file.launch(process, AUTOGRAD, at, start, stop - start, stream, Category.COMMUNICATION, bucket % devices)
        else:
            file.say_all_reduce(process, bucket, start, stop)


def _draw_collectives(
    draw: st.DrawFn, file: _File, process: int, plan: Plan, index: int, time: int, ahead: int, devices: int
) -> None:
    count = plan.collectives[index % len(plan.collectives)] - (
        draw(st.integers(0, 9)) == 0
    )  # now and then ranks disagree
    for bucket in range(count):
        at, thread, delay, length, stream = draw(COLLECTIVE)
        length += STALL_NS if plan.stalled == index and bucket == 0 else 0
        if plan.device == "cuda":
            device, start = bucket % devices, time + at + delay + ahead
            where = (stream, Category.COMMUNICATION, device)
            if plan.engines[bucket] == "kernel":
                file.launch(process, thread, time + at, start, length, *where)
            elif plan.engines[bucket] == "prepared":
                pause = draw(small(3))
                file.launch(process, thread, time + at, start, draw(small(3)), *where, name=NOTIFY)
                file.launch(process, thread, time + at + pause, start + 3 + pause, length, *where, name=DISPATCH)
            elif plan.engines[bucket] == "named copies":
                file.say(process, draw(st.sampled_from(OF_COPIES)), time + at, time + at + 1, thread)
                for number in range(draw(st.integers(1, 2))):
                    where = (stream, Category.MEMORY, device)
                    file.launch(process, thread, time + at, start + number * length, length, *where, name=COPY_WITHIN)
            else:
                for number in range(draw(st.integers(1, 3))):
                    begin, lasts = start + draw(small(6)), length if number == 0 else draw(small(4))
                    where = (stream if number < 2 else COMM_STREAM + 2, Category.COMMUNICATION, device)
                    file.launch(
                        process,
                        thread,
                        time + at,
                        begin,
                        lasts,
                        *where,
                        by_last_call=number > 0,
                        name=PEER_COPY,
                        kind=Kind.COPY,
                    )
        elif length:
            file.say_all_reduce(process, bucket, time + at, time + at + length)
