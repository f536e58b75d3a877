"""``ddp-prof check`` from the command line: its exit codes and what it prints."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ddp_prof.analyze.variants.regression_gate import GateReport, GateResult
from ddp_prof.present.tables.check import verdict_line
from tests.analyze.collectives.test_straggler import rank_capture
from tests.command_line import run
from tests.conftest import ROOT
from tests.ingest.test_nsys_export import MS, known_truth
from tests.kineto_factory import write_kineto
from tests.nsys_factory import write_capture

STEADY = (80, 80, 81, 81, 80)
NOISY = (77, 78, 86, 97, 99)
SLOW = (96, 96, 97, 97, 96)


def capture(path: Path, step_ms: tuple[int, ...] = STEADY) -> Path:
    """Overlap 74.3 %, exposed 9 ms and a tail of 9 ms a step, which lasts as long as asked."""
    truth = known_truth(len(step_ms))
    for range_ in truth.ranges:
        if range_.name.startswith("step_"):
            range_.end = range_.start + step_ms[int(range_.name.removeprefix("step_"))] * MS
    return write_capture(path, truth)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return capture(tmp_path / "known.sqlite")


@pytest.mark.parametrize(
    "limits",
    [
        ["--min-overlap", "74%"],
        ["--min-overlap", "0.74"],
        ["--max-exposed-ms", "9"],
        ["--max-tail-ms", "9"],
        ["--min-overlap", "74%", "--max-exposed-ms", "9.5", "--max-tail-ms", "9.5"],
    ],
)
def test_met_is_exit_code_0(trace: Path, limits: list[str]) -> None:
    result = run("check", trace, *limits)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("passed, ")


def test_what_two_decimals_do_not_tell_apart_is_said(trace: Path) -> None:
    """A table with 'measured 9.00, limit 9.00, failed' seemed to be wrong."""
    (row,) = csv.DictReader(io.StringIO(run("check", trace, "--max-exposed-ms", "8.999", "--format", "csv").stdout))
    assert (row["verdict"], row["why"]) == ("failed", "beyond the limit by less than the table shows")
    (row,) = csv.DictReader(io.StringIO(run("check", trace, "--max-exposed-ms", "8.9", "--format", "csv").stdout))
    assert (row["verdict"], row["why"]) == ("failed", "")


@pytest.mark.parametrize(
    "limits",
    [
        ["--min-overlap", "75%"],
        ["--max-exposed-ms", "8.9"],
        ["--max-tail-ms", "8.9"],
        ["--min-overlap", "74%", "--max-exposed-ms", "8.9"],
    ],
)
@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_not_met_is_exit_code_3_in_every_format(trace: Path, limits: list[str], form: str) -> None:
    result = run("check", trace, *limits, "--format", form)
    assert result.exit_code == 3
    verdict = f"failed, 1 of {'2 requirements' if len(limits) > 2 else '1 requirement'} not met"
    assert [verdict in text for text in (result.stdout, result.stderr)] == [
        form in "table markdown",
        form in "csv json",
    ]


def test_missing_data_is_exit_code_3(tmp_path: Path) -> None:
    truth = known_truth()
    truth.kernels = [kernel for kernel in truth.kernels if "nccl" not in kernel.name]
    path = write_capture(tmp_path / "x.sqlite", truth)
    limits = ("--min-overlap", "0", "--max-exposed-ms", "1000", "--max-tail-ms", "1000")
    result = run("check", path, *limits, "--format", "csv")
    assert result.exit_code == 3
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["verdict"], row["why"]) for row in rows] == [
        ("unknown", "nothing in this trace is known to communicate")
    ] * 3
    assert result.stderr.splitlines()[-1] == "unknown, 3 of 3 requirements cannot be judged"


@pytest.mark.parametrize(
    ("statuses", "line"),
    [
        (["passed"], "passed, 1 of 1 requirement met"),
        (["passed", "failed"], "failed, 1 of 2 requirements not met"),
        (["failed", "unknown", "unknown"], "failed, 1 of 3 requirements not met, 2 cannot be judged"),
        (["passed", "unknown"], "unknown, 1 of 2 requirements cannot be judged"),
    ],
)
def test_the_verdict_is_what_the_rows_say(statuses: list[str], line: str) -> None:
    verdicts = tuple(GateResult("tail", "ms", None, 1.0, status) for status in statuses)
    assert verdict_line([GateReport(None, verdicts)]) == line


def test_a_requirement_of_two_runs_is_one_requirement() -> None:
    """It was 'failed, 1 of 2 requirements not met' for one requirement, of which there are two verdicts."""
    reports = [GateReport(None, (GateResult("tail", "ms", None, 1.0, status),)) for status in ("passed", "failed")]
    assert verdict_line(reports) == "failed, 1 of 2 cases not met (1 requirement, 2 runs)"
    assert verdict_line(reports[:1]) == "passed, 1 of 1 requirement met"


def test_noise_within_the_spread_is_exit_code_0(tmp_path: Path) -> None:
    baseline, noisy = capture(tmp_path / "a.sqlite"), capture(tmp_path / "b.sqlite", NOISY)
    result = run("check", noisy, "--baseline", baseline, "--max-regression", "5%")
    assert result.exit_code == 0
    assert "beyond the limit, but within both runs' spread" in result.stdout
    assert f"baseline: {baseline}" in result.stdout
    assert "against the baseline: medians over the steps" in result.stdout


def test_a_regression_beyond_the_spread_is_exit_code_3(tmp_path: Path) -> None:
    baseline, slow = capture(tmp_path / "a.sqlite"), capture(tmp_path / "b.sqlite", SLOW)
    for limit, code in (([], 3), (["--max-regression", "5%"], 3), (["--max-regression", "0.25"], 0)):
        assert run("check", slow, "--baseline", baseline, *limit).exit_code == code
    assert run("check", baseline, "--baseline", slow, "--max-regression", "0").exit_code == 0, "faster is no regression"


def test_what_changed_is_said_where_a_run_fails_against_the_baseline_and_not_for_another_limit(tmp_path: Path) -> None:
    baseline, slow = capture(tmp_path / "a.sqlite"), capture(tmp_path / "b.sqlite", SLOW)
    for accepted, is_told in (("0.05", True), ("0.25", False)):
        limits = ("--baseline", baseline, "--max-regression", accepted, "--min-overlap", "99%")
        result = run("check", slow, *limits)
        assert (result.exit_code, "mean step against the baseline" in result.stdout) == (3, is_told)


def test_where_the_host_runs_ahead_the_device_tells_which_run_is_slower(tmp_path: Path) -> None:
    """The host's ranges are of 5 ms in both; step time was judged by them, and passed."""
    fast, slow = known_truth(6), known_truth(6)
    for kernel in slow.kernels:
        kernel.start, kernel.end = kernel.start * 6 // 5, kernel.end * 6 // 5
    baseline, later = (write_capture(tmp_path / f"{name}.sqlite", truth) for name, truth in (("a", fast), ("b", slow)))
    result = run("check", later, "--baseline", baseline, "--format", "json")
    verdict = json.loads(result.stdout)["runs"][0]["verdicts"][0]
    assert (verdict["requirement"], verdict["status"]) == ("step time against baseline", "failed")
    assert (verdict["measured"], verdict["baseline"]) == (120 * MS, 100 * MS)


