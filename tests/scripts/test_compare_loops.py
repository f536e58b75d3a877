"""The table of docs/compared_with_ddp.md that says under what a training loop equals one process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.ddp import loops, test_loops, test_unfinished

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(r"ignore:::torch\.")]
OURS = "`naive` to `bucketed`"
KEYS = ("naive", "flat", "overlap", "bucketed")


@pytest.fixture
def compare_loops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, in this process, whose server has imported torch."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/dev"))
    return importlib.import_module("compare_loops")


def test_the_table_in_the_documentation_is_what_the_loops_give(
    compare_loops: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rebuild with ``python scripts/dev/compare_loops.py --write``."""
    columns = {column: wraps[-1:] for column, wraps in compare_loops.COLUMNS.items()}  # see the next test
    monkeypatch.setattr(compare_loops, "COLUMNS", columns)
    monkeypatch.setattr("sys.argv", ["compare_loops.py"])
    assert compare_loops.main() == 0
    table = capsys.readouterr().out
    rows = table.strip().splitlines()
    page = (ROOT / "docs/compared_with_ddp.md").read_text().splitlines()
    assert page[page.index(rows[0]) : page.index(rows[-1]) + 1] == rows
    assert table.count("| right ") > 80


def test_all_variants_of_the_column_of_several_are_right_in_other_tests(compare_loops: Any) -> None:
    assert [wrap.args[0] for wrap in compare_loops.COLUMNS[OURS]] == [*KEYS]
    assert [len(wraps) for column, wraps in compare_loops.COLUMNS.items() if column != OURS] == [1] * 5
    names = {id(loop): name for each in (loops.LOOPS, test_unfinished.LOOPS) for name, loop in each.items()}
    tried = {*test_loops.runs(), *test_unfinished.RUNS}
    for row in compare_loops.ROWS.values():
        assert {(row.world, names[id(row.loop)], key) for key in KEYS} <= tried
