"""What the benchmark against torch's DDP says of its rounds; the rounds of three runs a minute apart."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_prof.errors import WorkloadError

ROOT = Path(__file__).parents[2]
Judge = Callable[..., list[str]]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Judge:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/dev"))
    script = importlib.import_module("benchmark_training")

    def said(*ratios: float, gate: bool = False) -> list[str]:
        script.judge([script.Round(("ours", "DDP"), (ratio / 10, 0.1), 20, 1.05) for ratio in ratios], gate)
        return capsys.readouterr().out.splitlines()

    return said


def test_the_interval_is_that_of_the_rounds(judge: Judge) -> None:
    """Three runs that gave 0.927, 0.973 and 0.976, each +- 0.009: one may be the truth, so no interval excludes it."""
    *_, line = judge(0.927, 0.973, 0.976)
    assert line == "ratio 0.9584, 95 % interval 0.8920 to 1.0297, target at most 1.05: met"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [((0.99, 1.0, 1.01), "met"), ((1.0, 1.1, 0.9), "undecided: take more --rounds"), ((1.2, 1.21, 1.2), "NOT MET")],
)
def test_the_target_is_met_or_missed_beyond_chance(judge: Judge, ratios: tuple[float, ...], verdict: str) -> None:
    assert judge(*ratios)[-1].endswith(f"target at most 1.05: {verdict}")


def test_only_a_clear_miss_fails_the_gate(judge: Judge) -> None:
    judge(1.0, 1.1, 1.2, gate=True)
    with pytest.raises(WorkloadError, match="above the target"):
        judge(1.2, 1.21, 1.2, gate=True)
