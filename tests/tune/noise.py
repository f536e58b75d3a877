"""Noise of step lengths, as recorded and as feared: logarithms, a value for each run, in the order of the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ddp_prof.benchmark.store import OK, load_results
from tests.conftest import ROOT

Numbers = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Numbers]


@cache
def recorded_residuals() -> Numbers:
    """What each run of the study differs by from the mean of its setting, in the order in which they were made."""
    results = load_results(ROOT / "traces" / "results.db")
    runs = sorted((run for run in results.runs if run.status == OK), key=lambda run: (run.repeat, run.created))
    lengths: dict[str, list[float]] = {run.id: [] for run in runs}
    for step in results.steps:
        if not step.is_synchronized and step.run in lengths:
            lengths[step.run].append(step.step_ns)
    medians = {run: float(np.log(np.median(values))) for run, values in lengths.items() if values}
    by_setting: dict[tuple[object, ...], list[float]] = {}
    for run in runs:
        by_setting.setdefault((run.variant, run.bucket_size_mb, run.seq_len), []).append(medians[run.id])
    means = {key: float(np.mean(values)) for key, values in by_setting.items()}
    return np.array([medians[run.id] - means[run.variant, run.bucket_size_mb, run.seq_len] for run in runs])


def recorded(generator: np.random.Generator, runs: int) -> Numbers:
    """Stretches of 27 recorded runs each, so that neighbours stay neighbours."""
    known, stretch = recorded_residuals(), 27
    starts = generator.integers(0, len(known), runs // stretch + 1)
    return np.concatenate([np.take(known, np.arange(start, start + stretch), mode="wrap") for start in starts])[:runs]


def normal(generator: np.random.Generator, runs: int) -> Numbers:
    return 0.01 * generator.normal(size=runs)


def heavy_tails(generator: np.random.Generator, runs: int) -> Numbers:
    """Without a variance."""
    return 0.005 * generator.standard_t(2, size=runs)


def spikes(generator: np.random.Generator, runs: int) -> Numbers:
    """One run of ten beside other work."""
    return normal(generator, runs) + (generator.random(runs) < 0.1) * generator.exponential(0.2, size=runs)


def drift(generator: np.random.Generator, runs: int) -> Numbers:
    """Each run is half a spread slower than the one before."""
    return normal(generator, runs) + 0.005 * np.arange(runs)


def alike_neighbours(generator: np.random.Generator, runs: int) -> Numbers:
    """A run is as slow as the one before, for nineteen twentieths."""
    found, new = np.zeros(runs), normal(generator, runs)
    for at in range(1, runs):
        found[at] = 0.95 * found[at - 1] + new[at]
    return found


def two_speeds(generator: np.random.Generator, runs: int) -> Numbers:
    """A machine that is a tenth slower for some twenty runs, then not."""
    return 0.1 * (np.cumsum(generator.random(runs) < 0.05) % 2) + 0.2 * normal(generator, runs)


ALL: Sequence[Noise] = (recorded, normal, heavy_tails, spikes, drift, alike_neighbours, two_speeds)
