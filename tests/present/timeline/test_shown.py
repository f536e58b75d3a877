"""What a timeline shows, without a page: windows, steps, what is drawn of them, and sums as the measures have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.ingest.load import load_trace
from ddp_prof.present import theme
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.model import Source
from ddp_prof.trace import Category
from tests.drawing import column, draw_trace
from tests.javascript import Node
from tests.measuring import source_of
from tests.night import but_the_largest
from tests.present.runs import cpu_run
from tests.present.timelines import KERNELS, busy_run, steps_of


@pytest.fixture(scope="module")
def busy_source() -> Source:
    return busy_run()


@pytest.fixture
def busy(node: Node, busy_source: Source, tmp_path: Path) -> Node:
    node.open(build_timeline([busy_source]), tmp_path)
    return node


def measured_sums(events: RankEvents, start_ns: int, end_ns: int) -> dict[str, int]:
    """What the algebra of intervals says of all that a device did in a window, in the trace's own time."""
    window, activities = union(column([start_ns]), column([end_ns])), events.trace.activities
    mine = (activities.process == events.process) & (activities.device == events.device)

    def of(*categories: Category) -> Intervals:
        rows = mine & np.isin(activities.category, categories)
        return union(activities.start_ns[rows], activities.end_ns[rows]) & window

    compute, communication, memory = of(Category.COMPUTE), of(Category.COMMUNICATION), of(Category.MEMORY)
    known = compute | communication | memory
    return {
        theme.COMPUTE_ONLY: (compute - communication).length_ns,
        theme.OVERLAPPED: (communication & compute).length_ns,
        theme.EXPOSED: (communication - compute).length_ns,
        theme.EXPOSED_MEMORY: (memory - compute - communication).length_ns,
        theme.IDLE: (window - known - of(Category.OTHER, Category.UNKNOWN)).length_ns,
        theme.GRAPH: (of(Category.OTHER) - known).length_ns,
        theme.UNNAMED: (of(Category.UNKNOWN) - known - of(Category.OTHER)).length_ns,
    }


def drawn(node: Node, columns: int = 1000) -> dict[str, object]:
    """What of each lane of a device is drawn: long boxes, merged cells, and boxes in all."""
    found: dict[str, object] = node.ask(
        """(({ drawn, boxes, columns }) => ({ boxes, columns, lanes: drawn
          .filter(({ row }) => row.lane.includes("stream"))
          .map(({ boxes: { length }, cells }) =>
            [length, cells.length, cells.reduce((sum, { count }) => sum + count, length)]) })
        )(mergeAll(page.rows.filter(({ seen }) => seen), page.view, argument))""",
        columns,
    )
    return found


class TestDrawing:
    def test_thousands_of_kernels_are_merged_and_none_is_lost(self, busy: Node, busy_source: Source) -> None:
        for window in ((0, 1000 * KERNELS), (1_000_000, 3_000_000), (5_000_000, 5_000_900)):
            busy.ask("page.show(...argument)", list(window))
            start, end = busy.ask("[page.view.from, page.view.to]")
            found, seen = drawn(busy), busy_source.trace.activities
            lanes = [(seen.category == kind) & (seen.start_ns < end) & (seen.end_ns > start) for kind in (0, 1)]
            assert [count for *_, count in found["lanes"]] == [int(lane.sum()) for lane in lanes]  # type: ignore[attr-defined]
            assert (found["boxes"] <= 20_000, found["columns"]) == (True, 1000)  # type: ignore[operator]

    def test_boxes_show_one_by_one_where_there_is_room(self, busy: Node) -> None:
        busy.ask("page.showAll()")
        (boxes, cells, _), _ = drawn(busy)["lanes"]  # type: ignore[misc]
        assert (boxes, cells > 500) == (0, True)
        busy.ask("page.show(1000000, 1050000)")
        (boxes, cells, _), _ = drawn(busy)["lanes"]  # type: ignore[misc]
        assert (boxes >= 40, cells) == (True, 0)

    def test_more_than_may_be_drawn_is_merged_more_coarsely(self, busy: Node) -> None:
        busy.ask("page.showAll()")
        found = drawn(busy, columns=100_000)
        assert found["boxes"] <= 20_000  # type: ignore[operator]
        assert found["columns"] < 50_001  # type: ignore[operator]


