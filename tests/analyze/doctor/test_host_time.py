"""On a CPU: time outside of all phases is the host's own work only where nothing communicates in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.why_unknown import NO_COLLECTIVE, NOTHING, UNNAMED_BACKWARD
from ddp_prof.runs import load_runs
from tests.drawing import runs as drawn_runs
from tests.ingest.test_kineto_json import event, write
from tests.ingest.test_nsys_export import MS
from tests.nsys_factory import NCCL, Capture, Range, write_capture

RULE = "launch-bound host"
ALL_REDUCE = "all_reduce|bucket=0|bytes=1000|params=1"
STEP = "####################"
PHASES = {
    "forward": "..####..............",
    "backward": "......####..........",
    "optimizer": "................##..",
}


def diagnose(path: Path, **ranges: str) -> Diagnosis:
    """Of four steps, drawn in milliseconds; of a name ``all_reduce`` the range of one."""
    capture = Capture()
    for step in range(4):
        at = step * len(STEP)
        pictures = {f"step|index={step}": STEP, **PHASES, **ranges}
        for name, picture in pictures.items():
            for _, start, end in drawn_runs(picture):
                is_collective = name == "all_reduce"
                text, thread = (ALL_REDUCE, 101) if is_collective else (name, 100)
                capture.ranges.append(
                    Range(text, (at + start) * MS, (at + end) * MS, thread, 100, "ddp_prof", is_start_end=is_collective)
                )
    (run,) = load_runs(write_capture(path, capture))
    return run.doctor()


def test_a_host_that_prepares_is_found(tmp_path: Path) -> None:
    found = diagnose(tmp_path / "job.sqlite", all_reduce="..........##........")
    (finding,) = [one for one in found.findings if one.rule == RULE]
    assert finding.cost_ns == 8 * MS


def test_where_forward_is_not_marked_the_host_is_not_accused_of_it(tmp_path: Path) -> None:
    """As of a model without DDP: what lay outside of backward and optimizer was said to lie outside of forward."""
    found = diagnose(tmp_path / "job.sqlite", all_reduce="..........##........", forward="." * len(STEP))
    assert RULE not in [one.rule for one in found.findings]
    assert RULE in [one.rule for one in found.abstained]


@pytest.mark.parametrize("all_reduce", ["..........######....", ".........#######...."])
def test_a_host_that_communicates_is_not_accused(all_reduce: str, tmp_path: Path) -> None:
    found = diagnose(tmp_path / "job.sqlite", all_reduce=all_reduce)
    assert RULE not in [one.rule for one in (*found.findings, *found.abstained)]


PROCESS = "process|rank=0|world=2|variant=naive|backend=gloo|device=cpu"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, NOTHING),
        ({PROCESS: STEP, "synchronize": "...............#...."}, NO_COLLECTIVE),
    ],
)
def test_whether_it_communicates_may_not_be_known(more: dict[str, str], reason: str, tmp_path: Path) -> None:
    found = diagnose(tmp_path / "job.sqlite", **more)
    assert RULE not in [one.rule for one in found.findings]
    assert [one.reason for one in found.abstained if one.rule == RULE] == [reason]


def test_without_a_range_of_backward_it_is_not_known_what_hides(tmp_path: Path) -> None:
    """What backward computes is told by its range alone: nothing was said to be hidden, and the host to be slow."""
    found = diagnose(tmp_path / "unnamed.sqlite", all_reduce="........##..........", backward="." * len(STEP))
    (abstained,) = [one for one in found.abstained if one.rule == RULE]
    (run,) = load_runs(tmp_path / "unnamed.sqlite")
    (rank,) = run.overlap().ranks
    assert abstained.reason == rank.reason == UNNAMED_BACKWARD
    assert (rank.comm_ns, rank.overlap_ratio) == (None, None)
    assert found.findings == (), "nor is the only bucket said to be exposed"
    assert "one bucket for all gradients" in [one.rule for one in found.abstained]


def ddp_on_gloo(*collectives: tuple[str, str, int, int, int]) -> list[str]:
    """Four steps as torch.profiler records them; of each collective the category, name, start, end and thread."""
    events = []
    for step in range(4):
        drawn = [
            ("user_annotation", f"ProfilerStep#{step}", 0, 100),
            ("user_annotation", "DistributedDataParallel.forward", 0, 20),
            ("cpu_op", "aten::mm", 0, 20),
            ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 20, 40),
            ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 44, 70),
            ("user_annotation", "Optimizer.step#SGD.step", 70, 96),
        ]
        events += [
            event(category, name, str(100 * step + start), str(end - start), tid=thread)
            for category, name, start, end, thread in (*((*one, 99) for one in drawn), *collectives)
        ]
    return events


def test_what_records_the_sizes_of_gloo_is_said_of_gloo(tmp_path: Path) -> None:
    """It was said that torch.profiler writes them for NCCL, and how by a profiler that capture starts by itself."""
    both = [("cpu_op", "c10d::allreduce_", 41, 42, 99), ("user_annotation", "gloo:all_reduce", 45, 50, 2)]
    both += [("cpu_op", "c10d::allreduce_", 42, 43, 99), ("user_annotation", "gloo:all_reduce", 52, 60, 2)]
    (run,) = load_runs(write(tmp_path / "job.json", ddp_on_gloo(*both)))
    (reason,) = {one.reason for one in run.doctor().abstained if "sizes of collectives" in one.reason}
    assert "torch.profiler writes them for gloo with record_shapes=True" in reason
    assert reason.endswith("'ddp-prof capture', which does not set it, marks the buckets of DDP by --profiler nsys")


def test_what_records_the_sizes_of_collectives_in_cuda_graphs_is_said_of_these(tmp_path: Path) -> None:
    """It was said that torch.profiler writes them if it records the CPU, which launches the graph as a whole."""
    events = []
    for step in range(5):
        at = 1000 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", str(at), "1000"))
        events.append(event("cuda_runtime", "cudaGraphLaunch", str(at + 30), "2", correlation=step + 1))
        works = (("forward", 7, 40, 300), ("backward", 7, 300, 600), (NCCL, 20, 400, 800), ("adam", 7, 800, 900))
        for name, stream, start, end in works:
            launched = {"device": 0, "stream": stream, "correlation": step + 1}
            events.append(event("kernel", name, str(at + start), str(end - start), tid=stream, **launched))
    (run,) = load_runs(write(tmp_path / "job.json", events))
    (reason,) = {one.reason for one in run.doctor().abstained if "sizes of collectives" in one.reason}
    assert reason.endswith("export by export_chrome_trace(cuda_graph_annotations=...)")


def test_a_backward_that_operators_tell_is_not_outside_of_backward(tmp_path: Path) -> None:
    """As of torch's DDP with gradient accumulation: its backward was half of a step in which the host prepared work."""
    events = ddp_on_gloo(("cpu_op", "c10d::allreduce_", 42, 43, 99), ("user_annotation", "gloo:all_reduce", 50, 56, 2))
    (run,) = load_runs(write(tmp_path / "job.json", events))
    assert RULE not in [one.rule for one in run.doctor().findings]
