"""On a CPU by torch.profiler: an operator that asks for a collective and waits for it does not compute meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ddp_prof as dp
from tests.ingest.test_kineto_json import event, write

US = 1_000
ENGINE = "autograd::engine::evaluate_function: "


def test_an_operator_that_waits_for_its_collective_hides_none_of_it(tmp_path: Path) -> None:
    """As an expert's all-to-all, in forward and in backward: all of it was said to be hidden."""
    drawn = {
        "main": [
            ("user_annotation", "step|index=1", 0, 100), ("user_annotation", "forward", 0, 40),
            ("cpu_op", "aten::mm", 0, 10), ("cpu_op", "AllToAll", 10, 30),
            ("cpu_op", "c10d::alltoall_base_", 12, 13), ("cpu_op", "_c10d_functional::wait_tensor", 14, 30),
            ("cpu_op", "aten::mm", 30, 40), ("user_annotation", "backward", 40, 90),
            ("cpu_op", f"{ENGINE}AllToAllBackward", 40, 60), ("cpu_op", "c10d::alltoall_base_", 41, 42),
            ("cpu_op", "aten::mm", 42, 44), ("cpu_op", f"{ENGINE}AddmmBackward0", 60, 69),
            ("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", 69, 70), ("cpu_op", "c10d::allreduce_", 69, 70),
            ("user_annotation", "synchronize", 70, 90),
        ],
        "gloo": [
            ("user_annotation", "gloo:all_to_all", 13, 30), ("user_annotation", "gloo:all_to_all", 43, 60),
            ("user_annotation", "gloo:all_reduce", 70, 90),
        ],
    }  # fmt: skip
    events = [
        event(category, name, str(start), str(end - start), tid=thread)
        for thread, of_thread in enumerate(drawn.values(), 1)
        for category, name, start, end in of_thread
    ]
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    (rank,) = run.overlap().ranks
    assert (rank.comm_ns, rank.overlapped_ns) == (54 * US, 1 * US), "but for what is computed beside the second"
    assert rank.blocking_ns == 53 * US
    bare = [text for text in events if '"backward"' not in text and '"forward"' not in text]
    (run,) = dp.load_runs(write(tmp_path / "bare.json", bare))
    (rank,) = run.overlap().ranks
    assert rank.backward_overlapped_ns == 1 * US, "what autograd's engine calls is backward's"


