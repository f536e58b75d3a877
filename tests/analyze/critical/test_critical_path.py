"""The critical path of a step, against a device that knows what each operation began after."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddp_prof.analyze.collectives.run_analysis import analyze_trace, merge_analyses
from ddp_prof.analyze.collectives.timing import CollectiveTimings
from ddp_prof.analyze.core.blocking import NO_SETS
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.core.work import Work
from ddp_prof.analyze.critical import critical_path
from ddp_prof.analyze.critical.critical_path import (
    NO_HOST_PATH,
    NOT_ASKED,
    Chains,
    StepPath,
    find_rank_work,
    in_order_of_ranks,
    measure_critical_paths,
)
from ddp_prof.analyze.why_unknown import NO_COMMUNICATION
from ddp_prof.columns import table_row
from ddp_prof.runs import load_runs
from ddp_prof.table import select
from ddp_prof.trace import UNKNOWN, Category, Spans, Synchronizations, SyncKind, Trace, empty
from tests.analyze.core.test_dependencies import one_bucket
from tests.analyze.critical.scheduler import Device, programs
from tests.drawing import MAIN, PID, draw_trace, table
from tests.examples import examples
from tests.nsys_factory import NCCL, STEP_NS, US, Capture, Kernel, Range, Sync, write_capture

Parts = tuple[int, int, int]
"""Compute, transfer, host."""


def paths_of(*traces: Trace) -> tuple[StepPath, ...]:
    ranks = [(trace, find_rank_events(trace)) for trace in traces]
    run = merge_analyses([analyze_trace(trace, of_trace) for trace, of_trace in ranks])
    work = [(trace.path, find_rank_work(rank)) for trace, of_trace in ranks for rank in of_trace]
    found = measure_critical_paths(run, in_order_of_ranks(run, work)).steps
    assert all(sum(path.parts_ns.values()) == path.path_ns for path in found)
    return found


def test_a_frame_has_a_row_per_step_and_a_column_per_part() -> None:
    trace = one_bucket(kernel=4, collective=12, then=6).trace()
    (rank,) = find_rank_events(trace)
    found = measure_critical_paths(analyze_trace(trace, [rank]), [find_rank_work(rank)])
    (row,) = found.to_frame().to_dict("records")
    (path,) = found.steps
    assert (row["path_ns"], row["rank"], row["changes"]) == (path.path_ns, path.rank, 0)
    told = {part: row[f"{part}_ns"] for part in path.parts_ns}
    assert told == path.parts_ns | {"peer_wait": None}, "no other rank's trace tells how long it waited"


def path_of(*traces: Trace) -> StepPath:
    (path,) = paths_of(*traces)
    return path


def parts_of(path: StepPath) -> Parts:
    assert {part for part, ns in path.parts_ns.items() if ns} <= {"compute", "transfer", "host"}, "no time is lost"
    return path.parts_ns["compute"], path.parts_ns["transfer"], path.parts_ns["host"]


def possible_paths(device: Device) -> set[Parts]:
    """The parts of every path back from the end; there are several where operations end together."""
    first = min(one.start for one in device.operations)
    end = max(one.end for one in device.operations)

    @cache
    def back(index: int, now: int) -> frozenset[Parts]:
        one = device.operations[index]
        length = now - max(one.start, first)
        own = (length * (not one.is_collective), length * one.is_collective, 0)
        if one.start <= first:
            return frozenset([own])
        before = one.waits | {one.before} - {None}
        bound = [other for other in before if device.operations[other].end == one.start]
        rest = [path for other in bound for path in back(other, one.start)] if bound else host(one.launch)
        return frozenset(_sum(own, path) for path in rest)

    @cache
    def host(now: int) -> frozenset[Parts]:
        waited = [(start, stop) for _, start, stop in device.syncs if stop > start and stop <= now]
        if not waited:
            return frozenset([(0, 0, now - first)])
        start, stop = waited[-1]
        ended = [index for index, one in enumerate(device.operations) if one.end == stop and one.launch <= start]
        return frozenset(_sum((0, 0, now - stop), path) for index in ended for path in back(index, stop))

    last = [index for index, one in enumerate(device.operations) if one.end == end]
    return {path for index in last for path in back(index, end)}


def _sum(one: Parts, other: Parts) -> Parts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def test_the_path_goes_through_what_blocks() -> None:
    #  stream 7   kkkk######......ccc
    #  stream 20  ....CCCCCCCCCCCC
    path = path_of(one_bucket(kernel=4, collective=12, then=6).trace(has_step=True))
    assert parts_of(path) == (4 + 3, 12, 0)
    assert [(one.index, one.on_path_ns, one.gain_ns) for one in path.collectives] == [(0, 12, 6)]


def test_the_path_goes_through_a_collective_between_kernels_of_its_stream() -> None:
    #  stream 7   kkkkCCCCCCCCCCCCccc
    device = Device()
    for length in (4, 12, 3):
        device.launch(0, 7, length, is_collective=length == 12)
    path = path_of(device.trace(has_step=True))
    assert parts_of(path) == (4 + 3, 12, 0)
    assert [(one.index, one.on_path_ns) for one in path.collectives] == [(0, 12)]


def test_paths_without_gains_are_followed_without_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = one_bucket(kernel=4, collective=12, then=6).trace(has_step=True)
    (rank,) = find_rank_events(trace)
    run, work = analyze_trace(trace, [rank]), [find_rank_work(rank)]
    (path,) = measure_critical_paths(run, work).steps
    unknown = tuple(replace(one, gain_ns=None) for one in path.collectives)
    monkeypatch.setattr(critical_path, "find_replay", None)  # as it is not called
    found = measure_critical_paths(run, [find_rank_work(rank)], with_gains=False)
    assert (found.steps, found.gain_reason) == ((replace(path, collectives=unknown),), NOT_ASKED)


def test_the_path_leaves_out_what_has_slack() -> None:
    path = path_of(one_bucket(kernel=4, collective=5, then=10).trace(has_step=True))
    assert parts_of(path) == (4 + 10 + 3, 0, 0)
    assert path.collectives == ()


def test_the_path_stays_on_the_host_where_a_launch_came_late() -> None:
    path = path_of(one_bucket(kernel=4, collective=5, then=0, lag=20).trace(has_step=True))
    assert parts_of(path) == (3, 0, 20)


def test_the_path_goes_through_what_the_host_waited_for() -> None:
    #  host       L......S.L
    #  stream 7   kkkkkkkk.ccc
    device = Device()
    device.launch(0, 7, 8, is_collective=False)
    device.synchronize(1)
    device.launch(2, 7, 3, is_collective=False)
    assert parts_of(path_of(device.trace(has_step=True))) == (8 + 3, 0, 2)


def tells_needs(device: Device) -> bool:
    """Whether its trace tells what needs its collectives, by an event or on their own stream; else no path is known."""
    computing = {one.stream for one in device.operations if not one.is_collective}
    return bool(device.waits) or all(one.stream in computing for one in device.operations if one.is_collective)


@pytest.mark.slow
@examples(150)
@given(programs().filter(tells_needs))
def test_the_path_is_one_that_the_device_knows(device: Device) -> None:
    assume(any(one.end > one.start for one in device.operations))
    for path in paths_of(device.trace(has_step=True)):
        assert parts_of(path) in possible_paths(device)


def test_one_collective_gains_what_the_next_ones_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """And positions of collectives in their steps are found once, not for each of them, which grows with the square."""
    read, find_index = [], CollectiveTimings.__dict__["index"].fget
    counting = property(lambda timings: read.append(timings) or find_index(timings))
    monkeypatch.setattr(CollectiveTimings, "index", counting)
    #  stream 7   kkkk..............ccc
    #  stream 20  ....AAAAAAAABBBBBB         without A, B ends 8 earlier, though nothing stands still for A
    device = one_bucket(kernel=4, collective=8, then=0)
    second = Device()
    for name, arguments, more in device.program[:4]:
        getattr(second, name)(*arguments, **more)
    second.launch(0, 20, 6, is_collective=True)
    for name, arguments, more in device.program[4:]:
        getattr(second, name)(*arguments, **more)
    path = path_of(second.trace(has_step=True))
    assert [(one.index, one.gain_ns) for one in path.collectives] == [(1, 6), (0, 8)]
    assert len(read) == 1


@pytest.mark.slow
@examples(300)
@given(programs().filter(lambda device: tells_needs(device) and any(one.is_collective for one in device.operations)))
def test_what_a_collective_would_gain_is_what_the_device_gains(device: Device) -> None:
    """Of one that is not on the path that is nothing."""
    paths = paths_of(device.trace(has_step=True))
    assume(paths)
    (path,) = paths
    operations = device.operations
    collectives = [row for row, one in enumerate(operations) if one.is_collective]
    collectives.sort(key=lambda row: (operations[row].launch, operations[row].start))
    told = {collectives[one.index]: one.gain_ns for one in path.collectives}
    gained = {row: device.end - device.again(row).end for row in collectives}
    assert gained == {row: told.get(row, 0) for row in collectives}


def end_of_work(device: Device) -> int:
    return max((one.end for one in device.operations if not one.is_collective), default=0)


@pytest.mark.slow
@examples(300)
@given(programs())
def test_without_all_collectives_work_ends_earlier_by_no_more_than_what_may_block(device: Device) -> None:
    """Launches alone tell this limit; waits of streams are not read."""
    device.synchronize(1)
    (rank,) = find_rank_events(device.trace(has_step=True))
    assume(rank.device is not None)
    collectives = [row for row, one in enumerate(device.operations) if one.is_collective]
    assert rank.may_block is not None
    assert end_of_work(device) - end_of_work(device.again(*collectives)) <= rank.may_block.length_ns


def rank_of(number: int, kernel: int, *collectives: int, then: int) -> Trace:
    """A rank whose first kernel lasts so long, and whose collectives follow one another."""
    device = Device()
    device.launch(0, 7, kernel, is_collective=False)
    device.record(0, 7, 1)
    device.wait(0, 20, 1)
    for length in collectives:
        device.launch(0, 20, length, is_collective=True)
    device.record(0, 20, 2)
    device.wait(0, 7, 2)
    device.launch(0, 7, then, is_collective=False)
    trace = device.trace(has_step=True)
    return replace(trace, path=Path(f"rank{number}.sqlite"), ranks={PID: number}, world_size=2, epoch_ns=0)


def test_the_path_changes_to_the_rank_that_arrives_last() -> None:
    #  rank 0   kkkkAAAAAAAAAAAABBBBccccc       ends last, but waited for rank 1 at A
    #  rank 1   kkkkkkkkkkkkAAAABBBBccc
    #  path     kkkkkkkkkkkk.......              of rank 1,
    #           ............AAAABBBBccccc       of rank 0
    path = path_of(rank_of(0, 4, 12, 4, then=5), rank_of(1, 12, 4, 4, then=3))
    assert (path.rank, path.changes) == ("rank 0", 1)
    assert parts_of(path) == (12 + 5, 8, 0)
    found = [(one.rank, one.index, one.on_path_ns, one.gain_ns) for one in path.collectives]
    assert found == [(0, 1, 4, 4), (0, 0, 4, 4)], "without A rank 0 still waits for rank 1"


def begun_later(trace: Trace, by_ns: int) -> Trace:
    """The same on a clock that shows so much more."""
    moved = {}
    for name in ("activities", "calls", "spans", "synchronizations"):
        table = getattr(trace, name)
        times = [column for column in ("start_ns", "end_ns") if hasattr(table, column)]
        moved[name] = replace(table, **{column: getattr(table, column) + by_ns for column in times})
    return replace(trace, **moved, epoch_ns=(trace.epoch_ns or 0) - by_ns)


@pytest.mark.parametrize("by_ns", [-1000, 1000])
def test_what_a_collective_gains_does_not_depend_on_when_the_files_of_ranks_begin(by_ns: int) -> None:
    """Launches after no wait of the host stayed on the clock of their rank, and gains were negative."""
    first, second = rank_of(0, 4, 12, 4, then=5), rank_of(1, 12, 4, 4, then=3)
    assert path_of(first, begun_later(second, by_ns)) == path_of(first, second)


def test_a_rank_without_steps_ends_no_step_of_the_others() -> None:
    """Its whole capture was the path of step 0, or of one more step."""
    marked, other = rank_of(0, 4, 12, then=5), rank_of(1, 12, 40, then=3)
    unmarked = replace(other, spans=empty(Spans))
    path, alone = path_of(marked, unmarked), path_of(marked)
    assert (path.step, path.rank, path.path_ns, path.parts_ns) == (0, "rank 0", alone.path_ns, alone.parts_ns)


def test_on_another_rank_the_path_goes_back_before_the_step_of_that_rank() -> None:
    """What the rank that arrived last computed before its own step 1 was called the host."""
    #  step      0         1 on rank 0                      1 on rank 1
    #  rank 0    kkkkkkkkkkkkkkkAAAAAAAAAAAAAAAAAAAAAAAAcccc
    #  rank 1    kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkAAAAccc
    traces = []
    for number, (kernel, collective, then) in enumerate([(10, 24, 4), (30, 4, 3)]):
        device = Device()
        with device.range("step 0"):
            device.launch(0, 7, kernel, is_collective=False)
        with device.range("step 1"):
            device.launch(0, 7, 5, is_collective=False)
            device.record(0, 7, 1)
            device.wait(0, 20, 1)
            device.launch(0, 20, collective, is_collective=True)
            device.record(0, 20, 2)
            device.wait(0, 7, 2)
            device.launch(0, 7, then, is_collective=False)
        trace = device.trace()
        traces.append(replace(trace, path=Path(f"rank{number}.sqlite"), ranks={PID: number}, world_size=2, epoch_ns=0))
    path = paths_of(*traces)[1]
    assert (path.step, path.changes, path.path_ns) == (1, 1, 33)
    assert parts_of(path) == (5 + 20 + 4, 4, 0)


def test_where_clocks_cannot_tell_who_was_last_the_wait_is_a_part_of_its_own() -> None:
    path = path_of(rank_of(0, 4, 12, then=5), replace(rank_of(1, 12, 4, then=3), epoch_ns=None))
    assert (path.rank, path.changes) == ("rank 0", 0)
    assert (path.parts_ns["compute"], path.parts_ns["transfer"], path.parts_ns["peer_wait"]) == (4 + 5, 4, 8)
    assert [one.gain_ns for one in path.collectives] == [None]


def test_ranks_that_arrive_together_leave_the_path_where_it_is() -> None:
    path = path_of(rank_of(0, 4, 12, 4, then=3), rank_of(1, 4, 12, 4, then=5), rank_of(2, 4, 12, 4, then=4))
    assert (path.rank, path.changes) == ("rank 1", 0)


def test_of_a_warm_up_whose_collective_is_on_the_path_no_wait_is_known() -> None:
    #  step      0     1
    #  rank 0    kkkk.....................ccccc     where clocks cannot tell who was last
    #            ...AAAAAAAAAAAAAAAABBBBBB
    #  rank 1    kkkk...................cccc        B waited for 2 on rank 0, A is not measured
    #            ...AAAAAAAAAAAAAAAABBBB
    traces = []
    for number, (length, then) in enumerate([(6, 5), (4, 4)]):
        device = Device()
        with device.range("step|index=0|warmup=1"):
            device.launch(0, 7, 3, is_collective=False)
            device.record(0, 7, 1)
            device.wait(0, 20, 1)
            device.launch(0, 20, 16, is_collective=True)
        with device.range("step|index=1"):
            device.launch(0, 7, 1, is_collective=False)
            device.launch(0, 20, length, is_collective=True)
            device.record(0, 20, 2)
            device.wait(0, 7, 2)
            device.launch(0, 7, then, is_collective=False)
        trace = device.trace()
        epoch_ns = None if number else 0
        traces.append(
            replace(trace, path=Path(f"rank{number}.sqlite"), ranks={PID: number}, world_size=2, epoch_ns=epoch_ns)
        )
    path = path_of(*traces)
    assert (path.rank, path.parts_ns["peer_wait"], len(path.collectives)) == ("rank 0", 2, 1)


def test_who_was_last_at_another_collective_says_nothing_of_a_warm_up_s() -> None:
    #  step      00         1
    #  rank 0    ...k......................cccccccccccccccccccc     c waits for A, and not for B
    #            kkkkkkkkkkAAAAAAAAAAAAAAAAkBBBBBBBBB
    #  rank 1    ...k......................cc                       is late at B
    #            kkkkkkkkkkAAAAAAAAAAAAAAAAkkkkkkBBBB
    traces = []
    for number, late in enumerate((1, 6)):
        device = Device()
        with device.range("step|index=0|warmup=1"):
            device.launch(0, 8, 10, is_collective=False)
            device.record(0, 8, 1)
            device.wait(0, 20, 1)
            device.launch(0, 20, 16, is_collective=True)
            device.record(0, 20, 2)
        with device.range("step|index=1"):
            device.launch(0, 7, 1, is_collective=False)
            device.launch(0, 20, late, is_collective=False)
            device.launch(0, 20, 10 - late, is_collective=True)
            device.wait(0, 7, 2)
            device.launch(0, 7, 2 if number else 20, is_collective=False)
        trace = device.trace()
        traces.append(replace(trace, path=Path(f"rank{number}.sqlite"), ranks={PID: number}, world_size=2, epoch_ns=0))
    path = path_of(*traces)
    assert (path.rank, path.changes, path.collectives) == ("rank 0", 0, ())


def test_before_an_operation_of_unknown_launch_the_path_is_the_host() -> None:
    device = Device()
    device.launch(0, 8, 1, is_collective=False)
    device.launch(4, 7, 3, is_collective=False)
    device.launch(0, 7, 2, is_collective=False)
    trace = device.trace(has_step=True)
    calls = select(trace.calls, np.array([0, 2]))
    path = path_of(replace(trace, calls=calls, launching_calls=None, has_ambiguous_launch=None))
    assert (path.parts_ns["host"], path.parts_ns["launch"]) == (4, 0)


def test_of_one_rank_of_several_the_wait_for_peers_is_not_said_to_be_0() -> None:
    alone = path_of(rank_of(0, 4, 12, then=5))
    assert [one.is_matched for one in alone.collectives] == [False]
    both = path_of(rank_of(0, 4, 12, then=5), replace(rank_of(1, 12, 4, then=3), epoch_ns=None))
    assert [table_row(path)["path_peer_wait_ms"] for path in (alone, both)] == [None, 8e-6]


def test_beside_one_that_only_computes_a_rank_gains_what_it_gains_alone() -> None:
    """As a process that prepares data on a GPU of its own: no gain was known."""
    one = rank_of(0, 4, 12, then=5)
    other = draw_trace(launches={"main": "k"}, streams={7: ".kkk"}, device=1, path=str(one.path))
    gains = [[each.gain_ns for each in path_of(*traces).collectives] for traces in ([one], [one, other])]
    assert gains == [[12], [12]]


@pytest.mark.parametrize("number", [UNKNOWN, 0], ids=["no number", "0, which no call has"])
@pytest.mark.parametrize("operation", range(4), ids=["gradients", "A", "B", "what needs B"])
def test_where_the_order_of_an_operation_is_lost_nothing_is_said_of_what_waited(operation: int, number: int) -> None:
    """As of a collective without a correlation id: it was said to block nothing, and the path took another's chain."""
    traces = [rank_of(0, 4, 12, 4, then=5), rank_of(1, 12, 4, 4, then=3)]
    activities = traces[1].activities
    correlation = np.where(np.arange(len(activities)) == operation, number, activities.correlation)
    traces[1] = replace(traces[1], activities=replace(activities, correlation=correlation))
    (rank,) = find_rank_events(traces[1])
    reason = "the trace does not tell the launch of 1 of the device's operations"
    assert (rank.blocking.coverage.reason, rank.blocking.total_ns) == (reason, None)
    assert find_rank_work(rank).reason == reason
    assert paths_of(*traces) == ()


