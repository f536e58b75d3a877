"""Determines a rank's number, device and backend, checks the memory, and makes the process group.

The first constants are environment variables of NCCL for ranks that share a GPU, see :func:`nccl_environment`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

from ddp_prof.errors import OutOfMemoryError, WorkloadError, first_line
from ddp_prof.run_config import RunConfig
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.launch import LAUNCH_DIRECTORY

ALLOWED_SINCE = (2, 30)
"""The first version of NCCL with ``NCCL_MULTI_RANK_GPU_ENABLE``."""

COMMON = {
    # A kernel that waits for a peer's kernel on the same GPU must leave room for it. MAX_CTAS counts from 2.17 on.
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
}
"""Set with every version of NCCL."""
ALLOWED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Set from :data:`ALLOWED_SINCE` on."""
HOST_PER_RANK = {
    # The first three belong to transports within a host, by which NCCL could notice that the ranks share a host.
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NET": "Socket",  # these "hosts" have no other network, even if the machine has a plugin
    "NCCL_NET_PLUGIN": "none",
}
"""Set before :data:`ALLOWED_SINCE`, when each rank pretends to be a host of its own."""
LOOPBACK = "lo"
ONE_MACHINE = {"NCCL_SOCKET_IFNAME": LOOPBACK, "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
"""Set if all ranks are on one machine: they communicate through its loopback interface."""

REFUSALS = (
    "Duplicate GPU detected",  # 2.5 to 2.29
    "Multiple ranks detected using the same GPU",  # 2.30.3
    "Multiple Ranks are using the same GPU/Partition",  # 2.30.7
    "invalid usage",  # all versions, if they give no details
)
"""Texts by which NCCL refuses ranks that share a GPU; the comments are versions of NCCL."""

BYTES_PER_PARAMETER = 20
"""Memory per parameter: weight, gradient, bucket and two moments of AdamW, in float32; without activations."""
CGROUPS = Path("/sys/fs/cgroup")
"""Root of the control groups."""
MEMBERSHIP = Path("/proc/self/cgroup")
"""File with the control groups to which this process belongs."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank's number and the number of ranks, in the job and on this machine (local); the default is a single rank."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def find_place(environment: Mapping[str, str]) -> RankInfo:
    """Read a rank's number from the variables that torchrun and our launcher set; without them this is the only rank.

    Raises WorkloadError if a variable is missing or no whole number.
    """
    if "RANK" not in environment:
        return RankInfo()
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank, local_world = environment.get("LOCAL_RANK", rank), environment.get("LOCAL_WORLD_SIZE", world)
        return RankInfo(rank, world, int(local_rank), int(local_world))
    except (KeyError, ValueError) as error:
        names = "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        raise WorkloadError(f"a launcher must set {names} to whole numbers: {error}") from error


class Seat(NamedTuple):
    """The device and the backend of a rank.

    ``ranks_per_gpu`` is how many ranks share a GPU: as many as requested, or more than 1 because there are fewer GPUs
    than ranks. On a CPU it is 1.
    """

    device: torch.device
    backend: str
    ranks_per_gpu: int = 1


def choose_seat(config: RunConfig, place: RankInfo) -> Seat:
    """Return the device and backend of a rank: those requested, or for ``auto`` those that this machine can offer.

    Raises WorkloadError if the requested ones do not exist here or do not fit together.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_seat = gpus * (config.ranks_per_gpu or 1) >= place.local_world
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if has_seat and config.device != "cpu" and dist.is_nccl_available() else "gloo"
    kind = config.device
    if kind == "auto":
        kind = "cuda" if backend == "nccl" or (has_seat and backend == "gloo") else "cpu"
    _check_seats(backend, kind, config.ranks_per_gpu, gpus, place.local_world)
    if kind == "cpu":
        return Seat(torch.device("cpu"), backend)
    # If sharing was requested, consecutive ranks share a GPU; otherwise ranks go round the GPUs. -(-a // b) rounds up.
    shared = config.ranks_per_gpu
    gpu = place.local_rank // shared if shared else place.local_rank % gpus
    return Seat(torch.device(kind, gpu), backend, min(shared or -(-place.local_world // gpus), place.local_world))


def _check_seats(backend: str, kind: str, ranks_per_gpu: int | None, gpus: int, ranks: int) -> None:
    """Raise WorkloadError if the ranks of this machine cannot use the backend on the kind of device (cpu, cuda)."""
    seats = gpus * (ranks_per_gpu or 1)
    if backend == "gloo" and not dist.is_gloo_available():
        raise WorkloadError("this torch was built without gloo: choose another --backend")
    if backend == "nccl" and not dist.is_nccl_available():
        raise WorkloadError("this torch was built without NCCL: use --backend gloo, or install a CUDA build of torch")
    if kind == "cuda" and not gpus:
        raise WorkloadError(
            "torch finds no GPU here: install a CUDA build of torch, or use --device cpu (DEVICE=cpu), --backend gloo"
        )
    if backend == "nccl" and kind == "cpu":
        raise WorkloadError("NCCL reduces on GPUs only: use --backend gloo with --device cpu")
    if backend == "nccl" and seats < ranks:
        raise WorkloadError(
            f"NCCL needs a GPU for each rank, but here are {gpus} GPUs for {ranks} ranks: "
            "start fewer ranks, use --backend gloo, or let them take turns with --ranks-per-gpu"
        )
    if ranks_per_gpu and kind == "cpu":
        raise WorkloadError(f"--ranks-per-gpu {ranks_per_gpu}, but torch finds no GPU for {ranks} ranks: leave it out")
    if ranks_per_gpu and seats < ranks:
        raise WorkloadError(
            f"--ranks-per-gpu {ranks_per_gpu} seats {seats} ranks on {gpus} GPUs, but there are {ranks}: "
            f"use --ranks-per-gpu {-(-ranks // gpus)}"
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of memory that a number of ranks share; ``who`` begins a sentence about it: "this machine has"."""

    who: str
    bytes: int
    ranks: int


def check_memory(model_size: str, ranks: int) -> None:
    """Raise OutOfMemoryError if the model does not fit into the memory for ``ranks`` ranks on this machine.

    Without this check the system would kill a process without a message.
    """
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
    """Return the limits of memory that hold for ``ranks`` ranks of this machine: machine, control groups, ulimit."""
    limits = [Limit("this machine has", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), ranks)]
    limits += [Limit("this control group has", size, ranks) for size in _cgroup_limits(CGROUPS, _read(MEMBERSHIP))]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(Limit("ulimit -v allows a process", address_space, 1))
    return limits


def _cgroup_limits(root: Path, membership: str) -> list[int]:
    """Return the memory limits, in bytes, of the control groups of this process and of all groups above them.

    Args:
        root: The folder of the control groups. In a container it may be the group of the container itself.
        membership: The text of ``/proc/self/cgroup``: lines ``0::/path`` (version 2) or ``7:memory:/path`` (version 1).
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
    return [int(text) for text in map(_read, files) if text.isdigit() and int(text)]  # not ``max``: no limit


def _read(path: Path) -> str:
    """Return the text of a file without the spaces and line ends around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@contextmanager
def process_group(place: RankInfo, seat: Seat, timeout_s: float) -> Iterator[None]:
    """Make the default process group for the block; after an error in the block it is not destroyed.

    Args:
        place: This rank's number and the number of ranks.
        seat: Its device and backend.
        timeout_s: How many seconds a rank waits for another rank.

    Raises:
        WorkloadError: The group cannot be made.
    """
    device, backend, ranks_per_gpu = seat
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_shared = backend == "nccl" and ranks_per_gpu > 1
    if is_shared:
        one_machine = place.local_world == place.world
        os.environ |= nccl_environment(place.rank, _nccl_version(), os.environ, one_machine=one_machine)
    timeout = timedelta(seconds=timeout_s)
    store = _make_store(place, timeout)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,  # without it NCCL guesses the device in each barrier
        )
    except (OSError, RuntimeError, ValueError) as error:
        if is_shared and (refused := explain_nccl_refusal(str(error), _nccl_version())):
            raise WorkloadError(f"rank {place.rank}: {refused}") from error
        reason = _why_no_interface(str(error)) or first_line(error)
        raise WorkloadError(f"rank {place.rank}: cannot form a process group with {backend}: {reason}") from error
    yield
    # Only after success: if a peer has ended, this could wait for it.
    dist.destroy_process_group()


def _why_no_interface(message: str) -> str | None:
    """Return a line with advice if gloo has not found the network interface that a variable names, else ``None``."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not name or "Unable to find address for" not in message:
        return None
    if name == LOOPBACK:  # our launcher names it by default
        advice = f"'ip link set {LOOPBACK} up' brings it up, or set GLOO_SOCKET_IFNAME to another one"
        return f"the network interface {LOOPBACK} has no address here: {advice}"
    return f"GLOO_SOCKET_IFNAME={name[:80]} is no network interface with an address here: choose another, or unset it"


def _make_store(place: RankInfo, timeout: timedelta) -> Store | None:
    """Return the store through which the ranks find each other, or ``None``: torch uses what torchrun has set.

    A single rank needs no other process. The ranks of our launcher meet in a file, or at ``MASTER_PORT`` if it is set.
    Raises WorkloadError if the port cannot be used.
    """
    directory = os.environ.get(LAUNCH_DIRECTORY)
    if directory is None:
        return HashStore() if place == RankInfo() else None
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return FileStore(str(Path(directory) / "store"), place.world)
    if not (port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise WorkloadError(f"MASTER_PORT={port[:80]}: not a port from 1 to 65535: choose one, or unset it")
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        return TCPStore(address, int(port), place.world, is_master=place.rank == 0, timeout=timeout)
    except (OSError, RuntimeError) as error:
        reason = "is another program's" if "EADDRINUSE" in str(error) else f"is not available ({first_line(error)})"
        raise WorkloadError(
            f"rank {place.rank}: MASTER_PORT {port} of {address} {reason}: choose another, or unset it"
        ) from error


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]  # torch's omission


def nccl_environment(
    rank: int, nccl: tuple[int, ...], own: Mapping[str, str], *, one_machine: bool = True
) -> dict[str, str]:
    """Return the environment variables to set for a rank that shares its GPU with other ranks.

    NCCL refuses two ranks of one host on one GPU. From 2.30 on, a variable allows it. Before, each rank pretends to be
    a host of its own (``NCCL_HOSTID``), and the "hosts" communicate through sockets. In both cases the ranks take turns
    on the GPU, so such a run shows *that* something works, not how fast. NCCL reads these variables only at its first
    call.

    Args:
        rank: Number of the rank.
        nccl: The version of NCCL.
        own: The environment of this process; its variables are left out of the result.
        one_machine: Whether all ranks are on one machine.
    """
    way = ALLOWED if nccl >= ALLOWED_SINCE else {"NCCL_HOSTID": f"ddp_prof-{rank}", **HOST_PER_RANK}
    variables = {**COMMON, **way, **(ONE_MACHINE if one_machine else {})}
    return {name: value for name, value in variables.items() if name not in own}


def explain_nccl_refusal(message: str, nccl: tuple[int, ...]) -> str | None:
    """Return a line with advice if ``message`` is NCCL's refusal to let ranks share a GPU, else ``None``."""
    lines = [line.strip() for line in message.splitlines()]
    found = next((line for sign in REFUSALS for line in lines if sign in line), None)
    if found is None:
        return None
    version = ".".join(map(str, nccl))
    return (
        f"NCCL {version} refuses ranks that share a GPU ({found[:120]}): use --backend gloo --device cuda, "
        "or start one rank per GPU"
    )
