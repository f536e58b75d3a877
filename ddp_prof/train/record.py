"""Records a run: in which steps a profiler records, and what ``run.json`` holds besides the settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddp_prof
from ddp_prof import annotate, range_names
from ddp_prof.annotate.recording import export_trace, make_profile
from ddp_prof.atomic_file import atomic_write
from ddp_prof.ddp import DataParallel
from ddp_prof.ddp.all_reduce import ReducingVariant
from ddp_prof.ddp.buckets import TakenGradient
from ddp_prof.errors import WorkloadError
from ddp_prof.manifest import RANKS_PER_GPU, HostTimes, Manifest, MessageTimes, Parameter
from ddp_prof.run_config import MANIFEST_FIELDS
from ddp_prof.train.arguments import Arguments
from ddp_prof.train.process_group import Seat
from ddp_prof.train.workload import Trainer


def choose_recording(
    device: torch.device, kineto: Path | None, rank: int, timeout_s: float
) -> AbstractContextManager[None] | None:
    """Return the context in which the measured steps are recorded; every rank must enter it.

    With ``kineto``, the path of a trace, torch.profiler records the block. Otherwise on a GPU the context tells nsys
    when to record, and on a CPU it is ``None``: a profiler, if there is one, records the whole process. At the start
    and the end of the context the ranks wait for each other, at most ``timeout_s`` seconds.
    """
    if kineto is not None:
        return _kineto(rank_path(kineto, rank), GlooBarrier(device, timeout_s))
    return _cuda_profiler(GlooBarrier(device, timeout_s)) if device.type == "cuda" else None


class GlooBarrier:
    """A barrier for all ranks and their devices: calling it waits until each rank and its device have got there.

    It always uses gloo: NCCL's barrier is an all-reduce, which would be recorded like the all-reduces of the training.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.device = device

    def __call__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self._group)


@contextmanager
def _cuda_profiler(meet: GlooBarrier) -> Iterator[None]:
    """Call ``cudaProfilerStart`` before and ``cudaProfilerStop`` after the block.

    ``nsys --capture-range=cudaProfilerApi`` records between them. The ranks wait for each other before and after each
    call, because the first rank that stops may end the recording of all ranks. After a failure in the block nothing is
    called, as a peer may have ended.
    """
    meet()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch's omission
    meet()
    yield
    meet()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # torch's omission
    meet()


@contextmanager
def _kineto(path: Path, meet: GlooBarrier) -> Iterator[None]:
    """Record the block by ``torch.profiler`` and write the trace of this rank to ``path``, unless the block failed."""
    recorded = make_profile(on_gpu=meet.device.type == "cuda")
    meet()
    with recorded:
        meet()
        yield
    with write_errors(path), atomic_write(path) as partial:
        export_trace(recorded, partial, is_compressed=path.name.endswith(".gz"))


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise WorkloadError, with the reason, if ``path`` cannot be written in the block, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise WorkloadError(f"cannot write {path}: {error.strerror or error}") from error


def rank_path(path: Path, rank: int) -> Path:
    """Return the path of a rank's trace: ``a.rank3.json.gz`` for ``a.json.gz`` and rank 3."""
    suffix = ".json.gz" if path.name.endswith(".json.gz") else ".json"
    return path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")


