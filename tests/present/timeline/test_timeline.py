from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.overlap import measure_rank
from ddp_prof.errors import TraceError
from ddp_prof.ingest.load import load_trace
from ddp_prof.present import theme
from ddp_prof.present.text import shown_name
from ddp_prof.present.timeline.build import build_excerpt, build_timeline, typical_steps
from ddp_prof.present.timeline.figure import (
    HEADER_LINE,
    LEGEND_COLUMNS,
    LEGEND_ROW,
    axis_title,
    draw_timeline,
    explanation,
    headline,
)
from ddp_prof.present.timeline.lanes import stack
from ddp_prof.present.timeline.model import GRAPHS, STRIP, UNNAMED, WAITING, Lane, Source, Timeline
from ddp_prof.trace import UNKNOWN, Category, Trace
from tests.analyze.core.test_dependencies import one_bucket
from tests.charts import validated
from tests.drawing import column, draw_trace
from tests.measuring import source_of, sources_of
from tests.night import but_the_largest
from tests.nsys_factory import US, Sync, bucket_steps, write_capture
from tests.present.runs import two_clocks

draw_timeline = validated(draw_timeline)

LETTER = {
    theme.COMPUTE_ONLY: "c",
    theme.OVERLAPPED: "o",
    theme.EXPOSED: "e",
    theme.EXPOSED_MEMORY: "m",
    theme.IDLE: ".",
}

CPU = {
    "process|rank=1|world=2|variant=overlap|backend=gloo|device=cpu": "#" * 42,
    "step|index=3": "####################......................",
    "step|index=4": "....................####################..",
    "forward": "...####............. ...####..............",
    "backward": ".......#####........ .......####..........",
    "synchronize": "............####.... ...........####......",
    "optimizer": "................#### ...............####..",
    "all_reduce|bucket=0|bytes=4194304|params=2": "........######...... ......................",
    "all_reduce|bucket=1|bytes=10|params=1": ".........##....................####.......",
}  # fmt: skip
GPU = {
    "ranges": {"step|index=0": "######......", "forward": "##..........", "backward": "..###......."},
    "launches": {"main": "abA.", "pt_autograd_0": "...cB1"},
    "streams": {7: ".aaa..bbcccc......", 9: "...AAA.....BB.....", 11: "............11....", 20: ".................."},
}
HOSTILE = [
    "<script>alert(1)</script>",
    "<b>bold</b> & 'quoted' \"names\"",
    '<a href="javascript:alert(1)">x</a>',
    "x" * 10_000,
    "\N{FIRE} \N{HEBREW LETTER ALEF} \u202egnp.exe\u2028\n",
]


def source(trace: Trace, title: str = "overlap") -> Source:
    return source_of(title, trace)


def cpu_trace() -> Trace:
    return draw_trace(ranges=CPU, ranks={4242: 1})


def lane_of(model: Timeline, kind: str) -> Lane:
    return next(lane for lane in model.panels[0].ranks[0].lanes if lane.kind == kind)


def titles_shown(model: Timeline) -> list[str]:
    return [lane.title for lane in model.panels[0].ranks[0].lanes if not lane.is_folded]


def picture(lane: Lane, letters: dict[str, str], level: int = 0) -> str:
    """A character a nanosecond; a space where there is no box."""
    characters = [" "] * int(lane.boxes.end_ns.max())
    for start, end, category, row in zip(
        lane.boxes.start_ns, lane.boxes.end_ns, lane.boxes.category, lane.boxes.level, strict=True
    ):
        if row == level:
            characters[start:end] = letters.get(theme.CATEGORIES[category], "#") * int(end - start)
    return "".join(characters)


def parts_by_step(lane: Lane) -> dict[int, dict[str, int]]:
    boxes = lane.boxes
    length = boxes.end_ns - boxes.start_ns
    return {
        int(step): {
            part: int(length[(boxes.step == step) & (boxes.category == theme.CATEGORIES.index(part))].sum())
            for part in theme.STRIP
        }
        for step in np.unique(boxes.step)
    }


