"""What one rank of the all-reduce benchmark does; the only file here that needs torch.

Calls of all sizes are interleaved in rounds, so that drift affects all sizes alike. Before each call the ranks meet in
a barrier. The time of a call is the shortest over the ranks, since the rank that enters last does not wait for others,
or, if asked for, the longest, which holds what the barrier left of the others' delays.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_prof.errors import DdpProfError, WorkloadError
from ddp_prof.run_config import RunConfig
from ddp_prof.train.launch import die_with_launcher, leave_failure
from ddp_prof.train.process_group import choose_device, count_ranks_per_gpu, find_place, process_group

FLOAT32_BYTES = 4


def main() -> int:
    """Measure what the launcher's JSON argument asks for; rank 0 writes the times of each size."""
    die_with_launcher()
    asked = json.loads(sys.argv[1])
    place = find_place(os.environ)
    config = RunConfig(variant="naive", device=asked["device"], backend=asked["backend"])
    try:
        device, backend = choose_device(config, place)
        with process_group(place, device, backend, config.timeout):
            times = measure(asked["bytes"], asked["calls"], asked["warmup"], device, asked["over_ranks"])
        if place.rank == 0:
            sharing = count_ranks_per_gpu(config, place, device)
            answer = {"device": device.type, "backend": backend, "ranks_per_gpu": sharing, "times_ns": times}
            Path(asked["output"]).write_text(json.dumps(answer), encoding="utf-8")
    except (DdpProfError, RuntimeError) as error:
        leave_failure(place.rank, error if isinstance(error, DdpProfError) else WorkloadError(str(error).strip()))
        return 1
    return 0


def measure(
    sizes: Sequence[int], calls: int, warmup: int, device: torch.device, over_ranks: str
) -> dict[int, list[int]]:
    """By size of a message, the nanoseconds of each call: the shortest or longest over the ranks."""
    # The same random numbers on all ranks: zeros may be quicker to move, and to add up.
    generator = torch.Generator(device).manual_seed(0)
    source = torch.rand(max(sizes) // FLOAT32_BYTES, generator=generator, dtype=torch.float32, device=device)
    buffer = source.clone()
    dist.all_reduce(buffer)
    if not torch.allclose(buffer, source * dist.get_world_size()):
        raise WorkloadError("the all-reduce gave a wrong sum")
    counts = {size: size // FLOAT32_BYTES for size in sizes}

    def round_of_calls() -> list[int]:
        return [_time_call(buffer[:count], source[:count]) for count in counts.values()]

    for _ in range(warmup):
        round_of_calls()
    own = torch.tensor([round_of_calls() for _ in range(calls)], device=device)
    dist.all_reduce(own, dist.ReduceOp.MIN if over_ranks == "min" else dist.ReduceOp.MAX)
    return dict(zip(counts, own.T.tolist(), strict=True))


def _time_call(message: torch.Tensor, source: torch.Tensor) -> int:
    """Nanoseconds of the host's clock from the call to the finished sum."""
    message.copy_(source)  # sums of sums would leave the range of numbers
    dist.barrier()
    _settle(message.device)
    start_ns = time.perf_counter_ns()
    dist.all_reduce(message)
    _settle(message.device)
    return time.perf_counter_ns() - start_ns


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
