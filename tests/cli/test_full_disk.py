"""A disk that fills up while a command writes: one line that names the file, and nothing half-written."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import Result

from tests import command_line
from tests.conftest import ROOT
from tests.full_disk import ROOM, full_disk

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("BROWSER_PATH", "")


def run(*arguments: str | Path) -> Result:
    """A command that finds no room."""
    with full_disk():
        return command_line.run(*arguments)


def test_bytecode_of_what_is_imported_meanwhile_is_not_left_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After these tests alone, commands ended with "Aborted!": EOFError, marshal data too short."""
    (tmp_path / "imported_on_a_full_disk.py").write_text(f"names = {[*map(str, range(2 * ROOM))]}")
    monkeypatch.syspath_prepend(tmp_path)
    with full_disk():
        import_module("imported_on_a_full_disk")
    assert [file.name for file in tmp_path.iterdir()] == ["imported_on_a_full_disk.py"]


WRITERS = {
    "timeline": ["timeline", "TRACE", "-o", "x.html"],
    "report": ["report", "TRACE", "-o", "."],
    "export": ["export", "traces/naive.sqlite", "-o", "x.json"],
    "export, packed": ["export", "traces/naive.sqlite", "-o", "x.json.gz"],
    "collectives": ["collectives", "TRACE", "--html", "x.html"],
    "skew": ["skew", "traces/overlap.sqlite", "--html", "x.html"],
    "compare": ["compare", "TRACE", "--html", "x.html"],
    "results": ["results", "traces/results.db", "-o", "."],
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_there_stays(name: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "out"
    folder.mkdir()
    for file in ("x.html", "x.json", "x.json.gz", "index.html", "plotly.min.js", "results.md"):
        (folder / file).write_text("of before")
    *command, output = WRITERS[name]
    done = run(*(trace if word == "TRACE" else word for word in command), folder / output)
    said = done.stderr.splitlines()
    assert (done.exit_code, len(said)) == (1, 1), done.stderr
    assert f"{folder}" in said[0]
    assert said[0].endswith("File too large: make room there, or write to another place")
    assert {path.read_text() for path in folder.iterdir()} == {"of before"}
    assert len(list(folder.iterdir())) == 6


@pytest.mark.parametrize("command", ["timeline", "export"])
def test_of_what_goes_to_stdout_nothing_is_left(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run(command, "traces/naive.sqlite", "-o", "-")
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "make room there, or set TMPDIR" in done.stderr
    assert list(tmp_path.iterdir()) == []
