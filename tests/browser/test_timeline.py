"""The page of a timeline: what it draws, how it moves, and that its sums are those of the measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.present import theme
from ddp_prof.present.html.timeline_page import make_content, write_timeline_page
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.model import Source, Timeline
from tests.browser.conftest import Once, Visit, write_timeline
from tests.drawing import draw_trace
from tests.measuring import source_of
from tests.present.runs import HOSTILE_TITLE, cpu_run
from tests.present.timeline.test_host_lanes import beside_a_whole_graph
from tests.present.timelines import busy_run, steps_of

HOSTILE_KERNELS = {
    "<script>document.title='owned'</script>": "as it is",
    "<b>bold</b> \"quoted\" 'too' & more": "as it is",
    "x" * 10_000: "shortened",
    "\N{FIRE} \N{HEBREW LETTER ALEF}\u202ecod.exe": "without control characters",
}
KERNELS = 1_600


def gpu_run() -> Source:
    """A kernel for each hostile name, and a collective."""
    trace = draw_trace(
        ranges={"step|index=0": "#" * 20},
        launches={"main": "abcd", "pt_autograd_0": "....A"},
        streams={7: "..aaaabbbbccccdddd..", 9: "........AAAAAAAAAA.."},
    )
    kernels = iter(HOSTILE_KERNELS)
    names = tuple(next(kernels) if name.startswith("compute ") else name for name in trace.names)
    trace = replace(trace, names=names)
    return source_of(HOSTILE_TITLE, trace)


def write(model: Timeline, folder: Path) -> Path:
    return write_timeline(model, folder / "timeline.html")


def write_alone(model: Timeline, folder: Path) -> Path:
    """The page as the command ``timeline`` writes it: plotly.js is a part of it."""
    write_timeline_page(make_content(model), folder / "timeline.html")
    return folder / "timeline.html"


def write_busy(folder: Path) -> None:
    write(build_timeline([busy_run(KERNELS)]), folder)


@pytest.fixture
def busy(visit: Visit, once: Once) -> Iterator[Visit]:
    """A page of many boxes, seen as a whole."""
    visit.open_timeline(once(write_busy) / "timeline.html")
    visit.ask("page.showAll()")
    yield visit
    assert visit.complaints == []


def write_hostile(folder: Path) -> None:
    write(build_timeline([gpu_run()]), folder)


@pytest.fixture
def hostile(visit: Visit, once: Once) -> Visit:
    visit.open_timeline(once(write_hostile) / "timeline.html")
    return visit


class TestDrawing:
    def test_a_page_needs_nothing_but_its_file(self, visit: Visit, tmp_path: Path) -> None:
        model = build_timeline([source_of("overlap", cpu_run(3)), gpu_run()])
        page = write_alone(model, tmp_path)
        visit.open_timeline(page)
        assert visit.ask("page.boxes") == model.boxes
        assert visit.title.startswith("overlap hides 100 %, <img src=x")
        assert "device: cpu" in visit.text()
        assert visit.complaints == []
        assert visit.requests == [page.as_uri()]
        visit.ask(
            """document.body.append(Object.assign(document.createElement("script"),
                { textContent: "document.title = 'owned'" }))"""
        )
        assert visit.title != "owned", "no script but ours could run"
        assert any("Content Security Policy" in complaint for complaint in visit.complaints)

    @pytest.mark.nightly  # in every gate without a page: tests/present/timeline/test_shown.py
    def test_more_than_may_be_drawn_is_merged_more_coarsely(self, visit: Visit, tmp_path: Path) -> None:
        visit.open_timeline(write(build_timeline([busy_run()] * 6), tmp_path), "#step=all&lanes=")
        assert visit.ask("page.boxes") <= 20_000
        assert visit.ask("page.columnWidth > 1.5 * page.pixel")

    @pytest.mark.parametrize("visit", [pytest.param("light", marks=pytest.mark.nightly), "dark"], indirect=True)
    def test_the_look_follows_the_system_and_a_category_switched_off_takes_its_labels_with_it(
        self, visit: Visit, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        palette = theme.DARK if "dark" in request.node.name else theme.LIGHT
        visit.open_timeline(write(build_timeline([source_of("naive", cpu_run())]), tmp_path))
        assert visit.ask("page.element.layout.paper_bgcolor") == palette.paper
        fills = visit.ask("page.element.data.map(({ fillcolor }) => fillcolor).filter(Boolean)")
        assert {fill[:7] for fill in fills} <= {*palette.colors.values(), palette.paper, palette.notice, palette.text}
        labels = "page.element.data.at(-1).text.filter((text) => text.startsWith('compute only')).length"
        assert visit.ask(labels) > 0
        entry = visit.ask("""page.data.categories.filter((each) => each.in_legend)
            .findIndex(({ name }) => name === "compute_only")""")
        visit.click(f".legendtoggle >> nth={entry}")
        assert visit.ask(labels) == 0
        assert visit.complaints == []

    def test_the_length_of_thin_exposed_time_lies_on_no_label(self, visit: Visit, tmp_path: Path) -> None:
        trace = draw_trace(streams={7: f"{'a' * 40}..{'b' * 10}{'.' * 8}{'c' * 40}", 9: f"{'.' * 40}NN{'.' * 58}"})
        visit.open_timeline(write(build_timeline([source_of("run", trace)]), tmp_path))
        texts = visit.each(
            "#timeline .annotation-text, #timeline .textpoint text",
            """(each) => { const { left, right, top, bottom } = each.getBoundingClientRect();
                 return [each.textContent, left, right, top, bottom]; }""",
        )
        assert {"2 ns", "compute only40 ns"} <= {text for text, *_ in texts}
        crossing = [
            (one[0], other[0])
            for at, one in enumerate(texts)
            for other in texts[:at]
            if one[1] < other[2] and other[1] < one[2] and one[3] < other[4] and other[3] < one[4]
        ]
        assert crossing == []

    def test_a_long_page_whose_first_window_is_long_too_is_drawn_when_it_is_read(
        self, visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ddp_prof.present.html.timeline_page.BOXES_READ_AT_ONCE", 10)
        visit.open_timeline(write(build_timeline([gpu_run()]), tmp_path))
        assert visit.ask("performance.getEntriesByName('first view').length") == 0
        assert visit.ask("page.drawn.length") > 0
        assert visit.complaints == []


class TestSums:
    def test_what_a_shorter_panel_did_not_capture_is_told(self, visit: Visit, tmp_path: Path) -> None:
        sources = [source_of("short", cpu_run(1)), source_of("long", cpu_run(2))]
        unknown = draw_trace(ranges={"step 1": "####", "something": ".##."})
        visit.open_timeline(write(build_timeline([*sources, source_of("unknown", unknown)]), tmp_path))
        visit.ask("page.showAll()")
        head = visit.texts("#sums thead th")
        assert head[-3:] == ["not captured", "overlapped share", "blocking"]
        cells = visit.each("#sums tbody tr", "({ cells }) => [...cells].slice(-3, -1).map((cell) => cell.textContent)")
        assert cells == [["20 ns 50 %", "100 %"], ["0.0 ms 0 %", "100 %"], ["n/a", "n/a"]]

    def test_beside_a_graph_recorded_whole_no_part_is_0(self, visit: Visit, tmp_path: Path) -> None:
        visit.open_timeline(write(build_timeline([source_of("run", beside_a_whole_graph())]), tmp_path))
        head, cells = visit.texts("#sums thead th")[1:], visit.texts("#sums tbody td")
        told = {part for part, cell in zip(head, cells, strict=True) if cell != "n/a"}
        assert told == {"CUDA graph"}, "no step tells its parts, and 'exposed' was 1 ns"

    @pytest.mark.nightly  # in every gate without a page: tests/present/timeline/test_shown.py
    def test_the_parts_in_the_table_sum_to_the_window(self, busy: Visit) -> None:
        for window in ((0, 1_600_000), (123_456, 765_432), (1_100_001, 1_100_778)):
            busy.show(*window)
            start, end = busy.ask("page.window")
            told = busy.each("#sums tbody td[title]:not(:last-child)", "({ title }) => title")
            assert sum(int(title.replace(",", "").removesuffix(" ns")) for title in told) == end - start

    def test_the_readout_tells_them_and_names_the_rank_of_a_panel_once(self, visit: Visit, tmp_path: Path) -> None:
        sources = [
            source_of("naive", cpu_run(shift=4))._replace(title="naive, rank 0"),
            source_of("overlap", cpu_run()),
        ]
        visit.open_timeline(write(build_timeline(sources), tmp_path))
        assert "naive, rank 0: 0 %, overlap: 100 % overlapped" in visit.text("#in-view")
        assert visit.texts("#sums tbody th") == ["naive, rank 0", "overlap, rank 0"]
        assert visit.texts("#sums tbody td:nth-last-child(2)") == ["0 %", "100 %"]
        visit.ask("(page.data.margin = 10, page.show(-390, -290))")
        assert visit.text("#in-view") == "in view: 0.0 ms"
        assert set(visit.texts("#sums tbody td")) <= {"0.0 ms n/a", "n/a"}, "of a window in the margin"


class TestWhole:
    """A capture of warm-up, two steps of epoch 0 and one of epoch 1, and what follows the last one."""

    @staticmethod
    def write(folder: Path) -> None:
        trace = draw_trace(
            ranges=[
                ("step|index=0|warmup=1", "####................"),
                ("step|index=0", "....####............"),
                ("step|index=1", "........####........"),
                ("step|index=0", "............####...."),
            ],
            launches={"main": "a...bBc.d..........."},
            streams={7: "aa..bb..cc..dd......", 9: ".....BBB............", 11: "................000."},
        )
        write(build_timeline([source_of("run", trace)]), folder)

    @pytest.fixture
    def page(self, visit: Visit, once: Once) -> Visit:
        visit.open_timeline(once(self.write) / "timeline.html")
        return visit

    def test_all_steps_are_the_measured_ones_and_the_rest_is_held(self, page: Visit) -> None:
        assert page.ask("page.window") == pytest.approx([0, 12], abs=1)
        assert page.url.endswith("timeline.html#step=all")
        assert page.text("#steps option:checked") == "all steps"
        page.press("0")
        assert page.ask("page.window") == [-4, 15]
        assert page.is_at("*/timeline.html#from=-4&to=15")
        assert page.text("#steps option:checked") == "whole capture", "'all steps' could not be chosen again"
        (rank,) = page.ask("page.sums()")
        assert (rank["sums"][theme.COMPUTE_ONLY], rank["sums"][theme.EXPOSED_MEMORY], rank["rest"]) == (7, 3, 0)
        assert sum(rank["sums"].values()) == 19
        page.select("#steps", "")
        assert page.ask("page.window") == pytest.approx([0, 12], abs=1), "all steps"
        page.select("#steps", "whole")
        assert page.ask("page.window") == [-4, 15]

    def test_steps_that_come_again_are_told_apart(self, page: Visit) -> None:
        options = page.texts("#steps option")
        assert options == ["all steps", "whole capture", "step 0 (1 of 2)", "step 1", "step 0 (2 of 2)"]
        page.press("n")
        page.press("n")
        page.press("n")
        assert page.text(".xtitle") == "time since the start of step 0 (2 of 2)"
        assert page.value("#steps") == "2"


class TestMoving:
    @staticmethod
    def write(folder: Path) -> None:
        write(build_timeline([source_of("run", steps_of(4, 8, 5, 7))]), folder)

    @pytest.fixture
    def page(self, visit: Visit, once: Once) -> Iterator[Visit]:
        visit.open_timeline(once(self.write) / "timeline.html")
        visit.ask("page.showAll()")
        yield visit
        assert visit.complaints == []

    def window(self, visit: Visit) -> tuple[float, float]:
        start, end = visit.ask("[page.view.from, page.view.to]")
        return start, end

    def test_keys(self, page: Visit) -> None:
        whole = self.window(page)
        span = whole[1] - whole[0]
        page.press("+")
        start, end = self.window(page)
        assert (start, end) == pytest.approx((whole[0] + span / 4, whole[1] - span / 4))
        page.press("ArrowRight")
        assert self.window(page) == pytest.approx((start + span / 8, end + span / 8))
        page.press("a")
        assert self.window(page) == pytest.approx((start, end))
        page.press("-")
        assert self.window(page) == pytest.approx(whole)
        page.press("w")
        page.press("0")
        assert self.window(page) == pytest.approx(whole)

    def test_steps(self, page: Visit) -> None:
        page.press("n")
        page.press("n")
        assert page.value("#steps") == "1"
        assert "start of step 1" in page.text(".xtitle")
        page.press("p")
        page.press("p")
        assert page.value("#steps") == "0"
        page.select("#steps", "3")
        assert self.window(page)[0] < 0 < self.window(page)[1]

    def test_wheel_and_drag(self, page: Visit) -> None:
        whole = self.window(page)
        left, top = page.lanes()
        x, y = left + 500, top + 60
        page.hover((x, y))
        page.wheel(-250)
        start, end = self.window(page)
        assert end - start == pytest.approx((whole[1] - whole[0]) / np.e)
        page.drag((x, y), (x - 100, y))
        moved = self.window(page)
        assert moved[0] - start == pytest.approx(100 * (end - start) / page.ask("page.width"))


class TestManyBoxes:
    def test_they_show_one_by_one_where_there_is_room_and_matches_are_counted_marked_and_visited(
        self, busy: Visit
    ) -> None:
        individual = """page.drawn.filter(({ row }) => row.kind === "compute").map(({ boxes, cells }) =>
            [boxes.length, cells.length])"""
        ((boxes, cells),) = busy.ask(individual)
        assert (boxes, cells > 500) == (0, True)
        busy.show(1_000_000, 1_050_000)
        ((boxes, cells),) = busy.ask(individual)
        assert (boxes >= 40, cells) == (True, 0)
        busy.show(1_001_000, 1_005_000)
        assert "gemm" in busy.texts("#timeline text")

        busy.ask("page.showAll()")
        busy.press("/")
        busy.type("NCCL")
        assert busy.text("#found") == "160 found"
        marked = "page.element.data.find(({ fillcolor }) => fillcolor === page.data.notice).x.length"
        assert busy.ask(marked) > 100
        starts = []
        for at in range(1, 4):
            busy.press("Enter")
            assert busy.text("#found") == f"{at} of 160"
            starts.append(busy.ask("page.search.current.track.start[page.search.current.at]"))
        assert starts == sorted(set(starts))
        busy.press("Shift+Enter")
        assert busy.text("#found") == "2 of 160"
        view = busy.ask("[page.view.from, page.view.to]")
        assert view[0] < starts[1] < view[1]


class TestHostileNames:
    def test_names_appear_as_text_and_no_script_of_theirs_runs(self, hostile: Visit) -> None:
        visit = hostile
        assert '<img src=x onerror=alert(1)> & "run" \N{FIRE}' in visit.text()
        boxes = visit.ask("""page.rows.filter(({ kind }) => kind === "compute").flatMap(({ tracks, top, bottom }) =>
            tracks.flatMap((track) => [...track.start.slice(0, track.length)].map((start) =>
                [(start + 1 - page.view.from) / page.pixel, (top + bottom) / 2])))""")
        left, top = visit.lanes()
        told = ""
        for x, y in boxes:
            visit.hover((left + x, top + y))
            told += visit.text("#tooltip") + "\n"
        assert "<script>document.title='owned'</script>" in told
        assert "<b>bold</b> \"quoted\" 'too' & more" in told
        assert "x" * 100 in told
        assert "x" * 200 not in told
        assert "\N{FIRE} \N{HEBREW LETTER ALEF} cod.exe" in told
        assert "owned" not in visit.title
        assert visit.count("img") == 0
        assert visit.complaints == []

    def test_what_is_searched_is_text(self, hostile: Visit) -> None:
        visit = hostile
        visit.fill("#search", "<script>document")
        assert visit.text("#found") == "1 found"
        visit.press("Enter")
        assert "<script>document" in "".join(visit.texts("#timeline text"))
        assert visit.complaints == []
