#!/usr/bin/env bash
# From a clean clone to the comparison: sets up what is missing, captures every variant, draws every timeline.
#
#   bash profile_all.sh
#
# What is done already is not done again, unless FORCE=1. On a machine without a GPU the ranks are processes on the CPU
# (gloo); where each rank has a GPU they run there (NCCL).
#
# Settings (environment):
#   VARIANTS          which ones, in this order               (default: all of ddp_prof/variants.py)
#   BUCKET_SIZES_MB   bucketed is captured with each of these (default: 1 10 100)
#   TRACES_DIR        where the captures go                   (default: traces/local in the checkout, which git ignores)
#   FIGURES_DIR       where the timelines go                  (default: figures/local in the checkout, likewise)
#   FORCE             1: capture again                        (default: 0)
# and those of scripts/profile_variant.sh, of which the most useful are
#   MODEL_SIZE (tiny mini small medium large xl 2.7B)  BATCH_SIZE  SEQ_LEN  STEPS  WARMUP  NGPU  DEVICE  BACKEND
#   RANKS_PER_GPU  PROFILER  NSYS
# of scripts/env.sh (PYTHON, VENV, CHROMIUM) and of scripts/install_nsys.sh (NSYS_PREFIX, NSYS_FETCH).
#
# Exit: 0 when every capture is there, 1 when one failed (the others are captured nevertheless).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
traces="${TRACES_DIR:-$root/traces/local}"
figures="${FIGURES_DIR:-$root/figures/local}"
ddp_prof="${VENV:-$root/.venv}/bin/ddp-prof"
notes="$(mktemp)"
child=""
# What is started ends with this script, however that ends.
with_us=()
! setpriv --pdeathsig TERM true 2>/dev/null || with_us=(setpriv --pdeathsig TERM)

# stop CODE
stop() {
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
  [ -z "$child" ] || wait "$child" || true
  echo
  echo "profile_all: stopped; what was captured before is kept, and the next run goes on" >&2
  exit "$1"
}
trap 'rm -f "$notes" "$notes.new" "$notes.said"' EXIT
trap 'stop 130' INT
trap 'stop 143' TERM HUP

# What takes long runs in the background, and is waited for here, so that a signal reaches the traps above at once.
finish() {
  local status=0
  child=$!
  wait "$child" 2>/dev/null || status=$?
  child=""
  return "$status"
}

known_variants() { "${VENV:-$root/.venv}/bin/python" -c "from ddp_prof.variants import VARIANTS; print(*VARIANTS)"; }

# One line for each capture: the variant and its options.
list_captures() {
  local variant size
  for variant in ${VARIANTS:-$(known_variants)}; do
    if [ "$variant" = bucketed ]; then
      for size in ${BUCKET_SIZES_MB:-1 10 100}; do echo "bucketed --bucket-size-mb $size"; done
    else
      echo "$variant"
    fi
  done
}

# Without nsys torch.profiler does; what was said about it is said once.
find_nsys() {
  if [ "${PROFILER:-auto}" = auto ] && ! NSYS="$("$root/scripts/install_nsys.sh")"; then
    export PROFILER=kineto
  elif [ -n "${NSYS:-}" ]; then
    export NSYS
  fi
}

# What a capture said beside its result: each line once, though every capture says it.
show_notes() {
  grep -vxFf "$notes" "$notes.new" >&2 || true
  cat "$notes.new" >>"$notes"
}

# Of a capture that was killed nobody else tells.
say_signal() { [ "$1" -le 128 ] || echo "profile_all: this capture was ended by SIG$(kill -l "$(($1 - 128))")" >&2; }

# Captures everything; sets `captured` (names) and `failed` (how many).
capture_all() {
  local captures options label number=0 result status
  captured=() failed=0
  mapfile -t captures < <(list_captures)
  for options in "${captures[@]}"; do
    number=$((number + 1))
    label="${options/ --bucket-size-mb /, }"
    [ "$label" = "$options" ] || label+=" MB"
    echo -n "[$number/${#captures[@]}] $label ... "
    # shellcheck disable=SC2086  # a variant and its options
    "${with_us[@]}" "$root/scripts/profile_variant.sh" $options >"$notes.said" 2>"$notes.new" &
    status=0
    finish || status=$?
    if [ "$status" = 0 ]; then
      result="$(<"$notes.said")"
      captured+=("${result%%:*}")
      result="${result#*: }"
      echo "${result#captured by * in }"
      show_notes
    else
      failed=$((failed + 1))
      echo "failed"
      cat "$notes.new" >&2
      say_signal "$status"
    fi
  done
}

# The files of captures; torch.profiler leaves one a rank.
list_traces() {
  local name
  for name in "$@"; do
    compgen -G "$traces/$name.sqlite" || compgen -G "$traces/$name.rank*.json.gz" | sort -V
  done
}

# Draws what is older than a trace or than the code that draws.
draw() {
  if [ "${FORCE:-0}" != 1 ] && [ -e "$figures/index.html" ] &&
    [ -z "$(find "$@" "$root/ddp_prof" -type f ! -name '*.pyc' -newer "$figures/index.html" -print -quit)" ]; then
    return
  fi
  echo "drawing the timelines"
  "${with_us[@]}" "$ddp_prof" report "$@" -o "$figures" >"$notes.new" &
  finish || { cat "$notes.new" && return 1; }
}

print_next() {
  local example="${captured[0]}" files
  [[ " ${captured[*]} " != *" overlap "* ]] || example=overlap
  files="$(list_traces "$example" | tr '\n' ' ')"
  cat <<END

Next, after "source ${VENV:-.venv}/bin/activate":
  open $figures/index.html
  ddp-prof overlap ${files}--steps
  ddp-prof timeline ${files}-o timeline.html
END
}

main() {
  local captures
  cd "$root"
  # Paths that are shown are shown as one would type them here.
  traces="${traces#"$root"/}" figures="${figures#"$root"/}"
  export TRACES_DIR="$traces"
  "${with_us[@]}" "$root/scripts/env.sh" train
  find_nsys
  capture_all
  [ ${#captured[@]} -gt 0 ] || exit 1
  mapfile -t captures < <(list_traces "${captured[@]}")
  draw "${captures[@]}" || failed=$((failed + 1))
  echo
  "${with_us[@]}" "$ddp_prof" compare "${captures[@]}" &
  finish
  print_next
  if [ "$failed" -gt 0 ]; then
    echo "profile_all: $failed of the steps above failed" >&2
    exit 1
  fi
}

main "$@"
