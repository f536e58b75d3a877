#!/usr/bin/env bash
# Compares the analysis with the brute-force oracle on thousands of random runs instead of the gate's dozens; takes some
# minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
HYPOTHESIS_PROFILE=nightly PYTHONPATH="$PWD" exec .venv/bin/python -m pytest -q -o timeout=0 \
  tests/analyze/test_oracle.py tests/analyze/kernels/test_device_use.py "$@"
