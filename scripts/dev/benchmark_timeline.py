"""Measures the page of a timeline: how long it takes to build, how large it is, how fast it shows and redraws.

    python scripts/dev/benchmark.py timeline BIG.sqlite
    python scripts/dev/benchmark.py timeline SMALL.sqlite --copies 40

Each visit opens the page in a new headless Chromium of 1400 x 800. "First view" is the time from navigation until the
lanes of the first window are on the screen; "complete", until each box can be zoomed into; a "redraw" is the time from
the request for another window to the frame that shows it. Machines differ, so the first two are also printed in units
of the time in which the same browser sorts 4 million doubles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repeat_capture import repeat_capture

from ddp_prof.analyze.collectives.run_analysis import analyze_trace, merge_analyses
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.charts.static_images import find_browser
from ddp_prof.present.html.timeline_page import make_content, write_timeline_page
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.runs.report import TraceEvents
from ddp_prof.runs.run import timeline_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ZOOMS = (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0003, 0.0001)
REDRAW = """
async ([share, middle]) => {
  const page = window.ddpProf, [low, high] = page.limits, span = (high - low) * share;
  const center = low + (high - low) * middle, begun = performance.now();
  await page.show(center - span / 2, center + span / 2);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return [performance.now() - begun, page.boxes];
}
"""


SORT = """
() => {
  const values = new Float64Array(4e6).map(() => Math.random()), begun = performance.now();
  values.sort();
  return performance.now() - begun;
}
"""


class Opened(NamedTuple):
    """One visit to the page; times in milliseconds; ``sort``: of 4 million doubles in the same browser."""

    sort: float
    first_view: float
    complete: float
    redraws: list[float]
    most_boxes: int
    complaints: list[str]


class Figure(NamedTuple):
    """A measured figure and its upper limit."""

    name: str
    value: float
    unit: str
    budget: float | None = None


def build(capture: Path, page: Path) -> Iterator[Figure]:
    begun = time.perf_counter()
    trace = load_trace(capture, ReadOptions(with_launches=True, use_cache=False))
    loaded = time.perf_counter()
    part = TraceEvents(trace, find_rank_events(trace))
    source = timeline_source(capture.stem, part, merge_analyses([analyze_trace(*part)]))
    model = build_timeline([source])
    write_timeline_page(make_content(model), page)
    built = time.perf_counter()
    yield Figure("events: activities and ranges", len(trace.activities) + len(trace.spans), "")
    yield Figure("boxes on the page", model.boxes, "")
    yield Figure("read the capture", loaded - begun, "s")
    yield Figure("build the page", built - begun, "s, reading included", 10)
    yield Figure("size of the page", page.stat().st_size / 1e6, "MB", 25)


def visit(page: Path) -> Opened:
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=str(find_browser()), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        tab = browser.new_page(viewport={"width": 1400, "height": 800})
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: complaints.extend([request.url] * (not request.url.startswith("file:"))))
        sort = tab.evaluate(SORT)
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("body[data-ready]", state="attached")
        marks = {mark["name"]: mark["startTime"] for mark in _marks(tab)}
        drawn = [tab.evaluate(REDRAW, [zoom, middle]) for zoom in ZOOMS for middle in (0.3, 0.6)]
        browser.close()
    first_view = marks.get("first view", marks["complete"])
    return Opened(
        sort, first_view, marks["complete"], [ms for ms, _ in drawn], max(boxes for _, boxes in drawn), complaints
    )


def _marks(tab: Any) -> list[dict[str, Any]]:
    return list(tab.evaluate("performance.getEntriesByType('mark').map((mark) => mark.toJSON())"))


def measure_visits(page: Path, times: int) -> Iterator[Figure]:
    """Visit the page several times and yield how fast it was."""
    visits = [visit(page) for _ in range(times)]
    redraws = [redraw for opened in visits for redraw in opened.redraws]
    yield Figure("first view, median", statistics.median(visit.first_view for visit in visits) / 1e3, "s", 2.5)
    yield Figure("complete, median", statistics.median(visit.complete for visit in visits) / 1e3, "s")
    in_sorts = [(visit.first_view / visit.sort, visit.complete / visit.sort) for visit in visits]
    first_view, complete = (statistics.median(values) for values in zip(*in_sorts, strict=True))
    yield Figure("first view, in sorts of 4 M doubles", first_view, "sorts", 2)
    yield Figure("complete, in sorts of 4 M doubles", complete, "sorts", 5)
    yield Figure(f"redraw, median of {len(redraws)}", statistics.median(redraws), "ms", 200)
    yield Figure("redraw, slowest", max(redraws), "ms")
    yield Figure("most boxes drawn at once", max(visit.most_boxes for visit in visits), "", 20_000)
    yield Figure("errors and network requests", sum(len(visit.complaints) for visit in visits), "", 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path)
    parser.add_argument("--copies", type=int, default=1, help="repeat the events of an nsys capture (default: once)")
    parser.add_argument("--visits", type=int, default=3, help="how often to open the page")
    parser.add_argument("-o", "--output", type=Path, help="keep the page here")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        capture, page = arguments.capture, arguments.output or Path(folder) / "timeline.html"
        if arguments.copies > 1:
            capture = Path(folder) / "large.sqlite"
            repeat_capture(arguments.capture, capture, arguments.copies)
        figures = [*build(capture, page), *measure_visits(page, arguments.visits)]
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("\n".join(map(_line, figures)))
    return 1 if any(map(_is_missed, figures)) else 0


def _is_missed(figure: Figure) -> bool:
    return figure.budget is not None and figure.value > figure.budget


def _line(figure: Figure) -> str:
    digits = 0 if figure.value == int(figure.value) else 2
    budget = "" if figure.budget is None else f"(budget {figure.budget:,}{', MISSED' if _is_missed(figure) else ''})"
    return f"{figure.name:32} {figure.value:12,.{digits}f} {figure.unit} {budget}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
