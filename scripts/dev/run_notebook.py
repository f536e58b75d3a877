"""Runs docs/notebook.ipynb and writes its outputs into it, as Jupyter would; figures need Chromium.

Usage: python scripts/dev/run_notebook.py

A figure becomes a picture, which GitHub and a page of the documentation show, too. What it draws is kept beside it as a
digest, so that ``tests/test_notebook.py`` tells whether it would be drawn alike today.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
WIDTH, HEIGHT = 1000, 420
"""Pixels of a figure that has no size of its own."""

Cell = dict[str, Any]


def shown_by(cell: Cell, names: dict[str, Any]) -> object:
    """Run a cell; the value of its last line, which Jupyter shows."""
    *statements, last = ast.parse("".join(cell["source"])).body
    assert isinstance(last, ast.Expr), "a cell ends with what it shows"
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)  # noqa: S102 - our own notebook
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307


def data_of(shown: object) -> dict[str, Any]:
    """What a cell's value says, without its look: the text of lists, the HTML of tables, the digest of figures."""
    if hasattr(shown, "to_plotly_json"):
        drawn = json.dumps(json.loads(shown.to_json())["data"], sort_keys=True)
        return {"digest": hashlib.sha256(drawn.encode()).hexdigest()}
    if hasattr(shown, "to_html"):
        return {"text/html": shown.to_html(max_rows=20), "text/plain": repr(shown)}
    return {"text/plain": repr(shown)}


def output_of(shown: object, number: int) -> dict[str, Any]:
    data, metadata = data_of(shown), {}
    if "digest" in data:
        metadata = {"image/png": data}
        data = {"image/png": base64.b64encode(_picture_of(shown)).decode(), "text/plain": "a figure of plotly"}
    lines = {kind: text if kind == "image/png" else text.splitlines(keepends=True) for kind, text in data.items()}
    return {"output_type": "execute_result", "execution_count": number, "data": lines, "metadata": metadata}


def _picture_of(figure: Any) -> bytes:
    from ddp_prof.present.charts.static_images import write_pictures

    chart = json.loads(figure.to_json())
    chart["layout"].setdefault("width", WIDTH)
    chart["layout"].setdefault("height", HEIGHT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        write_pictures([(chart, path)])
        return path.read_bytes()


def run_cells(cells: list[Cell]) -> list[object]:
    """The values that the cells show, run in the folder of the notebook."""
    names: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(NOTEBOOK.parent)
    try:
        return [shown_by(cell, names) for cell in cells]
    finally:
        os.chdir(before)


def main() -> int:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, shown) in enumerate(zip(cells, run_cells(cells), strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, [output_of(shown, number)]
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
