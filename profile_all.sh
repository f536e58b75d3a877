#!/usr/bin/env bash
# From a clean clone to the comparison: sets up what is missing, captures every variant, trains all of them in turns
# without a profiler, from where the speed-ups come, draws every timeline, and step and tail over bucket size.
#
#   bash profile_all.sh
#
# Captures that are up to date are not made again, unless FORCE=1. If each rank has a GPU, the ranks run on GPUs (NCCL),
# else on the CPU (gloo).
#
# Settings (environment):
#   VARIANTS          which ones, in this order               (default: all of ddp_prof/variants.py)
#   BUCKET_SIZES_MB   bucketed is captured with each of these (default: 1 10 100 1000); with one of those that give the
#                     same buckets
#   TURNS_S           seconds of training in turns, at least three rounds of all variants (default: 60); 0: none, and
#                     speed-ups are those of the captures
#   TRACES_DIR        where the captures and turns.db go      (default: traces/local in the checkout, which git ignores)
#   FIGURES_DIR       where timelines and figures go          (default: figures/local in the checkout, likewise)
#   FORCE             1: capture and train again              (default: 0)
# and those of scripts/profile_variant.sh, of which the most useful are
#   MODEL_SIZE (tiny mini wide small medium large xl 2.7B xl-2026 10B-2026)  BATCH_SIZE  SEQ_LEN  STEPS  WARMUP  NGPU
#   DEVICE  BACKEND  RANKS_PER_GPU  PROFILER  NSYS
# of scripts/env.sh (PYTHON, VENV, CHROMIUM) and of scripts/install_nsys.sh (NSYS_PREFIX, NSYS_FETCH).
#
# Exit: 0 when every capture is there, 1 when one failed (the others are captured nevertheless), 2 for wrong usage.
set -euo pipefail

# An output that is closed (>&-) would be the next file that is opened.
[ -e /dev/fd/1 ] || exec >/dev/null
cd "$(dirname "${BASH_SOURCE[0]}")"
scripts/env.sh train
unset PYTHONHOME PYTHONPATH PYTHONOPTIMIZE PYTHONWARNINGS # of other programs: the environment has all that is needed
exec "${VENV:-.venv}/bin/python" scripts/profile_all.py
