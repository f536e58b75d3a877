"""On a CPU by torch.profiler: an operator that asks for a collective and waits for it does not compute meanwhile."""

from __future__ import annotations

from pathlib import Path

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


def test_what_no_range_tells_beside_collectives_of_ours_is_said_to_be_left_out(tmp_path: Path) -> None:
    """As tensor parallelism's all-reduces beside FSDP2, whose gathers are marked: they were left out in silence."""
    events = [
        event("user_annotation", "step|index=1", "0", "100"),
        event("user_annotation", "backward", "0", "90"),
        event("cpu_op", "aten::mm", "0", "10"),
        event("user_annotation", "all_gather|bucket=0|bytes=8|params=1", "10", "20"),
        event("user_annotation", "gloo:all_gather", "12", "16", tid=2),
    ]
    all_reduces = [event("user_annotation", "gloo:all_reduce", start, "9", tid=2) for start in ("40", "60", "120")]
    notes = []
    for number, of_trace in enumerate(([*events, *all_reduces], events)):
        (run,) = dp.load_runs(write(tmp_path / f"{number}.json", of_trace))
        notes.append(" ".join(run.overlap().warnings))
    assert "outside of the ranges of collectives, left out: 2" in notes[0], "one is in no step"
    assert "left out" not in notes[1]
