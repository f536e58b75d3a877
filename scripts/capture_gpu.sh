#!/usr/bin/env bash
# On a machine with GPUs: checks every variant, captures it in every setup, races bucketed against torch's DDP, measures
# what recording costs, and packs what came of it. Works offline.
#
#   scripts/capture_gpu.sh [--dry-run] [--minutes N] [--wheels FOLDER] [--nsys FILE] [--out FOLDER] [--max-mb MB]
#
#   --dry-run    print every command in order, run none; on any machine
#   --minutes    end this slice of the work after so many minutes     (default: 9)
#   --wheels     make the environment from this folder of wheels, offline, beside the torch that the machine has;
#                relative to the checkout
#   --nsys       an nsys to try beside those that the machine has: an archive of scripts/install_nsys.sh --pack
#   --out        where everything goes; relative to the checkout      (default: gpu_capture)
#   --max-mb     how large a packed file may be                       (default: 16)
#
# The work is done in slices: what does not fit into the minutes is left to the next call of the same command, which goes
# on where this one stopped, by OUT/done. Each slice packs what it made into at most 8 files, OUT.slice1.tar.gz,
# OUT.slice1.2.tar.gz ...; unpacked in another checkout they let the work go on there. The order is
#   1. preflight: what there is, and which recorder records CUDA here
#   2. correctness of every variant on the GPU, against one process (scripts/dev/check_variants.py)
#   3. captures of every variant in every setup, and their tables
#   4. bucketed against torch's DDP, in turns
#   5. what recording costs, in turns
# The setups are
#   gloo     tensors on the GPU, reduced by the host: real copies, real overlap of copies with backward
#   nccl     a rank a GPU; with a single GPU two ranks that take turns on it, of which every table says that it is so
#   single   one rank, for which NCCL has nothing to do: what compute alone takes
#
# Settings (environment):
#   SETUPS            which, in this order                          (default: gloo nccl single)
#   VARIANTS          which                                         (default: all of ddp_prof/variants.py)
#   BUCKET_SIZES_MB   of bucketed                                   (default: 1 10 100)
#   ROUNDS            runs with and without recorder, interleaved   (default: 3; 0: none)
#   DDP_STEPS         steps of each in the race against torch's DDP (default: 40; 0: none)
#   CHECKS            0: leave out the correctness                  (default: 1)
#   GPUS              how many there are                            (default: as many as torch sees; in a dry run 1)
#   BATCH_SIZE        sequences a step, of all ranks together       (default: 2 a rank)
#   LEAST_S           a step is not begun with less seconds left    (default: 60)
#   MOST_S            a step that takes longer has failed, so that what hangs does not take the others' time (default: 240)
#   RETRY             1: do again what failed in an earlier slice   (default: 0)
# and those of scripts/profile_variant.sh (MODEL_SIZE, SEQ_LEN, STEPS: here 3, WARMUP: here 5, NSYS, NSYS_FLAGS,
# QDSTRM_IMPORTER, VENV) and of scripts/install_nsys.sh (NSYS_FETCH).
#
# Exit: 0 when everything is there; 75 when something is left to do: call it again; 1 when the preflight found something
# missing, or a step failed (the others go on) and nothing is left to do; 2 wrong usage.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/scripts/common.sh"
bin="${VENV:-.venv}/bin"
is_dry=0 wheels="" archive="" out="gpu_capture" max_mb=16 minutes=9
model_size="${MODEL_SIZE:-medium}"
least_s="${LEAST_S:-60}" most_s="${MOST_S:-240}"
packing_s=60 # kept for the packing
is_left=0    # whether something is left to the next slice
export CHROMIUM=0 # draws nothing here

trap 'echo && exit 130' INT
trap 'exit 143' TERM HUP

usage() {
  echo "capture_gpu: $*; usage: capture_gpu.sh [--dry-run] [--minutes N] [--wheels FOLDER] [--nsys FILE] [--out FOLDER] [--max-mb MB]" >&2
  exit 2
}

