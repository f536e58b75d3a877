#!/usr/bin/env bash
# On a machine with GPUs: checks every variant, captures it in every setup, compares bucketed with torch's DDP, measures
# what recording costs, and packs the results. See --help.
#
#   scripts/capture_gpu.sh [--dry-run] [--minutes N] [--wheels FOLDER] [--nsys FILE] [--out FOLDER] [--max-mb MB]
set -euo pipefail

exec python3 "$(dirname "${BASH_SOURCE[0]}")/capture_gpu.py" "$@"