def test_too_few_steps_are_exit_code_3(trace: Path, tmp_path: Path) -> None:
    short = capture(tmp_path / "short.sqlite", STEADY[:2])
    result = run("check", trace, "--baseline", short)
    assert result.exit_code == 3
    assert "baseline: fewer than 3 steps, so no spread is known" in result.stdout


def test_a_cpu_is_not_compared_with_a_gpu(trace: Path) -> None:
    result = run("check", trace, "--baseline", ROOT / "traces" / "flat.sqlite")
    assert result.exit_code == 3
    assert "a run on cuda cannot be compared with one on cpu" in result.stdout


def test_a_baseline_by_another_profiler_is_told(tmp_path: Path) -> None:
    """Of one job, torch.profiler made steps of 453 ms and nsys of 398: a gate compared them without a word."""
    of_nsys = write_capture(tmp_path / "a.sqlite", known_truth())
    of_torch = write_kineto(tmp_path / "b.json", known_truth())
    told = "what recording adds to a step, and on a CPU what counts as communication, differs between these"
    for command in (["check", "--baseline", of_torch, of_nsys], ["compare", of_torch, of_nsys]):
        assert told in run(*command).stdout
    for command in (["check", "--baseline", of_nsys, of_nsys.with_suffix(".copy")], ["compare", of_nsys]):
        of_nsys.with_suffix(".copy").write_bytes(of_nsys.read_bytes())
        assert told not in run(*command).stdout


