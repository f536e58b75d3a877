"""What the host did: nested ranges, calls, and backward where it is inferred."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.present import theme
from ddp_prof.present.html.timeline_page import MOST_PANELS, make_content
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.lanes import nest
from ddp_prof.present.timeline.model import CALLS, COMPUTE, HOST, RANGES, STRIP
from ddp_prof.runs import load_runs
from ddp_prof.runs.run import timeline_sources
from ddp_prof.trace import Category, Trace
from tests.cli.test_reported import lost_first
from tests.drawing import column, draw_trace, with_details
from tests.measuring import source_of
from tests.nsys_factory import write_capture
from tests.present.tables.test_collectives import of_backward

if TYPE_CHECKING:
    from pathlib import Path

    from ddp_prof.present.timeline.model import Lane, Timeline


def model_of(trace: Trace) -> Timeline:
    return build_timeline([source_of("run", trace)])


def lanes_of(model: Timeline, kind: str) -> list[Lane]:
    return [lane for lane in model.panels[0].ranks[0].lanes if lane.kind == kind]


def rows_of(lane: Lane) -> list[tuple[int, str, int, int]]:
    """Level, name, start and end of each box."""
    boxes = lane.boxes
    columns = (boxes.level, boxes.name_id, boxes.start_ns, boxes.end_ns)
    return sorted((level, lane.names[name], start, end) for level, name, start, end in
                  zip(*(item.tolist() for item in columns), strict=True))  # fmt: skip


@st.composite
def nested(draw: st.DrawFn, start: int = 0, end: int = 40, depth: int = 0) -> list[tuple[int, int, int]]:
    """Ranges of a thread with their depth."""
    found: list[tuple[int, int, int]] = []
    at = start
    while depth < 4 and at < end and draw(st.booleans()):
        first = draw(st.integers(at, end - 1))
        last = draw(st.integers(first + 1, end))
        found.append((first, last, depth))
        found += draw(nested(first, last, depth + 1))
        at = last
    return found


@given(nested().flatmap(st.permutations))
def test_nested_intervals_lie_on_the_row_of_their_depth(drawn: list[tuple[int, int, int]]) -> None:
    start, end = column(first for first, _, _ in drawn), column(last for _, last, _ in drawn)
    level = nest(start, end)
    # Of equal ranges either may be the outer one.
    assert sorted(zip(start.tolist(), end.tolist(), level.tolist(), strict=True)) == sorted(drawn)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9))))
def test_whatever_comes_no_two_of_a_row_overlap(drawn: list[tuple[int, int]]) -> None:
    start = column(at for at, _ in drawn)
    end = start + column(length for _, length in drawn)
    level = nest(start, end)
    for row in np.unique(level):
        order = np.lexsort((end[level == row], start[level == row]))
        assert np.all(start[level == row][order][1:] >= end[level == row][order][:-1])


def test_ranges_of_the_program_lie_below_each_other() -> None:
    trace = draw_trace(
        ranges={"process|rank=0": "########", "step 1": "#######.", "load": ".##..##.", "copy": "..#....."}
    )
    (lane,) = lanes_of(model_of(trace), RANGES)
    assert lane.title == "ranges, main thread"
    assert rows_of(lane) == [(0, "step 1", 0, 7), (1, "load", 1, 3), (1, "load", 5, 7), (2, "copy", 2, 3)]


def test_calls_have_a_lane_a_thread_and_launch_what_they_did() -> None:
    drawn = draw_trace(launches={"main": "a..b.", "worker": ".c..."}, streams={7: "...aabb", 9: "..cc..."})
    model = model_of(with_details(drawn))
    main, worker = lanes_of(model, CALLS)
    assert [main.title, worker.title] == ["CUDA calls, main thread", "CUDA calls, worker (4244)"]
    # Time 0 is the start of the first kernel; what launched it before is there, too.
    assert rows_of(main) == [(0, "cudaLaunchKernel", -2, 0), (0, "cudaLaunchKernel", 1, 3)]
    kernels = {lane.title: lane.boxes.call.tolist() for lane in lanes_of(model, COMPUTE)}
    starts = drawn.calls.start_ns
    assert {title: starts[calls].tolist() for title, calls in kernels.items()} == {
        "compute, stream 7": [0, 3],
        "compute, stream 9": [1],
    }
    assert lanes_of(model_of(drawn), CALLS) == [], "names and ends of calls were not read"


def test_backward_is_inferred_between_launches_of_other_phases() -> None:
    trace = draw_trace(
        ranges={
            "step|index=0": "##############......",
            "step|index=1": "..............######",
            "forward": ".##...##......##....",
            "optimizer": "............##....##",
        },
        launches={"main": ".a....b.....cd......", "pt_autograd_0": "...eAf..gh.B....i..."},
        streams={7: "." * 20 + "abcdefghi", 9: "." * 20 + "AB"},
    )
    host = model_of(trace).panels[0].ranks[0].lanes[0]
    backward = host.boxes.category == theme.CATEGORIES.index("backward")
    spans = list(zip(host.boxes.start_ns[backward].tolist(), host.boxes.end_ns[backward].tolist(), strict=True))
    assert spans == [(3, 5), (8, 11), (16, 16)]
    assert {host.names[name] for name in host.boxes.name_id[backward]} == {
        "backward (inferred: launched by autograd's threads)"
    }


def test_backward_that_the_host_tells_is_not_inferred() -> None:
    trace = draw_trace(
        ranges={"step|index=0": "######", "backward": "..###."},
        launches={"pt_autograd_0": "..ab.."},
        streams={7: "..aabb"},
    )
    host = model_of(trace).panels[0].ranks[0].lanes[0]
    assert int((host.boxes.category == theme.CATEGORIES.index("backward")).sum()) == 1


def test_where_backward_has_no_name_neither_steps_nor_the_strip_tell_what_hides() -> None:
    """Under 'how much communication hides is not known' each step had its share, and the strip was idle in backward."""
    named, unnamed = (model_of(of_backward(is_named=is_named)) for is_named in (True, False))
    titles = [host.names[0] for model in (named, unnamed) for host in lanes_of(model, HOST)]
    assert titles == ["step 0: 50 % of 0.0 µs communication overlapped", "step 0"]
    assert [len(lanes_of(model, STRIP)) for model in (named, unnamed)] == [1, 0]


def test_where_no_mark_tells_when_the_host_waits_the_strip_does_not_say_what_ran_beside_communication() -> None:
    """'overlapped' stood where the host may have waited, which the tables call n/a."""
    ranges = [
        *(("process|rank=0|world=2|backend=gloo", "##########"), ("step|index=0", "##########")),
        *(("backward", "########.."), ("all_reduce|bucket=0|bytes=8", "..#######.")),
    ]
    shown = []
    for marks in ([], [("synchronize", "......##..")]):
        model = model_of(draw_trace(ranges=[*ranges, *marks]))
        (strip,) = lanes_of(model, STRIP)
        shown.append([theme.CATEGORIES[category] for category in strip.boxes.category.tolist()])
    assert shown == [["compute_only", "idle"], ["compute_only", "overlapped", "exposed", "idle"]]


def beside_a_whole_graph() -> Trace:
    drawn = draw_trace(
        ranges={"step 0": "##########"},
        launches={"main": "aBg......."},
        streams={7: "aaaa......", 9: "..BBBBB...", 8: "gggggg...."},
    )
    category = np.where(drawn.activities.lane == 8, Category.OTHER, drawn.activities.category)
    return replace(drawn, activities=replace(drawn.activities, category=category))


def test_where_the_profiler_lost_work_nothing_is_called_idle(tmp_path: Path) -> None:
    """Of six steps the work of four is lost, and 'idle' took them."""
    (loaded,) = load_runs(write_capture(tmp_path / "x.sqlite", lost_first()))
    (panel,) = build_timeline(timeline_sources([loaded])).panels
    (strip,) = [lane.boxes for lane in panel.ranks[0].lanes if lane.kind == STRIP]
    first, last = panel.steps
    assert (int(strip.start_ns.min()), int(strip.end_ns.max())) == (first.start_ns, last.end_ns)
    assert (strip.end_ns - strip.start_ns).sum() == 2_000_000, "both steps that are left, and nothing before them"
    assert panel.start_ns < first.start_ns


def test_where_nothing_that_communicates_was_recorded_the_device_is_not_called_idle() -> None:
    silent = draw_trace(
        ranges={"step 0": "##########", "nccl:all_reduce": "..##......"},
        launches={"main": "a........."},
        streams={7: ".aa......."},
    )
    assert [lane.kind for lane in model_of(silent).panels[0].ranks[0].lanes] == [HOST, RANGES, COMPUTE]
    # A page of many files shows only where time goes, unless that is known of none.
    for trace, shown in ((silent, ""), (of_backward(is_named=True), "where time goes")):
        model = build_timeline([source_of(str(number), trace) for number in range(MOST_PANELS + 1)])
        assert json.loads(make_content(model).data)["filter"] == shown


def test_beside_a_graph_recorded_whole_only_what_overlapped_is_drawn_as_known() -> None:
    """Its compute was drawn as alone and its communication as exposed, and the step told a share.

    compute   aaaa.......
    sent      ..BBBBB....
    graph     gggggg.....
    strip     ggoogge....
    """
    panel = model_of(beside_a_whole_graph()).panels[0]
    (strip,) = [lane.boxes for lane in panel.ranks[0].lanes if lane.kind == STRIP]
    rows = zip(strip.start_ns.tolist(), strip.end_ns.tolist(), strip.category.tolist(), strict=True)
    assert [(start, end, theme.CATEGORIES[code]) for start, end, code in rows] == [
        (0, 2, theme.GRAPH), (2, 4, theme.OVERLAPPED), (4, 6, theme.GRAPH), (6, 7, theme.EXPOSED), (7, 10, theme.IDLE)
    ]  # fmt: skip
    assert (panel.overlap_ratio, panel.ranks[0].lanes[0].names[0]) == (None, "step 0")
    exposure = panel.ranks[0].explained.exposure
    assert not exposure.pairs_ns.any(), "no detail of a collective tells exposed time"
    assert not exposure.overlapped_ns.any()
