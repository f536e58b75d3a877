"""The page of a simulated tuning, with captures of this repository as those of today's settings and of the best try."""

from __future__ import annotations

from pathlib import Path

from ddp_prof.runs import load_runs
from ddp_prof.tune.page import write_tuning_page
from ddp_prof.tune.verdicts import best_of
from ddp_prof.tune.why import Why, foresee
from tests.conftest import ROOT
from tests.tune.simulated import Simulated, tune

BEST = "gradient_as_bucket_view=True"


def write_tuned(path: Path, rounds: int = 8) -> None:
    """A page with why if so many rounds tell which try is best."""
    result = tune(Simulated({BEST: 0.05, "bucket_cap_mb=1": -0.1}), BEST, "bucket_cap_mb=1", rounds=rounds)
    best, why = best_of(result.verdicts), None
    if best and best.gain:
        files = (ROOT / "traces" / f"{name}.sqlite" for name in ("bucketed_100mb", "bucketed_10mb"))
        today, tried = (load_runs(file)[0] for file in files)
        today.folder, tried.folder = "today", best.tried.label
        why = Why(best.tried, best.gain, (today, tried), foresee(today, best.tried))
    write_tuning_page(result, path, why)
