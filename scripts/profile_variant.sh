#!/usr/bin/env bash
# Profiles one variant with Nsight Systems: TRACES_DIR/NAME.nsys-rep, its export NAME.sqlite, and NAME.run.json, written
# last.
#
#   scripts/profile_variant.sh VARIANT [--bucket-size-mb MB] [-- further arguments of python -m ddp_prof.train]
#   scripts/profile_variant.sh bucketed --bucket-size-mb 25
#
# VARIANT is one of ddp_prof/variants.py: naive, flat, overlap, bucketed, torch ...; NAME is the variant, with its
# bucket size and options where it has such (bucketed_25mb, bucketed_25mb_bf16). A capture that is there, made on this machine from the same settings and code, is not made again.
# Old files are replaced only by a complete new capture. Where nsys cannot be had, torch.profiler records instead
# (NAME.rank0.json.gz, ...). This is the only home of nsys flags.
#
# Started once a rank by a launcher (RANK is set: srun, mpirun, torchrun --no-python) it profiles that rank alone, into
# NAME.rank3.nsys-rep and NAME.rank3.sqlite; started once a node with TORCHRUN, all ranks of the node, into NAME.node1.*.
# ddp-prof reads the files of one NAME as one run. Such a capture is made in any case, as no rank knows of the others'.
#
# Settings (environment):
#   MODEL_SIZE    of ddp_prof.train                                  (default: medium on GPUs, else mini)
#   BATCH_SIZE    sequences a step, of all ranks together            (default: 2 a rank)
#   SEQ_LEN       tokens a sequence                                  (default: 128)
#   STEPS         captured steps                                     (default: 10)
#   WARMUP        steps before, marked as such                       (default: 2)
#   NGPU          ranks, with or without GPUs                        (default: $WORLD_SIZE, else 2)
#   DEVICE        auto, cpu or cuda                                  (default: auto: cuda where each rank has a GPU)
#   BACKEND       auto, nccl or gloo                                 (default: auto: nccl where each rank has a GPU)
#   RANKS_PER_GPU let so many ranks take turns on each GPU           (default: unset, a GPU a rank)
#   TORCHRUN      arguments with which torchrun starts the ranks (--nnodes 2 --node-rank 1 ...); NGPU ranks on this node
#   NODE_RANK     with TORCHRUN: number of this node, part of the files' name  (default: unset, the only node)
#   TRACES_DIR    where the files go                                 (default: traces/local in the checkout)
#   PROFILER      nsys, kineto (torch.profiler), none (NAME.run.json alone: what the run takes unprofiled), or auto
#                 (default: auto: nsys where it can be had)
#   NSYS          the nsys to use                                    (default: what scripts/install_nsys.sh finds)
#   NSYS_FLAGS    further flags of nsys profile                      (default: none)
#   QDSTRM_IMPORTER  makes the report where nsys itself has no importer, as in Nsight Compute's folder; same version
#   GPU_METRICS   1: sample the GPUs' counters, too; of several ranks on a node the first does      (default: 0)
#   CAPTURE_RANGE on GPUs: cudaProfilerApi, or none for the whole run (default: cudaProfilerApi)
#   VENV          the virtual environment                            (default: .venv in the checkout)
#   ISOLATE       1: in a process namespace, where possible: else nsys notes the names, and of the same user also the
#                 environments, of all processes of the machine. Never where CUDA's multi-process service (MPS) runs,
#                 which knows its clients by their process ids       (default: 1)
#   LIMIT_S       end the recorded run after so many seconds; what comes before and after it is not counted (default: none)
#   FORCE         1: capture again                                   (default: 0)
#   VERBOSE       1: show what nsys and the workload say             (default: 0)
#
# A report keeps the environment of what it recorded, so that is given only what concerns it: variables that begin with
# CUDA_, NCCL_, GLOO_, OMP_, MKL_, TORCH_, PYTORCH_, TORCHINDUCTOR_ or TRITON_, or with FI_, OFI_NCCL_ or UCX_ (without
# which NCCL would change its transport in silence), and NVIDIA_TF32_OVERRIDE, CUBLAS_WORKSPACE_CONFIG, LD_LIBRARY_PATH,
# CC and CXX.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
traces="${TRACES_DIR:-$root/traces/local}"
venv="${VENV:-$root/.venv}"
python="$venv/bin/python"
ranks="${NGPU:-${WORLD_SIZE:-2}}"
is_launched=0
if [ -n "${RANK:-}" ]; then is_launched=1 ranks="${WORLD_SIZE:?a launcher that sets RANK sets WORLD_SIZE, too}"; fi
partial="" scratch="" child="" is_isolated=0

