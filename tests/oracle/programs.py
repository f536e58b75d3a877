"""Figures of the programs of :mod:`tests.analyze.contended_device`, from what their devices did, and why.

Nothing of the package is used. Times are whole nanoseconds, as in a capture. Between two neighbouring starts or ends
of operations nothing changes, so what holds at one instant of such a *stretch* holds in all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tests.analyze.contended_device import ALL_REDUCE, BARRIER, COMPUTE, Op, Rank

Span = tuple[int, int]
PARTS = ("compute_only_ns", "overlapped_ns", "exposed_ns", "exposed_memory_ns", "idle_ns")


def sends(op: Op) -> bool:
    return op.name in (ALL_REDUCE, BARRIER)


def computes(op: Op) -> bool:
    return not sends(op) and op.name != "memcpy"


def span(op: Op) -> Span:
    return round(op.start), round(op.end)


def stretches(ops: Sequence[Op], within: Span) -> Iterator[tuple[int, int, list[Op]]]:
    """Each stretch of a time, and the operations that run in it."""
    near = [(*span(op), op) for op in ops if op.end > within[0] and op.start < within[1]]
    edges = sorted(
        {*within, *(time for start, end, _ in near for time in (start, end) if within[0] < time < within[1])}
    )
    for begin, end in pairwise(edges):
        yield begin, end, [op for start, stop, op in near if start <= begin and end <= stop]


@dataclass
class Pass:
    """From when on collectives belong to it, and when its compute ends."""

    begins: int
    end: int


@dataclass
class Step:
    """A step of a rank.

    Attributes:
        range: Of the host.
        ops: What was launched in it.
        backwards: Its ranges of backward.
    """

    number: int
    range: Span
    ops: list[Op]
    backwards: list[Span]

    @property
    def collectives(self) -> list[Op]:
        return [op for op in self.ops if sends(op)]

    @property
    def window(self) -> Span:
        return min(round(op.start) for op in self.ops), max(round(op.end) for op in self.ops)

    @property
    def first_work_ns(self) -> int:
        return min(round(op.start) for op in self.ops if op.stream == COMPUTE)

    def is_backward(self, op: Op) -> bool:
        return any(begin <= round(op.launch) <= end for begin, end in self.backwards)

    def is_tail(self, op: Op, at_ns: int) -> bool:
        return at_ns >= self.pass_of(op).end

    def pass_of(self, op: Op) -> Pass:
        """The last pass that had begun: after the launches of the one before."""
        begun = [one for one in self._passes if one.begins <= op.launch]
        return begun[-1] if begun else self._passes[0]

    @cached_property
    def _passes(self) -> list[Pass]:
        begins = [self.range[0], *(end for _, end in self.backwards)]
        ends = [
            max(round(op.end) for op in self.ops if computes(op) and begin <= round(op.launch) <= end)
            for begin, end in self.backwards
        ]
        return [Pass(begin, end) for begin, end in zip(begins, ends, strict=False)]


@dataclass
class Need:
    """What first needed a collective: the operation, and by how much later the collective could have ended."""

    op: Op
    slack_ns: int


@dataclass
class Truth:
    """What is true of a rank of a program."""

    rank: Rank

    @cached_property
    def steps(self) -> list[Step]:
        ranges = sorted((round(start), round(end), name) for name, start, end in self.rank.ranges)
        return [
            Step(
                number=int(name.removeprefix("step ")),
                range=(begin, end),
                ops=[op for op in self.rank.ops if begin <= round(op.launch) < end],
                backwards=[(start, stop) for start, stop, of in ranges if of == "backward" and begin <= start < end],
            )
            for begin, end, name in ranges
            if name.startswith("step")
        ]

    @cached_property
    def clock(self) -> str:
        """The device's if most work runs outside of the ranges that launched it, or 5 % between two ranges."""
        whole = outside = between = 0
        gaps = [(one.range[1], after.range[0]) for one, after in pairwise(self.steps)]
        for step in self.steps:
            for begin, end in map(span, step.ops):
                whole += end - begin
                outside += end - begin - max(0, min(end, step.range[1]) - max(begin, step.range[0]))
                between += sum(max(0, min(end, stop) - max(begin, start)) for start, stop in gaps)
        return "device" if 2 * outside > whole or between > 0.05 * whole else "host"

    @cached_property
    def standstills(self) -> list[tuple[int, int, Op]]:
        """When the stream of compute stood still for which collective."""
        return [
            (could, round(last.end), last) for _, could, last in self._waits if could < round(last.end)
        ]  # fmt: skip

    @cached_property
    def needs(self) -> dict[int, Need]:
        """Of each collective, by its call, what needed it with the least slack."""
        found: dict[int, Need] = {}
        for op, could, last in self._waits:
            for one in (self.rank.ops[row] for row in op.waits if sends(self.rank.ops[row])):
                until = could if one is last else max(could, round(last.end))
                need = Need(op, until - round(one.end))
                if one.call not in found or need.slack_ns < found[one.call].slack_ns:
                    found[one.call] = need
        return found

    @cached_property
    def _waits(self) -> list[tuple[Op, int, Op]]:
        """Of compute that waits for collectives: when it could have begun without these, and which ends last."""
        ops, found, before = self.rank.ops, [], None
        for op in ops:
            if op.stream != COMPUTE:
                continue
            needed = [ops[row] for row in op.waits if sends(ops[row])]
            others = [ops[row] for one in (op, *needed) for row in one.waits if not sends(ops[row])]
            if needed:
                could = max([round(op.launch), *(round(one.end) for one in (*others, *([before] if before else [])))])
                found.append((op, could, max(needed, key=lambda one: one.end)))
            before = op
        return found

    def blocking_ns(self, collective: Op) -> int:
        return sum(end - begin for begin, end, one in self.standstills if one is collective)

    def step_figures(self, step: Step) -> dict[str, Any]:
        """What a step of ``overlap`` says."""
        own, window = step.collectives, step.window
        sums: Counter[str] = Counter()
        for begin, end, running in stretches(self.rank.ops, window):
            mine = [op for op in running if op in own]
            kind = _part(running, mine)
            sums[kind] += end - begin
            if mine:
                of_backward = any(one.is_backward(op) for one in self.steps for op in running if computes(op))
                sums["backward_overlapped_ns"] += of_backward * (end - begin)
                is_tail = step.is_tail(max(mine, key=lambda op: op.end), begin)
                sums["tail_ns"] += (kind == "exposed_ns" and is_tail) * (end - begin)
            sums["other_comm_ns"] += (kind == "idle_ns" and any(map(sends, running))) * (end - begin)
        of_window = ("backward_overlapped_ns", "other_comm_ns", *PARTS)
        return {
            **{name: sums[name] for name in of_window},
            "comm_ns": sums["overlapped_ns"] + sums["exposed_ns"],
            "tail_ns": sums["tail_ns"] if own else None,
            "window_ns": window[1] - window[0],
            "start_ns": window[0],
            "host_ns": step.range[1] - step.range[0],
            "kernels": sum(op.name != "memcpy" for op in step.ops),
            "collectives": len(own),
            "passes": len(step.backwards),
            "in_backward": sum(map(step.is_backward, own)),
            "comm_end_ns": max((round(op.end) for op in own), default=None),
            "blocking_ns": sum(map(self.blocking_ns, own)),
        }

    def length_of(self, step: Step) -> Span | None:
        if self.clock == "host":
            return step.range
        following = self.steps[self.steps.index(step) + 1 :]
        return (step.first_work_ns, following[0].first_work_ns) if following else None

    def length_figures(self, step: Step) -> dict[str, int | None]:
        """What ``length`` of a step says, and how long its stream of compute stands still in that time."""
        within = self.length_of(step)
        if within is None:
            return dict.fromkeys(("start_ns", "ns", *PARTS))
        sums: Counter[str] = Counter()
        for begin, end, running in stretches(self.rank.ops, within):
            sums[_part(running, [op for op in running if sends(op)])] += end - begin
        return {"start_ns": within[0], "ns": within[1] - within[0], **{name: sums[name] for name in PARTS}}

    def standstill_ns(self, step: Step) -> int | None:
        within = self.length_of(step)
        if within is None:
            return None
        return sum(max(0, min(end, within[1]) - max(begin, within[0])) for begin, end, _ in self.standstills)

    def collective_figures(self, step: Step, peers: Sequence[Op], op: Op) -> dict[str, Any]:
        """What a row of ``collectives`` says; ``peers`` are its parts on all ranks."""
        (begin, end), need = span(op), self.needs.get(op.call)
        shortest = min(stop - start for start, stop in map(span, peers))
        arrived = end - shortest
        sums: Counter[str] = Counter()
        for start, stop, running in stretches(self.rank.ops, (begin, end)):
            mine = [one for one in running if one in step.collectives]
            if max(mine, key=lambda one: (round(one.end), one.call)) is op:
                kind = _part(running, mine)
                sums[kind] += stop - start
                waited = max(0, min(stop, arrived) - start)
                sums["exposed_wait_ns"] += (kind == "exposed_ns") * waited
        known = {} if len(peers) < 2 else {
            "transfer_ns": shortest, "wait_ns": end - begin - shortest, "exposed_wait_ns": sums["exposed_wait_ns"],
            "exposed_transfer_ns": sums["exposed_ns"] - sums["exposed_wait_ns"],
        }  # fmt: skip
        return {
            "launch_ns": round(op.launch), "start_ns": begin, "end_ns": end, "duration_ns": end - begin,
            "queueing_ns": begin - round(op.launch), "blocking_ns": self.blocking_ns(op),
            "overlapped_ns": sums["overlapped_ns"], "exposed_ns": sums["exposed_ns"],
            "slack_ns": need.slack_ns if need else None, "consumer": round(need.op.start) if need else None,
            "before_backward_end_ns": step.pass_of(op).end - begin, **known,
        }  # fmt: skip


def _part(running: Sequence[Op], sending: Sequence[Op]) -> str:
    does_compute = any(map(computes, running))
    if sending:
        return "overlapped_ns" if does_compute else "exposed_ns"
    copies = any(op.name == "memcpy" for op in running)
    return "compute_only_ns" if does_compute else "exposed_memory_ns" if copies else "idle_ns"
