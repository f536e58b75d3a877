#!/usr/bin/env bash
# Makes .venv and installs this package into it, editable, with the versions of constraints.txt.
#
#   scripts/env.sh [read|train|dev]...    read: the reading side and its pictures; train: also torch and nvtx (default);
#                                         dev: test tools, with node; TypeScript goes to node_modules
#
# Uses uv, if installed, which chooses torch's build for the machine's GPU (or for none). Returns at once if nothing has
# changed. As root on Debian it also installs Python's venv module and Chromium, which draws pictures, if missing.
#
# Settings (environment):
#   VENV       the virtual environment                                        (default: .venv in the checkout)
#   PYTHON     the Python to make it with, 3.10 or newer                      (default: the first suitable one on PATH)
#   WHEELS     install offline, only from this folder; packages that the Python already has (such as torch) are used in
#              any version. Fill it, for that Python, by pip download --no-deps --only-binary :all: -d WHEELS
#              --python-version 3.12 hatchling editables ... (and what it lacks of pyproject.toml)   (default: none)
#   CHROMIUM   0: do not install Chromium; pictures are then left out         (default: 1)
#   VERBOSE    1: show the output of pip, uv and apt                          (default: 0)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
stamp="$venv/ddp-prof.stamp"
log="" unfinished=""

say() { echo "env: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

# Further signals are ignored: Ctrl-C and the end of a session reach all processes at once, and twice.
# What apt has begun it finishes.
trap 'trap "" INT TERM HUP; wait; rm -rf "$unfinished" "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Runs a command and shows its output only with VERBOSE=1.
quietly() {
  if [ "${VERBOSE:-0}" = 1 ]; then
    "$@" 2>&1 | tee "$log" >&2
  else
    "$@" >"$log" 2>&1 </dev/null
  fi
}

# The reason of a failure. If a wheel is missing, pip's last line does not name it.
reason() { grep -om1 'No matching distribution found for .*' "$log" || grep -E '^(ERROR|error|E|Error)|× ' "$log" | tail -1 | cut -c1-300 || tail -1 "$log"; }

read_extras() {
  local extra
  extras=(pictures)
  for extra in "${@:-train}"; do
    case "$extra" in
      read) ;;
      train | dev) extras+=("$extra") ;;
      *) fail "no such extra: '$extra'; there are read, train and dev" ;;
    esac
  done
}

# What .venv is made from; the stamp holds this and the extras.
inputs() { echo "$root $(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/package-lock.json" | cksum)"; }