@pytest.mark.parametrize("count", [1, 2])
def test_where_the_host_reduces_what_a_gpu_computed_there_is_no_path(count: int) -> None:
    """Gloo's collectives are none of the device's operations: their rows were taken for those of others."""
    traces = [
        draw_trace(
            ranges={
                "process|rank=0|world=2|backend=gloo": "##########",
                "step|index=0": "##########",
                "backward": "#####.....",
                "all_reduce|bucket=0|bytes=8|params=1": "...####...",
                "synchronize": ".....##...",
            },
            launches={"main": "a......b.."},
            streams={7: ".aaaa...bb"},
            ranks={PID: number},
            path=f"x.rank{number}.json",
        )
        for number in range(count)
    ]
    assert paths_of(*traces) == ()
    (rank,) = find_rank_events(traces[0])
    assert (rank.device, rank.blocking.by_step_ns.tolist(), find_rank_work(rank).reason) == (0, [2], NO_HOST_PATH)


def test_of_a_host_without_collectives_none_is_said_to_have_run_on_it() -> None:
    names = {"process|rank=0|world=2|backend=gloo|device=cpu": "#" * 20, "step|index=0": "#" * 20}
    trace = draw_trace(ranges={**names, "forward": ".#####", "backward": "." * 8 + "#####"})
    (rank,) = find_rank_events(trace)
    assert (rank.device, find_rank_work(rank).reason) == (None, NO_COMMUNICATION)


