"""Measures what marks and a monitor cost in a step of DDP: such and plain steps in turns, gloo, CPU.

    torchrun --nproc-per-node 2 scripts/dev/marks_cost.py

It prints the median difference of 600 pairs with its 95 % interval: of ``annotate.instrument`` without a profiler and
under torch.profiler, and of ``Monitor.step`` between two measurements. Both
steps of a pair use the same model, because the time of a step depends on where its tensors are in memory; the model is
marked for one of them. So each marked step reads the sizes of the buckets again, which usually happens once. Under nsys
the result would be too small: there a communication hook in Python reduces the buckets, and it stays in DDP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_prof import annotate
from ddp_prof.analyze.statistics import bootstrap_interval

ROUNDS, PAIRS, WARMUP = 12, 50, 5


def make_steps(samples: torch.Tensor, *, monitors: bool) -> dict[bool, Callable[[], float]]:
    """Return functions that run a plain and a marked, or monitored, step of one new model, and return its seconds."""
    model = DistributedDataParallel(
        nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())])
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    numbers = count()

    def step() -> None:
        optimizer.zero_grad()
        model(samples).pow(2).mean().backward()
        optimizer.step()

    def marked_step() -> None:
        with annotate.step(next(numbers)):
            step()

    def timed(run: Callable[[], None]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    def timed_marked() -> float:
        marks = annotate.instrument(model, optimizer)
        try:
            return timed(marked_step)
        finally:
            marks.remove()

    monitor = annotate.Monitor(every=10**9)

    def monitored_step() -> None:
        step()
        monitor.at_step(100 + next(numbers))  # never one that is measured

    return {
        False: lambda: timed(step),
        True: (lambda: timed(monitored_step)) if monitors else timed_marked,
    }


def measure_pairs(samples: torch.Tensor, *, monitors: bool) -> list[tuple[float, float]]:
    """Return the lengths of plain and of other steps of a new model; they take turns in going first."""
    steps = make_steps(samples, monitors=monitors)
    pairs = []
    for pair in range(WARMUP + PAIRS):
        lengths = {marked: steps[marked]() for marked in ((False, True) if pair % 2 else (True, False))}
        pairs.append((lengths[False], lengths[True]))
    return pairs[WARMUP:]


def measure(name: str, samples: torch.Tensor, *, monitors: bool = False) -> None:
    pairs = np.array([pair for _ in range(ROUNDS) for pair in measure_pairs(samples, monitors=monitors)])
    cost, step = pairs[:, 1] - pairs[:, 0], float(np.median(pairs[:, 0]))
    low, high = bootstrap_interval(cost) or (float("nan"), float("nan"))
    if dist.get_rank() == 0:
        middle = float(np.median(cost))
        print(
            f"{name}: {1e6 * middle:+.0f} us [{1e6 * low:+.0f}, {1e6 * high:+.0f}] of a step of {1e3 * step:.1f} ms, "
            f"{middle / step:+.2%} [{low / step:+.2%}, {high / step:+.2%}]"
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    samples = torch.randn(256, 512)
    measure("monitor", samples, monitors=True)
    measure("no profiler", samples)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        measure("torch.profiler", samples)
    dist.destroy_process_group()
