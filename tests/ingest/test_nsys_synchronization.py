"""Who waited for whom, from the tables of several releases: told by names of calls, whatever ``syncType`` says."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, SyncKind, Trace
from tests.command_line import run
from tests.nsys_factory import US, Capture, Kernel, Range, Sync, bucket_steps, write_capture


def read(tmp_path: Path, capture: Capture, product: str = "2023.4") -> Trace:
    return load_trace(write_capture(tmp_path / "x.sqlite", capture, product))


@pytest.mark.parametrize("sync_type", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("product", ["2020.3", "2022.2", "2023.4", "2024.6", "2025.3", "2026.2"])
def test_waits_are_told_by_the_names_of_their_calls(tmp_path: Path, product: str, sync_type: int) -> None:
    capture = bucket_steps(20)
    for sync in capture.syncs:
        sync.sync_type = sync_type
    trace = read(tmp_path, capture, product)
    (rank,) = find_rank_events(trace)
    coverage = rank.blocking.coverage
    assert (coverage.source, coverage.waits, coverage.resolved, coverage.violations) == ("cuda_events", 2, 2, 0)
    assert rank.blocking.total_ns == 10 * US
    assert sorted(trace.synchronizations.kind) == [
        *[SyncKind.RECORD] * 2, *[SyncKind.STREAM_WAIT] * 2, SyncKind.HOST_WAIT_DEVICE,
    ]  # fmt: skip


def test_without_event_records_the_numbers_of_records_tell(tmp_path: Path) -> None:
    trace = read(tmp_path, bucket_steps(20, has_event_records=False), "2026.2")
    (rank,) = find_rank_events(trace)
    assert rank.blocking.coverage.source == "event_sync_ids"
    assert rank.blocking.total_ns == 10 * US


def test_numbers_that_follow_no_law_tell_nothing(tmp_path: Path) -> None:
    capture = bucket_steps(20, has_event_records=False)
    for index in range(5):
        capture.syncs.insert(0, Sync("cudaStreamWaitEvent_v3020", 10 + index, 100 + index, 7, sync_id=900 + 7 * index))
    (rank,) = find_rank_events(read(tmp_path, capture, "2026.2"))
    assert rank.blocking.coverage.source == "none"
    assert rank.blocking.total_ns is None
    assert "--cuda-event-trace" in str(rank.blocking.coverage.reason)


def test_without_calls_it_is_not_said_that_nothing_waited(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", bucket_steps(20), "2024.6")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME")
        assert database.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION").fetchone() != (0,)
    assert load_trace(path).sync_reason == "no CUDA API calls were recorded"


def test_without_either_nothing_is_said(tmp_path: Path) -> None:
    (rank,) = find_rank_events(read(tmp_path, bucket_steps(20, has_event_records=False), "2024.6"))
    coverage = rank.blocking.coverage
    assert (coverage.source, coverage.waits, coverage.resolved) == ("none", 2, 0)
    assert rank.blocking.total_ns is None
    assert "--cuda-event-trace" in str(coverage.reason)


def test_an_event_of_another_process_is_not_waited_for(tmp_path: Path) -> None:
    capture = bucket_steps(20)
    capture.syncs.append(Sync("cudaEventRecord_v3020", 590, 6, 7, event=5, process=200))
    trace = read(tmp_path, capture)
    waits = trace.synchronizations.kind == SyncKind.STREAM_WAIT
    records = trace.synchronizations.awaits[waits]
    assert UNKNOWN not in records
    assert set(trace.synchronizations.process[records]) == {100}


def test_a_device_that_only_the_table_of_waits_gives_otherwise_does_not_matter(tmp_path: Path) -> None:
    capture = bucket_steps(20)
    for sync in capture.syncs:
        sync.device = 1
    (rank,) = find_rank_events(read(tmp_path, capture))
    assert rank.blocking.total_ns == 10 * US


def test_a_copy_that_another_device_needs_is_not_said_to_delay_nothing(tmp_path: Path) -> None:
    """'Nothing waits for it, hiding it gains nothing': in a pipeline of two devices of one process, device 1 does.

    us         0    10   20   30
    device 0   .FFFF     GGGGGGGGGG
    copy       ......CCCC                  from device 0 to 1, hidden by G
    device 1   ...............FFFF
    """
    steps = Capture()
    for step in range(3):
        at, first = 100 * US * step, 10 * step
        steps.ranges.append(Range(f"step {step}", at, at + 90 * US, 100))
        steps.kernels += [
            Kernel("forward", at + US, at + 5 * US, at, 100, number=first + 1),
            Kernel("copy", at + 6 * US, at + 16 * US, at + 300, 100, 100, 30, 0, "memcpy", 8, 10, number=first + 4),
            Kernel("forward of the next", at + 6 * US, at + 20 * US, at + 400, 100, number=first + 6),
            Kernel("forward", at + 17 * US, at + 25 * US, at + 600, 100, 100, 17, 1, number=first + 8),
        ]
        steps.syncs += [
            Sync("cudaEventRecord_v3020", at + 100, first + 2, 7, event=5),
            Sync("cudaStreamWaitEvent_v3020", at + 200, first + 3, 30, event=5),
            Sync("cudaEventRecord_v3020", at + 350, first + 5, 30, event=6),
            Sync("cudaStreamWaitEvent_v3020", at + 500, first + 7, 17, event=6, device=1),
        ]
    path = write_capture(tmp_path / "x.sqlite", steps)
    (told,) = json.loads(run("summary", "--format", "json", path).stdout)["runs"]
    assert (told["blocking_ns"], told["gain_at_most"]) == (None, None)
    assert "what needs a collective runs on another device of the process" in told["headline"]
    assert "gain" not in told["cause"]
    assert "on another device" in json.loads(run("critical", "--format", "json", path).stdout)["reason"]


def test_a_wait_of_unknown_record_leaves_blocking_unknown(tmp_path: Path) -> None:
    capture = bucket_steps(20)
    capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 150, 10, 7, event=77))
    (rank,) = find_rank_events(read(tmp_path, capture))
    assert rank.blocking.total_ns is None
    assert str(rank.blocking.coverage.reason).endswith("what 1 of 3 stream waits waited for")


ALL = ["2020.3", "2022.2", "2023.4", "2024.6", "2025.3", "2026.2"]
NOT_COLLECTED = 4294967295


def by_step(trace: Trace) -> dict[int, list[int]]:
    """Blocking of each step of each process, in us; ``UNKNOWN`` where it is not known."""
    return {
        rank.process: [ns if ns == UNKNOWN else ns // US for ns in rank.blocking.by_step_ns.tolist()]
        for rank in find_rank_events(trace)
    }


@pytest.mark.parametrize("product", ALL)
def test_an_event_is_used_again_and_again(tmp_path: Path, product: str) -> None:
    """Each step records the same event twice, on two streams: a wait is for the latest record before it."""
    assert by_step(read(tmp_path, bucket_steps(20, 4, 24, 14), product)) == {100: [10, 0, 14, 4]}


def test_numbers_of_records_begin_anywhere(tmp_path: Path) -> None:
    """The capture begins in the middle of a run; of waits for what was recorded before, nothing is known."""
    capture = bucket_steps(20, 4, 24, has_event_records=False)
    assert by_step(read(tmp_path, capture, "2026.2")) == {100: [10, 0, 14]}
    capture.syncs = [sync for sync in capture.syncs if not (sync.number < 7 and "Record" in sync.call)]
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "y.sqlite", capture, "2026.2")))
    assert rank.blocking.by_step_ns.tolist() == [UNKNOWN, UNKNOWN, 14 * US], "they may hold up the next step"
    coverage = rank.blocking.coverage
    assert (coverage.source, coverage.waits, coverage.resolved) == ("event_sync_ids", 6, 4)
    assert rank.blocking.total_ns is None


@pytest.mark.parametrize("has_event_records", [True, False])
def test_two_processes_with_the_same_numbers(tmp_path: Path, has_event_records: bool) -> None:
    capture, other = (bucket_steps(*lengths, has_event_records=has_event_records) for lengths in ((20, 4), (11, 30)))
    for row in (*other.kernels, *other.syncs, *other.ranges):
        row.process = row.thread = 200
    capture.kernels += other.kernels
    capture.syncs += other.syncs
    capture.ranges += other.ranges
    assert by_step(read(tmp_path, capture, "2026.2")) == {100: [10, 0], 200: [1, 20]}


@pytest.mark.parametrize(("product", "sync_type"), [("2025.3", 2), ("2026.2", 2), ("2024.6", 0)])
def test_numbers_that_were_not_collected_tell_nothing(tmp_path: Path, product: str, sync_type: int) -> None:
    """Exports of 2025 have the column, and 4294967295 in each row of it."""
    capture = bucket_steps(20, 4, has_event_records=False)
    for sync in capture.syncs:
        sync.sync_id, sync.sync_type = NOT_COLLECTED, sync_type
    trace = read(tmp_path, capture, product)
    assert by_step(trace) == {100: [UNKNOWN, UNKNOWN]}
    (rank,) = find_rank_events(trace)
    assert (rank.blocking.coverage.source, rank.blocking.coverage.waits) == ("none", 4)
    assert "--cuda-event-trace" in str(rank.blocking.coverage.reason)


def passed_on(*, between: bool, has_event_records: bool) -> Capture:
    """The copy waits for a stream without work, which waited for the all-reduce: as torch's process groups do."""
    capture = bucket_steps(20, has_event_records=has_event_records)
    capture.syncs = [sync for sync in capture.syncs if sync.number != 7]
    at = 510 if between else 410  # before or after another launch
    capture.syncs += [
        Sync("cudaStreamWaitEvent_v3020", 401, 50, 84, event=5, sync_id=42),
        Sync("cudaEventRecord_v3020", at, 52, 84, event=6, sync_id=43),
        Sync("cudaStreamWaitEvent_v3020", 520, 53, 7, event=6, sync_id=43),
    ]
    numbers = {6: 51 if between else 54, 8: 55, 9: 56}
    for row in (*capture.kernels, *capture.syncs):
        row.number = numbers.get(row.number or 0, row.number)
    return capture


