#!/usr/bin/env bash
# The benchmark suite in one command: sets up what is missing, runs every variant in every setting several times, then
# writes table, CSV, figures and analysis.
#
#   scripts/run_comparison.sh [arguments of python -m ddp_prof.benchmark.sweep, as --seq-lens 128 256 --repeats 5]
#
# What is in the database already is not run again, unless --force: started again, an interrupted sweep goes on where it
# stopped. Without arguments: on two GPUs the published study's grid with the xl model (a matter of hours), else a small
# one that two CPU cores finish in some minutes.
#
# Settings (environment):
#   RESULTS_DB    the results database; results.csv goes beside it     (default: traces/local/results.db in the checkout)
#   FIGURES_DIR   where figures and the written analysis go            (default: figures/local in the checkout)
#   MASTER_PORT   where the ranks of a run meet, on MASTER_ADDR              (default: at a file)
# and those of scripts/env.sh (VENV, PYTHON, CHROMIUM).
#
# Exit: 0 when all is there, save runs that were out of memory; 1 when a run or something else failed; 2 wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
database="${RESULTS_DB:-$root/traces/local/results.db}"
figures="${FIGURES_DIR:-$root/figures/local}"
venv="${VENV:-$root/.venv}"
child=""

# The sweep ends its ranks itself, when it is told to end: by SIGTERM, as bash has what runs in the background ignore
# SIGINT until it says otherwise.
clean_up() {
  trap '' INT TERM HUP
  [ -z "$child" ] || { kill -TERM "$child" && wait "$child"; } 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

read_arguments() {
  local argument
  for argument in "$@"; do
    case "$argument" in
      -h | --help) "$root/scripts/env.sh" train && exec "$venv/bin/python" -m ddp_prof.benchmark.sweep --help ;;
      --database | --database=*) echo "run_comparison: instead of --database say RESULTS_DB=PATH" >&2 && exit 2 ;;
    esac
  done
}

# In the background, so that a signal reaches the traps above at once. It ends with this script, however that ends.
sweep() {
  DDP_PROF_LAUNCHER=$$ "$venv/bin/python" -m ddp_prof.benchmark.sweep --database "$database" "$@" &
  child=$!
  wait "$child"
}

main() {
  local status=0
  read_arguments "$@"
  "$root/scripts/env.sh" train
  sweep "$@" || status=$?
  child=""
  [ "$status" -le 1 ] || exit "$status"
  [ -s "$database" ] || exit 1
  "$venv/bin/ddp-prof" results "$database" -o "$figures" || status=1
  exit "$status"
}

main "$@"
