"""Lanes that fold, launches of what is selected, and how lanes fill the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_prof.present.timeline.build import build_timeline
from tests.browser.conftest import Once, Visit, prepared_visit, write_timeline
from tests.browser.test_inspecting import details, device_label
from tests.drawing import draw_trace
from tests.measuring import source_of
from tests.present.timelines import gpu_trace

FEW_LANES = {"streams": {7: "aa..bb"}}


def write_pages(folder: Path) -> None:
    write_timeline(build_timeline([source_of("run", gpu_trace())]), folder / "run.html")
    write_timeline(build_timeline([source_of("run", draw_trace(**FEW_LANES))]), folder / "two-lanes.html")


@pytest.fixture
def page(once: Once) -> Path:
    return once(write_pages) / "run.html"


def select(visit: Visit, kind: str, time: float) -> dict[str, str]:
    visit.click(device_label(visit, kind, time))
    return details(visit)


def arrow(visit: Visit) -> dict[str, list[float]]:
    """Ends of the arrow: in ns, and in pixels from the top of the lanes."""
    found: dict[str, list[float]] = visit.ask("(({ x, y }) => ({ x, y }))(page.element.data.at(-2))")
    return {"x": [round(1e6 * x) for x in found["x"]], "y": found["y"]}


def middle_of(visit: Visit, kind: str, level: int = 0) -> float:
    middle: float = visit.ask(
        "((row) => (row.top + row.bottom) / 2)(page.rows.filter(({ kind }) => kind === argument[0])[argument[1]])",
        [kind, level],
    )
    return middle


def labels(visit: Visit) -> list[str]:
    return [text[1:] for text in visit.texts("#labels button")]


def bar_begins_at_the_left_edge(visit: Visit) -> bool:
    """With steps and without."""
    left: float = visit.boxes("h1")[0]["left"]
    return left == min(box["left"] for box in visit.boxes(".bar button") if box["width"])


@pytest.mark.parametrize("width", [640, 740])
def test_where_letters_are_twice_as_large_the_lanes_are_in_view(visit: Visit, page: Path, width: int) -> None:
    """A window of 1280 pixels at 200 % is one of 640: there the legend had a line for each of its entries."""
    visit.resize(width, 450)
    visit.open_timeline(page)
    assert visit.boxes("#labels button")[0]["top"] < 450


FOLDED = ["host", "ranges, main thread", "CUDA calls, 2 threads", "compute, stream 7", "communication, stream 9",
          "where time goes"]  # fmt: skip


class TestLaunches:
    def test_a_kernel_tells_its_launch(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        known = select(visit, "compute", 9)
        assert visit.text("#details h2") == "compute c"
        assert known["launched"] == "5 ns on the axis, by cudaLaunchKernel on pt_autograd_0 (4244)"
        assert known["launch delay"] == "3 ns (3 ns) from the start of the call"
        assert (known["grid"], known["block"], known["registers"]) == ("7x1x1", "128x1x1", "96 a thread")
        assert known["phase"] == "backward, inferred from the thread that launched it"
        assert visit.complaints == []

    def test_a_tooltip_tells_bytes_and_bandwidth(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.hover(device_label(visit, "communication", 12))
        assert "64 bytes, algbw 8 GB/s" in visit.text("#tooltip")

    def test_an_arrow_leads_from_the_host_or_from_the_call_if_that_is_seen(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        assert arrow(visit) == {"x": [], "y": []}
        select(visit, "compute", 9)
        assert arrow(visit)["x"] == [5, 8]
        assert arrow(visit)["y"] == pytest.approx([middle_of(visit, "host", 1), middle_of(visit, "compute")])
        visit.ask("page.fold('calls', false)")
        assert arrow(visit)["y"] == pytest.approx([middle_of(visit, "calls", 1), middle_of(visit, "compute")])
        visit.press("Escape")
        assert arrow(visit) == {"x": [], "y": []}


class TestFolding:
    def test_calls_and_ranges_are_folded_at_first(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        assert labels(visit) == FOLDED
        assert bar_begins_at_the_left_edge(visit)
        assert visit.ask("page.drawn.some(({ row }) => ['calls', 'ranges'].includes(row.kind))") is False

    def test_a_click_on_a_label_unfolds_and_folds(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.click("#labels button:has-text('CUDA calls, 2 threads')")
        assert labels(visit)[2:4] == ["CUDA calls, main thread", "CUDA calls, pt_autograd_0 (4244)"]
        visit.click("#labels button:has-text('compute, stream 7')")
        assert visit.ask("page.drawn.map(({ row }) => row.lane)").count("compute, stream 7") == 0
        visit.click("#labels button:has-text('CUDA calls, main thread')")
        assert labels(visit) == FOLDED

    def test_keys_fold_and_the_focus_stays(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.press("c")
        assert "CUDA calls, main thread" in labels(visit)
        visit.press("c")
        visit.focus("#labels button >> nth=1")
        visit.press("Enter")
        focused = "document.activeElement.getAttribute('aria-expanded') + document.activeElement.textContent"
        assert visit.ask(focused) == "true▾ranges, main thread"

    def test_a_filter_leaves_the_lanes_that_hold_it(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.press("l")
        visit.type("CALLS")
        assert labels(visit) == ["CUDA calls, main thread", "CUDA calls, pt_autograd_0 (4244)"], "not in a fold"
        visit.fill("#lanes", "")
        assert labels(visit) == FOLDED

    @pytest.mark.nightly  # in every gate without a page: tests/present/timeline/test_finding.py
    def test_the_address_tells_what_is_folded(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.ask("page.fold('ranges', false)")
        visit.ask("page.fold('compute, stream 7', true)")
        visit.ask("page.fold('calls', false)")
        visit.ask("page.fold('calls', true)")
        assert visit.is_at("*#step=all&unfold=ranges&fold=compute%2C+stream+7")
        seen, address = labels(visit), visit.url
        visit.open_anew(address)
        assert labels(visit) == seen
        visit.go(f"{page.as_uri()}#lanes=stream")
        visit.reload()
        assert labels(visit) == ["compute, stream 7", "communication, stream 9"]
        assert visit.complaints == []

    def test_a_match_in_a_folded_lane_unfolds_it(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.fill("#search", "inner")
        assert visit.text("#found") == "1 found"
        visit.press("Enter")
        assert "ranges, main thread" in labels(visit)
        assert visit.ask("page.rows.filter(({ kind, seen }) => kind === 'ranges' && seen).length") >= 3


@pytest.mark.parametrize("name", [pytest.param("run", marks=pytest.mark.nightly), "two-lanes"])
def test_lanes_fill_the_window_and_overflow_it_little(visit: Visit, name: str, page: Path) -> None:
    visit.open_timeline(page.with_stem(name))
    assert bar_begins_at_the_left_edge(visit)
    for height in (700, 900, 1080):
        visit.resize(1400, height)
        (bottom,) = (box["bottom"] for box in visit.boxes(".below"))
        assert 0.8 * height <= bottom <= 1.05 * height
        drawn = visit.ask("page.element._fullLayout._size.h")
        assert drawn == pytest.approx(visit.ask("page.arrangement.height"), abs=1)


SLOW = """const kept = DecompressionStream;
  globalThis.DecompressionStream = class { constructor(format) {
    const { readable, writable } = new kept(format);
    const slow = new TransformStream({ flush: () => new Promise((done) => setTimeout(done, 600)) });
    return { writable, readable: readable.pipeThrough(slow) }; } };"""


@pytest.mark.nightly  # the gate does it in test_first_view.py
def test_what_the_address_asks_for_is_kept_however_long_reading_takes(tab: Any, page: Path) -> None:
    with prepared_visit(tab, SLOW) as visit:
        visit.go(f"{page.as_uri()}#lanes=stream")
        assert labels(visit) == ["compute, stream 7", "communication, stream 9"]
