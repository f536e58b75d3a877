from __future__ import annotations

import base64
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.present import theme
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.encoding import LONGEST_TITLE, OVERVIEW_COLUMNS, overview, pack_boxes, pack_columns
from ddp_prof.present.timeline.model import COMPUTE, STRIP, Boxes, Lane
from ddp_prof.trace import UNKNOWN
from tests.drawing import column, table
from tests.present.runs import cpu_run, run_of

COMPUTE_CODE = theme.CATEGORIES.index(theme.COMPUTE)
NUMBERS = st.integers(-(2**40), 2**40)


def unpack(widths: dict[str, int], packed: bytes, count: int) -> dict[str, list[int]]:
    """As naive as can be: byte by byte."""
    columns, offset = {}, 0
    for name, width in widths.items():
        planes = [packed[offset + plane * count : offset + (plane + 1) * count] for plane in range(width)]
        offset += width * count
        naturals = [sum(plane[at] << 8 * place for place, plane in enumerate(planes)) for at in range(count)]
        columns[name] = [-(natural + 1) // 2 if natural % 2 else natural // 2 for natural in naturals]
    assert offset == len(packed)
    return columns


def read_back(lanes: list[Lane]) -> list[dict[str, int | str]]:
    """Boxes as a page reads them."""
    packed = pack_boxes(lanes)
    count = sum(len(row.boxes) for row in packed.rows)
    columns = unpack(packed.widths, zlib.decompress(base64.b64decode(packed.payload)), count)
    rows = [row for row in packed.rows for _ in range(len(row.boxes))]
    boxes, time, step = [], 0, 0
    for at, row in enumerate(rows):
        start = time + columns["gap"][at]
        time = start + columns["duration"][at]
        step += columns["step"][at]
        boxes.append({"lane": row.lane, "level": row.level, "start": start, "end": time, "step": step,
                      "category": columns["category"][at], "bytes": columns["bytes"][at],
                      "title": packed.titles[columns["title"][at]][0]})  # fmt: skip
    return boxes


@given(st.integers(0, 9).flatmap(lambda rows: st.lists(st.lists(NUMBERS, min_size=rows, max_size=rows), max_size=4)))
def test_columns_come_back(drawn: list[list[int]]) -> None:
    columns = {str(at): column(view) for at, view in enumerate(drawn)}
    widths, packed = pack_columns(columns)
    expected = {name: item.tolist() for name, item in columns.items()}
    assert unpack(widths, packed, len(drawn[0]) if drawn else 0) == expected


BOX = st.fixed_dictionaries(
    {"start_ns": st.integers(-(10**12), 10**12), "length": st.integers(0, 10**6), "category": st.integers(0, 4),
     "name_id": st.integers(-1, 2), "step": st.integers(-1, 10**6), "bucket": st.integers(-1, 2),
     "bytes": st.integers(-1, 2**40), "level": st.integers(0, 2)}
)  # fmt: skip


@given(st.lists(st.lists(BOX, max_size=12), max_size=3))
def test_boxes_come_back(drawn: list[list[dict[str, int]]]) -> None:
    lanes = [
        Lane("a lane", COMPUTE, table(Boxes, [{**box, "end_ns": box["start_ns"] + box["length"]} for box in boxes]),
             ("first", "second", "third"))
        for boxes in drawn
    ]  # fmt: skip
    expected = sorted(
        (at, box["level"], box["start_ns"], box["start_ns"] + box["length"], box["category"], box["step"], box["bytes"])
        for at, boxes in enumerate(drawn)
        for box in boxes
    )
    found = [tuple(box[key] for key in ("lane", "level", "start", "end", "category", "step", "bytes"))
             for box in read_back(lanes)]  # fmt: skip
    assert sorted(found) == expected
    assert [value[:4] for value in found] == [item[:4] for item in expected]  # in order


def test_titles_tell_boxes_apart() -> None:
    trace_lanes = build_timeline(run_of(cpu_run()).load_sources()).panels[0].ranks[0].lanes
    titles = {box["title"] for box in read_back(list(trace_lanes))}
    assert {"all-reduce of bucket 0", "forward", "overlapped communication", "idle"} <= titles
    assert "step 0: 100 % of 0.0 µs communication overlapped" in titles


def test_a_long_name_ends_in_time() -> None:
    box = {"start_ns": 0, "end_ns": 1, "category": COMPUTE_CODE, "name_id": 0, "step": 0, "bucket": UNKNOWN,
           "bytes": UNKNOWN, "level": 0}  # fmt: skip
    packed = pack_boxes([Lane("a lane", COMPUTE, table(Boxes, [box]), ("x" * 10_000,))])
    ((title, label),) = packed.titles
    assert (len(title), title[-1], label) == (LONGEST_TITLE, "…", "")


def test_an_overview_holds_the_time_of_each_category() -> None:
    model = build_timeline(run_of(cpu_run()).load_sources())
    strip = next(lane for lane in model.panels[0].ranks[0].lanes if lane.kind == STRIP)
    packed = pack_boxes([strip])
    shares = {
        category: np.frombuffer(base64.b64decode(text), np.uint8).astype(int)
        for category, text in overview(packed.rows[0].boxes, 0, 40 * OVERVIEW_COLUMNS).items()
    }
    assert all(len(share) == OVERVIEW_COLUMNS for share in shares.values())
    # Forty nanoseconds are the first column, and the strip leaves nothing out.
    lengths = {code: int((strip.boxes.end_ns - strip.boxes.start_ns)[strip.boxes.category == code].sum())
               for code in shares}  # fmt: skip
    assert {code: item[0] for code, item in shares.items()} == {
        code: int(np.ceil(255 * length / 40)) for code, length in lengths.items()
    }
    assert all(share[1:].max() == 0 for share in shares.values())
