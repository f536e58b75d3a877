from __future__ import annotations

import pytest

from ddp_prof.present.tables.render import markdown, markdown_text


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
