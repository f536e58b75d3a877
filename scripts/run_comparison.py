"""Runs the sweep and writes table, CSV, figures and analysis; run_comparison.sh calls it in the environment."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ddp_prof.capture.processes import run_tethered
from ddp_prof.train.launch import run_program

ROOT = Path(__file__).resolve().parents[1]


def compare() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--database", default=str(ROOT / "traces/local/results.db"))
    options, others = parser.parse_known_args()
    figures = os.environ.get("FIGURES_DIR") or str(ROOT / "figures/local")
    sweep = [sys.executable, "-m", "ddp_prof.benchmark.sweep"]
    if {"-h", "--help"} & set(others):
        return run_tethered([*sweep, "--help"])[0]
    code, _ = run_tethered([*sweep, "--database", options.database, *others])
    if code > 1:
        return code
    if not Path(options.database).is_file():
        return 1
    results = [str(Path(sys.executable).with_name("ddp-prof")), "results", options.database, "-o", figures]
    return run_tethered(results)[0] or code


if __name__ == "__main__":
    sys.exit(run_program("run_comparison", compare))
