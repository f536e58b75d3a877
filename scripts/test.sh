#!/usr/bin/env bash
# Sets up what is missing (environment, nsys, Chromium) and runs every check; real nsys captures are among them, and
# nothing is skipped for want of a program.
#
#   scripts/test.sh [arguments of pytest]         the whole gate
#   scripts/test.sh fast [arguments of pytest]    under a minute: without torch, nsys, Chromium and what takes long
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="${VENV:-$root/.venv}/bin"
cd "$root"

# Two processes, each test file in one of them; those with slow tests first.
side_by_side=(-n 2 --dist loadfile --no-loadscope-reorder)

check_sources() {
  "$bin/ruff" check ddp_prof tests scripts
  "$bin/ruff" format --check ddp_prof tests scripts
  "$bin/mypy"
  "$bin/lint-imports" --no-cache --no-logo
}

if [ "${1:-}" = fast ]; then
  shift
  CHROMIUM=0 scripts/env.sh read dev
  check_sources
  # What needs torch as a whole is not even imported: that takes seconds.
  exec "$bin/pytest" -q "${side_by_side[@]}" -m "not torch and not nsys and not browser and not slow" --ignore tests/annotate --ignore tests/ddp \
    --ignore tests/train "$@"
fi

scripts/env.sh train dev
NSYS="$("$bin/python" -m ddp_prof.capture --nsys)"
export NSYS DDP_PROF_GATE=whole

"$bin/python" --version
"$bin/pip" list 2>/dev/null | grep -E '^(torch|nvtx|numpy|plotly|pytest|ruff|mypy) '
"$NSYS" --version
check_sources
# What records with nsys comes afterwards, in one process: of two nsys that start at once one may fail.
status=0 recording=0
"$bin/pytest" -q "${side_by_side[@]}" -m "not nsys" "$@" || status=$?
"$bin/pytest" -q -m nsys "$@" || recording=$?
# 5: no test of that kind was asked for
if [ "$status" -eq 0 ] || { [ "$status" -eq 5 ] && [ "$recording" -ne 5 ]; }; then
  [ "$recording" -eq 5 ] || status=$recording
fi
exit "$status"