def test_one_run_that_fails_is_enough(trace: Path, tmp_path: Path) -> None:
    slow = capture(tmp_path / "slow.sqlite", SLOW)
    result = run("check", trace, slow, "--baseline", trace, "--format", "json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert [(entry["label"], entry["passed"]) for entry in document["runs"]] == [("known", True), ("slow", False)]
    assert (document["schema"], document["passed"], document["baseline"]) == (1, False, str(trace))
    failed = document["runs"][1]["verdicts"][0]
    assert (failed["requirement"], failed["unit"], failed["measured"]) == ("step time against baseline", "ns", 96 * MS)


def test_json_carries_nanoseconds_and_the_rank(trace: Path) -> None:
    document = json.loads(run("check", trace, "--max-exposed-ms", "10", "--format", "json").stdout)
    (verdict,) = document["runs"][0]["verdicts"]
    assert verdict == {
        "requirement": "max exposed",
        "unit": "ns",
        "measured": 9 * MS,
        "limit": 10 * MS,
        "baseline": None,
        "spread": None,
        "status": "passed",
        "reason": None,
        "rank": None,
        "process": 100,
        "rank_device": 0,
    }


def test_markdown_stands_alone(tmp_path: Path) -> None:
    truth = known_truth()
    truth.kernels = [kernel for kernel in truth.kernels if "nccl" not in kernel.name]
    for item in truth.kernels:
        item.name = item.name.replace("gemm_forward", "all_reduce<float>*")
    title, blank, *rest = run(
        "check", write_capture(tmp_path / "x.sqlite", truth), "--min-overlap", "80%", "--format", "markdown"
    ).stdout.splitlines()
    assert (title, blank) == ("### ddp-prof check: unknown, 1 of 1 requirement cannot be judged", "")
    table, notes = rest[: rest.index("")], rest[rest.index("") + 1 :]
    assert len({line.count("|") for line in table}) == 1
    assert "| unknown | process 100 | nothing in this trace is known to communicate |" in table[-1]
    assert all(line.startswith("- ") for line in notes)
    assert any(r"all_reduce\<float>\*" in line for line in notes), "doubts, as text"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing is required"),
        (["--max-regression", "5%"], "needs a --baseline"),
        (["--min-overlap", "50%", "--percentile", "90"], "--percentile needs a limit in ms"),
        *(
            (["--min-overlap", text], "is not a share")
            for text in ("80", "-1", "nan", "inf", "1.01", "101%", "x", "%", "")
        ),
        (["--baseline", "x.sqlite", "--max-regression", "5"], "is not a share"),
        (["--baseline", "x.sqlite", "--max-regression", "1"], "1% or 0.01"),
        *((["--max-exposed-ms", text], "--max-exposed-ms") for text in ("-1", "nan", "inf", "5ms", "1e999")),
    ],
)
def test_nonsense_is_wrong_usage_in_one_line(trace: Path, arguments: list[str], words: str) -> None:
    result = run("check", trace, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert words in line


def test_a_baseline_is_one_run(trace: Path, tmp_path: Path) -> None:
    capture(tmp_path / "other.sqlite")
    result = run("check", trace, "--baseline", tmp_path)
    assert result.exit_code == 2
    assert "2 runs (known, other)" in result.stderr


@pytest.mark.parametrize("content", [None, b"", b"\0random"])
def test_an_unreadable_baseline_is_exit_code_1(trace: Path, tmp_path: Path, content: bytes | None) -> None:
    bad = tmp_path / "bad.sqlite"
    if content is not None:
        bad.write_bytes(content)
    result = run("check", trace, "--baseline", bad)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {bad}: ")


def test_a_missing_rank_is_told_and_can_be_forbidden(tmp_path: Path) -> None:
    files = [write_capture(tmp_path / f"x.rank{rank}.sqlite", rank_capture(rank)) for rank in (0, 1)]
    alone = run("check", files[0], "--max-tail-ms", "1000")
    assert alone.exit_code == 0
    assert "x: judged by 1 of 2 ranks" in alone.stdout
    assert "to require them all: --all-ranks" in alone.stdout
    forbidden = run("check", files[0], "--all-ranks")
    assert forbidden.exit_code == 3
    assert "to require them all" not in forbidden.stdout, "they are required"
    both = run("check", *files, "--all-ranks", "--format", "csv")
    assert both.exit_code == 0
    (row,) = csv.DictReader(io.StringIO(both.stdout))
    assert (row["measured"], row["limit"], row["unit"]) == ("2", "2", "ranks")


def test_a_baseline_from_another_gpu_is_refused_by_what_the_traces_say(trace: Path, tmp_path: Path) -> None:
    """Neither has a run.json; both were taken for runs of one job."""
    baseline = capture(tmp_path / "baseline.sqlite")
    for path, gpu in ((trace, "Tesla V100"), (baseline, "NVIDIA A100")):
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)")
            database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?)", (gpu,))
            database.commit()
    result = run("check", trace, "--baseline", baseline, "--format", "csv")
    assert result.exit_code == 3
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    reason = "not comparable with the baseline: GPUs Tesla V100 and NVIDIA A100"
    assert [(row["verdict"], row["why"]) for row in rows] == [("unknown", reason)] * 2
