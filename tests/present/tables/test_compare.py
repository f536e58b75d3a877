"""What the notes beside a comparison of runs say."""

from __future__ import annotations

from dataclasses import replace

from ddp_prof.present.tables.compare import speedup_notes
from tests.present.test_headlines import summary


def test_which_speedups_to_believe_is_said() -> None:
    """Those of few steps have no interval; the baseline, beside which all others stand, needs none."""
    naive, known = summary("naive", 1, 0, 85), summary("flat", 1.5, 0, 85)
    unclear = replace(summary("torch", 1.02, 0, 85), supported=False)
    of_few_steps = replace(summary("overlap", 1.25, 0, 85), supported=None)
    assert speedup_notes([naive, known, unclear, of_few_steps]) == [
        "speedup not supported, its interval contains 1: torch",
        "speedup without an interval, as there are too few steps: overlap",
    ]
