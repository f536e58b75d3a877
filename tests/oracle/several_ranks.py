"""Ranks compared: which collectives are the same, and the mean step by parts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, permutations
from statistics import median

import numpy as np

from ddp_prof.trace import Category
from tests.oracle.ranks import Event, Rank
from tests.oracle.steps import hides_waits, takes_no_time, window_of_length

Row = list[Event | None]


def match(ranks: list[Rank], apart: int = 1_000_000) -> tuple[list[Row], Clocks]:
    """What ranks have in common, each row an event or none of each rank, and their clocks; notes wait and transfer.

    Args:
        ranks: Of one run.
        apart: How far the ends of one collective may lie apart, if it is short.
    """
    pairs = _pair(ranks, _streams(ranks))
    rows = [row for row in pairs if _meet(ranks, row)]
    operations = [next(e.operation for e in row if e is not None) for row in pairs]
    kinds = [[row for row, one in zip(pairs, operations, strict=True) if one == kind] for kind in {*operations}]
    kinds = [pairs, *(kind for kind in kinds if len(kind) >= 12)]
    if any(4 * sum(not _meet(ranks, row) for row in kind) > len(kind) for kind in kinds):
        rows = []
    if _agree_in_groups(rows, ranks, apart):
        rows = []
    found = clocks(ranks, rows)
    far = [_far(row, ranks, found, apart) for row in rows] if found.residual is not None else []
    if any(any(row) for row in far):
        trimmed = [
            [None if out else e for e, out in zip(row, outs, strict=True)] for row, outs in zip(rows, far, strict=True)
        ]
        kept = [row for row in trimmed if _parts(row) > 1]
        found, every = clocks(ranks, kept), len(rows)
        if not kept or (2 * len(kept) < every and not _is_sure(found, apart)):
            rows = []
        else:  # what has the number of a bucket is kept
            numbered = [any(e is not None and e.bucket is not None for e in row) for row in rows]
            rows = [whole if is_kept else rest for whole, rest, is_kept in zip(rows, trimmed, numbered, strict=True)]
            rows = [row for row in rows if _parts(row) > 1]
        found = clocks(ranks, rows)
    for row in rows:
        present = [e for e in row if e is not None]
        shortest = min(e.end - e.start for e in present)
        for e in present:
            e.transfer, e.wait = shortest, e.end - e.start - shortest
    return rows, found


def _share_operations(first: Rank, other: Rank, way: dict[int, int]) -> bool:
    """Whether each stream of a rank has an operation in common with the stream that it is taken for."""

    def of(rank: Rank, stream: int) -> set[str | None]:
        return {e.operation for e in rank.collectives() if e.stream == stream}

    return all(of(other, own) & of(first, taken) for own, taken in way.items())


def _parts(row: Row) -> int:
    return sum(e is not None for e in row)


def _pair(ranks: list[Rank], streams: list[dict[int, int]]) -> list[Row]:
    """The n-th of a stream and bucket in a step on all ranks that count as many of these there."""
    found: dict[tuple, Row] = {}
    has_buckets = all(any(e.bucket is not None for e in rank.collectives()) for rank in ranks if rank.collectives())
    for column, (rank, of_rank) in enumerate(zip(ranks, streams, strict=True)):
        every = rank.collectives()
        every = [e for e in every if e.operation != "peer_copy"]
        kinds = [
            (key_of(rank, e), of_rank.get(e.stream), e.bucket if has_buckets else None, e.operation) for e in every
        ]
        for place, (e, kind) in enumerate(zip(every, kinds, strict=True)):
            if kind[0] is not None:
                key = (kind, kinds[:place].count(kind), kinds.count(kind))
                found.setdefault(key, [None] * len(ranks))[column] = e
    return [
        row
        for row in found.values()
        if _parts(row) > 1 and len({e.bucket for e in row if e and e.bucket is not None}) < 2
    ]


def _streams(ranks: list[Rank]) -> list[dict[int, int]]:
    """By the streams of each rank those of the rank with most: of one number, or as the ends clearly fit better."""
    own = [
        sorted({e.stream for e in rank.collectives() if e.stream is not None and e.operation != "peer_copy"})
        for rank in ranks
    ]
    most = max(map(len, own))
    if most < 2:
        return [{} for _ in ranks]
    first = next(index for index, streams in enumerate(own) if len(streams) == most)
    found = []
    for index, streams in enumerate(own):
        by_number = dict(zip(streams, streams, strict=True)) if {*streams} <= {*own[first]} else {}
        if not by_number and len(streams) == most:
            by_number = dict(zip(streams, own[first], strict=True))
        if index == first or not streams:
            found.append(by_number)
            continue
        every = [dict(zip(streams, one, strict=True)) for one in permutations(own[first], len(streams))]
        ways = [by_number, {}, *(way for way in every if _share_operations(ranks[first], ranks[index], way))]
        fits = [_fit([ranks[first], ranks[index]], [{s: s for s in own[first]} if way else {}, way]) for way in ways]
        pairs = max(count for count, _ in fits)
        able = [place for place, (count, _) in enumerate(fits) if 2 * count >= pairs]
        best = min(able, key=lambda place: fits[place][1])
        found.append(ways[best] if 0 not in able or 3 * fits[best][1] < fits[0][1] else by_number)
    has_none = any(not way and streams for way, streams in zip(found, own, strict=True))
    return [{} for _ in ranks] if has_none else found


def _fit(ranks: list[Rank], streams: list[dict[int, int]]) -> tuple[int, Fraction]:
    """How many pairs there are, and by how much the differences of their ends vary in the mean."""
    differences = [Fraction(a.end - b.end) for a, b in _pair(ranks, streams) if _meet(ranks, [a, b])]
    if not differences:
        return 0, Fraction(2**62)
    constant = 0 if ranks[0].file == ranks[1].file else median(differences)
    return len(differences), sum(abs(difference - constant) for difference in differences) / len(differences)


def _far(row: Row, ranks: list[Rank], found: Clocks, apart: int) -> list[bool]:
    """Which parts end too far from the middle one, of two from each other; no communicator has a name here."""
    present = [e for e in row if e is not None]
    if present[0].operation == "notify":  # it waits for no other rank
        return [False] * len(row)
    offset = found.offset
    ends = [None if e is None else Fraction(e.end + offset[rank.file]) for rank, e in zip(ranks, row, strict=True)]
    middle = median(end for end in ends if end is not None)
    shortest = min(e.end - e.start for e in present)
    most = max(
        Fraction(apart), Fraction(shortest) if all(e.stream is None for e in present) else Fraction(shortest, 10)
    )
    return [end is not None and (2 if len(present) == 2 else 1) * abs(end - middle) > most for end in ends]


def _agree_in_groups(rows: list[Row], ranks: list[Rank], apart: int) -> bool:
    """Whether the differences of ends vary much between some ranks, and little between others."""
    whole = [row for row in rows if None not in row and row[0].operation != "notify"]
    if len(ranks) < 4 or len(whole) < 3:
        return False
    varies = []
    for i, j in combinations(range(len(ranks)), 2):
        differences = [row[i].end - row[j].end for row in whole]
        varies.append(median(abs(difference - median(differences)) for difference in differences))
    length = median(min(e.end - e.start for e in row) for row in whole)
    on_host = any(e.stream is None for row in whole for e in row)
    most = max(apart, length) if on_host else max(50_000, Fraction(length) / 10)
    return max(varies) > most and 3 * min(varies) < max(varies)


def _is_sure(found: Clocks, apart: int) -> bool:
    return found.has_utc and max(map(abs, found.beyond.values())) + (found.residual or 0) <= apart


def _meet(ranks: list[Rank], row: Row) -> bool:
    """Whether each part begins before any of the same file ends, as those of most operations do."""
    parts = [(rank.file, e) for rank, e in zip(ranks, row, strict=True) if e is not None and e.operation != "notify"]
    return all(one.start <= other.end for file, one in parts for name, other in parts if name == file)


def key_of(rank: Rank, e: Event) -> int | None:
    if not rank.has_steps:
        return 0
    return None if e.step is None else rank.key(e.step)


@dataclass
class Clocks:
    """What leads from each file's times to the first one's, what of it no UTC explains, and what remains."""

    offset: dict[str, int]
    beyond: dict[str, int]
    residual: int | None
    has_utc: bool


def clocks(ranks: list[Rank], rows: list[Row]) -> Clocks:
    """By the median difference of matched ends, a single one where no UTC is known; the 95th percentile remains.

    First of the files that share two collectives with the first, then of those that share two with any of these. The
    residual is not known where a file has nothing in common with these, or one collective and no UTC. A file without
    collectives comes last, and does not count.
    """
    counts = {rank.file for rank in ranks if rank.collectives()}
    files = {rank.file: rank.epoch for rank in sorted(ranks, key=lambda rank: rank.file not in counts)}
    first = next(iter(files))
    has_utc = None not in files.values()
    base = {file: files[file] - files[first] if has_utc else 0 for file in files}
    beyond, rest, is_known = {first: 0}, [], len(counts) > 1 or len(files) == 1
    common = [_end(row, ranks, first) for row in rows]
    while left := [file for file in files if file not in beyond]:
        of_file = {
            file: [
                ref - own - base[file]
                for row, ref in zip(rows, common, strict=True)
                if (own := _end(row, ranks, file)) is not None and ref is not None
            ]
            for file in left
        }
        now = [file for file in left if len(of_file[file]) > 1] or left
        for file in now:
            differences = of_file[file]
            is_known &= len(differences) > 1 or (len(differences) == 1 and has_utc) or file not in counts
            is_fitted = len(differences) > 1 or (len(differences) == 1 and not has_utc)
            beyond[file] = round(float(median(differences))) if is_fitted else 0
            rest += [abs(difference - beyond[file]) for difference in differences]
        for file in now:
            ends = [_end(row, ranks, file) for row in rows]
            common = [
                own + base[file] + beyond[file] if ref is None and own is not None else ref
                for own, ref in zip(ends, common, strict=True)
            ]
    residual = round(float(np.percentile(rest, 95))) if rest else 0
    offset = {file: base[file] + beyond[file] for file in files}
    return Clocks(offset, beyond, residual if is_known else None, has_utc or len(files) == 1)


def _end(row: Row, ranks: list[Rank], file: str) -> int | None:
    return max((e.end for rank, e in zip(ranks, row, strict=True) if e is not None and rank.file == file), default=None)


def budget(ranks: list[Rank], apart: int = 1_000_000, *, knows_tail: bool = True) -> dict[str, int | None] | None:
    """The mean step by parts, contention aside; after :func:`explain`. None where it is not known what ran in steps.

    Unless ``knows_tail``, the tail of backward is transfer. The only rank of a job waits for nobody.
    """
    if any(rank.has_steps and rank.steps and _is_unknown(rank) for rank in ranks):
        return None
    knows_wait = bool(match(ranks, apart)[0]) or {rank.world_size for rank in ranks} == {1}
    sums: Counter[str] = Counter()
    steps = 0
    for rank in ranks:
        compute, every = rank.instants(Category.COMPUTE), rank.instants(Category.COMMUNICATION)
        waiting = {t for r in rank.synchronize for t in range(r.start, r.end)} - compute - every
        for window in (window_of_length(rank, step) for step in rank.steps if rank.has_steps):
            if window is None:
                continue
            steps += 1
            sums["step"] += len(window)
            sums["compute"] += len(compute & window)
            sums["calls"] += len(waiting & window)
            for time in (every - compute) & window:
                waits, tails = map(any, zip(*rank.at[time], strict=True))
                sums["wait" if waits and knows_wait else "tail" if tails and knows_tail else "transfer"] += 1
    found: dict[str, int | None] = {part: round(sums[part] / steps) for part in ("step", *PARTS)} if steps else {}
    if found and any(rank.clocks_disagree for rank in ranks):  # when the host waited is not known
        found |= {"calls": None}
    unknown = {} if knows_tail else {"tail": None}
    return found | unknown | ({} if knows_wait else {"wait": None}) if found else None


def _is_unknown(rank: Rank) -> bool:
    return (
        rank.is_blind
        or not rank.events
        or any(event.category is Category.OTHER for event in rank.events)
        or hides_waits(rank)
        or takes_no_time(rank)
        or rank.is_unnamed
    )


PARTS = ("compute", "transfer", "tail", "wait", "calls")
