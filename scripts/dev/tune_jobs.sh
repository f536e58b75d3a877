#!/usr/bin/env bash
# Tunes real jobs of gloo ranks: six with a planted cause, each with six tries and at most eight rounds, and five whose
# tries change nothing. Says what was measured of each try beside what is planted. Takes half an hour on two cores, which
# should have nothing else to do.
#
#   scripts/dev/tune_jobs.sh [arguments of pytest]      for example -k first
#
# Settings (environment): those of scripts/env.sh (VENV, PYTHON).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CHROMIUM=0 bash scripts/env.sh train dev
exec "${VENV:-.venv}/bin/python" -m pytest -v -o timeout=0 -o log_cli=true -o log_cli_level=INFO \
  -o log_cli_format='%(message)s' -m alone tests/tune/test_planted_causes.py "$@"
