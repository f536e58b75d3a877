#!/usr/bin/env bash
# How far off are the predictions of 'ddp-prof whatif'? Each bucket size is measured, and predicted from each other one.
#
#   scripts/validate_whatif.sh [--link gloo|sleep] [--rounds N] [--steps N] [-o FILE]
#
# Two ranks, whose compute sleeps, reduce gradients by gloo, one collective at a time; with --link sleep transfers sleep,
# too, in a thread of one process. Settings take turns, step by step. It prints a matrix of predicted over measured step times, and
# the errors of the prediction, of "nothing changes", and of the closed form of the CS336 course, beside the spread from
# run to run. It takes about three minutes.
#
# Settings (environment): those of scripts/env.sh (VENV, PYTHON).
#
# Exit: 0 when all was measured; 2 wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -x "${VENV:-$root/.venv}/bin/python" ] || "$root/scripts/env.sh" train
exec "${VENV:-$root/.venv}/bin/python" "$root/scripts/validate_whatif.py" "$@"
