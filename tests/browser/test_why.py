"""The page of what is exposed: collectives of a step as a chart and a table, both with links to the timeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Visit
from tests.browser.test_inspecting import boxes_of, details, device_label
from tests.command_line import csv_rows
from tests.ingest.test_kineto_json import gpu_step, write


def selected(visit: Visit) -> tuple[str, str, str]:
    """Of the collective that the timeline shows its rank, its step and its duration."""
    visit.wait_for_timeline()
    kind, rank = visit.ask("[page.selected.row.kind, page.data.ranks[page.selected.row.rank].name]")
    assert kind == "communication"
    return rank, details(visit)["step"], details(visit)["duration"].partition(" ms")[0]


def test_a_row_leads_to_its_collective_in_the_timeline(visit: Visit, two_ranks: Path) -> None:
    visit.open(two_ranks / "x-why.html")
    rows = visit.page.locator("#pair tbody tr")
    worst, other = rows.all_text_contents()
    assert (worst.startswith("bucket 0" + "0"), other.startswith("bucket 0" + "1")) == (True, True), "rank 0 waits"
    assert "ms of a" in visit.page.locator("h1").inner_text()
    visit.page.select_option("#steps", "3")
    rows.nth(1).locator("td").last.click()
    assert selected(visit) == ("rank 1", "3", "10.0")
    assert visit.ask("page.step") == 3
    visit.page.wait_for_url("**&box=*")
    visit.page.go_back()
    visit.page.locator("#pair").wait_for()
    assert visit.page.locator("#steps").input_value() == "3"
    assert visit.complaints == []


def test_a_click_on_the_chart_leads_to_the_collective(visit: Visit, two_ranks: Path) -> None:
    visit.open(two_ranks / "x-why.html")
    visit.page.select_option("#steps", "5")
    at = visit.page.locator("#collectives").evaluate(
        """(figure) => { const { xaxis, yaxis } = figure._fullLayout, { left, top } = figure.getBoundingClientRect();
        const bar = figure.data.find(({ name, y }) => name?.startsWith("exposed") && y.includes(1));
        const n = bar.y.indexOf(1);
        return [left + xaxis._offset + xaxis.l2p(bar.base[n] + bar.x[n] / 2), top + yaxis._offset + yaxis.l2p(1)]; }"""
    )
    numbers = visit.page.locator("#collectives .textpoint").all_text_contents()
    assert [round(float(text.removesuffix(" ms")), 1) for text in numbers] == [15, 10], "what of each is exposed"
    visit.page.mouse.move(*at)
    visit.page.mouse.click(*at)
    visit.page.wait_for_url("**/x.html*")
    assert selected(visit) == ("rank 0", "5", "15.0")
    assert visit.complaints == []


def test_of_a_kineto_trace_too(visit: Visit, tmp_path: Path, report_of: Callable[..., Path]) -> None:
    pages = report_of(write(tmp_path / "x.json", gpu_step(), distributedInfo={"rank": 1, "world_size": 2}))
    visit.open(pages / "x-why.html")
    visit.page.locator("#pair tbody a").click()
    visit.wait_for_timeline()
    assert details(visit)["duration"] == "10.0 µs (10,000 ns)"
    assert details(visit)["step"] == "3"


@pytest.mark.parametrize(("width", "is_beside"), [(1400, True), (390, False)])
def test_the_table_stands_beside_the_chart_where_there_is_room(
    visit: Visit, two_ranks: Path, width: int, *, is_beside: bool
) -> None:
    visit.page.set_viewport_size({"width": width, "height": 844})
    visit.open(two_ranks / "x-why.html")
    (chart,), (table,) = (boxes_of(visit, f"#pair {selector}") for selector in (".chart", "table"))
    assert (table["left"] >= chart["right"], table["top"] >= chart["bottom"]) == (is_beside, not is_beside)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width


def test_a_step_is_as_long_on_every_page_as_in_tables(visit: Visit, two_ranks: Path, tmp_path: Path) -> None:
    """The host runs ahead: its range lasts 8 ms of the 50 that the step takes on the device."""
    files = sorted(tmp_path.glob("x.rank*.sqlite"))
    steps = csv_rows("overlap", "--steps", *files)
    (row, other) = ({**row} for row in steps if row["step"] == "3")
    low, high = sorted(f"{float(each['step_ms']):.1f} ms" for each in (row, other))
    length = low if low == high else f"{low} to {high}"
    assert float(row["step_ms"]) > 45
    visit.open(two_ranks / "x-why.html")
    visit.page.select_option("#steps", "3")
    assert visit.page.locator("#length").text_content() == f"takes {length}"
    visit.open_timeline(two_ranks / "x.html", "#step=3")
    said = str(visit.page.locator("#in-view").text_content())
    assert said.startswith(f"step 3: {low}")
    visit.page.mouse.click(*device_label(visit, "host", 1_000_000))
    assert details(visit)["step length"] == f"{float(row['step_ms']):.1f} ms"
    assert details(visit)["duration"].startswith("8.00 ms"), "of the host's range"
    visit.page.keyboard.press("w")
    visit.ask("page.schedule()")
    assert str(visit.page.locator("#in-view").text_content()).startswith("in view: "), "not all of the step"
