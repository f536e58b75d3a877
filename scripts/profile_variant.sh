#!/usr/bin/env bash
# Captures one variant: TRACES_DIR/NAME.nsys-rep, its export NAME.sqlite, and NAME.run.json, written last.
#
#   scripts/profile_variant.sh VARIANT [--bucket-size-mb MB] [-- further arguments of python -m ddp_prof.train]
#   scripts/profile_variant.sh bucketed --bucket-size-mb 25
#
# VARIANT is one of ddp_prof/variants.py; NAME is the variant with its bucket size and options, if any
# (bucketed_25mb_bf16). A capture that was made on this machine from the same settings and code is not made again. A new
# capture replaces an old one only when it is complete. If there is no nsys, torch.profiler records
# (NAME.rank0.json.gz, ...). The work is done by ddp_prof/capture/, which `ddp-prof capture` uses for any program.
#
# If a launcher (srun, mpirun, torchrun --no-python) starts this script once per rank, each captures its own rank, into
# NAME.rank3.*; started once per node, with TORCHRUN, it captures the ranks of the node, into NAME.node1.*. ddp-prof reads
# the files of one NAME as one run.
#
# Settings (environment):
#   MODEL_SIZE    of ddp_prof.train                                  (default: medium on GPUs, else mini)
#   BATCH_SIZE    sequences per step, of all ranks together          (default: 2 per rank)
#   SEQ_LEN       tokens per sequence                                (default: 128)
#   STEPS         captured steps                                     (default: 10)
#   WARMUP        steps before, marked as such                       (default: 2)
#   NGPU          ranks, with or without GPUs                        (default: $WORLD_SIZE, else 2)
#   DEVICE        auto, cpu or cuda                                  (default: auto: cuda where each rank has a GPU)
#   BACKEND       auto, nccl or gloo                                 (default: auto: nccl where each rank has a GPU)
#   RANKS_PER_GPU let so many ranks take turns on each GPU           (default: unset, one GPU per rank)
#   TORCHRUN      arguments with which torchrun starts the ranks (--nnodes 2 --node-rank 1 ...); NGPU ranks on this node
#   NODE_RANK     with TORCHRUN of several nodes: number of this one, part of the files' name
#                                                                    (default: its --node-rank, or srun's task)
#   TRACES_DIR    where the files go                                 (default: traces/local in the checkout)
#   PROFILER      nsys, kineto (torch.profiler), none (only NAME.run.json), or auto: nsys if possible (default: auto)
#   NSYS          the nsys to use            (default: from PATH or the usual places, else fetched by install_nsys.sh)
#   NSYS_FLAGS    further flags of nsys profile                      (default: none)
#   QDSTRM_IMPORTER  makes the report if nsys has no importer of its own, as in Nsight Compute's folder; same version
#   GPU_METRICS   1: also sample the GPUs' counters; with several ranks on a node the first rank does   (default: 0)
#   CAPTURE_RANGE on GPUs: cudaProfilerApi, or none for the whole run (default: cudaProfilerApi)
#   VENV          the virtual environment                            (default: .venv in the checkout)
#   ISOLATE       1: run in a process namespace if possible, because without one the report holds names and environments
#                 of other processes; never with CUDA's multi-process service (MPS)  (default: 1)
#   LIMIT_S       end the recorded run after so many seconds         (default: none)
#   FORCE         1: capture again                                   (default: 0)
#   VERBOSE       1: show the output of nsys and the workload        (default: 0)
# A report contains the environment of the recorded program, so only the variables that matter are passed on
# (ddp_prof/capture/variant.py).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export VENV="${VENV:-$root/.venv}" TRACES_DIR="${TRACES_DIR:-$root/traces/local}"
[ -x "$VENV/bin/python" ] || { echo "profile_variant: there is no $VENV/bin/python: run scripts/env.sh first" >&2 && exit 1; }
exec "$VENV/bin/python" -m ddp_prof.capture "$@"
