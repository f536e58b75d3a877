"""A capture of nothing but warm-up steps: these are left out, which is not that none were marked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.analyze.core.rank_events import ONLY_WARMUP
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.why_unknown import NO_DURATIONS, WARMUP_COMMUNICATES
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.timeline.build import build_timeline
from tests.command_line import csv_rows, run
from tests.measuring import source_of
from tests.nsys_factory import NCCL, STEP_NS, US, Kernel, bucket_steps, write_capture

FALSE = ("no steps", "no step ", "no GPU activities", "no kernels", "the trace does not tell what")


def write_warmup(path: Path, *, has_others: bool = False, others_ns: int = 19 * US) -> Path:
    """Three steps of warm-up; work that no step launched, too, if that is asked for."""
    capture = bucket_steps(20, 20, 20)
    capture.ranges = [replace(one, name=f"step|index={n}|warmup=1") for n, one in enumerate(capture.ranges)]
    at = 4 * STEP_NS
    others = [Kernel("init", at, at + 9 * US, at, 100), Kernel(NCCL, at, at + others_ns, at, 100, stream=20)]
    capture.kernels += [replace(one, number=99 + n) for n, one in enumerate(others) if has_others]
    return write_capture(path, capture)


@pytest.mark.parametrize("command", ["summary", "overlap", "info", "collectives", "doctor", "critical", "kernels"])
def test_each_command_says_what_was_left_out(tmp_path: Path, command: str) -> None:
    said = run(command, write_warmup(tmp_path / "warm.sqlite")).stdout
    assert ONLY_WARMUP in said
    assert [claim for claim in FALSE if claim in said] == []


def test_what_no_step_launched_is_not_the_runs_overlap(tmp_path: Path) -> None:
    """It was said that 47 % of communication is hidden, and that the trace marks no steps."""
    path = write_warmup(tmp_path / "warm.sqlite", has_others=True)
    (row,) = csv_rows("overlap", path)
    assert (row["steps"], row["kernels"], row["overlap_%"]) == ("0", "2", "")
    (found,) = json.loads(run("summary", path, "--format", "json").stdout)["runs"]
    assert found["headline"] == f"Whether communication is exposed is not known: {ONLY_WARMUP}."


def test_what_only_warmup_steps_communicate_is_not_said_to_be_absent(tmp_path: Path) -> None:
    """As where gradients are accumulated. It was said that no collective is in the trace."""
    capture = bucket_steps(20, 20, 20)
    capture.ranges = [replace(one, name=f"step|index={n}|warmup={int(n < 1)}") for n, one in enumerate(capture.ranges)]
    capture.kernels = [one for one in capture.kernels if one.name != NCCL or one.start < STEP_NS]
    path = write_capture(tmp_path / "accumulates.sqlite", capture)
    (found,) = json.loads(run("summary", path, "--format", "json").stdout)["runs"]
    assert found["headline"] == f"Whether communication is exposed is not known: {WARMUP_COMMUNICATES}."
    assert found["parts_ns"]["compute_only"] > 0
    assert run("check", path, "--min-overlap", "50%").exit_code == 3


def test_collectives_without_length_are_none_of_warmup_and_not_absent(tmp_path: Path) -> None:
    """As where their ends are missing. It was said that no collective is in the trace."""
    path = write_capture(tmp_path / "x.sqlite", bucket_steps(0, 0))
    assert [rank.reason for rank in measure_overlap(load_trace(path)).ranks] == [NO_DURATIONS]
    assert "communication alone" not in run("summary", "--notes", path).stdout
    assert [row["exposed_ms"] for row in csv_rows("compare", path)] == [""]


def test_collectives_without_length_beside_warmup_were_not_timed_either(tmp_path: Path) -> None:
    """Where all steps are warm-up, sums are of work outside of steps; it was said to communicate for 0.00 ms."""
    path = write_warmup(tmp_path / "warm.sqlite", has_others=True, others_ns=0)
    (rank,) = measure_overlap(load_trace(path)).ranks
    assert (rank.reason, rank.collectives, rank.compute_ns) == (ONLY_WARMUP, 1, 9 * US)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns, rank.backward_overlapped_ns) == (None, None, None, None)


def test_graphs_recorded_whole_are_not_said_to_communicate_for_no_time(tmp_path: Path) -> None:
    capture = bucket_steps(20, 20)
    for kernel in capture.kernels:
        kernel.kind = "graph" if kernel.name == NCCL else kernel.kind
    (row,) = csv_rows("compare", write_capture(tmp_path / "x.sqlite", capture))
    assert (row["step_ms"], row["comm_ms"], row["exposed_ms"]) == ("0.04", "", "")


def test_two_ranks(tmp_path: Path) -> None:
    """Export ended with a traceback."""
    paths = [write_warmup(tmp_path / f"{name}.sqlite", has_others=True) for name in "ab"]
    assert ONLY_WARMUP in run("skew", *paths, "--one-run").stdout
    exported = run("export", *paths, "-o", tmp_path / "x.json")
    assert exported.exit_code == 0, exported.output
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "gradient" for event in events) == 6


def test_requirements_cannot_be_judged(tmp_path: Path) -> None:
    path = write_warmup(tmp_path / "warm.sqlite")
    rows = csv_rows("check", path, "--max-exposed-ms", 3, "--baseline", path)
    assert [(row["verdict"], row["why"].removeprefix("baseline: ")) for row in rows] == 3 * [("unknown", ONLY_WARMUP)]


def test_the_timeline_draws_all_of_them(tmp_path: Path) -> None:
    """It opened on a single nanosecond."""
    path = write_warmup(tmp_path / "warm.sqlite")
    (panel,) = build_timeline([source_of("warm", load_trace(path))]).panels
    assert ONLY_WARMUP in panel.facts
    assert panel.home_ns == (0, 107 * US + 1)
    error = run("timeline", path, "--steps", "1", "-o", tmp_path / "x.html")
    assert (error.exit_code, ONLY_WARMUP in error.stderr) == (1, True)
