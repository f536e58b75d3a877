"""Aligns the steps of ranks whose recordings began some steps apart, if the steps have no unique numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddp_prof.trace import NO_TIME, UNKNOWN, Ints

LEAST_COMMON_STEPS = 3
"""Two ranks must share at least this number of steps before a shift between them is looked for."""

CLEARLY = 3
"""A shift of steps, or another pairing of streams, must reduce the scatter of ends by this factor."""

CHANCE = 0.01
"""Largest accepted probability that a wrong shift does so by chance; with few steps the factor must be larger."""


class RankSteps(NamedTuple):
    """The steps of a rank: their numbers, and the end of each step's last collective, ``NO_TIME`` if it has none."""

    clock: Path
    numbers: Ints
    ends_ns: Ints


def align_unnumbered_steps(ranks: Sequence[RankSteps]) -> tuple[list[int], tuple[str, ...]]:
    """How much to add to each rank's step keys, so that a key means the same step on all ranks; and a note on it.

    This concerns steps without numbers, or with numbers that repeat, of files that may begin some steps apart. With the
    right shift, the differences between the ends of two ranks' collectives are nearly constant, as two clocks differ by
    a constant; with a wrong one they vary as the steps do. It also gives both ranks the same numbers, if there are any.
    """
    raised = [0] * len(ranks)
    unnumbered = [at for at, rank in enumerate(ranks) if len(rank.numbers) and not _are_unique(rank.numbers)]
    for at in unnumbered[1:]:
        raised[at] = _find_shift(ranks[unnumbered[0]], ranks[at])
    if not (shifted := np.count_nonzero(raised)):
        return raised, ()
    least = min(raised)  # no key may be negative
    raised = [by - least if at in unnumbered else 0 for at, by in enumerate(raised)]
    began = f"{shifted} of {len(ranks)} ranks began to record another number of steps earlier"
    return raised, (f"steps that no number tells apart: {began}",)


def _find_shift(first: RankSteps, rank: RankSteps) -> int:
    """Index of the first rank's step that is the other rank's first step; 0 if no shift is clearly better."""
    if rank.clock == first.clock:
        return 0
    shifts = range(-len(rank.numbers) // 2, len(first.numbers) // 2 + 1)
    scatter = {shift: _end_scatter(first, rank, shift) for shift in shifts}
    best = min(scatter, key=scatter.__getitem__)
    return best if scatter[best] < scatter[0] else 0


def _are_unique(numbers: Ints) -> bool:
    known = numbers[numbers != UNKNOWN]
    return 0 < len(known) == len(np.unique(known))


def _end_scatter(first: RankSteps, rank: RankSteps, shift: int) -> float:
    """Median absolute deviation of the differences between two ranks' ends.

    It is infinite if the ranks share too few steps, or if these have other numbers.

    Among many wrong shifts, one may look right by chance. Therefore a larger shift needs more common steps, and the
    result of every shift but 0 is multiplied by a factor, which is larger for fewer common steps. Times are whole
    nanoseconds; so a scatter below 1 ns is no better than one of 1 ns.
    """
    from_first, from_other = max(0, shift), max(0, -shift)
    common = min(len(first.numbers) - from_first, len(rank.numbers) - from_other)
    of_first, of_other = slice(from_first, from_first + common), slice(from_other, from_other + common)
    ends_ns, other_ns = first.ends_ns[of_first], rank.ends_ns[of_other]
    both = (ends_ns != NO_TIME) & (other_ns != NO_TIME)
    steps = np.count_nonzero(both)
    has_other_numbers = np.any(first.numbers[of_first] != rank.numbers[of_other])
    if has_other_numbers or steps < LEAST_COMMON_STEPS or steps <= 2 * abs(shift):
        return float("inf")
    difference = (ends_ns - other_ns)[both]
    scatter = float(np.median(np.abs(difference - np.median(difference))))
    return max(scatter, 1) * max(CLEARLY, CHANCE ** (-1 / (steps // 2))) if shift else scatter
