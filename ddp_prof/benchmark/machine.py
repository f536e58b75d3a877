"""The machine and its versions, found by a process of its own, so that the sweep itself needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from ddp_prof.benchmark.grid import digest
from ddp_prof.benchmark.store import Environment
from ddp_prof.capture.variant import digest_code
from ddp_prof.errors import WorkloadError

VERSIONS = ("python", "torch", "cuda", "nccl", "ddp_prof")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the sweep runs.

    Attributes:
        gpus: How many torch can use.
        code: Digest of the code that is measured: the variants, the workload, the names of ranges.
    """

    environment: Environment
    gpus: int
    git_commit: str | None
    code: str


def probe_machine() -> Machine:
    """Ask a process that imports torch; raises WorkloadError where it cannot."""
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        raise WorkloadError(f"torch does not work in {sys.prefix}: {reason}: run scripts/env.sh train")
    found = json.loads(done.stdout.splitlines()[-1])
    known = found["machine"] | {name: found["versions"].get(name) for name in VERSIONS}
    return Machine(Environment(id=digest(known), **known), found["gpus"], found["git_commit"], digest_code())


def _print_machine() -> None:
    import torch

    from ddp_prof.train import record

    answer = {
        "machine": record.machine(),
        "versions": record.versions(),
        "git_commit": record.git_commit(),
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _print_machine()
