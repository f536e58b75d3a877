"""Lanes that fold, launches of what is selected, and how lanes fill the window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.trace import UNKNOWN, CallDetails, Trace
from tests.browser.conftest import Visit, prepared_visit, write_timeline
from tests.browser.test_inspecting import details, device_label
from tests.drawing import column, draw_trace
from tests.measuring import collectives_of, source_of, sources_of

SHAPES = ("grid 7x1x1 block 128x1x1", "grid 24x1x1 block 640x1x1")


def gpu_trace() -> Trace:
    """A step whose backward autograd launches: ``c`` and the all-reduce ``A``, the half of which is exposed."""
    drawn = draw_trace(
        ranges={
            "step|index=0": "####################",
            "forward": ".###................",
            "optimizer": "...............#....",
            "inner": "..#.................",
            "load data": "....##..............",
            "all_reduce|bucket=3|bytes=64|params=1": "......##########....",
        },
        launches={"main": ".ab............d....", "pt_autograd_0": ".....cA............."},
        streams={7: "..aaabbbcccc......dd", 9: "........AAAAAAAA...."},
        ranks={4242: 0},
    )
    names = (*drawn.names, "cudaLaunchKernel", "cudaGraphLaunch", *SHAPES)
    calls = len(drawn.calls)
    kernels = len(drawn.activities)
    return replace(
        drawn,
        names=names,
        call_details=CallDetails(drawn.calls.start_ns + 1, column([names.index("cudaLaunchKernel")] * calls)),
        shape_id=column([names.index(SHAPES[at == kernels - 1]) for at in range(kernels)]),
        registers=column([96] * kernels),
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_timeline(build_timeline([source_of("run", gpu_trace())]), tmp_path / "run.html")


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

    def test_a_collective_tells_when_and_why_it_is_exposed(self, visit: Visit, page: Path) -> None:
        """It runs from 8 to 16, compute until 12; no peer is known."""
        visit.open_timeline(page)
        known = select(visit, "communication", 12)
        assert (known["bucket"], known["bytes"]) == ("3", "64: 64 bytes")
        assert known["algbw"] == "8 GB/s: bytes over duration, as its transfer is not known"
        assert (known["overlapped"], known["exposed"]) == ("4 ns", "4 ns")
        (tail,) = [text for name, text in known.items() if name.startswith("exposed in the tail")]
        assert tail == "4 ns: in transfer or waiting for a peer"
        assert known["grid"] == "24x1x1"

    def test_its_bandwidth_is_that_of_the_table(self, visit: Visit, tmp_path: Path) -> None:
        """Rank 1 waits in it for 4 of 8 ns; a second one is said to be larger than any link could move."""
        sizes = {
            "all_reduce|bucket=0|bytes=16|params=1": "###.......",
            "all_reduce|bucket=1|bytes=1048576|params=1": "....##....",
        }
        traces = {
            f"rank {rank}": draw_trace(
                ranges={"step|index=0": "#" * 40, **sizes},
                launches={"main": ".A...B"},
                streams={7: "a", 9: wait + "AAAA" + "." * 10 + "BBBBBB"},
                ranks={4242: rank},
                world_size=2,
                path=f"drawn{rank}.sqlite",
            )
            for rank, wait in enumerate(("......", "..AAAA"))
        }
        visit.open_timeline(write_timeline(build_timeline(sources_of(traces)), tmp_path / "ranks.html"))
        told = []
        for at, panel in ((8, 0), (8, 1), (22, 0)):
            visit.click(device_label(visit, "communication", at, panel))
            told.append(details(visit)["algbw"])
        visit.hover(device_label(visit, "communication", 8, 1))
        assert "16 bytes, algbw 4 GB/s" in visit.text("#tooltip")
        table = [one.algbw_bytes_per_s for one in collectives_of(*traces.values())]
        assert table == [4e9, None, 4e9, None]
        assert told == 2 * ["4 GB/s: bytes over transfer, 4 ns"] + ["n/a: more than any link carries"]

    def test_a_copy_tells_its_bandwidth_over_its_duration(self, visit: Visit, tmp_path: Path) -> None:
        trace = draw_trace(streams={7: "aaaa", 9: "1111"}, launches={"main": "a1"})
        sizes = np.where(trace.activities.lane == 9, 64, UNKNOWN)
        trace = replace(trace, activities=replace(trace.activities, bytes=sizes))
        visit.open_timeline(write_timeline(build_timeline([source_of("run", trace)]), tmp_path / "run.html"))
        known = select(visit, "copies", 2)
        assert (known["bytes"], known["bandwidth"]) == ("64: 64 bytes", "16 GB/s: bytes over duration")

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

    def test_a_call_tells_what_it_launched(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.ask("page.fold('calls', false)")
        known = select(visit, "calls", 2.5)
        assert known["launched"] == "compute b, compute, stream 7"
        assert known["launch delay"].startswith("3 ns")
        assert arrow(visit)["x"] == [2, 5]

    @pytest.mark.parametrize("name", ["nsys2022_4_ddp_unet_a100_rank0of4.sqlite", "kineto_a100_ddp_rank0of2.json.gz"])
    def test_launches_of_a_real_capture(self, visit: Visit, tmp_path: Path, shared_traces: Path, name: str) -> None:
        """Each box of a device has the call that the trace joins it with."""
        from ddp_prof.ingest import ReadOptions
        from ddp_prof.ingest.load import load_trace

        trace = load_trace(shared_traces / name, ReadOptions(with_launches=True))
        visit.open_timeline(write_timeline(build_timeline([source_of("real", trace)]), tmp_path / "real.html"))
        delays = visit.ask("""page.shownRows.filter(({ kind }) => kind === "communication").flatMap((row) =>
            row.tracks.flatMap((track) => Array.from(track.source, (source, at) => {
              const call = page.launches.call[source], calls = page.foldedRows.find(({ first, count }) =>
                first <= call && call < first + count);
              return [track.start[at], track.start[at] - calls.columns.start[call]]; })))""")
        seen, zero = trace.activities, min(int(each.steps.start_ns[0]) for each in source_of("real", trace).ranks)
        launch = trace.calls.start_ns[trace.launching_calls]
        expected = {int(start) - zero: int(start - call) for start, call, category in
                    zip(seen.start_ns, launch, seen.category, strict=True) if category == 1}  # fmt: skip
        assert len(delays) > 10
        assert all(expected[start] == delay for start, delay in delays)


class TestFolding:
    def test_calls_and_ranges_are_folded_at_first(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        assert labels(visit) == FOLDED
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

    def test_ranges_are_nested(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.ask("page.fold('ranges', false)")
        rows = visit.ask("""page.rows.filter(({ kind }) => kind === "ranges").map(({ tracks }) =>
            tracks.flatMap((track) => Array.from(track.source, (_, at) => page.texts(track, at)[0])))""")
        assert rows[:3] == [
            ["step|index=0"],
            ["forward", "load data", "all_reduce|bucket=3|bytes=64|params=1"],
            ["inner", "optimizer"],
        ]
        assert select(visit, "ranges", 9)["kind"] == "range of the program"

    def test_a_filter_leaves_the_lanes_that_hold_it(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.press("l")
        visit.type("CALLS")
        assert labels(visit) == ["CUDA calls, main thread", "CUDA calls, pt_autograd_0 (4244)"], "not in a fold"
        visit.fill("#lanes", "")
        assert labels(visit) == FOLDED

    def test_a_lane_that_is_filtered_out_is_not_searched(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.fill("#search", "forward")
        assert visit.text("#found") == "2 found", "of the host and of the ranges"
        visit.fill("#lanes", "host")
        assert visit.text("#found") == "1 found"

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


def test_inferred_backward_is_shown_on_the_host_and_says_so(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    select(visit, "host", 5.5)
    rows = visit.ask("""page.rows.filter(({ kind }) => kind === "host").flatMap(({ tracks }) => tracks.flatMap(
        (track) => Array.from(track.source, (_, at) => [page.texts(track, at)[0], track.start[at], track.end[at]])))""")
    assert ["backward (inferred: launched by autograd's threads)", 5, 6] in rows


FEW_LANES = {"streams": {7: "aa..bb"}}


@pytest.mark.parametrize("height", [700, 900, 1080])
@pytest.mark.parametrize("trace", [gpu_trace(), draw_trace(**FEW_LANES)], ids=["many lanes", "two lanes"])
def test_lanes_fill_the_window_and_overflow_it_little(visit: Visit, trace: Trace, height: int, tmp_path: Path) -> None:
    write_timeline(build_timeline([source_of("run", trace)]), tmp_path / "run.html")
    visit.resize(1400, height)
    visit.open_timeline(tmp_path / "run.html")
    (bottom,) = (box["bottom"] for box in visit.boxes(".below"))
    assert 0.8 * height <= bottom <= 1.05 * height
    assert visit.ask("page.element._fullLayout._size.h") == pytest.approx(visit.ask("page.arrangement.height"), abs=1)


SLOW = """const kept = DecompressionStream;
  globalThis.DecompressionStream = class { constructor(format) {
    const { readable, writable } = new kept(format);
    const slow = new TransformStream({ flush: () => new Promise((done) => setTimeout(done, 600)) });
    return { writable, readable: readable.pipeThrough(slow) }; } };"""


def test_what_the_address_asks_for_is_kept_however_long_reading_takes(tab: Any, page: Path) -> None:
    with prepared_visit(tab, SLOW) as visit:
        visit.go(f"{page.as_uri()}#lanes=stream")
        assert labels(visit) == ["compute, stream 7", "communication, stream 9"]


def test_the_bar_begins_at_the_left_edge_with_steps_and_without(visit: Visit, page: Path, tmp_path: Path) -> None:
    without = tmp_path / "without.html"
    write_timeline(build_timeline([source_of("run", draw_trace(**FEW_LANES))]), without)
    lefts = set()
    for path in (page, without):
        visit.open_timeline(path)
        lefts.add(min(box["left"] for box in visit.boxes(".bar button") if box["width"]))
        assert visit.boxes("h1")[0]["left"] in lefts
    assert len(lefts) == 1