fail() {
  echo "profile_variant: $*" >&2
  exit 1
}

usage() {
  echo "profile_variant: $*; usage: profile_variant.sh VARIANT [--bucket-size-mb MB] [-- arguments of ddp_prof.train]" >&2
  exit 2
}

# Process ids of all that this run started, nsys's own daemon included: its HOME is theirs alone.
started() { grep -lsz "^HOME=$scratch$" /proc/[0-9]*/environ | cut -d/ -f3 || true; }

end_started() {
  local process signal
  for signal in TERM TERM TERM KILL; do
    for process in $(started); do
      kill "-$signal" "$process" 2>/dev/null || true
      rm -f "/dev/shm/quadd-agent-instance-$process" "/dev/shm/sem.nsys_sem_$process"
    done
    [ -z "$(started)" ] || sleep 1
  done
}

stop() {
  [ -n "$child" ] || return 0
  if [ "$is_isolated" = 1 ]; then # takes the whole namespace with it
    kill -KILL "$child" 2>/dev/null || true
  else
    end_started
  fi
  wait "$child" 2>/dev/null || true
}

clean_up() {
  stop
  [ -z "$partial$scratch" ] || rm -rf "$partial" "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

read_arguments() {
  variant="" bucket_size="" more=()
  while [ $# -gt 0 ]; do
    case "$1" in
      --bucket-size-mb)
        [ $# -gt 1 ] || usage "--bucket-size-mb needs a number"
        bucket_size="$2"
        shift
        ;;
      --)
        more=("${@:2}")
        break
        ;;
      -*) usage "no such option: $1" ;;
      *)
        [ -z "$variant" ] || usage "one variant at a time, not '$variant' and '$1'"
        variant="$1"
        ;;
    esac
    shift
  done
  [ -n "$variant" ] || usage "which variant?"
  [[ "$variant" =~ ^[a-z][a-z0-9_]*$ ]] || usage "no such variant: $variant"
  [ "$variant" != bucketed ] || bucket_size="${bucket_size:-25}"
  name="$variant${bucket_size:+_${bucket_size}mb}"
  [ "$bucket_size" != none ] || name="${variant}_unbounded"
  local at
  for at in "${!more[@]}"; do
    case "${more[at]}" in
      --compression) name+="_${more[at + 1]:-}" ;;
      --compression=*) name+="_${more[at]#*=}" ;;
      --step-in-backward) name+="_step_in_backward" ;;
      --no-communication-hook) name+="_no_communication_hook" ;;
    esac
  done
  [[ "$name" =~ ^[A-Za-z0-9_.-]+$ ]] || usage "no name for files: $name"
  base="$name" # of which the files may be one of several parts
  [ "$is_launched" = 0 ] || name+=".rank$RANK"
  [ -z "${TORCHRUN:-}" ] || name+="${NODE_RANK:+.node$NODE_RANK}"
}

# The package knows which variants there are.
check_variant() {
  local known
  known="$("$python" -c "from ddp_prof.variants import VARIANTS; print(*VARIANTS)" 2>/dev/null || true)"
  [ -z "$known" ] || [[ " $known " == *" $variant "* ]] || usage "no such variant: $variant; there are ${known// /, }"
}

