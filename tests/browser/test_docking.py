"""Details stand beside the lanes where there is room, and are seen without scrolling."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.present.timeline.build import build_timeline
from tests.browser.conftest import Visit, write_timeline
from tests.browser.test_inspecting import boxes_of, details, device_label
from tests.present.runs import cpu_run, run_of


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_timeline(build_timeline(run_of(cpu_run()).load_sources()), tmp_path / "run.html")


def settled(visit: Visit) -> None:
    """Until lanes are drawn for the room that they have: the observer of sizes comes before the second next frame."""
    visit.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    visit.ask("page.schedule()")


@pytest.mark.parametrize("width", [1400, 1100])
def test_what_is_selected_stands_beside_the_lanes(visit: Visit, page: Path, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.open_timeline(page)
    whole = visit.ask("page.width")
    visit.page.mouse.click(*device_label(visit, "communication", 10))
    settled(visit)
    (pane,), (figure,) = boxes_of(visit, "#details"), boxes_of(visit, "#timeline")
    assert figure["right"] <= pane["left"]
    assert (pane["width"] <= 320, pane["right"] <= width) == (True, True)
    assert 0 < pane["top"] < pane["bottom"] < 900, "above the fold"
    assert visit.ask("page.width") < whole - 250, "the lanes made room"
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    (label,) = boxes_of(visit, "#whole .band")
    assert label["right"] <= pane["left"], "the whole run too"
    visit.page.mouse.click(*device_label(visit, "host", 3))
    assert details(visit)["lane"] == "rank 0, host", "boxes are where they are drawn"
    visit.page.keyboard.press("Escape")
    settled(visit)
    assert visit.ask("page.width") == whole
    assert boxes_of(visit, "#details")[0]["top"] >= boxes_of(visit, "#timeline")[0]["bottom"]
    assert visit.complaints == []


@pytest.mark.parametrize("width", [1000, 390])
def test_on_a_narrow_page_they_stay_below(visit: Visit, page: Path, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 844})
    visit.open_timeline(page)
    whole = visit.ask("page.width")
    visit.page.mouse.click(*device_label(visit, "communication", 10))
    settled(visit)
    assert visit.ask("page.width") == whole
    assert boxes_of(visit, "#details")[0]["top"] >= boxes_of(visit, "#timeline")[0]["bottom"]
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width


def test_a_button_closes_them(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.page.mouse.click(*device_label(visit, "communication", 10))
    visit.page.get_by_role("button", name="close details").click()
    assert visit.ask("page.selection") is None
    assert visit.page.locator("#details dt").count() == 0
