#!/usr/bin/env bash
# Builds wheel and sdist, installs the wheel into empty environments and runs the reading side's tests of the sdist
# against it; then looks for known weaknesses of what came along (pip-audit) and compares the licences with
# docs/licences.md, which --write makes anew.
#
#   scripts/check_supply.sh [--write]
#
# Settings (environment):
#   PYTHONS   the Pythons to try, each a command          (default: those of python3.10 to python3.14 on PATH)
#   PYTHON    the one that builds                         (default: python3)
#   AUDIT     0: do not ask for known weaknesses, as where the package index does not answer such questions  (default: 1)
#
# Exit: 0 when all holds; 1 when something does not.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
list="$root/docs/licences.md"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

say() { echo "check_supply: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

# The tests of what needs neither torch nor nsys nor Chromium, and no tool that looks at the sources.
tests=(-m "not torch and not nsys and not browser and not slow" --ignore tests/ddp --ignore tests/train --ignore tests/scripts
  --ignore tests/browser --ignore tests/test_architecture.py --ignore tests/test_docs.py)

build() {
  "${PYTHON:-python3}" -m venv "$work/tools"
  "$work/tools/bin/pip" -q install build pip-audit pip-licenses
  "$work/tools/bin/python" -m build -o "$work" "$root" >"$work/log" 2>&1 || fail "$(tail -1 "$work/log")"
  tar -xzf "$work"/*.tar.gz -C "$work"
  mv "$work"/ddp_prof-*/ "$work/sources"
  rm -r "$work/sources/ddp_prof" # what is tested is what is installed
}

# What git knows of the package is in the wheel: templates, scripts and style sheets of the pages, too.
check_data() {
  "$work/tools/bin/python" -m zipfile -l "$work"/*.whl | grep -o '^ddp_prof/[^ ]*' | LC_ALL=C sort >"$work/inside"
  git -C "$root" ls-files ddp_prof | LC_ALL=C sort | diff - "$work/inside" >&2 || fail "the wheel holds other files than git"
}

# Strictly: what the index does not answer for is no pass.
audit() {
  local packages
  packages="$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
  "$work/tools/bin/pip-audit" --strict --progress-spinner off --path "$packages" >"$work/audit" 2>&1 ||
    fail "pip-audit: $(tail -1 "$work/audit") [AUDIT=0 leaves it out]"
}

try() {
  local environment="$work/$1"
  "$2" -m venv "$environment"
  "$environment/bin/pip" -q install "$work"/*.whl
  [ "${AUDIT:-1}" = 0 ] || audit "$environment"
  # A licence that is given as a text begins with its name.
  "$work/tools/bin/pip-licenses" --python "$environment/bin/python" --format markdown --with-urls --no-version \
    --ignore-packages pip setuptools ddp-prof | grep -v '^| *|' | tr -s ' -' >"$work/licences"
  "$environment/bin/pip" -q install pytest hypothesis
  (cd "$work/sources" && "$environment/bin/pytest" -q -p no:cacheprovider "${tests[@]}" | tail -1)
}

licences() { printf '# Licences\n\nOf all that the reading side installs on the newest Python tried, as its packages tell;\nmade by `scripts/check_supply.sh --write`.\n\n%s\n' "$(<"$work/licences")"; }

main() {
  local python pythons number
  read -r -a pythons <<<"${PYTHONS:-$(for number in 10 11 12 13 14; do command -v "python3.$number" || true; done | tr '\n' ' ')}"
  [ "${#pythons[@]}" -gt 0 ] || fail "no Python to try: say PYTHONS"
  build
  check_data
  for python in "${pythons[@]}"; do
    number="$("$python" -c 'import platform; print(platform.python_version())')"
    say "$number: $(try "$number" "$python")"
  done
  if [ "${1:-}" = --write ]; then licences >"$list"; fi
  licences | diff "$list" - >&2 || fail "other licences than docs/licences.md has: see them, then run this with --write"
}

main "$@"
