"""What a page reads is what was packed: numbers of any width, and times of rows in order."""

from __future__ import annotations

import base64
import random
from itertools import pairwise

import pytest

from ddp_prof.present.timeline.encoding import pack_table
from tests.drawing import column
from tests.javascript import Node


@pytest.mark.parametrize("bits", [0, 7, 8, 15, 23, 30, 31, 32, 40, 52])
def test_numbers_come_back(node: Node, bits: int) -> None:
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
        read = node.ask(
            """(([base64, tables]) => unpack(bytesOf(atob(base64)), tables).map((columns) =>
            Object.fromEntries(Object.entries(columns).map(([name, numbers]) => [name, [...numbers]]))))(argument)""",
            [base64.b64encode(b"".join(packed)).decode(), [table]],
        )
        assert read == [columns]


def test_times_of_rows_are_told_once_and_in_order(node: Node) -> None:
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
        told = node.ask(
            """(([flat, others, untold, own]) => {
            const pick = (odd) => Float64Array.from(flat.filter((_, at) => at % 2 === odd));
            const start = pick(0), end = pick(1);
            toTimes({ start, end }, [own], others, Float64Array.from(untold));
            return [...start.subarray(own[0])].flatMap((time, at) => [time, end[own[0] + at]]); })(argument)""",
            [flat, [*map(list, pairwise(ends))], untold, [ends[-1], ends[-1] + 10]],
        )
        assert told == [known[at] for at in positions]
