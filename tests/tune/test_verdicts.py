"""Losses, step by step: the same, changed, or different in each run anyway."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddp_prof.tune.store import Trial
from ddp_prof.tune.tries import TODAY
from ddp_prof.tune.verdicts import compare_losses
from tests.tune.simulated import measured


def trial(*losses: float | None, precision: float = 1e-7) -> Trial:
    return Trial.of(1, TODAY, measured(1e8, losses, precision), 1.0)


SEEDED = [trial(2.0, 1.5), trial(2.0, 1.5)]


@pytest.mark.parametrize(
    ("today", "tried", "said"),
    [
        (SEEDED, [trial(2.0, 1.5)], ("same", 0.0)),
        (SEEDED, [trial(2.0, 1.5 * (1 + 1e-5))], ("same", pytest.approx(1e-5))),
        (SEEDED, [trial(2.0, 1.5), trial(2.0, 1.53)], ("changed", pytest.approx(0.02))),
        (SEEDED, [trial(2.0, None)], ("changed", None)),
        (SEEDED, [trial(2.0, 1.5, 1.2)], ("changed", None)),
        ([trial(2.0, None)], [trial(2.0, None)], ("same", 0.0)),
        ([trial(2.0, 1.5), trial(1.7, 1.6)], [trial(1.9, 1.4)], ("vary by themselves", None)),
        ([trial()], [trial()], ("not seen", None)),
        ([], [trial(1.0)], ("not seen", None)),
        (SEEDED, [], ("not seen", None)),
        # bfloat16 has a number each 0.8 %: one further is rounding.
        ([trial(2.0, precision=2**-7)], [trial(2.0 * (1 + 2**-7), precision=2**-7)], ("same", 2**-7)),
        ([trial(2.0, 0.0)], [trial(2.0, 1e-9)], ("same", pytest.approx(0.0, abs=1e-3))),
    ],
)
def test_losses(today: Sequence[Trial], tried: Sequence[Trial], said: tuple[str, float | None]) -> None:
    assert compare_losses(today, tried) == said