@pytest.mark.parametrize(
    ("lost", "note"),
    [
        ("gloo:all_reduce", "step 1 left out: fewer collectives were recorded in it than torch's operators call there"),
        ("aten::mm", "step 1 left out: no operator was recorded in it"),
        ("c10d::allreduce_", ""),
    ],
)
@pytest.mark.parametrize("late", [0, 60])
def test_a_step_of_which_a_part_was_lost_does_not_count(lost: str, note: str, late: int, tmp_path: Path) -> None:
    """It was said to do without communication. A thread of gloo may take up a collective in the next step."""
    drawn = [
        (category, name, 100 * step + start, length, tid)
        for step in range(4)
        for category, name, start, length, tid in (
            ("user_annotation", f"step|index={step}", 0, 100, 1),
            ("cpu_op", "aten::mm", 10, 10, 1),
            ("cpu_op", "aten::mm", 20, 10, 1),
            ("cpu_op", "c10d::allreduce_", 32, 1, 1),
            ("user_annotation", "gloo:all_reduce", 50 + late * (step == 2), 20, 2),
        )
    ]
    events = [event(kind, name, str(at), str(length), tid=tid) for kind, name, at, length, tid in drawn]
    there = [text for text, (_, name, at, *_) in zip(events, drawn, strict=True) if name != lost or at // 100 != 1]
    (run,) = dp.load_runs(write(tmp_path / "x.json", there))
    result = run.overlap()
    assert [step.step for step in result.ranks[0].steps] == [0, *([] if note else [1]), 2, 3]
    assert [text for text in result.warnings if "left out" in text] == [note] * bool(note)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_collective_with_a_range_of_its_own_is_not_missed_among_the_events_of_gloo(
    is_lost: bool, tmp_path: Path
) -> None:
    """Each micro-batch reduces its loss, and the last one gradients; between two steps a validation reduces its own.

    The steps with or before a collective whose event of gloo does not count were said to lack it, and left out.
    """
    drawn = [
        (category, name, 100 * step + start, length, tid)
        for step in range(4)
        for category, name, start, length, tid in (
            ("user_annotation", f"step|index={step}", 0, 90, 1),
            ("cpu_op", "aten::mm", 10, 10, 1),
            *[
                ("user_annotation", "all_reduce|bucket=0|bytes=8|params=1", 22, 20, 1),
                ("cpu_op", "c10d::allreduce_", 23, 1, 1),
                ("user_annotation", "gloo:all_reduce", 25, 16, 2),
            ]
            * (step == 3),
            ("cpu_op", "c10d::allreduce_", 52, 1, 1),
            *[("user_annotation", "gloo:all_reduce", 60, 20, 2)] * (step != 1 or not is_lost),
            *[("cpu_op", "c10d::allreduce_", 91, 1, 1), ("user_annotation", "gloo:all_reduce", 92, 6, 2)] * (step == 0),
        )
    ]
    events = [event(kind, name, str(at), str(length), tid=tid) for kind, name, at, length, tid in drawn]
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    assert [step.step for step in run.overlap().ranks[0].steps] == [0, *([] if is_lost else [1]), 2, 3]


def test_what_gloo_does_beside_collectives_with_ranges_is_communication_too(tmp_path: Path) -> None:
    """As tensor parallelism's all-reduces beside FSDP2, whose gathers are marked, or hybrid FSDP2's own."""
    events = [
        event("user_annotation", "step|index=1", "0", "100"),
        event("user_annotation", "backward", "0", "90"),
        event("cpu_op", "aten::mm", "0", "10"),
        event("cpu_op", "aten::mm", "45", "2"),
        event("user_annotation", "all_gather|bucket=0|bytes=8|params=1", "10", "20"),
        event("cpu_op", "c10d::_allgather_base_", "11", "1"),
        event("user_annotation", "synchronize", "11", "18"),
        event("user_annotation", "gloo:all_gather", "12", "16", tid=2),
        event("cpu_op", "c10d::allreduce_", "38", "1"),
        event("user_annotation", "gloo:all_reduce", "40", "9", tid=2),
    ]
    (run,) = dp.load_runs(write(tmp_path / "both.json", events))
    (rank,) = run.overlap().ranks
    assert (rank.collectives, rank.comm_ns, rank.overlapped_ns) == (2, 29 * US, 2 * US)
    # In the marked wait, and for the all-reduce from its launch until it ended, but for what computed.
    assert rank.blocking_ns == 18 * US + 9 * US
    gather, reduce = run.collectives().collectives
    assert (gather.op, gather.bucket, reduce.op, reduce.queueing_ns) == ("all_gather", 0, "all_reduce", 2 * US)
    assert any("and beside them the 'gloo:' events" in note for note in run.overlap().warnings)


def test_a_thread_that_prepares_data_hides_nothing(tmp_path: Path) -> None:
    """torch.profiler records all threads under capture."""
    events = [
        event("user_annotation", "step|index=1", "0", "100"),
        event("cpu_op", f"{ENGINE}AddmmBackward0", "0", "10"),
        event("cpu_op", "c10d::allreduce_", "10", "1"),
        event("user_annotation", "gloo:all_reduce", "12", "40", tid=2),
        event("cpu_op", "aten::randn", "20", "20", tid=3),
    ]
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    (rank,) = run.overlap().ranks
    assert (rank.comm_ns, rank.overlapped_ns) == (40 * US, 0)


def test_sends_and_receives_of_gloo_are_said_to_be_left_out(tmp_path: Path) -> None:
    """As of a pipeline, of which nothing was said to communicate; they end when the host has waited for them."""
    events = [
        event("user_annotation", "step|index=1", "0", "100"),
        event("user_annotation", "backward", "0", "90"),
        event("cpu_op", "aten::mm", "0", "10"),
        event("cpu_op", "ddp_prof|synchronize", "92", "1"),
        event("cpu_op", "c10d::send", "12", "1"),
        event("user_annotation", "gloo:send", "12", "70"),
        event("cpu_op", "c10d::recv_", "14", "1"),
        event("user_annotation", "gloo:recv", "14", "40"),
    ]
    (run,) = dp.load_runs(write(tmp_path / "pipeline.json", events))
    result = run.overlap()
    assert str(result.ranks[0].reason).startswith("only sends and receives of gloo communicate in this trace")
    assert (result.ranks[0].comm_ns, result.ranks[0].marked_steps[0].exposed_ns) == (None, None), "not 0"
    assert not any("sends and receives" in warning for warning in result.warnings)
    kernel = event("kernel", "gemm", "5", "3", device=0)
    (run,) = dp.load_runs(write(tmp_path / "gpu.json", [*events, kernel]))
    assert [(rank.reason, rank.comm_ns) for rank in run.overlap().ranks] == [(result.ranks[0].reason, None)]
    events += [
        event("cpu_op", "c10d::allreduce_", "60", "1"),
        event("user_annotation", "gloo:all_reduce", "61", "9", tid=2),
    ]
    (run,) = dp.load_runs(write(tmp_path / "both.json", events))
    result = run.overlap()
    assert (result.ranks[0].reason, result.ranks[0].comm_ns) == (None, 9 * US)
    assert any(warning.startswith("sends and receives of gloo left out: 2;") for warning in result.warnings)


def test_gloo_s_collectives_beside_a_gpu_s_work_are_communication(tmp_path: Path) -> None:
    """It was said that nothing communicates: 0 ms of it, and an idle GPU whose host launches too slowly.

    ::

        GPU    AAAA  BBBBBB
        gloo     11111  222222
    """
    events = [
        event("user_annotation", "ProfilerStep#1", "0", "100"),
        event("cpu_op", "c10d::allreduce_", "8", "1", tid=2),
        event("cpu_op", "c10d::allreduce_", "9", "1", tid=2),
        event("user_annotation", "gloo:all_reduce", "12", "20", tid=3),
        event("user_annotation", "gloo:all_reduce", "35", "30", tid=3),
    ]
    for number, (start, length) in enumerate(((10, 10), (25, 25)), 1):
        events += [
            event("cuda_runtime", "cudaLaunchKernel", "5", "1", tid=2, correlation=number),
            event("kernel", "gemm", str(start), str(length), device=0, stream=7, correlation=number),
        ]
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    result = run.overlap()
    (rank,) = result.ranks
    assert (rank.comm_ns, rank.overlapped_ns, rank.compute_ns) == (50 * US, 30 * US, 35 * US)
    assert [one.queueing_ns for one in run.collectives().collectives] == [4 * US, 26 * US]
    said = (
        "communication is the 'gloo:' events, each from when it is taken up by a thread of gloo; its times may include "
        "waiting for the GPU"
    )
    assert any(said in warning for warning in result.warnings)
    nccl = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "60", "8", device=0, stream=9)
    (run,) = dp.load_runs(write(tmp_path / "nccl.json", [*events, nccl]))
    assert run.overlap().ranks[0].comm_ns == 8 * US, "beside NCCL's, gloo's do not count"


