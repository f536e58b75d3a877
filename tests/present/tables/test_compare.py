"""What the notes beside a comparison of runs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.present.tables.compare import WhatChanged, compare_view, speedup_notes
from ddp_prof.runs import load_runs
from ddp_prof.runs.run import compare_steps
from tests.nsys_factory import bucket_steps, write_capture
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


def test_that_a_larger_bucket_gives_the_same_is_told_of_buckets_with_a_cap(tmp_path: Path) -> None:
    """Flat has a single collective, too, and nothing is larger than a bucket without a cap."""
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", bucket_steps(20, 20)))
    (found,) = compare_variants([run.overlap()])
    assert found.collectives == 1
    waterfall, told = compare_steps([run]), {}
    for label in ("bucketed 100 MB", "bucketed", "flat", "torch 25 MB"):
        view = compare_view([run.overlap()], [replace(found, label=label)], waterfall, WhatChanged(), [run.cost()])
        told[label] = [note for note in view.notes if "one bucket holds all gradients" in note]
    note = "bucketed 100 MB: one bucket holds all gradients, so that any larger size gives the same"
    assert told == {"bucketed 100 MB": [note], "bucketed": [], "flat": [], "torch 25 MB": []}
