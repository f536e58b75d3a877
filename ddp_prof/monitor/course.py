"""Find when a figure of a job changed, and which rank was late from when to when.

A *course* is the sequence of the values of a figure, one per measurement. Changes are found by circular binary
segmentation (A. B. Olshen et al., Biostatistics 5, 2004): take the stretch of consecutive measurements whose mean
differs most from the mean of all others. It counts as a change if at most 1 of 100 shuffled courses has a stretch with
as large a difference. The limit of 1 of 100 is divided by the number of figures that vary (C. E. Bonferroni), so that
of all jobs in which nothing changes at most 1 of 100 shows a change in any figure. The measurements before, in and
after the stretch are then searched in the same way::

    exposed ms   12 11 12 13 12 | 31 30 33 31 | 12 11 13 12 12
                                ^ from step 5000: 12 -> 31   ^ from step 9000: 31 -> 12

A stretch has at least three measurements. A single measurement that is far off is no change: after a shuffle it makes
some stretch just as different.

A shuffle takes measurements as independent. If each resembles the one before, that part is taken away first: see
:func:`_without_likeness`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import numpy as np

from ddp_prof.analyze.statistics import LEAST_FOR_LIKENESS, likeness
from ddp_prof.table import Floats, Ints, Mask

FIGURES = {
    "step_ns": "step",
    "comm_ns": "communication",
    "exposed_ns": "exposed",
    "blocking_ns": "blocking",
    "contention_ns": "contention",
}
"""Figures of a record in which changes are looked for, with the words for them."""
LEAST = 3
"""Smallest number of measurements on each side of a change, and of consecutive ones that name the same late rank."""
LEAST_IN_ALL = 14
"""With fewer measurements hardly any course is rare enough for the rule to find a change.

If a single figure varies, 11 can show one.
"""
CHANCE = 0.01
"""The probability of a change in any of a job's figures where there is none."""
_SHUFFLES = 999
_ROUNDING = 1e-9
"""Differences that are equal but for rounding, by this fraction, count as equal."""
LEAST_SHARE = 0.02
"""A change must be at least this fraction of the step."""
_MOST_LIKENESS = 0.95
"""Measurements that resemble each other more are a drift, in which no level can be told from another."""
MOST_POINTS = 200
"""A longer course is reduced to this number of medians, because all its stretches are compared."""


@dataclass(frozen=True)
class Change:
    """A figure changes with the measurement at ``position``: medians of the stretches before it and from it on."""

    figure: str
    position: int
    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class LateRank:
    """A rank that is late in the measurements from position ``first`` to ``last``; ``lag_ns`` is its median lag."""

    rank: int
    first: int
    last: int
    lag_ns: int


