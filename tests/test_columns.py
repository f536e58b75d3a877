"""A figure of a step is declared in one place; tables, documents, frames, docs and pages follow."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_prof.analyze.overlap import RankOverlap
from ddp_prof.analyze.step_columns import StepLength, StepOverlap
from ddp_prof.columns import Hidden, hidden_fields, result_columns
from tests.golden import ROOT

PLACE = "ddp_prof/analyze/step_columns.py"
BEFORE = "    tail_ns: int | None = column("
ADDED = """\
    half_ns: int | None = column(
        "half of the window",
        measure=lambda steps: steps.rank.breakdown.window_ns // 2,
        null="nobody knows",
        stays=ALWAYS,
    )
"""
SHOW_ALL = """
import json, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from click.testing import CliRunner
from ddp_prof.cli import main
from ddp_prof.runs import load_runs
sys.path.insert(0, "scripts/dev")
from readme import figures_of

def run(*arguments):
    result = CliRunner().invoke(main, [*arguments, "traces/overlap.sqlite"], catch_exceptions=False)
    assert not result.exit_code, result.output
    return result.stdout

run("report", "-o", sys.argv[1])
print(json.dumps({
    "table": run("overlap", "--steps"),
    "csv": run("overlap", "--steps", "--format", "csv"),
    "json": run("overlap", "--format", "json"),
    "frame": load_runs(["traces/overlap.sqlite"])[0].overlap().to_frame(by_step=True).to_csv(),
    "docs": figures_of("step"),
    "page": next(Path(sys.argv[1]).glob("*-kernels.html")).read_text(),
}))
"""


def test_a_column_that_is_added_in_one_place_is_everywhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ddp_prof", tmp_path / "ddp_prof", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / PLACE
    before, after = place.read_text(encoding="utf-8").split(BEFORE)
    place.write_text(before + ADDED + BEFORE + after, encoding="utf-8")

    command = [sys.executable, "-c", SHOW_ALL, str(tmp_path / "report"), str(tmp_path)]
    paths = {"DDP_PROF_CACHE": "off", "COLUMNS": "200", "PATH": ""}
    ran = subprocess.run(command, cwd=ROOT, env=paths, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr
    shown = json.loads(ran.stdout)

    windows_ns = [step["window_ns"] for rank in json.loads(shown["json"])["ranks"] for step in rank["steps"]]
    halves_ns = [step["half_ns"] for rank in json.loads(shown["json"])["ranks"] for step in rank["steps"]]
    halves_ms = [f"{ns / 1e6:.2f}" for ns in halves_ns]
    assert any(halves_ns)
    assert halves_ns == [ns // 2 for ns in windows_ns]
    assert [row["half_ms"] for row in csv.DictReader(io.StringIO(shown["csv"]))] == [str(ns / 1e6) for ns in halves_ns]
    assert [row["half_ns"] for row in csv.DictReader(io.StringIO(shown["frame"]))] == list(map(str, halves_ns))
    assert all(text in shown["table"] for text in ("half", *halves_ms))
    assert "| `half_ns` | ns | half of the window | nobody knows |" in shown["docs"]
    cells = re.sub("<[^>]*>", " ", shown["page"]).split()
    assert {"half", *halves_ms} <= set(cells)


@pytest.mark.parametrize("kind", [RankOverlap, StepOverlap, StepLength])
def test_each_figure_has_a_unit_and_a_meaning(kind: type) -> None:
    for one in result_columns(kind):
        assert one.meaning.rstrip(".") == one.meaning != "", one.name
        if one.name.endswith("_ns"):
            assert one.unit == "ns"


def test_what_a_graph_hides_is_null_but_not_the_time_in_which_it_ran() -> None:
    hidden = hidden_fields(StepOverlap, Hidden.GRAPHS)
    assert {"overlapped_ns", "exposed_ns", "idle_ns", "tail_ns", "blocking_ns"} <= hidden.keys()
    assert not {"comm_ns", "window_ns", "kernels"} & hidden.keys()
