"""Finding names and coming back, the filter's chip, links between boxes, and what an address carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.ingest.load import load_trace
from tests.browser.conftest import Visit
from tests.browser.test_inspecting import details, device_label, window
from tests.browser.test_lanes import gpu_trace
from tests.browser.test_opening import page_of, steps_of
from tests.nsys_factory import bucket_steps, write_capture

US = 1000


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Kernels `compute a` to `d`, one a step, from 0, 4, 12 and 17 us."""
    return page_of(tmp_path, steps_of(4, 8, 5, 7))


def found(visit: Visit) -> str:
    return str(visit.page.locator("#found").text_content())


def title(visit: Visit) -> str:
    return str(visit.page.locator("#details h2").text_content())


class TestSearch:
    def test_it_goes_to_kernels_and_marks_the_others(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.page.locator("#search").fill("compute")
        others = visit.ask("page.search.count") - 4
        assert others > 0, "the strip"
        assert found(visit) == f"4 found · {others} others marked"
        span = window(visit)[1] - window(visit)[0]
        titles = []
        for at in range(1, 6):
            visit.page.keyboard.press("Enter")
            assert found(visit) == f"{(at - 1) % 4 + 1} of 4 · {others} others marked"
            titles.append(title(visit))
            assert window(visit)[1] - window(visit)[0] == pytest.approx(span), "does not zoom"
        assert titles == ["compute a", "compute b", "compute c", "compute d", "compute a"]

    def test_it_goes_to_ranges_where_no_kernel_matches(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.page.locator("#search").fill("step|index")
        assert found(visit) == "4 found"
        visit.page.keyboard.press("Enter")
        assert title(visit) == "step|index=0"

    def test_enter_moves_f_zooms_and_backspace_goes_back(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "")
        views = [window(visit)]
        visit.page.locator("#search").fill("compute")
        visit.page.keyboard.press("Enter")
        assert (title(visit), window(visit)) == ("compute c", views[0]), "it is in view already"
        visit.page.keyboard.press("Enter")
        views.append(window(visit))
        low, high = visit.ask("page.selection")
        assert (title(visit), views[1][0] < (low + high) / 2 < views[1][1]) == ("compute d", True)
        assert views[1] != views[0]
        visit.page.locator("#search").blur()
        visit.page.keyboard.press("f")
        zoomed = window(visit)
        low, high = visit.ask("page.selection")
        assert zoomed == pytest.approx([low - 7 * US / 8, high + 7 * US / 8], abs=1000)
        assert zoomed != pytest.approx(views[1])
        visit.page.keyboard.press("d")
        for view in (views[1], views[0], views[0]):
            visit.page.keyboard.press("Backspace")
            assert window(visit) == view
        assert visit.ask("page.step") == 2
        assert visit.complaints == []

    def test_escape_clears_it(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        visit.page.locator("#search").fill("compute")
        visit.page.locator("#search").press("Escape")
        assert (visit.page.locator("#search").input_value(), found(visit)) == ("", "")
        assert visit.ask("page.search.count") == 0


class TestFilter:
    def chip(self, visit: Visit) -> str | None:
        visit.ask("page.schedule()")
        chip = visit.page.locator("#lanes-chip")
        return str(chip.text_content()) if chip.is_visible() else None

    def lanes(self, visit: Visit) -> list[str]:
        seen: list[str] = visit.ask("page.arrangement.groups.flat().map(({ title }) => title)")
        return seen

    def test_a_filter_is_a_chip_that_a_click_removes(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        all_lanes = self.lanes(visit)
        assert self.chip(visit) is None
        visit.page.keyboard.press("l")
        visit.page.keyboard.type("stream")
        visit.page.keyboard.press("Enter")
        assert self.chip(visit) == "lanes: stream ✕"
        assert self.lanes(visit) == ["compute, stream 7"]
        assert visit.page.locator("#lanes").input_value() == ""
        visit.page.keyboard.press("l")
        assert visit.page.locator("#lanes").input_value() == "stream"
        visit.page.locator("#lanes").blur()
        visit.page.locator("#lanes-chip").click()
        assert (self.chip(visit), self.lanes(visit)) == (None, all_lanes)

    def test_escape_in_the_field_clears_it(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "#step=all&lanes=stream")
        assert (self.chip(visit), self.lanes(visit)) == ("lanes: stream ✕", ["compute, stream 7"])
        visit.page.keyboard.press("l")
        visit.page.keyboard.press("Escape")
        assert self.chip(visit) is None
        assert len(self.lanes(visit)) > 1
        visit.page.wait_for_url("**#step=all")


def test_details_lead_to_launch_and_back(visit: Visit, tmp_path: Path) -> None:
    visit.open_timeline(page_of(tmp_path, gpu_trace()))
    visit.page.mouse.click(*device_label(visit, "compute", 9))
    known = details(visit)
    visit.page.locator("#details dt:text-is('launched') + dd button").click()
    assert details(visit)["lane"].endswith("CUDA calls, pt_autograd_0 (4244)")
    assert visit.ask("page.selected.row.seen") is True, "its lane was unfolded"
    visit.page.locator("#details dt:text-is('launched') + dd button").click()
    assert details(visit) == known


def test_details_lead_to_the_consumer_and_back(visit: Visit, tmp_path: Path) -> None:
    visit.open_timeline(page_of(tmp_path, load_trace(write_capture(tmp_path / "x.sqlite", bucket_steps(20, 4, 20)))))
    visit.page.mouse.click(*device_label(visit, "communication", 10 * US))
    known = details(visit)
    visit.page.locator("#details dt:text-is('needed by') + dd button").click()
    assert details(visit)["lane"].endswith("copies")
    visit.page.locator("#details dt:text-is('needs') + dd button").click()
    assert details(visit) == known
    assert visit.complaints == []


class TestAddress:
    def test_another_visit_shows_the_same_selection(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "")
        visit.page.mouse.click(*device_label(visit, "compute", 2 * US))
        visit.page.keyboard.press("s")
        visit.page.wait_for_url("**&box=*@12000")
        seen = details(visit), window(visit), visit.ask("page.selection")
        address = visit.page.url
        visit.page.goto("about:blank")
        visit.page.goto(address)
        visit.wait_for_timeline()
        assert details(visit) == seen[0]
        assert window(visit) == pytest.approx(seen[1], abs=1)
        assert visit.ask("page.selection") == seen[2]
        assert visit.complaints == []

    def test_a_measured_range_is_shaded_and_in_the_address(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page)
        shade = "page.element.data.find(({ fillcolor }) => fillcolor === page.element.layout.font.color + '22')"
        assert visit.ask(f"{shade}.x") == []
        start, stop = device_label(visit, "compute", 5 * US), device_label(visit, "compute", 15 * US)
        visit.page.keyboard.down("Shift")
        visit.page.mouse.move(*start)
        visit.page.mouse.down()
        visit.page.mouse.move(*stop, steps=4)
        visit.page.mouse.up()
        visit.page.keyboard.up("Shift")
        low, high = visit.ask("page.selection")
        visit.page.wait_for_url(f"**#step=all&range={low},{high}")
        told = visit.page.locator("#details h2").text_content()
        visit.page.reload()
        visit.wait_for_timeline()
        visit.ask("page.schedule()")
        assert visit.page.locator("#details h2").text_content() == told
        x, y = visit.ask(f"[{shade}.x, {shade}.y]")
        inner = [ms * 1e6 for ms in x if ms * 1e6 >= low - 1]
        assert (min(inner), max(inner)) == (pytest.approx(low), pytest.approx(high))
        assert (min(y), max(y)) == (0, visit.ask("page.bottom"))
        visit.page.keyboard.press("Escape")
        visit.page.wait_for_url("**#step=all")
        assert visit.complaints == []

    @pytest.mark.parametrize("hash_", ["#box=0@17", "#box=99@0", "#box=x", "#range=5,1", "#range=a,b"])
    def test_a_selection_that_means_nothing_is_none(self, visit: Visit, page: Path, hash_: str) -> None:
        visit.open_timeline(page, hash_)
        assert visit.ask("[page.selected, page.step]") == [None, 2]
        assert visit.complaints == []

    def test_an_address_given_to_a_busy_page_is_followed(self, visit: Visit, page: Path) -> None:
        """The page is due to write what it shows when the address arrives."""
        visit.open_timeline(page)
        visit.page.evaluate("""() => {
            const work = () => { for (const end = performance.now() + 500; performance.now() < end;); };
            window.ddpProf.show(0, 5000).then(() => setTimeout(work, 100));
        }""")
        visit.page.wait_for_timeout(150)
        visit.page.goto(page.as_uri() + "#step=1")
        visit.page.wait_for_timeout(500)
        assert visit.ask("page.step") == 1
        assert visit.page.url.endswith("#step=1")

    def test_a_button_copies_the_address(self, visit: Visit, page: Path) -> None:
        visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        visit.open_timeline(page, "#step=1")
        visit.page.get_by_role("button", name="copy link").click()
        visit.page.locator("#copied:text-is('copied')").wait_for()
        assert visit.page.evaluate("navigator.clipboard.readText()") == page.as_uri() + "#step=1"
        visit.page.context.clear_permissions()

    def test_where_the_browser_refuses_the_address_is_shown_selected(self, visit: Visit, page: Path) -> None:
        visit.open_timeline(page, "#step=1")
        visit.page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
        visit.page.get_by_role("button", name="copy link").click()
        visit.page.locator("#link:focus").wait_for()
        assert visit.page.evaluate("getSelection().toString()") == page.as_uri() + "#step=1"
        assert visit.complaints == []


def test_the_worst_stretch_is_shown_with_its_step(visit: Visit, tmp_path: Path) -> None:
    """Three steps whose all-reduce blocks for 5, 20 and 10 us."""
    capture = write_capture(tmp_path / "x.sqlite", bucket_steps(15, 30, 20), "2023.4")
    visit.open_timeline(page_of(tmp_path, load_trace(capture)), "#worst")
    assert title(visit) == "waiting for communication"
    assert visit.ask("page.step") == 1
    selected = visit.ask("page.selected.track.end[page.selected.at] - page.selected.track.start[page.selected.at]")
    assert selected == 20 * US


def test_the_worst_stretch_is_one_of_measured_steps(visit: Visit, tmp_path: Path) -> None:
    """Ranks often wait longest for each other in the warm-up, of which no figure is; there it blocks for 30 us."""
    capture = bucket_steps(40, 15, 30, 20)
    for index, step in enumerate(capture.ranges):
        step.name, step.domain = f"step|index={index}{'' if index else '|warmup=1'}", "ddp_prof"
    visit.open_timeline(
        page_of(tmp_path, load_trace(write_capture(tmp_path / "x.sqlite", capture, "2023.4"))), "#worst"
    )
    selected = visit.ask("page.selected.track.end[page.selected.at] - page.selected.track.start[page.selected.at]")
    assert selected == 20 * US
    assert visit.ask("page.stepName(page.step)") == "step 2"