SEND_RECV = "ncclDevKernel_SendRecv(x)"


def run_pipeline(
    steps: int, batches: int, ahead: int, kernels: list[list[int]], transfer: int, gap: int
) -> list[Trace]:
    """Ranks that hand batches on, each to the next one; only their forward.

    Args:
        batches: Of each step.
        ahead: How many batches before the one that needs it a receive is posted.
        kernels: The lengths of each rank's kernels, which come again and again.
        gap: What each launch takes.
    """
    lengths: dict[tuple[int, str, int], int] = {}  # of what a rank sends and receives
    while True:
        devices, places = [], {}
        for rank, own in enumerate(kernels):
            device, posted = Device(), 0
            for step in range(steps):
                with device.range(f"step {step}"):
                    for batch in range(step * batches, (step + 1) * batches):
                        while rank and posted < min(steps * batches, batch + 1 + ahead):
                            places[rank, "receive", posted] = device, len(device.operations)
                            length = lengths.get((rank, "receive", posted), 0)
                            device.launch(gap, 21, length, is_collective=True, name=SEND_RECV)
                            device.record(0, 21, 100 + posted)
                            posted += 1
                        device.wait(0, 7, 100 + batch)
                        device.launch(gap, 7, own[batch % len(own)], is_collective=False)
                        if rank < len(kernels) - 1:
                            device.record(0, 7, 1)
                            device.wait(0, 20, 1)
                            places[rank, "send", batch] = device, len(device.operations)
                            length = lengths.get((rank, "send", batch), 0)
                            device.launch(gap, 20, length, is_collective=True, name=SEND_RECV)
                    device.record(0, 20, 2)
                    device.wait(0, 7, 2)
                    device.launch(gap, 7, 3, is_collective=False, name="optimizer")
            devices.append(device)
        known, lengths = lengths, {}
        starts = {place: device.operations[row].start for place, (device, row) in places.items()}
        for (rank, what, batch), start in starts.items():
            peer = (rank + 1, "receive", batch) if what == "send" else (rank - 1, "send", batch)
            lengths[rank, what, batch] = max(start, starts[peer]) + transfer - start
        if lengths == known:
            break
    return [
        replace(device.trace(), path=Path(f"rank{rank}.sqlite"), ranks={PID: rank}, world_size=len(kernels), epoch_ns=0)
        for rank, device in enumerate(devices)
    ]


