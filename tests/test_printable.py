"""No text of a trace can control a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.errors import TraceError, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ncclDevKernel_AllReduce(x) Grüße 日本", "ncclDevKernel_AllReduce(x) Grüße 日本"),
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("one\ntwo\r\tthree", r"one\ntwo\r\tthree"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("\ud800", r"\ud800"),
        ("[bold]<b>&amp;", "[bold]<b>&amp;"),
    ],
)
def test_what_controls_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_nothing_that_controls_is_left(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert printable(shown) == shown
    assert len(shown.splitlines()) <= 1


def test_an_error_is_one_short_line() -> None:
    error = TraceError("a\x1b[31m.sqlite", "holds\n  \x1b]0;x\x07" + "y" * 9999, "export\nagain")
    assert str(error).startswith(r"a\x1b[31m.sqlite: holds \x1b]0;x\x07yyy")
    assert str(error).endswith("yyy...: export again")
    assert len(str(error)) < 600
