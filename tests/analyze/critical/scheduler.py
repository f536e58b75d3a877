"""A device that runs a program: operations on streams, events, waits. It knows why each operation began when it did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from tests.drawing import MAIN, PID, table

COMPUTE_STREAMS, COMM_STREAMS, SILENT_STREAM = (7, 8), (20, 21), 84


@dataclass
class Operation:
    """What was launched.

    ``waits`` are the operations that it had to wait for by events, ``before`` is the one before it on its stream.
    """

    stream: int
    is_collective: bool
    call: int
    launch: int
    start: int
    end: int
    waits: set[int]
    before: int | None
    name: str


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


@dataclass
class Device:
    """Runs calls in their order, each some time after the one before."""

    operations: list[Operation] = field(default_factory=list)
    records: list[tuple[int, int]] = field(default_factory=list)  # call, stream
    waits: list[tuple[int, int, int]] = field(default_factory=list)  # call, stream, record
    syncs: list[tuple[int, int, int]] = field(default_factory=list)  # call, start, end
    ranges: list[tuple[str, int, int]] = field(default_factory=list)  # name, start, end
    calls: int = 0
    now: int = 0
    made: dict[int, int] = field(default_factory=dict)  # when, by call
    last: dict[int, int] = field(default_factory=dict)
    pending: dict[int, set[int]] = field(default_factory=dict)
    events: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    program: list[tuple[str, tuple[int, ...], dict[str, Any]]] = field(default_factory=list)

    def again(self, *free: int) -> Device:
        """What it does with the same program, of which some operations take no time."""
        device = Device()
        for number, (name, arguments, more) in enumerate(self.program):
            is_free = name == "launch" and sum(one == "launch" for one, *_ in self.program[:number]) in free
            getattr(device, name)(*((*arguments[:2], 0) if is_free else arguments), **more)
        return device

    @property
    def end(self) -> int:
        return max((one.end for one in self.operations), default=0)

    def _call(self, gap: int) -> int:
        self.now += gap
        self.calls += 1
        self.made[self.calls] = self.now
        return self.calls

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """The main thread is in a range; what it launches takes a nanosecond at least."""
        self.now += 1
        start = self.now
        yield
        self.now += 1
        self.ranges.append((name, start, self.now))

    def launch(self, gap: int, stream: int, length: int, *, is_collective: bool, name: str = "") -> None:
        self.program.append(("launch", (gap, stream, length), {"is_collective": is_collective, "name": name}))
        call, waits, before = self._call(gap), self.pending.pop(stream, set()), self.last.get(stream)
        start = max([self.now, *(self.operations[one].end for one in waits | {before} - {None})])
        self.last[stream] = len(self.operations)
        name = name or (ALL_REDUCE if is_collective else "gemm")
        one = Operation(stream, is_collective, call, self.now, start, start + length, waits, before, name)
        self.operations.append(one)

    def record(self, gap: int, stream: int, event: int) -> None:
        self.program.append(("record", (gap, stream, event), {}))
        call, done = self._call(gap), set(self.pending.get(stream, set()))
        if stream in self.last:
            done.add(self.last[stream])
        self.events[event] = len(self.records), done
        self.records.append((call, stream))

    def wait(self, gap: int, stream: int, event: int) -> None:
        self.program.append(("wait", (gap, stream, event), {}))
        if event in self.events:
            record, done = self.events[event]
            self.waits.append((self._call(gap), stream, record))
            self.pending.setdefault(stream, set()).update(done)

    def synchronize(self, gap: int) -> None:
        """The host waits for all that was launched."""
        self.program.append(("synchronize", (gap,), {}))
        call, start = self._call(gap), self.now
        self.now = max([start, *(one.end for one in self.operations)])
        self.syncs.append((call, start, self.now))

    def trace(self, *, has_step: bool = False) -> Trace:
        """What a profiler records of it; with a step that holds everything."""
        call = {"start_ns": UNKNOWN, "end_ns": UNKNOWN, "process": PID, "thread": MAIN, "device": 0}
        record, wait = {**call, "kind": SyncKind.RECORD, "awaits": UNKNOWN}, {**call, "kind": SyncKind.STREAM_WAIT}
        names = [*{one.name for one in self.operations}, *{name for name, *_ in self.ranges}, "step 0"]
        activities = [
            {
                "start_ns": one.start, "end_ns": one.end, "process": PID, "device": 0, "lane": one.stream,
                "name_id": names.index(one.name), "correlation": one.call, "bytes": UNKNOWN,
                "kind": Kind.COPY if one.name.startswith("memcpy") else Kind.KERNEL,
                "category": _category(one),
            }
            for one in self.operations
        ]  # fmt: skip
        launches = [
            {"start_ns": one.launch, "process": PID, "lane": MAIN, "correlation": one.call} for one in self.operations
        ]
        synchronizations = [
            *({**record, "correlation": number, "stream": stream} for number, stream in self.records),
            *({**wait, "correlation": number, "stream": stream, "awaits": of} for number, stream, of in self.waits),
            *(
                {**call, "kind": SyncKind.HOST_WAIT_DEVICE, "correlation": number, "stream": UNKNOWN,
                 "awaits": UNKNOWN, "start_ns": start, "end_ns": end}
                for number, start, end in self.syncs
            ),
        ]  # fmt: skip
        told = [*self.ranges, *([("step 0", 0, 10**6)] if has_step else [])]
        span = {"process": PID, "lane": MAIN, "is_start_end": 0, "is_open": 0}
        spans = [{**span, "name_id": names.index(name), "start_ns": start, "end_ns": end} for name, start, end in told]
        return Trace(
            path=Path("program.sqlite"), source="nsys-sqlite", producer=None, threads={}, ranks={},
            names=tuple(names),
            activities=table(Activities, activities), spans=table(Spans, spans), calls=table(Calls, launches),
            overhead=empty(Overhead), synchronizations=table(Synchronizations, synchronizations),
            sync_source="cuda_events",
        )  # fmt: skip

    def standstill(self) -> dict[int, int]:
        """Which collective the device's computing streams stood still for, instant by instant.

        Each operation that is no collective is asked when it could have begun without the collectives that it waits
        for: by event, or because they are before it on its stream.
        """
        computing = {one.stream for one in self.operations if not one.is_collective}
        stretches = []
        for one in self.operations:
            collectives, could = self.needs(one)
            if collectives and not one.is_collective and one.stream in computing:
                end = max(self.operations[index].end for index in collectives)
                last = min(index for index in collectives if self.operations[index].end == end)
                stretches.append((-end, could, last))
        blamed: dict[int, int] = {}
        for minus_end, could, last in sorted(stretches):  # what ends last comes first, and keeps what it has
            for instant in range(could, -minus_end):
                blamed.setdefault(instant, last)
        return blamed

    def needs(self, one: Operation) -> tuple[set[int], int]:
        """The collectives that an operation waits for, and when it could have begun without them."""
        waits, before = set(one.waits), one.before
        on_stream = set()
        while before is not None and self.operations[before].is_collective:
            on_stream.add(before)
            waits |= self.operations[before].waits
            before = self.operations[before].before
        waits |= on_stream
        others = {index for index in waits if not self.operations[index].is_collective} | {before} - {None}
        collectives = {index for index in waits if self.operations[index].is_collective}
        others |= {index for one in collectives for index in self.inputs(one)}
        could = max([one.launch, *(self.operations[index].end for index in others)])
        return collectives, could

    def inputs(self, collective: int | None) -> set[int]:
        """What a collective waits for that is none: by event, on its stream, or as one before it there does."""
        found = set[int]()
        while collective is not None and self.operations[collective].is_collective:
            found |= {index for index in self.operations[collective].waits if not self.operations[index].is_collective}
            collective = self.operations[collective].before
        return found | {collective} - {None}


def _category(one: Operation) -> Category:
    if one.is_collective:
        return Category.COMMUNICATION
    return Category.MEMORY if one.name.startswith("memcpy") else Category.COMPUTE


def _few(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most)


_STREAMS = st.sampled_from([*COMPUTE_STREAMS, *COMM_STREAMS, SILENT_STREAM])
_EVENTS = st.integers(1, 3)
_CALLS = st.one_of(
    st.tuples(st.just("compute"), _few(2), st.sampled_from(COMPUTE_STREAMS), _few(9)),
    st.tuples(st.just("collective"), _few(2), st.sampled_from([*COMM_STREAMS, *COMM_STREAMS, 7]), _few(15)),
    st.tuples(st.just("record"), _few(1), _STREAMS, _EVENTS),
    st.tuples(st.just("wait"), _few(1), _STREAMS, _EVENTS),
    st.tuples(st.just("synchronize"), _few(1), st.just(0), st.just(0)),
)


@st.composite
def programs(draw: st.DrawFn) -> Device:
    """A program of some tens of calls that was run."""
    device = Device()
    for kind, gap, stream, value in draw(st.lists(_CALLS, min_size=4, max_size=40)):
        if kind == "synchronize":
            device.synchronize(gap)
        elif kind == "record":
            device.record(gap, stream, value)
        elif kind == "wait":
            device.wait(gap, stream, value)
        else:
            device.launch(gap, stream, value, is_collective=kind == "collective")
    return device