# Succeeds if the environment has all requested extras; else adds the installed extras to the requested ones.
up_to_date() {
  local extra made_from made_with is_missing=0
  [ -x "$venv/bin/python" ] && [ -r "$stamp" ] || return 1
  { read -r made_from && read -r -a made_with; } <"$stamp" || return 1
  for extra in "${extras[@]}"; do
    [[ " ${made_with[*]} " == *" $extra "* ]] || is_missing=1
  done
  for extra in "${made_with[@]}"; do
    [[ " ${extras[*]} " == *" $extra "* ]] || extras+=("$extra")
  done
  [ "$made_from" = "$(inputs)" ] && [ "$is_missing" = 0 ]
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# Offline, prefers a Python that has torch: a folder of wheels rarely holds those gigabytes.
find_python() {
  local candidate
  python=""
  if [ -n "${PYTHON:-}" ]; then
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.10 or newer"
    python="$PYTHON"
    return
  fi
  for candidate in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
    is_new_enough "$candidate" || continue
    [ -n "$python" ] || python="$candidate"
    [ -n "${WHEELS:-}" ] || return 0
    if has_torch "$candidate"; then
      python="$candidate"
      return
    fi
  done
  [ -n "$python" ] || fail "no Python 3.10 or newer on PATH: install one, or set PYTHON=/path/to/python"
}

has_torch() { "$1" -c 'import importlib.util as found, sys; sys.exit(not found.find_spec("torch"))' >/dev/null 2>&1; }

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# Installs Debian packages; fetches the package lists only if they are missing or too old.
apt_install() {
  quietly env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" && return
  quietly apt-get update -q && quietly env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

make_venv() {
  local package
  [ ! -x "$venv/bin/python" ] || return 0
  find_python
  say "making $venv with $("$python" --version)"
  [ -e "$venv" ] || unfinished="$venv"
  if [ -n "${WHEELS:-}" ]; then
    quietly "$python" -m venv --without-pip "$venv" || fail "$venv cannot be made: $(reason)"
    return
  fi
  quietly "$python" -m venv "$venv" && return
  if command -v uv >/dev/null && quietly uv venv --seed --clear --python "$python" "$venv"; then return; fi
  package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  if ! grep -qi ensurepip "$log" && "$python" -c 'import ensurepip' 2>/dev/null; then
    fail "$venv cannot be made: $(reason)"
  fi
  may_install || fail "this Python lacks its venv module: apt-get install $package (as root), or put uv on PATH"
  say "installing $package"
  apt_install "$package" || fail "$package cannot be installed ($(reason)): install it by hand, or put uv on PATH"
  quietly "$python" -m venv "$venv" || fail "$venv cannot be made: $(reason)"
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; }

# pip installs torch's default build, with gigabytes of CUDA; uv knows where the builds without CUDA are.
wants_uv() {
  [[ " ${extras[*]} " == *" train "* ]] && ! has_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null &&
    "$venv/bin/python" -m pip install --dry-run -c "$root/constraints.txt" torch 2>/dev/null |
    grep -E '^Would install.* (nvidia|cuda)-' >/dev/null
}

find_uv() {
  uv="$(command -v uv || true)"
  if [ -z "$uv" ] && wants_uv; then
    say "no GPU here: fetching uv, which finds the torch without CUDA"
    if quietly "$venv/bin/python" -m pip install -c "$root/constraints.txt" uv; then uv="$venv/bin/uv"; fi
  fi
}

# Offline: a .pth file makes the packages of the Python visible, the others come from the folder.
install_offline() {
  local list pth
  list="$(IFS=, && echo "${extras[*]}")"
  say "installing ddp-prof${list:+[$list]} from $WHEELS"
  [ -d "$WHEELS" ] || fail "WHEELS=$WHEELS is no folder: fill one with pip download -d on a machine with a network"
  pth="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_machine.pth"
  "$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' >"$pth"
  quietly "$python" -m pip --python "$venv/bin/python" install --no-index --find-links "$WHEELS" \
    -e "$root${list:+[$list]}" || fail "the wheels do not suffice ($(reason)): add what is missing to $WHEELS"
}

install_package() {
  local target="$root" list compile=--no-compile
  list="$(IFS=, && echo "${extras[*]}")"
  [ -z "$list" ] || target+="[$list]"
  find_uv
  # Build tools can be pinned only by environment variables, whose path must not contain blanks: a relative one.
  cd "$root"
  export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt UV_BUILD_CONSTRAINT=constraints.txt
  say "installing ddp-prof${list:+[$list]} and what it needs (a minute or two)"
  if [ -n "$uv" ]; then
    quietly env UV_TORCH_BACKEND="${UV_TORCH_BACKEND:-auto}" "$uv" pip install --python "$venv/bin/python" \
      -c "$root/constraints.txt" -e "$target" && return
    say "uv cannot install it ($(reason)): going on with pip"
  fi
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || quietly "$venv/bin/python" -m ensurepip ||
    fail "there is no pip in $venv: delete that folder and run this again"
  # As with uv, bytecode is written at the first import: pip would compile 12,000 files, which takes half a minute.
  [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile
  quietly "$venv/bin/python" -m pip install "$compile" -c "$root/constraints.txt" -e "$target" ||
    fail "the installation failed ($(reason)): see all of it with VERBOSE=1 scripts/env.sh"
}

# TypeScript checks the types of the JavaScript of pages: of the version in package-lock.json, by the npm of the extra dev.
install_typescript() {
  [ -x "$venv/bin/npm" ] || return 0
  (cd "$root" && PATH="$venv/bin:$PATH" quietly npm ci --ignore-scripts --no-audit --no-fund) ||
    say "npm cannot fetch TypeScript ($(reason)): the types of JavaScript cannot be checked"
}

# Chromium draws the pictures, and tests open pages in it. Without it everything else works. Of Debian's two, the one without
# windows starts and opens a page in less processor time, so tests have it beside any other.
install_chromium() {
  local browser is_there=0
  for browser in chromium chromium-browser google-chrome google-chrome-stable chrome; do
    ! command -v "$browser" >/dev/null || is_there=1
  done
  for browser in "${BROWSER_PATH:-}" chromium-headless-shell; do
    [ -z "$browser" ] || ! command -v "$browser" >/dev/null || return 0
  done
  [[ " ${extras[*]} " == *" dev "* ]] || [ "$is_there" = 0 ] || return 0
  [ "${CHROMIUM:-1}" = 1 ] || return 0
  if may_install && grep -qx 'ID=debian' /etc/os-release; then
    say "installing Chromium, which draws the pictures"
    ! apt_install chromium-headless-shell fonts-liberation || return 0
    [ "$is_there" = 1 ] || ! apt_install chromium fonts-liberation || return 0
  fi
  [ "$is_there" = 1 ] || say "no Chromium here, so pictures (PNG) are left out: install Chrome or Chromium to have them"
}

main() {
  local began=$SECONDS
  read_extras "$@"
  ! up_to_date || return 0
  exec 9<"$root"
  flock 9
  ! up_to_date || return 0
  {
    log="$(mktemp)"
    [ -z "${WHEELS:-}" ] || find_python
    make_venv
    (log=/dev/null && install_chromium) & # apt works beside pip
    if [ -n "${WHEELS:-}" ]; then install_offline; else install_package; fi
    install_typescript
    wait
  } 9<&- # what apt or pip leave running must not hold the lock
  printf '%s\n%s\n' "$(inputs)" "${extras[*]}" >"$stamp"
  unfinished=""
  say "ready after $((SECONDS - began)) s"
}

main "$@"
