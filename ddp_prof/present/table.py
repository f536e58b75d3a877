"""Tables: their contents, the choice of columns and rows, and the output as text, CSV, JSON or Markdown.

A terminal shows the most important columns that fit; output to a pipe or a file has all of them.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO, overload

from ddp_prof.columns import ALWAYS, Column, Row, Value
from ddp_prof.errors import UsageError, printable, printable_lines, shown_path
from ddp_prof.present.columns import columns_of, describing

if TYPE_CHECKING:
    from rich.table import Table

    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.overlap import TraceOverlap

MOST_ROWS = 24
"""Most rows of a table with a :class:`Digest` on a terminal; a longer table is shortened."""
FIRST_ROWS = 8
"""Rows of a shortened table, without the added row that sums the other rows."""
MOST_NAMED = 3
"""The note on columns left out names at most this many without a value, or of zeros; more of them are only counted."""
GAP = 3
"""Characters between two columns."""
WORDS = 22
"""Width in characters to which a column of text may shrink; longer cells wrap."""
_FEW = 6
"""A cell that is longer by at most so many characters does not wrap: alone on a line, the end of a name says little."""

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµn]?s|min|[KMG]i?B)(?!\w))")
"""A space between a number and its unit, where no line may break."""
NAMES = frozenset({"run", "variant", "node", "rank", "decided_by"})
"""Columns of names that users chose, so they may be long."""
NEXT = "next"
"""Label of a line that is a command."""
BESIDE = "consumer"
"""A column that names a kernel beside figures of something else; where cells do not wrap, the name is cut."""
ENDLESS = 10_000
"""Width of output that does not go to a terminal, so that no column is cut."""

Document = dict[str, Any]
"""A document of ``--format json``. Keys may be added but are never renamed.

Times are nanoseconds, unknown values ``null``.
"""
SCHEMA = 1
"""Version of most documents."""


def run_document(run: TraceOverlap | RunAnalysis, **parts: Any) -> Document:
    """Return a document about a run; ``parts`` are its further keys."""
    return {"schema": SCHEMA, "trace": shown_path(run.trace), "label": run.label, "device": run.device, **parts}


@dataclass(frozen=True)
class Digest:
    """How to shorten a long table: keep the rows with the largest ``by``, and add a row that sums the other rows.

    Attributes:
        by: Key of the column that orders the rows.
        summed: Keys of the columns that are summed. The other cells of the added row are empty, except for ``named``
            and for the run if it is the same in all rows.
        named: Key of the column that says how many rows the added row sums.
    """

    by: str
    summed: tuple[str, ...]
    named: str = "rank"


@dataclass(frozen=True)
class TableView:
    """A table with its title and notes, and its document for ``--format json``.

    ``rows`` are those for programs, as in CSV; ``readable_rows`` are for people.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str]
    _document: Document | Callable[[], Document]
    """The document, or a function that makes it when JSON is asked for."""
    shown: Sequence[Row] = ()
    """Rows for people; empty if they are the same as ``rows``, which are for CSV."""
    digest: Digest | None = None
    """How to shorten the rows of hundreds of ranks on a terminal."""
    is_text: bool = False
    """Whether a terminal shows the title only, which then holds all text."""
    keys: Sequence[str] = ()
    """The keys of its rows, for the header of a CSV file if there are no rows."""
    notes_of_shown: Collection[str] = ()
    """Those of ``notes`` that hold of ``shown`` only, so not of a CSV file."""

    @cached_property
    def document(self) -> Document:
        return self._document() if callable(self._document) else self._document

    @property
    def readable_rows(self) -> Sequence[Row]:
        return self.shown or self.rows


class RowsOnDemand(Sequence[Row]):
    """A sequence of rows that are made only when a row is asked for; their number is known before.

    It saves time where a table shows other rows instead, such as a few sums.

    Args:
        count: The number of rows.
        make: Makes the rows.
    """

    def __init__(self, count: int, make: Callable[[], Sequence[Row]]) -> None:
        self._count = count
        self._make = make

    @cached_property
    def _rows(self) -> Sequence[Row]:
        return self._make()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How tables are printed.

    Attributes:
        form: ``table``, ``json``, ``csv`` or ``markdown``.
        wide: Whether to show all columns and rows, whatever the width.
        columns: Keys of the columns to show, empty for all.
        quiet: Whether to leave out the notes.
    """

    form: str = "table"
    wide: bool = False
    columns: tuple[str, ...] = ()
    quiet: bool = False


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; without a terminal ``$COLUMNS``, or ``None`` if it is not set."""
    is_given = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if is_given else None


