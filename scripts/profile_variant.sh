#!/usr/bin/env bash
# Captures one variant: TRACES_DIR/NAME.nsys-rep, its export NAME.sqlite, and NAME.run.json, written last.
#
#   scripts/profile_variant.sh VARIANT [--bucket-size-mb MB] [-- further arguments of python -m ddp_prof.train]
#   scripts/profile_variant.sh bucketed --bucket-size-mb 25
#
# VARIANT is one of ddp_prof/variants.py; NAME is the variant with its bucket size and options where it has such
# (bucketed_25mb_bf16). A capture that is there, made on this machine from the same settings and code, is not made again;
# an old one gives way to a complete new one alone. Where nsys cannot be had, torch.profiler records (NAME.rank0.json.gz,
# ...). All of it is done by ddp_prof/capture/, as `ddp-prof capture` does it for any program.
#
# Started once a rank by a launcher (srun, mpirun, torchrun --no-python) it captures that rank alone, into NAME.rank3.*;
# once a node with TORCHRUN, all ranks of the node, into NAME.node1.*. ddp-prof reads the files of one NAME as one run.
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
#   PROFILER      nsys, kineto (torch.profiler), none (NAME.run.json alone), or auto: nsys where it can be had
#   NSYS          the nsys to use            (default: of PATH or the usual places, else fetched by install_nsys.sh)
#   NSYS_FLAGS    further flags of nsys profile                      (default: none)
#   QDSTRM_IMPORTER  makes the report where nsys itself has no importer, as in Nsight Compute's folder; same version
#   GPU_METRICS   1: sample the GPUs' counters, too; of several ranks on a node the first does      (default: 0)
#   CAPTURE_RANGE on GPUs: cudaProfilerApi, or none for the whole run (default: cudaProfilerApi)
#   VENV          the virtual environment                            (default: .venv in the checkout)
#   ISOLATE       1: in a process namespace where possible, else nsys notes the names and environments of other processes;
#                 never beside CUDA's multi-process service (MPS)    (default: 1)
#   LIMIT_S       end the recorded run after so many seconds         (default: none)
#   FORCE         1: capture again                                   (default: 0)
#   VERBOSE       1: show what nsys and the workload say             (default: 0)
# A report keeps the environment of what it recorded, so that is given only what concerns it (ddp_prof/capture/variant.py).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export VENV="${VENV:-$root/.venv}" TRACES_DIR="${TRACES_DIR:-$root/traces/local}"
[ -x "$VENV/bin/python" ] || { echo "profile_variant: there is no $VENV/bin/python: run scripts/env.sh first" >&2 && exit 1; }
exec "$VENV/bin/python" -m ddp_prof.capture "$@"
