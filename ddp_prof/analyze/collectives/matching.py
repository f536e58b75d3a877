"""Which collectives of several ranks are the same collective: a *match* of one *part* per rank.

All ranks issue the collectives of a communicator in the same order (otherwise they would hang). So the n-th collective
of a kind in a step of one communicator is the same on all its ranks. If the profiler recorded the sequence number
within the communicator, that number is used instead. Collectives are left unmatched if their number in the step
differs, or if their sizes differ, except for all-to-alls, in which ranks may send and receive unequal parts. Sends,
receives and copies between devices are not collectives and have no match.

If communicators have no names, the common order of their collectives is not known: each rank may launch those of
different communicators in another order. But each communicator uses streams of its own. So the n-th collective of a
stream is matched with the n-th collective of the other rank's stream with the same number, or of another stream if its
ends fit clearly better: a collective ends on all ranks at nearly the same time. If an operation cannot end before all
ranks have begun, collectives on the same clock that do not overlap in time never match. If there are many such pairs,
or many of one operation, no collective without the name of a communicator is matched: the ranks belong to different
communicators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations

import numpy as np

from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.core.steps import CLEARLY
from ddp_prof.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    DEVICE_BARRIER,
    OPERATIONS,
    PEER_COPY,
    POINT_TO_POINT,
    REDUCE,
    REDUCE_SCATTER,
)
from ddp_prof.table import concatenate, count_before, distinct_rows, positions
from ddp_prof.trace import NEVER, NO_TIME, UNKNOWN, Ints, Mask, distinct, select, take_or_unknown

MOST_STREAMS = 4
"""With more streams, only pairings by stream number are tried."""

APART = "what may be one collective often ended on one rank before it began on another"
SUBGROUPS = "the job has process groups of a part of its ranks"
"""Why collectives without the name of a communicator are not matched: one of these two reasons."""

_OFTEN = 4
"""If more than one in this number of unnamed matches does not overlap in time, or of those of one operation, none is
matched: reductions to shards within nodes may not meet, though those between nodes and all gathers do."""

_LEAST_OF_KIND = 12
"""Smallest number of matches of an operation that is looked at by itself."""

LOOKED_AT = 1_000
"""Largest number of collectives that are compared to distinguish communicators."""

_NO_COLLECTIVES = (OPERATIONS.index(POINT_TO_POINT), OPERATIONS.index(PEER_COPY))
_NEED_ALL = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER, DEVICE_BARRIER)
NEEDS_ALL = {OPERATIONS.index(name) for name in _NEED_ALL}
"""Operations that cannot end on any rank before all ranks have begun."""
_OF_ONE_SIZE = {OPERATIONS.index(name) for name in (ALL_REDUCE, BROADCAST, REDUCE)}
"""Operations with the same size on each rank."""

_OF_UNEQUAL_SIZES = OPERATIONS.index(ALL_TO_ALL)
"""The operation in which each rank may have a size of its own, as tokens are sent to experts."""

Streams = Mapping[int, int]
"""Maps a rank's streams to those of the reference rank."""


@dataclass(frozen=True)
class Matches:
    """Collectives in which at least two ranks took part.

    Attributes:
        rows: One row per collective, one column per rank: its row in the rank's timings, ``UNKNOWN`` if it has none.
        unmatched: Number of collectives without a match, summed over the ranks.
        by_stream: Whether communicators without a name were distinguished by their streams.
        doubt: Why collectives without the name of a communicator were left unmatched; ``None`` if they were not.
    """

    rows: Ints
    unmatched: int
    by_stream: bool = False
    doubt: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, ranks: Sequence[RankCollectives], name: str, missing: int = NO_TIME) -> Ints:
        """Return the column ``name`` of the ranks' timings, in the shape of :attr:`rows`.

        Where a rank took no part it holds ``missing``.
        """
        columns = [
            take_or_unknown(getattr(rank.timings, name), self.rows[:, index], missing)
            for index, rank in enumerate(ranks)
        ]
        return np.stack(columns, axis=1) if columns else np.empty((0, 0), np.int64)

    def drop_parts(self, parts: Mask, doubt: str | None = None) -> Matches:
        """Return the matches without these parts; a collective with a single remaining part is unmatched.

        ``parts`` is a mask in the shape of :attr:`rows`, ``doubt`` the reason for dropping them.
        """
        rows = np.where(parts, UNKNOWN, self.rows)
        rows = rows[(rows != UNKNOWN).sum(axis=1) > 1]
        lost = int((self.rows != UNKNOWN).sum() - (rows != UNKNOWN).sum())
        return replace(self, rows=rows, unmatched=self.unmatched + lost, doubt=doubt)


