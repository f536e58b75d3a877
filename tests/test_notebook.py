"""docs/notebook.ipynb, cell by cell as Jupyter runs it: its figures are those of the command line."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.command_line import run
from tests.conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTEBOOK = json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))
NAIVE_TO_BUCKETED = [ROOT / f"traces/{name}.sqlite" for name in ("naive", "flat", "bucketed_10mb")]
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def shown_by(cell: dict[str, Any], names: dict[str, Any]) -> object:
    """Run a cell; the value of its last line, which Jupyter shows."""
    *statements, last = ast.parse("".join(cell["source"])).body
    assert isinstance(last, ast.Expr), "a cell ends with what it shows"
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.fixture(scope="module")
def results() -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Its names, and what each cell shows."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT / "docs")
        yield names, [shown_by(cell, names) for cell in CELLS]


def test_it_is_kept_without_output() -> None:
    assert [cell for cell in CELLS if cell["outputs"] or cell["execution_count"]] == []
    assert (NOTEBOOK["nbformat"], len({cell["id"] for cell in NOTEBOOK["cells"]})) == (4, len(NOTEBOOK["cells"]))


@pytest.mark.slow
def test_its_ranks_are_those_of_overlap(results: tuple[dict[str, Any], list[Any]]) -> None:
    _, (labels, ranks, *_) = results
    documents = json.loads(run("overlap", "--format", "json", ROOT / "traces").stdout)
    assert labels == [document["label"] for document in documents]
    expected = [(document["label"], rank["exposed_ns"]) for document in documents for rank in document["ranks"]]
    assert list(zip(ranks["variant"], ranks["exposed_ns"], strict=True)) == expected
    assert (ranks["overlapped_ns"] + ranks["exposed_ns"] == ranks["comm_ns"]).all()


@pytest.mark.slow
def test_its_figures_show_what_the_commands_print(results: tuple[dict[str, Any], list[Any]]) -> None:
    names, (_, _, steps, whys, changes, timeline) = results
    (boxes,) = steps.data
    assert len(boxes.y) == 7 * 2 * 10  # variants, ranks, steps
    exposed_ns = names["collectives"]["exposed_ns"].sum()
    assert sum(sum(bar.y) for bar in whys.data) == pytest.approx(exposed_ns / 1e6)
    document = json.loads(run("collectives", "--format", "json", ROOT / "traces/bucketed_10mb.sqlite").stdout)
    assert exposed_ns == sum(collective["exposed_ns"] for collective in document["collectives"])
    waterfall = json.loads(run("compare", "--format", "json", *NAIVE_TO_BUCKETED).stdout)["waterfall"]
    assert changes.loc["tail_ns"].tolist() == [change["tail_ns"] for change in waterfall["changes"]]
    assert len(timeline.data) > 4
