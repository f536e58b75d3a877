"""From the first page of a report to a cause and back, as a person walks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Visit, write_report_of
from tests.browser.test_inspecting import device_label, window
from tests.nsys_factory import NCCL, US, bucket_steps, write_capture


def seen(visit: Visit) -> dict[str, Any]:
    """What a reader sees of a timeline: the window, what is selected or measured, the filter, the lanes."""
    return {
        "window": [round(ns) for ns in window(visit)],
        "selection": visit.ask("page.selection"),
        "details": visit.seen_text("#details"),
        "filter": visit.text("#lanes-chip"),
        "lanes": visit.ask("page.rows.filter(({ seen }) => seen).map(({ lane }) => lane)"),
    }


def test_from_the_index_to_the_worst_stretch_its_kernel_launch_and_consumer_and_back(
    visit: Visit, tmp_path: Path
) -> None:
    write_report_of(tmp_path, write_capture(tmp_path / "x.sqlite", bucket_steps(4, 20, 4), "2023.4"))
    visit.go((tmp_path / "index.html").as_uri())
    visit.click("role=link[name='show me the worst stretch']")
    title = "#details h2"
    assert visit.text(title) == "waiting for communication"
    assert visit.ask("page.selection") == [pytest.approx(15 * US), pytest.approx(25 * US)], "of the second step"

    def follow(fact: str) -> str:
        visit.click(f"#details dt:text-is('{fact}') + dd button")
        return visit.text(title)

    assert follow("waits for") == NCCL
    assert follow("launched") == "cudaLaunchKernel"
    assert follow("launched") == NCCL
    assert follow("needed by") == "memcpy"
    start = window(visit)
    visit.press("f")
    assert window(visit) != start
    visit.press("Backspace")
    assert window(visit) == start

    (band,) = visit.boxes("#whole .band")
    visit.click((band["left"] + 4, band["top"] + 4))
    assert window(visit) != start
    visit.press("Backspace")
    assert window(visit) == start, "a click on the band is a jump, too"

    visit.press("e")
    visit.press("l")
    visit.type("stream 7")
    visit.press("Enter")
    addresses = {}
    for at in ("box", "range"):
        if at == "range":
            left, right = (device_label(visit, "compute", ns)[0] for ns in (16 * US, 24 * US))
            y = device_label(visit, "compute", 0)[1]
            visit.drag((left, y), (right, y), with_shift=True)
            shade = "page.element.data.find(({ fillcolor }) => fillcolor === page.element.layout.font.color + '22')"
            inner = {ms * 1e6 for ms in visit.ask(f"{shade}.x")}
            assert visit.ask("page.selection") == [pytest.approx(ns) for ns in sorted(inner)[-2:]], "it is shaded"
        assert visit.is_at(f"*lanes=stream+7*{at}=*")
        addresses[visit.url] = seen(visit)
    assert visit.complaints == []
    for address, here in addresses.items():
        visit.open_anew(address)
        assert seen(visit) == here
    assert visit.complaints == []
