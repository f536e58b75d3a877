from __future__ import annotations

import pytest

from ddp_prof.columns import Row
from ddp_prof.present.columns import catalogue, columns_of


@pytest.mark.parametrize(
    ("key", "heading", "value", "text"),
    [
        ("step_ms", "step ms", 1.0049, "1.00"),
        ("overlap_%", "overlap %", 66.666, "66.7"),
        ("collectives", "collectives", 8.0, "8"),
        ("algbw_GB/s", "algbw GB/s", 1 / 3, "0.33"),
        ("step_±_ms", "step ± ms", None, "n/a"),
        ("speedup", "speedup", 1.5, "1.50"),
        ("requirement", "requirement", "overlap", "overlap"),
        ("kernels", "kernels", 22564, "22564"),
        ("step_ms", "step ms", -0.0005, "0.00"),
        ("step_ms", "step ms", -0.0051, "-0.01"),
        ("rank", "rank", "-", "-"),
    ],
)
def test_a_column_knows_its_heading_and_its_format(
    key: str, heading: str, value: str | float | None, text: str
) -> None:
    assert (catalogue()[key].heading, catalogue()[key].text(value)) == (heading, text)


def test_every_column_says_what_it_means() -> None:
    for key, column in catalogue().items():
        assert column.key == key
        assert column.meaning
        assert not column.meaning.endswith(".")


def test_numbers_stand_at_the_right_and_words_at_the_left() -> None:
    rows: list[Row] = [
        {"rank": 0, "device": "cpu", "comm_ms": 1.0},
        {"rank": "process 7", "device": 1, "comm_ms": None},
    ]
    assert [column.is_right(rows) for column in columns_of(rows)] == [False, False, True]
    assert [column.is_right(rows[:1]) for column in columns_of(rows)] == [True, False, True]


def test_a_column_that_nobody_described_is_an_error() -> None:
    with pytest.raises(KeyError, match="new_ms"):
        columns_of([{"new_ms": 1.0}])
