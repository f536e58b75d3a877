"""A report on more ranks than can be told apart event by event."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.figure import page_headline
from ddp_prof.runs import load_runs
from ddp_prof.runs import run as runs
from ddp_prof.runs.report import TraceEvents
from tests.analyze.collectives.test_straggler import rank_capture
from tests.command_line import run
from tests.conftest import ROOT
from tests.nsys_factory import write_capture

WORLD = 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 1 is late: of all ranks it has the least exposed communication."""
    for rank in range(WORLD):
        write_capture(tmp_path / f"job.rank{rank}.sqlite", rank_capture(rank, WORLD))
    return tmp_path


@pytest.mark.slow
def test_it_draws_the_ranks_with_most_exposed_time_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("BROWSER_PATH", str(folder / "no-browser"))
    drawn: list[str] = []
    source = runs.timeline_source

    def noted(title: str, part: TraceEvents, analysis: object, overlap: object) -> object:
        drawn.append(part.trace.path.name)
        return source(title, part, analysis, overlap)

    monkeypatch.setattr(runs, "timeline_source", noted)
    result = run("report", str(folder), "-o", str(folder / "pages"))
    assert result.exit_code == 0, result.output
    assert len(drawn) == 8
    assert "job.rank1.sqlite" not in drawn
    why = next(folder.glob("pages/*-why.html"))
    skew = json.loads(re.findall(r'id="skew-data">(.*?)</script>', why.read_text(), re.DOTALL)[0])
    assert skew["layout"]["yaxis"]["ticktext"] == [f"<b>rank {rank}</b>  " for rank in range(WORLD)]
    timeline = why.with_name(why.name.replace("-why", ""))
    assert "8 of 10 traces, those with the most exposed communication" in timeline.read_text()


def test_several_files_of_one_run_keep_its_sentence_and_cause() -> None:
    """Of eight ranks in eight files a page told which file hides least, and nothing of what that costs."""
    folder = ROOT / "traces" / "h200" / "gloo"
    files = sorted(folder.glob("naive.rank*.json.gz"))
    sources = runs.timeline_sources(load_runs(files))
    told = page_headline(build_timeline(sources))
    (found,) = json.loads(run("summary", "--format", "json", *files).stdout)["runs"]
    assert told.startswith(f"naive: {found['headline'].partition(';')[0]}")
    assert told.endswith(f" Cause: {found['cause']}")
    others = runs.timeline_sources(load_runs(sorted(folder.glob("*flat.rank*.json.gz")) + files))
    assert "Cause" not in page_headline(build_timeline(others)), "of two runs"
