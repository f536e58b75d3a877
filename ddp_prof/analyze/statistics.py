"""The interval of all figures: the bootstrap (B. Efron, 1979); and the steps that stand out.

The steps of a run are drawn again, with replacement, as many as there are; the ranks of a step wait for one another and
stay together. The figure of a thousand such draws scatters as that of other runs of the same steps would: the middle
95 % of them are its interval. The draws start from a fixed seed, so the same steps always have the same interval::

    steps   12 10 11 15      draws   10 10 15 12 -> 11     11 15 11 12 -> 11.5     12 12 10 11 -> 11.5   ...

What is drawn may be something else than a step, as the runs of a study or the calls of a benchmark: always what is
independent of its like, together with all that depends on it. The figure is the median, or the mean where parts must
sum. The interval of few units is too narrow: of three it is their whole range and holds the median in 75 of 100 cases;
from ten units on it does in 90 to 94.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

LEAST_STEPS = 3
"""Steps, or other units, from which a scatter can be told."""

_DRAWS = 1000
_PERCENTILES = (2.5, 97.5)
_BATCH_VALUES = 2**20
"""Values drawn at once, which bounds the memory."""

Numbers = NDArray[Any]
Statistic = Callable[[Numbers], Any]
"""A figure of each draw: of an array of draws x units x values of a unit, one number for each draw."""

median_per_draw: Statistic = partial(np.median, axis=(1, 2))
mean_per_draw: Statistic = partial(np.mean, axis=(1, 2))


def bootstrap_interval(
    units: Numbers | Sequence[Any], statistic: Statistic = median_per_draw
) -> tuple[float, float] | None:
    """The 95 % interval of a figure; ``None`` for fewer than :data:`LEAST_STEPS` units.

    A unit, as a step, is a row of values, as those of its ranks, or a single value.
    """
    if len(units) < LEAST_STEPS:
        return None
    table = np.asarray(units, float).reshape(len(units), -1)
    generator = np.random.default_rng(0)
    batch = max(1, _BATCH_VALUES // table.size)
    sizes = [min(batch, _DRAWS - first) for first in range(0, _DRAWS, batch)]
    figures = [statistic(table[generator.integers(0, len(table), (size, len(table)))]) for size in sizes]
    low, high = np.percentile(np.concatenate(figures), _PERCENTILES)
    return float(low), float(high)


def half_width_of_steps(
    ranks: Sequence[Sequence[float] | Numbers],
    statistic: Statistic = median_per_draw,
    keys: Sequence[Sequence[int] | Numbers] = (),
) -> float | None:
    """Half of the interval of a figure of the steps of each rank, by the steps that every rank has.

    ``keys`` tell which of a rank's steps is which of another's; without, or where few are alike, their positions do.
    """
    known = [np.asarray(of_rank) for of_rank in ranks if len(of_rank)]
    if not known:
        return None
    positions = [np.arange(len(of_rank)) for of_rank in known]
    called = [np.asarray(of_rank) for of_rank in keys if len(of_rank)] or positions
    if len(reduce(np.intersect1d, called)) < LEAST_STEPS:
        called = positions
    common = reduce(np.intersect1d, called)
    units = [
        of_rank[np.argsort(key)][np.isin(np.sort(key), common)] for of_rank, key in zip(known, called, strict=True)
    ]
    interval = bootstrap_interval(np.array(units).T, statistic)
    return None if interval is None else (interval[1] - interval[0]) / 2


def half_width_of_change(before: float, after: float) -> float:
    """Half of the interval of a difference or a sum of two figures that have nothing to do with each other."""
    return math.hypot(before, after)


@dataclass(frozen=True, slots=True)
class StepMedian:
    """The median of the steps of all ranks, and half of its 95 % interval; ``None`` for too few steps."""

    value: float
    half_width: float | None


def median_of_steps(ranks: Sequence[Sequence[float]], keys: Sequence[Sequence[int]] = ()) -> StepMedian | None:
    """The median of a figure of the steps of each rank, over all of them; ``None`` without values; keys as above."""
    values = [value for of_rank in ranks for value in of_rank]
    return StepMedian(float(np.median(values)), half_width_of_steps(ranks, keys=keys)) if values else None


LARGE_SHARE = 1 / 5
"""Share of all exposed time above which a single step or collective may be an outlier."""

TIMES_MEDIAN = 3
"""An outlier is this many times the median of the others; so none of four equal steps is one."""

Key = TypeVar("Key", bound="Hashable")


@dataclass(frozen=True, slots=True)
class Outliers:
    """Steps that stand out, and the run's figures with and without them.

    Attributes:
        steps: Their keys, with the exposed time of each, of all ranks; the largest first.
        are_positions: Whether keys are positions among the steps, which have no numbers or the same ones again.
        overlap_ratio: Share of all steps' communication that compute hides.
        overlap_ratio_without: That of the other steps; ``None`` where they do not communicate.
    """

    steps: tuple[tuple[int, int], ...]
    exposed_ns: int
    overlap_ratio: float | None
    exposed_without_ns: int
    overlap_ratio_without: float | None
    are_positions: bool = False


def find_outlier_keys(exposed_ns: Mapping[Key, int]) -> list[Key]:
    """The keys whose value is more than a fifth of the sum and three times the median of the other values."""
    total = sum(exposed_ns.values())
    found = []
    for key, value in exposed_ns.items():
        others = [other for name, other in exposed_ns.items() if name != key] if value > LARGE_SHARE * total else []
        if others and value >= TIMES_MEDIAN * median(others):
            found.append(key)
    return sorted(found, key=lambda key: -exposed_ns[key])


def find_outliers(steps: Iterable[tuple[int | None, int | None, int, int]]) -> Outliers | None:
    """The steps of a run that stand out; ``None`` where none does.

    Each step of each rank is given by its key, its own number, its communication and how much of that is exposed. What
    has no key belongs to no step.
    """
    exposed: dict[int, int] = {}
    communicated: dict[int, int] = {}
    are_positions = False
    for key, number, comm_ns, exposed_ns in steps:
        if comm_ns and key is not None:
            are_positions |= key != number
            exposed[key] = exposed.get(key, 0) + exposed_ns
            communicated[key] = communicated.get(key, 0) + comm_ns
    keys = find_outlier_keys(exposed)
    if not keys:
        return None
    rest = [key for key in exposed if key not in keys]
    rest_ns, rest_exposed_ns = (sum(of[key] for key in rest) for of in (communicated, exposed))
    all_exposed_ns = sum(exposed.values())
    return Outliers(
        steps=tuple((key, exposed[key]) for key in keys),
        exposed_ns=all_exposed_ns,
        overlap_ratio=1 - all_exposed_ns / sum(communicated.values()),
        exposed_without_ns=rest_exposed_ns,
        overlap_ratio_without=1 - rest_exposed_ns / rest_ns if rest_ns else None,
        are_positions=are_positions,
    )
