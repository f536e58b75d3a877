"""The pages of a report: the index first, then those of each run by the workers, the same whoever makes them."""

from __future__ import annotations

import re
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest

from ddp_prof import LoadOptions, TraceError, Workers, load_runs
from ddp_prof.cli import pages as report_command
from ddp_prof.present.html import report as pages
from ddp_prof.runs import timelines
from ddp_prof.runs.pages import MEASURES, make_pages, report_runs
from ddp_prof.runs.run import Run
from tests.command_line import run
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

RUNS = 3
NOTICE = "are still being written"

pytestmark = pytest.mark.usefixtures("no_browser")


@pytest.fixture
def captures(tmp_path: Path) -> list[Path]:
    """A run each, and one of two ranks."""
    names = [*(f"run{number}" for number in range(RUNS)), "job.rank0", "job.rank1"]
    return [write_capture(tmp_path / f"{name}.sqlite", known_truth(2)) for name in names]


def loaded(captures: list[Path], **who: object) -> list[Run]:
    options = LoadOptions(with_launches=True, to_draw=True)
    return load_runs(captures, options, workers=Workers(**who), measures=MEASURES)


def write_report(runs: list[Run], folder: Path, broken: Path | None = None, **more: object) -> list[str]:
    """Write it; a file breaks once the runs were measured."""
    reports = report_runs(runs)
    if broken:
        broken.write_bytes(b"no trace")
    return pages.write_report(reports, folder, make_pages=partial(make_pages, runs, reports, folder), **more)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_index_is_there_first_and_says_that_pages_follow(captures: list[Path], tmp_path: Path, jobs: int) -> None:
    folder = tmp_path / "report"
    seen: list[tuple[int, int, bool]] = []

    def progress(done: int, total: int) -> None:
        there = len(list(folder.glob("*-why.html")))
        seen.append((done, there, NOTICE in (folder / "index.html").read_text(encoding="utf-8")))
        assert total == RUNS + 1

    write_report(loaded(captures, jobs=jobs), folder, progress=progress)
    assert seen == [(done, done, True) for done in range(RUNS + 2)]
    index = (folder / "index.html").read_text(encoding="utf-8")
    assert NOTICE not in index
    assert set(re.findall(r'href="([^"#:]+\.html)"', index)) == {
        f"{name}{end}.html" for name in ("run0", "run1", "run2", "job") for end in ("", "-why", "-kernels")
    }
    assert active_children() == []


@pytest.mark.slow
def test_processes_make_the_same_pages_to_the_byte(
    captures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names are relative here
    (tmp_path / "after").mkdir()
    namesake = write_capture(tmp_path / "after" / captures[0].name, known_truth(2))
    files = [file.relative_to(tmp_path) for file in (captures[0], *captures[RUNS:], namesake)]
    for jobs in (1, 2):
        result = run("report", "--jobs", jobs, *files, "-o", f"report{jobs}")
        assert result.exit_code == 0, result.stderr
    alone, together = content(tmp_path / "report1"), content(tmp_path / "report2")
    assert alone.keys() == together.keys()
    assert [name for name in alone if alone[name] != together[name]] == []


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_whose_pages_cannot_be_made_is_named_and_has_no_links(
    captures: list[Path], tmp_path: Path, jobs: int
) -> None:
    runs = loaded(captures, jobs=jobs, leave_out=print)
    (problem, _) = write_report(runs, tmp_path / "report", captures[1])
    assert problem.startswith(f"the pages of a run are missing: {captures[1]}: neither a report")
    index = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "run1" in index
    assert "run1.html" not in index
    assert "run2.html" in index


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_strict_fails_where_they_cannot(captures: list[Path], tmp_path: Path, jobs: int) -> None:
    with pytest.raises(TraceError, match="neither a report") as failed:
        write_report(loaded(captures, jobs=jobs), tmp_path / "report", captures[1])
    assert failed.value.path == captures[1]
    assert active_children() == []


def test_of_many_runs_no_timeline_has_a_picture(
    captures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_PICTURES", 2)
    monkeypatch.setattr(timelines, "build_excerpt", None)  # it would fail
    write_report(loaded(captures), tmp_path / "report")
    assert "There are pictures of up to 2 runs." in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_steps_that_are_left_out_are_counted(
    captures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for most in (20, 1):
        monkeypatch.setattr("ddp_prof.runs.pages.MOST_STEPS", most)
        write_report(loaded(captures[:1]), tmp_path / str(most))
        why = (tmp_path / str(most) / "run0-why.html").read_text(encoding="utf-8")
        said.append((why.count("<option "), "1 of 2 steps" in why))
    assert said == [(2, False), (1, True)]


@pytest.mark.slow
def test_what_takes_long_is_said_once(captures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("report", "--jobs", 1, *captures, "-o", tmp_path / "report")
    assert "take about" not in run(*asked).stderr
    monkeypatch.setattr(report_command, "SECONDS_TO_TELL", 0)
    result = run(*asked)
    assert result.stdout.strip() == str(tmp_path / "report" / "index.html")
    assert re.findall(r"note: the pages of 4 runs take about \d+ s more; the index is there already", result.stderr)
    assert result.stderr.count("take about") == 1