@pytest.mark.parametrize("between", [False, True])
def test_a_stream_without_work_passes_waits_on(tmp_path: Path, between: bool) -> None:
    assert by_step(read(tmp_path, passed_on(between=between, has_event_records=True))) == {100: [10]}


def test_a_record_that_may_be_on_a_stream_without_work_leaves_blocking_unknown(tmp_path: Path) -> None:
    """Without event records its stream is that of its thread's last launch, unless another one was told to wait."""
    trace = read(tmp_path, passed_on(between=True, has_event_records=False), "2026.2")
    assert by_step(trace) == {100: [UNKNOWN]}
    (rank,) = find_rank_events(trace)
    assert rank.blocking.coverage.resolved == rank.blocking.coverage.waits - 1
    trace = load_trace(
        write_capture(tmp_path / "y.sqlite", passed_on(between=False, has_event_records=False), "2026.2")
    )
    assert by_step(trace) == {100: [10]}, "what it passes on, that stream's own work ends after"


WITH_FLAGS = "cudaEventRecordWithFlags_v11010"


def hides_records_with_flags(*lengths: int, number: int = NOT_COLLECTED) -> Capture:
    """Torch since 2.9 records its events by the call that releases before 2025 have no row for."""
    capture = bucket_steps(*lengths)
    for sync in capture.syncs:
        sync.has_row = sync.call != WITH_FLAGS
        sync.event = 5 if sync.number % 10 < 4 else 6
        sync.sync_id = sync.sync_id if number == 0 else number
    return capture


