"""What captures tell of their steps: those of this repository, of two ranks on one GPU and on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddp_prof.analyze.collectives.timing import find_timings
from ddp_prof.analyze.core.clocks import CLOCKS
from ddp_prof.analyze.core.recording import LOST_CALLS
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.what_if.sizes import find_gradients
from ddp_prof.analyze.what_if.structure import (
    _HALF,
    IN_BACKWARD,
    NO_CALLS,
    NO_LAUNCHES,
    OF_OTHERS,
    SEVERAL_PASSES,
    RankStructure,
    _ends_with_vote,
    _is_recent_torch,
    find_structure,
)
from ddp_prof.communication import OPERATIONS, REDUCE_SCATTER
from ddp_prof.manifest import load_manifest, manifest_path
from ddp_prof.runs.report import LoadOptions, load_events
from ddp_prof.table import UNKNOWN, select
from tests.analyze.critical.scheduler import Device
from tests.drawing import draw_trace
from tests.nsys_factory import US, Range, bucket_steps, write_capture

TRACES = Path(__file__).parents[3] / "traces"


def structure_of(name: str) -> RankStructure:
    return find_structure(load_events(TRACES / name, LoadOptions(with_launches=True)).ranks[0])


def parameters_of(name: str) -> tuple[int, ...]:
    manifest = load_manifest(manifest_path(TRACES / name))
    assert manifest is not None
    return tuple(one.nbytes for one in manifest.parameters)


def test_copies_out_of_torchs_buckets_are_its_gradients() -> None:
    structure = structure_of("h200/nccl/torch.sqlite")
    assert (structure.reason, structure.calls, structure.sizes_from, structure.at_once) == (None, 10, "ranges", 1)
    assert structure.out is not None
    assert structure.out.bytes.sum() == structure.bytes.sum()
    found = find_gradients(structure)
    assert not isinstance(found, str)
    assert (found.source, found.doubts) == ("ranges, copies out of buckets", ())
    assert sorted(found.bytes.tolist()) == sorted(parameters_of("h200/nccl/torch.sqlite"))
    assert found.rule is not None
    assert found.rule.low_bytes < 25 * 2**20 <= found.rule.high_bytes


@pytest.mark.parametrize(
    "name", ["h200/nccl/torch_gradient_as_bucket_view.sqlite", "torch.sqlite", "bucketed_1mb.sqlite"]
)
def test_where_nothing_is_copied_out_the_manifest_has_the_gradients(name: str) -> None:
    structure = structure_of(name)
    assert structure.out is None
    found = find_gradients(structure, parameters_of(name))
    assert not isinstance(found, str)
    assert found.source == "ranges, run.json"
    assert found.bucket_bytes.tolist() == structure.bytes.tolist()


def test_the_kernels_of_a_recent_torch_tell_when_gradients_are_ready() -> None:
    structure = structure_of("h200/nccl/bucketed_10mb.sqlite")
    assert structure.into is not None
    assert len(structure.into.bytes) == len(parameters_of("h200/nccl/bucketed_10mb.sqlite"))
    assert not structure.into.knows_bytes
    assert np.all(np.diff(structure.into.ends_ns, axis=1) > 0)


@pytest.mark.parametrize(("launches", "reason"), [("", NO_CALLS), ("aN..b...", NO_LAUNCHES)])
def test_where_no_calls_were_recorded_they_are_asked_for_and_not_a_backward(launches: str, reason: str) -> None:
    """But not where kernels lack the numbers of their calls, which were recorded."""
    trace = draw_trace(
        ranges={"step 0": "########"}, launches={"main": launches}, streams={7: ".aa..bb.", 9: "..NNN..."}
    )
    unnumbered = replace(trace.activities, correlation=np.full(len(trace.activities), UNKNOWN))
    is_launch = np.ones(len(trace.calls), np.bool_)
    (rank,) = find_rank_events(
        replace(trace, activities=unnumbered, is_launch=is_launch, launching_calls=None, has_ambiguous_launch=None)
    )
    assert find_structure(rank).reason == reason


def test_where_most_calls_are_lost_no_backward_is_asked_for() -> None:
    """A program that left out short events left a third of the calls: 'capture a step of training with backward'."""
    trace = draw_trace(
        ranges={"step 0": "#" * 10, "step 1": "." * 10 + "#" * 10, "step 2": "." * 20 + "#" * 10},
        launches={"main": "." * 12 + "N" + "." * 9 + "f", "pt_autograd_0": "..A"},
        streams={7: ".eebbb.o..ggccc.p..hh.....fq..", 9: "....AAA.......NNN.......ZZZ"},
    )
    (rank,) = find_rank_events(trace)
    assert find_structure(rank).reason == LOST_CALLS


def test_where_all_reductions_are_of_activations_no_backward_is_asked_for() -> None:
    """Tensor parallelism alone was told to capture a step with backward, which it had."""
    trace = draw_trace(
        ranges={"step 0": "#" * 16, "forward": "########", "backward": "........########"},
        launches={"main": "aA......bB......"},
        streams={7: ".aaa....bbb.....", 9: "....AAA....BBB.."},
    )
    (rank,) = find_rank_events(trace)
    assert rank.is_backward.any()
    assert find_structure(rank).reason == OF_OTHERS


def test_gloo_on_a_cpu_runs_several_at_once() -> None:
    structure = structure_of("overlap.sqlite")
    assert (structure.on_host, structure.is_gloo) == (True, True)
    assert structure.at_once > 1
    assert structure_of("naive.sqlite").at_once == 1


def test_times_of_a_step_are_in_order() -> None:
    for name in ("h200/nccl/torch.sqlite", "torch.sqlite", "naive.sqlite"):
        one = structure_of(name)
        assert np.all(one.begins_ns <= one.start_ns.min(axis=1))
        assert np.all(one.start_ns <= one.end_ns)
        assert np.all(one.backward_end_ns <= one.resumes_ns)
        assert np.all(one.end_ns.max(axis=1) <= one.resumes_ns)
        assert np.all(one.resumes_ns <= one.ends_ns)
        assert all(np.all(beside >= 0) for beside in one.beside_ns.values())


def test_what_is_no_training_has_no_structure(shared_traces: Path) -> None:
    for name in ("nsys2025_3_single_gpu_t4.sqlite", "kineto_b200_rank0of8.json.gz"):
        (rank,) = load_events(shared_traces / name, LoadOptions(with_launches=True)).ranks
        assert find_structure(rank).reason is not None


def test_steps_of_another_kind_are_left_out_or_refused(shared_traces: Path) -> None:
    (rank,) = load_events(
        shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite", LoadOptions(with_launches=True)
    ).ranks
    events = rank.events
    kernels = np.flatnonzero(rank.is_kernel & (events.step == 7) & np.isin(events.launcher, [rank.main_thread]))
    without = np.ones(len(events), np.bool_)
    without[kernels[:3]] = False
    fewer = replace(rank, events=select(events, without))
    whole, found = find_structure(rank), find_structure(fewer)
    assert len(found.keys) == len(whole.keys) - 1
    some = np.ones(len(events), np.bool_)
    for step in range(0, 59, 2):
        some[np.flatnonzero(rank.is_kernel & (events.step == step))[:1]] = False
    assert "steps differ in their kernels" in str(find_structure(replace(rank, events=select(events, some))).reason)


def test_gradients_that_are_reduce_scattered_or_of_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of DDP say nothing of FSDP, nor one line of two links."""
    rank = load_events(TRACES / "h200/nccl/torch.sqlite", LoadOptions(with_launches=True)).ranks[0]
    found = find_timings(rank)
    count = len(found.timings)
    for changed, reason in (
        ({"operation": np.full(count, OPERATIONS.index(REDUCE_SCATTER))}, "as by FSDP or ZeRO"),
        ({"group": np.arange(count) % 2}, "in 2 process groups"),
        ({"group": np.full(count, 3)}, None),
    ):
        other = replace(found, timings=replace(found.timings, **changed))
        monkeypatch.setattr("ddp_prof.analyze.what_if.structure.find_timings", lambda _, other=other: other)
        said = find_structure(rank).reason
        assert (said is None) if reason is None else reason in str(said)
    for name in ("fsdp", "sharded"):
        (sharded,) = load_events(TRACES / f"h200/nccl/{name}.rank0.json.gz", LoadOptions(with_launches=True)).ranks
        monkeypatch.undo()
        assert "as by FSDP or ZeRO" in str(find_structure(sharded).reason)


