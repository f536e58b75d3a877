"""The page of a tuning."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.browser.conftest import Visit
from tests.tune.pages import BEST, write_tuned


def test_nothing_of_the_page_is_cut_off(visit: Visit, tmp_path: Path) -> None:
    """The line to write is one long word, the try a part of a bar's name, and a reason a sentence."""
    write_tuned(tmp_path / "tune.html")
    visit.go((tmp_path / "tune.html").as_uri())
    assert BEST in visit.text()
    assert all(wide == seen for wide, seen in visit.each(".wide", "(box) => [box.scrollWidth, box.clientWidth]"))
    below = "(each) => each.closest('svg').getBoundingClientRect().bottom - each.getBoundingClientRect().bottom"
    for width in (1400, 390):
        visit.resize(width, 900)
        assert visit.ask("document.documentElement.scrollWidth") == width, "nothing scrolls sideways"
        assert min(visit.each("#chart-waterfall .xtick text", below)) >= 0
    assert visit.complaints == []


def test_few_rounds_are_numbered_by_whole_numbers_and_have_no_intervals(tmp_path: Path) -> None:
    write_tuned(tmp_path / "tune.html", rounds=2)
    text = (tmp_path / "tune.html").read_text(encoding="utf-8")
    rounds, gains = (
        json.loads(re.findall(f'id="chart-{name}-data">(.*?)</script>', text, re.DOTALL)[0])
        for name in ("rounds", "gains")
    )
    assert rounds["layout"]["xaxis"]["dtick"] == 1
    assert not [trace for trace in gains["data"] if "error_x" in trace]


@pytest.mark.nightly  # in every gate without a page: above
def test_few_rounds_are_numbered_once_and_have_no_intervals(visit: Visit, tmp_path: Path) -> None:
    write_tuned(tmp_path / "tune.html", rounds=2)
    visit.go((tmp_path / "tune.html").as_uri())
    assert visit.each("#chart-rounds .xtick text", "(each) => each.textContent") == ["1", "2"]
    assert visit.count("#chart-gains .xerror") == 0