def find_changes(records: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Return where a measured quantity of :data:`FIGURES`, such as the step time, shifts to another lasting level.

    The changes are in order of time. ``records`` are the measurements in a monitor's log.
    """
    # The positions and values of each figure where it is known; a figure that never varies is not searched.
    least_ns = _least_ns(records)
    changes = []
    by_figure = {
        figure: [(at, record[figure]) for at, record in enumerate(records) if record.get(figure) is not None]
        for figure in FIGURES
    }
    looked_at = {figure: known for figure, known in by_figure.items() if len({value for _, value in known}) > 1}
    for figure, known in looked_at.items():
        positions, values = [at for at, _ in known], [value for _, value in known]
        # Stretches between changes, and their medians; a change between two medians must be large enough.
        bounds = [0, *find_bounds(values, CHANCE / len(looked_at)), len(values)]
        medians = [median(values[start:end]) for start, end in pairwise(bounds) if end > start]
        for number, at in enumerate(bounds[1:-1]):
            before, after = medians[number], medians[number + 1]
            if abs(after - before) >= least_ns:
                changes.append(Change(figure, positions[at], round(before), round(after)))
    return sorted(changes, key=lambda change: change.position)


def find_bounds(values: Sequence[float], chance: float = CHANCE) -> list[int]:
    """Return the positions at which values change, in order; 5 means that a new stretch begins with the sixth value.

    Where nothing changes, a position is returned with a probability of at most ``chance``.
    """
    # Medians of ``width`` values each (the last one perhaps of fewer), so that there are at most MOST_POINTS.
    width = -(-len(values) // MOST_POINTS) or 1
    points = [median(values[at : at + width]) for at in range(0, len(values), width)]
    return [at * width for at in _split(np.asarray(points, float), 0, chance)]


def _split(values: Floats, offset: int, chance: float) -> list[int]:
    """Return the positions at which values change, each increased by ``offset``, the position of the first value."""
    stretch = _find_stretch(values, chance)
    if stretch is None:
        return []
    start, end = stretch
    inside = [at for at in (start, end) if 0 < at < len(values)]
    parts = zip([0, *inside], [*inside, len(values)], strict=True)
    deeper = [at for first, last in parts for at in _split(values[first:last], offset + first, chance)]
    return sorted([*(offset + at for at in inside), *deeper])


def _find_stretch(values: Floats, chance: float) -> tuple[int, int] | None:
    """Return start and end of the stretch that differs most from the other values; ``None`` if chance explains it."""
    if len(values) < 2 * LEAST:
        return None
    start, end = _stretches(len(values))
    centred = values - values.mean()
    # As likeness is told from what the stretch leaves, that stretch is looked for first.
    best = int(_differences(centred, start, end).argmax())
    inside = np.zeros(len(centred), bool)
    inside[start[best] : end[best]] = True
    centred = _without_likeness(centred[:, None], inside)[:, 0]
    found = _differences(centred, start, end)
    best = int(found.argmax())
    as_large = found[best] * (1 - _ROUNDING)
    generator = np.random.default_rng(0)
    # At most ``most`` of the shuffled courses may have as large a difference.
    most, larger = int(chance * (_SHUFFLES + 1)) - 1, 0
    for _ in range(_SHUFFLES):
        larger += bool(_differences(generator.permutation(centred), start, end).max() >= as_large)
        if larger > most:
            return None
    return int(start[best]), int(end[best])


def _without_likeness(values: Floats, inside: Mask) -> Floats:
    """Return the values less what each has from the one before, so that they can be shuffled ("prewhitening").

    If a value has the part r of the one before and no other memory (an autoregressive process of first order), ``value
    - r * value before`` are independent. A change of level remains one, at the same position. r is told from what is
    left without the change between the values ``inside`` and all others, so that a change is no likeness. As two means
    are taken away there, r comes out too small by about ``2 (1 + 3 r) / n`` (F. Marriott and J. Pope, Biometrika 41,
    1954), which is added. Each column is one course, with a mean of 0 in the result; all of them have the same r.
    """
    centred: Floats = values - values.mean(axis=0)
    count = len(centred)
    if count < LEAST_FOR_LIKENESS:
        return centred
    left = centred - np.where(inside[:, None], centred[inside].mean(axis=0), centred[~inside].mean(axis=0))
    # Two levels without any scatter leave what the means were rounded by, the same everywhere: that is no likeness.
    if np.abs(left).max() <= _ROUNDING * np.abs(centred).max():
        return centred
    like = likeness(left)
    like = min(_MOST_LIKENESS, like + 2 * (1 + 3 * like) / count)
    # The first value has none before it; it is scaled to the spread of the others.
    own: Floats = np.concatenate([centred[:1] * math.sqrt(1 - like**2), centred[1:] - like * centred[:-1]])
    own -= own.mean(axis=0)
    return own


def _stretches(length: int) -> tuple[Ints, Ints]:
    """Return the starts and the ends of all possible stretches of a course.

    A stretch has at least ``LEAST`` values. On each side of it are at least as many or none, but not none on both.
    """
    start, end = np.triu_indices(length + 1, LEAST)  # all pairs with end - start >= LEAST
    before, after = start, length - end
    fits = ((before == 0) | (before >= LEAST)) & ((after == 0) | (after >= LEAST)) & (before + after > 0)
    return start[fits], end[fits]


def _differences(centred: Floats, start: Ints, end: Ints) -> Floats:
    """Return how much the mean of each stretch differs from that of the other values, in standard deviations.

    A factor that is the same for all stretches is left out. ``centred`` are the values less their mean.
    """
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    length = end - start
    found: Floats = np.abs(sums[end] - sums[start]) / np.sqrt(length * (len(centred) - length))
    return found


def find_late_ranks(records: Sequence[Mapping[str, Any]], changes: Sequence[Change] = ()) -> list[LateRank]:
    """Return the ranks that are late by more than chance and by at least :data:`LEAST_SHARE` of the step.

    They are looked for in two ways:

    - In each stretch between two changes of the step, take the rank whose lag exceeds its lag in all other measurements
      most. Measurements are shuffled to see how large the largest excess of any rank becomes by chance.
    - In consecutive measurements that all name the same rank as last, count the steps in which it arrived last. Of N
      equal ranks, each would be last in one of N steps. The steps of a measurement are taken as independent here: if a
      rank is last in all of them, a momentary cause is not told from a lasting one.
    """
    bounds = [0, *sorted({change.position for change in changes if change.figure == "step_ns"}), len(records)]
    found = [late for start, end in pairwise(bounds) if (late := _late_in_stretch(records, start, end))]
    for _, group in groupby(range(len(records)), lambda at: (records[at].get("late") or {}).get("rank")):
        row = list(group)
        late = _late_in_row(records, row[0], row[-1] + 1)
        if late and not any(one.first <= late.last and late.first <= one.last for one in found):
            found.append(late)
    return sorted(found, key=lambda one: one.first)


def _late_in_stretch(records: Sequence[Mapping[str, Any]], start: int, end: int) -> LateRank | None:
    """Return the rank that arrives later in the measurements from ``start`` up to ``end`` (exclusive) than in the rest.

    ``None`` if there is none, or if too few measurements tell the lag of every rank.
    """
    # Only measurements in which the lag of every rank is known.
    ranks, lags = _lags(records)
    inside = np.zeros(len(records), bool)
    inside[start:end] = True
    known = ~np.isnan(lags).any(axis=1) if len(ranks) else np.zeros(len(records), bool)
    inside, lags = inside[known], lags[known]
    if inside.sum() < LEAST or (~inside).sum() < LEAST:
        return None
    own = _without_likeness(lags, inside)

    def excess(chosen: Mask) -> Floats:
        """Return how much larger the mean lag of each rank is in the chosen measurements than in the others."""
        return own[chosen].mean(axis=0) - own[~chosen].mean(axis=0)  # type: ignore[no-any-return]

    found = excess(inside)
    late = int(found.argmax())
    generator = np.random.default_rng(0)
    as_large = found[late] * (1 - _ROUNDING)
    larger = sum(bool(excess(generator.permutation(inside)).max() >= as_large) for _ in range(_SHUFFLES))
    lag_ns = float(np.median(lags[inside, late]))
    if (larger + 1) / (_SHUFFLES + 1) > CHANCE or lag_ns < _least_ns(records[start:end]):
        return None
    return LateRank(ranks[late], start, end - 1, round(lag_ns))


def _lags(records: Sequence[Mapping[str, Any]]) -> tuple[list[int], Floats]:
    """Return the ranks, and the lag of each of them in each measurement, NaN where unknown; shape (records, ranks)."""
    by_record = [
        {one["rank"]: one["lag_ns"] for one in record["by_rank"] if one.get("lag_ns") is not None} for record in records
    ]
    ranks = sorted({rank for lags in by_record for rank in lags if rank is not None})
    return ranks, np.array([[lags.get(rank, np.nan) for rank in ranks] for lags in by_record], float)


def _late_in_row(records: Sequence[Mapping[str, Any]], start: int, end: int) -> LateRank | None:
    """Return the rank that all measurements from ``start`` up to ``end`` name as last, unless chance explains that."""
    known = [record["late"] for record in records[start:end]]
    if end - start < LEAST or not known[0]:
        return None
    last, steps = (sum(late[name] for late in known) for name in ("steps", "of_steps"))
    world = max(2, min(record.get("ranks") or 0 for record in records[start:end]))
    lag_ns = median(late["lag_ns"] for late in known)
    # Such a row could begin at any measurement and name any rank, so the probability is multiplied by both numbers.
    is_chance = len(records) * world * _at_least(last, steps, 1 / world) > CHANCE
    if is_chance or lag_ns < _least_ns(records[start:end]):
        return None
    return LateRank(known[0]["rank"], start, end - 1, round(lag_ns))


def _least_ns(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the smallest change that counts, in nanoseconds; infinite where no step time is known."""
    steps_ns = [record["step_ns"] for record in records if record["step_ns"] is not None]
    return LEAST_SHARE * median(steps_ns) if steps_ns else math.inf


def _at_least(hits: int, draws: int, probability: float) -> float:
    """Return the probability of at least ``hits`` hits in ``draws`` draws: the binomial distribution's upper tail."""
    return sum(
        math.comb(draws, number) * probability**number * (1 - probability) ** (draws - number)
        for number in range(hits, draws + 1)
    )
