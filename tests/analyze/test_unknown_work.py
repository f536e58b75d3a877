"""What is not in a trace is not said to be hidden or exposed: by any table, headline or verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.why_unknown import (
    GRAPHS,
    NO_COMMUNICATION,
    NO_COMPUTE,
    NO_COMPUTE_DURATIONS,
    NO_DURATIONS,
    NOTHING,
    ONLY_BARRIERS,
    ONLY_MPI,
    merge_reasons,
)
from ddp_prof.ingest.load import load_trace
from tests.command_line import run
from tests.ingest.test_kineto_json import event, write
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import NCCL, Capture, Kernel, Range, write_capture

SYMMETRIC_BARRIER = "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int)"


def run_command(command: str, path: Path) -> str:
    return run(*command.split(), "--format", "json", str(path)).stdout


def headline(path: Path) -> str:
    return str(json.loads(run_command("collectives", path))["headline"])


def with_a_graph(path: Path) -> Path:
    """The known truth with compute that a graph hides: it runs beside most of the communication."""
    truth = known_truth()
    first = truth.kernels[0]
    truth.kernels.append(Kernel("graph", first.start, first.end + 10_000_000, first.launch, first.thread, kind="graph"))
    return write_capture(path / "graph.sqlite", truth)


def test_beside_a_graph_recorded_whole_nothing_is_said_to_be_exposed(tmp_path: Path) -> None:
    path = with_a_graph(tmp_path)
    assert headline(path) == f"Whether communication is exposed is not known: {GRAPHS}."
    overlap = json.loads(run_command("overlap", path))
    (rank,) = overlap["ranks"]
    assert (rank["overlap_ratio"], rank["backward_overlap_ratio"], rank["reason"]) == (None, None, GRAPHS)
    assert overlap["outliers"] is None
    (variant,) = json.loads(run_command("compare", path))["variants"]
    assert (variant["overlap_ratio"], variant["backward_overlap_ratio"]) == (None, None)
    verdicts = json.loads(run_command("check --min-overlap 0 --max-exposed-ms 1000", path))["runs"][0]["verdicts"]
    assert [(verdict["status"], verdict["reason"]) for verdict in verdicts] == [("unknown", GRAPHS)] * 2


def test_what_a_graph_computes_is_not_said_to_be_the_rest_of_a_step(tmp_path: Path) -> None:
    document = json.loads(run_command("compare", with_a_graph(tmp_path)))
    assert (document["waterfall"]["budgets"], document["waterfall"]["unknown"]) == ([], ["graph"])


def test_kernels_that_take_no_time_are_not_said_to_hide_nothing(tmp_path: Path) -> None:
    """The profiler lost the ends of all that computes, in each step alike: it was 0 % hidden, and 'idle'."""
    truth = known_truth()
    for kernel in truth.kernels:
        kernel.end = kernel.end if "nccl" in kernel.name.lower() else kernel.start
    path = write_capture(tmp_path / "timeless.sqlite", truth)
    (rank,) = json.loads(run_command("overlap", path))["ranks"]
    assert (rank["reason"], rank["overlapped_ns"], rank["exposed_ns"]) == (NO_COMPUTE_DURATIONS, None, None)
    assert rank["comm_ns"] > 0
    assert {(step["exposed_ns"], step["idle_ns"], step["length"]["idle_ns"]) for step in rank["steps"]} == {(None,) * 3}
    assert NO_COMPUTE_DURATIONS in headline(path)
    assert run("check", "--max-exposed-ms", "1000", path).exit_code == 3


@pytest.mark.parametrize("trains", [True, False])
def test_where_no_kernel_that_computes_was_recorded_communication_is_not_said_to_be_exposed(
    tmp_path: Path, trains: bool
) -> None:
    """As where a trace was cut down to NCCL's kernels: it was 0 % hidden, and the host launched too late."""
    ranges = [Range("step 0", 0, 90, 100), *([Range("backward", 5, 50, 100)] if trains else [])]
    path = write_capture(tmp_path / "x.sqlite", Capture([Kernel(NCCL, 30, 60, 6, 100, stream=9)], ranges))
    (rank,) = measure_overlap(load_trace(path)).ranks
    # A program without backward may measure NCCL itself.
    known = (NO_COMPUTE, 30, None, None) if trains else (None, 30, 0, 30)
    assert (rank.reason, rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == known
    assert (NO_COMPUTE in headline(path)) is trains


def test_collectives_that_take_no_time_beside_copies_between_devices_are_not_said_to_be_short(tmp_path: Path) -> None:
    """The copies take some: with the kernels at 0 ns, the share of them that is hidden was told of all."""
    steps = [Range("step 0", 0, 90, 100)]
    kernels = [Kernel("gemm", 10, 40, 5, 100), Kernel(NCCL, 30, 30, 6, 100, stream=9)]
    kernels.append(Kernel("copy", 50, 60, 7, 100, stream=9, kind="memcpy", copy_kind=10, call="cudaMemcpyAsync"))
    (rank,) = measure_overlap(load_trace(write_capture(tmp_path / "x.sqlite", Capture(kernels, steps)))).ranks
    assert (rank.reason, rank.comm_ns, rank.exposed_ns) == (NO_DURATIONS, None, None)


def test_barriers_alone_do_not_tell_what_is_exposed(tmp_path: Path) -> None:
    """The copies between devices that they guard were lost: '10 us are exposed', and a gate passed."""
    kernels = [Kernel("gemm", 10, 40, 5, 100), Kernel(SYMMETRIC_BARRIER, 45, 50, 6, 100)]
    path = write_capture(tmp_path / "x.sqlite", Capture(kernels, [Range("step 0", 0, 90, 100)]))
    assert ONLY_BARRIERS in headline(path)
    assert run("check", "--max-exposed-ms", "1000", path).exit_code == 3


def test_collectives_within_a_graph_are_not_said_to_be_absent(tmp_path: Path) -> None:
    kernels = [Kernel("graph", 10, 90, 5, 100, kind="graph"), Kernel("gemm", 90, 95, 6, 100)]
    assert GRAPHS in headline(write_capture(tmp_path / "x.sqlite", Capture(kernels=kernels)))


def test_communication_of_the_host_is_not_said_to_be_absent(tmp_path: Path) -> None:
    mpi = Capture([Kernel("saxpy", 10, 90, 5, 100)], [Range("MPI_Send", 95, 99, 100, domain="MPI")])
    assert headline(write_capture(tmp_path / "x.sqlite", mpi)).endswith(f"{ONLY_MPI}.")
    gloo = write(tmp_path / "x.json", [event("user_annotation", "gloo:all_reduce", "10", "20")])
    assert headline(gloo).endswith(f"{NOTHING}.")


@pytest.mark.parametrize("names", [["gloo:all_reduce", "gloo:all_reduce"], ["gloo:of_tomorrow"]])
def test_what_gloo_did_is_not_denied_where_no_operator_asked_for_it(tmp_path: Path, names: list[str]) -> None:
    """As where a collective was asked for before the recording, or is none that we know."""
    events = [event("user_annotation", name, str(10 * at), "5", tid=9) for at, name in enumerate(names)]
    path = write(tmp_path / "x.json", [*events, event("cpu_op", "aten::mm", "0", "30")])
    (rank,) = measure_overlap(load_trace(path)).ranks
    assert (rank.reason, rank.overlap_ratio) == (NOTHING, None)


def test_few_unnamed_kernels_are_no_graphs(tmp_path: Path) -> None:
    """Up to one in a hundred may have no name; the gate took them for CUDA graphs."""
    kernels = [Kernel("gemm", 10 * at, 10 * at + 5, 10 * at, 100) for at in range(1, 300)]
    kernels += [Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 12, 40, 11, 131, stream=9)]
    kernels += [Kernel("", 4000, 4005, 3990, 100)]
    path = write_capture(tmp_path / "x.sqlite", Capture(kernels, [Range("step 0", 0, 5000, 100)]))
    (rank,) = measure_overlap(load_trace(path)).ranks
    assert rank.overlap_ratio is not None
    (verdict,) = json.loads(run_command("check --min-overlap 0", path))["runs"][0]["verdicts"]
    assert (verdict["status"], verdict["reason"]) == ("passed", None)


