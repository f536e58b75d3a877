"""Selecting, measuring, keys, the address of a view, and a phone's width."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ddp_prof.present.timeline.build import build_timeline
from tests.browser.conftest import Once, Visit, write_timeline
from tests.measuring import source_of
from tests.present.runs import cpu_run


def write_page(folder: Path) -> None:
    """Two steps of 20 ns: forward 1 to 5, backward 6 to 12, all-reduce 8 to 12 of bucket 0."""
    write_timeline(build_timeline([source_of("overlap", cpu_run())]), folder / "run.html")


@pytest.fixture
def page(once: Once) -> Path:
    return once(write_page) / "run.html"


def device_label(visit: Visit, kind: str, time: float, panel: int = 0) -> tuple[float, float]:
    """Where a time is in the first lane of a kind, in pixels of the page."""
    x, y = visit.ask(
        """(([kind, time, panel]) => { const row = page.rows.find((row) => row.kind === kind && row.panel === panel);
        return [(time - page.view.from) / page.pixel, (row.top + row.bottom) / 2]; })(argument)""",
        [kind, time, panel],
    )
    left, top = visit.lanes()
    return left + x, top + y


def details(visit: Visit) -> dict[str, str]:
    names = visit.texts("#details dt")
    return dict(zip(names, visit.texts("#details dd"), strict=True))


def sums(visit: Visit, caption: str) -> dict[str, list[str]]:
    rows = f"#details table:has(caption:text-is('{caption}')) tbody tr"
    return {name: rest for name, *rest in visit.each(rows, "({ cells }) => [...cells].map((cell) => cell.textContent)")}


def window(visit: Visit) -> list[float]:
    return visit.ask("[page.view.from, page.view.to]")


def test_a_click_selects_and_its_details_stay(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.click(device_label(visit, "communication", 10))
    visit.hover((5, 5))
    assert visit.text("#details h2") == "all-reduce of bucket 0"
    known = details(visit)
    assert known["duration"] == "4 ns (4 ns)"
    assert (known["step"], known["lane"]) == ("0", "rank 0, communication")
    assert known["bytes"].startswith("1,048,576: 1 MiB")
    assert visit.ask("page.selection") == [8, 12]
    visit.press("Escape")
    assert visit.count("#details dt") == 0
    assert visit.ask("page.selection") is None


def test_a_drag_selects_nothing(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.show(0, 200)
    x, y = device_label(visit, "communication", 10)
    visit.drag((x, y), (x - 50, y))
    assert visit.ask("page.selection") is None


def test_shift_and_drag_measure_a_range(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    before = window(visit)
    start, stop = device_label(visit, "communication", 9), device_label(visit, "communication", 32)
    visit.drag(start, stop, with_shift=True)
    assert window(visit) == before, "nothing has moved"
    low, high = visit.ask("page.selection")
    assert (low, high) == (pytest.approx(9, abs=1), pytest.approx(32, abs=1))
    assert visit.text("#details h2") == f"{high - low} ns measured"
    # Of the two all-reduces from 8 to 12 and from 28 to 32.
    expected = (12 - low) + (min(high, 32) - 28)
    assert sums(visit, "by name")["all-reduce of bucket 0"] == ["2", f"{expected} ns"]
    assert sums(visit, "by category")["communication (communication)"] == ["2", f"{expected} ns"]


@pytest.mark.nightly  # the gate does it in test_walk.py
def test_f_zooms_to_what_is_selected(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.ask("page.showAll()")
    visit.click(device_label(visit, "host", 10))
    visit.press("f")
    low, high = visit.ask("page.selection")
    start, end = window(visit)
    assert start <= low < high <= end


def test_the_keys_are_listed(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    for is_open in (True, False):
        visit.press("?")
        assert visit.each("#keys", "(list) => list.open") == [is_open]
    visit.click("#show-keys")
    assert "measure a range" in visit.seen_text("#keys")


def test_double_click_zooms_in(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.ask("(page.data.end *= 1e6, page.showAll())")
    start, end = window(visit)
    left, top = visit.lanes()
    visit.double_click(left + 300, top + 5)
    low, high = window(visit)
    assert high - low == pytest.approx((end - start) / 2)


@pytest.mark.nightly  # in every gate without a page: tests/present/timeline/test_shown.py
def test_the_axis_has_the_unit_of_its_window(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.ask("(page.data.start = 0, page.data.end = 1e10, page.data.margin = 0)")
    for span, ticks in ((8e9, "0 s 2 s 4 s 6 s 8 s"), (8e6, "0 ms 2 ms 4 ms 6 ms 8 ms"), (3e3, "0 µs 1 µs 2 µs 3 µs")):
        visit.show(0, span)
        found = visit.texts("#timeline .xtick text")
        assert set(ticks.split(" ")[1::2]) == {text.split(" ")[1] for text in found}
        assert found[0].split(" ")[0].strip("0.") == ""
    visit.show(0, 1e6)
    found = visit.texts("#timeline .xtick text")
    assert {text.split(" ")[1] for text in found} == {"µs"}


def lanes_seen(visit: Visit) -> list[tuple[str, float, float]]:
    """Title, top and bottom of each lane that is not folded, in pixels of the page."""
    _, top = visit.lanes()
    rows = visit.ask(
        "page.data.lanes.filter(({ seen }) => seen).map((lane) => [lane.title, lane.top, lane.level * lane.levels])"
    )
    return [(title, top + start, top + start + height) for title, start, height in rows]


@pytest.mark.parametrize("width", [390, 1400])
def test_labels_are_above_the_lanes_on_a_phone_and_beside_them_elsewhere(visit: Visit, page: Path, width: int) -> None:
    visit.resize(width, 844)
    visit.open_timeline(page)
    assert visit.ask("document.documentElement.scrollWidth") == width, "nothing scrolls sideways"
    left, _ = visit.lanes()
    labels = visit.boxes("#labels button[aria-expanded=true]")
    seen = lanes_seen(visit)
    assert len(labels) == len(seen) == 4
    for label, (title, top, bottom) in zip(labels, seen, strict=True):
        if width == 390:
            assert label["bottom"] <= top + 0.5, title
            assert left < 20
        else:
            assert label["right"] <= left
            assert label["top"] - 0.5 <= top < bottom <= label["bottom"] + 0.5, title
    for one, other in pairwise(seen):
        assert one[2] <= other[1], "lanes do not overlap"
