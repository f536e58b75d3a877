"""What the order of calls tells of waits whose records are hidden: against devices and captures that know it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ddp_prof.analyze.core.blocking import RankBlocking
from ddp_prof.analyze.core.edges import find_dependencies
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.quality import diagnose
from ddp_prof.ingest.call_order import infer_waits
from ddp_prof.ingest.load import load_trace
from ddp_prof.table import concatenate, select, take_or_unknown
from ddp_prof.trace import UNKNOWN, Activities, Ints, Spans, Synchronizations, SyncKind, Trace
from tests.analyze.critical.scheduler import Device
from tests.conftest import ROOT
from tests.drawing import PID
from tests.examples import examples

COMPUTE, SIDE, COMM, OTHER_COMM, INTERNAL = 7, 8, 20, 21, 84
HANDOVER = 1
UNIT = 10_000
Timed = TypeVar("Timed", Activities, Spans, Synchronizations)


def in_units(table: Timed) -> Timed:
    return replace(table, start_ns=table.start_ns * UNIT, end_ns=table.end_ns * UNIT)


@dataclass
class Job:
    """A program as torch makes it: works on communicators' streams, which the stream of compute waits for."""

    device: Device = field(default_factory=Device)
    events: dict[int, int] = field(default_factory=dict)  # by call that records or waits
    works: list[int] = field(default_factory=list)  # their events

    def compute(self, length: int = 2, *, gap: int = 0, stream: int = COMPUTE) -> None:
        self.device.launch(gap, stream, length, is_collective=False)

    def record(self, stream: int, number: int) -> None:
        self.device.record(0, stream, number)
        self.events[self.device.calls] = number

    def wait(self, stream: int, number: int) -> None:
        before = self.device.calls
        self.device.wait(0, stream, number)
        if self.device.calls > before:
            self.events[self.device.calls] = number

    def hand_over(self, stream: int, to: int, number: int = HANDOVER) -> None:
        self.record(stream, number)
        self.wait(to, number)

    def collective(
        self, length: int, *, on: int = COMM, after: int = COMPUTE, number: int | None = None, internal: bool = False
    ) -> int:
        """Launch a collective as torch's ProcessGroupNCCL does; return the number of its event."""
        self.hand_over(after, on, HANDOVER)
        self.device.launch(0, on, length, is_collective=True)
        if internal:
            self.hand_over(on, INTERNAL, 2)
        number = 10 + len(self.works) if number is None else number
        self.record(on, number)
        self.works.append(number)
        return number

    def trace(self, *, with_events: bool = True) -> Trace:
        return infer_waits(*self.recorded(with_events=with_events))

    def recorded(self, *, with_events: bool = True) -> tuple[Trace, Ints]:
        """The capture without records, and the events that it tells. A unit of time is 10 us.

        Only the calls that record are there.
        """
        trace = self.device.trace(has_step=True)
        calls = trace.synchronizations
        is_record, is_wait = calls.kind == SyncKind.RECORD, calls.kind == SyncKind.STREAM_WAIT
        at = np.array([self.device.made[number] for number in calls.correlation.tolist()], np.int64)
        calls = replace(
            calls,
            start_ns=np.where(calls.kind == SyncKind.HOST_WAIT_DEVICE, calls.start_ns, at),
            end_ns=np.where(calls.kind == SyncKind.HOST_WAIT_DEVICE, calls.end_ns, at),
            stream=np.where(is_record, UNKNOWN, calls.stream),
            awaits=np.where(is_wait, UNKNOWN, calls.awaits),
        )
        numbers = [self.events.get(number, UNKNOWN) for number in calls.correlation.tolist()]
        known = np.where(is_wait & with_events, np.array(numbers, np.int64), UNKNOWN)
        trace = replace(
            trace,
            activities=in_units(trace.activities),
            spans=in_units(trace.spans),
            calls=replace(trace.calls, start_ns=trace.calls.start_ns * UNIT),
            synchronizations=in_units(calls),
            sync_source="none",
        )
        return trace, known


def blocking(trace: Trace) -> RankBlocking:
    (rank,) = find_rank_events(trace)
    return rank.blocking


