"""What a timeline opens on, the way to the whole run, and what the address says of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.trace import Trace
from tests.browser.conftest import Once, Visit, write_timeline
from tests.drawing import draw_trace
from tests.measuring import source_of
from tests.present.timelines import steps_of


def page_of(tmp_path: Path, *traces: Trace) -> Path:
    sources = [source_of(f"run {at}", trace) for at, trace in enumerate(traces)]
    return write_timeline(build_timeline(sources), tmp_path / "run.html")


def window(visit: Visit) -> list[float]:
    return [round(ns / 1000, 1) for ns in visit.ask("[page.view.from, page.view.to]")]


def write_page(folder: Path) -> None:
    page_of(folder, steps_of(4, 8, 5, 7))


@pytest.fixture
def page(once: Once) -> Path:
    return once(write_page) / "run.html"


def test_it_opens_on_the_step_of_median_length_and_leads_to_all_of_it(visit: Visit, page: Path) -> None:
    visit.open_timeline(page, "")
    assert visit.text("#steps option:checked") == "step 2", "the shorter of two in the middle"
    assert window(visit) == [-0.1, 5.1]
    assert "start of step 2" in visit.text(".xtitle")
    assert "#" not in visit.url
    visit.select("#steps", "")
    assert visit.is_at("*/run.html#step=all")
    everything = window(visit)
    assert (everything[0] < 0, everything[1] > 24) == (True, True)
    visit.reload()
    assert window(visit) == everything
    assert visit.value("#steps") == ""
    visit.select("#steps", "3")
    assert visit.is_at("*/run.html#step=3")
    visit.press("0")
    assert window(visit) == everything
    visit.select("#steps", "2")
    assert visit.url.rstrip("#").endswith("run.html")
    visit.press("w")
    assert visit.is_at("*#step=2&from=*")
    assert visit.complaints == []


def test_a_capture_without_steps_opens_on_all_of_it(visit: Visit, tmp_path: Path) -> None:
    visit.open_timeline(page_of(tmp_path, draw_trace(streams={7: "aa..bb"}, character_ns=1000)), "")
    assert visit.ask("[page.data.typical, page.step]") == [None, None]
    assert window(visit) == [0, 6]
    assert "#" not in visit.url


@pytest.mark.nightly  # the gate does it in test_walk.py, and without a page in tests/present/timeline/test_finding.py
def test_the_address_carries_step_and_window(visit: Visit, page: Path) -> None:
    visit.open_timeline(page, "")
    visit.ask("page.showStep(1)")
    visit.ask("page.show(1000, 6000)")
    address = f"{page.as_uri()}#step=1&from=1000&to=6000"
    assert visit.url == address
    visit.open_anew(address)
    assert visit.ask("page.step") == 1
    assert window(visit) == [1, 6]
    assert visit.complaints == []


def test_what_is_exposed_has_its_number_beside_it_where_it_is_thin(visit: Visit, tmp_path: Path) -> None:
    """Of thin ones close together the sum."""
    one = draw_trace(
        launches={"main": "a" + "." * 299 + "A" + ".." + "b"},
        streams={7: "a" * 300 + "..." + "b" * 300, 9: "." * 300 + "A" * 3},
        character_ns=1000,
    )
    two = draw_trace(
        launches={"main": "a" + "." * 299 + "A" + "......" + "B" + ".." + "b"},
        streams={7: "a" * 300 + "..." + "c" * 4 + "..." + "b" * 300, 9: "." * 300 + "A" * 3 + "...." + "B" * 3},
        character_ns=1000,
    )
    visit.open_timeline(page_of(tmp_path, one, two))
    assert sorted(visit.texts(".annotation-text")) == ["3.0 µs", "6.0 µs"]
    visit.show(299_000, 304_000)
    assert visit.count(".textpoint:has-text('exposed')") == 2
    assert visit.texts(".annotation-text") == [], "there is room in it"
    assert visit.complaints == []


def test_a_number_at_the_end_of_the_page_is_not_cut(visit: Visit, tmp_path: Path) -> None:
    drawn = draw_trace(
        launches={"main": "a" + "." * 299 + "A"}, streams={7: "a" * 300, 9: "." * 300 + "A" * 3}, character_ns=1000
    )
    visit.open_timeline(page_of(tmp_path, drawn))
    assert visit.texts(".annotation-text") == ["3.0 µs"]
    (number,), (page,) = visit.boxes(".annotation-text"), visit.boxes("#timeline")
    assert number["right"] <= page["right"]
