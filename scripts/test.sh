#!/usr/bin/env bash
# Sets up what is missing (environment, nsys, Chromium) and runs every check; real nsys captures are among them.
#
#   scripts/test.sh [arguments of pytest]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="${VENV:-$root/.venv}/bin"
cd "$root"

scripts/env.sh train dev
NSYS="$(scripts/install_nsys.sh)"
export NSYS

"$bin/python" --version
"$bin/pip" list 2>/dev/null | grep -E '^(torch|nvtx|numpy|plotly|pytest|ruff|mypy) '
"$NSYS" --version

"$bin/ruff" check ddp_prof tests scripts
"$bin/ruff" format --check ddp_prof tests scripts
"$bin/mypy"
"$bin/lint-imports" --no-cache --no-logo
"$bin/pytest" -q "$@"
