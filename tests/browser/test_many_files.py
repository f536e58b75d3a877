"""Many files of one run: each rank is one bar, the late one first, and nothing is out of reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.analyze.collectives.test_straggler import rank_capture
from tests.browser.conftest import Visit
from tests.nsys_factory import write_capture

FOREIGN = Path(__file__).parents[3] / "shared" / "traces"
UNET = FOREIGN / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"


@pytest.fixture
def eight(tmp_path: Path, report_of: Callable[..., Path]) -> Path:
    """The report of eight ranks in eight files, of which rank 1 is late."""
    return report_of(*(write_capture(tmp_path / f"x.rank{rank}.sqlite", rank_capture(rank, 8)) for rank in range(8)))


def test_each_rank_is_one_bar_and_the_late_one_is_first_and_marked(visit: Visit, eight: Path) -> None:
    visit.resize(1400, 900)
    visit.open_timeline(eight / "x.html")
    kinds = visit.ask("page.data.lanes.filter((lane) => lane.seen).map((lane) => lane.kind)")
    assert kinds == ["strip"] * 8
    panels = visit.texts("#labels .panel")
    assert "rank 1" in panels[0]
    assert "arrives last in 20 of 20 steps" in panels[0]
    assert not any("arrives last" in panel for panel in panels[1:])
    heights = [rank["height"] for rank in visit.boxes("#labels .rank")]
    assert max(heights) < 60
    visit.click("#lanes-chip")
    assert len(visit.ask("page.data.lanes.filter((lane) => lane.seen).map((lane) => lane.kind)")) > 8
    assert visit.url.endswith("lanes=")
    visit.reload()
    assert not visit.is_seen("#lanes-chip"), "the address keeps what the reader chose"
    assert visit.complaints == []


def test_the_sentence_above_names_ends_and_not_eight_files(visit: Visit, eight: Path) -> None:
    visit.open_timeline(eight / "x.html", "")
    text = visit.text("#in-view")
    assert "rank" not in text
    assert text.endswith(" · 0 % overlapped")


def test_the_index_has_one_bar_per_rank(visit: Visit, eight: Path) -> None:
    visit.go((eight / "index.html").as_uri())
    rows = visit.ask("document.querySelector('#chart-ranks').data[0].x.length")
    assert rows == 8
    assert "arrives last" in visit.text("#chart-ranks")


@pytest.mark.skipif(not UNET.is_file(), reason="the shared captures are not here")
def test_e_reaches_the_tail_of_a_real_step_in_three_presses(visit: Visit, report_of: Callable[..., Path]) -> None:
    """It was sixty presses away, behind slivers of a microsecond."""
    pages = report_of(UNET)
    (page,) = [one for one in pages.glob("*.html") if "unet" in one.name and "-" not in one.stem]
    visit.open_timeline(page, "")
    ends = []
    for _ in range(3):
        visit.press("e")
        ends.append(
            visit.ask("page.selected.track.end[page.selected.at] - page.selected.track.start[page.selected.at]")
        )
    assert max(ends) == pytest.approx(230_000, rel=0.05), "the longest exposed stretch is the tail"
