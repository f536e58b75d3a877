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
