"""The grammar of range names: what is written is read back, what others wrote does no harm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.range_names import Range, format_range, parse_range, parse_ranges

# Any text that the grammar can carry; numbers of up to 18 digits, as 64 bits hold them.
names = st.text(st.characters(exclude_characters="|="), min_size=1)
numbers = st.integers(-(10**18) + 1, 10**18 - 1)
texts = st.text(st.characters(exclude_characters="|")).filter(lambda text: not text.lstrip("-").isdigit())


@given(names, st.dictionaries(names.filter(lambda key: key != "name"), numbers | texts, max_size=5))
def test_round_trip(name: str, fields: dict[str, int | str]) -> None:
    assert parse_range(format_range(name, **fields)) == Range(name, fields)


@pytest.mark.slow
@given(st.text())
def test_parsing_never_fails(text: str) -> None:
    parsed = parse_range(text)
    assert parsed.fields or parsed.name == text


@pytest.mark.parametrize(
    ("text", "name", "fields"),
    [
        ("backward", "backward", {}),
        ("step|index=0|warmup=1", "step", {"index": 0, "warmup": 1}),
        ("all_reduce|bucket=3|bytes=1048576|params=2", "all_reduce", {"bucket": 3, "bytes": 1048576, "params": 2}),
        ("process|rank=0|variant=overlap|device=cpu", "process", {"rank": 0, "variant": "overlap", "device": "cpu"}),
        ("a|b=c=d", "a", {"b": "c=d"}),
        ("a|b=", "a", {"b": ""}),
        ("a|b=-5", "a", {"b": -5}),
    ],
)
def test_examples(text: str, name: str, fields: dict[str, int | str]) -> None:
    assert parse_range(text) == Range(name, fields)


@pytest.mark.parametrize(
    "text", ["", "nccl:all_reduce", "ProfilerStep#3", "a|b", "a|=b", "|", "a||b=1", "## forward |x| ##", "step 7"]
)
def test_foreign_names_stay_whole(text: str) -> None:
    assert parse_range(text) == Range(text, {})


@pytest.mark.parametrize("text", ["007", "+1", "1_000", "²", "٣", "-", "-0", "1" * 19, "1.5", " 1"])
def test_what_would_not_be_written_as_a_number_stays_text(text: str) -> None:
    assert parse_range(f"a|b={text}").fields == {"b": text}


@pytest.mark.parametrize(("name", "fields"), [("a|b", {}), ("a=b", {}), ("a", {"b|": 1}), ("a", {"b": "x|y"})])
def test_what_could_not_be_read_back_is_refused(name: str, fields: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        format_range(name, **fields)


def test_fields_by_type() -> None:
    parsed = parse_range("a|n=3|t=x")
    assert (parsed.number("n"), parsed.number("t"), parsed.number("absent")) == (3, None, None)
    assert (parsed.text("n"), parsed.text("t"), parsed.text("absent")) == ("3", "x", None)


def test_our_ranges_among_the_names_of_others() -> None:
    names = ["step", "step|index=3", "stepper|index=4", "process|rank=1", "nccl|step|index=5", "backward"]
    assert parse_ranges(names, "step", "process") == {1: Range("step", {"index": 3}), 3: Range("process", {"rank": 1})}