class TestLanes:
    def test_a_cpu_rank(self) -> None:
        model = build_timeline([source(cpu_trace())])
        (rank,) = model.panels[0].ranks
        assert rank.title == "rank 1"
        assert titles_shown(model) == ["host", "compute", "communication", "waits for communication", "where time goes"]
        phases = {"forward": "f", "backward": "b", "synchronize": "s", "optimizer": "o"}
        host = lane_of(model, "host")
        assert picture(host, {"step": "#"}, 0) == "#" * 40
        assert picture(host, phases, 1) == "   ffffbbbbbssssoooo    ffffbbbbssssoooo"
        assert picture(lane_of(model, "compute"), phases) == "   ffffbbbbb    oooo    ffffbbbb    oooo"
        assert picture(lane_of(model, STRIP), LETTER) == "...cccccooooee..cccc....cccccccoeee.cccc.."

    def test_collectives_in_flight_together_are_stacked(self) -> None:
        lane = lane_of(build_timeline([source(cpu_trace())]), "communication")
        assert picture(lane, {}, 0) == "        ######                 ####"
        assert picture(lane, {}, 1) == "         ##                        "
        assert lane.levels == 2
        assert lane.boxes.bucket.tolist() == [0, 1, 1]
        assert lane.boxes.bytes.tolist() == [4_194_304, 10, 10]
        assert lane.boxes.step.tolist() == [3, 3, 4]
        assert lane.from_launch

    def test_a_gpu_rank_has_a_lane_a_stream(self) -> None:
        model = build_timeline([source(draw_trace(**GPU))])
        assert titles_shown(model) == [
            "host",
            "compute, stream 7",
            "communication, stream 9",
            "copies",
            "where time goes",
        ]
        compute = lane_of(model, "compute")
        # Backward was launched by another thread than the one that opened its range.
        assert picture(compute, {"forward": "f", "backward": "b"}) == " fff  ffbbbb"
        assert [compute.names[name] for name in compute.boxes.name_id] == ["compute a", "compute b", "compute c"]
        assert picture(lane_of(model, STRIP), LETTER) == ".ccoeecccccoem"

    def test_a_collective_of_a_gpu_has_the_bucket_of_the_range_that_launched_it(self) -> None:
        trace = draw_trace(
            ranges={
                "step|index=0": "##########",
                "all_reduce|bucket=5|bytes=64|params=1": ".########.",
                "all_reduce|bucket=6|bytes=32|params=1": "...#######",
            },
            launches={"pt_autograd_0": ".A..B"},
            streams={9: "...AAABBBB"},
        )
        lane = lane_of(build_timeline([source(trace)]), "communication")
        assert (lane.boxes.bucket.tolist(), lane.boxes.bytes.tolist()) == ([5, 6], [64, 32])
        assert not lane.from_launch

    def test_a_rank_of_which_nothing_is_known_is_not_called_idle(self) -> None:
        model = build_timeline([source(draw_trace(ranges={"step 1": "####", "something": ".##."}))])
        assert titles_shown(model) == ["host"]
        draw_timeline(model)

    def test_an_empty_trace_makes_an_empty_figure(self) -> None:
        model = build_timeline([source(draw_trace())])
        assert model.boxes == 0
        draw_timeline(model)


class TestWaiting:
    def test_it_is_where_a_stream_stood_still(self) -> None:
        #  stream 7   kkkk######......ccc
        #  stream 20  ....CCCCCCCCCCCC
        model = build_timeline([source(one_bucket(kernel=4, collective=12, then=6).trace(has_step=True))])
        assert picture(lane_of(model, WAITING), {theme.BLOCKING: "w"}) == " " * 10 + "w" * 6
        assert "something stands still" in "".join(words for words, _ in explanation(model))

    def test_a_lane_is_left_out_where_nothing_waited(self) -> None:
        model = build_timeline([source(one_bucket(kernel=4, collective=5, then=10).trace(has_step=True))])
        assert "waits for communication" not in titles_shown(model)
        assert model.panels[0].ranks[0].knows_blocking

    def test_communication_of_which_it_is_not_known_is_shown_as_that(self, tmp_path: Path) -> None:
        """The second step has a wait for an event that was never recorded: of what it holds up nothing is known."""
        capture = bucket_steps(20, 20)
        capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 40 * US + 650, 20, 7, event=77))
        trace = load_trace(write_capture(tmp_path / "x.sqlite", capture, "2023.4"))
        model = build_timeline([source(trace)])
        lane, rank = lane_of(model, WAITING), model.panels[0].ranks[0]
        assert [theme.CATEGORIES[code] for code in lane.boxes.category] == [theme.BLOCKING, theme.MAYBE_BLOCKING]
        assert (lane.boxes.start_ns.tolist(), lane.boxes.end_ns.tolist()) == ([15 * US, 45 * US], [25 * US, 65 * US])
        assert rank.knows_blocking
        assert "1 of 5 stream waits" in str(rank.why_unknown)

    def test_a_trace_that_tells_nothing_has_no_lane_and_says_so(self) -> None:
        model = build_timeline([source(draw_trace(**GPU))])
        rank = model.panels[0].ranks[0]
        assert "waits for communication" not in titles_shown(model)
        assert not rank.knows_blocking
        assert rank.why_unknown


