"""Which kernels and copies are one operation: it is counted once, wherever it is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.inventory import take_inventory
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import Trace
from tests.measuring import collectives_of, results_of
from tests.nsys_factory import STEP_NS, US, Capture, Kernel, Range, Sync, bucket_steps, write_capture

DISPATCH, COMBINE = "void deep_ep::internode::dispatch<false>(...)", "void deep_ep::internode::combine<float>(...)"
NOTIFY, CACHED = "void deep_ep::internode::notify_dispatch<8>(...)", "void deep_ep::internode::cached_notify<true>(...)"
OTHER = "ncclDevKernel_AllGather_RING_LL(x)"

Work = tuple[str, int, int, int]


def captured(path: Path, *work: Work, ranges: tuple[Range, ...] = (), copy_kind: int = 10) -> Trace:
    """Work on streams, each a name (``copy`` for a copy), a stream, its start and its launch; it lasts 6 ns."""
    kernels = [
        Kernel(name, start, start + 6, launch, 100, stream=stream, copy_kind=copy_kind,
               kind="memcpy" if name == "copy" else "kernel", number=launch)
        for name, stream, start, launch in work
    ]  # fmt: skip
    steps = [Range("step 0", 0, 500, 100), Range("step 1", 500, 1000, 100)]
    return load_trace(write_capture(path / "x.sqlite", Capture(kernels, [*steps, *ranges])))


def operations(trace: Trace) -> list[tuple[int | None, int, str | None, int, int, int]]:
    """Step, number, operation, start, end and exposed time of each, after counting them everywhere."""
    results, overlap = results_of(trace), measure_overlap(trace)
    found = results.collectives
    (rank,) = overlap.ranks
    assert rank.collectives == sum(step.collectives for step in rank.steps) == len(found)
    assert [process.collectives for process in take_inventory(trace).processes] == [len(found)]
    for step in rank.steps:
        of_step = [one for one in found if one.step == step.step]
        assert [one.index for one in of_step] == list(range(step.collectives)), "numbered without holes"
        assert sum(one.exposed_ns for one in of_step) == step.exposed_ns
        assert sum(one.overlapped_ns for one in of_step) == step.overlapped_ns
    return [(one.step, one.index, one.op, one.start_ns, one.end_ns, one.exposed_ns) for one in found]


@pytest.mark.parametrize("prepares", [NOTIFY, CACHED])
def test_what_prepares_a_collective_is_a_part_of_it(prepares: str, tmp_path: Path) -> None:
    """The pause between them, in which the host reads how much will come, is no communication."""
    trace = captured(tmp_path, (prepares, 9, 20, 10), (DISPATCH, 9, 40, 30), (COMBINE, 9, 60, 50))
    assert operations(trace) == [(0, 0, "all_to_all", 20, 46, 12), (0, 1, "all_to_all", 60, 66, 6)]


def test_several_kernels_may_prepare_one(tmp_path: Path) -> None:
    trace = captured(tmp_path, (CACHED, 9, 20, 10), (NOTIFY, 9, 30, 11), (DISPATCH, 9, 40, 12))
    assert operations(trace) == [(0, 0, "all_to_all", 20, 46, 18)]


@pytest.mark.parametrize(
    "work",
    [
        [(DISPATCH, 9, 20, 10), (NOTIFY, 9, 40, 30)],
        [(NOTIFY, 9, 20, 10), (DISPATCH, 8, 40, 30)],
        [(NOTIFY, 9, 20, 10), (DISPATCH, 9, 540, 530)],
        [(NOTIFY, 9, 20, 10), (OTHER, 9, 40, 30)],
    ],
    ids=["nothing follows", "another stream", "another step", "no all-to-all"],
)
def test_what_prepares_nothing_counts_by_itself(work: list[Work], tmp_path: Path) -> None:
    found = operations(captured(tmp_path, *work))
    assert len(found) == 2
    assert "notify" in [operation for _, _, operation, *_ in found]


def test_in_the_pause_of_one_another_may_run(tmp_path: Path) -> None:
    """Each instant counts once, for the one that ends last, as everywhere."""
    trace = captured(tmp_path, (NOTIFY, 9, 20, 10), (OTHER, 20, 30, 25), (DISPATCH, 9, 40, 28))
    found = [(operation, exposed) for _, _, operation, _, _, exposed in operations(trace)]
    assert found == [("all_to_all", 18), ("all_gather", 0)]


def test_copies_of_one_range_are_one_operation(tmp_path: Path) -> None:
    """A copy for each peer, on any stream."""
    gather = [Range("nccl:_all_gather_base", at, at + 10, 100) for at in (10, 30)]
    work = [("copy", 9, 40, 11), ("copy", 8, 44, 12), ("copy", 9, 60, 31)]
    trace = captured(tmp_path, *work, ranges=(*gather,), copy_kind=8)
    assert operations(trace) == [(0, 0, "all_gather", 40, 50, 10), (0, 1, "all_gather", 60, 66, 6)]


def test_what_waited_for_one_is_known_only_if_it_is_of_all_its_copies(tmp_path: Path) -> None:
    """A call copies on two streams; in step 1, a wait for the copy that ends first is lost."""
    capture = bucket_steps(20, 20, 20)
    for one in (*capture.kernels, *capture.syncs):
        one.number *= 10
    for step in range(3):
        at, number = step * STEP_NS, 100 * step + 40
        capture.kernels = [one for one in capture.kernels if one.number != number]
        for stream, end in ((20, 25 * US), (21, 12 * US)):
            copy = Kernel("copy", at + 5 * US, at + end, at + 300, 100, stream=stream, number=number, kind="memcpy")
            capture.kernels.append(replace(copy, copy_kind=10))
        id_ = 141 + 2 * step
        capture.syncs += [
            Sync("cudaEventRecord_v3020", at + 420, number + 11, 21, event=6, sync_id=id_),
            Sync("cudaStreamWaitEvent_v3020", at + 620, number + 31, 7, event=6, sync_id=id_),
        ]
    capture.syncs = [one for one in capture.syncs if one.at != STEP_NS + 620]
    found = collectives_of(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert [one.blocking_ns for one in found] == [10 * US, None, 10 * US]


def test_copies_between_devices_of_one_call_are_one_operation(tmp_path: Path) -> None:
    trace = captured(tmp_path, ("copy", 9, 40, 11), ("copy", 9, 50, 11), ("copy", 9, 60, 12))
    assert operations(trace) == [(0, 0, "peer_copy", 40, 56, 12), (0, 1, "peer_copy", 60, 66, 6)]


def test_copies_are_matched_with_no_copies_of_others(tmp_path: Path) -> None:
    """Each rank may copy as often as it likes: a copy takes no part of its peer."""
    traces = []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        traces.append(captured(tmp_path / str(rank), *[("copy", 9, 40 + 10 * n, 11 + n) for n in range(1 + rank)]))
    results = results_of(*traces)
    assert (results.matched, results.unmatched) == (0, 0)


def test_the_rank_of_a_capture_knows_its_operations(tmp_path: Path) -> None:
    (rank,) = find_rank_events(captured(tmp_path, (NOTIFY, 9, 20, 10), (DISPATCH, 9, 40, 30), ("gemm", 7, 20, 11)))
    assert rank.is_collective.tolist() == [False, True, False]
