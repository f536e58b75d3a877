#!/usr/bin/env bash
# Takes a picture of a capture in the real Nsight Systems GUI: one step from the middle of the run, the rows of all ranks.
# The communication of rank 0 that backward does not hide is outlined (mark_unhidden.py, which reads the export beside the
# report, or else the report).
#
#   scripts/dev/nsys_screenshot.sh REPORT.nsys-rep -o out.png
#
# The GUI (found by scripts/dev/nsys_ui.sh) runs on a virtual display with its own settings: yours are neither read nor
# changed. Takes about half a minute.
#
# Settings (environment):
#   NSYS_UI    path of the GUI                                    (default: see scripts/dev/nsys_ui.sh)
#   WIDTH      width of the picture in pixels                     (default: 1600)
#   HEIGHT     height of the window; the picture is cut to the rows  (default: 2000)
#   TIMEOUT    seconds to wait for the GUI's window and its rows  (default: 120)
#
# Exit: 0 and the picture's path on stdout, 1 and one line about what is missing, 2 for wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
width="${WIDTH:-1600}" height="${HEIGHT:-2000}" timeout="${TIMEOUT:-120}"
# Colours of ranges and of their highlight, and the height of a row.
range_color="#1414ff" highlight_color="#AFFFFF" row=21
# Where the timeline's ruler ends; above it is a link with the colour of ranges.
ruler=105
scratch="" server="" gui=""