def select_columns(rows: Sequence[Row], keys: Sequence[str], known: Sequence[str] = ()) -> Sequence[Row]:
    """Return the rows with the columns ``keys``, or with all columns if there are no keys.

    ``known`` are the keys of a table that may have no rows.

    Raises:
        UsageError: The table has no column of this name.
    """
    known = list(rows[0]) if rows else known
    if not keys or not known:
        return rows
    if missing := [key for key in keys if key not in known]:
        raise UsageError(f"no column '{missing[0]}' in this table: choose from {','.join(known)}")
    return [{key: row[key] for key in keys} for row in rows]


def shorten(rows: Sequence[Row], digest: Digest) -> Sequence[Row]:
    """Return a long table's rows shortened as ``digest`` says, or all rows if they are few."""
    if len(rows) <= MOST_ROWS:
        return rows
    ordered = sorted(rows, key=lambda row: _sort_value(row[digest.by]), reverse=True)
    first, others = ordered[:FIRST_ROWS], ordered[FIRST_ROWS:]
    # The row that sums the other rows.
    rest: Row = dict.fromkeys(rows[0])
    if len(runs := {row["run"] for row in rows if "run" in row}) == 1:
        (rest["run"],) = runs
    for key in rest.keys() & digest.summed:
        known = [value for row in others if isinstance(value := row[key], (int, float))]
        rest[key] = sum(known) if known else None
    return [*first, {**rest, digest.named: f"{len(others):,} others"}]


