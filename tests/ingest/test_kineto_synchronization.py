"""Who waited for whom, as torch.profiler writes it with ``enable_cuda_sync_events``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ddp_prof.analyze.core.blocking import RankBlocking
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, SyncKind
from tests.ingest.test_kineto_json import event, write


def launch(number: int, at: float, name: str = "cudaLaunchKernel") -> str:
    return event("cuda_runtime", name, str(at), "0.1", correlation=number)


def kernel(name: str, number: int, stream: int, start: float, length: float) -> str:
    return event("kernel", name, str(start), str(length), tid=stream, device=0, stream=stream, correlation=number)


def wait(number: int, stream: int, on: int, record: int, **more: Any) -> str:
    return event(
        "cuda_sync", "Stream Wait Event", "1", "0.1", tid=stream, cuda_sync_kind="Stream Wait Event", stream=stream,
        correlation=number, device=0, context=1, wait_on_stream=on, wait_on_cuda_event_record_corr_id=record,
        wait_on_cuda_event_id=5, **more,
    )  # fmt: skip


def one_bucket(*waits: str) -> list[str]:
    """stream 7 stands still from 15 to 25 us for the all-reduce on stream 20."""
    return [
        *(launch(number, number / 10) for number in (1, 4, 6, 8)),
        kernel("gradient", 1, 7, 1, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4, 20, 5, 20),
        kernel("other", 6, 7, 5, 10),
        kernel("copy", 8, 7, 25, 3),
        *(launch(number, number / 10, "cudaStreamWaitEvent") for number in (3, 7)),
        *waits,
    ]


def blocking(tmp_path: Path, *waits: str) -> RankBlocking:
    (rank,) = find_rank_events(load_trace(write(tmp_path / "x.json", one_bucket(*waits))))
    return rank.blocking


def test_waits_name_their_records(tmp_path: Path) -> None:
    found = blocking(tmp_path, wait(3, 20, 7, 2), wait(7, 7, 20, 5))
    assert (found.coverage.source, found.coverage.waits, found.coverage.resolved) == ("kineto", 2, 2)
    assert found.total_ns == 10_000


def test_what_needs_a_collective_within_a_graph_is_not_known(tmp_path: Path) -> None:
    """0 ns were said: no wait of a stream is recorded within a graph, and those around it are all known."""
    graph = [
        launch(9, 40, "cudaGraphLaunch"),
        kernel("gradient", 9, 7, 41, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 9, 20, 45, 20),
        kernel("copy", 9, 7, 65, 3),
    ]
    events = [*one_bucket(wait(3, 20, 7, 2), wait(7, 7, 20, 5)), *graph]
    (rank,) = find_rank_events(load_trace(write(tmp_path / "x.json", events)))
    assert rank.blocking.total_ns is None
    assert rank.blocking.coverage.reason == "what needs a collective within a CUDA graph is not recorded"
    assert rank.blocking.by_event_ns[rank.is_collective].tolist() == [10_000, UNKNOWN]


def test_a_wait_without_its_record_leaves_blocking_unknown(tmp_path: Path) -> None:
    found = blocking(tmp_path, wait(3, 20, 7, 2), wait(7, 7, -1, -1))
    assert (found.coverage.waits, found.coverage.resolved) == (2, 1)
    assert found.total_ns is None


def test_a_wait_that_is_known_by_its_call_alone_counts_as_unresolved(tmp_path: Path) -> None:
    found = blocking(tmp_path, wait(3, 20, 7, 2))
    assert (found.coverage.waits, found.coverage.resolved) == (2, 1)
    assert found.total_ns is None


def test_without_synchronizations_it_says_how_to_record_them(tmp_path: Path) -> None:
    found = blocking(tmp_path)
    assert (found.coverage.source, found.coverage.waits, found.total_ns) == ("none", 2, None)
    assert "enable_cuda_sync_events" in str(found.coverage.reason)


def test_on_rocm_it_does_not_tell_to_record_what_torch_profiler_records_on_cuda_only(tmp_path: Path) -> None:
    events = [text.replace('"cuda', '"hip').replace('"hip_runtime"', '"cuda_runtime"') for text in one_bucket()]
    (rank,) = find_rank_events(load_trace(write(tmp_path / "x.json", events)))
    assert rank.blocking.coverage.reason == "synchronizations were not recorded, which torch.profiler does on CUDA only"


def test_ids_that_stay_unresolved_are_said_to_be_those_of_new_cuda(tmp_path: Path) -> None:
    found = blocking(tmp_path, wait(3, 20, -1, -1), wait(7, 7, -1, -1))
    assert found.total_ns is None
    assert "CUDA 12.9" in str(found.coverage.reason)


def with_records(*numbers: int) -> list[str]:
    return [launch(number, number / 10, "cudaEventRecordWithFlags") for number in numbers]


def test_waits_without_ids_are_told_by_the_order_of_calls(tmp_path: Path) -> None:
    """As with CUDA 12.9: waits lack the ids of their records, of which only the calls are recorded."""
    found = blocking(tmp_path, *with_records(2, 5), wait(3, 20, -1, -1), wait(7, 7, -1, -1))
    assert (found.coverage.source, found.coverage.waits, found.coverage.resolved) == ("call_order", 2, 2)
    assert found.coverage.reason is None
    assert found.total_ns == 10_000


def test_a_wait_right_after_a_record_whose_stream_is_not_told_is_of_a_stream_without_work(tmp_path: Path) -> None:
    """torch.profiler leaves out the waits of streams without work, on which NCCL makes one for each collective."""
    lines = one_bucket(*with_records(2), wait(3, 20, -1, -1), wait(7, 7, -1, -1))
    lines += [event("cuda_runtime", "cudaEventRecord", "0.45", "0.01", correlation=45)]
    lines += [event("cuda_runtime", "cudaStreamWaitEvent", "0.46", "0.01", correlation=46)]
    for old, new in ((6, 60), (7, 70), (8, 80)):
        lines = [re.sub(rf'"correlation": ?{old}\b', f'"correlation": {new}', line) for line in lines]
    (rank,) = find_rank_events(load_trace(write(tmp_path / "x.json", lines)))
    coverage = rank.blocking.coverage
    assert (coverage.source, coverage.waits, coverage.resolved) == ("call_order", 3, 3)
    assert rank.blocking.total_ns == 10_000


def test_waits_of_the_host_are_known_by_their_calls(tmp_path: Path) -> None:
    """Without recorded synchronizations, they tell at least that the host waited."""
    names = (
        "cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "hipDeviceSynchronize",
        "musaDeviceSynchronize",
    )  # fmt: skip
    calls = [launch(20 + number, 30 + number, name) for number, name in enumerate((*names, "cudaEventQuery"))]
    trace = load_trace(write(tmp_path / "x.json", [*one_bucket(), *calls]))
    waits = trace.synchronizations.kind != SyncKind.STREAM_WAIT
    assert trace.synchronizations.kind[waits].tolist() == [
        SyncKind.HOST_WAIT_EVENT, SyncKind.HOST_WAIT_STREAM, SyncKind.HOST_WAIT_DEVICE, SyncKind.HOST_WAIT_DEVICE,
        SyncKind.HOST_WAIT_DEVICE,
    ]  # fmt: skip
    assert trace.synchronizations.start_ns[waits].tolist() == [30_000, 31_000, 32_000, 33_000, 34_000]
    (rank,) = find_rank_events(trace)
    assert rank.blocking.total_ns is None
    assert rank.may_block is not None