def blamed(found: RankBlocking, trace: Trace) -> dict[int, int]:
    """The collective that each instant is blamed on, as a row of the trace's activities."""
    (rank,) = find_rank_events(trace)
    stretches = found.stretches
    rows = rank.events.activity[stretches.collective]
    lines = zip(stretches.start_ns.tolist(), stretches.end_ns.tolist(), rows.tolist(), strict=True)
    return {instant: row for start, end, row in lines for instant in range(start // UNIT, end // UNIT)}


def is_right(job: Job, *, with_events: bool = True) -> bool:
    """Whether blocking is known; if it is, it must be what the device knows."""
    trace = job.trace(with_events=with_events)
    is_known = is_right_in(trace, job)
    assert not is_known or blocking(trace).coverage.source == "call_order"
    return is_known


def is_right_in(trace: Trace, job: Job) -> bool:
    found = blocking(trace)
    (rank,) = find_rank_events(trace)
    if not len(rank.steps):  # left out: a kernel takes no time, and most of its name take some
        return False
    if found.total_ns is None:
        assert found.coverage.reason or not job.works
        return False
    assert blamed(found, trace) == job.device.standstill()
    return True


def buckets(job: Job, *lengths: int) -> list[int]:
    """Each bucket is computed and launched."""
    works = []
    for length in lengths:
        job.compute(2)
        works.append(job.collective(length))
    return works


@pytest.mark.parametrize("with_events", [True, False])
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "all at once"])
def test_waits_in_the_order_of_launches(copies: bool, with_events: bool) -> None:
    #  stream 7    bbbbbb.....c....c......c
    #  stream 20     AAAAAAAAABBBBBCCCCCCC
    job = Job()
    for work in buckets(job, 9, 5, 7):
        job.wait(COMPUTE, work)
        if copies:
            job.compute(1)
    job.compute(1)
    assert is_right(job, with_events=with_events)


def test_a_wait_right_after_the_launch_is_for_it() -> None:
    job = Job()
    for length in (9, 5, 7):
        job.compute(2)
        job.wait(COMPUTE, job.collective(length, internal=True))
        job.compute(1)
    assert is_right(job)


def test_one_that_is_waited_for_twice_counts_once() -> None:
    """As a loop that waits for each all-reduce, and at the end for all of them."""
    job = Job()
    works = []
    for length in (9, 5, 7):
        job.compute(2)
        works.append(job.collective(length))
        job.wait(COMPUTE, works[-1])
    for work in works:
        job.wait(COMPUTE, work)
    job.compute(1)
    assert is_right(job)


def test_collectives_in_a_row_take_their_input_from_the_stream_of_compute() -> None:
    """The thread's last launch is then on the stream that waits."""
    job = Job()
    job.compute(4)
    works = [job.collective(3), job.collective(3)]
    for work in works:
        job.wait(COMPUTE, work)
    job.compute(1)
    trace = job.trace()
    (rank,) = find_rank_events(trace)
    edges = rank.dependencies().edges
    assert {(0, 1), (0, 2)} <= set(zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True))
    assert is_right(job)


def test_waits_out_of_order_are_told_by_the_times_to_be_so() -> None:
    """The copy begins when the second all-reduce ends, which the first wait is not thought to be for."""
    job = Job()
    first, second = buckets(job, 3, 20)
    job.wait(COMPUTE, second)
    job.compute(1)
    job.wait(COMPUTE, first)
    job.compute(1)
    assert not is_right(job)
    reason = str(blocking(job.trace()).coverage.reason)
    assert reason == "1 of 4 stream waits contradicts the times of what it waited for"


def late_consumer(*collectives: int) -> tuple[Trace, Ints]:
    """A collective, a wait for it, more collectives, and what waited: it begins 9 units late, for an unknown reason."""
    job = Job()
    job.compute(2)
    job.wait(COMPUTE, job.collective(3))
    for length in collectives:
        job.collective(length)
    job.compute(1)
    trace, events = job.recorded(with_events=False)
    late_ns = np.where(np.arange(len(trace.activities)) == len(trace.activities) - 1, 9 * UNIT, 0)
    times = {name: getattr(trace.activities, name) + late_ns for name in ("start_ns", "end_ns")}
    return replace(trace, activities=replace(trace.activities, **times)), events


