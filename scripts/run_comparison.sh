#!/usr/bin/env bash
# The benchmark suite in one command: sets up what is missing, runs every variant in every setting several times, then
# writes table, CSV, figures and analysis.
#
#   scripts/run_comparison.sh [arguments of python -m ddp_prof.benchmark.sweep, such as --seq-len 128 256 --repeats 5]
#
# The database is traces/local/results.db in the checkout, unless --database names another; results.csv is next to it.
# Runs that are in the database are not repeated, unless --force: an interrupted sweep, started again, continues.
# Without arguments: on two GPUs the grid of the course's study with the xl model (takes hours), else a small one that
# two CPU cores finish in some minutes.
#
# Settings (environment):
#   FIGURES_DIR   where figures and the written analysis go            (default: figures/local in the checkout)
#   MASTER_PORT   where the ranks of a run meet, on MASTER_ADDR              (default: through a file)
# and those of scripts/env.sh (VENV, PYTHON, CHROMIUM).
#
# Exit: 0 when all runs succeeded or were out of memory; 1 when a run or something else failed; 2 wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/env.sh" train
exec "${VENV:-$root/.venv}/bin/python" "$root/scripts/run_comparison.py" "$@"
