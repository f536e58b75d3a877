"""Details stand beside the lanes where there is room, and are seen without scrolling."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.present.timeline.build import build_timeline
from tests.browser.conftest import Visit, write_timeline
from tests.browser.test_inspecting import details, device_label
from tests.present.runs import cpu_run, run_of


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_timeline(build_timeline(run_of(cpu_run()).load_sources()), tmp_path / "run.html")


@pytest.mark.parametrize("width", [1400, 1100])
def test_what_is_selected_stands_beside_the_lanes(visit: Visit, page: Path, width: int) -> None:
    visit.resize(width, 900)
    visit.open_timeline(page)
    whole = visit.ask("page.width")
    visit.click(device_label(visit, "communication", 10))
    (pane,), (figure,) = visit.boxes("#details"), visit.boxes("#timeline")
    assert figure["right"] <= pane["left"]
    assert (pane["width"] <= 320, pane["right"] <= width) == (True, True)
    assert 0 < pane["top"] < pane["bottom"] < 900, "above the fold"
    assert visit.ask("page.width") < whole - 250, "the lanes made room"
    assert visit.ask("document.documentElement.scrollWidth") == width
    (label,) = visit.boxes("#whole .band")
    assert label["right"] <= pane["left"], "the whole run too"
    visit.click(device_label(visit, "host", 3))
    assert details(visit)["lane"] == "rank 0, host", "boxes are where they are drawn"
    visit.press("Escape")
    assert visit.ask("page.width") == whole
    assert visit.boxes("#details")[0]["top"] >= visit.boxes("#timeline")[0]["bottom"]
    assert visit.complaints == []


@pytest.mark.parametrize("width", [1000, 390])
def test_on_a_narrow_page_they_stay_below(visit: Visit, page: Path, width: int) -> None:
    visit.resize(width, 844)
    visit.open_timeline(page)
    whole = visit.ask("page.width")
    visit.click(device_label(visit, "communication", 10))
    assert visit.ask("page.width") == whole
    assert visit.boxes("#details")[0]["top"] >= visit.boxes("#timeline")[0]["bottom"]
    assert visit.ask("document.documentElement.scrollWidth") == width


def test_a_button_closes_them(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.click(device_label(visit, "communication", 10))
    visit.click("role=button[name='close details']")
    assert visit.ask("page.selection") is None
    assert visit.count("#details dt") == 0
