#!/usr/bin/env bash
# Compares the analysis with the brute-force oracle on thousands of random runs instead of the gate's dozens; takes some
# minutes.
#
# Settings (environment): those of scripts/env.sh (VENV, PYTHON).
set -euo pipefail
cd "$(dirname "$0")/../.."
CHROMIUM=0 bash scripts/env.sh read dev
HYPOTHESIS_PROFILE=nightly PYTHONPATH="$PWD" exec "${VENV:-.venv}/bin/python" -m pytest -q -o timeout=0 \
  tests/analyze/test_oracle.py tests/analyze/kernels/test_device_use.py "$@"
