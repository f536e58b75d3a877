"""Aligns steps that no number tells apart, of ranks whose recordings began some steps apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddp_prof.trace import NO_TIME, UNKNOWN, Ints

LEAST_COMMON_STEPS = 3
"""Steps that two ranks must share before a shift between them can be found."""

CLEARLY = 3
"""A shift of steps, or another pairing of streams, must reduce the scatter of ends by this factor."""

CHANCE = 0.01
"""Up to which probability a shift may reduce it so by chance: of few steps it must do so by more."""


class RankSteps(NamedTuple):
    """The steps of a rank: their own numbers, and when the last collective of each ended, ``NO_TIME`` without any."""

    clock: Path
    numbers: Ints
    ends_ns: Ints


def align_unnumbered_steps(ranks: Sequence[RankSteps]) -> tuple[list[int], tuple[str, ...]]:
    """By how much the keys of each rank's steps are to be raised, so that they are the same over ranks; and a note.

    No number tells steps apart that have none, or where the same ones come again, as in each epoch. Recordings of two
    files may begin some steps apart. Then the n-th step of one rank is an earlier or later one on the other, which the
    differences of their collectives' ends tell: of the right shift they are nearly constant, as clocks differ by a
    constant, and of a wrong one they scatter as steps do. Nor do numbers differ, where there are any.
    """
    raised = [0] * len(ranks)
    unnumbered = [at for at, rank in enumerate(ranks) if len(rank.numbers) and not _tell_apart(rank.numbers)]
    for at in unnumbered[1:]:
        raised[at] = _find_shift(ranks[unnumbered[0]], ranks[at])
    if not (shifted := np.count_nonzero(raised)):
        return raised, ()
    least = min(raised)  # no key may be negative
    raised = [by - least if at in unnumbered else 0 for at, by in enumerate(raised)]
    began = f"{shifted} of {len(ranks)} ranks began to record another number of steps earlier"
    return raised, (f"steps that no number tells apart: {began}",)


def _find_shift(first: RankSteps, rank: RankSteps) -> int:
    """Which step of the first rank is the other one's first; 0 where none is clearly better."""
    if rank.clock == first.clock:
        return 0
    scatter = {
        shift: _end_scatter(first.ends_ns, rank.ends_ns, shift)
        if _are_alike(first.numbers, rank.numbers, shift)
        else float("inf")
        for shift in range(-len(rank.numbers) // 2, len(first.numbers) // 2 + 1)
    }
    best = min(scatter, key=scatter.__getitem__)
    return best if scatter[best] < scatter[0] else 0


def _tell_apart(numbers: Ints) -> bool:
    known = numbers[numbers != UNKNOWN]
    return 0 < len(known) == len(np.unique(known))


def _are_alike(first: Ints, other: Ints, shift: int) -> bool:
    first, other = first[max(0, shift) :], other[max(0, -shift) :]
    common = min(len(first), len(other))
    return np.array_equal(first[:common], other[:common])


def _end_scatter(first: Ints, other: Ints, shift: int) -> float:
    """Median distance of the ends' differences from their median, infinite where too few steps are common.

    The more steps a rank is moved by, the more it must have in common: among many shifts chance makes one look right.
    For the same reason that of a shift is told larger than it is: chance brings half of the other steps so much closer.
    """
    first, other = first[max(0, shift) :], other[max(0, -shift) :]
    common = min(len(first), len(other))
    both = (first[:common] != NO_TIME) & (other[:common] != NO_TIME)
    steps = np.count_nonzero(both)
    if steps < LEAST_COMMON_STEPS or steps <= 2 * abs(shift):
        return float("inf")
    difference = (first[:common] - other[:common])[both]
    scatter = float(np.median(np.abs(difference - np.median(difference))))
    return scatter * max(CLEARLY, CHANCE ** (-1 / (steps // 2))) if shift else scatter