say() { echo "nsys_screenshot: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

usage() {
  say "$1"
  say "usage: scripts/dev/nsys_screenshot.sh REPORT.nsys-rep -o out.png"
  exit 2
}

# Ends the GUI's process group, which includes its launcher and crash reporter.
stop_gui() {
  [ -z "$gui" ] || { kill -- "-$gui" && wait "$gui"; } 2>/dev/null || true
  gui=""
}

clean_up() {
  trap '' INT TERM HUP
  stop_gui
  [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null || true
  rm -rf "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

read_arguments() {
  local number
  # Checked before any arithmetic, in which bash would run the command in "x[$(command)]".
  for number in "$width" "$height" "$timeout"; do
    [[ "$number" =~ ^[1-9][0-9]{0,4}$ ]] || usage "WIDTH, HEIGHT, TIMEOUT: not a whole number: ${number@Q}"
  done
  report="" picture=""
  while [ $# -gt 0 ]; do
    case "$1" in
      -o) [ $# -ge 2 ] || usage "-o needs the picture's name" && picture="$2" && shift ;;
      -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 0 ;;
      -*) usage "no such option: $1" ;;
      *) [ -z "$report" ] || usage "one report at a time: $report, $1" && report="$1" ;;
    esac
    shift
  done
  [ -n "$report" ] || usage "which report?"
  [ -n "$picture" ] || usage "where should the picture go? add -o out.png"
  [ -s "$report" ] || fail "$report: no such report, or an empty one: give a .nsys-rep made by nsys profile"
  head -c 4096 "$report" | grep -qa "Profiler Report" ||
    fail "$report: not a report of Nsight Systems: the GUI opens .nsys-rep, not what was exported from it"
  mkdir -p "$(dirname "$picture")" 2>/dev/null || true
  [ -w "$(dirname "$picture")" ] || fail "$(dirname "$picture"): cannot be written to"
}

# The server chooses a free display number.
start_display() {
  Xvfb -displayfd 1 -screen 0 "${width}x${height}x24" -nolisten tcp >"$scratch/display" 2>"$scratch/server.log" &
  server=$!
  wait_until 20 "the virtual display (Xvfb) did not start" test -s "$scratch/display"
  DISPLAY=":$(cat "$scratch/display")"
  export DISPLAY
}

# Answers some questions of a first start: no data is sent.
write_settings() {
  local folder="$scratch/home/.config/NVIDIA Corporation"
  rm -rf "${scratch:?}"/{home,run}
  mkdir -p "$folder" "$scratch/run"
  chmod 700 "$scratch/run"
  printf '%s\n' "[CorePlugin.Privacy]" "CorePlugin.AllowAnalytics=false" "[CorePlugin.Environment]" \
    "CorePlugin.ShowVersionUpdateNotifications=false" >"$folder/NVIDIA Nsight Systems.ini"
}

# With --shared-instance=no; else the GUI would pass the report to one that is open already, and end.
start_gui() {
  # A copy with the same name, which is in the picture; files that the GUI writes beside it are deleted with it.
  cp "$report" "$scratch/$(basename "$report")"
  env HOME="$scratch/home" XDG_CONFIG_HOME="$scratch/home/.config" XDG_RUNTIME_DIR="$scratch/run" XDG_DATA_HOME="$scratch/home/.data" \
    XDG_CACHE_HOME="$scratch/home/.cache" QT_QPA_PLATFORM=xcb LIBGL_ALWAYS_SOFTWARE=1 TMPDIR="$scratch" \
    setsid "$NSYS_UI" --no-splash --shared-instance=no "$scratch/$(basename "$report")" >"$scratch/gui.log" 2>&1 </dev/null &
  gui=$!
}

# is_within SECONDS COMMAND...: whether the command succeeds within this time; it is tried twice a second.
is_within() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || return 1
    [ -z "$gui" ] || kill -0 "$gui" 2>/dev/null || fail "the GUI ended by itself: $(tail -1 "$scratch/gui.log" | cut -c1-200)"
    sleep 0.5
  done
}

# wait_until SECONDS COMPLAINT COMMAND...
wait_until() {
  local seconds="$1" complaint="$2"
  shift 2
  is_within "$seconds" "$@" || fail "$complaint"
}

# Finds the last visible window whose title starts with $1; xdotool's search does not see titles that are not Latin-1.
find_window() {
  local each
  window=""
  while read -r each; do
    [[ "$(xdotool getwindowname "$each" 2>/dev/null)" != "$1"* ]] || window="$each"
  done < <(xdotool search --onlyvisible --name '.*' 2>/dev/null)
  [ -n "$window" ]
}

# The main window's title contains the version, which starts with the year. The dialogs of a first start have none; the one
# that asks whether data may be sent is answered with no.
main_window_is_there() {
  ! find_window "NVIDIA Nsight Systems 20" || return 0
  if find_window "Options Preset"; then
    xdotool windowfocus "$window" key Return
  elif find_window "NVIDIA Nsight Systems"; then
    xdotool windowfocus "$window" key alt+n
  fi
  return 1
}

# Sets box_left, box_top, box_width, box_height to the box that contains all ranges; fails if none are visible.
find_ranges() {
  local box
  box="$(import -silent -window root png:- | convert - -crop "${width}x$((height - ruler))+0+$ruler" +repage \
    -fuzz 12% -fill black +opaque "$range_color" -format '%@' info: 2>/dev/null | tr 'x+' '  ')" || true
  [[ "$box" =~ ^[1-9][0-9]*\ [1-9][0-9]*\ [0-9]+\ [0-9]+$ ]] || return 1
  read -r box_width box_height box_left box_top <<<"$box"
  box_top=$((box_top + ruler))
}

# Whether ranges are visible and do not move for a second.
ranges_are_still() {
  local before
  find_ranges || return 1
  before="$box_left $box_top $box_width $box_height"
  sleep 1
  find_ranges && [ "$before" = "$box_left $box_top $box_width $box_height" ]
}

# Whether a step is fitted to the view: ranges then begin and end near the edges of the timeline.
step_fills_the_view() { ranges_are_still && [ "$box_width" -gt $((width * 3 / 4)) ]; }

# Moves and sizes the window, after the report is read: rows that appear during a change of size stay folded.
arrange_window() {
  local absent="the GUI shows no ranges: is $report a capture of this workload?"
  wait_until "$timeout" "$absent" ranges_are_still
  # The window found before may have been a dialog.
  find_window "NVIDIA Nsight Systems 20" || return 1
  xdotool windowmove "$window" 0 0 windowsize "$window" "$width" "$height" windowfocus "$window" 2>/dev/null || return 1
  wait_until "$timeout" "$absent" ranges_are_still
  xdotool key --delay 100 alt+v Return # View, Show Project Explorer: hides it
  wait_until "$timeout" "$absent" ranges_are_still
}

count_windows() { xdotool search --onlyvisible --name '.*' 2>/dev/null | wc -l; }

a_window_more_than() { [ "$(count_windows)" -gt "$1" ]; }

# Fits the middle step to the view. The topmost range is the rank's whole run, and the row below it holds the steps. The
# context menu of a range has "fit to screen" as its third active entry.
zoom_to_step() {
  local windows
  windows="$(count_windows)"
  xdotool mousemove $((box_left + box_width / 2)) $((box_top + row + row / 2)) sleep 0.5 click 3
  is_within 10 a_window_more_than "$windows" && xdotool sleep 0.5 key --delay 100 Down Down Down Return &&
    is_within 10 step_fills_the_view
}

highlight_is_gone() {
  local shades
  shades="$(import -silent -window root png:- | convert - -crop "${width}x$box_height+0+$box_top" -unique-colors txt:-)"
  [[ "$shades" != *"$highlight_color"* ]]
}

# Removes the highlight of the clicked range by a click on the row of all processes, which has no ranges. If the click hits
# a mark of the highlight instead, another place is tried.
remove_highlight() {
  local part
  for part in 2 3 5 7; do
    xdotool mousemove $((width - width / part)) $((ruler + row)) sleep 0.3 click 1
    xdotool mousemove $((width - 1)) $((height - 1)) # so that no tooltip is shown
    ! is_within 5 highlight_is_gone || return 0
  done
  return 1
}

# Whether run, step and phases of each rank are visible: bands of ranges across the view, each three rows high. A key that
# is sent too early can fold a rank's rows into one.
rows_are_open() {
  import -silent -window root png:- | convert - -crop "${box_width}x$box_height+$box_left+$box_top" +repage -fuzz 12% \
    -fill black +opaque "$range_color" -channel B -separate -scale '1x!' -depth 8 gray:- | od -An -v -tu1 -w1 |
    awk -v least=$((row * 5 / 2)) '
      function close_band() { if (band) { bands++; if (band < least) folded++ } band = 0; gap = 0 }
      $1 > 150 { band += 1 + gap; gap = 0; next }
      { if (++gap > 4) close_band() }
      END { close_band(); exit !(bands && !folded) }'
}

# The picture reaches from the top of the window to the last row with ranges.
take_picture() {
  local trace="${report%.nsys-rep}.sqlite"
  [ -r "$trace" ] || trace="$report"
  import -silent -window root -crop "${width}x$((box_top + box_height + 2 * row))+0+0" +repage "$scratch/picture.png"
  "${VENV:-$root/.venv}/bin/python" "$root/scripts/dev/mark_unhidden.py" "$scratch/picture.png" "$trace" ||
    say "nothing is marked in $picture"
  cp "$scratch/picture.png" "$picture"
}

main() {
  local attempt
  read_arguments "$@"
  scratch="$(mktemp -d)"
  NSYS_UI="$("$root/scripts/dev/nsys_ui.sh")" || exit 1
  start_display
  for attempt in 1 2 3; do
    write_settings
    start_gui
    wait_until "$timeout" "the GUI did not open its window" main_window_is_there
    if arrange_window && zoom_to_step && remove_highlight && step_fills_the_view && rows_are_open; then
      take_picture
      echo "$picture"
      return
    fi
    say "the GUI does not show a step (attempt $attempt of 3)"
    stop_gui
  done
  fail "no picture of $report could be taken: this GUI may work differently from those known here"
}

main "$@"