def longest_paths(trace: Trace) -> list[int]:
    """How long the path of each step is at most: where the host runs ahead until the next step, else as its window."""
    (rank,) = find_rank_events(trace)
    times, window_ns = rank.step_times, rank.breakdown.window_ns
    return [
        int(length if rank.runs_ahead and length != UNKNOWN else window)
        for length, window in zip(times.length_ns, window_ns, strict=True)
    ]


def test_a_receive_that_is_posted_ahead_does_not_make_the_path_longer_than_its_step() -> None:
    """The path of step 0 ended with the receive for step 1, long after step 1 had begun."""
    trace = run_pipeline(steps=4, batches=2, ahead=2, kernels=[[10, 10], [10, 12]], transfer=4, gap=1)[1]
    (rank,) = find_rank_events(trace)
    assert rank.runs_ahead
    assert rank.step_times.length_ns.tolist() == [27, 27, 27, UNKNOWN]
    assert [path.path_ns for path in paths_of(trace)] == [27, 27, 27, 25]


def test_a_receive_that_runs_on_into_the_next_step_does_not_end_the_path() -> None:
    """Also where the host keeps up with the device: the paths were as long as the windows, which hold that receive."""
    trace = run_pipeline(steps=4, batches=2, ahead=2, kernels=[[15], [5]], transfer=4, gap=12)[1]
    (rank,) = find_rank_events(trace)
    assert not rank.runs_ahead
    assert rank.breakdown.window_ns.tolist() == [105, 69, 69, 27]
    assert [path.path_ns for path in paths_of(trace)] == [81, 45, 45, 27]


