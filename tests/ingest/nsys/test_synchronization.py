"""Who waited for whom, from the tables of several releases: told by names of calls, whatever ``syncType`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.core.rank_events import find_rank_events
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, SyncKind, Trace
from tests.nsys_factory import Capture, Kernel, Sync, write_capture

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
US = 1_000


def one_bucket(**settings: bool) -> Capture:
    """A gradient, an all-reduce that waits for it, compute that goes on, a copy that needs the all-reduce.

    us         0         10        20        30
    stream 7   gggggcccccccccc..........kkk        stands still for 10 us
    stream 20  .....AAAAAAAAAAAAAAAAAAAA
    """
    capture = Capture(**settings)
    rows = [
        Kernel("gradient", 1 * US, 5 * US, 0, 100, number=1),
        Sync("cudaEventRecord_v3020", 100, 2, 7, event=5, sync_id=41),
        Sync("cudaStreamWaitEvent_v3020", 200, 3, 20, event=5, sync_id=41),
        Kernel(NCCL, 5 * US, 25 * US, 300, 100, stream=20, number=4),
        Sync("cudaEventRecordWithFlags_v11010", 400, 5, 20, event=5, sync_id=42),
        Kernel("other", 5 * US, 15 * US, 500, 100, number=6),
        Sync("cudaStreamWaitEvent_v3020_ptsz", 600, 7, 7, event=5, sync_id=42),
        Kernel("copy back", 25 * US + 1, 28 * US, 700, 100, kind="memcpy", number=8),
        Sync("cudaDeviceSynchronize_v3020", 800, 9, 4294967295),
    ]
    capture.kernels = [row for row in rows if isinstance(row, Kernel)]
    capture.syncs = [row for row in rows if isinstance(row, Sync)]
    return capture


def read(tmp_path: Path, capture: Capture, product: str = "2023.4") -> Trace:
    return load_trace(write_capture(tmp_path / "x.sqlite", capture, product))


@pytest.mark.parametrize("sync_type", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("product", ["2020.3", "2022.2", "2023.4", "2024.6", "2025.3", "2026.2"])
def test_waits_are_told_by_the_names_of_their_calls(tmp_path: Path, product: str, sync_type: int) -> None:
    capture = one_bucket()
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
    trace = read(tmp_path, one_bucket(has_event_records=False), "2026.2")
    (rank,) = find_rank_events(trace)
    assert rank.blocking.coverage.source == "event_sync_ids"
    assert rank.blocking.total_ns == 10 * US


def test_numbers_that_follow_no_law_tell_nothing(tmp_path: Path) -> None:
    capture = one_bucket(has_event_records=False)
    for index in range(5):
        capture.syncs.insert(0, Sync("cudaStreamWaitEvent_v3020", 10 + index, 100 + index, 7, sync_id=900 + 7 * index))
    (rank,) = find_rank_events(read(tmp_path, capture, "2026.2"))
    assert rank.blocking.coverage.source == "none"
    assert rank.blocking.total_ns is None
    assert "--cuda-event-trace" in str(rank.blocking.coverage.reason)


def test_without_either_nothing_is_said(tmp_path: Path) -> None:
    (rank,) = find_rank_events(read(tmp_path, one_bucket(has_event_records=False), "2024.6"))
    coverage = rank.blocking.coverage
    assert (coverage.source, coverage.waits, coverage.resolved) == ("none", 2, 0)
    assert rank.blocking.total_ns is None
    assert "--cuda-event-trace" in str(coverage.reason)


def test_an_event_of_another_process_is_not_waited_for(tmp_path: Path) -> None:
    capture = one_bucket()
    capture.syncs.append(Sync("cudaEventRecord_v3020", 590, 6, 7, event=5, process=200))
    trace = read(tmp_path, capture)
    waits = trace.synchronizations.kind == SyncKind.STREAM_WAIT
    records = trace.synchronizations.awaits[waits]
    assert UNKNOWN not in records
    assert set(trace.synchronizations.process[records]) == {100}


def test_a_device_that_only_the_table_of_waits_gives_otherwise_does_not_matter(tmp_path: Path) -> None:
    capture = one_bucket()
    for sync in capture.syncs:
        sync.device = 1
    (rank,) = find_rank_events(read(tmp_path, capture))
    assert rank.blocking.total_ns == 10 * US


def test_a_wait_of_unknown_record_leaves_blocking_unknown(tmp_path: Path) -> None:
    capture = one_bucket()
    capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 150, 10, 7, event=77))
    (rank,) = find_rank_events(read(tmp_path, capture))
    assert rank.blocking.total_ns is None
    assert str(rank.blocking.coverage.reason).startswith("of 1 of 3 stream waits")