def test_records_without_a_row_are_told_by_the_order_of_calls(tmp_path: Path) -> None:
    trace = read(tmp_path, hides_records_with_flags(20, 4, 24))
    assert by_step(trace) == {100: [10, 0, 14]}
    (rank,) = find_rank_events(trace)
    coverage = rank.blocking.coverage
    assert (coverage.source, coverage.waits, coverage.resolved, coverage.reason) == ("call_order", 6, 6, None)
    waits = np.flatnonzero(trace.synchronizations.kind == SyncKind.STREAM_WAIT)
    record = trace.synchronizations.awaits[waits]
    assert trace.synchronizations.correlation[record].tolist() == [2, 5, 12, 15, 22, 25]
    assert trace.synchronizations.stream[record].tolist() == [7, 20] * 3


def test_numbers_of_records_are_preferred_to_the_order_of_calls(tmp_path: Path) -> None:
    """The numbers tell what the order of calls cannot: the second step waits for the first one's all-reduce, too."""
    capture = hides_records_with_flags(20, 4, number=0)
    capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 40 * US, 10, 7, event=6, sync_id=42))
    trace = read(tmp_path, capture, "2026.2")
    (rank,) = find_rank_events(trace)
    assert rank.blocking.coverage.source == "cuda_events"
    assert by_step(trace) == {100: [10, 0]}


