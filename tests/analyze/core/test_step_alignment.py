"""How often ranks whose recordings began apart are recognised, and how often others are taken for such."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.core.steps import RankSteps, align_unnumbered_steps
from ddp_prof.trace import NO_TIME, UNKNOWN

DRAWS = 100
STEP_NS, VARIES_NS = 1_000_000, 100_000


def share_moved(steps: int, apart: int, jitter: float) -> float:
    """In how many of many runs the second rank is moved by so many steps; ends are off by a share of what steps vary.

    Where it began no later: by any.
    """
    random = np.random.default_rng(steps)
    numbers, moved = np.full(steps, UNKNOWN), 0
    for _ in range(DRAWS):
        ends = np.cumsum(random.normal(STEP_NS, VARIES_NS, steps + apart))
        ends_ns = [ends[begun : begun + steps] + random.normal(0, jitter * VARIES_NS, steps) for begun in (0, apart)]
        ranks = [
            RankSteps(Path(name), numbers, ends.astype(np.int64)) for name, ends in zip("ab", ends_ns, strict=True)
        ]
        raised, notes = align_unnumbered_steps(ranks)
        assert bool(notes) == (raised != [0, 0])
        moved += raised == [0, apart] if apart else raised != [0, 0]
    return moved / DRAWS


@pytest.mark.parametrize("jitter", [0.01, 0.3, 1])
@pytest.mark.parametrize("steps", [4, 5, 6, 8])
def test_ranks_that_began_together_are_not_said_to_have_begun_apart(steps: int, jitter: float) -> None:
    """Of four steps one in five such runs was, of five one in six where nothing tells."""
    assert share_moved(steps, 0, jitter) <= 0.08


@pytest.mark.parametrize(("steps", "jitter"), [(5, 0.01), (6, 0.01), (12, 0.1)])
def test_those_that_began_apart_are_recognised(steps: int, jitter: float) -> None:
    assert share_moved(steps, 1, jitter) >= 0.9


def test_a_nanosecond_is_no_reason_to_move_steps() -> None:
    """A shift by two steps keeps the numbers, and all ends then differ alike; without it they differ by 0 or 1 ns."""
    numbers, own = np.arange(10) % 2, np.array([NO_TIME, 70, 83, 126, 139, NO_TIME, 210, 223, 266, 279])
    other = np.where(np.isin(own, (139, 223, 266, 279)), own + 1, own)
    ranks = [RankSteps(Path(name), numbers, ends) for name, ends in (("a", own), ("b", other))]
    assert align_unnumbered_steps(ranks) == ([0, 0], ())
