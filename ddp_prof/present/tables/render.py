"""Rows on the terminal or in a file: a table to read, CSV, Markdown, or a JSON document."""

from __future__ import annotations

import csv
import json
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.present.tables.rows import Row, TableView

MISSING = "n/a"

_DECIMALS = {"%": 1, "collectives": 0}
"""Decimals by the last word of a column's key; two elsewhere."""


def show(form: str, views: Sequence[TableView]) -> None:
    """Print to stdout; notes go to stderr where they would spoil the format.

    Args:
        form: ``table``, ``markdown``, ``csv`` or ``json``; the last gives one document, of several views a list.
        views: At least one; for CSV and Markdown they become one table.
    """
    if form == "table":
        for view in views:
            _print_table(view)
        return
    if form == "json":
        documents = [view.document for view in views]
        # Lines are for people; without them the encoder is the one in C.
        indent = 1 if sys.stdout.isatty() else None
        text = json.dumps(documents[0] if len(documents) == 1 else documents, indent=indent, allow_nan=False)
        sys.stdout.write(f"{text}\n")
        return
    rows = [row for view in views for row in view.rows]
    if form == "csv":
        write_csv(rows, sys.stdout)
    else:
        sys.stdout.write(markdown(rows))
    sys.stderr.writelines(f"note: {note}\n" for view in views for note in view.notes)


def write_csv(rows: Sequence[Row], file: TextIO) -> None:
    """Write rows with the same keys; what is not known is empty."""
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; empty without rows."""
    if not rows:
        return ""
    cells = [[cell_text(key, value).replace("|", "\\|") for key, value in row.items()] for row in rows]
    ruler = ["---:" if is_numeric(rows, key) else "---" for key in rows[0]]
    return "".join(f"| {' | '.join(line)} |\n" for line in ([heading(key) for key in rows[0]], ruler, *cells))


def _print_table(view: TableView) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Names are data: Text keeps what looks like markup as it is. The width is the table's own, whatever the terminal's:
    # a row that wraps can be read, a column that was cut cannot.
    console = Console(width=10_000, highlight=False, emoji=False)
    if view.title:
        console.print(Text(view.title, style="bold"))
    if view.rows:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for key in view.rows[0]:
            numeric = is_numeric(view.rows, key)
            table.add_column(heading(key).replace(" ", "\n"), justify="right" if numeric else "left")
        for row in view.rows:
            table.add_row(
                *(Text(cell_text(key, value), style="dim" if value is None else "") for key, value in row.items())
            )
        console.print(table)
    for note in view.notes:
        console.print(Text(f"note: {note}", style="dim"))


def heading(key: str) -> str:
    """The words of a column's key."""
    return key.replace("_", " ")


def cell_text(key: str, value: str | int | float | None) -> str:
    """A value as a person reads it."""
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.{_DECIMALS.get(key.rpartition('_')[2], 2)}f}"
    return str(value)


def is_numeric(rows: Sequence[Row], key: str) -> bool:
    """Whether a column holds numbers, known or not."""
    return not any(isinstance(row[key], str) for row in rows)
