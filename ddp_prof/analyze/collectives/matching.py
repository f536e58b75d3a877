"""Which collectives of several ranks are one and the same.

All ranks issue the collectives of a communicator in the same order (otherwise they would hang). So the n-th collective
of a kind in a step of one communicator is the same on all its ranks. If the profiler recorded the sequence number
within the communicator, that number is used instead. Collectives that do not fit are left unmatched: if sizes differ,
or their number in a step. Sends and receives are not collectives and have no match.

If communicators have no names, their common order is not known: each rank may launch them in another order. Each
communicator uses streams of its own, so the n-th collective of a stream is matched with the n-th one of the other
rank's stream with the same number, or of another stream if the ends fit clearly better with that one: a collective
ends on all ranks at nearly the same time. Collectives on the same clock that do not overlap in time never match, if
their operation cannot end before all ranks have begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.core.attribution import OPERATIONS, POINT_TO_POINT
from ddp_prof.analyze.core.step_alignment import CLEARLY
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, Mask, select, take_or_unknown

_LATEST = 2**62

MOST_STREAMS = 4
"""With more streams, only pairings by stream number are tried."""

LOOKED_AT = 1_000
"""Only this number of collectives is compared to distinguish communicators."""

_NO_COLLECTIVE = OPERATIONS.index(POINT_TO_POINT)
NEEDS_ALL = {OPERATIONS.index(name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")}
"""Operations that cannot end on any rank before all ranks have begun."""
_OF_ONE_SIZE = {OPERATIONS.index(name) for name in ("all_reduce", "broadcast", "reduce")}
"""Operations with the same size on each rank."""

Streams = Mapping[int, int]
"""Maps a rank's streams to those of the reference rank."""


@dataclass(frozen=True)
class Matches:
    """Collectives in which at least two ranks took part.

    Attributes:
        rows: One row per collective, one column per rank: its row in the rank's timings, ``UNKNOWN`` if it has none.
        unmatched: Number of collectives without a match, over all ranks.
        by_stream: Whether communicators without a name were distinguished by their streams.
        doubt: Why collectives that are identified by order alone were left unmatched; ``None`` if they were not.
    """

    rows: Ints
    unmatched: int
    by_stream: bool = False
    doubt: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, ranks: Sequence[RankCollectives], name: str, missing: int = NO_TIME) -> Ints:
        """A column of the ranks' timings, shaped as :attr:`rows`; ``missing`` if a rank took no part."""
        columns = [
            take_or_unknown(getattr(rank.timings, name), self.rows[:, index], missing)
            for index, rank in enumerate(ranks)
        ]
        return np.stack(columns, axis=1) if columns else np.empty((0, 0), np.int64)

    def drop_parts(self, parts: Mask, doubt: str | None = None) -> Matches:
        """The matches without these parts; a collective with a single remaining part is unmatched."""
        rows = np.where(parts, UNKNOWN, self.rows)
        rows = rows[(rows != UNKNOWN).sum(axis=1) > 1]
        lost = int((self.rows != UNKNOWN).sum() - (rows != UNKNOWN).sum())
        return replace(self, rows=rows, unmatched=self.unmatched + lost, doubt=doubt)


def match_collectives(ranks: Sequence[RankCollectives]) -> Matches:
    if len(ranks) < 2:
        return Matches(np.empty((0, len(ranks)), np.int64), 0)
    streams = _pair_streams(ranks)
    shared = [
        rows
        for rows in _find_pairs(ranks, streams)
        if len(ranks) - rows.count(UNKNOWN) > 1 and _parts_agree(ranks, rows)
    ]
    matched = sum(len(ranks) - rows.count(UNKNOWN) for rows in shared)
    candidates = sum(int((rank.timings.operation != _NO_COLLECTIVE).sum()) for rank in ranks)
    return Matches(
        np.array(shared, np.int64).reshape(len(shared), len(ranks)), candidates - matched, by_stream=any(streams)
    )


def _find_pairs(ranks: Sequence[RankCollectives], streams: Sequence[Streams]) -> Iterator[list[int]]:
    """Groups of the ranks' rows with the same key."""
    found: dict[Hashable, list[int]] = {}
    numbered = all(np.any(rank.timings.bucket != UNKNOWN) for rank in ranks if len(rank.timings))
    # Operations with one size on all ranks, if the trace contains the size of all of them.
    sized = {
        operation
        for operation in _OF_ONE_SIZE
        if not any(np.any(rank.timings.bytes[rank.timings.operation == operation] == UNKNOWN) for rank in ranks)
    }
    for column, (rank, of_rank) in enumerate(zip(ranks, streams, strict=True)):
        for row, key in enumerate(_match_keys(rank, of_rank, sized, numbered=numbered)):
            if key is not None:
                found.setdefault(key, [UNKNOWN] * len(ranks))[column] = row
    yield from found.values()


