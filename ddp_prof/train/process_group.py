"""Where a rank runs and whom it talks to: its place, device and backend, and the process group."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

from ddp_prof.errors import WorkloadError
from ddp_prof.train.launch import LAUNCH_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddp_prof.train.arguments import Arguments


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands.

    Attributes:
        rank: Among all ranks.
        world: Number of ranks.
        local_rank: Among the ranks of this machine.
        local_world: Number of ranks on this machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def find_place(environment: Mapping[str, str]) -> Place:
    """Read torchrun's variables, or the launcher's, which are the same; alone where there are none."""
    if "RANK" not in environment:
        return Place()
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return Place(
        rank,
        world,
        int(environment.get("LOCAL_RANK", rank)),
        int(environment.get("LOCAL_WORLD_SIZE", world)),
    )


def choose_device(arguments: Arguments, place: Place) -> tuple[torch.device, str]:
    """The device of this rank and the backend.

    Raises:
        WorkloadError: They are not to be had as asked for.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own_gpu = gpus >= place.local_world
    backend = arguments.backend
    if backend == "auto":
        backend = "nccl" if own_gpu and arguments.device != "cpu" and dist.is_nccl_available() else "gloo"
    kind = arguments.device
    if kind == "auto":
        kind = "cuda" if backend == "nccl" or (own_gpu and backend == "gloo") else "cpu"
    _check_backend(backend, kind, gpus, place)
    return torch.device(kind, place.local_rank % gpus) if kind == "cuda" else torch.device("cpu"), backend


def _check_backend(backend: str, kind: str, gpus: int, place: Place) -> None:
    if backend == "gloo" and not dist.is_gloo_available():
        raise WorkloadError("this torch was built without gloo: choose another --backend")
    if backend == "nccl" and not dist.is_nccl_available():
        raise WorkloadError("this torch was built without NCCL: use --backend gloo, or install a CUDA build of torch")
    if kind == "cuda" and not gpus:
        raise WorkloadError("torch finds no GPU here: leave out --device and --backend, or use --device cpu")
    if backend == "nccl" and kind == "cpu":
        raise WorkloadError("NCCL reduces on GPUs only: use --backend gloo with --device cpu")
    if backend == "nccl" and gpus < place.local_world:
        raise WorkloadError(
            f"NCCL needs a GPU for each rank, but here are {gpus} GPUs for {place.local_world} ranks: "
            "start fewer ranks, or use --backend gloo"
        )


@contextmanager
def process_group(place: Place, device: torch.device, backend: str, timeout_s: float) -> Iterator[None]:
    """The default process group, while the block lasts; on failure it is left to the end of the process.

    Raises:
        WorkloadError: The ranks did not find each other.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    store = _meeting_place(place, timeout)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,  # else NCCL guesses it in each barrier
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise WorkloadError(
            f"rank {place.rank}: cannot form a process group with {backend}: {_first_line(error)}"
        ) from error
    yield
    # Only after success: with a peer gone it could wait for it.
    dist.destroy_process_group()


def _meeting_place(place: Place, timeout: timedelta) -> Store | None:
    """Where the ranks find each other; ``None`` is torchrun's, by the environment.

    Raises:
        WorkloadError: It is a port that cannot be had.
    """
    directory = os.environ.get(LAUNCH_DIRECTORY)
    if directory is None:
        return HashStore() if place == Place() else None
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return FileStore(str(Path(directory) / "store"), place.world)  # a file: no port that could be busy
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        return TCPStore(address, int(port), place.world, is_master=place.rank == 0, timeout=timeout)
    except (OSError, RuntimeError, ValueError) as error:
        reason = "is another program's" if "EADDRINUSE" in str(error) else f"cannot be had ({_first_line(error)})"
        raise WorkloadError(
            f"rank {place.rank}: MASTER_PORT {port} of {address} {reason}: choose another, or unset it"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