class TestStrip:
    @pytest.mark.parametrize("trace", [cpu_trace(), draw_trace(**GPU)], ids=["cpu", "gpu"])
    def test_sums_are_the_figures_of_the_table(self, trace: Trace) -> None:
        self.check(trace)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name",
        but_the_largest(["nsys2022_4_ddp_unet_a100_rank0of4.sqlite", "nsys2026_2_two_processes_h100.sqlite"]),
    )
    def test_sums_are_the_figures_of_the_table_for_real(self, shared_traces: Path, name: str) -> None:
        self.check(load_trace(shared_traces / name))

    def check(self, trace: Trace) -> None:
        model = build_timeline([source(trace)])
        for rank, events in zip(model.panels[0].ranks, find_rank_events(trace), strict=True):
            measured = {
                UNKNOWN if step.step is None else step.step: {part: getattr(step, f"{part}_ns") for part in theme.STRIP}
                for step in measure_rank(events).steps
            }
            drawn = parts_by_step(rank.lanes[-1])
            windows = events.breakdown
            assert sum(sum(parts.values()) for parts in drawn.values()) == model.end_ns - model.start_ns
            for part in (theme.OVERLAPPED, theme.EXPOSED):
                of_rank = getattr(rank.overlap, f"{part}_ns")
                assert sum(parts[part] for parts in drawn.values()) == of_rank
            drawn.pop(UNKNOWN, None)  # before, between and after the windows
            measured.pop(UNKNOWN, None)  # of a capture without steps
            if union(windows.start_ns, windows.end_ns).length_ns == windows.window_ns.sum():
                assert drawn == measured, "else windows cross, and what is in both is drawn once"

    @pytest.mark.parametrize(
        ("category", "name", "lane"),
        [(Category.OTHER, theme.GRAPH, GRAPHS), (Category.UNKNOWN, theme.UNNAMED, UNNAMED)],
    )
    def test_a_device_that_runs_what_is_not_known_is_not_called_idle(
        self, category: Category, name: str, lane: str
    ) -> None:
        trace = draw_trace(streams={7: "aa..bbbb..c"})
        categories = np.where(trace.activities.start_ns == 4, category, trace.activities.category)
        trace = replace(trace, activities=replace(trace.activities, category=categories))
        model = build_timeline([source(trace)])
        assert picture(lane_of(model, STRIP), {**LETTER, name: "?"}) == "cc..????..c"
        assert picture(lane_of(model, lane), {name: "?"}) == "    ????"

    def test_windows_that_cross_are_one_row(self) -> None:
        trace = draw_trace(
            ranges={"step|index=0": "####......", "step|index=1": "....######"},
            launches={"main": "ab..c"},
            streams={7: "aa....bb..", 8: "....cccc.."},
        )
        strip = lane_of(build_timeline([source(trace)]), STRIP)
        assert strip.levels == 1
        assert picture(strip, LETTER) == "cc..cccc.."
        assert list(zip(strip.boxes.end_ns.tolist(), strip.boxes.step.tolist(), strict=True)) == [
            (2, 0), (4, 0), (8, 1), (10, UNKNOWN),
        ]  # fmt: skip

    def test_each_instant_that_was_captured_is_one_part(self) -> None:
        """Start-up and a copy after the last step; between steps the device idles, and a collective of neither runs."""
        trace = draw_trace(
            ranges={
                "setup": "##................",
                "step|index=0": "....##............",
                "step|index=1": "..........##......",
            },
            launches={"main": ".i..a...B.b......."},
            streams={7: ".ii.aaa...bbb.....", 9: "........BB........", 11: "................11"},
        )
        model = build_timeline([source(trace)])
        shift = 4  # time 0 is the start of the first step
        strip = lane_of(model, STRIP)
        moved = replace(
            strip, boxes=replace(strip.boxes, start_ns=strip.boxes.start_ns + shift, end_ns=strip.boxes.end_ns + shift)
        )
        assert picture(moved, LETTER) == ".cc.ccc.eeccc...mm"
        steps = np.repeat(moved.boxes.step, moved.boxes.end_ns - moved.boxes.start_ns)
        assert "".join("-" if step == UNKNOWN else str(step) for step in steps) == "----000---111-----"
        panel = model.panels[0]
        assert (panel.start_ns, panel.end_ns) == (-4, 14)
        assert panel.home_ns == (0, 9), "the steps"
        assert panel.facts[-1] == "all 0.0 µs captured, 0.0 µs of it in measured steps"