def test_a_rank_of_which_nothing_is_known_does_not_count_among_the_others(tmp_path: Path) -> None:
    (summary,) = compare_variants([measure_overlap(load_trace(with_a_graph(tmp_path)))])
    assert summary.comm_ns is not None
    assert summary.overlap_ratio is None


@pytest.mark.parametrize(
    ("ranks", "whole"),
    [
        ([None, NO_COMMUNICATION, NOTHING], None),
        ([None, GRAPHS], GRAPHS),
        ([NOTHING, NO_COMMUNICATION], NO_COMMUNICATION),
        ([NOTHING, NOTHING], NOTHING),
    ],
)
def test_several_ranks_have_one_reason(ranks: list[str | None], whole: str | None) -> None:
    assert merge_reasons(ranks) == whole


def test_of_several_reasons_the_first_is_given() -> None:
    """It was another one from one start of Python to the next."""
    shares = [f"{share}% of the kernels have no name" for share in range(8, 14)]
    assert [merge_reasons([NOTHING, *shares[at:], *shares[:at]]) for at in range(len(shares))] == shares


def test_kernels_without_names_are_no_count_of_collectives(tmp_path: Path) -> None:
    """'0 collectives' was said, that each kernel ran alone, and that steps lost collectives in their ranges.

    us           0    10   20   30   40
    compute      gggggggg
    all-reduce       AAAAAAAAAA      in nccl:all_reduce; only that of step 0 has a name
    """
    capture, us = Capture(), 1000
    for at in range(0, 5 * 40 * us, 40 * us):
        capture.ranges += [
            Range(f"step {at}", at, at + 40 * us, 100),
            Range("nccl:all_reduce", at + 2 * us, at + 3 * us, 100),
        ]
        capture.kernels += [
            Kernel("gemm", at + us, at + 10 * us, at, 100),
            Kernel("" if at else NCCL, at + 5 * us, at + 30 * us, at + 2500, 100, stream=20),
        ]
    path = write_capture(tmp_path / "x.sqlite", capture)
    overlap, kernels = (json.loads(run_command(command, path)) for command in ("overlap", "kernels"))
    (rank,), text = overlap["ranks"], run("collectives", path).stdout
    assert (rank["collectives"], rank["overlap_ratio"], len(rank["steps"])) == (None, None, 5)
    assert {one["alone"] for one in kernels["kernels"]} == {None}
    assert text.splitlines()[0].endswith("1 collective is known")
    assert not any("left out" in one for one in overlap["warnings"])