read_arguments() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --dry-run) is_dry=1 ;;
      --minutes | --wheels | --nsys | --out | --max-mb)
        [ $# -gt 1 ] || usage "$1 needs a value"
        case "$1" in
          --minutes) minutes="$2" ;;
          --wheels) wheels="$2" ;;
          --nsys) archive="$2" ;;
          --out) out="$2" ;;
          --max-mb) max_mb="$2" ;;
        esac
        shift
        ;;
      *) usage "no such option: $1" ;;
    esac
    shift
  done
  require_whole --max-mb 1 1000000 "$max_mb"
  require_whole --minutes 3 100000 "$minutes"
}

read_settings() {
  local name
  require_whole GPUS 1 4096
  for name in BATCH_SIZE MOST_S STEPS SEQ_LEN; do require_whole "$name" 1 999999999; done
  for name in ROUNDS DDP_STEPS LEAST_S WARMUP; do require_whole "$name" 0 999999999; done
}

# A command as one would type it in the checkout.
show() {
  printf '+'
  printf ' %q' "$@"
}

# Shows a command, and runs it unless showing is all that is wanted.
run() {
  show "$@" && echo
  [ "$is_dry" = 1 ] || "$@"
}

seconds_left() { echo $((minutes * 60 - packing_s - SECONDS)); }

# How a step ended: ok, failed, or cut (it did not fit into a slice); empty where it was not begun.
state_of() { if [ -e "$out/done/$1" ]; then cat "$out/done/$1"; fi; }

# step NAME FILE COMMAND...: does what was not done before, within the time that is left; FILE takes what it prints, unless
# it is "-". What fails is told and noted, and does not stop the rest. What the end of the slice cuts off has a second try.
step() {
  local name="$1" file="$2" state status=0 left limit
  shift 2
  state="$(state_of "$name")"
  [ "$state" != failed ] || [ "${RETRY:-0}" != 1 ] || state=""
  case "$state" in ok | failed) return 0 ;; esac
  left="$(seconds_left)"
  if [ "$is_dry" = 0 ] && [ "$left" -lt "$least_s" ]; then
    is_left=1
    return 0
  fi
  show "$@"
  if [ "$file" = - ]; then echo; else printf ' > %q\n' "$file"; fi
  [ "$is_dry" = 0 ] || return 0
  mkdir -p "$(dirname "$out/done/$name")"
  limit=$((left < most_s ? left : most_s))
  if [ "$file" = - ]; then
    timeout --foreground --kill-after=20 "$limit" "$@" || status=$?
  else
    mkdir -p "$(dirname "$file")"
    timeout --foreground --kill-after=20 "$limit" "$@" >"$file" || status=$?
  fi
  if [ "$status" = 0 ]; then
    state=ok
  elif { [ "$status" = 124 ] || [ "$status" = 137 ]; } && [ "$state" != cut ] && [ "$limit" -lt "$most_s" ]; then
    state=cut is_left=1
    echo "capture_gpu: left to the next slice: $*" >&2
  else
    state=failed
    echo "capture_gpu: failed: $*" >&2
  fi
  echo "$state" >"$out/done/$name"
}

# Not nvidia-smi, which shows those, too, that CUDA_VISIBLE_DEVICES hides.
count_gpus() {
  gpus="${GPUS:-1}"
  [ -n "${GPUS:-}" ] || [ "$is_dry" = 1 ] || gpus="$("$bin/python" -c "import torch; print(torch.cuda.device_count())")"
}

# Those that this checkout has; any Python will do, since a dry run needs no environment.
list_variants() {
  local python="$bin/python"
  [ -x "$python" ] || python=python3
  variants="${VARIANTS:-$("$python" -c "from ddp_prof.variants import VARIANTS; print(*VARIANTS)")}"
}

