"""How long a host, or a rank's streams, stood still for communication, by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.core.attribution import Events
from ddp_prof.analyze.core.blocking import (
    NEEDS_LOST,
    NO_CONSUMER,
    NO_COPIES,
    NO_LAUNCHES,
    NO_NEEDS,
    host_blocking,
)
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.critical.critical_path import find_rank_work
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, Category, Synchronizations, SyncKind
from tests.drawing import MAIN, PID, draw_trace, instants, picture_of, runs, table
from tests.nsys_factory import STEP_NS, US, Kernel, Range, Sync, bucket_steps, write_capture


def collectives(*pictures: str) -> Events:
    """One per picture, in the step of its number."""
    rows = [
        {
            **dict.fromkeys(Events.__dataclass_fields__, UNKNOWN),
            "start_ns": start, "end_ns": end, "category": Category.COMMUNICATION, "step": int(character),
        }
        for picture in pictures
        for character, start, end in runs(picture)
    ]  # fmt: skip
    return table(Events, rows)  # type: ignore[return-value]


def test_a_host_stands_still_while_it_waits_and_a_collective_is_in_flight() -> None:
    events = collectives(
        "..00000..111..",
        "....0000......",
    )
    found = host_blocking(instants("....######.##."), 2, events, 2)
    #                       still    ^^^^.^.^
    assert found.by_step_ns.tolist() == [4, 2]
    assert found.total_ns == 6
    assert found.coverage.source == "host"
    latest = int(np.flatnonzero(events.end_ns == 8)[0])
    assert found.stretches.collective.tolist() == [latest, 1, 1]


def test_a_host_that_never_waits_stood_still_for_nothing() -> None:
    found = host_blocking(instants(".............."), 0, collectives("..00000..111.."), 2)
    assert (found.total_ns, found.by_step_ns.tolist()) == (0, [0, 0])


def test_a_host_that_waits_for_nothing_in_flight_does_not_stand_still_for_communication() -> None:
    found = host_blocking(instants("..######......"), 1, collectives(".........000.."), 1)
    assert found.total_ns == 0


LOST = "the trace does not tell the launch of 1 of the device's operations"


@pytest.mark.parametrize(
    ("other", "told"), [("........", (None, 3)), ("......d.", (LOST, None))], ids=["all are known", "one is not"]
)
def test_what_is_not_known_for_the_sake_of_a_launch_says_so(other: str, told: tuple[str | None, int | None]) -> None:
    """No wait is needed where a collective is on the stream of compute: what needs it follows there."""
    drawn = draw_trace(ranges={"step 0": "########"}, launches={"main": "aBc....."}, streams={7: ".aaBBBcc", 8: other})
    (rank,) = find_rank_events(drawn)
    assert (rank.blocking.coverage.reason, rank.blocking.total_ns) == told


def drawn_limit(
    *, launches: str, compute: str, comm: str = "", copies: str = "", host: str = ".............W", gloo: str = ""
) -> str | None:
    """When communication may block; ``W`` is a call of CUDA in which the host waits, ``M`` one that copies."""
    kinds = {"W": SyncKind.HOST_WAIT_DEVICE, "M": SyncKind.COPY}
    calls = [
        {
            **dict.fromkeys(Synchronizations.__dataclass_fields__, UNKNOWN),
            "kind": kinds[character], "start_ns": start, "end_ns": end, "process": PID, "thread": MAIN,
        }
        for character, start, end in runs(host)
    ]  # fmt: skip
    ranges = {"step 0": "#" * 14} | ({"gloo:all_reduce": gloo} if gloo else {})
    trace = draw_trace(ranges=ranges, launches={"main": launches}, streams={7: compute, 20: comm, 30: copies})
    trace = replace(trace, synchronizations=table(Synchronizations, calls), sync_reason="not recorded")
    (rank,) = find_rank_events(trace)
    return None if rank.may_block is None else picture_of(rank.may_block, 14)


def test_communication_may_block_while_launched_work_waits_on_an_idle_stream() -> None:
    computes, comm = ".aaa......ccc.", "..BBBBBBBB...."
    assert drawn_limit(launches="aB....c.......", compute=computes, comm=comm) == "......####...."
    # The host launches late, so that nothing waits.
    assert drawn_limit(launches="aB........c...", compute=computes, comm=comm) == ".............."
    # Work that was launched early waits first for the kernel before it, which is not communication.
    assert drawn_limit(launches="acB...........", compute=computes, comm=comm) == "....######...."
    # A stream that only copies does not count.
    found = drawn_limit(launches="aB5.....c.....", compute=".aaaaaaaaaacc.", comm=comm, copies="..........555.")
    assert found == ".............."
    assert (
        drawn_limit(launches="aB........c...", compute=computes, comm=comm, host="....WW.......W") == "....##........"
    )


def test_what_was_launched_before_the_recording_may_have_waited_since_the_work_before_it() -> None:
    """One such copy, and no upper limit was known of any step."""
    launches, comm = "aB....c.......", "..BBBBBBBB...."
    assert drawn_limit(launches=launches, compute="5aaa......ccc.", comm=comm) == "......####...."
    assert drawn_limit(launches=launches, compute=".aaa......55c.", comm=comm) == "....######...."


def test_where_launches_copies_or_waits_of_the_host_are_missing_it_is_not_known_when_communication_may_block() -> None:
    pictures = {"launches": "aB....c.......", "compute": ".aaa......ccc.", "comm": "..BBBBBBBB...."}
    assert drawn_limit(**pictures) is not None
    assert drawn_limit(**{**pictures, "launches": "aB............"}) is None
    assert drawn_limit(**pictures, host="..............") is None
    assert drawn_limit(**pictures, host="...........M.W") is None, "a copy was asked for, and none is recorded"
    assert drawn_limit(**{**pictures, "launches": "aB....c..5...."}, copies="..........55..", host="...........M.W")


def test_where_the_host_communicates_cuda_does_not_record_for_what_it_waits() -> None:
    """Nothing was said to wait for 2.55 ms of a step that gloo exposed; the optimizer was launched when it ended."""
    assert drawn_limit(launches="a.........c...", compute=".aaa......ccc.", gloo="..########....") is None


@pytest.mark.parametrize("is_recorded", [True, False])
def test_without_the_copies_that_were_called_for_nothing_is_known_of_waits(is_recorded: bool, tmp_path: Path) -> None:
    """The host waited for copies: nearly all of such steps was said to be launch-bound, and an optimizer to wait."""
    capture = bucket_steps(20, 20, 20)
    copies = [one for one in capture.kernels if one.kind == "memcpy"]
    capture.syncs += [Sync("cudaMemcpyAsync_v3020", one.launch, one.number, 7) for one in copies]
    capture.kernels = [replace(one, launch=None) if one in copies else one for one in capture.kernels]
    if not is_recorded:
        capture.kernels = [one for one in capture.kernels if one.kind == "kernel"]
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture))
    (rank,) = find_rank_events(trace)
    reason = None if is_recorded else NO_COPIES
    assert (rank.blocking.coverage.reason, find_rank_work(rank).reason) == (reason, reason)


@pytest.mark.parametrize(("steps", "counted"), [((1,), [0, 2]), ((0, 1, 2), [0, 1, 2])])
def test_memory_sets_that_were_lost_are_not_said_to_take_no_time(
    steps: tuple[int, ...], counted: list[int], tmp_path: Path
) -> None:
    """Their calls were recorded: exposed memory was too small, and the device idle."""
    capture = bucket_steps(20, 20, 20)
    for step in range(3):
        number, at = 10 * (step + 1), (step + 1) * STEP_NS - 5 * US
        capture.syncs.append(Sync("cudaMemsetAsync_v3020", at, number, 7))
        if step not in steps:
            capture.kernels.append(Kernel("set", at + US, at + 2 * US, None, 100, kind="memset", number=number))
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture))
    (rank,) = measure_overlap(trace).ranks
    assert [step.step for step in rank.steps] == counted
    assert all((step.idle_ns is None) is (len(counted) == 3) for step in rank.steps)


def test_without_the_launch_of_a_collective_it_is_not_known_what_it_held_up(tmp_path: Path) -> None:
    """All that it held up seemed to stand still for nothing."""
    capture = bucket_steps(20, 20, 20)
    capture.kernels = [replace(one, launch=None) if "nccl" in one.name else one for one in capture.kernels]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert (rank.blocking.coverage.reason, rank.blocking.by_step_ns.max()) == (NO_LAUNCHES, UNKNOWN)


def test_nothing_is_said_to_have_waited_for_none_of_what_was_launched_before_the_recording(tmp_path: Path) -> None:
    """The recording begins while the device runs what the first of four steps launched, and waited for."""
    capture = bucket_steps(20, 20, 20, 20)
    capture.kernels = [replace(one, launch=None if one.start < STEP_NS else one.launch) for one in capture.kernels]
    capture.syncs = [one for one in capture.syncs if one.at >= STEP_NS]
    (rank,) = find_rank_events(
        load_trace(write_capture(tmp_path / "x.sqlite", replace(capture, ranges=capture.ranges[1:])))
    )
    collectives = rank.blocking.by_event_ns[rank.events.category == Category.COMMUNICATION]
    assert collectives.tolist() == [UNKNOWN, 10 * US, 10 * US, 10 * US], "the first one's was 0"
    assert (rank.blocking.by_step_ns.tolist(), rank.blocking.total_ns) == ([10 * US] * 3, None)


def test_where_nothing_waits_for_any_collective_no_wait_is_said_to_be_lost(tmp_path: Path) -> None:
    """Streams wait for gradients alone, and the host for nothing."""
    capture = bucket_steps(20, 20)
    capture.syncs = [one for one in capture.syncs if one.at % STEP_NS < 500]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert (rank.blocking.coverage.reason, rank.blocking.by_step_ns.tolist()) == (NO_NEEDS, [UNKNOWN, UNKNOWN])


@pytest.mark.parametrize("lost", ["cudaStreamWaitEvent", "cudaEventRecord", "cuda"])
def test_a_step_without_its_waits_is_not_said_to_stand_still_for_nothing(lost: str, tmp_path: Path) -> None:
    """Calls that wait and record were lost in step 2 alone: its collective seemed to be needed by nothing."""
    capture = bucket_steps(20, 20, 20, 20)
    capture.syncs = [one for one in capture.syncs if one.at // STEP_NS != 2 or not one.call.startswith(lost)]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_step_ns.tolist() == [10 * US, 10 * US, UNKNOWN, 10 * US]
    assert rank.blocking.coverage.reason == NEEDS_LOST


@pytest.mark.parametrize(
    ("lost", "still"),
    [
        ([], [20 * US, 20 * US, 20 * US]),
        ([(1, 0, 600)], [20 * US, UNKNOWN, 20 * US]),  # of what needs its first collective
        ([(1, 1, 200)], [20 * US, UNKNOWN, 20 * US]),  # of its second collective, for the gradient
        ([(0, 0, 600), (1, 0, 600), (2, 1, 600)], [UNKNOWN, UNKNOWN, UNKNOWN]),  # one is left of two
        ([(0, 0, 600), (1, 0, 600), (2, 0, 600)], [10 * US, 10 * US, 10 * US]),  # nothing needs it in any step
    ],
)
def test_nor_is_one_that_lost_waits_for_some_of_its_collectives(
    lost: list[tuple[int, int, int]], still: list[int], tmp_path: Path
) -> None:
    """Two collectives a step: what stood still for the one whose wait was lost was taken to stand still for nothing."""
    capture = bucket_steps(*[20] * 6)
    capture.ranges = [Range(f"step {step}", 2 * step * STEP_NS, 2 * (step + 1) * STEP_NS, 100) for step in range(3)]
    gone = [(2 * step + which) * STEP_NS + at for step, which, at in lost]
    capture.syncs = [one for one in capture.syncs if one.at not in gone]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_step_ns.tolist() == still
    assert rank.blocking.coverage.reason == (NEEDS_LOST if UNKNOWN in still else None)
    # In a step that lost a wait, others may be lost, too: what needs its other collective may have waited for those.
    is_unknown = rank.blocking.by_event_ns[rank.is_collective] == UNKNOWN
    assert is_unknown.tolist() == [length == UNKNOWN for length in still for _ in range(2)]


def test_where_the_launches_of_all_that_needs_collectives_are_lost_none_is_said_to_be_needed_by_nothing(
    tmp_path: Path,
) -> None:
    """With the calls of a thread, the waits for every second collective were lost: nothing stood still for these."""
    capture = bucket_steps(*[20] * 6)
    capture.ranges = [Range(f"step {step}", 2 * step * STEP_NS, 2 * (step + 1) * STEP_NS, 100) for step in range(3)]
    for kernel in capture.kernels:
        kernel.launch = None if kernel.name == "copy back" else kernel.launch
    capture.syncs = [one for one in capture.syncs if one.at % (2 * STEP_NS) != STEP_NS + 600]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_event_ns[rank.is_collective].tolist() == [UNKNOWN] * 6
    assert rank.blocking.coverage.reason == NO_CONSUMER


@pytest.mark.parametrize(("has_calls", "still"), [(True, [10 * US, 0, 0, 0]), (False, [10 * US, *[UNKNOWN] * 3])])
def test_steps_with_all_calls_whose_waits_are_for_other_work_have_lost_none(
    has_calls: bool, still: list[int], tmp_path: Path
) -> None:
    """All waits are for events of step 0, as those that are recorded again have no row; or their calls were lost."""
    capture = bucket_steps(*[20] * 4)
    capture.syncs = [
        replace(one, sync_id=4294967295, has_row=one.at < STEP_NS or "Record" not in one.call)
        for one in capture.syncs
        if has_calls or one.at < STEP_NS or "Record" not in one.call
    ]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_step_ns.tolist() == still


@pytest.mark.parametrize(
    ("stream", "warmup", "still"),
    [
        (7, 0, [UNKNOWN, UNKNOWN, 10 * US]),
        (7, 1, [10 * US, 10 * US]),
        (30, 0, [10 * US, 10 * US, 10 * US]),  # a stream without work
        (31, 0, [10 * US, 10 * US, 10 * US]),  # a stream that only sets memory
        (None, 1, [UNKNOWN, 10 * US]),  # it may be a stream of the next step
    ],
)
def test_a_wait_for_what_is_not_known_makes_its_step_and_the_next_one_unknown(
    stream: int | None, warmup: int, still: list[int], tmp_path: Path
) -> None:
    """Unless the work that it delays is of no step that counts."""
    capture = bucket_steps(20, 20, 20)
    capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 650, 8, 7, event=77))
    capture.kernels[3].number = 9
    capture.kernels.append(Kernel("memset", 2 * US, 3 * US, 750, 100, stream=31, kind="memset", number=10))
    capture.syncs[-1].stream, capture.syncs[-1].has_row = stream or 0, stream is not None
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)), warmup_steps=warmup)
    assert rank.blocking.by_step_ns.tolist() == still
    assert (rank.blocking.coverage.reason is None) == (UNKNOWN not in still)


@pytest.mark.parametrize(("at", "still"), [(650, [10 * US] * 3), (750, [10 * US, UNKNOWN, 10 * US])])
def test_of_such_a_wait_between_two_steps_the_step_is_unknown_in_which_the_work_is(
    at: int, still: list[int], tmp_path: Path
) -> None:
    """The wait is before the copy of step 0, which is after its range, or before the gradient of step 1."""
    capture = bucket_steps(20, 20, 20)
    capture.ranges[0].end = 625
    capture.kernels[3].number = 9
    del capture.syncs[4]  # else it waits for nothing
    capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", at, 8 if at < 700 else 10, 7, event=77))
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_step_ns.tolist() == still


def test_what_the_first_collective_of_a_recording_waits_for_may_have_been_launched_before(tmp_path: Path) -> None:
    """Its wait was said to be lost."""
    capture = bucket_steps(*[20] * 4)
    capture.kernels = [kernel for kernel in capture.kernels if kernel.number != 1]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_step_ns.tolist() == [10 * US, 10 * US, 10 * US, 10 * US]
    assert rank.blocking.coverage.reason is None


@pytest.mark.parametrize(
    ("step_ns", "until_ns", "still"),
    [
        (550, 550, 0),  # it is waited for in the next step, which was not recorded
        (550, 650, 0),  # the wait was, and not what follows it
        (STEP_NS, 650, 0),
        (STEP_NS, 550, UNKNOWN),  # others are waited for in their step
    ],
)
def test_what_needs_the_last_collective_may_come_behind_the_recording(
    step_ns: int, until_ns: int, still: int, tmp_path: Path
) -> None:
    """Its wait was said to be lost."""
    capture = bucket_steps(*[20] * 4)
    capture.ranges = [Range(f"step {step}", step * STEP_NS, step * STEP_NS + step_ns, 100) for step in range(4)]
    last_ns = 3 * STEP_NS + until_ns
    capture.kernels = [kernel for kernel in capture.kernels if kernel.launch is not None and kernel.launch < last_ns]
    capture.syncs = [sync for sync in capture.syncs if sync.at < last_ns]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_step_ns.tolist() == [10 * US, 10 * US, 10 * US, still]
    assert rank.blocking.coverage.reason == (NEEDS_LOST if still == UNKNOWN else None)


def test_nor_is_the_last_step_where_a_stream_without_work_waits_in_each_step(tmp_path: Path) -> None:
    """Its wait seemed to be for what comes behind the recording, and the lost one not to be lost."""
    capture = bucket_steps(*[20] * 3)
    for step in range(3):
        at, number = step * STEP_NS + 900, 10 * step + 10
        capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", at, number, 30, event=5, sync_id=42 + 2 * step))
    capture.syncs = [one for one in capture.syncs if one.at != 2 * STEP_NS + 600]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.blocking.by_step_ns.tolist() == [10 * US, 10 * US, UNKNOWN]
