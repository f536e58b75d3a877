"""The page of what is exposed: collectives of a step as a chart and a table, both with links to the timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Visit, write_report_of
from tests.browser.test_inspecting import details, device_label
from tests.command_line import csv_rows
from tests.ingest.test_kineto_json import gpu_step, write


def selected(visit: Visit) -> tuple[str, str, str]:
    """Of the collective that the timeline shows its rank, its step and its duration."""
    kind, rank = visit.ask("[page.selected.row.kind, page.data.ranks[page.selected.row.rank].name]")
    assert kind == "communication"
    return rank, details(visit)["step"], details(visit)["duration"].partition(" ms")[0]


def test_a_row_leads_to_its_collective_in_the_timeline(visit: Visit, two_ranks: Path) -> None:
    """A step is as long on every page as in tables: the host runs ahead, its range lasts 8 ms of the 50 that the step
    takes on the device. The table stands beside the chart where there is room."""
    steps = csv_rows("overlap", "--steps", *sorted(two_ranks.glob("x.rank*.sqlite")))
    lengths = [float(row["step_ms"]) for row in steps if row["step"] == "3"]
    low, high = (f"{length:.1f} ms" for length in (min(lengths), max(lengths)))
    assert min(lengths) > 45
    visit.open(two_ranks / "x-why.html")
    for width, is_beside in ((390, False), (1400, True)):
        visit.resize(width, 844)
        (chart,), (table,) = (visit.boxes(f"#pair {selector}") for selector in (".chart", "table"))
        assert (table["left"] >= chart["right"], table["top"] >= chart["bottom"]) == (is_beside, not is_beside)
        assert visit.ask("document.documentElement.scrollWidth") == width
    worst, other = visit.texts("#pair tbody tr")
    assert (worst.startswith("bucket 0" + "0"), other.startswith("bucket 0" + "1")) == (True, True), "rank 0 waits"
    assert "ms of a" in visit.seen_text("h1")
    visit.select("#steps", "3")
    assert visit.text("#length") == f"takes {low if low == high else f'{low} to {high}'}"
    visit.click("#pair tbody tr >> nth=1 >> td >> nth=-1")
    assert selected(visit) == ("rank 1", "3", "10.0")
    assert visit.ask("page.step") == 3
    assert visit.is_at("*&box=*")
    visit.back()
    assert visit.count("#pair") == 1
    assert visit.value("#steps") == "3"
    visit.open_timeline(two_ranks / "x.html", "#step=3")
    assert visit.text("#in-view").startswith(f"step 3: {low}")
    visit.click(device_label(visit, "host", 1_000_000))
    assert details(visit)["step length"] in (low, high)
    assert details(visit)["duration"].startswith("8.00 ms"), "of the host's range"
    visit.press("w")
    assert visit.text("#in-view").startswith("in view: "), "not all of the step"
    assert visit.complaints == []


def test_a_click_on_the_chart_leads_to_the_collective(visit: Visit, two_ranks: Path) -> None:
    visit.open(two_ranks / "x-why.html")
    visit.select("#steps", "5")
    ((x, y),) = visit.each(
        "#collectives",
        """(figure) => { const { xaxis, yaxis } = figure._fullLayout, { left, top } = figure.getBoundingClientRect();
        const bar = figure.data.find(({ name, y }) => name?.startsWith("exposed") && y.includes(1));
        const n = bar.y.indexOf(1);
        return [left + xaxis._offset + xaxis.l2p(bar.base[n] + bar.x[n] / 2), top + yaxis._offset + yaxis.l2p(1)]; }""",
    )
    numbers = visit.texts("#collectives .textpoint")
    assert [round(float(text.removesuffix(" ms")), 1) for text in numbers] == [15, 10], "what of each is exposed"
    visit.hover((x, y))
    visit.click((x, y))
    assert visit.is_at("*/x.html*")
    assert selected(visit) == ("rank 0", "5", "15.0")
    assert visit.complaints == []


@pytest.mark.nightly  # the gate follows links of a Kineto trace in test_kernels.py
def test_of_a_kineto_trace_too(visit: Visit, tmp_path: Path) -> None:
    write_report_of(tmp_path, write(tmp_path / "x.json", gpu_step(), distributedInfo={"rank": 1, "world_size": 2}))
    visit.open(tmp_path / "x-why.html")
    visit.click("#pair tbody a")
    assert details(visit)["duration"] == "10.0 µs (10,000 ns)"
    assert details(visit)["step"] == "3"
