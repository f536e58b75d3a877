#!/usr/bin/env bash
# On a machine with GPUs: captures every variant in every setup, measures what recording costs and how bucketed does
# against torch's DDP, and packs it all into one file to carry away. Works offline.
#
#   scripts/capture_gpu.sh [--dry-run] [--wheels FOLDER] [--out FOLDER] [--max-mb MB]
#
#   --dry-run    print every command in order, run none; on any machine
#   --wheels     make the environment from this folder of wheels, offline, beside the torch that the machine has;
#                relative to the checkout
#   --out        where everything goes; relative to the checkout      (default: gpu_capture)
#   --max-mb     how large the packed file may be; steps are left out of captures until it fits  (default: 16)
#
# The setups are
#   nccl     a rank a GPU; with a single GPU two ranks that take turns on it, of which every table says that it is so
#   gloo     tensors on the GPU, reduced by the host: real copies, real overlap of copies with backward
#   single   one rank, for which NCCL has nothing to do: what compute alone takes
# All captures come first, then tables, costs and races. What is captured already is not captured again, so a run that was
# cut off goes on where it stopped.
#
# Settings (environment):
#   SETUPS            which, in this order                          (default: nccl gloo single)
#   VARIANTS          which                                         (default: naive flat overlap bucketed torch)
#   BUCKET_SIZES_MB   of bucketed                                   (default: 1 10 100)
#   ROUNDS            runs with and without recorder, interleaved   (default: 3; 0: none)
#   DDP_STEPS         steps of each in the race against torch's DDP (default: 40; 0: none)
#   GPUS              how many there are                            (default: as many as torch sees; in a dry run 1)
#   BATCH_SIZE        sequences a step, of all ranks together       (default: 2 a rank)
# and those of scripts/profile_variant.sh (MODEL_SIZE, SEQ_LEN, STEPS: here 3, WARMUP: here 5, NSYS, NSYS_FLAGS,
# QDSTRM_IMPORTER, VENV) and of scripts/install_nsys.sh (NSYS_FETCH).
#
# Exit: 0 when everything is there; 1 when the preflight found something missing, or a step failed (the others go on).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="${VENV:-.venv}/bin"
is_dry=0 wheels="" out="gpu_capture" max_mb=16 failed=0
model_size="${MODEL_SIZE:-medium}"
export CHROMIUM=0 # draws nothing here

trap 'echo && exit 130' INT
trap 'exit 143' TERM HUP

usage() {
  echo "capture_gpu: $*; usage: capture_gpu.sh [--dry-run] [--wheels FOLDER] [--out FOLDER] [--max-mb MB]" >&2
  exit 2
}

read_arguments() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --dry-run) is_dry=1 ;;
      --wheels | --out | --max-mb)
        [ $# -gt 1 ] || usage "$1 needs a value"
        case "$1" in --wheels) wheels="$2" ;; --out) out="$2" ;; --max-mb) max_mb="$2" ;; esac
        shift
        ;;
      *) usage "no such option: $1" ;;
    esac
    shift
  done
  [[ "$max_mb" =~ ^[1-9][0-9]*$ ]] || usage "--max-mb $max_mb is no whole number of MB"
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

count_failure() {
  failed=$((failed + 1))
  echo "capture_gpu: failed: $*" >&2
}

# What fails is told and counted, and does not stop the rest.
try() { run "$@" || count_failure "$@"; }

# The same into a file.
try_into() {
  local file="$1"
  shift
  show "$@" && printf ' > %q\n' "$file"
  [ "$is_dry" = 1 ] || "$@" >"$file" || count_failure "$@"
}

# Not nvidia-smi, which shows those, too, that CUDA_VISIBLE_DEVICES hides.
count_gpus() {
  gpus="${GPUS:-1}"
  [ -n "${GPUS:-}" ] || [ "$is_dry" = 1 ] || gpus="$("$bin/python" -c "import torch; print(torch.cuda.device_count())")"
}

# Settings that make a setup, for `env`; sets `ranks` and `batch_size`, too.
setup_settings() {
  ranks=$gpus
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
  [ "$ranks" -le "$gpus" ] || settings+=("RANKS_PER_GPU=$ranks")
}

set_up() {
  if [ -n "$wheels" ]; then
    run env "WHEELS=$wheels" scripts/env.sh train
  elif [ ! -x "$bin/python" ]; then
    run scripts/env.sh train
  fi
}

