#!/usr/bin/env bash
# Reads damaged captures (changed bytes, tables and values) and reports every result that is neither a trace nor one clear
# error: tracebacks, crashes, hangs, changed input, traces whose columns contradict each other.
#
#   scripts/dev/fuzz.sh [--minutes N] [--reader nsys|kineto] [--seed N [--once]]
#
# See --help for the options. Settings: those of scripts/env.sh (VENV, PYTHON).
#
# Exit: 0 when nothing was found, 1 when something was, 2 for wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
CHROMIUM=0 bash "$root/scripts/env.sh" read
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${VENV:-$root/.venv}/bin/python" "$root/scripts/dev/fuzz.py" "$@"