def cut_beside(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows with long names cut in the column ``BESIDE``; templates give kernels hundreds of characters."""
    longest = 2 * WORDS
    if not rows or BESIDE not in rows[0]:
        return rows
    names = [str(row[BESIDE] or "") for row in rows]
    return [
        {**row, BESIDE: f"{name[: longest - 1]}…"} if len(name) > longest else row
        for row, name in zip(rows, names, strict=True)
    ]


def cut_names(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows with long names shortened in the middle, because names of files often differ at the end."""
    shown = [dict(row) for row in rows]
    for row in shown:
        for key in NAMES & row.keys():
            name = row[key]
            if isinstance(name, str) and len(name) > 2 * WORDS:
                row[key] = f"{name[: WORDS - 1]}…{name[-WORDS:]}"
    return shown


def _sort_value(value: Value) -> float:
    """Return a number to sort by; a value that is no number comes first."""
    return float(value) if isinstance(value, (int, float)) else -math.inf


def fit_columns(rows: Sequence[Row], width: int) -> tuple[Sequence[Column], list[str]]:
    """Choose the columns that fit into a width.

    The run is left out if it is the same in all rows, since the title names it, and so are columns without any value.
    If the rest is still too wide, columns are dropped in this order: columns of zeros, columns with the same value in
    all rows, then the least important columns (of equally important times, those with the smallest sums). Columns that
    are needed to tell rows apart stay.

    Returns:
        The columns; and a list with a note that names the columns left out, empty if there are none.
    """
    # Leave out the run if it is the same in all rows, and columns without any value.
    columns = columns_of(rows)
    if len(columns) > 1:
        columns = tuple(column for column in columns if column.key != "run" or not _is_constant(column, rows))
    unknown = tuple(column for column in columns if all(row[column.key] in (None, "") for row in rows))
    left = [column for column in columns if column not in unknown] or list(columns)
    zeros = [column for column in left if not any(row[column.key] for row in rows)]
    constant = [column for column in left if len(rows) > 1 and _is_constant(column, rows)]

    def worth(column: Column) -> tuple[bool, bool, int, float, int]:
        """Return a key for sorting columns: those that are dropped first have the smallest."""
        times = [row[column.key] for row in rows if column.key.endswith("_ms")]
        total = sum(_sort_value(time) for time in times if time is not None)
        return column not in zeros, column not in constant, -column.stays, total, -columns.index(column)

    # Drop columns until the rest fits.
    dropped: list[Column] = []
    for column in sorted(left, key=worth):
        if sum(_least_width(one, rows) for one in left) + GAP * (len(left) - 1) <= width:
            break
        if column.stays != ALWAYS and not _tells_rows_apart(column, left, rows):
            dropped.append(column)
            left.remove(column)
    # What the note says: many columns of a kind are only counted.
    names = []
    for of_kind, mark, what in (
        (unknown if len(unknown) < len(columns) else (), "n/a", "without a value"),
        ([column for column in columns if column in dropped and column in zeros], "0", "of zeros"),
    ):
        if len(of_kind) > MOST_NAMED:
            names.append(f"{len(of_kind)} columns {what}")
        else:
            names += [f"{column.heading} ({mark})" for column in of_kind]
    names += [column.heading for column in columns if column in dropped and column not in zeros]
    return left, [f"not shown: {', '.join(names)}; all columns: --wide"] if names else []


def _tells_rows_apart(column: Column, columns: Sequence[Column], rows: Sequence[Row]) -> bool:
    """Whether rows that differ in their names and numbers would look alike without this column.

    Args:
        column: The column.
        columns: All columns that are shown.
        rows: The rows.
    """
    keys = [one.key for one in columns if one.key in describing()]
    others = [key for key in keys if key != column.key]
    told, left = (len({tuple(row[key] for key in of) for row in rows}) for of in (keys, others))
    return column.key in keys and left < told


def _is_constant(column: Column, rows: Sequence[Row]) -> bool:
    return len({row[column.key] for row in rows}) == 1


def _least_width(column: Column, rows: Sequence[Row]) -> int:
    """Return the least width of a column in characters.

    Each word of its heading may have its own line; in cells only text wraps, numbers do not.
    """
    cells = max(len(column.text(row[column.key])) for row in rows)
    heading = max(map(len, column.heading.split()))
    wraps = not column.is_right(rows) and cells > WORDS + _FEW
    return max(heading, WORDS if wraps else cells)


def show(options: TableOptions, views: Sequence[TableView]) -> None:
    """Print views to stdout in the form of the options.

    As CSV or Markdown all views are one table, and their notes go to stderr, with the title of each that has no rows,
    which says why. As JSON, a single view is its document, and several views are a list of documents.
    """
    if options.form == "csv":
        views = [
            replace(view, notes=[note for note in view.notes if note not in view.notes_of_shown]) for view in views
        ]
    own, shared = _distinct_notes(views)
    if options.form == "table":
        for index, view in enumerate(views):
            _print_table(view, own[index], shared if index == len(views) - 1 else [], options)
        return
    if options.form == "json":
        documents = [view.document for view in views]
        # Only a person needs line breaks; without them json uses its encoder in C.
        indent = 1 if sys.stdout.isatty() else None
        text = to_json(documents[0] if len(documents) == 1 else documents, indent)
        sys.stdout.write(f"{text}\n")
        return
    known = next((view.keys for view in views if view.keys), ())
    if options.form == "csv":
        rows = select_columns(_one_table([view.rows for view in views]), options.columns, known)
        write_csv(rows, sys.stdout, options.columns or known)
    else:
        rows = _one_table([view.readable_rows for view in views])
        sys.stdout.write(markdown(select_columns(rows, options.columns, known)))
    if not options.quiet:
        why_empty = [": ".join(view.title.splitlines()) for view in views if not view.rows]
        sys.stderr.writelines(f"note: {printable(note)}\n" for note in [*why_empty, *itertools.chain(*own), *shared])


@contextmanager
def shown_after(options: TableOptions, views: Sequence[TableView]) -> Iterator[None]:
    """Show the views after the block, which writes files: whoever reads them may close the pipe (``| head -1``).

    If a file cannot be written, they are shown before the error.
    """
    try:
        yield
    except Exception:
        show(options, views)
        raise
    show(options, views)


def _one_table(tables: Sequence[Sequence[Row]]) -> Sequence[Row]:
    """Return the rows of all tables as one table; a column that some tables lack, such as the node, is empty there."""
    widest = sorted((table[0] for table in tables if table), key=len, reverse=True)
    keys = dict.fromkeys(key for row in widest for key in row)
    rows = [row for table in tables for row in table]
    return rows if len(tables) == 1 else [{key: row.get(key) for key in keys} for row in rows]


def _distinct_notes(views: Sequence[TableView]) -> tuple[list[list[str]], list[str]]:
    """Divide the notes of several tables into those of one table and those of more than one.

    Returns:
        For each view the notes that no other view has; and the notes of several views, with the number of views if not
        all have them.
    """
    tables = Counter(note for view in views for note in dict.fromkeys(view.notes))
    own = [[note for note in view.notes if tables[note] == 1] for view in views]
    shared = [
        note if count == len(views) else f"{note} ({count} of {len(views)} tables)"
        for note, count in tables.items()
        if count > 1
    ]
    return own, shared


def to_json(document: Any, indent: int | None = None) -> str:
    r"""Return a document as JSON. A byte of a file's name that is no text becomes ``\\udcff``, as in tables.

    JSON could hold such a byte as half of a character of UTF-16, but strict readers refuse that.
    """
    text = json.dumps(document, indent=indent, allow_nan=False)
    if _SURROGATE in text and _LONE_SURROGATE.search(json.dumps(document, ensure_ascii=False)):
        text = json.dumps(_without_surrogates(document), indent=indent, allow_nan=False)
    return text


_SURROGATE = "\\ud"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A byte that is no text in UTF-8: Python reads it as half of a character of UTF-16. First, its beginning in JSON."""


def _without_surrogates(value: Any) -> Any:
    """Return a document in which each half of a character (a lone surrogate) is written out as an escape."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub(lambda found: printable(found[0]), value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_csv(rows: Sequence[Row], file: TextIO, keys: Sequence[str] = ()) -> None:
    """Write rows with the same keys; cells without a value are empty. Without rows, write a header of ``keys``.

    Text that a spreadsheet would run as a formula gets a leading ``'``, for example a run called ``=cmd``. Line breaks
    and other control characters are written as escapes, so each row is one line.
    """
    writer = csv.DictWriter(file, list(rows[0] if rows else keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv_cell(value) for key, value in row.items()} for row in rows)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Characters with which a spreadsheet lets a formula begin."""


def _csv_cell(value: Value) -> Value:
    if not isinstance(value, str):
        return value
    return printable(f"'{value}" if value.startswith(_FORMULA) else value)


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown; empty without rows."""
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
    """Return text escaped for Markdown, for a paragraph or a cell of a table."""
    # An underscore within a word is no markup, and '>' only at the beginning of a line.
    return re.sub(r"([\\`*\[\]<|]|(?<!\w)_|_(?!\w))", r"\\\1", printable(" ".join(text.splitlines())))


def _print_table(view: TableView, own: Sequence[str], shared: Sequence[str], options: TableOptions) -> None:
    """Print a table with its title and notes to the terminal, or as plain lines if stdout is no terminal.

    Args:
        view: The table.
        own: Notes of this table only.
        shared: Notes that it shares with other tables.
        options: How to print.
    """
    from rich.console import Console
    from rich.text import Text

    width = None if options.wide else terminal_width()

    # The height is needed, too: without it rich assumes 80 columns for a terminal of the type dumb.
    console = Console(width=width or ENDLESS, height=ENDLESS, highlight=False, emoji=False)

    # Fewer rows if there are hundreds; then shorter names; then, if the width is known, the columns that fit.
    whole = () if view.is_text and not options.columns else view.readable_rows
    short = shorten(whole, view.digest) if view.digest and width is not None else whole
    piped = short if options.wide else cut_beside(short)
    rows = select_columns(piped if width is None else cut_names(short), options.columns, view.keys)
    is_whole = width is None or options.columns or not rows
    columns, left_out = (columns_of(rows), []) if is_whole else fit_columns(rows, width or ENDLESS)

    if view.title:
        text = "\n".join(_wrap_line(line, console.width) for line in printable_lines(view.title).splitlines())
        # The text is wrapped already. A longer word, such as a path, gets no line break, which would be copied with it.
        console.print(Text(text, style="" if view.is_text else "bold"), soft_wrap=True)
    if rows and width is None:
        sys.stdout.writelines(f"{line}\n" for line in plain_lines(rows, columns))
    elif rows:
        console.print(_table(rows, columns))

    cut = f"{FIRST_ROWS} of {len(whole):,} rows, and the others summed; all rows: --wide"
    notes = [*own, *([cut] if short is not whole else [])]
    if list(rows) != list(select_columns(short, options.columns)):
        notes.append(f"long names without their {'end' if width is None else 'middle'}; whole: --wide")
    notes += [*left_out, *shared]
    # What the title says already is no note.
    for note in () if options.quiet else (note for note in notes if note not in view.title):
        console.print(Text(_wrap_line(f"note: {printable(note)}", console.width), style="dim"))


def _wrap_line(line: str, width: int) -> str:
    """Wrap a line at a width; a number and its unit stay on one line.

    If the line begins with a label, a few words before two spaces, further lines are indented below the text after it.
    A command to run next is not wrapped, because it is copied.
    """
    if line.startswith(f"{NEXT} "):
        return line
    label = re.match(r".{0,20}?  +", line)
    indent = " " * len(label.group()) if label else ""
    kept = _BEFORE_UNIT.sub("\0", line)  # NUL, which printable text does not have, stands for such a space
    text = textwrap.fill(kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return text.replace("\0", " ")


def plain_lines(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[str]:
    """Yield the lines of a table without wrapped cells and styles.

    It is for long output: rich would take 2 ms for a row of 30 columns.
    """
    from rich.cells import cell_len

    ways, texts = [column.is_right(rows) for column in columns], [column.heading.split(" ") for column in columns]
    highest = max(map(len, texts))
    # Each word of a heading has a line; short headings begin with empty lines.
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
    """Return the table for rich.

    Cells are ``Text``, so that rich does not read names as markup. Columns of text wrap, columns of numbers do not.
    """
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
