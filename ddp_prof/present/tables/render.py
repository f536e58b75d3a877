"""Rows on the terminal or in a file: a table to read, CSV, Markdown, or a JSON document."""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from ddp_prof.present.columns import columns_of
from ddp_prof.present.table_fit import (
    FIRST_ROWS,
    GAP,
    Fitted,
    TableOptions,
    cut_names,
    fit_columns,
    only,
    shorten,
    terminal_width,
)
from ddp_prof.printable import printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from ddp_prof.present.columns import Column, Row
    from ddp_prof.present.json_documents import Document
    from ddp_prof.present.table_view import TableView

ENDLESS = 10_000
"""Width of what is not printed on a terminal: a line that wraps elsewhere can be read, a column that was cut cannot."""


def show(options: TableOptions | str, views: Sequence[TableView]) -> None:
    """Print to stdout; notes go to stderr where they would spoil the format.

    Args:
        options: How, or only the form: ``table``, ``markdown``, ``csv`` or ``json``; the last gives one document, of
            several views a list. On a terminal a table has the columns that matter and fit.
        views: At least one; for CSV and Markdown they become one table.

    Raises:
        DdpProfError: A column is asked for that a table does not have.
    """
    if isinstance(options, str):
        options = TableOptions(options)
    own, shared = _notes_once(views)
    if options.form == "table":
        for index, view in enumerate(views):
            _print_table(view, own[index], shared if index == len(views) - 1 else [], options)
        return
    if options.form == "json":
        _print_json([view.document for view in views])
        return
    if options.form == "csv":
        write_csv(only([row for view in views for row in view.rows], options.columns), sys.stdout)
    else:
        rows = [row for view in views for row in view.rows_to_read]
        sys.stdout.write(markdown(only(rows, options.columns)))
    if not options.quiet:
        sys.stderr.writelines(f"note: {printable(note)}\n" for note in [*itertools.chain(*own), *shared])


def _notes_once(views: Sequence[TableView]) -> tuple[list[list[str]], list[str]]:
    """The notes of each table alone, and those that several have, which are told once."""
    tables = Counter(note for view in views for note in dict.fromkeys(view.notes))
    own = [[note for note in view.notes if tables[note] == 1] for view in views]
    shared = [
        note if count == len(views) else f"{note} ({count} of {len(views)} tables)"
        for note, count in tables.items()
        if count > 1
    ]
    return own, shared


def _print_json(documents: Sequence[Document]) -> None:
    # Lines are for people; without them the encoder is the one in C.
    indent = 1 if sys.stdout.isatty() else None
    text = json.dumps(documents[0] if len(documents) == 1 else documents, indent=indent, allow_nan=False)
    sys.stdout.write(f"{text}\n")


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
    return re.sub(r"([\\`*\[\]<|]|(?<!\w)_|_(?!\w))", r"\\\1", printable(" ".join(text.splitlines())))


def _print_table(view: TableView, own: Sequence[str], shared: Sequence[str], options: TableOptions) -> None:
    from rich.console import Console
    from rich.text import Text

    width = None if options.wide else terminal_width()
    # With a height, too: without one, rich takes a terminal that is called dumb for 80 characters wide.
    console = Console(width=width or ENDLESS, height=ENDLESS, highlight=False, emoji=False)
    whole = () if view.is_text and not options.columns else view.rows_to_read
    short = shorten(whole, view.digest) if view.digest and width is not None else whole
    rows = only(short if width is None else cut_names(short), options.columns)
    is_whole = width is None or options.columns or not rows
    fitted = Fitted(columns_of(rows)) if is_whole else fit_columns(rows, width or ENDLESS)
    if view.title:
        lines = printable_lines(view.title).splitlines()
        text = "\n".join(_wrapped(line, console.width) for line in lines) if view.is_text else "\n".join(lines)
        console.print(Text(text, style="" if view.is_text else "bold"))
    if rows and width is None:
        sys.stdout.writelines(f"{line}\n" for line in plain_lines(rows, fitted.shown))
    elif rows:
        console.print(_table(rows, fitted.shown))
    cut = f"{FIRST_ROWS} of {len(whole):,} rows, and the others summed; all rows: --wide"
    names = (
        "long names without their middle; whole: --wide" if list(rows) != list(only(short, options.columns)) else None
    )
    told = (*own, cut if short is not whole else None, names, fitted.note, *shared)
    for note in filter(None, () if options.quiet else told):
        console.print(Text(f"note: {printable(note)}", style="dim"))


def _wrapped(line: str, width: int) -> str:
    """A line of text cut into lines of the terminal, below the column in which the words of a labelled line begin."""
    label = re.match(r".{0,20}?  +", line)
    indent = " " * len(label.group()) if label else ""
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plain_lines(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[str]:
    """The same table where no cell wraps and nothing is dim: rich takes 2 ms for a row of 30 columns."""
    from rich.cells import cell_len

    ways, texts = [column.is_right(rows) for column in columns], [column.heading.split(" ") for column in columns]
    highest = max(map(len, texts))
    headings = zip(*([""] * (highest - len(words)) + words for words in texts), strict=True)
    cells = [*headings, *([printable(column.text(row[column.key])) for column in columns] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    for number, line in enumerate(cells):
        if number == highest:
            yield "─" * (sum(widths) + GAP * (len(widths) - 1))
        room = [" " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True)]
        padded = [space + text if right else text + space for text, space, right in zip(line, room, ways, strict=True)]
        yield (" " * GAP).join(padded)


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Names are data: Text keeps what looks like markup as it is. Words wrap where room is short, numbers do not."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        heading, is_right = column.heading.replace(" ", "\n"), column.is_right(rows)
        table.add_column(heading, justify="right" if is_right else "left", no_wrap=is_right, overflow="fold")
    for row in rows:
        cells = [(printable(column.text(row[column.key])), row[column.key] is None) for column in columns]
        table.add_row(*(Text(text, style="dim" if is_missing else "") for text, is_missing in cells))
    return table
