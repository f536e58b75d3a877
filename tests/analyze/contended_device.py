"""Ranks that train on devices where communication slows compute by a known factor: what a profiler records of them.

The host launches, waits and goes on; each stream runs its operations in order; an all-reduce ends so long after its
last rank arrived. While one runs, also while it waits for a peer, compute of a class runs at ``1 / kappa``::

    compute       ffffffbbbbbb=======bbcco      = beside an all-reduce, c copies out of buckets
    all-reduce                AAAAAAA
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random

from ddp_prof.table import fill
from ddp_prof.trace import (
    UNKNOWN,
    Activities,
    Calls,
    Category,
    CollectiveMetadata,
    Kind,
    Overhead,
    Spans,
    Synchronizations,
    SyncKind,
    Trace,
    empty,
)
from tests.analyze.critical.scheduler import ALL_REDUCE
from tests.drawing import MAIN, column, table

US = 1_000
CLASSES = ("sm90_gemm", "vectorized_elementwise_kernel")
KAPPAS = (1.0, 1.25, 1.5, 2.0)
COMPUTE, COMM, OTHER_COMM = 7, 20, 21
LAUNCH_NS = 2 * US
AFTER_NS = 500
"""From the end of a phase until the host goes on."""
BARRIER = "EpDeviceSync_barrier"
INTO_BUCKET = (
    "vectorized_elementwise_kernel<4, BUnaryFunctor<float, float, float, MulFunctor<float>>, at::detail::Array<char*>>"
)
BUCKET_BYTES, VOTE_BYTES = 8 << 20, 512


@dataclass(frozen=True)
class Program:
    """A job of some layers and buckets; times in ns. ``transfers`` has a row per step, and ``pace`` a factor.

    Attributes:
        kappas: By class of kernel.
        copies, late, wait: Length of each copy out of a bucket; how much longer the forward of rank 1 takes; the layer
            after which the host waits in backward. None of it where it is 0, or -1.
        vote, barrier: How long after its last rank arrived a small all-reduce ends that follows the buckets, and a
            barrier between forward and backward. None where it is 0.
        behind: How many more layers the host launches before the all-reduce of a bucket.
        one_queue: Whether an operation begins only after all that were launched before it, on any stream, have begun.
        lates: For each step and rank, how much longer its first kernel takes.
        ahead: Whether the host waits for the device in the last step only.
        passes, each_sends: Of backward in each step, and whether each of them reduces gradients, or the last one only.
        two_streams: Whether every second bucket has a communicator and a stream of its own.
        silent: Steps that reduce nothing.
        marks_forward: Whether ranges say when forward is launched.
        free: Step and number of a collective that takes no time.
        gradients: Bytes of the gradient of each layer of backward, 0 where it has none. Where they are given, each one
            is copied out of its bucket, in ``copies`` per MiB, and backward itself launches that.
        closes: The layers whose gradients are the last ones of a bucket; by default buckets have equally many layers.
        copies_in: How long each gradient is copied into its bucket. It is not where this is 0.
    """

    kappas: tuple[float, float]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    transfers: tuple[tuple[int, ...], ...]
    pace: tuple[float, ...]
    ranks: int = 1
    copies: int = 0
    late: int = 0
    wait: int = -1
    vote: int = 0
    barrier: int = 0
    behind: int = 0
    one_queue: bool = False
    lates: tuple[tuple[int, ...], ...] = ()
    ahead: bool = False
    passes: int = 1
    each_sends: bool = False
    two_streams: bool = False
    silent: tuple[int, ...] = ()
    marks_forward: bool = False
    free: tuple[int, int] | None = None
    gradients: tuple[int, ...] = ()
    closes: tuple[int, ...] = ()
    copies_in: int = 0

    @property
    def steps(self) -> int:
        return len(self.transfers)


@dataclass
class Op:
    stream: int
    name: str
    work: float
    waits: tuple[int, ...]
    call: int
    launch: float = -1.0
    start: float = -1.0
    end: float = -1.0
    kappa: float = 1.0
    match: tuple[int, int] | None = None
    bytes: int = UNKNOWN
    slowed_ns: float = 0.0
    beside_ns: float = 0.0


@dataclass
class Rank:
    """The commands of a rank's host, and what came of them."""

    commands: list[tuple[str, int]] = field(default_factory=list)  # launch an operation, wait, begin or end a range
    ops: list[Op] = field(default_factory=list)
    ranges: list[tuple[str, float, float]] = field(default_factory=list)
    records: list[tuple[int, int]] = field(default_factory=list)  # call, stream
    stream_waits: list[tuple[int, int, int]] = field(default_factory=list)  # call, stream, record
    syncs: list[tuple[int, float, float]] = field(default_factory=list)
    calls: int = 0
    one_queue: bool = False

    @cached_property
    def by_match(self) -> dict[tuple[int, int] | None, Op]:
        """Its part of each collective."""
        return {op.match: op for op in self.ops if op.match is not None}


