"""Which collectives of several ranks are one and the same.

Ranks issue the collectives of a communicator in one order (otherwise they would hang). So of each communicator the
n-th of a step on one rank is the n-th of that step on the others; where the profiler noted the number within the
communicator, that one counts. What does not fit is left unmatched: another operation or size, another count in a step.
So is what one rank ends before another one on the same clock begins it: communicators that no name tells apart.
Sends and receives are no collectives and have no match.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.attribution import last_by_step
from ddp_prof.analyze.core.operations import OPERATIONS, POINT_TO_POINT
from ddp_prof.trace import UNKNOWN, looked_up

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from ddp_prof.analyze.collectives.timing import RankCollectives
    from ddp_prof.trace import Ints

LEAST_COMMON_STEPS = 3
"""Steps that two ranks must have in common to tell by how many steps one is ahead."""

_LATEST = 2**62

CLEARLY = 3
"""So many times less must ends scatter with steps moved than as they are."""

_NO_COLLECTIVE = OPERATIONS.index(POINT_TO_POINT)
_NEEDS_ALL = {
    OPERATIONS.index(name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
}
"""Collectives that no rank can end before each has begun."""


@dataclass(frozen=True)
class Matches:
    """Collectives that at least two ranks took part in.

    Attributes:
        rows: A row a collective and a column a rank: its row in the rank's timings, ``UNKNOWN`` where it has none.
        unmatched: Collectives of all ranks that found no match though other ranks are there.
    """

    rows: Ints
    unmatched: int

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, ranks: Sequence[RankCollectives], name: str) -> Ints:
        """A column of the ranks' timings, laid out as :attr:`rows`; ``UNKNOWN`` where a rank has no part."""
        columns = [looked_up(getattr(rank.timings, name), self.rows[:, index]) for index, rank in enumerate(ranks)]
        return np.stack(columns, axis=1) if columns else np.empty((0, 0), np.int64)


def match_collectives(ranks: Sequence[RankCollectives]) -> Matches:
    """Find the collectives that several ranks have in common."""
    found: dict[Hashable, list[int]] = {}
    for column, rank in enumerate(ranks):
        for row, key in enumerate(_keys(rank)):
            if key is not None:
                found.setdefault(key, [UNKNOWN] * len(ranks))[column] = row
    shared = [rows for rows in found.values() if len(ranks) - rows.count(UNKNOWN) > 1 and _agree(ranks, rows)]
    matched = sum(len(ranks) - rows.count(UNKNOWN) for rows in shared)
    candidates = sum(int((rank.timings.operation != _NO_COLLECTIVE).sum()) for rank in ranks)
    return Matches(
        np.array(shared, np.int64).reshape(len(shared), len(ranks)), candidates - matched if len(ranks) > 1 else 0
    )


def _keys(rank: RankCollectives) -> list[Hashable | None]:
    """What identifies each collective of a rank on all ranks; the number in the step must be told by the same count."""
    timings = rank.timings
    groups = [rank.groups[group] if group != UNKNOWN else "" for group in timings.group.tolist()]
    steps = [None if key == UNKNOWN else key for key in rank.keys.tolist()]
    total = Counter(zip(groups, steps, strict=True))
    count: Counter[tuple[str, int | None]] = Counter()
    keys: list[Hashable | None] = []
    for group, step, sequence, operation in zip(
        groups, steps, timings.sequence.tolist(), timings.operation.tolist(), strict=True
    ):
        position = count[group, step]
        count[group, step] += 1
        if operation == _NO_COLLECTIVE:
            keys.append(None)
        elif sequence != UNKNOWN:
            keys.append((group, sequence))
        else:
            keys.append(None if step is None else (group, step, position, total[group, step]))
    return keys


def _agree(ranks: Sequence[RankCollectives], rows: Sequence[int]) -> bool:
    """Whether all parts are of one operation and, as far as known, of one size, and none ends before another begins."""
    parts = [(rank.timings, row) for rank, row in zip(ranks, rows, strict=True) if row != UNKNOWN]
    operations = {int(timings.operation[row]) for timings, row in parts}
    sizes = {int(timings.bytes[row]) for timings, row in parts} - {UNKNOWN}
    return len(operations) == 1 and len(sizes) <= 1 and (not operations <= _NEEDS_ALL or _are_at_one_time(ranks, rows))


def _are_at_one_time(ranks: Sequence[RankCollectives], rows: Sequence[int]) -> bool:
    """Whether the parts on each clock have an instant in common."""
    times: dict[Path, tuple[int, int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        if row != UNKNOWN:
            start, end = times.get(rank.clock, (-_LATEST, _LATEST))
            times[rank.clock] = max(start, int(rank.timings.start_ns[row])), min(end, int(rank.timings.end_ns[row]))
    return all(start <= end for start, end in times.values())


def shift_unnumbered_steps(ranks: Sequence[RankCollectives]) -> tuple[tuple[RankCollectives, ...], int]:
    """Let steps without numbers begin at the same one on all ranks, and say on how many ranks they did not.

    Recordings of two files may begin some steps apart. Then the n-th step of one rank is an earlier or later one on the
    other, which the differences of their collectives' ends tell: of the right shift they are nearly constant, as clocks
    differ by a constant, and of a wrong one they scatter as steps do.
    """
    unnumbered = [rank for rank in ranks if len(rank.times) and np.all(rank.step_numbers == UNKNOWN)]
    if len(unnumbered) < 2:
        return tuple(ranks), 0
    first = unnumbered[0]
    shifts = {id(rank): _shift(first, rank) for rank in unnumbered[1:] if rank.clock != first.clock}
    if not any(shifts.values()):
        return tuple(ranks), 0
    least = min(0, *shifts.values())  # no key may be negative
    moved = {
        id(rank): replace(rank, step_keys=rank.keys_of_steps - least + shifts.get(id(rank), 0)) for rank in unnumbered
    }
    return tuple(moved.get(id(rank), rank) for rank in ranks), sum(shift != 0 for shift in shifts.values())


def _shift(first: RankCollectives, other: RankCollectives) -> int:
    """By how many steps the other rank's are to be moved, 0 where nothing speaks clearly for another number."""
    own, others = (last_by_step(rank.timings.end_ns, rank.timings.step, len(rank.times)) for rank in (first, other))
    scatter = {shift: _scatter(own, others, shift) for shift in range(-len(others) // 2, len(own) // 2 + 1)}
    best = min(scatter, key=scatter.__getitem__)
    return best if CLEARLY * scatter[best] < scatter[0] else 0


def _scatter(first: Ints, other: Ints, shift: int) -> float:
    """Median distance of the ends' differences from their median, infinite where too few steps are common.

    The more steps a rank is moved by, the more it must have in common: among many shifts chance makes one look right.
    """
    first, other = first[max(0, shift) :], other[max(0, -shift) :]
    common = min(len(first), len(other))
    both = (first[:common] != UNKNOWN) & (other[:common] != UNKNOWN)
    if both.sum() < LEAST_COMMON_STEPS or both.sum() <= 2 * abs(shift):
        return float("inf")
    difference = (first[:common] - other[:common])[both]
    return float(np.median(np.abs(difference - np.median(difference))))
