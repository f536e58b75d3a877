"""Many files of one run: each rank is one bar, the late one first, and nothing is out of reach."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.timeline.build import build_timeline
from tests.analyze.collectives.test_straggler import rank_capture
from tests.browser.conftest import Once, Visit, write_report_of, write_timeline
from tests.measuring import source_of
from tests.nsys_factory import write_capture

FOREIGN = Path(__file__).parents[3] / "shared" / "traces"
UNET = FOREIGN / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"


def write_eight(folder: Path) -> None:
    write_report_of(folder, *(write_capture(folder / f"x.rank{at}.sqlite", rank_capture(at, 8)) for at in range(8)))


@pytest.fixture
def eight(once: Once) -> Path:
    """The report of eight ranks in eight files, of which rank 1 is late."""
    return once(write_eight)


def test_each_rank_is_one_bar_and_the_late_one_is_first_and_marked(visit: Visit, eight: Path) -> None:
    visit.resize(1400, 900)
    visit.open_timeline(eight / "x.html", "")
    kinds = visit.ask("page.data.lanes.filter((lane) => lane.seen).map((lane) => lane.kind)")
    assert kinds == ["strip"] * 8
    panels = visit.texts("#labels .panel")
    assert "rank 1" in panels[0]
    assert "arrives last in 20 of 20 steps" in panels[0]
    assert not any("arrives last" in panel for panel in panels[1:])
    ranks = visit.boxes("#labels .rank")
    assert max(rank["bottom"] for rank in ranks) < 900 - 100, "all eight and their axis, without scrolling"
    texts = visit.ask("page.element.data.flatMap(({ text }) => text ?? [])")
    assert texts.count("exposed communication 15.0 ms") == 7, "a low bar says its length on the same line"
    told = visit.text("#in-view")
    assert "rank" not in told, "the sentence above names ends and not eight files"
    assert told.endswith(" · 0 % overlapped")

    late, other = panels
    assert late.startswith("x, rank 1")
    assert other.startswith("x, rank 0")
    titles = visit.each("#labels .rank", "(each) => each.title")
    assert titles[:2] == ["", ""], "facts that each file repeats are above the first"
    assert all(title.startswith(f"x, rank {rank}") for rank, title in enumerate(titles[2:], 2))
    assert {title[len("x, rank 2") :] for title in titles[2:]} == {other[len("x, rank 0") :]}

    for width, pitch in ((390, 65), (1400, 24)):
        visit.resize(width, 500)
        tops = [rank["top"] for rank in visit.boxes("#labels .rank")]
        assert [below - above for above, below in pairwise(tops[1:])] == [pitch] * 6, "a line more for a rank more"

    visit.click("#lanes-chip")
    assert len(visit.ask("page.data.lanes.filter((lane) => lane.seen).map((lane) => lane.kind)")) > 8
    assert visit.is_at("*lanes=")
    visit.reload()
    assert not visit.is_seen("#lanes-chip"), "the address keeps what the reader chose"
    assert visit.complaints == []


@pytest.mark.nightly  # in every gate without a page: tests/present/charts/test_ranks.py
def test_the_index_has_one_bar_per_rank(visit: Visit, eight: Path) -> None:
    visit.go((eight / "index.html").as_uri())
    rows = visit.ask("document.querySelector('#chart-ranks').data[0].x.length")
    assert rows == 8
    assert "arrives last" in visit.text("#chart-ranks")


@pytest.mark.nightly  # in every gate without a page: tests/present/timeline/test_facts.py
@pytest.mark.skipif(not UNET.is_file(), reason="the shared captures are not here")
def test_e_reaches_the_tail_of_a_real_step_in_three_presses(visit: Visit, tmp_path: Path) -> None:
    """It was sixty presses away, behind slivers of a microsecond."""
    timeline = build_timeline([source_of("unet", load_trace(UNET, ReadOptions(with_launches=True)))])
    visit.open_timeline(write_timeline(timeline, tmp_path / "run.html"), "")
    ends = []
    for _ in range(3):
        visit.press("e")
        ends.append(
            visit.ask("page.selected.track.end[page.selected.at] - page.selected.track.start[page.selected.at]")
        )
    assert max(ends) == pytest.approx(230_000, rel=0.05), "the longest exposed stretch is the tail"