class _Commands:
    """What the host of a rank is told to do."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.made, self.recorded = Rank(one_queue=program.one_queue), dict[int, int]()
        for step in range(program.steps):
            self._step(step)

    def _tell(self, command: str, number: int) -> None:
        self.made.commands.append((command, number))

    def _call(self) -> int:
        self.made.calls += 1
        return self.made.calls

    def _record(self, row: int) -> None:
        self.recorded[row] = len(self.made.records)
        self.made.records.append((self._call(), self.made.ops[row].stream))

    def _launch(
        self,
        stream: int,
        name: str,
        work: float,
        waits: tuple[int, ...] = (),
        match: tuple[int, int] | None = None,
        size: int = UNKNOWN,
    ) -> int:
        made, row = self.made, len(self.made.ops)
        for on in waits:
            if on not in self.recorded:  # an event after the last operation on the stream
                self._record(on)
            made.stream_waits.append((self._call(), stream, self.recorded[on]))
        of_class = CLASSES[1] if name == INTO_BUCKET else name
        kappa = self.program.kappas[CLASSES.index(of_class)] if of_class in CLASSES else 1.0
        work = 0 if match is not None and match == self.program.free else work
        made.ops.append(Op(stream, name, work, waits, self._call(), kappa=kappa, match=match, bytes=size))
        self._tell("launch", row)
        if match is not None:
            self._record(row)
        return row

    def _step(self, step: int) -> None:
        program, number = self.program, 0
        self._tell("begin", step)
        for one in range(program.passes):
            is_last = one == program.passes - 1
            sends = (is_last or program.each_sends) and step not in program.silent
            buckets, votes = self._pass(step, number, sends=sends, is_first=not one)
            number += len(buckets) + len(votes)
            for bucket in buckets if program.copies and not program.gradients else []:
                self._launch(COMPUTE, "memcpy", program.copies, (bucket,))
            waits = votes if program.copies else (*buckets, *votes)
            if is_last:
                self._launch(COMPUTE, "adam", 20 * US * program.pace[step], waits)
            elif waits:
                self._launch(COMPUTE, "add", 5 * US, waits)
        if not program.ahead or step == program.steps - 1:
            self._tell("wait", self._call())
        self._tell("end", step)

    def _pass(self, step: int, number: int, *, sends: bool, is_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Forward and backward; return the rows of what reduces buckets, from ``number`` on, and of votes."""
        program, pace = self.program, self.program.pace[step]
        count = len(program.transfers[step]) if sends else 0
        if program.marks_forward:
            self._tell("forward", step)
        for layer, work in enumerate(program.forward):
            longer = program.late if self.rank == 1 and layer == 0 else 0
            if program.lates and layer == 0 and is_first:
                longer += program.lates[step][self.rank]
            last = self._launch(COMPUTE, CLASSES[layer % 2], work * pace + longer)
        if program.marks_forward:
            self._tell("done forward", step)
        met: tuple[int, ...] = ()
        if program.barrier and is_first:
            met = (self._launch(COMM, BARRIER, program.barrier, (last,), (step, UNKNOWN)),)
        self._tell("backward", step)
        buckets: list[int] = []
        filled: list[tuple[int, int]] = []  # the layer, and its kernel, with which each bucket is full
        layers = len(program.backward)
        alike = [at for at in range(layers) if (at + 1) * count // layers > at * count // layers]
        closes, before, last_layer = program.closes or alike, 0, layers - 1
        for layer, work in enumerate(program.backward):
            last = self._launch(COMPUTE, CLASSES[layer % 2], work * pace, () if layer else met)
            if layer == program.wait:
                self._tell("wait", self._call())
            if program.copies_in and program.gradients[layer]:
                last = self._launch(COMPUTE, INTO_BUCKET, program.copies_in, size=program.gradients[layer])
            if sends and layer in closes:
                filled.append((layer, last))
                self._record(last)
            while len(buckets) < len(filled) and layer in (filled[len(buckets)][0] + program.behind, last_layer):
                at = len(buckets)
                stream = OTHER_COMM if program.two_streams and at % 2 else COMM
                work = program.transfers[step][at]
                match = step, number + at
                size = sum(program.gradients[before : filled[at][0] + 1]) or BUCKET_BYTES
                before = filled[at][0] + 1
                buckets.append(self._launch(stream, ALL_REDUCE, work, (filled[at][1],), match, size))
        votes: tuple[int, ...] = ()
        if program.vote and sends:
            match = step, number + len(buckets)
            votes = (self._launch(COMM, ALL_REDUCE, program.vote, (last,), match, VOTE_BYTES),)
        if program.copies and program.gradients:
            self._copy_out([layer for layer, _ in filled], buckets)
        self._tell("done backward", step)
        return tuple(buckets), votes

    def _copy_out(self, closes: list[int], buckets: list[int]) -> None:
        """Each gradient, when its bucket is reduced."""
        begin = 0
        for close, bucket in zip(closes, buckets, strict=True):
            sizes = [size for size in self.program.gradients[begin : close + 1] if size]
            for place, size in enumerate(sizes):
                waits = () if place else (bucket,)
                self._launch(COMPUTE, "memcpy", self.program.copies * size / 2**20, waits, size=size)
            begin = close + 1


def commands_of(program: Program, rank: int) -> Rank:
    return _Commands(program, rank).made


def run(program: Program) -> list[Rank]:
    """Run all ranks, event by event."""
    ranks = [commands_of(program, rank) for rank in range(program.ranks)]
    hosts = [_Host(rank) for rank in ranks]
    now = 0.0
    while True:
        for host in hosts:
            host.go_on(now)
        started = True
        while started:
            started = sum(host.start(now) for host in hosts) > 0
        _let_go(ranks, hosts, now)
        if all(host.is_done for host in hosts):
            return ranks
        now = min(host.next_event(now) for host in hosts)
        for host in hosts:
            host.advance(now)


def _let_go(ranks: list[Rank], hosts: list[_Host], now: float) -> None:
    """An all-reduce whose last rank has arrived ends after its transfer."""
    for op in (op for host in hosts for op in host.sending if op.end < 0):
        others = [rank.by_match[op.match] for rank in ranks]
        if all(one.start >= 0 for one in others):
            op.end = max(one.start for one in others) + op.work


class _Host:
    def __init__(self, rank: Rank) -> None:
        self.rank, self.at, self.free = rank, 0, 0.0
        self.queues: dict[int, list[Op]] = {COMPUTE: [], COMM: [], OTHER_COMM: []}
        self.in_order: list[Op] = []
        self.running: dict[int, Op] = {}
        self.left: dict[int, float] = {}
        self.since = 0.0
        self.waits_since: float | None = None
        self.open: dict[str, float] = {}

    @property
    def is_done(self) -> bool:
        return self.at == len(self.rank.commands)

    def go_on(self, now: float) -> None:
        while self.at < len(self.rank.commands):
            kind, number = self.rank.commands[self.at]
            if kind == "launch":
                self.free += LAUNCH_NS
                op = self.rank.ops[number]
                op.launch = self.free
                self.queues[op.stream].append(op)
                self.in_order.append(op)
            elif kind == "wait":
                self.waits_since = self.free if self.waits_since is None else self.waits_since
                if any(self.queues.values()) or self.running:
                    return
                self.free = max(self.free, now)
                self.rank.syncs.append((number, self.waits_since, self.free))
                self.waits_since = None
            elif kind in ("begin", "forward", "backward"):
                self.open[kind] = self.free = self.free + 1
            elif kind == "end":
                self._say(f"step {number}", "begin")
            else:
                phase = kind.removeprefix("done ")
                self._say(phase, phase)
                self.free += AFTER_NS
            self.at += 1

    def _say(self, name: str, opened: str) -> None:
        """The range of this name ends."""
        self.free += 1
        self.rank.ranges.append((name, self.open[opened], self.free))

    @property
    def sending(self) -> list[Op]:
        return [op for stream, op in self.running.items() if stream != COMPUTE]

    def start(self, now: float) -> bool:
        found = False
        for stream, queue in self.queues.items():
            is_first = not self.rank.one_queue or queue[:1] == self.in_order[:1]
            if queue and is_first and stream not in self.running and self._ready(queue[0]) <= now:
                op = queue.pop(0)
                self.in_order.remove(op)
                op.start, self.running[stream], self.left[stream] = now, op, op.work
                found = True
        return found

    def _ready(self, op: Op) -> float:
        needed = [self.rank.ops[one] for one in op.waits]
        if any(one.end < 0 or one in self.running.values() for one in needed):
            return float("inf")
        return max([op.launch, *(one.end for one in needed)])

    @property
    def rate(self) -> float:
        op = self.running.get(COMPUTE)
        return 1 / op.kappa if op and self.sending else 1.0

    def next_event(self, now: float) -> float:
        times = [op.launch for queue in self.queues.values() for op in queue[:1] if op.launch > now]
        if COMPUTE in self.running:
            times.append(now + self.left[COMPUTE] / self.rate)
        times += [op.end for op in self.sending if op.end >= 0]
        return min(times, default=float("inf"))

    def advance(self, now: float) -> None:
        passed, self.since = now - self.since, now
        if op := self.running.get(COMPUTE):
            rate = self.rate
            self.left[COMPUTE] -= passed * rate
            if self.sending:
                op.beside_ns += passed
                op.slowed_ns += passed * (1 - rate)
            if self.left[COMPUTE] <= 1e-6:
                op.end = now
                del self.running[COMPUTE]
        for op in self.sending:
            if 0 <= op.end <= now:
                del self.running[op.stream]


def trace_of(rank: Rank, number: int, ranks: int) -> Trace:
    process = 100 + number
    names = sorted({op.name for op in rank.ops} | {name for name, *_ in rank.ranges})
    kinds = dict.fromkeys((ALL_REDUCE, BARRIER), Category.COMMUNICATION) | {"memcpy": Category.MEMORY}
    sized = [row for row, op in enumerate(rank.ops) if op.match is not None and op.bytes != UNKNOWN]
    activities = [
        {
            "start_ns": round(op.start), "end_ns": round(op.end), "process": process, "device": 0, "lane": op.stream,
            "name_id": names.index(op.name), "correlation": op.call, "bytes": UNKNOWN,
            "kind": Kind.COPY if op.name == "memcpy" else Kind.KERNEL,
            "category": kinds.get(op.name, Category.COMPUTE),
        }
        for op in rank.ops
    ]  # fmt: skip
    launches = [
        {"start_ns": round(op.launch), "process": process, "lane": MAIN, "correlation": op.call} for op in rank.ops
    ]
    call = {"start_ns": UNKNOWN, "end_ns": UNKNOWN, "process": process, "thread": MAIN, "device": 0}
    synchronizations = [
        *({**call, "kind": SyncKind.RECORD, "awaits": UNKNOWN, "correlation": one, "stream": stream}
          for one, stream in rank.records),
        *({**call, "kind": SyncKind.STREAM_WAIT, "correlation": one, "stream": stream, "awaits": of}
          for one, stream, of in rank.stream_waits),
        *({**call, "kind": SyncKind.HOST_WAIT_DEVICE, "correlation": one, "stream": UNKNOWN, "awaits": UNKNOWN,
           "start_ns": round(start), "end_ns": round(end)} for one, start, end in rank.syncs),
    ]  # fmt: skip
    span = {"process": process, "lane": MAIN, "is_start_end": 0, "is_open": 0}
    spans = [
        {**span, "name_id": names.index(name), "start_ns": round(start), "end_ns": round(end)}
        for name, start, end in rank.ranges
    ]
    return Trace(
        path=Path(f"rank{number}.sqlite"), source="nsys-sqlite", producer=None, threads={}, ranks={process: number},
        names=tuple(names), world_size=ranks if ranks > 1 else 2,
        activities=table(Activities, activities), spans=table(Spans, spans), calls=table(Calls, launches),
        overhead=empty(Overhead), synchronizations=table(Synchronizations, synchronizations),
        sync_source="cuda_events",
        collective_metadata=fill(
            CollectiveMetadata, len(sized), activity=column(sized), bytes=column([rank.ops[row].bytes for row in sized])
        ),
    )  # fmt: skip


def lengths_of(ranks: list[Rank]) -> list[float]:
    """How long each step is on the rank on which it is longest."""
    of_ranks = [[end - start for name, start, end in rank.ranges if name.startswith("step")] for rank in ranks]
    return [max(step) for step in zip(*of_ranks, strict=True)]


def draw_program(seed: int) -> Program:
    """A program of eight to twelve steps, whose transfers differ so that kernels run both beside them and alone."""
    random = Random(seed)
    layers, buckets, steps = random.randint(16, 30), random.randint(2, 4), random.randint(8, 12)
    transfer = random.uniform(40, 250) * US
    kinds = random.choice(
        [
            (),
            ("copies",),
            ("wait",),
            ("late",),
            ("copies", "wait"),
            ("vote",),
            ("barrier",),
            ("vote", "barrier", "copies"),
        ]
    )
    kappa = random.choice(KAPPAS)
    return Program(
        kappas=(kappa, random.choice([kappa, *KAPPAS])),
        forward=tuple(random.randint(10, 40) * US for _ in range(layers)),
        backward=tuple(random.randint(10, 40) * US for _ in range(layers)),
        transfers=tuple(
            tuple(round(transfer * random.uniform(0.2, 1.8)) for _ in range(buckets)) for _ in range(steps)
        ),
        pace=tuple(random.uniform(0.98, 1.02) for _ in range(steps)),
        ranks=2 if "late" in kinds else random.choice([1, 1, 2]),
        copies=random.randint(5, 40) * US if "copies" in kinds else 0,
        late=random.randint(50, 300) * US if "late" in kinds else 0,
        wait=random.randint(1, layers - 2) if "wait" in kinds else -1,
        vote=random.randint(20, 80) * US if "vote" in kinds else 0,
        barrier=random.randint(20, 80) * US if "barrier" in kinds else 0,
    )


def draw_larger_program(seed: int) -> Program:
    """The same with more ranks, several passes, two communicators, a host that runs ahead, ranks late now and then."""
    random, program = Random(f"larger {seed}"), draw_program(seed)
    ranks, pattern = random.choice([1, 2, 2, 3, 4]), random.choice(["none", "one", "one now and then", "any"])
    late_rank = random.randrange(ranks)

    def late(step: int, rank: int) -> int:
        is_late = rank == (random.randrange(ranks) if pattern == "any" else late_rank)
        is_late &= pattern != "none" and (pattern != "one now and then" or step % 3 == 0)
        return random.randint(0, 3) * US + is_late * random.randint(80, 300) * US

    return replace(
        program,
        ranks=ranks,
        late=0,
        lates=tuple(tuple(late(step, rank) for rank in range(ranks)) for step in range(program.steps)),
        ahead=random.random() < 0.4,
        passes=random.choice([1, 1, 1, 2, 3]),
        each_sends=random.random() < 0.3,
        two_streams=random.random() < 0.3,
        silent=tuple(range(1, program.steps, 2)) if random.random() < 0.15 else (),
        marks_forward=random.random() < 0.5,
        kappas=random.choice([(1.0, 1.0), program.kappas]),
        wait=random.choice([-1, program.wait]),
    )


def draw_queued_program(seed: int) -> Program:
    """The same on a device with one queue, where the host launches all-reduces later than they could begin."""
    return replace(draw_program(seed), one_queue=True, behind=Random(seed).randint(3, 6))


WITHOUT = {
    "copies out of buckets": {"copies": 0},
    "host synchronization in backward": {"wait": -1},
    "straggler": {"late": 0},
    "vote on unused parameters": {"vote": 0},
    "barrier in each step": {"barrier": 0},
    "single hardware queue": {"one_queue": False},
}
"""How the program differs without what a finding is about."""


def without(program: Program, rule: str) -> Program:
    return replace(program, **WITHOUT[rule])
