"""Finding names and coming back, the filter's chip, links between boxes, and what an address carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.ingest.load import load_trace
from tests.browser.conftest import Once, Visit
from tests.browser.test_inspecting import details, device_label, window
from tests.browser.test_opening import page_of, write_page
from tests.nsys_factory import bucket_steps, write_capture
from tests.present.timelines import gpu_trace

US = 1000


@pytest.fixture
def page(once: Once) -> Path:
    """Kernels `compute a` to `d`, one a step, from 0, 4, 12 and 17 us."""
    return once(write_page) / "run.html"


def found(visit: Visit) -> str:
    return str(visit.text("#found"))


def title(visit: Visit) -> str:
    return str(visit.text("#details h2"))


class TestSearch:
    def test_it_goes_to_kernels_and_marks_the_others(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.fill("#search", "compute")
        others = visit.ask("page.search.count") - 4
        assert others > 0, "the strip"
        assert found(visit) == f"4 found · {others} others marked"
        span = window(visit)[1] - window(visit)[0]
        titles = []
        for at in range(1, 6):
            visit.press("Enter")
            assert found(visit) == f"{(at - 1) % 4 + 1} of 4 · {others} others marked"
            titles.append(title(visit))
            assert window(visit)[1] - window(visit)[0] == pytest.approx(span), "does not zoom"
        assert titles == ["compute a", "compute b", "compute c", "compute d", "compute a"]

    @pytest.mark.nightly  # the gate does it in test_walk.py
    def test_enter_moves_f_zooms_and_backspace_goes_back(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "")
        views = [window(visit)]
        visit.fill("#search", "compute")
        visit.press("Enter")
        assert (title(visit), window(visit)) == ("compute c", views[0]), "it is in view already"
        visit.press("Enter")
        views.append(window(visit))
        low, high = visit.ask("page.selection")
        assert (title(visit), views[1][0] < (low + high) / 2 < views[1][1]) == ("compute d", True)
        assert views[1] != views[0]
        visit.press("Tab")
        visit.press("f")
        zoomed = window(visit)
        low, high = visit.ask("page.selection")
        assert zoomed == pytest.approx([low - 7 * US / 8, high + 7 * US / 8], abs=1000)
        assert zoomed != pytest.approx(views[1])
        visit.press("d")
        for view in (views[1], views[0], views[0]):
            visit.press("Backspace")
            assert window(visit) == view
        assert visit.ask("page.step") == 2
        assert visit.complaints == []

    def test_escape_clears_it(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.fill("#search", "compute")
        visit.press("Escape")
        assert (visit.value("#search"), found(visit)) == ("", "")
        assert visit.ask("page.search.count") == 0
        visit.fill("#search", "no such thing")
        visit.click("#found-after")
        assert found(visit) == "0 found"


class TestFilter:
    def chip(self, visit: Visit) -> str | None:
        return visit.text("#lanes-chip") if visit.is_seen("#lanes-chip") else None

    def lanes(self, visit: Visit) -> list[str]:
        seen: list[str] = visit.ask("page.arrangement.groups.flat().map(({ title }) => title)")
        return seen

    def test_a_filter_is_a_chip_that_a_click_removes(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        all_lanes = self.lanes(visit)
        assert self.chip(visit) is None
        visit.press("l")
        visit.type("stream")
        visit.press("Enter")
        assert self.chip(visit) == "lanes: stream ✕"
        assert self.lanes(visit) == ["compute, stream 7"]
        assert visit.value("#lanes") == ""
        visit.press("l")
        assert visit.value("#lanes") == "stream"
        visit.blur("#lanes")
        visit.click("#lanes-chip")
        assert (self.chip(visit), self.lanes(visit)) == (None, all_lanes)

    def test_escape_in_the_field_clears_it(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "#step=all&lanes=stream")
        assert (self.chip(visit), self.lanes(visit)) == ("lanes: stream ✕", ["compute, stream 7"])
        visit.press("l")
        visit.press("Escape")
        assert self.chip(visit) is None
        assert len(self.lanes(visit)) > 1
        assert visit.is_at("*#step=all")


@pytest.mark.nightly  # the gate does it in test_walk.py
def test_details_lead_to_launch_and_back(visit: Visit, tmp_path: Path) -> None:
    visit.open_timeline(page_of(tmp_path, gpu_trace()))
    visit.click(device_label(visit, "compute", 9))
    known = details(visit)
    visit.click("#details dt:text-is('launched') + dd button")
    assert details(visit)["lane"].endswith("CUDA calls, pt_autograd_0 (4244)")
    assert visit.ask("page.selected.row.seen") is True, "its lane was unfolded"
    visit.click("#details dt:text-is('launched') + dd button")
    assert details(visit) == known


class TestAddress:
    @pytest.mark.nightly  # the gate does it in test_walk.py
    def test_another_visit_shows_the_same_selection(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "")
        visit.click(device_label(visit, "compute", 2 * US))
        visit.press("s")
        assert visit.is_at("*&box=*@12000")
        seen = details(visit), window(visit), visit.ask("page.selection")
        address = visit.url
        visit.open_anew(address)
        assert details(visit) == seen[0]
        assert window(visit) == pytest.approx(seen[1], abs=1)
        assert visit.ask("page.selection") == seen[2]
        assert visit.complaints == []

    @pytest.mark.nightly  # the gate does it in test_walk.py
    def test_a_measured_range_is_shaded_and_in_the_address(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        shade = "page.element.data.find(({ fillcolor }) => fillcolor === page.element.layout.font.color + '22')"
        assert visit.ask(f"{shade}.x") == []
        start, stop = device_label(visit, "compute", 5 * US), device_label(visit, "compute", 15 * US)
        visit.drag(start, stop, with_shift=True)
        low, high = visit.ask("page.selection")
        assert visit.is_at(f"*#step=all&range={low},{high}")
        told = visit.text("#details h2")
        visit.reload()
        assert visit.text("#details h2") == told
        x, y = visit.ask(f"[{shade}.x, {shade}.y]")
        inner = [ms * 1e6 for ms in x if ms * 1e6 >= low - 1]
        assert (min(inner), max(inner)) == (pytest.approx(low), pytest.approx(high))
        assert (min(y), max(y)) == (0, visit.ask("page.bottom"))
        visit.press("Escape")
        assert visit.is_at("*#step=all")
        assert visit.complaints == []

    def test_an_address_given_to_a_busy_page_is_followed(self, visit: Visit, page: Path) -> None:
        """The page is due to write what it shows when the address arrives."""
        visit.open_timeline(page)
        visit.ask("page.show(0, 5000).then(() => { location.hash = 'step=1'; runTimers(); })")
        assert visit.ask("page.step") == 1
        assert visit.is_at("*#step=1")

    def test_a_button_copies_the_address(self, visit: Visit, page: Path) -> None:
        with visit.clipboard():
            visit.open_timeline(page, "#step=1")
            visit.click("role=button[name='copy link']")
            assert visit.text("#copied") == "copied"
            assert visit.ask("navigator.clipboard.readText()") == page.as_uri() + "#step=1"

    def test_where_the_browser_refuses_the_address_is_shown_selected(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "#step=1")
        visit.ask("navigator.clipboard.writeText = () => Promise.reject(new Error('no')), 0")
        visit.click("role=button[name='copy link']")
        assert visit.count("#link:focus") == 1
        assert visit.ask("getSelection().toString()") == page.as_uri() + "#step=1"
        assert visit.complaints == []


@pytest.mark.nightly  # the gate does it in test_walk.py
def test_the_worst_stretch_is_shown_with_its_step(visit: Visit, tmp_path: Path) -> None:
    """Three steps whose all-reduce blocks for 5, 20 and 10 us."""
    capture = write_capture(tmp_path / "x.sqlite", bucket_steps(15, 30, 20), "2023.4")
    visit.open_timeline(page_of(tmp_path, load_trace(capture)), "#worst")
    assert title(visit) == "waiting for communication"
    assert visit.ask("page.step") == 1
    selected = visit.ask("page.selected.track.end[page.selected.at] - page.selected.track.start[page.selected.at]")
    assert selected == 20 * US
