"""Measures what a monitor costs between two measurements, in a step on one thread of one process.

    python scripts/dev/monitor_cost.py

Wall time of a step varies by much more than the cost, as other programs do. So two figures are printed that do not:

- the time of ``Monitor.step`` itself, per call, which is all that is called between two measurements. As a share of the
  step this is the cost, if the calls leave no trace in caches;
- processor time of steps with and without it, in turns, every second step. The interval is the bootstrap's over medians
  of 20 pairs each, as neighbours in time are alike; that of plain against plain steps shows what the method can tell.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import nn

from ddp_prof.analyze.statistics import bootstrap_interval
from ddp_prof.annotate import Monitor

CALLS, ROUNDS, PAIRS, OF_BLOCK = 20_000, 11, 4000, 20


def per_call_ns(call: Callable[[], None]) -> float:
    """Median over rounds of the mean time of a call."""
    times = list[float]()
    for _ in range(ROUNDS):
        begun = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - begun) / CALLS)
    return median(times)


def compare(name: str, plain: Callable[[], None], other: Callable[[], None]) -> None:
    """Print how much more processor time ``other`` takes, with a 95 % interval."""

    def timed(run: Callable[[], None]) -> int:
        begun = time.thread_time_ns()
        run()
        return time.thread_time_ns() - begun

    pairs = []
    for pair in range(PAIRS):
        order = (plain, other) if pair % 2 else (other, plain)
        first, second = map(timed, order)
        pairs.append((first, second) if pair % 2 else (second, first))
    lengths = np.array(pairs[OF_BLOCK:])
    cost = np.median((lengths[:, 1] - lengths[:, 0]).reshape(-1, OF_BLOCK), axis=1)
    step, middle = float(np.median(lengths[:, 0])), float(np.median(cost))
    low, high = bootstrap_interval(cost) or (float("nan"), float("nan"))
    print(
        f"{name}: {middle / 1e3:+.1f} us of {step / 1e6:.2f} ms, "
        f"{middle / step:+.3%} [{low / step:+.3%}, {high / step:+.3%}]"
    )


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(64, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(samples).pow(2).mean().backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(every=10**9, folder=folder, start=100)
        monitor._first = 10**9  # never one that is measured

        def monitored_step() -> None:
            step()
            monitor.step()

        call_ns = per_call_ns(monitor.step)
        begun = time.perf_counter_ns()
        for _ in range(100):
            step()
        step_ns = (time.perf_counter_ns() - begun) / 100
        print(f"a call: {call_ns / 1e3:.2f} us, {call_ns / step_ns:.3%} of a step of {step_ns / 1e6:.2f} ms")
        compare("monitored steps against plain ones", step, monitored_step)
        compare("plain steps against plain ones", step, step)


if __name__ == "__main__":
    main()
