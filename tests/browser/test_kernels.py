"""The kernels of a report: from the table to the timeline, and from there back to the row."""

from __future__ import annotations

from pathlib import Path

from tests.browser.conftest import Visit
from tests.browser.test_inspecting import details


def chosen(visit: Visit) -> list[str]:
    """The cells of the row that is marked."""
    return visit.texts("tr.chosen > *")


def test_a_kernel_is_shown_in_the_timeline_and_leads_back_to_its_row(visit: Visit, two_ranks: Path) -> None:
    visit.go((two_ranks / "x-kernels.html").as_uri())
    visit.click("role=link[name='gemm']")
    assert visit.text("#details h2") == "gemm"
    assert visit.value("#search") == '"gemm"'
    step = visit.ask("page.data.typical")
    assert details(visit)["step"] == str(step), "it stays where the page opens"
    assert visit.is_at("*&search=%22gemm%22&box=*")
    visit.click("role=link[name='in the table of kernels']")
    row = chosen(visit)
    assert (row[0], visit.count("tr.chosen")) == ("gemm", 1)
    visit.back()
    assert visit.text("#details h2") == "gemm", "the address shows the same"
    assert visit.complaints == []


def test_the_words_above_a_wide_table_end_within_the_page(visit: Visit, two_ranks: Path) -> None:
    """On a narrow page their last letters were cut, as if they went on to the right."""
    visit.resize(680, 900)
    visit.go((two_ranks / "x-kernels.html").as_uri())
    edges = visit.each(
        "caption span",
        "(span) => [span, span.closest('.wide, .scroll')].map((each) => each.getBoundingClientRect().right)",
    )
    assert edges
    assert all(right <= limit for right, limit in edges), edges
