"""Tables of the pages: sorted by their headings, filtered, explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Once, Visit, write_report_of
from tests.nsys_factory import Capture, Kernel, Range, write_capture

KERNELS = 10


def write_kernels(folder: Path) -> None:
    """The kernels of a run of ten, in 15 steps: kernel n runs in n steps alone, for 10 * (n + 1) us; only the last one
    runs in some steps beside a collective, and so has a slowdown."""
    capture, at = Capture(), 1_000
    for step in range(15):
        start = at
        for number in range(KERNELS):
            length = 10_000 * (number + 1)
            if step <= number:
                capture.kernels.append(Kernel(f"kernel_{number}", at, at + length, launch=at - 500, thread=1))
                at += length + 1_000
        if step >= KERNELS:
            for kernel in (
                Kernel("kernel_9", at, at + 200_000, launch=at - 500, thread=1),
                Kernel("ncclDevKernel_AllReduce", at, at + 200_000, launch=at - 400, thread=1, stream=9),
            ):
                capture.kernels.append(kernel)
            at += 201_000
        capture.ranges.append(Range(f"step_{step}", start - 700, at - 900, 1))
        at += 1_000
    write_report_of(folder, write_capture(folder / "run.sqlite", capture))


@pytest.fixture
def page(visit: Visit, once: Once) -> Visit:
    visit.go((once(write_kernels) / "run-kernels.html").as_uri())
    return visit


def column(visit: Visit, heading: str) -> list[str]:
    """The cells of a column of the first table that are seen, from top to bottom."""
    return visit.ask(
        """((heading) => {
          const table = document.querySelector("table.sortable");
          const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.trim() === heading);
          return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[at].textContent.trim());
        })(argument)""",
        heading,
    )


def press(visit: Visit, heading: str) -> str:
    """Click a heading; what the table then says of its order."""
    cell = f"table.sortable >> nth=0 >> th:has(button:text-is('{heading}'))"
    visit.click(f"{cell} >> button")
    return str(visit.attribute(cell, "aria-sort"))


def test_a_heading_sorts_by_number_or_by_letters_and_back(page: Visit) -> None:
    assert press(page, "count") == "descending"
    counts = [int(text) for text in column(page, "count")]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], len(counts)) == (15, KERNELS + 1)
    assert press(page, "count") == "ascending"
    assert [int(text) for text in column(page, "count")] == sorted(counts)
    for expected in ("descending", "ascending"):
        assert press(page, "slowdown") == expected
        assert column(page, "slowdown") == ["2.00", *["n/a"] * KERNELS], "what is not known comes last either way"
    assert press(page, "kernel") == "ascending"
    assert column(page, "kernel") == [*[f"kernel_{number}" for number in range(KERNELS)], "ncclDevKernel_AllReduce"]
    assert press(page, "count") == "descending"
    assert page.count('table.sortable >> nth=0 >> th[aria-sort="ascending"]') == 0


def test_a_heading_stands_over_its_column(page: Visit) -> None:
    """Where the first column held numbers, such as ranks, its heading was at the right and they at the left."""
    for table in range(page.count("table.sortable")):
        headings, cells = (
            page.each(
                f"table.sortable >> nth={table} >> {row} > *",
                "(each) => getComputedStyle(each).textAlign.replace('start', 'left')",
            )
            for row in ("thead tr", "tbody tr:first-child")
        )
        assert headings == cells


def test_a_filter_leaves_the_rows_with_its_text(page: Visit) -> None:
    page.fill("input[type=search] >> nth=0", "NCCL")
    assert column(page, "kernel") == ["ncclDevKernel_AllReduce"]
    assert f"1 of {KERNELS + 1} rows" in page.text()
    page.fill("input[type=search] >> nth=0", "")
    assert len(column(page, "kernel")) == KERNELS + 1


def test_a_heading_says_what_it_means_to_the_mouse_and_to_the_keyboard(page: Visit) -> None:
    button = "th button:text-is('slowdown')"
    assert not page.is_seen("#meaning")
    for show, leave in ((page.hover, lambda: page.hover((0, 0))), (page.focus, lambda: page.blur(button))):
        show(button)
        assert "as long as alone it takes beside communication, at the same position" in page.seen_text("#meaning")
        assert page.attribute(button, "aria-describedby") == "meaning"
        leave()
        assert not page.is_seen("#meaning")
    assert page.complaints == []