def test_what_ends_where_the_next_step_begins_ends_the_path() -> None:
    """The device works without a pause, and the host keeps up with it."""
    trace = draw_trace(
        ranges={"step 0": "#########.......", "step 1": ".........#######"},
        launches={"main": "aNb......cMd...."},
        streams={7: ".aaNNNbbbccMMMdd"},
    )
    assert [parts_of(path) for path in paths_of(trace)] == [(2 + 3, 3, 0), (2 + 2, 3, 0)]


def communicates(device: Device) -> bool:
    """Whether a collective takes time: where none does, there are no paths."""
    return any(one.is_collective and one.end > one.start for one in device.operations)


@pytest.mark.slow
@examples(200)
@given(programs().filter(lambda device: tells_needs(device) and communicates(device)))
def test_what_a_collective_would_gain_is_how_much_earlier_the_next_step_begins(drawn: Device) -> None:
    """Where the host runs ahead. The next step is one kernel, which waits for the streams of collectives."""

    def run(*free: int) -> Device:
        device = drawn.again(*free)
        for stream in (20, 21):
            device.record(0, stream, 9)
            device.wait(0, 7, 9)
        with device.range("step 1"):
            device.launch(0, 7, 1000, is_collective=False)
        return device

    device = run()
    operations = device.operations
    device.ranges.append(("step 0", 0, operations[-1].launch))
    trace = device.trace()
    (rank,) = find_rank_events(trace)
    assume(rank.runs_ahead and rank.step_times.length_ns[0] > 0)
    path = paths_of(trace)[0]
    assert (path.step, path.path_ns) == (0, rank.step_times.length_ns[0])
    collectives = [row for row, one in enumerate(operations) if one.is_collective]
    collectives.sort(key=lambda row: (operations[row].launch, operations[row].start))
    told = {collectives[one.index]: one.gain_ns for one in path.collectives}
    assert told == {row: operations[-1].start - run(row).operations[-1].start for row in told}


