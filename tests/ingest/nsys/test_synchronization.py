"""Who waited for whom, from the tables of several releases: told by names of calls, whatever ``syncType`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.core.rank_events import find_rank_events
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, SyncKind, Trace
from tests.nsys_factory import US, Capture, Sync, bucket_steps, write_capture


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


def test_a_wait_of_unknown_record_leaves_blocking_unknown(tmp_path: Path) -> None:
    capture = bucket_steps(20)
    capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 150, 10, 7, event=77))
    (rank,) = find_rank_events(read(tmp_path, capture))
    assert rank.blocking.total_ns is None
    assert str(rank.blocking.coverage.reason).startswith("of 1 of 3 stream waits")
