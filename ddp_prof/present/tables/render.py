"""Rows on the terminal or in a file: a table to read, CSV, Markdown, or a JSON document."""

from __future__ import annotations

import csv
import json
import re
import sys
from typing import TYPE_CHECKING, TextIO

from ddp_prof.present.columns import columns_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.present.columns import Row
    from ddp_prof.present.table_view import TableView


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
    columns = columns_of(rows)
    lines = (
        [column.heading for column in columns],
        ["---:" if column.is_right(rows) else "---" for column in columns],
        *([markdown_text(column.text(row[column.key])) for column in columns] for row in rows),
    )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown_text(text: str) -> str:
    """Text in which nothing is Markdown, in a paragraph or in a cell of a table."""
    # An underscore within a word is none either way; '>' is markup only where a line begins.
    return re.sub(r"([\\`*\[\]<|]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.splitlines()))


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
        columns = columns_of(view.rows)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in columns:
            table.add_column(
                column.heading.replace(" ", "\n"), justify="right" if column.is_right(view.rows) else "left"
            )
        for row in view.rows:
            cells = [(column.text(row[column.key]), row[column.key] is None) for column in columns]
            table.add_row(*(Text(text, style="dim" if is_missing else "") for text, is_missing in cells))
        console.print(table)
    for note in view.notes:
        console.print(Text(f"note: {note}", style="dim"))
