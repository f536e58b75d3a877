"""Details are seen without scrolling, and nothing moves when they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Once, Visit
from tests.browser.test_inspecting import details, device_label, write_page


@pytest.fixture
def page(once: Once) -> Path:
    return once(write_page) / "run.html"


@pytest.mark.parametrize("width", [1400, pytest.param(1100, marks=pytest.mark.nightly)])
def test_nothing_moves_when_boxes_are_selected(visit: Visit, page: Path, width: int) -> None:
    """A click shrank the lanes and wrapped the legend, so that what was clicked moved away."""
    visit.resize(width, 900)
    visit.open_timeline(page)
    places = ("#timeline", "#whole .band", ".bar button", "#labels *", "#sums")
    before = {place: visit.boxes(place) for place in places}
    labels = [device_label(visit, kind, ns) for kind, ns in (("communication", 10), ("host", 3))]
    for label in labels * 2:
        visit.click(label)
        assert {place: visit.boxes(place) for place in places} == before
        (pane,) = visit.boxes("#details")
        assert not pane["top"] <= label[1] <= pane["bottom"], "what was clicked is seen"
        assert 0 <= pane["top"] < pane["bottom"] <= 900, "above the fold"
    assert details(visit)["lane"] == "rank 0, host", "boxes are where they are drawn"
    assert visit.ask("document.documentElement.scrollWidth") == width
    assert visit.complaints == []


def test_details_of_a_low_box_lie_above(visit: Visit, page: Path) -> None:
    visit.resize(1400, 400)
    visit.open_timeline(page)
    _, y = device_label(visit, "communication", 10)
    visit.resize(1400, round(y) + 20)
    x, low = device_label(visit, "communication", 10)
    assert low == y, "lanes are as low as can be"
    visit.click((x, low))
    (pane,) = visit.boxes("#details")
    assert (pane["top"], pane["bottom"] < y) == (0, True)


@pytest.mark.parametrize("width", [pytest.param(1000, marks=pytest.mark.nightly), 390])
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
