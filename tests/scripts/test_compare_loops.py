"""The table of docs/compared_with_ddp.md that says under what a training loop equals one process."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ddp import loops, test_loops, test_unfinished

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/compared_with_ddp.md"
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(r"ignore:::torch\.")]
OURS = "`naive` to `bucketed`"
SHARDED_OPTIMIZER = "`overlap`, `ShardedOptimizer`"
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


@pytest.mark.nightly
def test_nightly_the_table_in_the_documentation_is_what_the_loops_give(
    compare_loops: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rebuild with ``python scripts/dev/compare_loops.py --write``."""
    every = {column: wraps[-1:] for column, wraps in compare_loops.COLUMNS.items()}
    monkeypatch.setattr(compare_loops, "COLUMNS", every)
    monkeypatch.setattr("sys.argv", ["compare_loops.py"])
    assert compare_loops.main() == 0
    assert capsys.readouterr().out in PAGE.read_text()


def test_our_columns_of_the_table_are_what_the_loops_give(compare_loops: Any) -> None:
    """What other tests find to be right, in the gate or in a nightly, is not run again."""
    shown, columns, rows = cells(PAGE.read_text()), compare_loops.COLUMNS, compare_loops.ROWS
    assert list(shown) == ["loop", *columns]
    assert shown["loop"] == [*rows]
    assert [wrap.args[0] for wrap in columns[OURS]] == [*KEYS]
    assert [len(wraps) for column, wraps in columns.items() if column != OURS] == [1] * 5
    names = {id(loop): name for each in (loops.LOOPS, test_unfinished.LOOPS) for name, loop in each.items()}
    tried = {*test_loops.every_run(), *test_unfinished.every_run()}

    def is_tried(row: str, key: str) -> bool:
        return (rows[row].world, names[id(rows[row].loop)], key) in tried

    assert all(is_tried(row, key) for row in rows for key in KEYS)
    assert {*shown[OURS]} == {*shown[SHARDED_OPTIMIZER]} == {"right"}
    left = [row for row in rows if not is_tried(row, "sharded")]
    (wrap,) = columns["`sharded`"]
    given = compare_loops.outcomes(wrap, left, 2)
    assert dict(zip(rows, shown["`sharded`"], strict=True)) == {row: given.get(row, "right") for row in rows}
