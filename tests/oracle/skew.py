"""Who arrives last, by how much, and what that costs the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import comb
from statistics import median

from tests.oracle.lateness import cost_of_lag
from tests.oracle.ranks import Rank
from tests.oracle.several_ranks import Row, key_of, match


@dataclass
class StepSkew:
    """What ``StepSkew`` says."""

    step: int
    lags_ns: list[int | None]
    last: int | None
    cost_ns: int | None


@dataclass
class RankSkew:
    """What ``RankSkew`` says."""

    collectives: int | None
    matched: int
    last_collectives: int
    last_steps: int
    lag_ns: int | None
    lag_when_last_ns: int | None
    worst_lag_ns: int | None
    exposed_wait_ns: int | None
    cost_ns: int | None


def skew_figures(ranks: list[Rank], apart: int) -> tuple[list[StepSkew], list[RankSkew]]:
    """Of each step and each rank; after :func:`explain`. A capture without steps has none."""
    rows, found = match(ranks, apart)
    residual = found.residual or 0
    lags = [
        [None if found.residual is None else _lag(row, index, ranks, found.offset) for index in range(len(ranks))]
        for row in rows
    ]
    late = [_late_at(row, residual) for row in lags]
    has_steps = any(rank.has_steps for rank in ranks) and any(_key_of(row, ranks) is not None for row in rows)
    units = _steps(rows, ranks) if has_steps else [(0, [place]) for place in range(len(rows))]
    if has_steps:  # where a rank was not recorded, it may have been last
        there = [{i for place in places for i, part in enumerate(rows[place]) if part} for _, places in units]
        whole = [one == set().union(*there) for one in there]
        if 2 * whole.count(False) <= len(units):
            for (_, places), is_whole in zip(units, whole, strict=True):
                for place in places:
                    late[place] = late[place] if is_whole else None
            units = [unit for unit, is_whole in zip(units, whole, strict=True) if is_whole]
    largest = [
        [max((lag for place in places if (lag := lags[place][i]) is not None), default=None) for i in range(len(ranks))]
        for _, places in units
    ]
    last = [_late_at(unit, residual) for unit in largest]
    if has_steps:
        last = [
            _origin(unit, who, [rows[place] for place in places], [lags[place] for place in places])
            for unit, who, (_, places) in zip(largest, last, units, strict=True)
        ]
    costs = [
        cost_of_lag(ranks, [rows[place] for place in places], who, found.offset)
        for (_, places), who in zip(units, last, strict=True)
    ]
    steps = [
        StepSkew(key, [_whole(lag) for lag in unit], who, cost)
        for (key, _), unit, who, cost in zip(units, largest, last, costs, strict=True)
    ]
    each = [
        RankSkew(
            collectives=None if ranks[i].lacks_names else len(ranks[i].collectives()),
            matched=sum(row[i] is not None for row in rows),
            last_collectives=late.count(i),
            last_steps=last.count(i) if has_steps else 0,
            lag_ns=_median([unit[i] for unit in largest]),
            lag_when_last_ns=_median([unit[i] for unit, who in zip(largest, last, strict=True) if who == i]),
            worst_lag_ns=_whole(max((lag for unit in largest if (lag := unit[i]) is not None), default=None)),
            exposed_wait_ns=_waits([rows[place] for _, places in units for place in places], i),
            cost_ns=sum(cost for cost, who in zip(costs, last, strict=True) if who == i)
            if has_steps
            else _cost([row for row, who in zip(rows, late, strict=True) if who == i], i),
        )
        for i in range(len(ranks))
    ]
    each = [one if one.matched else replace(one, exposed_wait_ns=None, cost_ns=None) for one in each]
    return steps if has_steps else [], each


def _steps(rows: list[Row], ranks: list[Rank]) -> list[tuple[int, list[int]]]:
    """The key of each step and the places of its collectives; what lies outside of steps is in none."""
    keys = [_key_of(row, ranks) for row in rows]
    return [(key, [place for place, own in enumerate(keys) if own == key]) for key in sorted({*keys} - {None})]


def _cost(rows: list[Row], who: int | None) -> int:
    """The longest exposed wait of another rank in all of them."""
    return 0 if who is None or not rows else max(_waits(rows, i) for i in range(len(rows[0])) if i != who)


def _waits(rows: list[Row], index: int) -> int:
    return sum(e.exposed_wait for row in rows if (e := row[index]) is not None)


def _whole(lag: Fraction | None) -> int | None:
    return None if lag is None else round(float(lag))


def _median(lags: list[Fraction | None]) -> int | None:
    known = [lag for lag in lags if lag is not None]
    return round(float(median(known))) if known else None


def latest(last: list[int | None], costs: list[int], ranks: int) -> int | None:
    """Who is last too often in all steps, or in those that cost at least half of the costliest: the costlier of both.

    ``last`` and ``costs``: who is last in each step, and what the step's last rank costs.
    """
    most = max(costs, default=0)
    costly = [who for who, cost in zip(last, costs, strict=True) if most and 2 * cost >= most]
    found = [_straggler([who for who in own if who is not None], ranks, of) for own, of in ((last, 20), (costly, 50))]
    total = [sum(cost for who, cost in zip(last, costs, strict=True) if who == index) for index in range(ranks)]
    return max((one for one in found if one is not None), key=lambda one: total[one], default=None)


def _straggler(last: list[int], ranks: int, one_in: int) -> int | None:
    """Who is last so often that in less than a run of twenty equal ranks any one would be, by all ways to be last."""
    times_last = [last.count(index) for index in range(ranks)]
    most, trials = max(times_last, default=0), sum(times_last)
    if ranks < 2 or not most:
        return None
    name = times_last.index(most)
    most, trials = _independent(last, most)
    ways = sum(comb(trials, times) * (ranks - 1) ** (trials - times) for times in range(most, trials + 1))
    return name if one_in * ranks * ways < ranks**trials else None


def _independent(last: list[int], hits: int) -> tuple[int, int]:
    """As how many independent steps those count of which neighbours are alike, and as how many hits the hits."""
    n = len(last)
    if n < 8:
        return hits, n
    # By chance: without a change, and with one before each step but the first.
    chance = max(_alike(last[:at]) * Fraction(at, n) + _alike(last[at:]) * Fraction(n - at, n) for at in range(n))
    if chance == 1:
        return hits, n
    more = Fraction(sum(last[at] == last[at - 1] for at in range(1, n)), n - 2) - chance
    if more < 0 or more**2 < chance * (1 - chance) / (n - 1):
        return hits, n
    like = min(Fraction(1), more / (1 - chance))
    fraction = (1 - like) / (1 + like)
    return int(hits * fraction), max(1, round(n * fraction))


def _alike(part: list[int]) -> Fraction:
    """How many of all pairs of steps of a part are alike, a step with itself, too."""
    return Fraction(sum(one == other for one in part for other in part), max(1, len(part)) ** 2)


def _late_at(lags: list[Fraction | None], residual: float) -> int | None:
    """Who arrives last at a collective, by more than the clocks' residual."""
    most = max((lag for lag in lags if lag is not None), default=residual)
    return lags.index(most) if most > residual else None


