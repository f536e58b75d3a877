"""The window that a profiler records, opened and closed on all ranks together."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_prof.annotate.unattended import make_profile
from ddp_prof.atomic_file import atomic_write


def choose_recording(
    device: torch.device, kineto: Path | None, rank: int, timeout_s: float
) -> AbstractContextManager[None] | None:
    """What to put round the measured steps; ``None`` where a profiler records the whole process, or there is none.

    Every rank must enter it, and then waits for the others for ``timeout_s`` seconds.
    """
    if kineto is not None:
        return _kineto(rank_path(kineto, rank), GlooBarrier(device, timeout_s))
    return _cuda_profiler(GlooBarrier(device, timeout_s)) if device.type == "cuda" else None


class GlooBarrier:
    """A barrier for all ranks, with their devices idle.

    Through gloo, whatever the backend: NCCL's barrier is an all-reduce, which would be recorded with the others.
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
    """``cudaProfilerStart`` to ``cudaProfilerStop``, which ``nsys --capture-range=cudaProfilerApi`` waits for.

    The ranks meet on both sides: the first to stop may end the recording for all. After a failure they do not: a peer
    may be gone, and would be waited for.
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
    """``torch.profiler``, written as Kineto JSON: one file per rank, our ranges included; none after a failure."""
    recorded = make_profile(on_gpu=meet.device.type == "cuda")
    meet()
    with recorded:
        meet()
        yield
    with atomic_write(path) as partial:
        recorded.export_chrome_trace(str(partial))
        if path.name.endswith(".gz"):
            partial.write_bytes(gzip.compress(partial.read_bytes(), 6))


def rank_path(path: Path, rank: int) -> Path:
    suffix = ".json.gz" if path.name.endswith(".json.gz") else ".json"
    return path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")
