"""The sweep, then its table, CSV, figures and analysis: what run_comparison.sh does once the environment is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddp_prof.capture.processes import run_tethered
from ddp_prof.train.launch import run_program

ROOT = Path(__file__).resolve().parents[1]


def compare() -> int:
    """The exit code: that of the sweep, where it had no results to show."""
    database = os.environ.get("RESULTS_DB") or str(ROOT / "traces/local/results.db")
    figures = os.environ.get("FIGURES_DIR") or str(ROOT / "figures/local")
    sweep = [sys.executable, "-m", "ddp_prof.benchmark.sweep"]
    if {"-h", "--help"} & set(sys.argv[1:]):
        return run_tethered([*sweep, "--help"])[0]
    code, _ = run_tethered([*sweep, "--database", database, *sys.argv[1:]])
    if code > 1:
        return code
    if not Path(database).is_file():
        return 1
    return (
        run_tethered([str(Path(sys.executable).with_name("ddp-prof")), "results", database, "-o", figures])[0] or code
    )


if __name__ == "__main__":
    sys.exit(run_program("run_comparison", compare))