class TestSums:
    @pytest.mark.parametrize("window", [(0, 30_000_000), (1_234_567, 7_654_321), (17_000_001, 17_000_778)])
    def test_sums_are_those_of_the_measures(self, busy: Node, busy_source: Source, window: tuple[int, int]) -> None:
        (rank,) = busy.ask("page.sums(...argument)", list(window))
        assert rank["sums"] == measured_sums(busy_source.ranks[0], *window)

    @pytest.mark.parametrize(
        "name",
        but_the_largest(
            [
                "nsys2026_2_two_processes_h100.sqlite",
                "nsys2022_4_ddp_unet_a100_rank0of4.sqlite",
                "nsys2024_6_cuda_graphs_a100.sqlite",
                "kineto_a100_rank0of128.json.gz",
            ]
        ),
    )
    @pytest.mark.slow
    def test_any_window_of_a_real_capture_sums_to_itself(
        self, node: Node, tmp_path: Path, shared_traces: Path, name: str
    ) -> None:
        trace = load_trace(shared_traces / name)
        rank_events = find_rank_events(trace)
        model = build_timeline([source_of(name, trace)])
        node.open(model, tmp_path)
        first = min(int(table.start_ns.min()) for table in (trace.activities, trace.spans, trace.calls) if len(table))
        zero, chance = first - model.start_ns, np.random.default_rng(0)
        windows = [(model.start_ns, model.end_ns), *map(sorted, chance.integers(model.start_ns, model.end_ns, (15, 2)))]
        for start, end in (map(int, window) for window in windows):
            told = node.ask("page.sums(...argument)", [start, end])
            expected = [
                measured_sums(events, start + zero, end + zero) | dict.fromkeys(rank["unknown"])
                for events, rank in zip(rank_events, told, strict=True)
            ]
            assert [rank["sums"] for rank in told] == expected
            node.ask("page.show(...argument)", [start, end])
            low, high = node.ask("page.window")
            for rank in node.ask("page.sums()"):
                if rank["unknown"]:
                    assert {part for part, ns in rank["sums"].items() if ns is None} == set(rank["unknown"])
                else:
                    assert sum(rank["sums"].values()) + rank["rest"] == high - low
        # All of the capture is what the table says of the ranks.
        whole = node.ask("page.sums(page.data.start, page.data.end)")
        for rank, lanes in zip(whole, model.panels[0].ranks, strict=True):
            if lanes.overlap.reason is None:
                assert rank["sums"][theme.OVERLAPPED] == lanes.overlap.overlapped_ns
                assert rank["sums"][theme.EXPOSED] == lanes.overlap.exposed_ns


