#!/usr/bin/env bash
# Takes a picture of a capture in the real Nsight Systems GUI: one step from the middle of the run, the rows of all ranks.
#
#   scripts/dev/nsys_screenshot.sh REPORT.nsys-rep -o out.png
#
# The GUI (see scripts/dev/nsys_ui.sh, which finds it) runs on a display of its own that nobody sees, with settings of its own:
# yours are neither read nor changed. Takes about half a minute.
#
# Settings (environment):
#   NSYS_UI    this GUI and no other                              (default: see scripts/dev/nsys_ui.sh)
#   WIDTH      of the picture in pixels                           (default: 1600)
#   HEIGHT     of the window; the picture is cut to its rows      (default: 2000)
#   TIMEOUT    seconds to wait for the GUI's window and its rows  (default: 120)
#
# Exit: 0 and the picture's path on stdout, 1 and one line that says what is missing, 2 for wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
width="${WIDTH:-1600}" height="${HEIGHT:-2000}" timeout="${TIMEOUT:-120}"
# How ranges without a colour of their own are drawn, and how high a row of them is.
range_color="#1414ff" highlight_color="#AFFFFF" row=21
# Where the timeline's ruler ends; above it a link has the colour of ranges.
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

# It leads a group of its own: its launcher and crash reporter end with it.
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
  # Before anything calculates with them: of "x[$(command)]" bash runs the command, in any arithmetic.
  for number in "$width" "$height" "$timeout"; do
    [[ "$number" =~ ^[1-9][0-9]{0,4}$ ]] || usage "WIDTH, HEIGHT, TIMEOUT: no whole number: ${number@Q}"
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
  [ -n "$picture" ] || usage "where should the picture go? say -o out.png"
  [ -s "$report" ] || fail "$report: no such report, or an empty one: give a .nsys-rep made by nsys profile"
  head -c 4096 "$report" | grep -qa "Profiler Report" ||
    fail "$report: not a report of Nsight Systems: the GUI opens .nsys-rep, not what was exported from it"
  mkdir -p "$(dirname "$picture")" 2>/dev/null || true
  [ -w "$(dirname "$picture")" ] || fail "$(dirname "$picture"): cannot be written to"
}

# A free display number is chosen by the server itself.
start_display() {
  Xvfb -displayfd 1 -screen 0 "${width}x${height}x24" -nolisten tcp >"$scratch/display" 2>"$scratch/server.log" &
  server=$!
  wait_until 20 "the virtual display (Xvfb) did not start" test -s "$scratch/display"
  DISPLAY=":$(cat "$scratch/display")"
  export DISPLAY
}

# The answers to what a first start asks, as far as they do not depend on the version: no data to anybody.
write_settings() {
  local folder="$scratch/home/.config/NVIDIA Corporation"
  rm -rf "${scratch:?}"/{home,run}
  mkdir -p "$folder" "$scratch/run"
  chmod 700 "$scratch/run"
  printf '%s\n' "[CorePlugin.Privacy]" "CorePlugin.AllowAnalytics=false" "[CorePlugin.Environment]" \
    "CorePlugin.ShowVersionUpdateNotifications=false" >"$folder/NVIDIA Nsight Systems.ini"
}

# Without an instance of its own it would hand the report to a GUI that is open already, and end.
start_gui() {
  # The report's name is in the picture; what the GUI writes beside it goes with the copy.
  cp "$report" "$scratch/$(basename "$report")"
  env HOME="$scratch/home" XDG_CONFIG_HOME="$scratch/home/.config" XDG_RUNTIME_DIR="$scratch/run" XDG_DATA_HOME="$scratch/home/.data" \
    XDG_CACHE_HOME="$scratch/home/.cache" QT_QPA_PLATFORM=xcb LIBGL_ALWAYS_SOFTWARE=1 TMPDIR="$scratch" \
    setsid "$NSYS_UI" --no-splash --shared-instance=no "$scratch/$(basename "$report")" >"$scratch/gui.log" 2>&1 </dev/null &
  gui=$!
}

# is_within SECONDS COMMAND...: whether it succeeds by then; it is tried twice a second.
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