def _match_keys(rank: RankCollectives, streams: Streams, sized: set[int], *, numbered: bool) -> list[Hashable | None]:
    """The key that identifies each collective of a rank on all ranks; ``None`` if there is none."""
    timings = rank.timings
    groups = [rank.groups[group] if group != UNKNOWN else None for group in timings.group.tolist()]
    steps = [None if key == UNKNOWN else key for key in rank.keys.tolist()]
    lanes = [streams.get(lane) for lane in timings.lane.tolist()]
    sizes = np.where(np.isin(timings.operation, [*sized]), timings.bytes, UNKNOWN).tolist()
    buckets = timings.bucket.tolist() if numbered else [UNKNOWN] * len(timings)
    kinds = [
        (group, lane if group is None else None, *kind)
        for group, lane, *kind in zip(groups, lanes, timings.operation.tolist(), sizes, buckets, steps, strict=True)
    ]
    total = Counter(kinds)
    count: Counter[Hashable] = Counter()
    keys: list[Hashable | None] = []
    for kind, group, step, sequence, operation in zip(
        kinds, groups, steps, timings.sequence.tolist(), timings.operation.tolist(), strict=True
    ):
        position = count[kind]
        count[kind] += 1
        if operation == _NO_COLLECTIVE:
            keys.append(None)
        elif sequence != UNKNOWN:
            keys.append((group, sequence))
        else:
            keys.append(None if step is None else (kind, position, total[kind]))
    return keys


def _pair_streams(ranks: Sequence[RankCollectives]) -> list[Streams]:
    """Map each rank's streams to those of the rank with most streams; empty if one order holds for all."""
    lanes = []
    for rank in ranks:
        timings = rank.timings
        unnamed = (timings.group == UNKNOWN) & (timings.operation != _NO_COLLECTIVE) & (timings.lane != UNKNOWN)
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
    return paired if all(streams or not of_rank for streams, of_rank in zip(paired, lanes, strict=True)) else unpaired


def _best_streams(
    first: RankCollectives, other: RankCollectives, lanes: Sequence[int], others: Sequence[int]
) -> Streams:
    """Pair streams by number, or by ends if these clearly fit better; empty if one order holds for all streams."""
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
    ways: list[Streams] = [by_number, {}]
    if len(lanes) <= MOST_STREAMS:
        ways += [dict(zip(others, chosen, strict=True)) for chosen in permutations(lanes, len(others))]
    fits = [_measure_fit(first, other, {lane: lane for lane in lanes} if way else {}, way) for way in ways]
    most = max(pairs for pairs, _ in fits)
    able = [index for index, (pairs, _) in enumerate(fits) if 2 * pairs >= most]
    best = min(able, key=lambda index: fits[index][1])
    return ways[best] if 0 not in able or CLEARLY * fits[best][1] < fits[0][1] else by_number


def _measure_fit(first: RankCollectives, other: RankCollectives, own: Streams, others: Streams) -> tuple[int, Fraction]:
    """Number of matches with this pairing of streams, and the mean deviation of the differences of their ends."""
    ranks = (first, other)
    rows = [rows for rows in _find_pairs(ranks, (own, others)) if UNKNOWN not in rows and _parts_agree(ranks, rows)]
    if not rows:
        return 0, Fraction(_LATEST)
    at = np.array(rows)
    difference = first.timings.end_ns[at[:, 0]] - other.timings.end_ns[at[:, 1]]
    constant = 0 if first.clock == other.clock else np.median(difference)
    return len(rows), Fraction(float(np.sum(np.abs(difference - constant)))) / len(rows)  # np.mean would round


def _parts_agree(ranks: Sequence[RankCollectives], rows: Sequence[int]) -> bool:
    """Whether all parts have one operation, overlap in time and, as far as known, have one size and bucket."""
    parts = [(rank.timings, row) for rank, row in zip(ranks, rows, strict=True) if row != UNKNOWN]
    operations = {int(timings.operation[row]) for timings, row in parts}
    if len(operations) > 1:
        return False
    for name in ("bytes", "bucket"):
        if len({int(getattr(timings, name)[row]) for timings, row in parts} - {UNKNOWN}) > 1:
            return False
    if not operations <= NEEDS_ALL:
        return True
    # Parts on the same clock must overlap in time.
    times: dict[Path, tuple[int, int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        if row != UNKNOWN:
            start, end = times.get(rank.clock, (-_LATEST, _LATEST))
            times[rank.clock] = max(start, int(rank.timings.start_ns[row])), min(end, int(rank.timings.end_ns[row]))
    return all(start <= end for start, end in times.values())