# Settings that make a setup, for `env`; sets `ranks`, `batch_size` and `shared`, too.
setup_settings() {
  ranks=$gpus shared=()
  [ "$gpus" -gt 1 ] || ranks=2
  case "$1" in
    nccl) settings=("BACKEND=nccl") ;;
    gloo) settings=("BACKEND=gloo") ;;
    single) ranks=1 settings=("BACKEND=nccl") ;;
    *) usage "SETUPS: no such setup: $1" ;;
  esac
  batch_size="${BATCH_SIZE:-$((2 * ranks))}" # so that a rank computes the same in each setup
  settings+=("NGPU=$ranks" DEVICE=cuda "MODEL_SIZE=$model_size" "BATCH_SIZE=$batch_size" "STEPS=${STEPS:-3}"
    "WARMUP=${WARMUP:-5}")
  [ "$ranks" -le "$gpus" ] || settings+=("RANKS_PER_GPU=$ranks") shared=(--ranks-per-gpu "$ranks")
}

set_up() {
  if [ -n "$wheels" ]; then
    run env "WHEELS=$wheels" scripts/env.sh train
  elif [ ! -x "$bin/python" ]; then
    run scripts/env.sh train
  fi
  # An archive that does not record here leaves those that the machine has.
  [ -z "$archive" ] || run env "NSYS_ARCHIVE=$archive" scripts/install_nsys.sh || true
}

# Done again where the recorder that was found is gone, as on another machine. Cut off, it goes on with the next recorder.
preflight() {
  local nsys status=0
  recorder=(PROFILER=auto)
  nsys="$(sed -n 's/^NSYS=//p' "$out/recorder" 2>/dev/null || true)"
  if [ "$is_dry" = 1 ] || [ ! -s "$out/recorder" ] || { [ -n "$nsys" ] && [ ! -x "$nsys" ]; }; then
    run timeout --foreground --kill-after=20 "$(seconds_left)" python3 scripts/gpu_preflight.py \
      --python "$bin/python" --log "$out/preflight.log" --recorder "$out/recorder" || status=$?
  fi
  [ "$status" != 124 ] || { is_left=1 && finish; }
  [ "$status" = 0 ] || exit 1
  [ "$is_dry" = 1 ] || mapfile -t recorder <"$out/recorder"
}

# Of gloo and NCCL, the last variant first: the sharded ones have the most to lose on a GPU. The settings of a variant
# are those of tests/ddp/cases.py that begin with its name.
check_variants() {
  local setup="$1" variant last_first=""
  [ "${CHECKS:-1}" = 1 ] && [ "$ranks" -gt 1 ] || return 0
  for variant in $variants; do last_first="$variant $last_first"; done
  for variant in $last_first; do
    step "check/$setup/$variant" "$out/tables/$setup/equals_one_process.$variant.txt" "$bin/python" \
      scripts/dev/check_variants.py --device cuda --backend "$setup" "${shared[@]}" --variants "$variant"
  done
}

capture_setup() {
  local setup="$1" variant size
  for variant in $variants; do
    if [ "$variant" = bucketed ]; then
      for size in ${BUCKET_SIZES_MB:-1 10 100}; do capture "$setup" bucketed --bucket-size-mb "$size"; done
    else
      capture "$setup" "$variant"
      [ "$variant" != torch ] || capture "$setup" torch -- --no-communication-hook # DDP as it is: the hook has its price
    fi
  done
}

capture() {
  local setup="$1" name="$2"
  shift
  case "${2:-}" in
    --bucket-size-mb) name+="_$3mb" ;;
    --) name+="${3//-/_}" ;;
  esac
  step "capture/$setup/$name" - env "TRACES_DIR=$out/$setup" "${recorder[@]}" "${settings[@]}" \
    scripts/profile_variant.sh "$@"
}

has_captures() { [ "$is_dry" = 1 ] || compgen -G "$out/$1/*.run.json" >/dev/null; }

# As text and, of what differs by more than its rows, as JSON; once the captures of a setup are all there.
write_tables() {
  local setup="$1" command name
  if ! has_captures "$setup"; then
    echo "capture_gpu: $setup is left out, as none of its captures could be made (see above)" >&2
    return
  fi
  for command in overlap "overlap --steps" compare "compare --waterfall" "collectives --by bucket" skew; do
    name="${command// /_}" name="${name//--/}"
    # shellcheck disable=SC2086  # a command and its options
    step "tables/$setup/$name.txt" "$out/tables/$setup/$name.txt" "$bin/ddp-prof" $command "$out/$setup"
  done
  for command in overlap compare collectives skew; do
    step "tables/$setup/$command.json" "$out/tables/$setup/$command.json" \
      "$bin/ddp-prof" "$command" --format json "$out/$setup"
  done
}