def of_one(work: Work) -> Chains:
    """Each operation is a chain of its own, so a path goes from operation to operation."""
    return Chains(np.arange(len(work)), *np.zeros((2, len(work)), np.int64))


@pytest.mark.slow
@examples(200)
@given(
    programs().filter(lambda device: tells_needs(device) and communicates(device)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 2), st.booleans()), min_size=40, max_size=40),
    st.integers(0, 40),
)
def test_a_path_through_chains_is_the_path_from_operation_to_operation(
    device: Device, drawn: list[tuple[int, int, bool]], later: int
) -> None:
    """Also with gaps, with copies, with operations that overlap, and where a path ends within a chain."""
    trace = device.trace(has_step=True)
    (rank,) = find_rank_events(trace)
    own = find_rank_work(rank)
    delay_ns, longer_ns, is_copy = np.array(drawn, np.int64)[: len(own.work)].T
    work = replace(
        own.work,
        category=np.where(is_copy & ~own.work.is_collective, Category.MEMORY, own.work.category),
        start_ns=own.work.start_ns + delay_ns,
        end_ns=own.work.end_ns + delay_ns + longer_ns,
    )
    own = replace(own, work=work, steps=replace(own.steps, start_ns=own.steps.start_ns + later))
    run = analyze_trace(trace, [rank])
    found = measure_critical_paths(run, [own])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critical_path, "find_chains", of_one)
        assert found == measure_critical_paths(run, [own])