# Whether this is one part of a capture, of which another process or machine makes the others.
is_part() { [ "$name" != "$base" ]; }

# Names of the GPUs that a process sees, a line each. Without a driver nvidia-smi says so on stdout, which is no GPU's
# name, and it shows those, too, that CUDA_VISIBLE_DEVICES hides. Of the instances of a divided GPU (MIG) a process sees one.
gpu_names() {
  local names name entry
  names="$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)" && [ -n "$names" ] || return 0
  if [ -z "${CUDA_VISIBLE_DEVICES+is set}" ]; then
    if nvidia-smi -L 2>/dev/null | grep '^ *MIG ' >/dev/null; then sed -n 1p <<<"$names"; else echo "$names"; fi
    return
  fi
  for entry in ${CUDA_VISIBLE_DEVICES//,/ }; do
    case "$entry" in
      MIG-*) sed -n 1p <<<"$names" && return ;;
      GPU-*) sed -n 1p <<<"$names" ;;
      *[!0-9]*) return ;; # as for CUDA the first that is none ends the list
      *)
        name="$(sed -n "$((entry + 1))p" <<<"$names")"
        [ -n "$name" ] || return 0
        echo "$name"
        ;;
    esac
  done
}

# Where each rank has a GPU or a share of one, and nobody asks for the CPU.
choose_device() {
  local ranks_here="$ranks"
  [ "$is_launched" = 0 ] || ranks_here="${LOCAL_WORLD_SIZE:-$ranks}"
  gpus="$(gpu_names)"
  device="${DEVICE:-auto}"
  if [ "$device" = auto ]; then
    device=cpu
    [ -z "$gpus" ] || [ $(($(wc -l <<<"$gpus") * ${RANKS_PER_GPU:-1})) -lt "$ranks_here" ] || device=cuda
  fi
  if [ "$device" = cuda ]; then model_size="${MODEL_SIZE:-medium}"; else model_size="${MODEL_SIZE:-mini}"; fi
}

# "nsys 2022.4.2.1", "torch.profiler 2.13.0" or none; sets `nsys`, empty for the latter two.
choose_profiler() {
  local wanted="${PROFILER:-auto}" reason="PROFILER=kineto"
  nsys="" profiler=""
  case "$wanted" in
    none) return ;;
    kineto) ;;
    nsys | auto)
      if ! nsys="$("$root/scripts/install_nsys.sh" 2> >(tee "$scratch/nsys.log" >&2))"; then
        [ "$wanted" = auto ] || exit 1
        reason="no nsys"
      fi
      ;;
    *) usage "PROFILER=$wanted: there are nsys, kineto, none and auto" ;;
  esac
  if [ -n "$nsys" ]; then
    profiler="nsys $("$nsys" --version | grep -oE '[0-9]+(\.[0-9]+)+' | head -1)"
  else
    profiler="torch.profiler $(installed torch)"
    echo "profile_variant: $reason: torch.profiler records instead" >&2
  fi
}

# Version of an installed package; without starting Python, unless the environment has it from elsewhere.
installed() {
  local found
  found="$(compgen -G "$venv/lib/python3*/site-packages/$1-*.dist-info" | sed "s|.*/$1-||; s|\.dist-info$||" | head -1 || true)"
  [ -n "$found" ] || found="$("$python" -c "import importlib.metadata as all; print(all.version('$1'))" 2>/dev/null || true)"
  echo "$found"
}

environment() {
  printf '%s\n' PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
  local prefixes='CUDA|NCCL|GLOO|OMP|MKL|(PY)?TORCH|TORCHINDUCTOR|TRITON|FI|OFI_NCCL|UCX'
  env | grep -E "^(($prefixes)_[A-Za-z0-9_]*|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|LD_LIBRARY_PATH|CC|CXX)=" |
    LC_ALL=C sort || true
  [ "$is_launched" = 0 ] ||
    env | grep -E '^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_[A-Z_]*)=' || true
}