@pytest.mark.parametrize("around", [[], [event("user_annotation", "step|index=0|warmup=1", "0", "9")]])
def test_a_barrier_before_the_measured_steps_changes_no_figure(tmp_path: Path, around: list[str]) -> None:
    """Beside ranges of ours it counted as communication, and operators as compute in place of phases."""
    events = [
        *around,
        event("user_annotation", "step|index=1", "10", "90"),
        event("user_annotation", "backward", "10", "50"),
        event("cpu_op", "aten::mm", "10", "10"),
        event("cpu_op", "aten::mm", "30", "10"),
        event("user_annotation", "all_reduce|bucket=0|bytes=8|params=1", "20", "60", tid=2),
        event("cpu_op", "c10d::allreduce_", "20", "1"),
        event("user_annotation", "gloo:all_reduce", "22", "50", tid=2),
        event("user_annotation", "synchronize", "60", "20"),
    ]
    barrier = [event("cpu_op", "c10d::barrier", "0", "1"), event("user_annotation", "gloo:barrier", "2", "5", tid=2)]
    ranks = []
    for number, of_trace in enumerate((events, [*barrier, *events])):
        (run,) = dp.load_runs(write(tmp_path / f"{number}.json", of_trace))
        ranks += run.overlap().ranks
    assert ranks[0] == replace(ranks[1], file=ranks[0].file)
    assert (ranks[0].collectives, ranks[0].comm_ns, ranks[0].overlapped_ns) == (1, 60 * US, 40 * US)


def test_what_ddp_does_after_the_last_gradient_is_no_compute_of_backward(tmp_path: Path) -> None:
    """It waits for the last all-reduce in the range of backward, and copies out of buckets: all of this seemed hidden.

    us         0         20        40        60        80        100
    main       bbbbbbbbbbbbbbbb....................cc......ccoooo
    gloo       ........11111111111122222222222222222222222222
    """
    drawn = {
        "main": [
            ("user_annotation", "step|index=1", 0, 100), ("user_annotation", "## backward ##", 0, 92),
            ("cpu_op", f"{ENGINE}AddmmBackward0", 0, 16), ("cpu_op", f"{ENGINE}AddmmBackward0", 17, 30),
            ("cpu_op", f"{ENGINE}torch::autograd::AccumulateGrad", 30, 33),
            ("cpu_op", "torch::distributed::reducer::mul_out", 30, 31), ("cpu_op", "c10d::allreduce_", 31, 32),
            ("cpu_op", "c10d::allreduce_", 16, 17),
            ("cpu_op", "torch.distributed.ddp.reducer::copy_bucket_to_grad", 72, 76),
            ("cpu_op", "aten::as_strided", 88, 90), ("cpu_op", "aten::item", 90, 92),
            ("user_annotation", "Optimizer.step#SGD.step", 92, 100), ("cpu_op", "aten::add_", 92, 100),
        ],
        "gloo": [("user_annotation", "gloo:all_reduce", 18, 42), ("user_annotation", "gloo:all_reduce", 42, 88)],
    }  # fmt: skip
    events = [
        event(category, name, str(start), str(end - start), tid=thread)
        for thread, of_thread in enumerate(drawn.values(), 1)
        for category, name, start, end in of_thread
    ]
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    (rank,) = run.overlap().ranks
    (step,) = rank.steps
    beside = (30 - 18) + (31 - 30)
    assert (step.comm_ns, step.overlapped_ns) == (70 * US, (beside + 4) * US), "copying out of a bucket computes, too"
    assert step.tail_ns == (88 - 31 - 4) * US
    assert step.backward_overlapped_ns == beside * US
    found = run.collectives().collectives
    assert {part.when for one in found for part in one.exposed_by} == {"tail"}
