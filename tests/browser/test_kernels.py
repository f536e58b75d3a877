"""The kernels of a report: from the table to the timeline, and from there back to the row."""

from __future__ import annotations

from pathlib import Path

from tests.browser.conftest import Visit, write_report_of
from tests.browser.test_inspecting import details
from tests.ingest.test_kineto_json import event, gpu_step, write


def chosen(visit: Visit) -> list[str]:
    """The cells of the row that is marked."""
    return visit.texts("tr.chosen > *")


def test_a_kernel_is_shown_in_the_timeline_and_leads_back_to_its_row(visit: Visit, tmp_path: Path) -> None:
    """Of kernels of one name that of the same shape and phase is meant, and not a longer name that holds it."""
    more = [
        event("cuda_runtime", "cudaLaunchKernel", ts, "1", tid=2, correlation=number)
        for number, ts in ((7, "60"), (8, "5"), (9, "70"))
    ]
    for number, ts, name, grid in (
        (7, "61", "gemm", [2, 1, 1]),
        (8, "6", "gemm", [3, 1, 1]),
        (9, "71", "gemm_long", [2, 1, 1]),
    ):
        more.append(
            event("kernel", name, ts, "2", tid=7, device=0, stream=7, correlation=number, grid=grid, block=[32, 1, 1])
        )
    rank = {"rank": 1, "world_size": 2}
    write_report_of(tmp_path, write(tmp_path / "x.json", [*gpu_step(), *more], distributedInfo=rank))
    visit.resize(680, 900)
    visit.go((tmp_path / "x-kernels.html").as_uri())
    edges = visit.each(
        "caption span",
        "(span) => [span, span.closest('.wide, .scroll')].map((each) => each.getBoundingClientRect().right)",
    )
    assert edges
    assert all(right <= limit for right, limit in edges), "the words above a wide table end within the page"
    visit.resize(1400, 900)
    visit.click("tr:has-text('grid 2x1x1') a:text-is('gemm')")
    known = details(visit)
    assert (known["grid"], known["start"]) == ("2x1x1", "61.0 µs on the axis")
    assert (visit.value("#search"), visit.text("#found")) == ('"gemm"', "3 of 3")
    assert visit.is_at("*#search=%22gemm%22&box=*")
    visit.click("role=link[name='in the table of kernels']")
    assert chosen(visit)[:2] == ["gemm", "grid 2x1x1 block 32x1x1"]
    assert visit.count("tr.chosen") == 1
    visit.back()
    assert visit.text("#details h2") == "gemm", "the address shows the same"
    assert visit.complaints == []
