"""Which ranks are late more often than chance explains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ddp_prof.trace import Mask

CHANCE, CHANCE_OF_COSTLY = 0.05, 0.02
"""Largest accepted probability that equal ranks give a straggler by chance: by all steps, and by the costly ones.

Of 1,500 drawn runs of 2 to 64 equal ranks with 6 to 50 steps, at most 5 in 100 had one by either test.
"""


def find_straggler(times_last: Sequence[int], chance: float = CHANCE) -> int | None:
    """Return the rank that is last most often, if chance does not explain that; else ``None``.

    Chance explains it if in a run of equal ranks some rank is last as often with a probability of at least ``chance``.
    ``times_last`` is the number of steps in which each rank is last; steps in which none is do not
    count. As it could be any rank, the probability for one rank is multiplied by the number of ranks.
    """
    ranks = len(times_last)
    if ranks < 2 or not any(times_last):
        return None
    most = max(times_last)
    is_significant = ranks * _binomial_tail(most, sum(times_last), 1 / ranks) < chance
    return times_last.index(most) if is_significant else None


def find_late_together(late: Mask) -> tuple[int, ...]:
    """Return the ranks that are late together in more steps than chance explains; empty if there are no such.

    These are the rank that is late most often, and who is late in most of the same steps. Chance explains it if, were
    as many ranks late in each step, but any of them, some group of that size would be as often late together with a
    probability of at least :data:`CHANCE`. Lags are told from the median rank, so most ranks are no group.

    ``late`` tells for each step (row) and rank (column) whether the rank is late.
    """
    several = late[late.any(axis=1)]
    if not len(several):
        return ()
    first = several[:, several.sum(axis=0).argmax()]
    group = np.flatnonzero(2 * several[first].sum(axis=0) > first.sum())
    ranks, number = late.shape[1], len(group)
    if number < 2 or 2 * number > ranks:
        return ()
    # The chance that a group is among as many late ranks, in the mean over the steps.
    sizes = several.sum(axis=1)
    chance = float(np.mean([math.comb(size, number) for size in sizes.tolist()])) / math.comb(ranks, number)
    times = int(several[:, group].all(axis=1).sum())
    if chance >= 1 or math.comb(ranks, number) * _binomial_tail(times, len(several), chance) >= CHANCE:
        return ()
    return tuple(group.tolist())


def _binomial_tail(times: int, trials: int, chance: float) -> float:
    """Return the probability of ``times`` or more hits in ``trials`` trials, each of which hits with ``chance``."""
    # The sum of the binomial distribution, with logarithms because the factorials are too large.
    whole = math.lgamma(trials + 1)
    return math.fsum(
        math.exp(
            whole - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
            + hits * math.log(chance) + (trials - hits) * math.log1p(-chance)
        )
        for hits in range(times, trials + 1)
    )  # fmt: skip
