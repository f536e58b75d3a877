"""axe-core, Deque's engine, finds nothing serious on any kind of page, in light and in dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Visit, at_one_address, visit_in
from tests.command_line import run
from tests.conftest import ROOT
from tests.examples import IS_NIGHTLY
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture
from tests.tune.pages import write_tuned

BUCKETED, FLAT = (ROOT / "traces" / f"{name}.sqlite" for name in ("bucketed_10mb", "flat"))
KNOWN = {"known": 4, "short": 1}
TIMELINES = ("cpu/bucketed_10mb.html", "known.html")
PAGES = (
    "index.html", *TIMELINES, "known-why.html", "known-kernels.html", "cpu/index.html", "cpu/bucketed_10mb-why.html",
    "cpu/bucketed_10mb-kernels.html", "waterfall-page.html", "collectives-page.html", "skew-page.html", "variants.html",
    "buckets.html", "model.html", "one-file.html", "tune.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two GPU captures with known truth.

    Of captures with few collectives: axe looks at each element, and of one kind one row shows what many would.
    """
    folder = tmp_path_factory.mktemp("pages")
    known, short = (write_capture(folder / f"{name}.sqlite", known_truth(steps)) for name, steps in KNOWN.items())
    write_by_command(folder, ["report", known, short, "-o", folder])
    return folder


def write_by_command(folder: Path, *commands: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROWSER_PATH", str(folder / "none"))
        for arguments in commands:
            result = run(*arguments)
            assert result.exit_code == 0, result.output


def write_other_pages(folder: Path) -> None:
    """Those of a CPU capture, and every kind that is not of the report; the gate opens none of them."""
    write_by_command(
        folder,
        ["report", BUCKETED, FLAT, "-o", folder / "cpu"],
        ["compare", BUCKETED, FLAT, "--html", folder / "waterfall-page.html"],
        ["collectives", BUCKETED, "--html", folder / "collectives-page.html"],
        ["skew", BUCKETED, "--html", folder / "skew-page.html"],
        ["results", _results(folder), "-o", folder],
        ["report", BUCKETED, FLAT, "--one-file", folder / "one-file.html"],
    )
    write_tuned(folder / "tune.html")


@pytest.fixture
def pages(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return at_one_address(written, tmp_path_factory)


def _results(folder: Path) -> Path:
    """A copy: a table is written beside the database."""
    database = folder / "results.db"
    database.write_bytes((ROOT / "traces" / "results.db").read_bytes())
    return database


BY_NIGHT = {
    *TIMELINES, *(page for page in PAGES if page.startswith("cpu/")), "known-kernels.html", "waterfall-page.html",
    "collectives-page.html", "skew-page.html", "variants.html", "buckets.html", "model.html", "one-file.html",
    "tune.html",
}  # fmt: skip
"""Pages of which others have all kinds of elements, with their colours and sizes of letters; timelines are below."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.nightly] * (page in BY_NIGHT)) for page in PAGES]
)
def test_axe_finds_nothing_serious(tab: Any, pages: Path, page: str) -> None:
    if not (pages / page).exists():
        write_other_pages(pages)
    with visit_in(tab, "dark") as visit:
        if page in TIMELINES:
            visit.open_timeline(pages / page)
        else:
            visit.go((pages / page).as_uri())
        if (
            IS_NIGHTLY
        ):  # one table of colours is that of all pages; the timeline below is looked at in dark in every gate
            assert serious_in_both(visit) == []
        else:
            visit.prefer("light")
            assert serious_violations(visit) == []


@pytest.mark.parametrize("page", [pytest.param(TIMELINES[0], marks=pytest.mark.nightly), *TIMELINES[1:]])
def test_a_timeline_in_use_is_as_accessible(tab: Any, pages: Path, page: str) -> None:
    """A match is selected, its details are docked, the filter is a chip."""
    if not (pages / page).exists():
        write_other_pages(pages)
    with visit_in(tab, "dark") as visit:
        visit.open_timeline(pages / page, "#lanes=co")
        visit.fill("#search", "a")
        visit.press("Enter")
        assert visit.is_seen("#details dl")
        assert visit.is_seen("#lanes-chip")
        assert serious_in_both(visit) == []


def test_a_narrow_page_whose_table_scrolls_is_as_accessible(tab: Any, pages: Path) -> None:
    """The keyboard could not reach it."""
    with visit_in(tab) as visit:
        visit.resize(390, 800)
        visit.open_timeline(pages / "known.html")
        assert visit.ask(
            "(({ scrollWidth, clientWidth }) => scrollWidth > clientWidth)(document.querySelector('.below'))"
        )
        assert serious_violations(visit) == []


@pytest.mark.nightly
def test_the_sums_of_a_range_are_as_accessible(tab: Any, pages: Path) -> None:
    with visit_in(tab, "dark") as visit:
        visit.open_timeline(pages / "known.html", "#range=0,100000")
        assert visit.count("#details table") > 0
        assert serious_in_both(visit) == []


def serious_in_both(visit: Visit) -> list[str]:
    """What is serious in dark, and then in light: a page that is open follows the palette of the system."""
    found = []
    for palette in ("dark", "light"):
        visit.prefer(palette)
        found += serious_violations(visit, palette)
    return found


def test_axe_sees_what_is_serious(tab: Any, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<html lang="en"><title>x</title><p style="color: #bbb; background: #fff">pale</p><img src="data:,">'
    )
    with visit_in(tab) as visit:
        visit.go(page.as_uri())
        for palette, broken in (("light", {"color-contrast", "image-alt"}), ("dark", {"color-contrast"})):
            assert {text.partition(":")[0] for text in serious_violations(visit, palette)} == broken


# Of rules that are kept axe would describe each element, too.
OPTIONS: dict[str, dict[str, list[str]]] = {"light": {"resultTypes": ["violations"]}}
# In dark only colours differ.
OPTIONS["dark"] = OPTIONS["light"] | {"runOnly": ["color-contrast", "link-in-text-block"]}


def serious_violations(visit: Visit, palette: str = "light") -> list[str]:
    """A line for each element that breaks a rule."""
    return [
        f"{found['id']}: {node['html'][:120]} {node['failureSummary'][:300]}"
        for found in visit.violations(OPTIONS[palette])
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]
