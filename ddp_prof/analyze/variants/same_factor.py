"""Whether all kernels of a run take longer, or shorter, by one factor than the same kernels of another run.

Then the device is slower as a whole, and no part of the program explains the change. Kernels are compared by rank,
name, launch shape and phase, each by its median duration, alone or beside communication; the quartiles must have the
factor, too, since a part of the steps may be slower. The work must be equal: in each step a rank executes the same
kernels as often. Kernels that take almost no time may differ. Of kernels that could be compared only beside
communication, it may be that communication slows them more, at equal clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ddp_prof.analyze.kernels.kernel_times import (
    COMMUNICATION,
    LEAST_EXECUTIONS,
    UNNAMED,
    KernelRuns,
    Key,
    is_mostly_overlapped,
)
from ddp_prof.columns import column
from ddp_prof.table import Floats
from ddp_prof.trace import UNKNOWN, Ints

_LEAST_KERNELS = 5
"""Fewer kernels may have a factor in common by chance."""
_LEAST_CHANGE = 0.02
"""A smaller change of all kernels is not told: two recordings of one job differ by as much."""
_ALIKE = 0.2
"""Largest part of the change by which the factor of a kernel may differ from the median one."""
_MOST = 0.98
"""The kernels with the factor must take this part of the compute of both runs."""


@dataclass(frozen=True, slots=True)
class SameFactor:
    """The factor by which the kernels of almost all compute take longer than before."""

    factor: float = column("median duration in the second run over that in the first: median over the kernels by time")
    low: float = column("the least factor of one of them")
    high: float = column("the largest factor of one of them")
    kernels: int = column("number of kernels with it, by name, launch shape and phase")
    share: float = column("the part of the compute of the first run that they take")
    knows_shapes: bool = column("whether launch shapes are known, and are equal")
    alone: int = column("number of these kernels that were compared where no communication runs beside them")
    differs_beside: bool = column("whether some of those have another factor where communication runs beside them")

    @property
    def is_of_device(self) -> bool:
        """Whether enough kernels have the factor where no communication can slow them."""
        return self.alone >= _LEAST_KERNELS


def find_same_factor(before: Sequence[KernelRuns], after: Sequence[KernelRuns]) -> SameFactor | None:
    """Return the factor that all kernels of two runs have in common; ``None`` if there is none, or the work differs."""
    if not before or len(before) != len(after):
        return None
    keys, factors, took_ns, whole_ns = list[Key](), list[Floats](), list[list[int]](), np.zeros(2)
    alone, beside = list[Key](), dict[Key, list[Floats]]()
    for of_rank in zip(before, after, strict=True):
        old, new = map(_executions, of_rank)
        if _counts_per_step(old, of_rank[0]) != _counts_per_step(new, of_rank[1]):
            return None
        for key in (key for key in old if key[3] not in (COMMUNICATION, UNNAMED)):
            sums_ns = [int(duration_ns.sum()) for duration_ns, _ in (old[key], new[key])]
            whole_ns += sums_ns
            of_both = old[key], new[key]
            found_alone = _factor([duration_ns[beside_ns == 0] for duration_ns, beside_ns in of_both])
            found_beside = _factor([of[0][is_mostly_overlapped(*of)] for of in of_both])
            found = found_beside if found_alone is None else found_alone
            if found is not None:
                keys.append(key)
                factors.append(found)
                took_ns.append(sums_ns)
            if found_alone is not None:
                alone.append(key)
                beside.setdefault(key, []).extend([] if found_beside is None else [found_beside])
    if not keys:
        return None
    every, sums = np.array(factors), np.array(took_ns)
    factor = _weighted_median(every[:, 1], sums[:, 0])
    near = _ALIKE * abs(factor - 1)
    is_alike = (np.abs(every - factor) <= near).all(axis=1)
    alike = {keys[index] for index in np.flatnonzero(is_alike).tolist()}
    if len(alike) < _LEAST_KERNELS or abs(factor - 1) < _LEAST_CHANGE:
        return None
    shares = sums[is_alike].sum(axis=0) / whole_ns
    if min(shares) < _MOST:
        return None
    low, high = float(every[is_alike, 1].min()), float(every[is_alike, 1].max())
    return SameFactor(
        factor=factor,
        low=low,
        high=high,
        kernels=len(alike),
        share=float(shares[0]),
        knows_shapes=all(key[1] for key in alike),
        alone=len(alike & set(alone)),
        differs_beside=any(abs(of[1] - factor) > near for key in alike for of in beside.get(key, ())),
    )


def _weighted_median(values: Floats, weights: Ints) -> float:
    """Return the value up to which the values have half of the weight."""
    order = np.argsort(values, kind="stable")
    summed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(summed, summed[-1] / 2)])


_Executions = tuple[Ints, Ints]
"""For each execution of a kernel its duration, and the part of it beside communication."""


def _executions(runs: KernelRuns) -> dict[Key, _Executions]:
    """Return the executions in steps of each kernel of a rank."""
    rows = np.flatnonzero(runs.step != UNKNOWN)
    rows = rows[np.argsort(runs.kernel[rows], kind="stable")]
    kernel = runs.kernel[rows]
    parts = np.split(rows, np.flatnonzero(np.diff(kernel)) + 1) if len(rows) else []
    return {runs.keys[runs.kernel[part[0]]]: (runs.duration_ns[part], runs.beside_ns[part]) for part in parts}


def _counts_per_step(executions: Mapping[Key, _Executions], runs: KernelRuns) -> dict[Key, Fraction]:
    """Return how often each kernel runs in a step, on average."""
    return {key: Fraction(len(duration_ns), max(1, runs.steps)) for key, (duration_ns, _) in executions.items()}


def _factor(durations_ns: Sequence[Ints]) -> Floats | None:
    """Return by how much the quartiles of a kernel are longer in the second run; ``None`` for too few executions."""
    if min(map(len, durations_ns)) < LEAST_EXECUTIONS:
        return None
    base, other = (np.percentile(of_run, (25, 50, 75)) for of_run in durations_ns)
    return other / base if base.all() else None
