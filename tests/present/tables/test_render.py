from __future__ import annotations

import pytest

from ddp_prof.present.table_view import TableView
from ddp_prof.present.tables.render import markdown, markdown_text, show


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
    show(form, [TableView("", [{"run": "x"}], own, {}) for own in notes])
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if line.startswith("note: ")]
    assert lines == ["note: one", "note: all", "note: two (2 of 3 tables)"]