# The last window in sight whose title starts with this; xdotool's own search sees no title that is not Latin-1.
find_window() {
  local each
  window=""
  while read -r each; do
    [[ "$(xdotool getwindowname "$each" 2>/dev/null)" != "$1"* ]] || window="$each"
  done < <(xdotool search --onlyvisible --name '.*' 2>/dev/null)
  [ -n "$window" ]
}

# Its title carries the version, which starts with the year; what asks whether data may be sent has none, and is told no.
main_window_is_there() {
  ! find_window "NVIDIA Nsight Systems 20" || return 0
  if find_window "Options Preset"; then
    xdotool windowfocus "$window" key Return
  elif find_window "NVIDIA Nsight Systems"; then
    xdotool windowfocus "$window" key alt+n
  fi
  return 1
}

# Where ranges are drawn: sets box_left, box_top, box_width, box_height; fails where none are in sight.
find_ranges() {
  local box
  box="$(import -silent -window root png:- | convert - -crop "${width}x$((height - ruler))+0+$ruler" +repage \
    -fuzz 12% -fill black +opaque "$range_color" -format '%@' info: 2>/dev/null | tr 'x+' '  ')" || true
  [[ "$box" =~ ^[1-9][0-9]*\ [1-9][0-9]*\ [0-9]+\ [0-9]+$ ]] || return 1
  read -r box_width box_height box_left box_top <<<"$box"
  box_top=$((box_top + ruler))
}

# They are in sight and stay where they are for a second.
ranges_are_still() {
  local before
  find_ranges || return 1
  before="$box_left $box_top $box_width $box_height"
  sleep 1
  find_ranges && [ "$before" = "$box_left $box_top $box_width $box_height" ]
}

# A range that fits the screen starts and ends near the edges of the timeline.
step_fills_the_view() { ranges_are_still && [ "$box_width" -gt $((width * 3 / 4)) ]; }

# The report is read before anything is moved: rows that appear during a change of size stay folded.
arrange_window() {
  local absent="the GUI shows no ranges: is $report a capture of this workload?"
  wait_until "$timeout" "$absent" ranges_are_still
  # A dialog that was answered may have had the window's place: it is looked for again.
  find_window "NVIDIA Nsight Systems 20" || return 1
  xdotool windowmove "$window" 0 0 windowsize "$window" "$width" "$height" windowfocus "$window" 2>/dev/null || return 1
  wait_until "$timeout" "$absent" ranges_are_still
  xdotool key --delay 100 alt+v Return # View, Show Project Explorer: hides it
  wait_until "$timeout" "$absent" ranges_are_still
}

count_windows() { xdotool search --onlyvisible --name '.*' 2>/dev/null | wc -l; }

a_window_more_than() { [ "$(count_windows)" -gt "$1" ]; }

# The topmost range is the rank's whole run; the row below holds its steps, of which the middle one is taken. The context
# menu of a range can fit it to the screen: it is the third entry that is not greyed out.
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

# A range that was clicked is highlighted, and all of the timeline with it, until the row of all processes is clicked,
# which holds no ranges; where one of the highlight's own marks is hit instead, another place helps.
remove_highlight() {
  local part
  for part in 2 3 5 7; do
    xdotool mousemove $((width - width / part)) $((ruler + row)) sleep 0.3 click 1
    xdotool mousemove $((width - 1)) $((height - 1)) # away from what would show a tooltip
    ! is_within 5 highlight_is_gone || return 0
  done
  return 1
}

# Whether each rank's run, step and phases are in sight: bands of ranges across the view, each three rows high. A key that
# comes too early can fold a rank's rows into one.
rows_are_open() {
  import -silent -window root png:- | convert - -crop "${box_width}x$box_height+$box_left+$box_top" +repage -fuzz 12% \
    -fill black +opaque "$range_color" -channel B -separate -scale '1x!' -depth 8 gray:- | od -An -v -tu1 -w1 |
    awk -v least=$((row * 5 / 2)) '
      function close_band() { if (band) { bands++; if (band < least) folded++ } band = 0; gap = 0 }
      $1 > 150 { band += 1 + gap; gap = 0; next }
      { if (++gap > 4) close_band() }
      END { close_band(); exit !(bands && !folded) }'
}

# From the top of the window to the last row with ranges.
take_picture() {
  import -silent -window root -crop "${width}x$((box_top + box_height + 2 * row))+0+0" +repage "$scratch/picture.png"
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