def test_a_wait_is_doubtful_only_where_it_may_be_for_another_collective() -> None:
    #  stream 7    kk...........c      c waits for A, begins late, and no later than the other one ends
    #  stream 20   ..AAABBBBBBBB       B was launched after the wait, or by another process
    launched_later = infer_waits(*late_consumer(7))
    assert blocking(launched_later).coverage.reason is None
    job = Job()
    job.compute(2)
    job.wait(COMPUTE, job.collective(10))
    job.compute(1)
    rank, _ = find_rank_events(infer_waits(*in_one_trace(late_consumer(), job.recorded(with_events=False))))
    assert rank.blocking.coverage.reason is None


def doubts(job: Job, *, late: dict[int, int], recorded: int | None = None) -> int:
    """How many waits may be for others if operations begin so many units later; one wait's record may be known."""
    trace = job.device.trace(has_step=True)
    by_ns = UNIT * np.array([late.get(row, 0) for row in range(len(trace.activities))])
    table, calls, waits = in_units(trace.activities), trace.calls, in_units(trace.synchronizations)
    trace = replace(
        trace,
        activities=replace(table, start_ns=table.start_ns + by_ns, end_ns=table.end_ns + by_ns),
        calls=replace(calls, start_ns=calls.start_ns * UNIT),
        synchronizations=waits,
        inferred=np.arange(len(waits)) != recorded,
    )
    return int(find_dependencies(trace).is_violated.sum())


def test_a_wait_whose_record_was_recorded_is_not_doubtful() -> None:
    #  stream 7    kkkk.........c      c waits for A, and begins when B ends
    #  stream 20   ..AAABBBBBBBB
    job = Job()
    first, _ = buckets(job, 3, 8)
    job.wait(COMPUTE, first)
    job.compute(1)
    assert doubts(job, late={4: 8}) == 1
    assert doubts(job, late={4: 8}, recorded=len(job.device.records) + 2) == 0


def test_the_input_of_a_late_collective_is_not_doubtful() -> None:
    #  stream 7    kkkk......c
    #  stream 20   ..AAA
    #  stream 21   .....BBB        B waits for k, and begins when A ends, as in a common queue
    job = Job()
    job.compute(2)
    first = job.collective(3)
    job.compute(2)
    second = job.collective(3, on=OTHER_COMM)
    job.wait(COMPUTE, first)
    job.wait(COMPUTE, second)
    job.compute(1)
    assert doubts(job, late={3: 1, 4: 1}) == 0


def test_a_wait_is_not_doubtful_where_each_operation_begins_so_long_after_its_launch() -> None:
    #  launches    k.........c
    #  stream 7    .kk........c      c waits for A
    #  stream 20   ...AABBBBBB       B ends while c is on its way
    job = Job()
    job.compute(2)
    first = job.collective(2)
    job.collective(6)
    job.wait(COMPUTE, first)
    job.compute(1, gap=10)
    assert doubts(job, late=dict.fromkeys(range(4), 1)) == 0
    assert doubts(job, late=dict.fromkeys(range(1, 4), 1)) == 1, "the first one takes no time"


@pytest.mark.parametrize("syncs", [True, False])
def test_a_work_that_nothing_waits_for_shifts_the_others_unless_the_host_waits(syncs: bool) -> None:
    job = Job()
    job.compute(1)
    job.collective(3)
    if syncs:
        job.device.synchronize(0)
    for work in buckets(job, 9, 5):
        job.wait(COMPUTE, work)
        job.compute(1)
    assert is_right(job) == syncs


def test_two_communicators_are_known_if_all_are_waited_for_at_once() -> None:
    job = Job()
    job.compute(2)
    one = job.collective(9)
    job.compute(2)
    two = job.collective(4, on=OTHER_COMM)
    job.wait(COMPUTE, two)
    job.wait(COMPUTE, one)
    job.compute(1)
    assert is_right(job)
    job = Job()
    job.compute(2)
    one = job.collective(9)
    job.compute(2)
    two = job.collective(4, on=OTHER_COMM)
    job.wait(COMPUTE, two)
    job.compute(1)
    job.wait(COMPUTE, one)
    job.compute(1)
    assert not is_right(job)


