"""The critical paths of simulated programs: all ways back from the end of a step, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.analyze.contended_device import COMPUTE, Program, Rank, run
from tests.oracle.programs import Span, Step, Truth, computes, sends, span

Way = frozenset[tuple[str, int]]
"""Parts of a path and their lengths; parts of 0 are left out."""


def _longer(way: Way, part: str, ns: int) -> Way:
    parts = dict(way)
    parts[part] = parts.get(part, 0) + max(0, ns)
    return frozenset((name, length) for name, length in parts.items() if length)


@dataclass
class Paths:
    """All ways back to a time; several where operations end together."""

    truths: Sequence[Truth]
    from_ns: int
    known: dict[tuple[str, int, int], set[Way]] = field(default_factory=dict)

    def through(self, rank: int, row: int) -> set[Way]:
        """From the end of an operation."""
        if ("through", rank, row) not in self.known:
            self.known["through", rank, row] = set(self._through(rank, row))
        return self.known["through", rank, row]

    def before(self, rank: int, row: int) -> set[Way]:
        """From its start."""
        if ("before", rank, row) not in self.known:
            self.known["before", rank, row] = set(self._before(rank, row))
        return self.known["before", rank, row]

    def of_host(self, rank: int, at_ns: int) -> set[Way]:
        """From the host of a rank, back to when it had waited for its device."""
        waits = [(round(end), round(begin)) for _, begin, end in self.truths[rank].rank.syncs if round(end) <= at_ns]
        end, began = max(waits, default=(self.from_ns, 0))
        if end <= self.from_ns:
            return {_longer(frozenset(), "host", at_ns - self.from_ns)}
        ops = self.truths[rank].rank.ops
        last = max(round(op.end) for op in ops if round(op.launch) <= began)
        rows = [row for row, op in enumerate(ops) if round(op.launch) <= began and round(op.end) == last]
        return {_longer(way, "host", at_ns - last) for row in rows for way in self.through(rank, row)}

    def _through(self, rank: int, row: int) -> Iterator[Way]:
        op = self.truths[rank].rank.ops[row]
        begin, end = span(op)
        ranks = [rank]
        if sends(op):
            begins = [round(truth.rank.by_match[op.match].start) for truth in self.truths]
            begin = max(begins)
            ranks = [at for at, began in enumerate(begins) if began == begin]
        part = "transfer" if sends(op) else "compute" if computes(op) else "copies"
        if begin <= self.from_ns:
            yield _longer(frozenset(), part, end - self.from_ns)
            return
        for at in ranks:
            of_rank = self.truths[at].rank
            its = of_rank.ops.index(of_rank.by_match[op.match]) if sends(op) else row
            yield from (_longer(way, part, end - begin) for way in self.before(at, its))

    def _before(self, rank: int, row: int) -> Iterator[Way]:
        ops = self.truths[rank].rank.ops
        op = ops[row]
        before = [at for at in range(row) if ops[at].stream == op.stream][-1:]
        ends = [(round(ops[at].end), at) for at in (*before, *op.waits)]
        could, begin = max([round(op.launch), *(end for end, _ in ends)]), round(op.start)
        if could <= self.from_ns:
            yield _longer(frozenset(), "queue", begin - self.from_ns)
            return
        for end, at in ends:
            if end == could:
                yield from (_longer(way, "queue", begin - could) for way in self.through(rank, at))
        if round(op.launch) == could:
            yield from (_longer(way, "launch", begin - could) for way in self.of_host(rank, could))


@dataclass
class StepPaths:
    """What ``critical`` may say of a step that ends on a rank: parts of its path, and how long the host delayed it."""

    path_ns: int
    ways: set[Way]
    host_delays_ns: set[int]


def paths_of_step(truths: Sequence[Truth], place: int) -> dict[int, StepPaths]:
    """By the ranks on which the step ends last."""
    spans = [_span_of_path(truth, place) for truth in truths]
    last = max(end for _, end in spans)
    return {rank: _paths_on(truths, rank, place, begin, end) for rank, (begin, end) in enumerate(spans) if end == last}


def _span_of_path(truth: Truth, place: int) -> Span:
    """The window or, where the host runs ahead, from the first work to that of the next step."""
    step = truth.steps[place]
    if truth.clock == "host":
        return step.window
    return truth.length_of(step) or (step.first_work_ns, step.window[1])


def _paths_on(truths: Sequence[Truth], rank: int, place: int, begin: int, end: int) -> StepPaths:
    truth, step = truths[rank], truths[rank].steps[place]
    ops, paths = truth.rank.ops, Paths(truths, begin)
    if truth.clock == "device" and place + 1 < len(truth.steps):
        first = next(row for row, op in enumerate(ops) if op.stream == COMPUTE and round(op.start) == end)
        ways = paths.before(rank, first)
    else:
        rows = [row for row, op in enumerate(ops) if op in step.ops and round(op.end) == end]
        ways = {way for row in rows for way in paths.through(rank, row)}
    to_host = ways if truth.clock == "device" else Paths(truths, step.range[0]).of_host(rank, step.range[1])
    delays = {sum(length for part, length in way if part in ("host", "launch")) for way in to_host}
    return StepPaths(end - begin, ways, delays)


def gain_without(program: Program, ranks: Sequence[Rank], place: int, match: tuple[int, int]) -> int:
    """How much earlier a step ends if a collective takes no time; of a program in which nothing is slowed."""
    clocks = [Truth(rank).clock for rank in ranks]

    def end(of: Iterable[Rank]) -> int:
        return max(_end_of(Truth(rank), place, clock) for rank, clock in zip(of, clocks, strict=True))

    return end(ranks) - end(run(replace(program, free=match)))


def _end_of(truth: Truth, place: int, clock: str) -> int:
    following: list[Step] = truth.steps[place + 1 :]
    return following[0].first_work_ns if clock == "device" and following else truth.steps[place].window[1]
