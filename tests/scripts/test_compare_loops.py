"""The table of docs/compared_with_ddp.md that says under what a training loop equals one process."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ddp import loops, test_loops, test_unfinished
from tests.examples import IS_NIGHTLY

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(r"ignore:::torch\.")]
OURS = "`naive` to `bucketed`"
DIVIDING = ("`overlap`, `ShardedOptimizer`", "`sharded`")
BEGIN, END = "<!-- made by scripts/dev/compare_loops.py -->", "<!-- end -->"
KEYS = ("naive", "flat", "overlap", "bucketed")


@pytest.fixture
def compare_loops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, in this process, whose server has imported torch."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/dev"))
    return importlib.import_module("compare_loops")


def cells(table: str) -> dict[str, list[str]]:
    """Columns of the table by their heads, with errors in the place of their numbers."""
    lines = table.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    errors = dict(re.findall(r"^(\d+)\. (.*)$", "\n".join(lines), re.MULTILINE))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    told = [
        [errors[cell.removeprefix("error ")] if cell.startswith("error ") else cell for cell in row] for row in rows
    ]
    return {head: column for head, *column in zip(*told, strict=True)}


def test_the_table_in_the_documentation_is_what_the_loops_give(
    compare_loops: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rebuild with ``python scripts/dev/compare_loops.py --write``; a nightly runs torch's columns, too."""
    page = (ROOT / "docs/compared_with_ddp.md").read_text()
    shown, every = cells(page), dict(compare_loops.COLUMNS)
    run = {column: wraps[-1:] for column, wraps in every.items() if IS_NIGHTLY or column in DIVIDING}
    monkeypatch.setattr(compare_loops, "COLUMNS", run)
    monkeypatch.setattr("sys.argv", ["compare_loops.py"])
    assert compare_loops.main() == 0
    given = capsys.readouterr().out
    if IS_NIGHTLY:
        assert given in page
    assert list(shown) == ["loop", *every]
    assert cells(given) == {column: shown[column] for column in ("loop", *run)}
    assert {*shown[OURS]} == {"right"}, "see the next test"


def test_all_variants_of_the_column_of_several_are_right_in_other_tests(compare_loops: Any) -> None:
    assert [wrap.args[0] for wrap in compare_loops.COLUMNS[OURS]] == [*KEYS]
    assert [len(wraps) for column, wraps in compare_loops.COLUMNS.items() if column != OURS] == [1] * 5
    names = {id(loop): name for each in (loops.LOOPS, test_unfinished.LOOPS) for name, loop in each.items()}
    tried = {*test_loops.runs(), *test_unfinished.RUNS}
    for row in compare_loops.ROWS.values():
        assert {(row.world, names[id(row.loop)], key) for key in KEYS} <= tried
