#!/usr/bin/env bash
# Prints the path of the Nsight Systems GUI (nsys-ui) on stdout, if everything is there to run it without a screen: a virtual
# display, tools that control it, and libraries that the GUI needs. As root on Debian and its derivatives it installs what
# is missing. Messages go to stderr.
#
#   gui="$(scripts/dev/nsys_ui.sh)"
#
# Settings (environment):
#   NSYS_UI   path of the GUI                    (default: the one on PATH, else beside the nsys that captures use)
#   USR       where the system's libraries are   (default: /usr)
#
# Exit: 0 and the path, or 1 and one line about what is missing.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

say() { echo "nsys_ui: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# Installs packages if possible, else says which ones are missing.
need_packages() {
  local why="$1"
  shift
  may_install || fail "$why: apt-get install $* (as root)"
  say "$why: installing $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -q --no-install-recommends "$@" >"$log" 2>&1 ||
    { apt-get update -q >"$log" 2>&1 && apt-get install -y -q --no-install-recommends "$@" >"$log" 2>&1; } ||
    fail "$* cannot be installed ($(grep -m1 '^E:' "$log" | cut -c1-160)): install them by hand"
}

require_tools() {
  local tool missing=()
  for tool in Xvfb:xvfb xdotool:xdotool import:imagemagick convert:imagemagick setsid:util-linux fc-list:fontconfig; do
    command -v "${tool%%:*}" >/dev/null || [[ " ${missing[*]} " == *" ${tool##*:} "* ]] || missing+=("${tool##*:}")
  done
  [ ${#missing[@]} = 0 ] || need_packages "the GUI cannot be run without a screen" "${missing[@]}"
  [ -n "$(fc-list)" ] || need_packages "there is no font to write with" fonts-dejavu-core
}

find_gui() {
  local nsys place
  if [ -n "${NSYS_UI:-}" ]; then
    [ -x "$NSYS_UI" ] || fail "NSYS_UI=$NSYS_UI does not run: correct it or unset it"
    return
  fi
  if NSYS_UI="$(command -v nsys-ui)"; then
    NSYS_UI="$(readlink -f "$NSYS_UI")"
    return
  fi
  nsys="$("${VENV:-$root/.venv}/bin/python" -m ddp_prof.capture --nsys)" || exit 1
  nsys="$(readlink -f "$nsys")"
  for place in "$(dirname "$nsys")/nsys-ui" "$(dirname "$nsys")"/../{bin,host-linux-*}/nsys-ui; do
    if [ -x "$place" ]; then
      NSYS_UI="$(readlink -f "$place")"
      return
    fi
  done
  fail "no nsys-ui beside $nsys: that package is the command line alone; install the whole of Nsight Systems and set NSYS_UI"
}

# Lists libraries that the GUI needs and neither it nor the system has. Software OpenGL is loaded at run time, so ldd does
# not show it.
list_missing_libraries() {
  local folder usr="${USR:-/usr}"
  folder="$(dirname "$NSYS_UI")"
  find "$folder" -maxdepth 3 \( -name 'nsys-ui.bin' -o -name 'libQt6WebEngineCore.so*' -o -path '*/Plugins/platforms/libqxcb.so' \
    -o -path '*/Plugins/xcbglintegrations/*.so' \) -exec env LD_LIBRARY_PATH="$folder" ldd {} + 2>/dev/null |
    awk '/not found/ { print $1 }' | sort -u
  compgen -G "$usr/lib*/*/dri/swrast_dri.so" >/dev/null || compgen -G "$usr/lib*/dri/swrast_dri.so" >/dev/null ||
    compgen -G "$usr/lib*/*/libgallium*" >/dev/null || echo swrast_dri.so
}

# Prints Debian's package of a library: libxcb-icccm.so.4 is in libxcb-icccm4, libX11.so.6 in libx11-6.
package_of() {
  case "$1" in
    swrast_dri.so) echo libgl1-mesa-dri ;;
    libsmime3.so | libnssutil3.so | libssl3.so) echo libnss3 ;;
    *) sed -E 's/([0-9])\.so\./\1-/; s/\.so\.?//' <<<"${1,,}" ;;
  esac
}

require_libraries() {
  local each missing packages=()
  mapfile -t missing < <(list_missing_libraries)
  [ ${#missing[@]} -gt 0 ] || return 0
  for each in "${missing[@]}"; do packages+=("$(package_of "$each")"); done
  need_packages "the GUI lacks ${missing[*]}" "${packages[@]}"
  mapfile -t missing < <(list_missing_libraries)
  [ ${#missing[@]} = 0 ] || fail "the GUI still lacks ${missing[*]}: install what holds them by hand"
}

main() {
  find_gui
  require_tools
  require_libraries
  echo "$NSYS_UI"
}

main "$@"
