"""Each rule on captures of which it is known whether it must speak."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.runs import load_runs

TRACES = Path(__file__).parents[3] / "traces"


@pytest.mark.parametrize(
    ("capture", "rules"),
    [
        ("naive", ["gradients reduced after backward", "one collective per parameter"]),
        ("flat", ["gradients reduced after backward"]),
        ("overlap", ["one collective per parameter"]),
        ("bucketed_10mb", []),
        ("torch", ["large last bucket"]),
    ],
)
def test_the_committed_captures(capture: str, rules: list[str]) -> None:
    (run,) = load_runs([TRACES / f"{capture}.sqlite"])
    found = run.doctor()
    assert [one.rule for one in found.findings] == rules
    assert found.abstained == ()


def test_a_tail_longer_than_what_it_costs_says_what_stands_still() -> None:
    """'at most 25.1 ms per step: 25.90 ms of a typical step are the tail' was said: of a median, and of one step."""
    (run,) = load_runs([TRACES / "torch.sqlite"])
    (finding,) = run.doctor().findings
    assert finding.cost_ns == 25_091_540
    assert finding.evidence.startswith("25.9 ms of the typical step are the tail of the last bucket")
    assert finding.evidence.endswith("after backward; the median step stands still for 25.1 ms.")