@pytest.mark.slow
@examples(100)
@given(
    steps=st.integers(2, 4),
    batches=st.integers(1, 3),
    ahead=st.integers(0, 4),
    kernels=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=2, max_size=3),
    transfer=st.integers(1, 20),
    gap=st.integers(0, 30),
)
def test_no_path_is_longer_than_its_step(
    steps: int, batches: int, ahead: int, kernels: list[list[int]], transfer: int, gap: int
) -> None:
    """Where the host runs ahead, a step lasts until the next one begins; else it is not longer than its window."""
    traces = run_pipeline(steps, batches, ahead, kernels, transfer, gap)
    for trace in traces[1:]:
        longest = longest_paths(trace)
        assert all(path.path_ns <= longest[path.step or 0] for path in paths_of(trace))
    of_rank = {f"rank {number}": longest_paths(trace) for number, trace in enumerate(traces)}
    assert all(path.path_ns <= of_rank[path.rank][path.step or 0] for path in paths_of(*traces))


RANKS = st.integers(1, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.lists(st.integers(1, 20), min_size=count, max_size=count), min_size=2, max_size=3),
        st.lists(st.integers(1, 20), min_size=count, max_size=count),
    )
)


def ends_of(kernels: list[list[int]], transfers: list[int]) -> tuple[list[list[int]], list[int]]:
    """When each rank arrives at each collective, and when it ends: after a kernel each, and after the one before."""
    arrivals: list[list[int]] = [[] for _ in kernels]
    ends: list[int] = []
    for index, transfer in enumerate(transfers):
        for own, lengths in zip(arrivals, kernels, strict=True):
            own.append(max([sum(lengths[: index + 1]), *ends[-1:]]))
        ends.append(max(own[-1] for own in arrivals) + transfer)
    return arrivals, ends


