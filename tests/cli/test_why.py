"""``collectives``, ``skew`` and the waterfall of ``compare`` from the command line."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.runs import load_runs
from ddp_prof.runs.pages import report_runs
from tests.analyze.collectives.test_straggler import STEPS, rank_capture
from tests.command_line import csv_rows, run
from tests.ingest.test_nsys_export import MS, known_truth
from tests.nsys_factory import Capture, Range, bucket_steps, write_capture


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    return [write_capture(tmp_path / f"x.rank{rank}.sqlite", rank_capture(rank)) for rank in (0, 1)]


def test_collectives_of_two_files_are_one_run(ranks: list[Path]) -> None:
    document = json.loads(run("collectives", "--format", "json", *ranks).stdout)
    assert {entry["rank"] for entry in document["collectives"]} == {0, 1}
    assert "80 % of the typical step's exposed time is tail, in transfer" in document["headline"], "20 of 10 + 15 ms"
    assert "a peer was missing in 20 %" in document["headline"]
    assert document["alignment"]["missing_ranks"] == []


def test_one_collective_a_row(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "known.sqlite", known_truth())
    rows = list(csv.DictReader(io.StringIO(run("collectives", "--format", "csv", path).stdout)))
    assert len(rows) == 8
    assert [float(row["when_tail_ms"]) for row in rows[:2]] == [0, 9]
    table = run("collectives", "--by", "step", path).stdout
    assert "100 % of the typical step's exposed time is tail" in table
    assert "the last collective starts 11.0 ms before backward ends." in table


def test_a_note_on_columns_names_only_columns_of_the_table(ranks: list[Path], tmp_path: Path) -> None:
    """Times were said to be "in the step" in captures without steps, and explained below tables that hold no times."""
    times = "note: ready, launch, start, end: time since the first of these in the "
    assert f"{times}step\n" in run("collectives", ranks[0]).stdout
    assert times not in run("collectives", "traces/bucketed_1mb.sqlite").stdout, "a row per bucket has no times"
    capture = known_truth()
    capture.ranges = []
    without = run("collectives", write_capture(tmp_path / "no_steps.sqlite", capture)).stdout
    assert f"{times}capture\n" in without
    assert "note: clocks of the ranks" not in without, "there is only one"
    assert "note: clocks of the ranks" in run("collectives", *ranks).stdout


def test_a_terminal_shows_the_longest_of_many_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row per step pushed the sentence above the table out of sight."""
    trace = write_capture(tmp_path / "steps.sqlite", bucket_steps(*range(4, 34)))
    assert len(csv_rows("critical", trace)) == 30
    monkeypatch.setenv("COLUMNS", "120")
    table = run("critical", trace).stdout
    first, *_, last = re.findall(r"^ +(\S+) +(?:process 100|(\d+) others) ", table, re.MULTILINE)
    assert first == ("29", ""), "the longest all-reduce is that of the last step"
    assert last == ("n/a", "22")
    assert "note: 8 of 30 rows, and the others summed; all rows: --wide" in table


def test_files_of_other_names_are_one_run_if_the_user_or_the_traces_say_so(ranks: list[Path], tmp_path: Path) -> None:
    moved = [path.rename(tmp_path / f"node{index}.sqlite") for index, path in enumerate(ranks)]
    assert len(json.loads(run("skew", "--separate", "--format", "json", *moved).stdout)) == 2
    for options in ((), ("--one-run",)):
        document = json.loads(run("skew", *options, "--format", "json", *moved).stdout)
        assert document["straggler"] == 1
        assert document["headline"].startswith("Rank 1 arrives last in 20 of 20 steps")


def test_of_a_capture_without_steps_no_number_of_steps_is_told(tmp_path: Path) -> None:
    """ "· 0 steps" stood above "The trace marks no whole step"."""
    files = []
    for rank in (0, 1):
        capture = rank_capture(rank)
        capture.ranges = [item for item in capture.ranges if not item.name.startswith("step|")]
        files.append(write_capture(tmp_path / f"x.rank{rank}.sqlite", capture))
    first, headline, *_ = run("skew", *files).stdout.splitlines()
    assert first.endswith("device: cuda")
    assert headline.startswith("The trace marks no whole step")