def _origin(
    lags: list[Fraction | None], late: int | None, rows: list[Row], lags_at: list[list[Fraction | None]]
) -> int | None:
    """Of ranks that are late alike, not at one collective, the one that waited least: others may have waited for it."""
    if late is None or (most := lags[late]) is None:
        return late
    waited = [sum(max(0, e.wait or 0) for row in rows if (e := row[i]) is not None) for i in range(len(lags))]
    where = [row for row, at in zip(rows, lags_at, strict=True) if at[late] == most]
    alike = [i for i, lag in enumerate(lags) if lag is not None and float(lag) >= 0.9 * float(most)]
    least = min([late, *(i for i in alike if all(row[i] is None for row in where))], key=lambda i: waited[i])
    return least if waited[late] - waited[least] > 0.1 * float(most) else late


def _key_of(row: Row, ranks: list[Rank]) -> int | None:
    return next(key_of(rank, e) for rank, e in zip(ranks, row, strict=True) if e is not None)


def _lag(row: Row, index: int, ranks: list[Rank], offset: dict[str, int]) -> Fraction | None:
    starts = [None if e is None else Fraction(e.start + offset[rank.file]) for rank, e in zip(ranks, row, strict=True)]
    own = starts[index]
    others = [start for place, start in enumerate(starts) if place != index and start is not None]
    return None if own is None else own - median(others)