race_ddp() {
  local setup="$1"
  [ "${DDP_STEPS:-40}" -gt 0 ] && [ "$ranks" -gt 1 ] && has_captures "$setup" || return 0
  step "race/$setup" "$out/tables/$setup/against_ddp.txt" "$bin/python" scripts/dev/benchmark.py ddp --device cuda \
    --backend "${settings[0]#BACKEND=}" --world-size "$ranks" "${shared[@]}" --model-size "$model_size" \
    --batch-size "$batch_size" --seq-len "${SEQ_LEN:-128}" --steps "${DDP_STEPS:-40}" --target 1.02
}

# The same run with and without recorder, in turns, so that whatever else the machine does hits both alike.
measure_cost() {
  local setup="$1" round
  [ "${ROUNDS:-3}" -gt 0 ] && has_captures "$setup" || return 0
  for ((round = 1; round <= ${ROUNDS:-3}; round++)); do
    step "cost/$setup/without.$round" - env "TRACES_DIR=$out/cost/$setup/without.$round" PROFILER=none FORCE=1 \
      "${settings[@]}" STEPS=10 scripts/profile_variant.sh bucketed --bucket-size-mb 10
    step "cost/$setup/with.$round" - env "TRACES_DIR=$out/cost/$setup/with.$round" "${recorder[@]}" FORCE=1 \
      "${settings[@]}" STEPS=10 scripts/profile_variant.sh bucketed --bucket-size-mb 10
  done
  [ "$is_left" = 1 ] || step "cost/$setup/table" "$out/tables/$setup/cost_of_recording.txt" \
    "$bin/python" scripts/dev/profiling_cost.py "$out/cost/$setup"
}

# for_setups FUNCTION...: each of them, for one setup after the other.
for_setups() {
  local setup function
  for setup in ${SETUPS:-gloo nccl single}; do
    setup_settings "$setup"
    for function in "$@"; do "$function" "$setup"; done
  done
}

# What this slice made; its number is the first that is free.
pack() {
  local number=1
  while [ -e "$out.slice$number.tar.gz" ]; do number=$((number + 1)); done
  run "$bin/python" scripts/dev/pack_captures.py "$out" --target "$out.slice$number.tar.gz" --newer-than "$out/.slice" \
    --max-mb "$max_mb" --max-files 8 || echo "capture_gpu: nothing was packed" >&2
}

finish() {
  local failures=0
  [ "$is_dry" = 0 ] || return 0
  failures="$(grep -rlx failed "$out/done" | wc -l || true)"
  if [ "$is_left" = 1 ]; then
    echo "capture_gpu: the time of this slice is over: call it again to go on"
    exit 75
  fi
  [ "$failures" = 0 ] || {
    echo "capture_gpu: $failures of the steps above or before failed: RETRY=1 does them again" >&2
    exit 1
  }
}

main() {
  read_arguments "$@"
  read_settings
  cd "$root"
  [ -z "$wheels" ] || export NSYS_FETCH="${NSYS_FETCH:-0}" # offline
  [ "$is_dry" = 1 ] || { mkdir -p "$out/done" && touch "$out/.slice"; }
  [ "${RETRY:-0}" != 1 ] || [ "$is_dry" = 1 ] || rm -rf "$out/done/tables" "$out/recorder.tried"
  if [ "$is_dry" = 1 ] || nvidia-smi -L >/dev/null 2>&1; then set_up; fi
  preflight
  count_gpus
  list_variants
  for_setups check_variants
  for_setups capture_setup
  [ "$is_left" = 1 ] || for_setups write_tables
  for_setups race_ddp
  for_setups measure_cost
  pack
  finish
}

main "$@"
