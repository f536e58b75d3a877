"""Whole runs drawn by Hypothesis: several ranks in one or more files, and much that makes real captures awkward.

Ranks of a run share a plan (how many steps, how they are named, how many collectives each launches), and differ in all
times. Drawn are: several devices and files, repeated and missing step numbers, steps that hold others or are open or on
two threads, phases that are missing, unnamed autograd threads, kernels without a call, without a name or within a
graph, collectives on the stream of compute or launched outside of steps, one stalled collective, gloo on the CPU and
gloo with CUDA tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from ddp_prof.trace import UNKNOWN, Activities, Calls, Category, Kind, Overhead, Spans, Trace, empty
from tests.drawing import table

MAIN, AUTOGRAD, OTHER_THREAD = 1, 2, 3
COMPUTE_STREAM, SECOND_STREAM, COMM_STREAM = 7, 8, 9
PHASES = ("forward", "backward", "synchronize", "optimizer")
STALL_NS = 40


@dataclass(frozen=True)
class Plan:
    """What the ranks of a run have in common.

    Attributes:
        numbers: Of the steps; ``None`` for a capture without steps.
        collectives: Of each step.
        phases: Those that ranges name.
        stalled: Step of which a collective stalls, ``None`` for none.
    """

    numbers: tuple[int, ...] | None
    is_ours: bool
    collectives: tuple[int, ...]
    phases: tuple[str, ...]
    device: str
    has_named_autograd: bool
    has_nested: bool
    has_open: bool
    has_warmup: bool
    stalled: int | None


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(0, 4))
    numbers = tuple(draw(st.sampled_from([range(count), range(7, 7 + count), [n % 2 for n in range(count)]])))
    return Plan(
        numbers=numbers or None,
        is_ours=draw(st.booleans()),
        collectives=tuple(draw(st.lists(st.integers(0, 4), min_size=5, max_size=5))),
        phases=tuple(phase for phase in PHASES if draw(st.integers(0, 4))),
        device=draw(st.sampled_from(["cuda", "cuda", "cuda", "gloo", "gloo with cuda"])),
        has_named_autograd=draw(st.booleans()),
        has_nested=draw(st.integers(0, 4)) == 0,
        has_open=draw(st.integers(0, 4)) == 0,
        has_warmup=draw(st.integers(0, 4)) == 0,
        stalled=draw(st.sampled_from([None, None, 0, count // 2])),
    )


@dataclass
class _File:
    """Rows of a trace in the making."""

    names: list[str] = field(default_factory=list)
    activities: list[dict[str, int]] = field(default_factory=list)
    spans: list[dict[str, int]] = field(default_factory=list)
    calls: list[dict[str, int]] = field(default_factory=list)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)

    def name_id(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def say(self, process: int, name: str, start: int, end: int, lane: int = MAIN, *, is_open: bool = False) -> None:
        self.spans.append({
            "start_ns": start, "end_ns": end, "process": process, "lane": lane, "name_id": self.name_id(name),
            "domain_id": UNKNOWN, "is_start_end": 0, "is_open": int(is_open),
        })  # fmt: skip

    def launch(
        self, process: int, thread: int | None, at: int, start: int, length: int, stream: int, category: Category,
        device: int,
    ) -> None:  # fmt: skip
        """An activity and, with a thread, the call that launched it."""
        kind = {Category.MEMORY: Kind.COPY, Category.OTHER: Kind.GRAPH}.get(category, Kind.KERNEL)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)" if category == Category.COMMUNICATION else category.name
        correlation = len(self.activities) + 100
        self.activities.append({
            "start_ns": start, "end_ns": start + length, "process": process, "device": device, "lane": stream,
            "name_id": UNKNOWN if category == Category.UNKNOWN else self.name_id(name), "kind": kind,
            "category": category, "correlation": correlation, "bytes": UNKNOWN,
        })  # fmt: skip
        if thread is not None:
            self.calls.append({"start_ns": at, "process": process, "lane": thread, "correlation": correlation})

    def trace(self, path: str, world_size: int) -> Trace:
        return Trace(
            path=Path(path), source="nsys-sqlite", producer=None, activities=table(Activities, self.activities),
            spans=table(Spans, self.spans), calls=table(Calls, self.calls), threads=self.threads, ranks=self.ranks,
            overhead=empty(Overhead), names=tuple(self.names), world_size=world_size,
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
    small(16), st.sampled_from([MAIN, *[AUTOGRAD] * 4]), small(6), small(10),
    st.sampled_from([COMM_STREAM] * 5 + [COMM_STREAM + 1, COMPUTE_STREAM]),
)  # fmt: skip
RARE = st.lists(
    st.tuples(small(16), small(10), small(6), st.sampled_from([Category.MEMORY] * 8 + [Category.OTHER])), max_size=2
)
"""Copies and, rarely, graphs recorded whole."""


@st.composite
def runs(draw: st.DrawFn) -> tuple[Trace, ...]:
    """The traces of one run, a few hundred nanoseconds each."""
    plan = draw(plans())
    ranks, one_file, devices = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.sampled_from([1, 1, 1, 2]))
    files = [_File()] if one_file else [_File() for _ in range(ranks)]
    for rank in range(ranks):
        file, clock = files[0 if one_file else rank], 0 if one_file else draw(small(30))
        _draw_rank(draw, file, plan, rank, clock, devices)
        if draw(st.integers(0, 19)) == 0:
            file.launch(100 + rank, MAIN, 20, 22, 3, COMPUTE_STREAM, Category.UNKNOWN, 0)
    return tuple(file.trace(f"rank{index}.sqlite", ranks) for index, file in enumerate(files))


def _draw_rank(draw: st.DrawFn, file: _File, plan: Plan, rank: int, clock: int, devices: int) -> None:
    process, time = 100 + rank, 20 + clock
    file.ranks[process] = rank
    backend = {"cuda": "nccl"}.get(plan.device, "gloo")
    file.say(process, f"process|rank={rank}|world=3|variant=overlap|backend={backend}|device=x", 0, 600)
    file.threads[process, MAIN] = "python"
    if plan.has_named_autograd:
        file.threads[process, AUTOGRAD] = "pt_autograd_0"
    for index in range(max(1, len(plan.numbers or ()))):
        length = draw(st.integers(12, 20))
        if plan.numbers is not None:
            _say_step(draw, file, process, plan, index, time, length)
        _say_phases(draw, file, process, plan, time, length)
        if plan.device != "gloo":
            _draw_work(draw, file, process, time, devices)
        _draw_collectives(draw, file, process, plan, index, time, devices)
        time += length + draw(small(4))
    if plan.has_open and plan.numbers is not None:
        file.say(process, _step_name(plan, 9), time, 600, is_open=True)


def _step_name(plan: Plan, number: int) -> str:
    return f"step|index={number}" if plan.is_ours else f"step {number}"


def _say_step(draw: st.DrawFn, file: _File, process: int, plan: Plan, index: int, time: int, length: int) -> None:
    warmup = "|warmup=1" if plan.has_warmup and plan.is_ours and index == 0 else ""
    file.say(process, _step_name(plan, plan.numbers[index]) + warmup, time, time + length)
    if plan.has_nested and index == 0:
        before, after = draw(small(1)), draw(small(1))
        file.say(process, _step_name(plan, 50), time - before, time + length + after)
        if draw(st.booleans()):
            file.say(process, _step_name(plan, 51), time + 2, time + length + 9, OTHER_THREAD)


def _say_phases(draw: st.DrawFn, file: _File, process: int, plan: Plan, time: int, length: int) -> None:
    """Phases that fill the step in their order; backward is long, as a rule. A hook's optimizer is autograd's."""
    forward, synchronize, optimizer = draw(small(5)), draw(st.integers(5, length)), draw(st.integers(9, length))
    borders = [0, forward, min(synchronize, optimizer), optimizer, length]
    for phase, start, end in zip(PHASES, borders, borders[1:], strict=False):
        if phase in plan.phases and end > start:
            in_hook = phase == "optimizer" and draw(st.integers(0, 3)) == 0
            file.say(process, phase, time + start, time + end, AUTOGRAD if in_hook else MAIN)


def _draw_work(draw: st.DrawFn, file: _File, process: int, time: int, devices: int) -> None:
    for at, thread, delay, length, stream in draw(COMPUTES):
        device = at % devices
        file.launch(process, thread, time + at, time + at + delay, length, stream, Category.COMPUTE, device)
    for at, delay, length, category in draw(RARE):
        file.launch(process, MAIN, time + at, time + at + delay, length, SECOND_STREAM, category, 0)


def _draw_collectives(
    draw: st.DrawFn, file: _File, process: int, plan: Plan, index: int, time: int, devices: int
) -> None:
    count = plan.collectives[index] - (draw(st.integers(0, 9)) == 0)  # now and then ranks disagree
    for bucket in range(count):
        at, thread, delay, length, stream = draw(COLLECTIVE)
        length += STALL_NS if plan.stalled == index and bucket == 0 else 0
        if plan.device == "cuda":
            device = bucket % devices
            file.launch(process, thread, time + at, time + at + delay, length, stream, Category.COMMUNICATION, device)
        elif length:
            name = f"all_reduce|bucket={bucket}|bytes=8|params=1"
            file.say(process, name, time + at, time + at + length, AUTOGRAD)
