#!/usr/bin/env bash
# Compares the analysis with the brute-force oracle on 5,000 random runs instead of the gate's 50; takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
HYPOTHESIS_PROFILE=nightly PYTHONPATH="$PWD" exec .venv/bin/python -m pytest -q -o timeout=0 tests/analyze/test_oracle.py "$@"
