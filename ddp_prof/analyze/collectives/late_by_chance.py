"""Which ranks are late more often than chance explains.

If each of the ranks is equally likely to be last, and each step is independent of the others, the number of steps in
which a rank is last has a binomial distribution. But a rank that is slowed for a moment, as by another program, may
be the last one of several steps in a row. Such steps count as fewer: see :func:`_as_independent`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ddp_prof.analyze.statistics import LEAST_FOR_LIKENESS
from ddp_prof.table import count_before
from ddp_prof.trace import Ints, Mask

CHANCE, CHANCE_OF_COSTLY = 0.05, 0.02
"""Largest accepted probability that equal ranks give a straggler by chance: by all steps, and by the costly ones.

Of 1,500 drawn runs of 2 to 64 equal ranks with 6 to 50 steps, at most 5 in 100 had one by either test.
"""


def find_straggler(last: Sequence[int] | Ints, ranks: int, chance: float = CHANCE) -> int | None:
    """Return the rank that is last most often, if chance does not explain that; else ``None``.

    Chance explains it if in a run of equal ranks some rank is last as often with a probability of at least ``chance``.
    As it could be any rank, the probability for one rank is multiplied by the number of ranks.

    Args:
        last: The index of the rank that is last in each step in which one is, in the order of the steps.
        ranks: The number of ranks.
        chance: The largest probability at which a rank is named.
    """
    if ranks < 2 or not len(last):
        return None
    by_step = np.asarray(last)
    times_last = np.bincount(by_step, minlength=ranks)
    times, steps = _as_independent(int(times_last.max()), by_step)
    is_significant = ranks * _binomial_tail(times, steps, 1 / ranks) < chance
    return int(times_last.argmax()) if is_significant else None


def find_late_together(late: Mask) -> tuple[int, ...]:
    """Return the ranks that are late together in more steps than chance explains; empty if there are no such.

    These are the rank that is late most often, and who is late in most of the same steps. Chance explains it if, were
    as many ranks late in each step, but any of them, some group of that size would be as often late together with a
    probability of at least :data:`CHANCE`. Lags are told from the median rank, so most ranks are no group.

    ``late`` tells for each step (row, in the order of the steps) and rank (column) whether the rank is late.
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
    together: Ints = np.where(several[:, group].all(axis=1), 1, 0)
    times, steps = _as_independent(int(together.sum()), together)
    if chance >= 1 or math.comb(ranks, number) * _binomial_tail(times, steps, chance) >= CHANCE:
        return ()
    return tuple(group.tolist())


def _as_independent(hits: int, labels: Ints) -> tuple[int, int]:
    """Return as how many hits in how many independent steps those count in which ``labels`` may follow each other.

    ``labels`` tell what each step is, such as which rank is last in it. A step has the label of the one before by
    chance, or because it resembles it. If the fraction r of the other steps does so too, n steps tell as much as ``n (1
    - r) / (1 + r)`` independent ones (as in :mod:`ddp_prof.analyze.statistics`). A likeness of less than one standard
    error is none. Nor is one that a single change explains: a rank that becomes slow and remains so is late::

        last   0 1 1 0 1 0 0 1 1 0   neighbours are no more alike than by chance: ten steps
        last   0 1 0 1 1 1 1 1 1 1   one change, and no likeness before and after it: ten steps
        last   0 0 0 1 1 1 0 0 0 0   seven of nine pairs are alike: r = 0.6, ten steps count as three

    Of eight equal ranks in 50 steps, each step with the part 0.6 of the last one, 9 of 100 runs have a straggler, and
    26 of 100 if likeness is not counted; in 20 steps 20 and 22, as these seldom tell likeness from a change.
    """
    steps = len(labels)
    if steps < LEAST_FOR_LIKENESS:
        return hits, steps
    by_chance = _alike_by_chance(labels)
    if by_chance == 1:
        return hits, steps
    # The pair at the change is none of those that may be alike.
    more = int((labels[1:] == labels[:-1]).sum()) / (steps - 2) - by_chance
    if more < math.sqrt(by_chance * (1 - by_chance) / (steps - 1)):
        return hits, steps
    like = min(1.0, more / (1 - by_chance))
    fraction = (1 - like) / (1 + like)
    return math.floor(round(hits * fraction, 9)), max(1, round(round(steps * fraction, 9)))


def _alike_by_chance(labels: Ints) -> float:
    """Return the fraction of pairs of independent steps that have equal labels, with the change that explains most.

    In a part of n steps of which ``c`` have a label, that is the sum of ``(c / n)**2`` over the labels. It is the mean
    over the parts before and after the change.
    """
    steps = len(labels)
    # Each step raises a label's count c by one, and so the sum of c**2 by 2 c + 1.
    before = np.cumsum(2 * count_before(labels) + 1)
    after = np.cumsum(2 * count_before(labels[::-1]) + 1)[::-1]
    length = np.arange(1, steps)
    parts = before[:-1] / length + after[1:] / (steps - length)
    return float(max(before[-1] / steps, parts.max())) / steps


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
