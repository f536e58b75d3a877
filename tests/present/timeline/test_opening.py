"""The boxes that a page shows before it has read all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.present.html.timeline_page import make_content, write_timeline_page
from ddp_prof.present.timeline.build import build_excerpt, build_timeline
from ddp_prof.runs import load_runs
from ddp_prof.runs.run import timeline_sources
from tests.drawing import draw_trace
from tests.measuring import source_of

KERNELS = "ab" * 20


def opening_of(tmp_path: Path, steps: list[str], most: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | None:
    """What the data of a page say of the boxes of its first view."""
    monkeypatch.setattr("ddp_prof.present.html.timeline_page.BOXES_READ_AT_ONCE", most)
    ranges = [(f"step|index={at}", step) for at, step in enumerate(steps)]
    trace = draw_trace(ranges=ranges, streams={7: KERNELS}, character_ns=10_000)
    write_timeline_page(make_content(build_timeline([source_of("run", trace)])), tmp_path / "run.html")
    _, _, rest = (tmp_path / "run.html").read_text(encoding="utf-8").partition('id="timeline-data">')
    opening: dict[str, Any] | None = json.loads(rest.partition("</script>")[0])["opening"]
    return opening


STEPS = ["#" * 10, "." * 10 + "#" * 12, "." * 22 + "#" * 18]


def test_it_holds_the_typical_step_and_a_third_on_either_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = opening_of(tmp_path, STEPS, 40, monkeypatch)
    assert opening is not None
    (count, _), _ = opening["tables"]
    assert max(rows for *_, rows in opening["rows"]) == 12 + 2 * 4 + 2, "and what touches it"
    assert count == sum(rows for *_, rows in opening["rows"])


@pytest.mark.parametrize(
    ("steps", "most"), [(STEPS, 1000), ([], 50), (["#" * 40], 30)], ids=["read at once", "no steps", "long itself"]
)
def test_without_need_or_use_there_is_none(
    tmp_path: Path, steps: list[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opening_of(tmp_path, steps, most, monkeypatch) is None


@pytest.mark.parametrize("capture", ["flat", "overlap", "bucketed_10mb"])
def test_it_is_the_step_that_headlines_are_about(capture: str) -> None:
    (run,) = load_runs([Path(__file__).parents[3] / "traces" / f"{capture}.sqlite"])
    sources, typical = timeline_sources([run]), run.collectives().typical_step
    assert build_timeline(sources).typical_step == typical
    drawn = [step.key for step in build_excerpt(sources).panels[0].steps]
    assert (len(drawn), typical in drawn) == (2, True), "also in a picture"