def test_waits_for_what_the_host_waited_for_wait_for_nothing() -> None:
    """As parameters that are gathered at the end of a step, and used in the next one in another order."""
    job = Job()
    first, second = buckets(job, 3, 20)
    job.device.synchronize(0)
    job.wait(COMPUTE, second)
    job.compute(1)
    job.wait(COMPUTE, first)
    job.compute(1)
    job.wait(COMPUTE, job.collective(5))
    job.compute(1)
    assert is_right(job)


def test_a_process_with_two_devices_is_left_alone() -> None:
    job = Job()
    job.wait(COMPUTE, job.collective(3))
    job.compute(1)
    trace = job.trace()
    calls = trace.synchronizations
    hidden = replace(
        calls, awaits=np.full(len(calls), UNKNOWN), stream=np.where(calls.kind == 0, UNKNOWN, calls.stream)
    )
    two = replace(trace.activities, device=np.arange(len(trace.activities)))
    found = infer_waits(
        replace(trace, activities=two, synchronizations=hidden, sync_source="none"), np.full(len(calls), UNKNOWN)
    )
    assert found.sync_source == "none"


def test_the_summary_says_that_it_is_inferred() -> None:
    job = Job()
    job.wait(COMPUTE, job.collective(3))
    job.compute(1)
    trace = job.trace()
    note = "what streams waited for is inferred from the order of calls: not all records of events were recorded"
    assert note in diagnose(trace, find_rank_events(trace))


def test_an_event_that_would_be_recorded_again_before_a_wait_for_it_is_not() -> None:
    """Both waits are for the first work, of which the second is not waited for."""
    job = Job()
    first, _ = buckets(job, 9, 20)
    job.wait(COMPUTE, first)
    job.compute(30)
    job.wait(COMPUTE, first)
    job.compute(1)
    assert not is_right(job)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Works on one or two communicators, with waits in and out of order, twice and never, and prefetches."""
    job = Job()
    streams = draw(st.sampled_from([(COMM,), (COMM,), (COMM, OTHER_COMM), (COMM, COMM, OTHER_COMM)]))
    kinds = ["compute", "compute", "collective", "collective", "wait", "wait", "row"]
    kinds += draw(st.sampled_from([[], [], ["any"], ["twice"], ["side"], ["sync"], ["prefetch"], ["wait_stream"]]))
    in_order, waiting = draw(st.booleans()), list[int]()
    reuses = draw(st.booleans())
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=4, max_size=30)):
        length = draw(st.integers(0, 12))
        if kind == "compute":
            job.compute(length, gap=draw(st.integers(0, 2)))
        elif kind == "collective":
            free = [work for work in job.works if work not in waiting]
            number = free[0] if reuses and free else None
            on = draw(st.sampled_from(streams))
            waiting.append(job.collective(length, on=on, number=number, internal=draw(st.booleans())))
        elif kind == "wait" and waiting:
            job.wait(COMPUTE, waiting.pop(0 if in_order else draw(st.integers(0, len(waiting) - 1))))
        elif kind == "any" and waiting:
            waiting.pop(0)  # is never waited for
        elif kind == "twice" and waiting:
            job.wait(COMPUTE, waiting[0])
        elif kind == "row":
            while waiting:
                job.wait(COMPUTE, waiting.pop(0 if in_order else draw(st.integers(0, len(waiting) - 1))))
        elif kind == "sync":
            job.device.synchronize(0)
        elif kind == "side":  # a stream that prepares data
            job.compute(length, stream=SIDE)
            job.record(SIDE, 3)
            if draw(st.booleans()):
                job.wait(COMPUTE, 3)
        elif kind == "wait_stream":
            job.hand_over(SIDE, COMPUTE, 4)
        elif kind == "prefetch":  # parameters are copied in on a stream of their own, then gathered
            job.hand_over(COMPUTE, SIDE, 5)
            job.compute(length, stream=SIDE)
            waiting.append(job.collective(draw(st.integers(0, 12)), after=SIDE))
    job.compute(1)
    return job


def test_blocking_is_not_known_where_calls_between_others_were_not_recorded(tmp_path: Path) -> None:
    """Without the calls of the driver, by which NCCL launches, it was 0 of 177 ms: records were taken for compute's."""
    name = "sharded.rank0.json.gz"
    document = json.loads(gzip.decompress((ROOT / "traces" / "h200" / "nccl" / name).read_bytes()))
    (tmp_path / "whole.json").write_text(json.dumps(document))
    document["traceEvents"] = [one for one in document["traceEvents"] if one.get("cat") != "cuda_driver"]
    (tmp_path / "less.json").write_text(json.dumps(document))
    whole, less = (blocking(load_trace(tmp_path / f"{name}.json")) for name in ("whole", "less"))
    assert whole.total_ns == 176_506_926
    assert less.total_ns is None
    assert less.coverage.reason is not None


