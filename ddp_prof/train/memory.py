"""The memory that a run needs at least, the memory limits, and the memory that ranks used."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_prof.ddp import DataParallel
from ddp_prof.errors import OutOfMemoryError
from ddp_prof.train.sizes import MODEL_SIZES

BYTES_PER_PARAMETER = 20
"""float32 weight, gradient and bucket, two moments of AdamW; activations come on top."""
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Limit:
    """A memory limit, whose it is (as in "this machine has"), and how many ranks share it."""

    who: str
    bytes: int
    ranks: int


def count_state(variant: DataParallel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this rank keeps between two steps, each storage once; call it after a step.

    Gradients are counted with the buckets of which they are views; activations and a communication library's own
    buffers are left out.
    """
    stepped = variant.optimizer_parameters()
    parameters = [*variant.module.parameters(), *stepped]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [value for kept in optimizer.state.values() for value in kept.values()]
    return {
        "parameters": _storage_bytes(parameters),
        "gradients": _storage_bytes([*gradients, *variant.kept_tensors()]),
        "optimizer": _storage_bytes([value for value in states if hasattr(value, "untyped_storage")]),
    }


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


def check_memory(model_size: str, ranks: int) -> None:
    """Raise an error if a model cannot fit: on a CPU the system would kill a process silently."""
    tightest = max(find_limits(ranks), key=lambda limit: limit.ranks / limit.bytes)
    need = tightest.ranks * BYTES_PER_PARAMETER * MODEL_SIZES[model_size].parameter_count
    if need > tightest.bytes:
        gib = f"{need / 2**30:.3g} GiB"
        whose = f"--model-size {model_size} needs {gib} per rank"
        if tightest.ranks > 1:
            whose = f"{tightest.ranks} ranks of --model-size {model_size} need {gib}"
        raise OutOfMemoryError(
            f"out of memory: {whose}, {tightest.who} {tightest.bytes / 2**30:.3g}: choose a smaller one"
        )


def find_limits(ranks: int) -> list[Limit]:
    """The machine's memory, the control groups' limits, and what a process may address (``ulimit -v``)."""
    limits = [Limit("this machine has", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), ranks)]
    limits += [
        Limit("this control group has", cgroup_limit, ranks)
        for cgroup_limit in _cgroup_limits(CGROUPS, _read(MEMBERSHIP))
    ]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(Limit("ulimit -v allows a process", address_space, 1))
    return limits


def resident_bytes() -> int:
    """The most memory that this process ever had at once."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _cgroup_limits(root: Path, membership: str) -> list[int]:
    """Limits of the control groups that ``/proc/self/cgroup`` names, and of all that they lie in.

    Its lines are ``0::/path`` (version 2) or ``7:memory:/path`` (version 1). A container may see its own as the root.
    """
    files: list[Path] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        inner = Path(path.strip("/"))
        folders = (inner, *inner.parents)
        if not controllers:
            files += [root / folder / "memory.max" for folder in folders]
        elif "memory" in controllers.split(","):
            files += [root / "memory" / folder / "memory.limit_in_bytes" for folder in folders]
    return [int(text) for text in map(_read, files) if text.isdigit() and int(text)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