def match_collectives(ranks: Sequence[RankCollectives]) -> Matches:
    """Return the collectives that at least two of the ranks share; see the module's description."""
    if len(ranks) < 2:
        return Matches(np.empty((0, len(ranks)), np.int64), 0)
    streams = _pair_streams(ranks)
    rows = _find_pairs(ranks, streams)
    rows = rows[((rows != UNKNOWN).sum(axis=1) > 1) & _do_parts_agree(ranks, rows)]
    candidates = sum(int((~np.isin(rank.timings.operation, _NO_COLLECTIVES)).sum()) for rank in ranks)
    # Matches without the name of a communicator are dropped if too many of them do not overlap in time.
    meets = _do_parts_meet(ranks, rows)
    matches = Matches(rows[meets], candidates - int((rows[meets] != UNKNOWN).sum()), by_stream=any(streams))
    unnamed = Matches(rows, 0).column(ranks, "group", UNKNOWN).max(axis=1) == UNKNOWN
    operation = Matches(rows, 0).column(ranks, "operation", UNKNOWN).max(axis=1)
    kinds = [unnamed & (operation == one) for one in distinct(operation[unnamed])]
    is_apart = any(
        _OFTEN * int((~meets & chosen).sum()) > int(chosen.sum())
        for chosen in (unnamed, *(kind for kind in kinds if kind.sum() >= _LEAST_OF_KIND))
    )
    if is_apart or (unnamed.any() and any(rank.has_subgroups for rank in ranks)):
        doubt = APART if is_apart else SUBGROUPS
        return matches.drop_parts(matches.column(ranks, "group", UNKNOWN) == UNKNOWN, doubt)
    return matches


def lie_outside(rank: RankCollectives) -> Mask:
    """Return which collectives of a rank lie in no step and have no number, so that they are not matched."""
    timings = rank.timings
    found: Mask = (rank.keys == UNKNOWN) & (timings.sequence == UNKNOWN) & ~np.isin(timings.operation, _NO_COLLECTIVES)
    return found


