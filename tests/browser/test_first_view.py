"""What a page of many boxes shows before it has read them all: the window on which it opens, as it stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.trace import Trace
from tests.browser.conftest import Once, Visit, prepared_visit, write_timeline
from tests.drawing import draw_trace
from tests.measuring import source_of

HOLD = """let streams = %d;
  const kept = DecompressionStream, held = new Promise((done) => (window.release = done));
  globalThis.DecompressionStream = class { constructor(format) {
    const { readable, writable } = new kept(format), mayPass = streams-- > 0 ? null : held;
    return { writable, readable: readable.pipeThrough(new TransformStream({ flush: () => mayPass })) };
  } };"""
"""Lets so many columns be read, and others once they are released."""

DRAWN = """page.drawn.map(({ row, boxes, cells }) => [row.lane, row.level, row.top, row.bottom,
  boxes.map(({ track, at }) => [track.category, track.start[at], track.end[at], page.texts(track, at)]),
  cells.map(({ track, from, to, count, share, base }) => [track.category, from, to, count, share, base])])"""

BOXES = "page.shownRows.reduce((sum, { tracks }) => sum + tracks.reduce((all, { length }) => all + length, 0), 0)"

TEXTS = """[...page.element.querySelectorAll("text")].map((each) => {
  const { left, top, width } = each.getBoundingClientRect(); return [each.textContent, left, top, width]; })
  .filter(([text]) => text).sort()"""

FILLS = """[...page.element.querySelectorAll(".fills .js-fill, .sketch svg svg path")].map((path) => {
  const { left, top, right, bottom } = path.getBoundingClientRect(), { fill, fillOpacity } = getComputedStyle(path);
  const alpha = fill.startsWith("rgba") ? Number(fill.match(/[\\d.]+(?=\\))/)[0]) : Number(fillOpacity);
  return [fill.match(/\\d+/g).slice(0, 3).join(), alpha, left, top, right, bottom]; })
  .filter(([, , left, , right]) => right > left)"""


def steps_of(*lengths: int) -> Trace:
    """Steps of so many microseconds; many boxes are shorter than a pixel."""
    ranges, streams, network, launches, at = [], "", "", "", 0
    for index, length in enumerate(lengths):
        ranges.append((f"step|index={index}", "." * at + "#" * length))
        ranges.append(("forward", "." * at + "#" * (length // 2)))
        streams += ("a.bb.c." * 500)[: length - 60] + "D" * 20 + "." * 40
        network += "." * (length - 80) + "N" * 60 + "." * 20
        launches += ("a.b..c." * 500)[: length - 80] + "N" + "." * 19 + "D" + "." * 59
        at += length
    return draw_trace(ranges=ranges, launches={"main": launches}, streams={7: streams, 9: network}, character_ns=1000)


def write_page(folder: Path) -> None:
    """Two runs on a page that is long to these tests; it opens on step 1, which starts at another time in each."""
    sources = [source_of("one", steps_of(3000, 2000, 1500, 2500)), source_of("other", steps_of(2700, 2100, 1600, 2400))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_prof.present.html.timeline_page.BOXES_READ_AT_ONCE", 12_000)
        write_timeline(build_timeline(sources), folder / "run.html")


@pytest.fixture
def page(once: Once) -> Path:
    return once(write_page) / "run.html"


@pytest.fixture
def held(tab: Any, page: Path) -> Iterator[Visit]:
    """A visit that has the first view before it, and reads the rest when it is told to."""
    with prepared_visit(tab, HOLD % 1) as visit:
        visit.open_first_view(page.as_uri())
        yield visit


def test_it_shows_what_the_complete_page_shows_with_the_columns_of_its_window_only(held: Visit) -> None:
    """Keys and clicks before all is read do no harm."""
    assert held.count(".sketch") == 1
    early = held.ask(BOXES)
    before = {name: held.ask(asked) for name, asked in (("drawn", DRAWN), ("texts", TEXTS), ("fills", FILLS))}
    height = held.ask("document.documentElement.scrollHeight")
    said = [held.text(of) for of in ("#in-view", "#sums", "#labels")]
    step = held.text("#steps option:checked")
    places = [held.boxes(of) for of in ("#search", "#sums", "#labels", "#timeline")]
    for key in ("n", "f", "Backspace", "e", "+", "0", "Escape", "c"):
        held.press(key)
    held.click((held.boxes("#timeline")[0]["left"] + 600, 300))
    held.click("#zoom-in")
    held.release()
    assert 100 < early < 0.5 * held.ask(BOXES)
    assert held.count(".sketch") == 0
    drawn = held.ask(DRAWN)
    counts = [(len(boxes), len(cells)) for *_, boxes, cells in drawn]
    assert [sum(each) > 20 for each in zip(*counts, strict=True)] == [True, True]
    assert before["drawn"] == drawn
    texts = held.ask(TEXTS)
    assert [text for text, *_ in before["texts"]] == [text for text, *_ in texts]
    assert [place for _, *place in before["texts"]] == [pytest.approx(place, abs=1.5) for _, *place in texts]
    fills = held.ask(FILLS)
    assert [color for color, *_ in before["fills"]] == [color for color, *_ in fills]
    assert [alpha for _, alpha, *_ in before["fills"]] == pytest.approx([alpha for _, alpha, *_ in fills], abs=0.01)
    assert [place for _, _, *place in before["fills"]] == [pytest.approx(place, abs=0.6) for _, _, *place in fills]
    assert said == [held.text(of) for of in ("#in-view", "#sums", "#labels")]
    assert step == held.text("#steps option:checked") == "step 1"
    assert held.ask("document.documentElement.scrollHeight") == height
    assert places == [held.boxes(of) for of in ("#search", "#sums", "#labels", "#timeline")]
    held.press("n")
    assert held.ask("page.step") == 2
    assert held.complaints == []


def test_where_the_address_asks_for_more_the_lanes_are_empty_at_first(tab: Any, page: Path) -> None:
    """Meanwhile it may change."""
    with prepared_visit(tab, HOLD % 0) as visit:
        visit.open_first_view(f"{page.as_uri()}#step=2")
        assert visit.count(".sketch path") > 5, "the lines of the axis and between the lanes"
        assert visit.ask(FILLS) == []
        assert visit.ask("page.drawn") == []
        visit.wheel(200)
        visit.click("#labels button.lane >> nth=0")
        visit.ask("location.hash = 'step=3'")
        visit.release()
        assert visit.ask("page.step") == 3
        assert visit.ask("page.drawn.every(({ row }) => row.stop - row.first === row.count)")
        assert visit.count(".sketch") == 0
        assert visit.complaints == []