def test_skew_draws_one_run_only(ranks: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "skew.html"
    assert run("skew", *ranks, "--html", page).exit_code == 0
    assert "<title>Rank 1 arrives last in 20 of 20 steps" in page.read_text()
    other = write_capture(tmp_path / "known.sqlite", known_truth())
    assert run("skew", *ranks, other, "--html", page).exit_code == 2


def test_compare_has_the_waterfall_in_its_document_and_as_a_table(tmp_path: Path) -> None:
    naive, flat = (write_capture(tmp_path / f"{name}.sqlite", known_truth()) for name in ("naive", "flat"))
    document = json.loads(run("compare", "--format", "json", flat, naive).stdout)
    (change,) = document["waterfall"]["changes"]
    assert (change["before"], change["after"], change["step_ns"]) == ("naive", "flat", 0)
    page = tmp_path / "waterfall.html"
    result = run("compare", "--waterfall", flat, naive, "--html", page)
    assert "naive -> flat" in result.stdout
    assert page.is_file()


def test_a_step_of_collectives_is_drawn(ranks: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "timings.html"
    assert run("collectives", *ranks, "--html", page, "--step", "3").exit_code == 0
    assert "<title>80 % of the typical step&#39;s exposed time is tail" in page.read_text()
    missing = run("collectives", *ranks, "--html", page, "--step", "99")
    assert missing.exit_code == 1
    assert "no communication in step 99: choose another one with --step, from 0 to 19" in missing.stderr


def test_the_report_shows_steps_of_a_counter_that_restarts_apart(tmp_path: Path) -> None:
    capture = rank_capture(0)
    for position, found in enumerate(capture.ranges):
        if found.name.startswith("step|"):
            number = int(found.name.partition("index=")[2])
            capture.ranges[position] = replace(found, name=f"step|index={number % 2}")
    (loaded,) = load_runs([write_capture(tmp_path / "epochs.sqlite", capture)])
    (shown,) = report_runs([loaded])
    views = shown.load_steps()
    assert list(views) == list(range(STEPS))
    assert all(len(view) == 1 for view in views.values())


@pytest.mark.parametrize(("backward_ends", "costs"), [(10, 2.0), (7, 2.0), (5, 2.0), (13, 1.0), (14, 0.0)])
def test_what_a_straggler_costs_by_what_others_compute_meanwhile(
    backward_ends: int, costs: float, tmp_path: Path
) -> None:
    """Compute may hide the wait; but the transfer behind it could have ended 2 ms earlier, if it is not hidden, too."""
    for rank, begins in enumerate((6, 8)):
        ranges = [(f"process|rank={rank}|world=2|backend=gloo|device=cpu", 0, 160)]
        for step in range(8):
            at = 20 * step
            ranges += [
                (f"step|index={step}", at, at + 20),
                ("backward", at + 1, at + backward_ends),
                ("all_reduce|bucket=0|bytes=8|params=1", at + begins, at + 14),
                ("synchronize", at + backward_ends, at + 14),
            ]
        drawn = [Range(name, start * MS, end * MS, 100, domain="ddp_prof") for name, start, end in ranges]
        write_capture(tmp_path / f"x.rank{rank}.sqlite", Capture(ranges=drawn))
    (late,) = [row for row in csv_rows("skew", tmp_path) if row["rank"] == "1"]
    assert (late["last_steps"], float(late["costs_others_ms"])) == ("8", costs)
    said = run("skew", tmp_path).stdout
    assert ("compute hides all of the others' waiting" in said) == (costs == 0)
    assert (f"up to {costs:.2f} ms shorter without its lag" in " ".join(said.split())) == (costs > 0)
    advice = " ".join(run("doctor", tmp_path).stdout.split())
    assert ("Rank 1 arrives last in 8 of 8 steps, by 2.00 ms" in advice) == (costs > 0)
    assert (f"that costs another rank {costs:.2f} ms in such a step" in advice) == (costs > 0)