# Ranks of all nodes.
all_ranks() {
  local nodes=1
  [[ ! "${TORCHRUN:-}" =~ --nnodes[=\ ]([0-9]+:)?([0-9]+) ]] || nodes="${BASH_REMATCH[2]}"
  echo $((ranks * nodes))
}

workload_arguments() {
  local world=(--world-size "$ranks")
  [ "$is_launched" = 0 ] && [ -z "${TORCHRUN:-}" ] || world=() # the launcher tells
  arguments=(--variant "$variant" ${bucket_size:+--bucket-size-mb "$bucket_size"} "${world[@]}" --device "$device"
    --model-size "$model_size" --batch-size "${BATCH_SIZE:-$((2 * $(all_ranks)))}" --seq-len "${SEQ_LEN:-128}"
    --steps "${STEPS:-10}" --warmup "${WARMUP:-2}" ${BACKEND:+--backend "$BACKEND"}
    ${RANKS_PER_GPU:+--ranks-per-gpu "$RANKS_PER_GPU"} "${more[@]}")
}

# Digest of machine, settings and code; all that decides what a capture holds.
digest() {
  {
    uname -srm
    cat /etc/hostname /etc/machine-id 2>/dev/null || true
    grep -m1 '^model name' /proc/cpuinfo || true
    nproc
    echo "$gpus"
    echo "$profiler ${NSYS_FLAGS:-} ${CAPTURE_RANGE:-} ${GPU_METRICS:-0} ${TORCHRUN:-} torch $(installed torch) nvtx $(installed nvtx)"
    environment
    printf '%s\n' "${arguments[@]}"
    cd "$root"
    find ddp_prof/ddp ddp_prof/train ddp_prof/*.py scripts/profile_variant.sh -type f ! -name '*.pyc' \
      ! -name runs.py ! -name trace.py ! -name __init__.py -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

is_done() {
  local made_from
  ! is_part || return 1
  made_from="$(sed -n 's/^ *"key": "\([0-9a-f]*\)".*/\1/p' "$traces/$name.run.json" 2>/dev/null || true)"
  [ "${FORCE:-0}" != 1 ] && [ "$made_from" = "$key" ] || return 1
  if [ -n "$nsys" ]; then
    [ -s "$traces/$name.nsys-rep" ] && [ -s "$traces/$name.sqlite" ]
  elif [ -n "$profiler" ]; then
    [ -s "$traces/$name.rank0.json.gz" ]
  fi
}

supports() { "$nsys" "$1" --help 2>/dev/null | grep -e "$2" >/dev/null; }

nsys_flags() {
  flags=(--sample=none --cpuctxsw=none --stats=false --force-overwrite=true --output="$partial/$name")
  if [ "$device" = cpu ]; then
    flags+=(--trace=nvtx)
  else
    flags+=("--trace=cuda,nvtx")
    supports profile --cuda-graph-trace && flags+=(--cuda-graph-trace=node)
    if [ "${CAPTURE_RANGE:-cudaProfilerApi}" != none ]; then
      flags+=(--capture-range="${CAPTURE_RANGE:-cudaProfilerApi}")
      if supports profile --capture-range-end; then
        flags+=(--capture-range-end=stop) # else the end of the range would end the workload
      else
        flags+=(--stop-on-range-end=true)
      fi
    fi
    gpu_metrics_flags
  fi
  # shellcheck disable=SC2206  # several flags in one variable
  flags+=(${NSYS_FLAGS:-})
}

# Counters of a GPU can be read by one process at a time: by the node's first rank, for all GPUs.
gpu_metrics_flags() {
  [ "${GPU_METRICS:-0}" = 1 ] && [ "${LOCAL_RANK:-0}" = 0 ] || return 0
  if supports profile --gpu-metrics-devices; then flags+=(--gpu-metrics-devices=all); else flags+=(--gpu-metrics-device=all); fi
}

# On a GPU machine whose torch cannot use it, the workload would run on the CPU and a CUDA capture would stay empty.
check_torch_sees_gpus() {
  [ "$device" = cpu ] || "$python" -c "import sys, torch; sys.exit(torch.cuda.device_count() == 0)" 2>/dev/null ||
    fail "there is a GPU, but the torch in $venv cannot use it: install a CUDA build of torch, or say DEVICE=cpu"
}

# The daemon of CUDA's multi-process service listens here; it would turn away processes of another namespace.
uses_mps() { [ "$device" = cuda ] && [ -e "${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}/control" ]; }

# Put before a command: it gets the signal when this script ends, however that ends.
with_us() { ! setpriv --pdeathsig "$1" true 2>/dev/null || echo setpriv --pdeathsig "$1"; }

# Runs a command with the cleaned environment, in a process namespace where wanted and possible; ranks that a launcher
# started must see each other: NCCL's shared memory is named after processes.
run() {
  local clean isolate=() limit=()
  mapfile -t clean < <(environment)
  # shellcheck disable=SC2207  # several words
  [ -z "${LIMIT_S:-}" ] || limit=($(with_us TERM) timeout --kill-after=10 "$LIMIT_S")
  if [ "${ISOLATE:-1}" = 1 ] && [ -n "$nsys" ] && [ "$is_launched" = 0 ] && ! uses_mps; then
    # shellcheck disable=SC2207
    isolate=($(with_us KILL) unshare --pid --fork --mount-proc --kill-child)
    [ "$(id -u)" = 0 ] || isolate+=(--user --map-root-user)
    # Shared memory of its own too: nsys names a file there after its process id, which is the same in each namespace.
    # shellcheck disable=SC2016  # expanded by the inner shell
    isolate+=(sh -c 'mount -t tmpfs tmpfs /dev/shm && exec "$@"' sh)
    if "${isolate[@]}" true 2>/dev/null; then
      is_isolated=1
    else
      isolate=()
      echo "profile_variant: no process namespace here, so the report holds the environments of other processes, too" >&2
    fi
  fi
  # shellcheck disable=SC2207
  [ "$is_isolated" = 1 ] || isolate=($(with_us TERM))
  # Under TMPDIR nsys opens sockets, whose paths must be short.
  env -i "${clean[@]}" HOME="$scratch" TMPDIR="$scratch" "${limit[@]}" "${isolate[@]}" "$@" >"$scratch/log" 2>&1 </dev/null 9>&- &
  child=$!
  [ "${VERBOSE:-0}" != 1 ] || tail -f --pid="$child" "$scratch/log" >&2 9>&- &
  wait "$child"
}

# What the workload gave as its reason, else the signal that ended nsys or it, else the last thing that was said.
reason() {
  local line signal status="${1:-0}"
  line="$(tr '\r' '\n' <"$scratch/log" | grep -v '^ *$' | { grep -E ': error: |^[A-Za-z.]*Error\b' || true; } | tail -1)"
  ! grep -q '^unshare: sigprocmask unblock failed' "$scratch/log" || status=137 # its words for that
  if [ -z "$line" ] && [ "$status" -gt 128 ] && signal="$(kill -l "$((status - 128))" 2>/dev/null)"; then
    line="${profiler:+$profiler or }the ranks were ended by SIG$signal"
  fi
  [ -n "$line" ] || line="$(tr '\r' '\n' <"$scratch/log" | grep -v '^ *$' | tail -1)"
  line="${line#*: error: }"
  echo "${line:0:300}"
}

# A hint that makes sense on GPUs only.
on_gpus() { [ "$device" = cpu ] || echo "$1"; }

record() {
  local status=0 launcher=() command
  # shellcheck disable=SC2206  # several arguments in one variable
  [ -z "${TORCHRUN:-}" ] || launcher=(-m torch.distributed.run $TORCHRUN --nproc-per-node "$ranks")
  command=("$python" "${launcher[@]}" -m ddp_prof.train "${arguments[@]}"
    --run-json "$partial/$base.run.json" --key "$key" ${profiler:+--profiler "$profiler"})
  if [ -n "$nsys" ]; then
    nsys_flags
    run "$nsys" profile "${flags[@]}" "${command[@]}" || status=$?
  elif [ -n "$profiler" ]; then
    run "${command[@]}" --kineto "$partial/$base.json.gz" || status=$?
  else
    run "${command[@]}" || status=$?
  fi
  child=""
  if [ -n "${LIMIT_S:-}" ] && { [ "$status" = 124 ] || [ "$status" = 137 ]; }; then
    end_started
    fail "$name: the run was not done after $LIMIT_S s: $(reason)"
  fi
  # Rank 0 writes run.json, on its node; it tells better than the exit code, which nsys has its own of.
  [ -s "$partial/$base.run.json" ] || { is_part && [ "$status" = 0 ]; } ||
    fail "$name: the workload failed (exit code $status): $(reason "$status") [all that was said: VERBOSE=1]"
}

# An nsys without its importer leaves what it recorded as it is.
import_recorded() {
  local recorded="$partial/$name.qdstrm"
  [ ! -s "$partial/$name.nsys-rep" ] && [ -s "$recorded" ] || return 0
  if [ -n "${QDSTRM_IMPORTER:-}" ]; then
    "$QDSTRM_IMPORTER" -i "$recorded" >>"$scratch/log" 2>&1 || true
    [ ! -s "$partial/$name.nsys-rep" ] || rm "$recorded"
    return
  fi
  mv "$recorded" "$traces/"
  fail "$name: $profiler recorded $traces/$name.qdstrm but has no importer here: give the one of the same version," \
    "QDSTRM_IMPORTER=/path/to/QdstrmImporter, or another nsys"
}

export_sqlite() {
  local flags=(--type sqlite --force-overwrite true --output "$partial/$name.sqlite")
  [ -s "$partial/$name.nsys-rep" ] ||
    fail "$name: nsys wrote no report: $(reason)$(on_gpus "; try CAPTURE_RANGE=none, or ISOLATE=0")"
  ! supports export --include-json || flags+=(--include-json true)
  "$nsys" export "${flags[@]}" "$partial/$name.nsys-rep" >>"$scratch/log" 2>&1 || true
  [ -s "$partial/$name.sqlite" ] || fail "$name: nsys export failed: $(reason)"
}

# The ranks whose ranges must be in the report; which ones torchrun gave this of several nodes is its own affair.
expected_ranks() {
  if [ "$is_launched" = 1 ]; then echo "$RANK"; elif ! is_part; then seq 0 $((ranks - 1)); fi
}

# Every rank must have arrived, with its steps and on a GPU with kernels: what gets lost does so without any error.
check_ranges() {
  local problem expected
  mapfile -t expected < <(expected_ranks)
  problem="$("$python" -I - "$partial/$name.sqlite" "$device" "${expected[@]}" <<'PYTHON'
import sqlite3
import sys

path, device, expected = sys.argv[1], sys.argv[2], set(map(int, sys.argv[3:]))
kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    rows = []
    if "NVTX_EVENTS" in tables:
        rows = database.execute(
            """SELECT coalesce(range.text, names.value), range.globalTid >> 24
            FROM NVTX_EVENTS AS range LEFT JOIN StringIds AS names ON names.id = range.textId
            JOIN NVTX_EVENTS AS domain ON domain.eventType = 75 AND domain.text = 'ddp_prof'
                AND domain.domainId = range.domainId AND domain.globalTid >> 24 = range.globalTid >> 24
            WHERE range.eventType IN (59, 60) AND range.end IS NOT NULL"""
        ).fetchall()
    computing = set()
    if kernels in tables:
        computing = {process for (process,) in database.execute(f"SELECT DISTINCT globalPid >> 24 FROM {kernels}")}
found = {}
for text, process in rows:
    found.setdefault(process, set()).add(text)
steps, without_kernels = {}, []
for process, texts in found.items():
    for text in texts:
        if text.startswith("process|rank="):
            rank = int(text.split("|")[1].removeprefix("rank="))
            steps[rank] = sum(text.startswith("step|") for text in texts)
            if device == "cuda" and process not in computing:
                without_kernels.append(rank)
most_steps = max([1, *steps.values()])
if not rows:
    print("none")
elif missing := sorted(expected - set(steps)):
    print("missing", ", ".join(map(str, missing)))
elif bare := sorted(rank for rank, count in steps.items() if count < most_steps):
    print("bare", ", ".join(map(str, bare)))
elif without_kernels:
    print("blind", ", ".join(map(str, sorted(without_kernels))))
PYTHON
)" || fail "$name: the exported SQLite cannot be read"
  case "$problem" in
    "") ;;
    none)
      fail "$name: no range of ours arrived. nsys up to 2023.4 gets none from nvtx 0.2.12 and later (here: $profiler," \
        "nvtx $(installed nvtx)): run scripts/env.sh, or use a newer nsys"
      ;;
    *)
      problem="${problem/missing/the report lacks rank}"
      problem="${problem/blind/$profiler recorded no kernels of rank}"
      fail "$name: ${problem/bare/not all steps arrived of rank}: capture again$(
        on_gpus ", with CAPTURE_RANGE=none, another nsys, or PROFILER=kineto"
      )"
      ;;
  esac
}