def _find_pairs(ranks: Sequence[RankCollectives], streams: Sequence[Streams]) -> Ints:
    """Return the collectives with the same key on all ranks, in the shape of ``Matches.rows``.

    They may have a single part. They are in the order of the first rank, then in that of the second rank, and so on.

    - ``streams``: For each rank, its streams mapped to those of the reference rank.
    """
    # Put the collectives of all ranks into one table: `of_rank` and `row` tell where each row comes from.
    timings = concatenate(*(rank.timings for rank in ranks))
    of_rank = np.repeat(np.arange(len(ranks)), [len(rank.timings) for rank in ranks])
    row = np.concatenate([np.arange(len(rank.timings)) for rank in ranks])
    step = np.concatenate([rank.keys for rank in ranks])
    # The communicator of each collective: by its name or, without one, by its stream.
    number: dict[str | None, int] = {None: UNKNOWN}
    groups, lanes = [], []
    for rank, streams_of_rank in zip(ranks, streams, strict=True):
        names = [number.setdefault(name, len(number)) for name in rank.groups]
        groups.append(np.array([*names, UNKNOWN])[rank.timings.group])  # index -1 (no group) takes the last element
        lanes += [streams_of_rank.get(lane, UNKNOWN) for lane in rank.timings.lane.tolist()]
    group = np.concatenate(groups)
    lane = np.where(group == UNKNOWN, np.array(lanes, np.int64), UNKNOWN)
    # Operations with one size on all ranks, if the trace contains the size of all of them.
    sized = [operation for operation in _OF_ONE_SIZE if UNKNOWN not in timings.bytes[timings.operation == operation]]
    size = np.where(np.isin(timings.operation, sized), timings.bytes, UNKNOWN)
    numbered = all(np.any(rank.timings.bucket != UNKNOWN) for rank in ranks if len(rank.timings))
    bucket = timings.bucket if numbered else np.full(len(timings), UNKNOWN)
    _, kind = distinct_rows(group, lane, timings.operation, size, bucket, step)
    _, own_kind = distinct_rows(of_rank, kind)
    # The key: communicator and recorded number, else kind, position among those of the kind on its rank, and their
    # count.
    has_number = timings.sequence != UNKNOWN
    key = np.stack(
        [
            has_number,
            np.where(has_number, group, kind),
            np.where(has_number, timings.sequence, count_before(own_kind)),
            np.where(has_number, UNKNOWN, np.bincount(own_kind)[own_kind]),
        ]
    )
    chosen = np.flatnonzero(~np.isin(timings.operation, _NO_COLLECTIVES) & (has_number | (step != UNKNOWN)))
    # One row of the result per distinct key, ordered by the key's first collective.
    first, which = distinct_rows(*key[:, chosen])
    found = np.full((len(first), len(ranks)), UNKNOWN, np.int64)
    found[positions(np.argsort(first), len(first))[which], of_rank[chosen]] = row[chosen]
    return found


def _pair_streams(ranks: Sequence[RankCollectives]) -> list[Streams]:
    """Return for each rank a map of its streams to those of the reference rank: the one with most streams.

    Only streams of collectives without the name of a communicator count. All maps are empty if no pairs of streams are
    needed, because the order of the collectives over all streams is the same on all ranks.
    """
    lanes = []
    for rank in ranks:
        timings = rank.timings
        unnamed = (timings.group == UNKNOWN) & ~np.isin(timings.operation, _NO_COLLECTIVES) & (timings.lane != UNKNOWN)
        lanes.append(np.unique(timings.lane[unnamed]).tolist())
    most = max(map(len, lanes), default=0)
    unpaired: list[Streams] = [{} for _ in ranks]
    if most < 2:
        return unpaired
    reference = next(index for index, of_rank in enumerate(lanes) if len(of_rank) == most)
    paired = [
        _best_streams(ranks[reference], rank, lanes[reference], of_rank) if of_rank else {}
        for rank, of_rank in zip(ranks, lanes, strict=True)
    ]
    # If one rank with such streams fits best without pairs, none is used.
    return paired if all(streams or not of_rank for streams, of_rank in zip(paired, lanes, strict=True)) else unpaired


def _best_streams(
    first: RankCollectives, other: RankCollectives, lanes: Sequence[int], others: Sequence[int]
) -> Streams:
    """Return a map of the streams of ``other`` to those of ``first``.

    It maps streams with the same number, or those whose ends fit best if they fit clearly better. It is empty if the
    collectives fit best in one order over all streams.

    - ``lanes``: The streams of ``first``.
    - ``others``: The streams of ``other``.
    """
    by_number: Streams = {}
    if {*others} <= {*lanes}:
        by_number = {lane: lane for lane in others}
    elif len(others) == len(lanes):
        by_number = dict(zip(others, lanes, strict=True))
    if first is other:
        return by_number
    first, other = (
        replace(rank, timings=select(rank.timings, np.arange(min(LOOKED_AT, len(rank.timings)))))
        for rank in (first, other)
    )
    # Compare all ways to pair the streams, on the first collectives only. A way must give at least half as many pairs
    # as the way with most pairs; among these, the smallest deviation of the ends wins.
    ways: list[Streams] = [by_number, {}]
    if len(lanes) <= MOST_STREAMS:
        every = (dict(zip(others, chosen, strict=True)) for chosen in permutations(lanes, len(others)))
        ways += [way for way in every if _do_operations_agree(first, other, way)]
    fits = [_measure_fit(first, other, {lane: lane for lane in lanes} if way else {}, way) for way in ways]
    most = max(pairs for pairs, _ in fits)
    able = [index for index, (pairs, _) in enumerate(fits) if 2 * pairs >= most]
    best = min(able, key=lambda index: fits[index][1])
    return ways[best] if 0 not in able or CLEARLY * fits[best][1] < fits[0][1] else by_number


