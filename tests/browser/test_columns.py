"""What a page reads is what was packed: numbers of any width, and times of rows in order."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest

from ddp_prof.present.timeline.encoding import pack_table
from tests.drawing import column


@pytest.fixture(scope="module")
def script(chromium: Any) -> Iterator[Any]:
    page = chromium.new_page()
    path = files("ddp_prof.present.timeline") / "assets" / "data" / "columns.js"
    page.add_script_tag(content=path.read_text(encoding="utf-8"))
    yield page
    page.close()


@pytest.mark.parametrize("bits", [0, 7, 8, 15, 23, 30, 31, 32, 40, 52])
def test_numbers_come_back(script: Any, bits: int) -> None:
    chance = random.Random(bits)
    for rows in (0, 1, 3, 4, 1001):
        full = [chance.randint(-(2**bits), 2**bits - 1) for _ in range(rows)]
        columns = {
            "full": full,
            "sparse": [value if chance.random() < 0.01 else chance.randint(-1, 1) for value in full],
            "ends": [value if at in (0, rows - 1) else 0 for at, value in enumerate(full)],
        }
        parts = {name: [column(values[: rows // 2]), column(values[rows // 2 :])] for name, values in columns.items()}
        table, packed = pack_table(rows, parts)
        read = script.evaluate(
            """([base64, tables]) => unpack(bytesOf(atob(base64)), tables).map((columns) =>
            Object.fromEntries(Object.entries(columns).map(([name, numbers]) => [name, [...numbers]])))""",
            [base64.b64encode(packed).decode(), [table]],
        )
        assert read == [columns]


def test_times_of_rows_are_told_once_and_in_order(script: Any) -> None:
    chance = random.Random(0)
    for _ in range(50):
        rows = [sorted(chance.choices(range(-40, 40), k=2 * chance.randint(0, 9))) for _ in range(chance.randint(1, 4))]
        untold = sorted(set(chance.choices(range(-40, 40), k=5)))
        known = sorted({time for row in [*rows, untold] for time in row})
        positions = [chance.randrange(len(known)) for _ in range(20)]
        flat = [time for row in rows for time in row] + positions
        ends = [0]
        for row in rows:
            ends.append(ends[-1] + len(row) // 2)
        told = script.evaluate(
            """([flat, others, untold, own]) => {
            const pick = (odd) => Float64Array.from(flat.filter((_, at) => at % 2 === odd));
            const start = pick(0), end = pick(1);
            toTimes({ start, end }, [own], others, Float64Array.from(untold));
            return [...start.subarray(own[0])].flatMap((time, at) => [time, end[own[0] + at]]); }""",
            [flat, [*map(list, pairwise(ends))], untold, [ends[-1], ends[-1] + 10]],
        )
        assert told == [known[at] for at in positions]
