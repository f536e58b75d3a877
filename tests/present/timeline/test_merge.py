"""What is drawn of a row, checked against counting box by box."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.javascript import Node

MERGE = """
argument.map(({ start, end, category, from, to, columns }) => {
  const tracks = tracksOf({ start, end, category }, 0, start.length);
  const { boxes, cells } = merge(tracks, from, to, columns);
  return {
    boxes: boxes.map(({ track, at }) => [track.start[at], track.end[at], track.category]),
    cells: cells.map(({ track, ...cell }) => ({ ...cell, category: track.category })),
    covered: tracks.map((track) => [track.category, track.covered(from, to)]),
  };
})
"""


def draw_row(chance: random.Random) -> dict[str, Any]:
    start, end, category, time = [], [], [], chance.randint(0, 5)
    for _ in range(chance.choice([0, 3, 40, 300])):
        time += chance.choice([0, 0, 1, 5])
        start.append(time)
        time += chance.choice([0, 1, 1, 2, 3, 30])
        end.append(time)
        category.append(chance.randint(0, 2))
    begin = chance.randint(-10, time)
    return {"start": start, "end": end, "category": category, "from": begin,
            "to": begin + chance.randint(1, time + 20), "columns": chance.randint(1, 40)}  # fmt: skip


def test_nothing_is_lost_and_nothing_stretched(node: Node) -> None:
    cases = [draw_row(random.Random(seed)) for seed in range(400)]
    for case, drawn in zip(cases, node.ask(MERGE, cases), strict=True):
        low, high, pixel = case["from"], case["to"], (case["to"] - case["from"]) / case["columns"]
        rows = list(zip(case["start"], case["end"], case["category"], strict=True))
        seen = [(start, end) for start, end, _ in rows if start < high and (end > low or start >= low)]
        long = [[*row] for row in rows if row[0] < high and row[1] > low and row[1] - row[0] >= pixel]
        assert drawn["boxes"] == long
        assert len(long) + sum(cell["count"] for cell in drawn["cells"]) == len(seen)
        for kind in {category for _, _, category in rows}:
            covered = sum(max(0, min(end, high) - max(start, low)) for start, end, item in rows if item == kind)
            drawn_long = sum(min(end, high) - max(start, low) for start, end, item in long if item == kind)
            short = sum(
                cell["share"] * (cell["to"] - cell["from"]) for cell in drawn["cells"] if cell["category"] == kind
            )
            assert drawn_long + short == pytest.approx(covered)
            assert dict(drawn["covered"])[kind] == covered


def test_cells_are_within_their_column_and_stacked_within_the_row(node: Node) -> None:
    cases = [draw_row(random.Random(seed)) for seed in range(400, 500)]
    for case, drawn in zip(cases, node.ask(MERGE, cases), strict=True):
        pixel = (case["to"] - case["from"]) / case["columns"]
        last, top = None, 0.0
        for cell in drawn["cells"]:
            assert 0 <= cell["to"] - cell["from"] <= pixel * (1 + 1e-9)
            assert cell["base"] == pytest.approx(top if last == (cell["from"], cell["to"]) else 0)
            last, top = (cell["from"], cell["to"]), cell["base"] + cell["share"]
            assert top <= 1 + 1e-9
