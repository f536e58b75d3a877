"""The figure of bucket sizes says where it was measured, as all other figures do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_prof.benchmark.study import SIZES, study_of
from ddp_prof.manifest import RANKS_PER_GPU, Caveat, load_manifest
from tests.benchmark.results_factory import Sweep

MS = 1_000_000
TRACES = Path(__file__).parents[2] / "traces"


def bucketed_run(folder: Path, mb: int) -> Any:
    """A run of two ranks that share a GPU."""
    made = load_manifest(TRACES / f"bucketed_{mb}mb.run.json")
    shared = replace(made, device="cuda", model_size="mini", options={**made.options, RANKS_PER_GPU: 2})
    return SimpleNamespace(files=[folder / f"bucketed_{mb}mb.sqlite"], manifest=shared)


@pytest.mark.parametrize("has_measurements", [True, False])
def test_the_figure_says_that_ranks_shared_a_gpu(tmp_path: Path, *, has_measurements: bool) -> None:
    """It said 'device: cuda' alone, while the figure beside it of the same runs said it."""
    if has_measurements:
        sweep = Sweep()
        for mb in (1.0, 10.0):
            sweep.add("bucketed", 90, 20, bucket=mb, device="cuda", caveat=Caveat.SHARED_GPU.value)
        sweep.write(tmp_path / "results.db")
    runs = [bucketed_run(tmp_path, mb) for mb in (1, 10)]
    summaries: Any = [SimpleNamespace(step_ns=90 * MS, tail_ns=20 * MS)] * 2
    title = study_of(runs, summaries).figures[SIZES]["layout"]["title"]
    assert f"device: cuda  ·  {Caveat.SHARED_GPU.value}" in str(title)
