"""Measures what the marks of ``annotate.instrument`` cost a step of DDP: marked and plain steps in turns, gloo, CPU.

    torchrun --nproc-per-node 2 scripts/dev/marks_cost.py

Without a profiler and under torch.profiler; of the differences of 600 pairs the median with its 95 % interval. Each 50
pairs have models of their own, made in turns: how long a step takes depends on where its tensors lie.
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


def make_step(samples: torch.Tensor, *, marked: bool) -> Callable[[], None]:
    """A step of a model of its own, as a function."""
    torch.manual_seed(0)
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

    if marked:
        annotate.instrument(model, optimizer)
    return marked_step if marked else step


def seconds(step: Callable[[], None]) -> float:
    """How long a step takes that all ranks begin together."""
    dist.barrier()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def measure_pairs(samples: torch.Tensor, number: int) -> list[tuple[float, float]]:
    """The lengths of plain and marked steps of two new models, each first in turn."""
    steps = {marked: make_step(samples, marked=marked) for marked in ((False, True) if number % 2 else (True, False))}
    pairs = []
    for pair in range(WARMUP + PAIRS):
        lengths = {marked: seconds(steps[marked]) for marked in ((False, True) if pair % 2 else (True, False))}
        pairs.append((lengths[False], lengths[True]))
    return pairs[WARMUP:]


def measure(name: str, samples: torch.Tensor) -> None:
    """Print what the marks cost, as the first rank saw it."""
    pairs = np.array([pair for number in range(ROUNDS) for pair in measure_pairs(samples, number)])
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
    measure("no profiler", samples)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        measure("torch.profiler", samples)
    dist.destroy_process_group()