def test_two_processes_do_not_take_each_others_records(tmp_path: Path) -> None:
    capture, other = hides_records_with_flags(20, 4), hides_records_with_flags(11, 30)
    for row in (*other.kernels, *other.syncs, *other.ranges):
        row.process = row.thread = 200
    capture.kernels += other.kernels
    capture.syncs += other.syncs
    capture.ranges += other.ranges
    assert by_step(read(tmp_path, capture)) == {100: [10, 0], 200: [1, 20]}


def test_more_waits_than_records_leave_blocking_unknown(tmp_path: Path) -> None:
    capture = hides_records_with_flags(20, 4)
    capture.syncs = [sync for sync in capture.syncs if sync.number != 5]  # of the first all-reduce
    trace = read(tmp_path, capture)
    assert by_step(trace) == {100: [UNKNOWN, UNKNOWN]}
    (rank,) = find_rank_events(trace)
    assert rank.blocking.coverage.reason == "the trace does not tell what 1 of 4 stream waits waited for"


def test_a_wait_for_an_event_that_was_never_recorded_waits_for_nothing(tmp_path: Path) -> None:
    """NCCL makes such waits while it starts; it is known that nothing was recorded if CUDA's start was."""
    capture = hides_records_with_flags(20, 4)
    capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 10, 1, 7, event=77))
    assert by_step(read(tmp_path, capture)) == {100: [UNKNOWN, UNKNOWN]}
    capture.syncs.append(Sync("cuInit", -1000, 0, 7, has_row=False))
    assert by_step(load_trace(write_capture(tmp_path / "y.sqlite", capture))) == {100: [10, 0]}


@pytest.mark.parametrize(("has_times", "event"), [(True, 6), (False, 6), (True, 5)])
def test_call_numbers_that_come_again_are_told_apart_by_time(has_times: bool, event: int, tmp_path: Path) -> None:
    """Twice the same, the second time 10 ms later and by the same numbers, of other streams; the first event is 5."""
    capture = bucket_steps(20)
    later = [
        Sync(sync.call, sync.at + 10_000 * US, sync.number, sync.stream + 50, event=event, sync_id=sync.sync_id + 2)
        for sync in capture.syncs
    ]
    capture.syncs = [*capture.syncs, *later]
    path = write_capture(tmp_path / "x.sqlite", capture, "2023.4")
    if not has_times:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION DROP COLUMN start")
    found = load_trace(path).synchronizations
    for row in range(len(found)):
        is_later = bool(found.start_ns[row] >= 10_000 * US)
        assert (found.stream[row] >= 50) == is_later or found.stream[row] == 4294967295
        if (record := found.awaits[row]) != UNKNOWN:
            assert (found.start_ns[record] >= 10_000 * US) == is_later
    assert sum(found.awaits != UNKNOWN) == 4