class TestMoving:
    def window(self, node: Node) -> tuple[float, float]:
        start, end = node.ask("[page.view.from, page.view.to]")
        return start, end

    def test_a_step_of_two_runs_starts_at_the_same_place(self, node: Node, tmp_path: Path) -> None:
        late = draw_trace(
            ranges={"step|index=0": "#" * 30, "step|index=1": "." * 30 + "#" * 20,
                    "forward": "####" + "." * 28 + "#" * 10, "backward": "." * 43 + "#" * 4,
                    "all_reduce|bucket=0": "." * 35 + "##"},
            ranks={4242: 0},
        )  # fmt: skip
        node.open(build_timeline([source_of("overlap", cpu_run(2)), source_of("late", late)]), tmp_path)
        node.ask("page.showStep(1)")
        assert node.ask("page.view.offsets") == [20, 30]
        first, second = node.ask("page.sums(0, 20)")
        assert first["sums"][theme.OVERLAPPED] + first["sums"][theme.EXPOSED] == 4
        assert second["sums"][theme.COMPUTE_ONLY] == 12, "compute less 2 of communication"

    def test_zoom_and_pan_come_back(self, busy: Node) -> None:
        busy.ask("page.showAll()")
        low, high = self.window(busy)
        span = high - low
        busy.ask("page.zoom(0.5)")
        assert self.window(busy) == pytest.approx((low + span / 4, high - span / 4))
        busy.ask("page.pan(0.25)")
        assert self.window(busy) == pytest.approx((low + 3 * span / 8, high - span / 8))
        busy.ask("page.pan(-0.25), page.zoom(2)")
        assert self.window(busy) == pytest.approx((low, high))
        busy.ask("page.zoom(0.5, 0.25)")
        assert self.window(busy) == pytest.approx((low + span / 8, low + 5 * span / 8)), "a quarter from the left stays"

    def test_a_window_never_leaves_what_there_is(self, busy: Node) -> None:
        busy.ask("page.showAll()")
        whole = self.window(busy)
        busy.ask("page.show(-1e12, 1e12)")
        assert self.window(busy) == pytest.approx(whole)
        busy.ask("page.show(5000, 5000)")
        start, end = self.window(busy)
        assert end - start == 100

    def test_neighbours_of_steps(self, node: Node, tmp_path: Path) -> None:
        node.open(build_timeline([source_of("run", steps_of(4, 8, 5, 7))]), tmp_path)
        node.ask("page.show(13000, 16000)")
        steps = []
        for by in (1, 1, 1, -1, -1, -1, -1):
            node.ask("page.showNeighbour(argument)", by)
            steps.append(node.ask("page.step"))
        assert steps == [2, 3, 3, 2, 1, 0, 0], "first the one in the middle of the window"

    def test_jumps_are_taken_back_one_by_one(self, node: Node, tmp_path: Path) -> None:
        node.open(build_timeline([source_of("run", steps_of(4, 8, 5, 7))]), tmp_path, "step=1")
        views = [self.window(node)]
        for time in (1_000, 9_000):
            node.ask("page.bringIntoView(nearest(page, page.rows.filter(({ kind }) => kind === 'compute')"
                     ".flatMap((row) => row.tracks.map((track) => ({ row, index: 0, track }))), [argument, 0], 1))",
                     time)  # fmt: skip
            views.append(self.window(node))
        assert len(set(views)) == 3
        for view in (views[1], views[0], views[0]):
            node.ask("page.back()")
            assert self.window(node) == view
        assert node.ask("page.step") == 1

    def test_a_box_is_moved_to_without_zooming_and_a_selection_is_zoomed_to(self, node: Node, tmp_path: Path) -> None:
        node.open(build_timeline([source_of("run", steps_of(4, 8, 5, 7))]), tmp_path, "step=1")
        start, end = self.window(node)
        node.select("compute", 14_000)
        low, high = node.ask("page.selection")
        assert high > end, "it is not wholly in view"
        node.ask("page.moveTo(page.selected)")
        middle, half = (low + high) / 2, (end - start) / 2
        assert self.window(node) == pytest.approx((middle - half, middle + half))
        node.ask("page.showSelection()")
        slack = (high - low) / 8
        assert self.window(node) == pytest.approx((low - slack, high + slack))


@pytest.mark.parametrize(
    ("span", "unit", "first"),
    [(8e9, "s", "0 s"), (8e6, "ms", "0 ms"), (1e6, "µs", "0 µs"), (3e3, "µs", "0.0 µs"), (150, "ns", "0 ns")],
)
def test_the_axis_has_the_unit_of_its_window(node: Node, span: float, unit: str, first: str) -> None:
    ticks = node.ask("ticksOf(0, argument, 10)", span)
    assert ticks["ticktext"][0] == first
    assert {text.split(" ")[1] for text in ticks["ticktext"]} == {unit}
    assert 3 <= len(ticks["ticktext"]) <= 11
    assert ticks["tickvals"][-1] * 1e6 <= span
