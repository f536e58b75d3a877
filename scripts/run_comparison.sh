#!/usr/bin/env bash
# The benchmark suite in one command: sets up what is missing, runs every variant in every setting several times, then
# writes table, CSV, figures and analysis.
#
#   scripts/run_comparison.sh [arguments of python -m ddp_prof.benchmark.sweep, as --seq-len 128 256 --repeats 5]
#
# The database is traces/local/results.db in the checkout, unless --database names another; results.csv goes beside it.
# What is in it already is not run again, unless --force: started again, an interrupted sweep goes on where it stopped.
# Without arguments: on two GPUs the grid of the course's study with the xl model (a matter of hours), else a small one
# that two CPU cores finish in some minutes.
#
# Settings (environment):
#   FIGURES_DIR   where figures and the written analysis go            (default: figures/local in the checkout)
#   MASTER_PORT   where the ranks of a run meet, on MASTER_ADDR              (default: at a file)
# and those of scripts/env.sh (VENV, PYTHON, CHROMIUM).
#
# Exit: 0 when all is there, save runs that were out of memory; 1 when a run or something else failed; 2 wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/env.sh" train
exec "${VENV:-$root/.venv}/bin/python" "$root/scripts/run_comparison.py" "$@"
