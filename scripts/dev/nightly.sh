#!/usr/bin/env bash
# Runs the whole gate with what it leaves to the night: all examples of Hypothesis, and others each time; the whole
# product of cases, loops, settings, optimizers and numbers of ranks in tests/ddp; every command on every hostile input;
# all captures, names and pages; torch's columns of the table of loops; programs that spawn ranks or are killed as a
# whole. Then the callbacks in Lightning and Trainer, jobs to tune with planted causes, and the fuzzer for ten minutes.
# Takes an hour and a half and more on two cores.
#
#   scripts/dev/nightly.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
HYPOTHESIS_PROFILE=nightly scripts/test.sh -o timeout=0 "$@"
scripts/dev/trainers.sh
scripts/dev/tune_jobs.sh
scripts/dev/fuzz.sh --minutes 10
