"""``ddp-prof results`` from the command line."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.benchmark.store import open_database
from tests.benchmark.results_factory import OTHER_ENVIRONMENT, Sweep, study_like
from tests.command_line import run

pytestmark = pytest.mark.usefixtures("no_browser")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    sweep = study_like()
    sweep.fail("naive", work=(4, 512))
    return sweep.write(tmp_path / "traces" / "results.db")


def rows_of(*arguments: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(run("results", *arguments, "--format", "csv").stdout)))


def test_the_default_is_the_suites_database(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(database.parent.parent)
    result = run("results")
    assert result.exit_code == 0
    assert "mini model · 2 ranks · device: cpu" in result.stdout
    assert "out_of_memory" in result.stdout
    assert "Overlap takes" in result.stdout


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_chosen_columns_are_those_of_the_settings(form: str, database: Path) -> None:
    """A table ended with 'no column 'step_ms' in this table: choose from observation', and Markdown had all columns."""
    result = run("results", database, "--columns", "step_ms,context", "--format", form)
    assert result.exit_code == 0, result.stderr
    cells = [re.findall(r"[^\s|]+", line) for line in result.stdout.splitlines()]
    shown = [(float(row[0]), row[1]) for row in cells if len(row) == 2 and re.fullmatch(r"[\d.]+ \d+", " ".join(row))]
    known = [row for row in rows_of(database) if row["avg_step_time_ms"]]
    assert [context for _, context in shown] == [row["seq_len"] for row in known]
    assert [step for step, _ in shown] == pytest.approx([float(row["avg_step_time_ms"]) for row in known], abs=0.0051)


def test_wrong_usage_is_exit_code_2(database: Path) -> None:
    assert run("results", database, "--format", "xml").exit_code == 2


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    missing = run("results", tmp_path / "none.db")
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)
    assert "no such file: make it with scripts/run_comparison.sh" in missing.stderr
    open_database(tmp_path / "empty.db").close()
    empty = run("results", tmp_path / "empty.db")
    assert (empty.exit_code, empty.stderr.count("\n")) == (1, 1)
    assert "no runs in it yet: fill it with scripts/run_comparison.sh" in empty.stderr
    for folder in (".", "/", tmp_path):  # a traceback: a folder such as '.' has no name
        assert f"Error: {folder}: a folder: name a database in it" in run("results", folder).stderr
    (tmp_path / "text.db").write_text("no database " * 200)
    assert "not a results database" in run("results", tmp_path / "text.db").stderr


def test_json(database: Path) -> None:
    document = json.loads(run("results", database, "--format", "json").stdout)
    assert (document["schema"], document["database"]) == (1, str(database))
    (testbed,) = document["testbeds"]
    assert (testbed["model_size"], testbed["world_size"], testbed["environment"]["cpu"]) == ("mini", 2, "Two Cores")
    assert len(testbed["settings"]) == 22
    naive = testbed["settings"][0]
    assert (naive["variant"], naive["local_batch_size"], naive["seq_len"], naive["status"]) == ("naive", 2, 64, "ok")
    assert naive["step_ns"]["value"] == pytest.approx(240e6, rel=0.02)
    assert len(naive["step_ns"]["medians"]) == 3
    assert testbed["link"]["bytes_per_ns"] == pytest.approx(0.8)
    assert testbed["definitions"] == DEFINITIONS
    assert testbed["observations"][0]["text"].startswith("Flat takes 0.8 % (")
    assert all(item["low"] <= item["value"] <= item["high"] for item in testbed["observations"] if item["text"])


def test_markdown_stands_alone(database: Path) -> None:
    result = run("results", database, "--format", "markdown")
    assert result.stdout.startswith("# Results\n\nWritten by `ddp-prof results`")
    assert "### What these numbers show" in result.stdout
    assert result.stderr == ""


def test_two_environments_are_told_apart(tmp_path: Path) -> None:
    sweep = study_like()
    sweep.environment = OTHER_ENVIRONMENT
    sweep.add("overlap", 50, 5)
    path = sweep.write(tmp_path / "results.db")
    text = run("results", path).stdout
    assert text.index("Two Cores") < text.index("Other Cores")
    assert "2 testbeds are shown separately" in text
    assert {row["environment"] for row in rows_of(path)} == {"e1", "e2"}
    assert next(row for row in rows_of(path) if row["environment"] == "e2")["speedup_vs_naive"] == ""


def test_output_writes_figures_text_and_the_csv(database: Path, tmp_path: Path) -> None:
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    result = run("results", database, "-o", tmp_path / "figures")
    assert result.exit_code == 0
    problem, written = result.stderr.splitlines()
    assert problem.startswith("note: pictures need Chromium")
    assert written == f"{tmp_path / 'figures' / 'results.md'} {database.with_suffix('.csv')}"
    assert (tmp_path / "figures" / "results.md").is_file()
    assert (tmp_path / "figures" / "variants.html").is_file()
    with database.with_suffix(".csv").open() as file:
        assert len(list(csv.DictReader(file))) == 22
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before


def test_showing_loads_nothing_heavy(database: Path) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from ddp_prof.cli import main;"
        f"done = CliRunner().invoke(main, ['results', {str(database)!r}]);"
        "heavy = ('torch', 'pandas', 'plotly', 'choreographer', 'pyarrow');"
        "print(done.exit_code, [m for m in heavy if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0 []"


def test_a_single_failed_setting_is_shown(tmp_path: Path) -> None:
    sweep = Sweep(repeats=1)
    sweep.fail("naive")
    path = sweep.write(tmp_path / "results.db")
    result = run("results", path, "-o", tmp_path / "figures")
    assert result.exit_code == 0
    assert "out_of_memory" in result.stdout


def test_the_table_never_takes_the_place_of_its_database(database: Path, tmp_path: Path) -> None:
    odd = database.rename(database.with_suffix(".csv"))
    before = odd.read_bytes()
    assert run("results", odd, "-o", tmp_path / "figures").exit_code == 2
    assert odd.read_bytes() == before
    assert run("results", odd).exit_code == 0


def test_a_table_that_cannot_be_written_does_not_cost_the_figures(database: Path, tmp_path: Path) -> None:
    database.with_suffix(".csv").mkdir()
    result = run("results", database, "-o", tmp_path / "new")
    assert (result.exit_code, result.stderr.splitlines()[-1].startswith("Error: ")) == (1, True)
    assert "results.csv" in result.stderr
    assert (tmp_path / "new" / "results.md").is_file()