def describe_run(
    arguments: Arguments,
    trainer: Trainer,
    seat: Seat,
    host_times: Sequence[HostTimes],
    messages: Sequence[MessageTimes],
    *,
    final_loss: float,
    peak_memory_bytes: int,
) -> Manifest:
    """Return the manifest of a run, the content of its ``run.json``.

    Args:
        arguments: The configuration of the run.
        trainer: The trained variant and its optimizer.
        seat: The device and backend of this rank.
        host_times: The times of the measured steps, then of the synchronized steps.
        messages: The number and times of the collectives of the synchronized steps, by message size.
        final_loss: The loss of the last measured step, averaged over the ranks.
        peak_memory_bytes: The peak of the rank with the largest peak.
    """
    steps = [times for times in host_times if not times.is_synchronized]
    counted = len(host_times) - len(steps)  # the number of synchronized steps, in which ``messages`` were counted
    variant, options = trainer.variant, arguments.manifest_options()
    if isinstance(variant, ReducingVariant):
        options["buckets"] = variant.assignment  # for each bucket, in launch order, positions of trained parameters
    if seat.ranks_per_gpu > 1:
        names = sorted(name for name in os.environ if name.startswith("NCCL_"))
        options |= {RANKS_PER_GPU: seat.ranks_per_gpu, "nccl_environment": {name: os.environ[name] for name in names}}
    options["state_bytes"] = count_state(variant, trainer.optimizer)
    return Manifest(
        **{name: getattr(arguments, name) for name in MANIFEST_FIELDS},
        world_size=dist.get_world_size(),
        backend=seat.backend,
        device=seat.device.type,
        step_seconds=tuple(step.step_ns / 1e9 for step in steps),
        communication_seconds=tuple(waited / 1e9 for step in steps if (waited := step.communication_ns) is not None),
        final_loss=final_loss,
        profiler=arguments.profiler,
        key=arguments.key,
        versions=versions(),
        machine=machine(),
        git_commit=git_commit(),
        command=("python", "-m", "ddp_prof.train", *sys.argv[1:]),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        parameters=tuple(
            Parameter(name, item.numel(), str(item.dtype).removeprefix("torch."), item.requires_grad)
            for name, item in variant.module.named_parameters()
        ),
        options=options,
        host_times=tuple(host_times),
        messages=tuple(messages) if variant.is_blocking else (),
        collectives=sum(row.calls for row in messages) // counted if counted else None,
        communicated_bytes=sum(row.calls * row.bytes for row in messages) // counted if counted else None,
        peak_memory_bytes=peak_memory_bytes,
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, this package and, where they are there, nvtx, CUDA and NCCL."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "ddp_prof": ddp_prof.__version__}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["nvtx"] = importlib.metadata.version("nvtx")
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's omission
    return found


def machine() -> dict[str, str | int]:
    """Return the name of the CPU, the number of cores, the bytes of memory, the system and the GPUs of this machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cpu = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": ", ".join(gpus),
    }


def describe_host() -> dict[str, Any]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"machine": machine(), "versions": versions(), "git_commit": git_commit(), "gpus": gpus}


def git_commit() -> str | None:
    """Return the commit of the checkout from which this package runs; ``None`` if it runs from no checkout."""
    file = Path(__file__)
    # An installed package may lie in another project's checkout, so the commit must contain this file.
    command = ["git", "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # fixed words
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split()[0]


def count_state(variant: DataParallel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state that this rank keeps between two steps.

    Each storage is counted once. Gradients include the buckets of which they are views. Buffers of the communication
    library are not counted. Call it after a step.
    """
    stepped = variant.optimizer_parameters()
    parameters = [*variant.module.parameters(), *stepped]
    held = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [each for each in held if not isinstance(each, TakenGradient)]  # a placeholder has no memory
    states = [value for kept in optimizer.state.values() for value in kept.values()]
    return {
        "parameters": _storage_bytes(parameters),
        "gradients": _storage_bytes([*gradients, *variant.kept_tensors()]),
        "optimizer": _storage_bytes([value for value in states if hasattr(value, "untyped_storage")]),
    }


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank, each storage once; of a DTensor, this rank's part."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


def peak_resident_bytes() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS gives bytes, Linux KiB
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class MessageLog(annotate.Recorder):
    """Keeps the ranges of a run in memory, and summarizes how long its collectives took.

    Args:
        wait_for_device: Called before each range starts and before it ends, so that the range of a blocking collective
            contains the whole collective and nothing else. For a variant that does not wait for each collective it must
            do nothing.
    """

    def __init__(self, wait_for_device: Callable[[], None]) -> None:
        super().__init__()
        self._wait_for_device = wait_for_device

    def start(self, text: str) -> object:
        self._wait_for_device()
        return super().start(text)

    def end(self, token: Any) -> None:
        self._wait_for_device()
        super().end(token)

    def summarize(self) -> tuple[MessageTimes, ...]:
        """Return the number and the times of the collectives of each message size, in ascending order of sizes."""
        durations_ns: dict[int, list[int]] = {}
        for closed in self.ranges:
            parsed = range_names.parse_range(closed.text)
            if parsed.name in range_names.COLLECTIVES:
                size = parsed.number("bytes") or 0
                durations_ns.setdefault(size, []).append(closed.end_ns - closed.start_ns)
        return tuple(
            MessageTimes(size, len(times), round(statistics.median(times)), min(times))
            for size, times in sorted(durations_ns.items())
        )
