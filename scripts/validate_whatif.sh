#!/usr/bin/env bash
# How far off are the predictions of 'ddp-prof whatif'? Each bucket size is measured, and predicted from each other one.
#
#   scripts/validate_whatif.sh [--link gloo|sleep] [--rounds N] [--steps N] [-o FILE]
#   scripts/validate_whatif.sh --table FILE [--model xl]
#
# Two ranks, whose compute sleeps, reduce gradients by gloo, one collective at a time; then transfers sleep, too, in a
# thread of one process. Settings take turns, step by step. It prints matrices of predicted over measured step times, and
# the errors of the prediction, of "nothing changes", and of the closed form of the CS336 course, beside the spread from
# run to run. It takes about four minutes, best on a machine that does nothing else. This makes the tables of docs/what_if.md:
#
#   scripts/validate_whatif.sh -o figures/what_if.txt && python -m cogapp -r -I scripts/dev docs/what_if.md
#
# With --table, bucket sizes of a table of step times (columns: scripts/whatif_table.py) are predicted and compared.
#
# Settings (environment): those of scripts/env.sh (VENV, PYTHON).
#
# Exit: 0 when all was measured; 2 wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/env.sh" train
exec "${VENV:-$root/.venv}/bin/python" "$root/scripts/validate_whatif.py" "$@"
