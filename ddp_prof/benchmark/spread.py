"""How far the median of a few runs may be off.

The machine, not the clock, limits what a benchmark tells: runs of one setting differ by more than steps of one run. A
setting has only some three runs, too few to know their scatter, so it is pooled: relative standard deviations of runs
about their setting's mean, over settings that may be taken to scatter alike, weighted by degrees of freedom. That is
the error mean square of an analysis of variance (R. A. Fisher, "Statistical Methods for Research Workers", 1925).
The median of n runs is then off by at most t * s / sqrt(n), in 95 of 100 cases, with Student's t of the pooled degrees
of freedom; from three runs on times sqrt(pi / 2), by which a median of many normal values scatters more than their
mean, and one of few by less.

A machine that is busy for a while slows all runs of that while. The suite therefore runs the variants one after the
other, and repeats that: runs of one *block*, one repeat of the same work, are near in time. Figures are compared within
blocks, as ratios, whose error is what a block leaves of the scatter (Fisher's randomized blocks: the residual of an
additive model of settings and blocks). What a single figure may be off by contains the blocks' part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ddp_prof.analyze.statistics import LEAST_STEPS, NOTCH

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

CONFIDENCE = 0.95
LEAST_FREEDOM = 4
"""Degrees of freedom of a pool, below which a wider pool is taken."""

Key = TypeVar("Key", bound="Hashable")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured figure.

    Attributes:
        value: Median over runs of the medians of each run's steps, in the unit of the field that holds it.
        half_width: Of the 95 % interval about it; ``None`` where nothing tells it.
        is_between_runs: Whether runs told the scatter; else it is that of one run's steps, and another run may be
            further off.
        paired_half_width: The same for comparing it with figures of the same blocks; ``None`` where runs do not tell.
        medians: Of each run, by the block that it belongs to.
        paired_freedom: Degrees of freedom that tell ``paired_half_width``; ``None`` where that is not known.
    """

    value: float
    half_width: float | None = None
    is_between_runs: bool = False
    paired_half_width: float | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    paired_freedom: int | None = None


def estimate_all(
    samples: Mapping[Key, Mapping[str, Sequence[float]]],
    work_of: Callable[[Key], Hashable],
    pools_of: Callable[[Key], Sequence[Hashable]],
) -> dict[Key, Estimate]:
    """Estimate a figure of all settings of one machine.

    Args:
        samples: Of each setting the values of each run's steps, by the run's repeat; what has none is left out.
        work_of: Settings of the same work share their blocks, one for each repeat.
        pools_of: The pools that a setting belongs to, the narrowest first: settings with the same pool are taken to
            scatter alike, relative to their means.
    """
    medians = {
        key: {repeat: float(np.median(steps)) for repeat, steps in runs.items() if len(steps)}
        for key, runs in samples.items()
    }
    medians = {key: runs for key, runs in medians.items() if runs}
    told = {key: runs for key, runs in medians.items() if len(runs) > 1 and np.mean(list(runs.values())) > 0}
    alone = _pool(*_residuals(told, lambda *_: None), pools_of)
    paired = _pool(*_residuals(told, lambda key, repeat: (work_of(key), repeat)), pools_of)
    found = {}
    for key, runs in medians.items():
        value, pools = float(np.median(list(runs.values()))), pools_of(key)
        half_width, freedom = _interval(value, len(runs), alone, pools)
        between = half_width is not None
        if not between:
            half_width = _within_run(next(steps for steps in samples[key].values() if len(steps)))
        # Where too few settings share blocks to tell what blocks do, that is left in.
        of_pairs, freedom_of_pairs = _interval(value, len(runs), paired, pools)
        if of_pairs is None and between:
            of_pairs, freedom_of_pairs = half_width, freedom
        found[key] = Estimate(value, half_width, between, of_pairs, runs, freedom_of_pairs)
    return found


def half_width(value: float, runs: int, scatter: float, freedom: int) -> float:
    """Half the 95 % interval of a median of so many runs, see the module."""
    factor = math.sqrt(math.pi / 2) if runs > 2 else 1.0
    return student_t(freedom) * scatter * factor * abs(value) / math.sqrt(runs)


Pools = dict["Hashable", tuple[float, float]]
"""Sum of squares and degrees of freedom of each pool."""


def _residuals(
    medians: Mapping[Key, Mapping[str, float]], block_of: Callable[[Key, str], Hashable]
) -> tuple[list[Key], np.ndarray, int]:
    """Of each run its setting and what is left of it, relative to the setting's mean; and the degrees of freedom.

    What a setting and a block have in common is taken away by least squares, so that runs may be missing.
    """
    keys = [key for key, runs in medians.items() for _ in runs]
    if not keys:
        return [], np.array([]), 0
    relative = np.concatenate(
        [np.array(list(runs.values())) / np.mean(list(runs.values())) for runs in medians.values()]
    )
    blocks = [block_of(key, repeat) for key, runs in medians.items() for repeat in runs]
    design = np.column_stack([_indicators(keys), _indicators(blocks)])
    fit, _, rank, _ = np.linalg.lstsq(design, relative, rcond=None)
    return keys, relative - design @ fit, len(keys) - int(rank)


def _indicators(labels: Sequence[Hashable]) -> np.ndarray:
    """A column for each label, 1 where it is."""
    columns = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    found = np.zeros((len(labels), len(columns)))
    found[np.arange(len(labels)), [columns[label] for label in labels]] = 1
    return found


def _pool(
    keys: Sequence[Key], residuals: np.ndarray, freedom: int, pools_of: Callable[[Key], Sequence[Hashable]]
) -> Pools:
    """The pools; each has the part of the degrees of freedom that it has of the runs."""
    found: Pools = {}
    for key, residual in zip(keys, residuals.tolist(), strict=True):
        for pool in pools_of(key):
            squares, own = found.get(pool, (0.0, 0.0))
            found[pool] = squares + residual**2, own + freedom / len(keys)
    return found


def _interval(
    value: float, runs: int, pools: Pools, names: Sequence[Hashable]
) -> tuple[float, int] | tuple[None, None]:
    """Half the interval, and its degrees of freedom.

    From the narrowest pool that is large enough, else from the widest; ``None`` where that knows nothing.
    """
    known = [pools[name] for name in names if name in pools]
    squares, freedom = next((value for value in known if value[1] >= LEAST_FREEDOM), known[-1] if known else (0.0, 0.0))
    if round(freedom, 6) < 1:
        return None, None
    whole = int(freedom + 1e-6)
    return half_width(value, runs, math.sqrt(squares / freedom), whole), whole


def _within_run(steps: Sequence[float]) -> float | None:
    """What the steps of one run tell of their median."""
    if len(steps) < LEAST_STEPS:
        return None
    low, high = np.percentile(steps, [25, 75]).tolist()
    return NOTCH * float(high - low) / math.sqrt(len(steps))


def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The value that Student's t exceeds to either side with probability ``1 - confidence``, by bisection."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """Probability of a value between ``-t`` and ``t``: a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for index in range(freedom // 2):
        total += term
        above, below = (2 * index + 2, 2 * index + 3) if is_odd else (2 * index + 1, 2 * index + 2)
        term *= cosine**2 * above / below
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