def _do_operations_agree(first: RankCollectives, other: RankCollectives, way: Streams) -> bool:
    """Return whether each stream of ``other`` has an operation in common with that of ``first`` to which it is mapped.

    What reduces to shards is never what reduces between nodes, however well the ends of the rest fit.
    """

    def operations(rank: RankCollectives, lane: int) -> set[int]:
        return {*rank.timings.operation[rank.timings.lane == lane].tolist()}

    return all(operations(other, lane) & operations(first, to) for lane, to in way.items())


def _measure_fit(first: RankCollectives, other: RankCollectives, own: Streams, others: Streams) -> tuple[int, Fraction]:
    """Return the number of matches with this pairing of streams, and how badly their ends fit, in nanoseconds.

    The latter is the mean absolute deviation of the differences between the two ranks' ends: from 0 on one clock, from
    their median on two clocks.

    - ``own``, ``others``: Maps of the streams of ``first`` and of ``other`` to common numbers.
    """
    ranks = (first, other)
    rows = _find_pairs(ranks, (own, others))
    rows = rows[(rows != UNKNOWN).all(axis=1) & _do_parts_agree(ranks, rows) & _do_parts_meet(ranks, rows)]
    if not len(rows):
        return 0, Fraction(NEVER)
    difference = first.timings.end_ns[rows[:, 0]] - other.timings.end_ns[rows[:, 1]]
    constant = 0 if first.clock == other.clock else np.median(difference)
    return len(rows), Fraction(float(np.sum(np.abs(difference - constant)))) / len(rows)  # np.mean would round


def _do_parts_agree(ranks: Sequence[RankCollectives], rows: Ints) -> Mask:
    """Return which rows have parts of the same operation and, as far as known, of the same size and bucket."""
    matches, present = Matches(rows, 0), rows != UNKNOWN
    operation, size, bucket = (matches.column(ranks, name, UNKNOWN) for name in ("operation", "bytes", "bucket"))
    agree = np.ones(len(rows), np.bool_)
    is_sized = (size != UNKNOWN) & (operation != _OF_UNEQUAL_SIZES)
    for values, counts in ((operation, present), (size, is_sized), (bucket, bucket != UNKNOWN)):
        least = values.min(axis=1, where=counts, initial=NEVER)
        agree &= values.max(axis=1, where=counts, initial=UNKNOWN) <= least
    return agree


def _do_parts_meet(ranks: Sequence[RankCollectives], rows: Ints) -> Mask:
    """Return which rows have parts that overlap in time.

    A row is only checked if its operation cannot end before all ranks have begun, and only among parts on one clock.
    """
    matches, present = Matches(rows, 0), rows != UNKNOWN
    start, end, operation = (matches.column(ranks, name) for name in ("start_ns", "end_ns", "operation"))
    needs_all = np.isin(operation.max(axis=1, where=present, initial=UNKNOWN), [*NEEDS_ALL])
    meet = np.ones(len(rows), np.bool_)
    for clock in {rank.clock for rank in ranks}:
        here = present & [rank.clock == clock for rank in ranks]
        begun = start.max(axis=1, where=here, initial=-NEVER)
        meet &= ~needs_all | (begun <= end.min(axis=1, where=here, initial=NEVER))
    return meet
