#!/usr/bin/env bash
# Rebuilds everything in figures/ from traces/: the report with a picture of each run; pictures of naive beside bucketed, of
# a step's collectives, of the waterfall, of the benchmark suite and of timeline pages; an animation of a page; screenshots
# of naive and overlap in the profiler's GUI. Nothing in figures/ is made by hand.
#
#   scripts/dev/make_figures.sh
#
# Settings (environment):
#   TRACES_DIR    where the captures are                               (default: traces in the checkout)
#   FIGURES_DIR   where the figures go                                 (default: figures in the checkout)
#   SCREENSHOTS   0: no screenshots of the profiler's GUI              (default: 1)
# and those of scripts/env.sh (VENV, PYTHON, CHROMIUM) and scripts/dev/nsys_screenshot.sh (NSYS_UI, WIDTH, TIMEOUT).
#
# Exit: 0 when all was made, except screenshots if the GUI does not run; 1 when something else could not be made.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
traces="${TRACES_DIR:-$root/traces}"
figures="${FIGURES_DIR:-$root/figures}"
ddp_prof="${VENV:-$root/.venv}/bin/ddp-prof"
failed=0

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

say() { echo "make_figures: $*" >&2; }

make() {
  echo "$1"
  shift
  "$@" >/dev/null || failed=1
}

make_pair() {
  local naive="$traces/naive.sqlite" bucketed="$traces/bucketed_10mb.sqlite" name="$figures/naive_and_bucketed"
  ! have "naive beside bucketed" "$naive" "$bucketed" ||
    make "naive beside bucketed" "$ddp_prof" timeline "$naive" "$bucketed" -o "$name.html" --png "$name.png"
}

# have WHAT CAPTURE...: whether the captures are there; if not, says what is not made.
have() {
  local what="$1" capture
  shift
  for capture in "$@"; do
    [ -r "$capture" ] || { say "no picture of $what: that takes $*" && return 1; }
  done
}

make_why() {
  local bucketed="$traces/bucketed_10mb.sqlite"
  ! have "a step's collectives" "$bucketed" ||
    make "a step's collectives" "$ddp_prof" collectives "$bucketed" --by bucket --png "$figures/collectives.png"
  ! have "the waterfall" "$traces/naive.sqlite" "$bucketed" ||
    make "waterfall" "$ddp_prof" compare "$traces" --waterfall --png "$figures/waterfall.png"
  local gpu=("$traces"/h200/gloo/bucketed_10mb.rank{0,1}.json.gz)
  have "a step on a GPU" "${gpu[@]}" || return 0
  make "collectives on a GPU" "$ddp_prof" collectives "${gpu[@]}" --by step --png "$figures/gpu_collectives.png"
  make "timeline on a GPU" "$ddp_prof" timeline "${gpu[@]}" -o "$figures/gpu_timeline.html" --png "$figures/gpu_timeline.png"
}

make_results() {
  local results="$traces/results.db"
  ! have "the benchmark suite" "$results" || make "benchmark suite" "$ddp_prof" results "$results" -o "$figures"
}

# Screenshots of timeline pages in a browser: of each of these captures, and of both together.
make_pages() {
  local browser naive="$traces/naive.sqlite" overlap="$traces/overlap.sqlite"
  have "pages" "$naive" "$overlap" || return 0
  if ! browser="$(command -v chromium || command -v google-chrome || command -v chromium-headless-shell)"; then
    say "no pictures of pages: that takes Chromium"
    return
  fi
  make_page page_naive "$naive"
  make_page page_overlap "$overlap"
  make_page page_naive_and_overlap "$naive" "$overlap"
  make "animation" "${VENV:-$root/.venv}/bin/python" "$root/scripts/dev/make_animation.py" "$overlap" "$figures/animation.png"
}

make_page() {
  local page="$figures/$1.html" picture="$figures/$1.png"
  shift
  make "page of $*" "$ddp_prof" timeline "$@" -o "$page"
  "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --disable-background-networking \
    --user-data-dir="$scratch" --window-size=1400,800 --virtual-time-budget=8000 --screenshot="$picture" \
    "file://$page" >/dev/null 2>&1 || failed=1
}

make_screenshots() {
  local gui variant report
  [ "${SCREENSHOTS:-1}" = 1 ] || return 0
  if ! gui="$("$root/scripts/dev/nsys_ui.sh")"; then
    say "the profiler's own screenshots are left out, the GUI does not run here"
    return
  fi
  for variant in naive overlap; do
    report="$traces/$variant.nsys-rep"
    if [ ! -r "$report" ]; then
      say "no screenshot of $variant: that takes $report"
      continue
    fi
    echo "screenshot of $variant"
    NSYS_UI="$gui" "$root/scripts/dev/nsys_screenshot.sh" "$report" -o "$figures/nsys_$variant.png" >/dev/null ||
      say "the screenshot of $variant is left out"
  done
}

main() {
  [ -x "$ddp_prof" ] || "$root/scripts/env.sh" read
  make "report" "$ddp_prof" report "$traces" -o "$figures"
  make_pair
  make_why
  make_results
  make_pages
  make_screenshots
  [ "$failed" = 0 ] || say "not all could be made, see above"
  return "$failed"
}

main "$@"
