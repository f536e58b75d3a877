from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddp_prof
from ddp_prof.columns import digits, milliseconds, percent, size, with_article
from ddp_prof.present.text import three_digits


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "n/a"), (0, "0 %"), (1, "100 %"), (0.501, "50 %"), (0.004, "0.4 %"), (0.996, "99.6 %"),
        (1.62, "162 %"), (-0.195, "-20 %"), (-0.004, "-0.4 %"),
    ],
)  # fmt: skip
def test_a_share_is_rounded_but_not_to_nothing_or_all(ratio: float | None, text: str) -> None:
    assert percent(ratio) == text


def test_all_sentences_write_a_share_in_one_way() -> None:
    """Some said ``53%``, and others ``36 %``: no module formats a share by itself."""
    own = [
        f"{file.name}:{node.lineno}"
        for file in Path(ddp_prof.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if (isinstance(node, ast.FormattedValue) and node.format_spec and ast.unparse(node.format_spec).endswith("%'"))
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and ".0%}" in node.value)
    ]
    assert own == []


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1 byte"), (1000, "1,000 bytes"), (1024, "1 KiB"), (10**6, "977 KiB"), (1000 * 2**10, "0.977 MiB"),
        (2**20 - 1, "1 MiB"), (2**20, "1 MiB"), (2**30 - 2**20, "0.999 GiB"), (2**30, "1 GiB"), (2**40, "1,020 GiB"),
    ],
)  # fmt: skip
def test_units_of_sizes_are_of_1024(number: int, text: str) -> None:
    """1,000 KiB was ``1e+03 KiB``."""
    assert size(number) == text


def test_a_large_number_is_no_power_of_ten() -> None:
    assert [digits(one, 2) for one in (0.25, 9.96, 119.3, 4096)] == ["0.25", "10", "120", "4,100"]


def test_all_findings_write_a_time_and_a_size_in_one_way() -> None:
    """One finding said ``868.6 ms`` of its cost, and ``868.61 ms`` of the same in its evidence."""
    own = [
        f"{file.name}:{node.lineno}"
        for file in (Path(ddp_prof.__file__).parent / "analyze").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FormattedValue) and node.format_spec and ast.unparse(node.value).endswith(_SCALES)
    ]
    assert own == []


_SCALES = ("/ 1000000.0", "/ 2 ** 20")


@pytest.mark.parametrize(
    ("ns", "said"),
    [
        (9_999_000, "10.0 ms"),
        (9_994_000, "9.99 ms"),
        (2_000_000_000, "2,000.0 ms"),
        (12_345_000_000, "12.35 s"),
    ],
)
def test_long_times_stay_readable(ns: int, said: str) -> None:
    assert milliseconds(ns) == said


def test_a_number_has_the_article_with_which_it_is_spoken() -> None:
    """'28.6 µs of a 8.44 ms step'."""
    numbers = "8.44 ms, 11.0 ms, 18.0 ms, 80.0 ms, 845.1 ms, 11,000.0 ms, 1.80 ms, 110.0 ms, 180.0 ms, 1,800.0 ms, 7 ms"
    spoken = [with_article(number).split()[0] for number in numbers.split(", ")]
    assert spoken == ["an"] * 6 + ["a"] * 5


@pytest.mark.parametrize(
    ("value", "said"), [(1076.9, "1,077"), (170.59, "171"), (5.06, "5.06"), (0.00002, "0.000020"), (0, "0")]
)
def test_a_bar_has_no_power_of_ten(value: float, said: str) -> None:
    """From 1,000 ms on it said 1.08e+03."""
    assert three_digits(value) == said
    assert "e" not in three_digits(-value, "+")
