"""The band of the whole run above the lanes, and the window on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_prof.present import theme
from tests.browser.conftest import Once, Visit
from tests.browser.test_opening import page_of, window
from tests.drawing import draw_trace
from tests.present.timelines import steps_of

US = 1000


def write_page(folder: Path) -> None:
    """Of 40 us: compute until 10, overlapped until 20, exposed until 30, compute until 40."""
    trace = draw_trace(
        ranges=[(f"step|index={at}", "." * 10 * at + "#" * 10) for at in range(4)],
        launches={"main": "a" + "." * 9 + "bA" + "." * 17 + ".c"},
        streams={7: "a" * 10 + "b" * 10 + "." * 10 + "c" * 10, 9: "." * 10 + "A" * 20},
        character_ns=US,
    )
    page_of(folder, trace)


@pytest.fixture
def page(once: Once) -> Path:
    return once(write_page) / "run.html"


def seen_on_band(visit: Visit, band: int = 0) -> list[float]:
    """From when to when the window lies on a band, in us of its panel."""
    outer, inner = visit.boxes("#whole .band")[band], visit.boxes("#whole i")[band]
    start, end = visit.ask("[page.data.start, page.data.end]")
    us = (end - start) / US / outer["width"]
    return [(inner[side] - outer["left"]) * us + start / US for side in ("left", "right")]


def colors_at(visit: Visit, *us: float) -> Any:
    """The colours of the band at some times, in the middle of its height."""
    (colors, *_) = visit.each(
        "#whole canvas",
        """(canvas, [times, start, end]) => { const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, height >> 1, width, 1);
        const at = (us) => 4 * Math.floor((us * 1000 - start) / (end - start) * width);
        return times.map((us) => "#" + [...data.slice(at(us), at(us) + 3)].map((part) =>
          part.toString(16).padStart(2, "0")).join("")); }""",
        [us, *visit.ask("[page.data.start, page.data.end]")],
    )
    return colors


def test_it_has_the_colours_of_the_strip_and_lies_above_the_lanes(visit: Visit, page: Path) -> None:
    visit.open_timeline(page, "")
    for width, scheme, palette in ((1400, "light", theme.LIGHT), (900, "dark", theme.DARK)):
        visit.resize(width, 800)
        visit.prefer(scheme)
        (band,) = visit.boxes("#whole .band")
        left, top = visit.lanes()
        assert (band["left"], band["width"]) == (
            pytest.approx(left, abs=1),
            pytest.approx(visit.ask("page.width"), abs=1),
        )
        assert band["bottom"] < top
        named = ((5, theme.COMPUTE_ONLY), (15, theme.OVERLAPPED), (25, theme.EXPOSED), (35, theme.COMPUTE_ONLY))
        assert colors_at(visit, *(us for us, _ in named)) == [palette.colors[name].lower() for _, name in named]


def test_the_window_lies_on_it_and_is_moved_by_click_and_drag(visit: Visit, page: Path) -> None:
    visit.open_timeline(page, "#step=2")
    assert seen_on_band(visit) == pytest.approx([19.8, 30.2], abs=0.1)
    (band,) = visit.boxes("#whole .band")
    x, y = band["left"], (band["top"] + band["bottom"]) / 2
    us = band["width"] / 40
    visit.click((x + 11 * us, y))
    assert seen_on_band(visit) == pytest.approx([5.8, 16.2], abs=0.1)
    visit.drag((x + 9 * us, y), (x + 4 * us, y))
    assert seen_on_band(visit) == pytest.approx([0.8, 11.2], abs=0.1), "by where it was taken hold of"
    visit.hover((x + 25 * us, y))
    assert seen_on_band(visit) == pytest.approx([0.8, 11.2], abs=0.1), "no longer held"
    visit.click((x + 40 * us - 1, y))
    start, end = window(visit)
    assert end - start == pytest.approx(10.4, abs=0.1), "as long as before"
    assert visit.complaints == []


def test_each_panel_has_its_own(visit: Visit, tmp_path: Path) -> None:
    visit.open_timeline(page_of(tmp_path, steps_of(4, 8, 5), steps_of(10, 2, 2)), "#step=1")
    assert seen_on_band(visit, 0) == pytest.approx([3.84, 12.16], abs=0.1)
    assert seen_on_band(visit, 1) == pytest.approx([9.84, 17], abs=0.2)
    second = visit.boxes("#whole .band")[1]
    visit.click((second["left"] + second["width"] * 5 / 17, second["top"] + 5))
    assert seen_on_band(visit, 1) == pytest.approx([0.84, 9.16], abs=0.1)


def test_bands_with_the_window_at_one_place_have_one_frame(visit: Visit, tmp_path: Path) -> None:
    """Eight frames, each 14 px high, hid most of what eight bands of 8 px showed."""
    edges = "(frame) => ['Top', 'Bottom'].map((edge) => getComputedStyle(frame)[`border${edge}Width`])"
    visit.open_timeline(page_of(tmp_path, steps_of(4, 8), steps_of(4, 8), steps_of(6, 6)), "#step=1")
    assert visit.each("#whole i", edges) == [["2px", "0px"], ["0px", "2px"], ["2px", "2px"]]


def test_the_legend_stays_whatever_is_seen(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    legend = visit.texts(".legendtext")
    assert {"overlapped communication", "exposed communication", "compute only"} <= set(legend)
    top = visit.lanes()[1]
    visit.show(1 * US, 3 * US)
    assert visit.texts(".legendtext") == legend
    visit.ask("page.filter('stream')")
    assert visit.texts(".legendtext") == legend
    assert visit.lanes()[1] == top


@pytest.mark.nightly  # the gate opens a timeline on a phone in test_docking.py
def test_it_fits_a_phone(visit: Visit, page: Path) -> None:
    visit.resize(390, 844)
    visit.open_timeline(page, "")
    assert visit.ask("document.documentElement.scrollWidth") == 390
    (band,) = visit.boxes("#whole .band")
    assert (band["left"], band["right"]) == (pytest.approx(10, abs=1), pytest.approx(380, abs=1))