@pytest.mark.slow
@examples(60)
@given(RANKS)
def test_no_rank_goes_on_from_a_free_collective_before_all_have_arrived(
    drawn: tuple[list[list[int]], list[int]],
) -> None:
    kernels, transfers = drawn
    arrivals, ends = ends_of(kernels, transfers)
    traces = []
    for number, (lengths, own) in enumerate(zip(kernels, arrivals, strict=True)):
        device = Device()
        for index, length in enumerate(lengths):
            device.launch(0, 7, length, is_collective=False)
            device.record(0, 7, 1)
            device.wait(0, 20, 1)
            device.launch(0, 20, ends[index] - own[index], is_collective=True)
        device.record(0, 20, 2)
        device.wait(0, 7, 2)
        device.launch(0, 7, 3, is_collective=False)
        trace = device.trace(has_step=True)
        traces.append(
            replace(trace, path=Path(f"rank{number}.sqlite"), ranks={PID: number}, world_size=len(kernels), epoch_ns=0)
        )
    told = {one.index: one.gain_ns for one in path_of(*traces).collectives}
    for index in range(len(transfers)):
        free = [0 if each == index else transfer for each, transfer in enumerate(transfers)]
        assert told.get(index, 0) == ends[-1] - ends_of(kernels, free)[1][-1]


def test_the_path_goes_through_a_wait_of_autograd_before_what_the_main_thread_launches() -> None:
    """As where DDP copies the vote on unused parameters to the host: 94 % of a step was said to be the host."""
    trace = draw_trace(
        ranges={"step 0": "#" * 20, "backward": "..###########......."},
        launches={"main": "a.............d.....", "pt_autograd_0": "..b................."},
        streams={7: ".aaaabbbbbbbb..ddd.."},
    )
    wait = {
        **dict.fromkeys(Synchronizations.__dataclass_fields__, UNKNOWN),
        "kind": SyncKind.HOST_WAIT_DEVICE, "start_ns": 3, "end_ns": 13, "process": PID, "thread": MAIN + 2,
        "correlation": ord("c"), "device": 0,
    }  # fmt: skip
    waits = table(Synchronizations, [wait])
    path = path_of(replace(trace, synchronizations=waits, sync_source="cuda_events"))
    assert path.parts_ns == dict.fromkeys(path.parts_ns, 0) | {"compute": 4 + 8 + 3, "host": 1, "launch": 1}


@pytest.mark.parametrize("is_lost", [False, True])
def test_where_memory_sets_were_lost_nothing_is_said_to_wait_for_what_ran_before(is_lost: bool, tmp_path: Path) -> None:
    """A set runs before each all-reduce, while the host launches on: the device seemed to wait for these launches.

    Copies were 0, and the copy of the gradients stood still since its launch, not since the end of the set.

    us         0         10        20        30        40
    stream 7   .gg--------------------..........kkk       -: the set
    stream 20  .......................AAAAAAAAAA
    launches   g-..................A
    """
    capture = Capture()
    for step in range(4):
        at, number, id_ = step * STEP_NS, 10 * step, 41 + 2 * step
        late = at + 20 * US
        capture.ranges.append(Range(f"step {step}", at, at + STEP_NS, 100))
        capture.kernels += [
            Kernel("gradient", at + 1 * US, at + 3 * US, at, 100, number=number + 1),
            Kernel("set", at + 3 * US, at + 23 * US, at + 50, 100, kind="memset", number=number + 2),
            Kernel(NCCL, at + 23 * US, at + 33 * US, late + 200, 100, stream=20, number=number + 5),
            Kernel("copy", at + 34 * US, at + 37 * US, late + 500, 100, kind="memcpy", number=number + 8),
        ]
        capture.syncs += [
            Sync("cudaMemsetAsync_v3020", at + 50, number + 2, 7),
            Sync("cudaEventRecord_v3020", late, number + 3, 7, event=5, sync_id=id_),
            Sync("cudaStreamWaitEvent_v3020", late + 100, number + 4, 20, event=5, sync_id=id_),
            Sync("cudaEventRecord_v3020", late + 300, number + 6, 20, event=5, sync_id=id_ + 1),
            Sync("cudaStreamWaitEvent_v3020", late + 400, number + 7, 7, event=5, sync_id=id_ + 1),
            Sync("cudaDeviceSynchronize_v3020", late + 600, number + 9, 4294967295, lasts=17 * US - 600),
        ]
    capture.kernels = [one for one in capture.kernels if not is_lost or one.kind != "memset"]
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", capture))
    copies = [path.parts_ns["copies"] for path in run.critical().steps]
    blocking = [step.blocking_ns for rank in run.overlap().ranks for step in rank.steps]
    assert (copies, blocking) == (([], [None] * 4) if is_lost else ([23 * US] * 4, [10 * US] * 4))
    assert run.critical().reason == (NO_SETS if is_lost else None)
    assert not [one for one in run.doctor().findings if one.rule == "launch-bound host"]