preflight() {
  run python3 scripts/gpu_preflight.py --python "$bin/python" --log "$out/preflight.log" \
    --recorder "$out/recorder" || exit 1
  recorder=(PROFILER=auto)
  [ "$is_dry" = 1 ] || mapfile -t recorder <"$out/recorder"
}

capture_setup() {
  local setup="$1" variant size
  for variant in ${VARIANTS:-naive flat overlap bucketed torch}; do
    if [ "$variant" = bucketed ]; then
      for size in ${BUCKET_SIZES_MB:-1 10 100}; do capture "$setup" bucketed --bucket-size-mb "$size"; done
    else
      capture "$setup" "$variant"
    fi
  done
}

capture() {
  local setup="$1"
  shift
  try env "TRACES_DIR=$out/$setup" "${recorder[@]}" "${settings[@]}" scripts/profile_variant.sh "$@"
}

has_captures() { [ "$is_dry" = 1 ] || compgen -G "$out/$1/*.run.json" >/dev/null; }

# As text and, of what differs by more than its rows, as JSON.
write_tables() {
  local setup="$1" command name
  for command in overlap "overlap --steps" compare "compare --waterfall" "collectives --by bucket" skew; do
    name="${command// /_}"
    # shellcheck disable=SC2086  # a command and its options
    try_into "$out/tables/$setup/${name//--/}.txt" "$bin/ddp-prof" $command "$out/$setup"
  done
  for command in overlap compare collectives skew; do
    try_into "$out/tables/$setup/$command.json" "$bin/ddp-prof" "$command" --format json "$out/$setup"
  done
}

# The same run with and without recorder, in turns, so that whatever else the machine does hits both alike.
measure_cost() {
  local setup="$1" round
  [ "${ROUNDS:-3}" -gt 0 ] || return 0
  for ((round = 1; round <= ${ROUNDS:-3}; round++)); do
    try env "TRACES_DIR=$out/cost/$setup/without.$round" PROFILER=none FORCE=1 "${settings[@]}" STEPS=10 \
      scripts/profile_variant.sh bucketed --bucket-size-mb 10
    try env "TRACES_DIR=$out/cost/$setup/with.$round" "${recorder[@]}" FORCE=1 "${settings[@]}" STEPS=10 \
      scripts/profile_variant.sh bucketed --bucket-size-mb 10
  done
  try_into "$out/tables/$setup/cost_of_recording.txt" "$bin/python" scripts/profiling_cost.py "$out/cost/$setup"
}

race_ddp() {
  local setup="$1" shared=()
  [ "${DDP_STEPS:-40}" -gt 0 ] && [ "$ranks" -gt 1 ] || return 0
  [ "$ranks" -le "$gpus" ] || shared=(--ranks-per-gpu "$ranks")
  try_into "$out/tables/$setup/against_ddp.txt" "$bin/python" scripts/benchmark.py ddp --device cuda \
    --backend "${settings[0]#BACKEND=}" --world-size "$ranks" "${shared[@]}" --model-size "$model_size" \
    --batch-size "$batch_size" --seq-len "${SEQ_LEN:-128}" --steps "${DDP_STEPS:-40}" --target 1.02
}

main() {
  local setup
  read_arguments "$@"
  cd "$root"
  [ -z "$wheels" ] || export NSYS_FETCH="${NSYS_FETCH:-0}" # offline
  [ "$is_dry" = 1 ] || mkdir -p "$out"
  if [ "$is_dry" = 1 ] || nvidia-smi -L >/dev/null 2>&1; then set_up; fi
  preflight
  count_gpus
  for setup in ${SETUPS:-nccl gloo single}; do
    setup_settings "$setup"
    capture_setup "$setup"
  done
  for setup in ${SETUPS:-nccl gloo single}; do
    setup_settings "$setup"
    if ! has_captures "$setup"; then
      echo "capture_gpu: $setup is left out, as none of its captures could be made (see above)" >&2
      continue
    fi
    run mkdir -p "$out/tables/$setup"
    write_tables "$setup"
    measure_cost "$setup"
    race_ddp "$setup"
  done
  try "$bin/python" scripts/pack_captures.py "$out" --max-mb "$max_mb"
  [ "$failed" = 0 ] || {
    echo "capture_gpu: $failed of the steps above failed" >&2
    exit 1
  }
}

main "$@"
