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
# Exit: 0 when every capture is there, 1 when one failed (the others are captured nevertheless), 2 for wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$root/scripts/common.sh"
traces="${TRACES_DIR:-$root/traces/local}"
figures="${FIGURES_DIR:-$root/figures/local}"
ddp_prof="${VENV:-$root/.venv}/bin/ddp-prof"
child="" scratch=""
# What is started ends with this script, however that ends.
with_us=()
! setpriv --pdeathsig TERM true 2>/dev/null || with_us=(setpriv --pdeathsig TERM)

say() { echo "profile_all: $*" >&2; }

# clean_up CODE
clean_up() {
  [ -z "$child" ] || { kill -TERM "$child" && wait "$child"; } 2>/dev/null || true
  rm -rf "$scratch"
  [ "$1" -le 128 ] || { echo && say "stopped; what was captured before is kept, and the next run goes on"; }
}
on_exit clean_up

# What takes long runs in the background, and is waited for here, so that a signal reaches the traps at once.
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
  local variant size variants sizes
  read -r -d '' -a variants <<<"${VARIANTS:-$(known_variants)}" || true
  read -r -d '' -a sizes <<<"${BUCKET_SIZES_MB:-1 10 100}" || true
  for variant in "${variants[@]}"; do
    if [ "$variant" = bucketed ]; then
      for size in "${sizes[@]}"; do echo "bucketed --bucket-size-mb $size"; done
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

# A capture says this itself, but what it says is shown when it is done.
say_whether_it_waits() {
  flock -n "$traces" true || echo "profile_variant: waiting for another capture into $traces" | tee -a "$scratch/notes" >&2
}

# What a capture said beside its result: each line once, though every capture says it.
show_notes() {
  grep -vxFf "$scratch/notes" "$scratch/new" >&2 || true
  cat "$scratch/new" >>"$scratch/notes"
}

# Of a capture that was killed nobody else tells.
say_signal() { [ "$1" -le 128 ] || say "this capture was ended by SIG$(kill -l "$(($1 - 128))")"; }

# Captures everything; sets `captured` (names) and `failed` (how many).
capture_all() {
  local captures capture options label number=0 result status
  captured=() failed=0
  mapfile -t captures < <(list_captures)
  [ ${#captures[@]} -gt 0 ] || { say "VARIANTS or BUCKET_SIZES_MB names nothing to capture; there are $(known_variants)" && exit 2; }
  for capture in "${captures[@]}"; do
    number=$((number + 1))
    label="${capture/ --bucket-size-mb /, }"
    [ "$label" = "$capture" ] || label+=" MB"
    read -r -a options <<<"$capture"
    say_whether_it_waits
    echo -n "[$number/${#captures[@]}] $label ... "
    "${with_us[@]}" "$root/scripts/profile_variant.sh" "${options[@]}" >"$scratch/said" 2>"$scratch/new" &
    status=0
    finish || status=$?
    if [ "$status" = 0 ]; then
      result="$(<"$scratch/said")"
      captured+=("${result%%:*}")
      result="${result#*: }"
      echo "${result#captured by * in }"
      show_notes
    else
      failed=$((failed + 1))
      echo "failed"
      cat "$scratch/new" >&2
      say_signal "$status"
      [ "$status" != 2 ] || exit 2 # a setting that no capture can have
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
  "${with_us[@]}" "$ddp_prof" report "$@" -o "$figures" >"$scratch/new" &
  finish || { cat "$scratch/new" && return 1; }
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
  make_scratch profile_all
  : >"$scratch/notes"
  mkdir -p "$traces" "$figures" 2>"$scratch/new" ||
    { say "$(tail -1 "$scratch/new"): set TRACES_DIR and FIGURES_DIR to folders of yours" && exit 1; }
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
    say "$failed of the steps above failed"
    exit 1
  fi
}

main "$@"
