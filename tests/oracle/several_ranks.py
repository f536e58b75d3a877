"""Ranks compared: which collectives are the same, who is late, and the mean step by parts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from statistics import median

import numpy as np

from ddp_prof.trace import Category
from tests.oracle.ranks import Event, Rank


def match(ranks: list[Rank]) -> list[list[Event | None]]:
    """The n-th collective of a step on all ranks that count as many there, of one size; notes wait and transfer."""
    found: dict[tuple[int, int, int], list[Event | None]] = {}
    for column, rank in enumerate(ranks):
        for step in rank.steps if rank.has_steps else [None]:
            own = [e for e in rank.collectives() if e.step is step] if step else rank.collectives()
            for place, e in enumerate(own):
                key = (rank.key(step) if step else 0, place, len(own))
                found.setdefault(key, [None] * len(ranks))[column] = e
    rows = [row for row in found.values() if sum(e is not None for e in row) > 1 and _meet(ranks, row)]
    for row in rows:
        present = [e for e in row if e is not None]
        shortest = min(e.end - e.start for e in present)
        for e in present:
            e.transfer, e.wait = shortest, e.end - e.start - shortest
    return rows


def _meet(ranks: list[Rank], row: list[Event | None]) -> bool:
    """Whether each part begins before any of the same file ends: all of them are all-reduces."""
    parts = [(rank.file, e) for rank, e in zip(ranks, row, strict=True) if e is not None]
    return all(one.start <= other.end for file, one in parts for name, other in parts if name == file)


def skew_figures(ranks: list[Rank]) -> list[tuple[int, list[int | None], int | None, int]]:
    """For each step its key, each rank's lag, who is last and what that costs; after :func:`explain`."""
    rows = match(ranks)
    offset, residual = clocks(ranks, rows) or ({}, 0)
    lags = [[_lag(row, index, ranks, offset) if offset else None for index in range(len(ranks))] for row in rows]
    keys = [_key_of(row, ranks) for row in rows]
    figures = []
    for key in sorted(set(keys)):
        own = [row_lags for row_lags, row_key in zip(lags, keys, strict=True) if row_key == key]
        largest = [max((row[i] for row in own if row[i] is not None), default=None) for i in range(len(ranks))]
        most = max((lag for lag in largest if lag is not None), default=residual)
        last = largest.index(most) if most > residual else None
        late = [
            row
            for row, row_lags, row_key in zip(rows, lags, keys, strict=True)
            if row_key == key and last is not None and _late_at(row_lags, residual) == last
        ]
        waits = [
            sum(e.exposed_wait for row in late if (e := row[index]) is not None)
            for index in range(len(ranks))
            if index != last
        ]
        cost = max(waits, default=0) if last is not None else 0
        figures.append((key, [None if lag is None else round(float(lag)) for lag in largest], last, cost))
    return figures


def _late_at(lags: list[Fraction | None], residual: float) -> int | None:
    """Who arrives last at a collective, by more than the clocks' residual."""
    most = max((lag for lag in lags if lag is not None), default=residual)
    return lags.index(most) if most > residual else None


def _key(rank: Rank, e: Event) -> int | None:
    if not rank.has_steps:
        return 0
    return None if e.step is None else rank.key(e.step)


def _key_of(row: list[Event | None], ranks: list[Rank]) -> int | None:
    return next(_key(rank, e) for rank, e in zip(ranks, row, strict=True) if e is not None)


def _lag(row: list[Event | None], index: int, ranks: list[Rank], offset: dict[str, int]) -> Fraction | None:
    starts = [None if e is None else Fraction(e.start + offset[rank.file]) for rank, e in zip(ranks, row, strict=True)]
    own = starts[index]
    others = [start for place, start in enumerate(starts) if place != index and start is not None]
    return None if own is None else own - median(others)


def clocks(ranks: list[Rank], rows: list[list[Event | None]]) -> tuple[dict[str, int], float] | None:
    """Offset of each file by the median difference of matched ends, and the 95th percentile of what remains.

    ``None`` where a file has fewer than two collectives in common with the first.
    """
    files = list(dict.fromkeys(rank.file for rank in ranks))
    offset, rest = {files[0]: 0}, []
    for file in files[1:]:
        pairs = [(_end(row, ranks, file), _end(row, ranks, files[0])) for row in rows]
        differences = [reference - own for own, reference in pairs if own is not None and reference is not None]
        if len(differences) < 2:
            return None
        offset[file] = round(float(median(differences)))
        rest += [abs(difference - offset[file]) for difference in differences]
    return offset, round(float(np.percentile(rest, 95))) if rest else 0.0


def _end(row: list[Event | None], ranks: list[Rank], file: str) -> int | None:
    return max((e.end for rank, e in zip(ranks, row, strict=True) if e is not None and rank.file == file), default=None)


def budget(ranks: list[Rank]) -> dict[str, int] | None:
    """The mean step by parts, contention aside; after :func:`explain`. None where it is not known what ran in steps."""
    if any(rank.has_steps and rank.steps and _is_unknown(rank) for rank in ranks):
        return None
    sums: Counter[str] = Counter()
    steps = 0
    for rank in ranks:
        compute, every = rank.instants(Category.COMPUTE), rank.instants(Category.COMMUNICATION)
        waiting = {t for r in rank.synchronize for t in range(r.start, r.end)} - compute - every
        for step in rank.steps if rank.has_steps else []:
            steps += 1
            host = set(range(step.start, step.end))
            own = [e for e in rank.collectives() if e.step is step]
            wait = sum(e.exposed_wait for e in own)
            tail = sum(ns for e in own for (when, _), ns in e.exposed.items() if when == "tail")
            tail -= sum(e.tail_wait for e in own)
            sums["step"] += len(host)
            sums["compute"] += len(compute & host)
            sums["calls"] += len(waiting & host)
            sums["wait"] += wait
            sums["tail"] += tail
            sums["transfer"] += sum(sum(e.exposed.values()) for e in own) - wait - tail
    return {part: round(sums[part] / steps) for part in ("step", *PARTS)} if steps else None


def _is_unknown(rank: Rank) -> bool:
    return rank.is_blind or any(event.category is Category.OTHER for event in rank.events)


PARTS = ("compute", "transfer", "tail", "wait", "calls")