@examples(100)
@given(jobs(), st.sets(st.integers(0, 12), max_size=4))
def test_blocking_is_right_or_not_known_where_calls_that_launch_were_not_recorded(job: Job, lost: set[int]) -> None:
    """Of NCCL's kernels no call was recorded (for an empty set), or some calls of any kernels are missing."""
    recorded, events = job.recorded()
    of_nccl = [row for row, operation in enumerate(job.device.operations) if operation.is_collective]
    calls = select(recorded.calls, ~np.isin(np.arange(len(recorded.calls)), sorted(lost) or of_nccl))
    less = replace(recorded, calls=calls, launching_calls=None, has_ambiguous_launch=None, is_launch=None)
    if len(find_rank_events(less)):
        is_known = is_right_in(infer_waits(less, events), job)
        event(f"known: {is_known}")


def waits_of(trace: Trace, process: int) -> list[tuple[int, ...]]:
    """Each record and wait of a process: its number, stream, and the number of the record that it waits for."""
    calls = trace.synchronizations
    awaited = take_or_unknown(calls.correlation, calls.awaits)
    own = calls.process == process
    return sorted(zip(*(column[own].tolist() for column in (calls.correlation, calls.stream, awaited)), strict=True))


def test_a_process_without_waits_is_left_alone_beside_one_that_waits() -> None:
    """The stream of its record was inferred beside the other one, and alone it was not."""
    waits, records = Job(), Job()
    waits.compute()
    waits.collective(3)
    records.compute()
    records.record(COMPUTE, 3)
    are_alike_beside_each_other(waits, records)


def test_waits_are_in_a_row_though_another_process_launches_between_them() -> None:
    """Two communicators are known if all are waited for at once: a launch of another process parts no waits."""
    waits, launches = Job(), Job()
    waits.compute()
    one = waits.collective(9)
    waits.compute()
    two = waits.collective(4, on=OTHER_COMM)
    waits.wait(COMPUTE, two)
    waits.compute(stream=SIDE)
    waits.wait(COMPUTE, one)
    waits.compute()
    for _ in range(waits.device.calls):
        launches.compute()
    launches.collective(3)
    are_alike_beside_each_other(waits, launches)


@examples(200)
@given(jobs(), jobs())
def test_what_a_stream_waited_for_does_not_depend_on_another_process(job: Job, other: Job) -> None:
    """Numbers of calls, threads and streams are those of a process: each process has the same."""
    are_alike_beside_each_other(job, other)


def in_one_trace(job: tuple[Trace, Ints], other: tuple[Trace, Ints]) -> tuple[Trace, Ints]:
    """Two captures as one of two processes."""
    (trace, events), (beside, events_beside) = job, other
    joined = {}
    for name in ("activities", "calls", "synchronizations"):
        own, theirs = getattr(trace, name), getattr(beside, name)
        joined[name] = concatenate(own, replace(theirs, process=theirs.process + 1))
    both = replace(trace, **joined, launching_calls=None, has_ambiguous_launch=None)
    return both, np.concatenate([events, events_beside])


def are_alike_beside_each_other(job: Job, other: Job) -> None:
    """What is inferred of two processes in one trace is what is inferred of each alone."""
    (trace, events), (beside, events_beside) = job.recorded(), other.recorded()
    both = infer_waits(*in_one_trace((trace, events), (beside, events_beside)))
    for alone, process in ((infer_waits(trace, events), PID), (infer_waits(beside, events_beside), PID + 1)):
        assert waits_of(both, process) == waits_of(alone, PID)


@pytest.mark.slow
@examples(600)
@given(jobs(), st.booleans())
def test_blocking_is_right_or_not_known(job: Job, with_events: bool) -> None:
    is_known = is_right(job, with_events=with_events) if job.device.waits else None
    event(f"known: {is_known}")