# What an earlier capture left: all of it, or of a part the same part and what cannot belong to this run.
remove_old() {
  local old number
  if ! is_part; then
    rm -f "$traces/$base".{run.json,nsys-rep,sqlite,json.gz} "$traces/$base".{rank,node}[0-9]*.{json.gz,nsys-rep,sqlite}
    return
  fi
  rm -f "$traces/$base".{nsys-rep,sqlite,json.gz} "$traces/$name".{nsys-rep,sqlite,json.gz}
  [ "$is_launched" = 0 ] || rm -f "$traces/$base".node[0-9]*
  while read -r old; do
    number="${old#"$traces/$base.rank"}" number="${number%%.*}"
    if [ "$is_launched" = 0 ] || [ "$number" -ge "$ranks" ]; then rm -f "$old"; fi
  done < <(compgen -G "$traces/$base.rank[0-9]*" || true)
}

# run.json goes last: where it is, the capture is complete.
publish() {
  local file
  remove_old
  chmod 644 "$partial/$base".*
  for file in "$partial/$base".*; do
    [ "$file" = "$partial/$base.run.json" ] || mv "$file" "$traces/"
  done
  [ ! -e "$partial/$base.run.json" ] || mv "$partial/$base.run.json" "$traces/"
}

main() {
  local began=$SECONDS
  read_arguments "$@"
  [ -x "$python" ] || fail "there is no $python: run scripts/env.sh first"
  mkdir -p "$traces"
  exec 9<"$traces"
  scratch="$(mktemp -d /tmp/ddp_prof.XXXXXX)"
  choose_device
  choose_profiler
  workload_arguments
  key="$(digest)"
  if [ "$is_launched" = 0 ] && ! is_done && ! flock -n 9; then # two captures at once would measure each other
    echo "profile_variant: waiting for another capture into $traces" >&2
    flock 9
  fi
  if is_done; then
    echo "$name: up to date"
    return
  fi
  check_variant
  check_torch_sees_gpus
  partial="$traces/.$name.partial"
  rm -rf "$partial"
  mkdir "$partial"
  record
  if [ -n "$nsys" ]; then
    import_recorded
    export_sqlite
    check_ranges
  fi
  publish
  echo "$name: captured by ${profiler:-no profiler} in $((SECONDS - began)) s"
}

main "$@"
