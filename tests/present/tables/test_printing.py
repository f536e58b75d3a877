from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ddp_prof.columns import Row
from ddp_prof.present.columns import columns_of
from ddp_prof.present.table import TableOptions, TableView, _table, markdown, markdown_text, plain_lines, show


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a|b", "a\\|b"),
        ("*bold* [link](x) `code` <b>", "\\*bold\\* \\[link\\](x) \\`code\\` \\<b>"),
        ("_emphasis_ but all_reduce", "\\_emphasis\\_ but all_reduce"),
        ("back\\slash", "back\\\\slash"),
        ("naive -> flat", "naive -> flat"),
        ("two\nlines", "two lines"),
    ],
)
def test_nothing_in_a_text_is_markdown(text: str, escaped: str) -> None:
    assert markdown_text(text) == escaped


def test_a_row_stays_a_row() -> None:
    assert markdown([{"run": "a|b\n<i>", "step_ms": 1.5}, {"run": "c", "step_ms": None}]).splitlines() == [
        "| run | step ms |",
        "| --- | ---: |",
        "| a\\|b \\<i> | 1.50 |",
        "| c | n/a |",
    ]


@pytest.mark.parametrize("form", ["table", "csv", "markdown"])
def test_a_note_of_several_tables_is_told_once(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    notes = [["all", "two", "one"], ["all", "two"], ["all"]]
    show(TableOptions(form), [TableView("", [{"run": "x"}], own, {}) for own in notes])
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if line.startswith("note: ")]
    assert lines == ["note: one", "note: all", "note: two (2 of 3 tables)"]


NAMES = st.sampled_from(["overlap", "two words", "a[b]c", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "", "x" * 50])
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "run": NAMES,
            "exposed_memory_ms": st.none() | st.floats(0, 1e6),
            "steps": st.none() | st.integers(0, 10**6),
            "cause": NAMES,
        }
    ),
    min_size=1,
    max_size=4,
)


@given(ROWS)
def test_what_is_piped_is_laid_out_as_on_a_terminal(rows: list[Row]) -> None:
    terminal = Console(file=io.StringIO(), width=1000, height=100, emoji=False, highlight=False)
    terminal.print(_table(rows, columns_of(rows)))
    assert list(plain_lines(rows, columns_of(rows))) == terminal.file.getvalue().splitlines()


def test_a_pipe_gets_no_line_of_a_thousand_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """A consumer's template made each line of collectives as long; CSV has the whole name."""
    name = "void kernel<" + "std::tuple<int, float>, " * 40 + ">"
    view = TableView("", [{"step_ms": 1.5, "consumer": name}, {"step_ms": 2.5, "consumer": None}], [], {})
    show(TableOptions(), [view])
    piped = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) < 80
    assert "long names without their end; whole: --wide" in piped
    show(TableOptions(wide=True), [view])
    assert name in capsys.readouterr().out
    show(TableOptions("csv"), [view])
    assert name in capsys.readouterr().out