class TestStack:
    def test_the_topmost_free_row(self) -> None:
        start, end = np.array([0, 1, 2, 6]), np.array([4, 6, 10, 9])
        assert stack(start, end).tolist() == [0, 1, 2, 0]

    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9))))
    def test_a_row_never_holds_two_at_once(self, drawn: list[tuple[int, int]]) -> None:
        start = np.array([start for start, _ in drawn], np.int64)
        end = np.array([start + length for start, length in drawn], np.int64)
        level = stack(start, end)
        for row in np.unique(level):
            order = np.argsort(start[level == row], kind="stable")
            assert np.all(start[level == row][order][1:] >= end[level == row][order][:-1])
        in_flight = max((int(((start <= at) & (end > at)).sum()) for at in start), default=0)
        assert len(np.unique(level)) == in_flight
        for at in np.flatnonzero(level):
            meets = (start <= start[at]) & (end > start[at])
            assert {*range(level[at])} <= {*level[meets]}, "the rows above it are in use where it starts"


class TestSelection:
    def test_time_0_is_the_start_of_the_first_step_shown(self) -> None:
        model = build_timeline([source(cpu_trace())], steps=[4])
        (mark,) = model.panels[0].steps
        assert mark == (4, 0, 20)
        assert lane_of(model, "communication").boxes.start_ns.tolist() == [11]

    def test_two_traces_start_together_and_show_the_same_time(self) -> None:
        short = draw_trace(
            ranges={"step|index=3": ".....####", "forward": ".....##..", "all_reduce|bucket=0": "......#.."}
        )
        model = build_timeline([source(cpu_trace()), source(short, "short")], steps=[3])
        assert [panel.steps[0].start_ns for panel in model.panels] == [0, 0]
        assert [(panel.start_ns, panel.end_ns) for panel in model.panels] == [(0, 20), (0, 4)]
        short = draw_trace(ranges={"step|index=3": ".....####", "after": ".........########################"})
        model = build_timeline([source(cpu_trace()), source(short, "short")], steps=[3])
        assert [(panel.start_ns, panel.end_ns) for panel in model.panels] == [(0, 20), (0, 20)]

    def test_ranks_of_a_run_are_on_one_clock(self) -> None:
        """Each was lined up at the start of its own first step, and so was each step on the page."""
        first, second = two_clocks()
        panels = build_timeline(sources_of({"rank 0": first, "rank 1": second})).panels
        lanes = [next(lane for lane in panel.ranks[0].lanes if lane.kind == "communication") for panel in panels]
        ends = [lane.boxes.end_ns.tolist() for lane in lanes]
        assert ends[0] == ends[1] != []
        assert [(mark.key, mark.start_ns, mark.end_ns) for mark in panels[0].steps] == [(0, 0, 20), (1, 20, 40)]
        assert panels[1].steps == panels[0].steps

    def test_beside_a_longer_panel_all_steps_that_are_seen_are_named(self) -> None:
        steps = {f"step|index={number}": "." * 9 * (number - 3) + "#" * 9 for number in (3, 4, 5, 6)}
        model = build_timeline([source(cpu_trace()), source(draw_trace(ranges=steps), "short")], steps=[3])
        assert [panel.facts[-1].partition(";")[0] for panel in model.panels] == ["step 3 shown", "steps 3 to 5 shown"]

    def test_it_tells_which_part_of_the_capture_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A range of 8 µs, and in it kernels from 2 to 6 µs."""
        launched = {"ranges": {"range": "#" * 8000}, "streams": {7: "." * 2000 + "a" * 1000 + "." * 2000 + "b" * 1000}}
        whole = build_timeline([source(draw_trace(**launched))])
        assert whole.panels[0].facts[-1] == "all 8.0 µs captured, 4.0 µs of it from the first work to the last"
        assert (whole.panels[0].start_ns, whole.panels[0].end_ns) == (-2000, 6000)
        assert whole.home_ns == (0, 4000)
        picture = build_excerpt([source(draw_trace(**launched))])
        assert picture.panels[0].facts[-1] == "4.0 µs of 8.0 µs shown"
        monkeypatch.setattr("ddp_prof.present.timeline.build.MAX_BOXES", 4)
        cut = build_excerpt([source(draw_trace(**launched))])
        assert cut.panels[0].facts[-1] == "3.0 µs of 8.0 µs shown"
        assert axis_title(cut) == "time since the first compute, communication or copy"
        filled = build_timeline([source(draw_trace(streams=launched["streams"]))])
        assert filled.panels[0].facts[-1] == "all 4.0 µs captured"

    def test_warm_up_is_drawn_and_named_as_such(self) -> None:
        trace = draw_trace(
            ranges={
                "step|index=0|warmup=1": "########........",
                "step|index=0": "........########",
                "forward": ".##......##.....",
                "backward": "...##......##...",
                "synchronize": ".....#.......#..",
                "all_reduce|bucket=0": "....##......##..",
            },
            ranks={4242: 0},
        )
        model = build_timeline([source(trace)])
        host, compute = lane_of(model, "host"), lane_of(model, "compute")
        assert [host.names[name] for name in host.boxes.name_id[:2]] == [
            "warm-up step 0",
            "step 0: 50 % of 0.0 µs communication overlapped",
        ]
        steps = sorted(zip(compute.boxes.start_ns.tolist(), compute.boxes.step.tolist(), strict=True))
        assert steps == [(-7, UNKNOWN), (-5, UNKNOWN), (1, 0), (3, 0)]
        assert model.panels[0].step_names == {0: "step 0"}
        (rank,) = model.panels[0].ranks
        drawn = parts_by_step(rank.lanes[-1])
        assert drawn[0][theme.OVERLAPPED] == drawn[UNKNOWN][theme.OVERLAPPED] == rank.overlap.overlapped_ns == 1

    def test_what_processes_did_that_are_no_rank_is_counted(self) -> None:
        trace = draw_trace(ranges={"a": "##", "b": ".#"}, streams={7: "aa"})
        trace = replace(trace, spans=replace(trace.spans, process=column([4242, 1])))
        assert build_timeline([source(trace)]).panels[0].facts[-1] == "left out: 1 ranges of processes that are no rank"

    def test_an_instant_at_the_very_end_is_there(self) -> None:
        trace = draw_trace(ranges={"step|index=0": "####"}, launches={"main": "a..b"}, streams={7: "aaab"})
        acts = trace.activities
        trace = replace(trace, activities=replace(acts, start_ns=column([0, 4]), end_ns=column([0, 4])))
        assert len(lane_of(build_timeline([source(trace)]), "compute").boxes) == 2

    def test_steps_that_are_not_there(self) -> None:
        with pytest.raises(TraceError, match="none of the steps asked for is among its measured steps 3 to 4"):
            build_timeline([source(cpu_trace())], steps=[17])

    def test_numbers_that_come_again_are_told_apart_by_their_occurrence(self) -> None:
        epochs = [("step|index=0", "##......"), ("step|index=1", "..##...."), ("step|index=0", "....##..")]
        epochs = source(draw_trace(ranges=epochs))
        model = build_timeline([epochs])
        assert [step.key for step in model.panels[0].steps] == [0, 1, 2]
        names = ["step 0 (1 of 2)", "step 1", "step 0 (2 of 2)"]
        assert model.panels[0].step_names == dict(enumerate(names))
        assert list(lane_of(model, "host").names[:3]) == names
        assert "steps 0 (1 of 2) to 0 (2 of 2)" in model.panels[0].facts
        assert axis_title(model) == "time since the start of step 0 (1 of 2)"
        assert [step.key for step in build_timeline([epochs], [0]).panels[0].steps] == [0, 2]
        assert [step.key for step in build_excerpt([epochs]).panels[0].steps] == [1, 2]

    @pytest.mark.parametrize(
        ("typical", "shown"), [(1, [1, 2]), (0, [0, 1]), (5, [4, 5]), (None, [3, 4]), (17, [3, 4])]
    )
    def test_a_picture_shows_the_step_that_a_page_opens_on_and_one_beside_it(
        self, typical: int | None, shown: list[int]
    ) -> None:
        """Without a typical step, or where it is not drawn, the one of median length is."""
        ends = [20, 29, 37, 44, 50, 55]
        steps = [(f"step|index={at}", "." * end + "#" * (9 - at)) for at, end in enumerate([0, *ends[:-1]])]
        source = source_of("run", draw_trace(ranges=steps))._replace(typical_step=typical)
        assert [step.key for step in build_excerpt([source]).panels[0].steps] == shown
        assert build_timeline([source]).typical_step in shown

    def test_a_picture_of_a_few_steps_shows_those(self) -> None:
        only = source_of("run", draw_trace(ranges={"step|index=3": "####"}))
        assert [step.key for step in build_excerpt([only]).panels[0].steps] == [3]
        assert typical_steps([source_of("run", draw_trace(streams={7: "aa"}))]) == []


class TestFigure:
    def test_a_bar_a_box_and_a_trace_a_category(self) -> None:
        model = build_timeline([source(cpu_trace())])
        figure = draw_timeline(model)
        assert sum(len(bars.x) for bars in figure.data) == model.boxes
        assert len({bars.name for bars in figure.data}) == len(figure.data)
        communication = next(bars for bars in figure.data if bars.name == "communication")
        assert communication.base * 1e6 == pytest.approx([8, 9, 31])
        assert communication.x * 1e6 == pytest.approx([6, 2, 4])
        assert all(bars.orientation == "h" for bars in figure.data)

    def test_boxes_of_a_figure_never_lie_on_each_other(self) -> None:
        figure = draw_timeline(build_timeline([source(cpu_trace()), source(draw_trace(**GPU))]))
        drawn = [
            (y, y + height, base, base + x)
            for bars in figure.data
            for y, height, base, x in zip(bars.y - bars.width / 2, bars.width, bars.base, bars.x, strict=True)
        ]
        drawn.sort()
        for at, (top, bottom, start, end) in enumerate(drawn):
            for other_top, _, other_start, other_end in drawn[at + 1 :]:
                assert other_top >= bottom - 0.01 or other_start >= end - 1e-12 or other_end <= start + 1e-12, top

    def test_there_is_no_shape_an_event(self) -> None:
        few = len(draw_timeline(build_timeline([source(cpu_trace())], steps=[3])).layout.shapes)
        assert few == len(draw_timeline(build_timeline([source(cpu_trace())])).layout.shapes) == 0

    def test_what_is_written_in_a_box(self) -> None:
        figure = draw_timeline(build_timeline([source(cpu_trace())]))
        written = {bars.name: list(bars.text) for bars in figure.data}
        assert written["communication"] == ["bucket 0", "bucket 1", "bucket 1"]
        assert written["exposed communication"] == ["exposed<br>0.0 µs"] * 2

    def test_nothing_is_written_in_a_box_that_the_edge_cuts(self) -> None:
        trace = draw_trace(
            ranges={
                "step|index=0": "########",
                "step|index=1": "........########",
                "all_reduce|bucket=0": "......####......",
                "all_reduce|bucket=1": "..........####..",
            }
        )
        for steps, seen in ((None, ["bucket 0", "bucket 1"]), ([1], ["", "bucket 1"])):
            figure = draw_timeline(build_timeline([source(trace)], steps=steps))
            (written,) = (list(bars.text) for bars in figure.data if bars.name == "communication")
            assert written == seen

    def test_a_step_tells_its_own_share_where_there_is_room(self) -> None:
        steps = next(bars for bars in draw_timeline(build_timeline([source(cpu_trace())])).data if bars.name == "step")
        assert list(steps.text) == [
            "step 3: 67 % of 0.0 µs communication overlapped",
            "step 4: 25 % of 0.0 µs communication overlapped",
        ]
        many = draw_trace(ranges={f"step|index={at}": "." * at + "#" for at in range(9)})
        steps = next(bars for bars in draw_timeline(build_timeline([source(many)])).data if bars.name == "step")
        assert list(steps.text) == [f"step {at}" for at in range(9)]

    def test_a_cpu_says_so(self) -> None:
        texts = [item.text for item in draw_timeline(build_timeline([source(cpu_trace())])).layout.annotations]
        assert any("device: cpu" in text and "gloo" in text for text in texts)
        texts = [item.text for item in draw_timeline(build_timeline([source(draw_trace(**GPU))])).layout.annotations]
        assert any("device: cuda" in text for text in texts)

    def test_many_facts_take_several_lines_within_the_picture(self) -> None:
        few, many = [
            draw_timeline(build_timeline([source(cpu_trace())._replace(caveats=caveats)])).layout
            for caveats in ((), tuple(f"caveat {at}: {'x' * 40}" for at in range(9)))
        ]
        (text,) = [item.text for item in many.annotations if "caveat 0" in item.text]
        lines = text.split("<br>")
        assert len(lines) > 2
        assert all(len(re.sub("<.*?>", "", line)) < 240 for line in lines)
        assert many.height - few.height == HEADER_LINE * (len(lines) - 1), "lanes begin below them"

    def test_the_legend_has_room_below_the_subtitle(self) -> None:
        for model in (
            build_timeline([source(cpu_trace())]),
            build_timeline([source(cpu_trace()), source(draw_trace(**GPU))]),
        ):
            figure = draw_timeline(model)
            entries = sum(bars.showlegend for bars in figure.data)
            subtitle_ends = 70
            assert figure.layout.margin.t >= subtitle_ends + LEGEND_ROW * -(-entries // LEGEND_COLUMNS)
        assert entries > 2 * LEGEND_COLUMNS, "a third row"

    def test_the_headline_says_how_much_is_hidden(self) -> None:
        cpu = source(cpu_trace())
        assert headline(build_timeline([cpu])) == "overlap hides 50 % of its communication behind compute"
        both = build_timeline([source(cpu.trace, "A"), source(cpu.trace, "B")])
        assert headline(both) == "A hides 50 %, B 50 % of their communication behind compute"
        of_one_run = [source(cpu.trace, title)._replace(told_of_run="told") for title in "AB"]
        assert headline(build_timeline(of_one_run)) == "50 % of communication hides behind compute"
        silent = draw_trace(ranges={"step|index=0": "###"}, streams={7: "aa"})
        assert headline(build_timeline([source(silent, "solo")])) == "solo: how much communication hides is not known"


class TestHostileNames:
    @pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
    def test_nothing_in_a_name_is_markup(self, name: str) -> None:
        shown = shown_name(name)
        assert "<" not in shown
        assert ">" not in shown
        assert len(shown) < 400
        assert "\u202e" not in shown
        assert "\n" not in shown

    def test_titles_are_shown_as_text(self) -> None:
        trace = draw_trace(**GPU)
        trace = replace(trace, names=tuple(f"{HOSTILE[at % len(HOSTILE)]} {name}" if " " in name else name
                                           for at, name in enumerate(trace.names)))  # fmt: skip
        figure = draw_timeline(build_timeline([source(trace, HOSTILE[0])]))
        texts = [item.text for item in figure.layout.annotations] + [figure.layout.title.text]
        assert not any("<script" in text or "<a " in text for text in texts)
        assert any("&lt;script&gt;" in text for text in texts)
