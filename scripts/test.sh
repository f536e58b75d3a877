#!/usr/bin/env bash
# Sets up what is missing (environment, nsys, Chromium) and runs every check, real nsys captures too; no test is skipped
# because a program is missing.
#
#   scripts/test.sh [arguments of pytest]         the whole gate
#   scripts/test.sh fast [arguments of pytest]    about a minute: without torch, nsys, Chromium and slow tests
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="${VENV:-$root/.venv}/bin"
cd "$root"

# Whole test files are distributed over several processes: tests of a file share its ranks, captures or pages. A process that
# is free takes the next file; those that wait longest come first (tests/conftest.py).
side_by_side=(--dist loadfile --no-loadscope-reorder -n)
control_groups="${CONTROL_GROUPS:-/sys/fs/cgroup}"

# cores: how many cores there are; in a container no more than it may use in the mean, such as docker run --cpus 2.
cores() {
  local found allowed quota=max period cpu="$control_groups/cpu"
  found="$(nproc)"
  { read -r quota period <"$cpu.max"; } 2>/dev/null || true
  { read -r quota <"$cpu/cpu.cfs_quota_us" && read -r period <"$cpu/cpu.cfs_period_us"; } 2>/dev/null || true
  if [[ "$quota" =~ ^[0-9]+$ ]]; then
    allowed=$(((quota + period - 1) / period))
    found=$((allowed < found ? allowed : found))
  fi
  echo "$found"
}

# memory_mib: how much memory is available; in a container no more than its limit. Enough if that is not known.
memory_mib() {
  local found file limit
  found="$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo 2>/dev/null || true)"
  found="${found:-1000000}"
  for file in "$control_groups/memory.max" "$control_groups/memory/memory.limit_in_bytes"; do
    limit=max
    { read -r limit <"$file"; } 2>/dev/null || true
    [[ ! "$limit" =~ ^[0-9]+$ ]] || found=$((limit / 1048576 < found ? limit / 1048576 : found))
  done
  echo "$found"
}

# at_most PROCESSES: so many processes, or as many as memory allows: with its ranks and browsers one takes up to 1.5 GB.
at_most() {
  local fit=$(($(memory_mib) / 1500))
  fit=$((fit > 1 ? fit : 1))
  echo $((fit < $1 ? fit : $1))
}

# Several test processes share the cores: threads of torch and NumPy that wait for one another would spin in the others' time.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"

# Without bytecode files, each program that a test starts would compile the package again.
unset PYTHONDONTWRITEBYTECODE

# Those of the shell are for other programs: the environment has all that is needed.
unset PYTHONHOME PYTHONPATH PYTHONOPTIMIZE PYTHONWARNINGS

# What mypy, tsc and Hypothesis know of unchanged files, and compiled tests, stay in the environment, so a second clone has
# them, too.
kept="${VENV:-$root/.venv}/checked"
export HYPOTHESIS_STORAGE_DIRECTORY="$kept/hypothesis"

# types_of_javascript: checks the JSDoc types of the pages' scripts, by the TypeScript that scripts/env.sh has fetched.
types_of_javascript() {
  if [ -e node_modules/typescript/bin/tsc ]; then
    "$bin/node" node_modules/typescript/bin/tsc --project . --incremental --tsBuildInfoFile "$kept/tsc.json"
  elif [ "${DDP_PROF_GATE:-}" = whole ]; then
    echo "test: there is no TypeScript to check the types of JavaScript: see what scripts/env.sh says" >&2
    return 1
  else
    echo "tsc: not run, because npm could not fetch TypeScript"
  fi
}

# check PROCESSES ARGUMENTS...: runs the linters while bytecode is written, then pytest and mypy at the same time (mypy takes
# 20 s the first time). The output of mypy comes last. It knows the types of torch, and of the numpy for Python 3.11 and later.
check() {
  local status=0
  "$bin/python" scripts/dev/compile_tests.py "$kept/tests" &
  "$bin/ruff" check ddp_prof tests scripts
  "$bin/ruff" format --check ddp_prof tests scripts
  "$bin/lint-imports" --no-cache --no-logo
  types_of_javascript
  wait
  types="$(mktemp)"
  if "$bin/python" -c 'import sys; from importlib.util import find_spec as find
sys.exit(sys.version_info < (3, 11) or not find("torch"))'; then
    "$bin/mypy" --cache-dir "$kept/mypy" >"$types" 2>&1 &
  else
    echo "mypy: not run, because it needs torch and Python 3.11" >"$types" &
  fi
  typing=$!
  trap 'kill "$typing" 2>/dev/null || true; rm -f "$types"' EXIT
  "$bin/pytest" -q "${side_by_side[@]}" "$@" || status=$?
  wait "$typing" || [ "$status" -ne 0 ] || status=1
  cat "$types"
  exit "$status"
}

cores="$(cores)"
if [ "${1:-}" = fast ]; then
  shift
  CHROMIUM=0 scripts/env.sh read dev
  # Folders without a test for this run are not imported, which would take seconds.
  check "$(at_most "$((cores < 8 ? cores : 8))")" -m "not torch and not nsys and not browser and not slow" \
    --ignore tests/annotate --ignore tests/browser --ignore tests/ddp --ignore tests/scripts --ignore tests/train "$@"
fi

# If there is no nsys, it is fetched while pip installs; if that fails, the call of --nsys below prints the reason.
if ! python3 -c 'import sys; from ddp_prof.ingest.nsys_program import find_nsys; sys.exit(not find_nsys())' 2>/dev/null; then
  scripts/install_nsys.sh >/dev/null &
  fetching=$!
  trap 'kill "$fetching" 2>/dev/null || true' EXIT
fi
scripts/env.sh train dev
[ -z "${fetching:-}" ] || wait "$fetching" || true
NSYS="$("$bin/python" -m ddp_prof.capture --nsys)"
export NSYS DDP_PROF_GATE=whole

"$bin/python" --version
"$bin/python" -c 'from importlib.metadata import version
for name in ("mypy", "numpy", "nvtx", "plotly", "pytest", "ruff", "torch"): print(f"{name:<7} {version(name)}")'
"$NSYS" --version
# Tests spend much time waiting for ranks, browsers or nsys: one process more than cores keeps the cores busy (each takes 10 s
# to begin).
check "$(at_most "$((cores < 7 ? cores + 1 : 8))")" "$@"
