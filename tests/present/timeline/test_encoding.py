from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.blocking import HELD_BY
from ddp_prof.present import theme
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.encoding import (
    LONGEST_TITLE,
    PackedTable,
    PlacedLane,
    Titles,
    _links,
    pack_boxes,
    pack_folded,
    pack_table,
)
from ddp_prof.present.timeline.figure import EXPOSED_PARTS
from ddp_prof.present.timeline.model import COMMUNICATION, COMPUTE, STRIP, WAITING, Boxes, Lane
from ddp_prof.trace import UNKNOWN
from tests.analyze.critical.scheduler import Device, programs
from tests.drawing import PID, column, draw_trace, table
from tests.examples import examples
from tests.measuring import collectives_of, source_of
from tests.present.runs import cpu_run

COMPUTE_CODE = theme.CATEGORIES.index(theme.COMPUTE)
NUMBERS = st.integers(-(2**40), 2**40)


def unpack(tables: Iterable[PackedTable], packed: Iterable[bytes]) -> list[dict[str, list[int]]]:
    """As naive as can be: byte by byte."""
    found, rest = [], iter(b"".join(packed))
    for rows, columns in tables:
        numbers: dict[str, list[int]] = {}
        for name, blocks in columns.items():
            naturals = [[0] * count for _, count in blocks]
            for plane in range(8):
                for block, (planes, count) in zip(naturals, blocks, strict=True):
                    for at in range(count if plane < planes else 0):
                        block[at] += next(rest) << 8 * plane
            numbers[name] = [-(each + 1) // 2 if each % 2 else each // 2 for block in naturals for each in block]
            assert len(numbers[name]) == rows
        found.append(numbers)
    assert next(rest, None) is None
    return found


def read_back(lanes: list[Lane]) -> list[dict[str, int | str]]:
    """Boxes as a page reads them."""
    titles = Titles()
    packed = pack_boxes([PlacedLane(0, place, lane) for place, lane in enumerate(lanes)], titles)
    columns, _ = unpack(packed.boxes.tables, [zlib.decompress(packed.compressed())])
    names = list(titles.titles)
    rows = [row for row in packed.boxes.rows for _ in range(len(row.boxes))]
    boxes, time, step = [], 0, 0
    for at, row in enumerate(rows):
        start = time + columns["gap"][at]
        time = start + columns["duration"][at]
        step += columns["step"][at]
        boxes.append({"lane": row.placed.place, "level": row.level, "start": start, "end": time, "step": step,
                      "category": columns["category"][at], "bytes": columns["bytes"][at],
                      "title": names[columns["title"][at]][0]})  # fmt: skip
    return boxes


@given(st.integers(0, 9).flatmap(lambda rows: st.lists(st.lists(NUMBERS, min_size=rows, max_size=rows), max_size=4)))
def test_columns_come_back(drawn: list[list[int]]) -> None:
    columns = {str(at): column(view) for at, view in enumerate(drawn)}
    rows = len(drawn[0]) if drawn else 0
    table, packed = pack_table(rows, {name: [item[:2], item[2:]] for name, item in columns.items()})
    assert unpack([table], packed) == [{name: item.tolist() for name, item in columns.items()}]


REST = dict.fromkeys(("phase", "call", "shape", "registers", "collective", "consumer"), UNKNOWN)
BOX = st.fixed_dictionaries(
    {"start_ns": st.integers(-(10**12), 10**12), "length": st.integers(0, 10**6), "category": st.integers(0, 4),
     "name_id": st.integers(-1, 2), "step": st.integers(-1, 10**6), "bucket": st.integers(-1, 2),
     "bytes": st.integers(-1, 2**40), "level": st.integers(0, 2)}
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(st.lists(BOX, max_size=12), max_size=3))
def test_boxes_come_back(drawn: list[list[dict[str, int]]]) -> None:
    lanes = [
        Lane(
            "a lane",
            COMPUTE,
            table(Boxes, [{**REST, **box, "end_ns": box["start_ns"] + box["length"]} for box in boxes]),
            ("first", "second", "third"),
        )
        for boxes in drawn
    ]
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
    trace_lanes = build_timeline([source_of("overlap", cpu_run())]).panels[0].ranks[0].lanes
    titles = {box["title"] for box in read_back(list(trace_lanes))}
    assert {"all-reduce of bucket 0", "forward", "overlapped communication", "idle"} <= titles
    assert "step 0: 100 % of 0.0 µs communication overlapped" in titles


def test_a_collective_of_a_bucket_is_called_what_it_is() -> None:
    """Sharded data parallelism reduces a bucket and gathers it."""
    said = {
        "process|rank=0|world=2": "########",
        "reduce_scatter|bucket=2|bytes=8": ".####...",
        "all_gather|bucket=2|bytes=8": ".....##.",
    }
    on_host = draw_trace(ranges=said, ranks={PID: 0})
    on_device = draw_trace(ranges=said, launches={"main": ".N...G.."}, streams={9: "..NN..GG"})
    titles = [
        {box["title"] for box in read_back(list(panel.ranks[0].lanes)) if "bucket 2" in str(box["title"])}
        for panel in build_timeline([source_of("host", on_host), source_of("device", on_device)]).panels
    ]
    assert titles[0] == {"reduce-scatter of bucket 2", "all-gather of bucket 2"}
    assert titles[1] == {"collective of bucket 2: communication N", "collective of bucket 2: communication G"}


def test_a_long_name_ends_in_time() -> None:
    box = {"start_ns": 0, "end_ns": 1, "category": COMPUTE_CODE, "name_id": 0, "step": 0, "bucket": UNKNOWN,
           "bytes": UNKNOWN, "level": 0, **REST}  # fmt: skip
    titles = Titles()
    pack_boxes([PlacedLane(0, 0, Lane("a lane", COMPUTE, table(Boxes, [box]), ("x" * 10_000,)))], titles)
    ((title, label, _),) = titles.titles
    assert (len(title), title[-1], label) == (LONGEST_TITLE, "…", "")


def positions_of(lanes: list[PlacedLane]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The two tables of the boxes that are shown."""
    packed = pack_boxes(lanes, Titles())
    boxes, untold = unpack(packed.boxes.tables, packed.pieces)
    return boxes, untold


TIMES = st.lists(st.integers(0, 50), min_size=2, max_size=8, unique=True).map(sorted)


def lane_of_times(kind: str, times: list[int]) -> Lane:
    known = dict.fromkeys(("category", "name_id", "step", "bucket", "bytes", "level"), 0)
    boxes = [{**known, **REST, "start_ns": start, "end_ns": end} for start, end in pairwise(times)]
    return Lane(kind, kind, table(Boxes, boxes), ("name",))


@given(TIMES, TIMES)
def test_parts_of_where_time_goes_are_told_by_the_times_of_others(others: list[int], parts: list[int]) -> None:
    lanes = [PlacedLane(0, 0, lane_of_times(COMPUTE, others)), PlacedLane(0, 1, lane_of_times(STRIP, parts))]
    boxes, untold = positions_of(lanes)
    times = np.unique([*others, *np.cumsum(untold["time"]).tolist()])
    assert np.cumsum(untold["time"]).tolist() == sorted(set(parts) - set(others))
    gaps, lengths = boxes["gap"][len(others) - 1 :], boxes["duration"][len(others) - 1 :]
    starts = np.cumsum(gaps) + np.cumsum([0, *lengths])[:-1] + others[-1]
    assert times[starts].tolist() == parts[:-1]
    assert times[starts + lengths].tolist() == parts[1:]


CALL = st.integers(-1, 6)


@given(st.lists(st.lists(CALL, max_size=6), min_size=1, max_size=3), st.permutations(range(5)))
def test_links_lead_to_the_call_of_the_rank(wanted: list[list[int]], calls: list[int]) -> None:
    """Each rank's calls are numbered anew: the same number on two ranks is another call."""
    known = dict.fromkeys(("category", "name_id", "step", "bucket", "bytes", "level"), 0)

    def lane(numbers: list[int]) -> Lane:
        rows = [{**known, **REST, "start_ns": at, "end_ns": at + 1, "call": call} for at, call in enumerate(numbers)]
        return Lane("lane", COMPUTE, table(Boxes, rows), ("name",))

    shown = pack_boxes([PlacedLane(rank, rank, lane(own)) for rank, own in enumerate(wanted)], Titles()).boxes
    folded = [PlacedLane(rank, 9 + rank, lane(calls)) for rank in range(len(wanted))]
    links = [link for row in _links(pack_boxes(folded, Titles()).boxes.rows, shown.rows) for link in row.tolist()]
    found, last = [], 0
    for link in links:
        last += (link - 1) // 2 if link else 0
        found.append(last if link else UNKNOWN)
    expected = [
        5 * rank + calls.index(call) if call in calls else UNKNOWN for rank, own in enumerate(wanted) for call in own
    ]
    assert found == expected


def test_parts_of_a_collective_sum_to_it() -> None:
    rank = build_timeline([source_of("overlap", cpu_run(shift=2))]).panels[0].ranks[0]
    placed = [PlacedLane(0, place, lane) for place, lane in enumerate(rank.lanes)]
    titles = Titles()
    shown = pack_boxes([each for each in placed if not each.lane.is_folded], titles).boxes
    folded = [each for each in placed if each.lane.is_folded]
    packed = pack_folded(folded, shown, [rank.explained], titles)
    _, _, columns, _ = unpack(packed.boxes.tables, packed.pieces)
    total: dict[int, int] = {}
    assert set(columns["part"]) <= set(range(len(EXPOSED_PARTS) + 1)), "no peer is known, so transfer is not"
    for box, ns in zip(np.cumsum(columns["box"]).tolist(), columns["ns"], strict=True):
        total[box] = total.get(box, 0) + ns
    boxes = [
        box for row in shown.rows for box in zip(row.boxes.start_ns.tolist(), row.boxes.end_ns.tolist(), strict=True)
    ]
    assert [boxes[box] for box in total] == [(10, 14), (30, 34)]
    assert list(total.values()) == [4, 4]
    hidden = [ns for part, ns in zip(columns["part"], columns["ns"], strict=True) if part == len(EXPOSED_PARTS)]
    assert hidden == [2, 2], "backward computes until 12 and 32"


@pytest.mark.slow
@examples(40)
@given(programs())
def test_what_waited_for_what_is_what_the_analysis_says(device: Device) -> None:
    trace = device.trace(has_step=True)
    rank = build_timeline([source_of("program", trace)]).panels[0].ranks[0]
    placed, titles = [PlacedLane(0, place, lane) for place, lane in enumerate(rank.lanes)], Titles()
    shown = pack_boxes([each for each in placed if not each.lane.is_folded], titles).boxes
    packed = pack_folded([each for each in placed if each.lane.is_folded], shown, [rank.explained], titles)
    *_, columns = unpack(packed.boxes.tables, packed.pieces)
    boxes = [
        (row.placed.lane.kind, row.placed.lane.title, *times)
        for row in shown.rows
        for times in zip(row.boxes.start_ns.tolist(), row.boxes.end_ns.tolist(), strict=True)
    ]
    names, found, waited = list(titles.consumers), [], dict.fromkeys(range(len(boxes)), 0)
    for at, box in enumerate(np.cumsum(columns["box"]).tolist()):
        told = {name: column[at] for name, column in columns.items()}
        kind, _, start, end = boxes[box]
        if kind == WAITING:
            waited[told["of"] - 1] += end - start
            continue
        needed = None
        if told["held"]:
            consumer = boxes[told["consumer"] - 1]
            assert consumer[2] == start + told["after"]
            assert consumer[1] in ("copies", f"compute, stream {told['stream']}")
            needed = (told["slack"], HELD_BY[told["held"] - 1], names[told["name"]], told["stream"], consumer[2])
        found.append((start, end, told["blocking"], needed))
        assert kind == COMMUNICATION
    zero = min((box[2] for box in boxes if box[0] == COMMUNICATION), default=0) - min(
        (one.start_ns for one in collectives_of(trace)), default=0
    )
    expected = []
    for one in collectives_of(trace):
        needed = one.consumer and (
            one.slack_ns, one.consumer.held_by, one.consumer.name, one.consumer.stream, one.consumer.start_ns + zero,
        )  # fmt: skip
        blocking_ns = UNKNOWN if one.blocking_ns is None else one.blocking_ns
        expected.append((one.start_ns + zero, one.end_ns + zero, blocking_ns, needed))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert sum(waited.values()) == sum(one.blocking_ns or 0 for one in collectives_of(trace))
