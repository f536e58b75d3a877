"""docs/notebook.ipynb, cell by cell as Jupyter runs it: its figures are those of the command line."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from scripts.dev import run_notebook
from tests.command_line import run
from tests.conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTEBOOK = json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))
NAIVE_TO_BUCKETED = [ROOT / f"traces/{name}.sqlite" for name in ("naive", "flat", "bucketed_10mb")]
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def results() -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Its names, and what each cell shows."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT / "docs")
        yield names, [run_notebook.shown_by(cell, names) for cell in CELLS]


def test_its_cells_have_names_and_outputs() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, 1 + len(CELLS)))
    assert all(len(cell["outputs"]) == 1 for cell in CELLS)
    pictures = [data["image/png"] for cell in CELLS for data in [cell["outputs"][0]["data"]] if "image/png" in data]
    assert [base64.b64decode(picture)[:4] for picture in pictures] == [b"\x89PNG"] * 3
    assert (NOTEBOOK["nbformat"], len({cell["id"] for cell in NOTEBOOK["cells"]})) == (4, len(NOTEBOOK["cells"]))


@pytest.mark.slow
def test_its_outputs_are_what_its_cells_show_today(results: tuple[dict[str, Any], list[Any]]) -> None:
    """Otherwise: python scripts/dev/run_notebook.py."""
    for cell, shown in zip(CELLS, results[1], strict=True):
        (output,) = cell["outputs"]
        kept = {kind: "".join(text) for kind, text in output["data"].items()}
        today = run_notebook.data_of(shown)
        if "text/html" in today:  # the table as text lacks other columns in other releases of pandas
            kept["text/plain"] = today["text/plain"]
        assert output["metadata"].get("image/png", kept) == today, "".join(cell["source"])


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