@pytest.mark.parametrize(
    ("name", "is_half"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclDevKernel_AllReduce_Sum_f16_TREE_LL(ncclDevComm*)", True),
        ("ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*)", True),
        ("ncclKernel_AllReduce_RING_LL_Sum___nv_bfloat16(ncclDevComm*)", True),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", False),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", False),
    ],
)
def test_kernels_of_two_bytes_a_number(name: str, is_half: bool) -> None:
    assert bool(_HALF.search(name)) == is_half


def test_clocks_that_disagree_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a gradient is ready is a time of the host and of the device: 'off by 140 %' blamed the step."""
    rank = load_events(TRACES / "h200/nccl/torch.sqlite", LoadOptions(with_launches=True)).ranks[0]
    monkeypatch.setattr(type(rank), "clocks_disagree", True)
    reason = str(find_structure(rank).reason)
    assert CLOCKS in reason
    assert "record it again" in reason


@pytest.mark.parametrize(("needs_it", "reason"), [("kernel", IN_BACKWARD), ("memcpy", None)])
def test_compute_of_backward_that_waits_for_a_collective_is_refused(
    needs_it: str, reason: str | None, tmp_path: Path
) -> None:
    """An optimizer that steps in backward: the stall was taken for work, and 29 of 100 intervals missed the truth."""
    capture = bucket_steps(20, 20, 20, 20)
    for kernel in capture.kernels:
        kernel.kind = needs_it if kernel.name == "copy back" else kernel.kind
    capture.ranges += [Range("backward", 40 * US * step, 40 * US * step + 900, 100) for step in range(4)]
    trace = write_capture(tmp_path / "a.sqlite", capture)
    (rank,) = load_events(trace, LoadOptions(with_launches=True)).ranks
    assert rank.blocking.coverage.reason is None
    assert find_structure(rank).reason == reason


@pytest.mark.parametrize(("reducing", "reason"), [({2}, None), ({0, 1, 2}, SEVERAL_PASSES), ({0, 2}, SEVERAL_PASSES)])
def test_an_accumulation_is_refused_only_where_several_micro_batches_reduce(
    reducing: set[int], reason: str | None
) -> None:
    """Three micro-batches a step; under no_sync() the last alone reduces, and "under no_sync()" was the advice."""
    device = Device()
    for step in range(4):
        with device.range(f"step {step}"):
            for batch in range(3):
                with device.range("forward"):
                    device.launch(1, 7, 40_000, is_collective=False)
                with device.range("backward"):
                    for _ in range(2):
                        device.launch(1, 7, 20_000, is_collective=False)
                        if batch in reducing:
                            device.record(1, 7, 1)
                            device.wait(1, 20, 1)
                            device.launch(1, 20, 15_000, is_collective=True)
        device.synchronize(1)
    (rank,) = find_rank_events(device.trace())
    found = find_structure(rank)
    assert found.reason == reason
    if reason is None:  # of the last pass, 2 collectives in each step but the last, whose length is not known
        assert found.start_ns.shape == (3, 2)
        assert (found.start_ns < found.backward_end_ns[:, None]).sum(axis=1).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "buckets", "computes_ns", "last_took_ns", "is_vote"),
    [
        ((4096, 8192, 96), (0, 1, UNKNOWN), 5, 1, True),
        ((4096, 8192, 2048), (0, 1, 2), 5, 1, False),
        ((4096, 8192, UNKNOWN), (0, 1, UNKNOWN), 5, 1, True),
        ((UNKNOWN,) * 3, (UNKNOWN,) * 3, 5, 1, True),
        ((UNKNOWN,) * 3, (UNKNOWN,) * 3, 25, 1, False),
        ((UNKNOWN,) * 3, (UNKNOWN,) * 3, 5, 9, False),
    ],
)
def test_the_vote_on_unused_parameters_is_no_bucket(
    sizes: tuple[int, ...], buckets: tuple[int, ...], computes_ns: int, last_took_ns: int, is_vote: bool
) -> None:
    """With it, torch's rule made of 12 buckets 13 smaller ones, and the line fell: nothing was predicted, or wrong."""
    launch_ns = np.array([[10, 20, 30]])
    columns = {
        "launch_ns": launch_ns,
        "start_ns": launch_ns + 5,
        "end_ns": launch_ns + 5 + np.array([4, 6, last_took_ns]),
        "bytes": np.array([sizes]),
        "bucket": np.array([buckets]),
    }
    rank = SimpleNamespace(
        events=SimpleNamespace(launch_ns=np.array([1, computes_ns])), is_backward=np.ones(2, np.bool_)
    )
    assert _ends_with_vote(rank, columns) == is_vote  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nccl", "elementwise", "is_recent"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(x)", "vectorized<at::detail::Array<char*, 3>>", False),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "vectorized<at::detail::Array<char*, 3>>", None),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "vectorized<std::array<char*, 3ul>>", True),
        ("ncclKernel_Generic(x)", "vectorized<std::array<char*, 3ul>>", True),  # built with an NCCL of one's own
    ],
)
def test_names_of_kernels_tell_old_and_recent_torch_and_not_that_between(
    nccl: str, elementwise: str, is_recent: bool | None
) -> None:
    assert _is_recent_torch([elementwise, nccl, "step 0"]) is is_recent
