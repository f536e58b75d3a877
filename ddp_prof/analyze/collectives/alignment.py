"""A common clock for the ranks of a run, and a check of matched collectives by their ends on it.

Each file has its own clock. The clocks are aligned first by UTC, if the files contain the UTC of their time 0, and then
by matched collectives, which end on all ranks at nearly the same time (HTA's straggler analysis and NVIDIA's recipes
assume this, too): the median of the differences of their ends is the file's offset. A file that shares no collective
with the first file, as with tensor and data parallelism, is aligned through other files. In a long run whose
differences grow, a drift is fitted, too. The differences that remain are the residual: smaller differences of time
between ranks mean nothing. If two files have a single collective in common, some offset fits it exactly. UTC alone is
used then, and the difference of the ends is the residual; without UTC, the residual is not known.

A match of collectives without the name of a communicator is checked: on the common clock, their ends must not differ by
more than 1 ms and by more than a tenth of their duration; with gloo, whose threads wait for a core, by more than their
duration. If they do, the match is dropped, unless it has the number of a bucket. All matches without a name are dropped
if most of them fail and UTC does not confirm the others, or if the ends agree among some ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.matching import LOOKED_AT, NEEDS_ALL, Matches, match_collectives
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.core.steps import CLEARLY, LEAST_COMMON_STEPS
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, Mask, distinct

ONE_CLOCK = "one clock"
SESSION_START = "session start"
MATCHED_ENDS = "ends of matched collectives"
NONE = "none"

LEAST_PAIRS = 2
"""Number of matched ends that two files must share to measure how well their clocks agree; one always fits exactly."""

APART_NS = 1_000_000
"""Largest plausible difference between the ends of a short collective on two ranks."""

_APART, _APART_ON_HOST = 0.1, 1.0
"""The same for a long collective, as a fraction of its shortest duration: on a device, and in threads of the host."""

_APART_IN_GROUPS_NS = 50_000
"""If the ends on two ranks scatter by more, the ranks may belong to different communicators."""

_LEAST_OF_GROUPS, _COMPARED_RANKS = 4, 16
"""Smallest number of ranks to look for several communicators, and largest number of ranks that are compared for it."""

GIVEN_UP = "the ends of what may be one collective lie further apart than it lasts"
IN_GROUPS = "the ends of what may be one collective agree among some ranks only"
"""Why collectives without the name of a communicator are not matched: one of these two reasons."""

_LONGEST = np.iinfo(np.int64).max
_DRIFT_AFTER_NS = 10_000_000_000
_DRIFT_PAIRS = 20
"""A drift is fitted if the matched ends span at least this time and make at least this number of pairs."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Converts a file's times to those of the first file: ``t + offset + drift * (t - origin)``.

    Attributes:
        offset_ns: Difference of the clocks at ``origin_ns``, including the difference of their UTC at time 0.
        clock: The file.
        beyond_epoch_ns: The part of ``offset_ns`` that the files' UTC does not explain.
        drift: Growth of the difference per time, a ratio; 0 if none was found.
        origin_ns: The time of the file from which the drift counts.
    """

    clock: Path
    offset_ns: int
    beyond_epoch_ns: int
    drift: float
    origin_ns: int

    def common_ns(self, time_ns: Ints) -> Ints:
        """Return the file's times on the clock of the first file."""
        result: Ints = time_ns + self.offset_ns
        if self.drift:
            result = result + np.rint(self.drift * (time_ns - self.origin_ns)).astype(np.int64)
        return result


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the ranks' clocks were brought together.

    Attributes:
        method: How the clocks were aligned; ``none`` if they could not be, so that times of ranks cannot be compared.
        residual_p50_ns: Median of the remaining differences between the ends of matched collectives; ``None`` if they
            could not be measured.
        residual_p95_ns: Their 95th percentile: smaller differences between ranks are not reported. 0 for a single
            clock.
        missing_ranks: Numbers of the job's ranks that are not among the traces.
        clocks: One per file.
    """

    method: str
    residual_p50_ns: int | None
    residual_p95_ns: int | None
    missing_ranks: tuple[int, ...]
    clocks: tuple[ClockOffset, ...]

    def offset_for(self, clock: Path) -> ClockOffset:
        """Return the offset of a file."""
        return next(item for item in self.clocks if item.clock == clock)


def compare_ranks(ranks: Sequence[RankCollectives]) -> tuple[Matches, Alignment]:
    """Return which collectives of the ranks are the same, and how the clocks of their files are aligned.

    Matches without the name of a communicator are checked by their ends; see the module's description.
    """
    matches = match_collectives(ranks)
    alignment = align_clocks(ranks, matches)
    if _ends_agree_in_groups(ranks, matches, alignment):
        matches = matches.drop_parts(matches.column(ranks, "group", UNKNOWN) == UNKNOWN, IN_GROUPS)
        return matches, align_clocks(ranks, matches)
    if not len(matches) or alignment.residual_p95_ns is None:
        return matches, alignment
    # `unnamed`: matches with a part that has no name of a communicator; `by_order`: with one that has no bucket number.
    absent = matches.rows == UNKNOWN
    unnamed, by_order = (
        ~((matches.column(ranks, name, UNKNOWN) != UNKNOWN) | absent).all(axis=1)[:, np.newaxis]
        for name in ("group", "bucket")
    )
    apart = _find_implausible_parts(ranks, matches, alignment) & unnamed
    if not apart.any():
        return matches, alignment
    # Align again without these parts. If most matches failed and UTC does not confirm the others, drop all unnamed
    # ones.
    kept = matches.drop_parts(apart)
    alignment = align_clocks(ranks, kept)
    is_confirmed_by_utc = False
    if alignment.method == ONE_CLOCK or SESSION_START in alignment.method:
        beyond_ns = max(abs(clock.beyond_epoch_ns) for clock in alignment.clocks)
        is_confirmed_by_utc = beyond_ns + (alignment.residual_p95_ns or 0) <= APART_NS
    if not len(kept) or (2 * len(kept) < len(matches) and not is_confirmed_by_utc):
        kept = matches.drop_parts(np.broadcast_to(unnamed, matches.rows.shape), GIVEN_UP)
    else:
        kept = matches.drop_parts(apart & by_order)
    return kept, align_clocks(ranks, kept)


def _find_implausible_parts(ranks: Sequence[RankCollectives], matches: Matches, alignment: Alignment) -> Mask:
    """Return a mask, in the shape of ``matches.rows``: the parts whose end is too far from the median of their row.

    Ends are compared on the common clock. If a row has two parts, their distance from each other counts. Only
    operations that cannot end before all ranks have begun, and unknown operations, are checked.
    """
    present = matches.rows != UNKNOWN
    start, end = (matches.column(ranks, name) for name in ("start_ns", "end_ns"))
    common = np.stack([alignment.offset_for(rank.clock).common_ns(end[:, at]) for at, rank in enumerate(ranks)], axis=1)
    shortest = np.min(end - start, axis=1, where=present, initial=_LONGEST)
    first = np.min(common, axis=1, where=present, initial=_LONGEST)
    since = np.where(present, (common - first[:, np.newaxis]).astype(np.float64), np.nan)
    distance = np.abs(since - np.nanmedian(since, axis=1, keepdims=True))
    distance[present.sum(axis=1) == 2] *= 2  # the median of two lies in the middle between them
    on_host = (matches.column(ranks, "lane", UNKNOWN) == UNKNOWN).all(axis=1)
    most = np.maximum(APART_NS, np.where(on_host, _APART_ON_HOST, _APART) * shortest)
    operation = matches.column(ranks, "operation", UNKNOWN).max(axis=1, initial=UNKNOWN)
    needs_all = np.isin(operation, [UNKNOWN, *NEEDS_ALL])
    apart: Mask = present & (distance > most[:, np.newaxis]) & needs_all[:, np.newaxis]
    return apart


def align_clocks(ranks: Sequence[RankCollectives], matches: Matches) -> Alignment:
    """Return how to convert each file's times to the clock of the first file, by UTC and by matched collectives."""
    missing, communicates = _find_missing_ranks(ranks), {rank.clock for rank in ranks if len(rank.timings)}
    # A file without collectives is compared with none, so it is not the first one.
    files = sorted(dict.fromkeys(rank.clock for rank in ranks), key=lambda file: file not in communicates)
    if len(files) < 2:
        return Alignment(ONE_CLOCK, 0, 0, missing, tuple(ClockOffset(file, 0, 0, 0.0, 0) for file in files))
    # `base` is the difference of each file's clock from the first file's by UTC; 0 if a file does not tell its UTC.
    epochs = {rank.clock: rank.epoch_ns for rank in ranks}
    has_epochs = all(epoch is not None for epoch in epochs.values())
    base = {file: (epochs[file] or 0) - (epochs[files[0]] or 0) if has_epochs else 0 for file in files}
    ends = _ends_by_file(ranks, matches, files)
    # `reference` is when each collective ended, on the clock of the first file. At first it holds the ends of the first
    # file; each file that has been aligned adds the ends of its other collectives. `waiting` are the files not aligned.
    reference, waiting = ends[:, 0].copy(), list(range(1, len(files)))
    offsets, residuals = {0: ClockOffset(files[0], 0, 0, 0.0, 0)}, []
    pairs = dict[int, int]()  # for each file, the number of ends by which it was aligned
    while waiting:
        shared = {index: (reference != NO_TIME) & (ends[:, index] != NO_TIME) for index in waiting}
        # With tensor and data parallelism, a file may share nothing with the first, but much with a third one.
        ready = [index for index in waiting if shared[index].sum() >= LEAST_PAIRS] or waiting
        for index in ready:
            file, own, others = files[index], ends[shared[index], index], reference[shared[index]]
            pairs[index] = len(own)
            # Few ends are fitted only if nothing else is known of the file's clock.
            is_fitted = len(own) >= LEAST_PAIRS or (len(own) > 0 and not has_epochs)
            offset, drift = _fit(own, others - own - base[file]) if is_fitted else (0, 0.0)
            origin_ns = int(own.min()) if len(own) else 0
            offsets[index] = ClockOffset(file, base[file] + offset, offset, drift, origin_ns)
            residuals.append(np.abs(offsets[index].common_ns(own) - others))
        for index in ready:
            is_new = (reference == NO_TIME) & (ends[:, index] != NO_TIME)
            reference[is_new] = offsets[index].common_ns(ends[is_new, index])
        waiting = [index for index in waiting if index not in ready]
    # A residual tells nothing of ends to which the clock itself was fitted, if these were few.
    counts = [count for index, count in pairs.items() if files[index] in communicates] or [0]
    is_known = all(count >= LEAST_PAIRS or (count > 0 and has_epochs) for count in counts)
    known = np.concatenate(residuals) if is_known else None
    is_by_ends = all(counts) and (not has_epochs or max(counts) >= LEAST_PAIRS)
    methods = ([SESSION_START] if has_epochs else []) + ([MATCHED_ENDS] if is_by_ends else [])
    return Alignment(
        method=", ".join(methods) or NONE,
        residual_p50_ns=None if known is None else round(float(np.percentile(known, 50))),
        residual_p95_ns=None if known is None else round(float(np.percentile(known, 95))),
        missing_ranks=missing,
        clocks=tuple(offsets[index] for index in range(len(files))),
    )


def _find_missing_ranks(ranks: Sequence[RankCollectives]) -> tuple[int, ...]:
    """Return the ranks of the job that are not among ``ranks``; none if processes of unknown rank may be these."""
    present = {rank.rank for rank in ranks if rank.rank is not None}
    world = max((rank.world_size or 0 for rank in ranks), default=0)
    missing = tuple(sorted(set(range(world)) - present)) if present else ()
    unknown = {(rank.clock, rank.process) for rank in ranks if rank.rank is None}
    return missing if len(unknown) < len(missing) else ()


def _ends_by_file(ranks: Sequence[RankCollectives], matches: Matches, files: Sequence[Path]) -> Ints:
    """Return the end of each matched collective (row) on the clock of each file (column), in ns.

    It is the latest end on the file's ranks; ``NO_TIME`` if none of these takes part.
    """
    ends = matches.column(ranks, "end_ns")
    in_file = [[rank.clock == file for rank in ranks] for file in files]
    return np.stack([ends[:, columns].max(axis=1, initial=NO_TIME) for columns in in_file], axis=1)


def _fit(time_ns: Ints, difference_ns: Ints) -> tuple[int, float]:
    """Return the offset and the drift between two clocks, by medians, which a few outliers do not change.

    The drift is the median slope of pairs that are half the run apart (after Theil and Sen). It is 0 unless its effect
    over the whole time exceeds twice the scatter around it.

    Args:
        time_ns: Times on one clock.
        difference_ns: What to add to each to get the time on the other clock.
    """
    offset = round(float(np.median(difference_ns)))
    half = len(time_ns) // 2
    if half < _DRIFT_PAIRS or int(time_ns.max() - time_ns.min()) < _DRIFT_AFTER_NS:
        return offset, 0.0
    order = np.argsort(time_ns, kind="stable")
    time, difference = time_ns[order], difference_ns[order]
    drift = float(np.median((difference[half:] - difference[:-half]) / (time[half:] - time[:-half])))
    rest = difference - drift * (time - time[0])
    scatter = np.median(np.abs(rest - np.median(rest)))
    if abs(drift) * float(time[-1] - time[0]) <= 2 * scatter:
        return offset, 0.0
    return round(float(np.median(rest))), drift


def _ends_agree_in_groups(ranks: Sequence[RankCollectives], matches: Matches, alignment: Alignment) -> bool:
    """Return whether unnamed collectives end together on some pairs of ranks, but not on other pairs.

    Then the ranks belong to several communicators. An example is FSDP within nodes, where all shard groups have the
    same collectives. Each operation is looked at by itself, too: reductions to shards within nodes end apart, though
    the all-reduces between nodes, for which all ranks wait, end together. It is ``False`` for captures of few ranks.
    Operations that some ranks can end before others begin are not used. Only the first ranks and collectives are
    compared.
    """
    starts, ends, groups, lanes = (matches.column(ranks, name) for name in ("start_ns", "end_ns", "group", "lane"))
    operations = matches.column(ranks, "operation", UNKNOWN)
    tells = np.isin(operations, [UNKNOWN, *NEEDS_ALL]) & (matches.rows != UNKNOWN) & (groups == UNKNOWN)
    rows = np.flatnonzero(tells.all(axis=1))[:LOOKED_AT]
    if len(ranks) < _LEAST_OF_GROUPS or len(rows) < LEAST_COMMON_STEPS:
        return False
    clocks = [alignment.offset_for(rank.clock) for rank in ranks[:_COMPARED_RANKS]]
    common = np.stack([clock.common_ns(ends[rows, at]) for at, clock in enumerate(clocks)])
    # For each pair of ranks, how much the differences of their ends lie from their median.
    apart = (common[:, np.newaxis] - common)[np.triu_indices(len(clocks), 1)]
    apart = np.abs(apart - np.median(apart, axis=1, keepdims=True))
    lengths = np.min(ends[rows] - starts[rows], axis=1)
    apart_ns, share = (APART_NS, _APART_ON_HOST) if UNKNOWN in lanes[rows] else (_APART_IN_GROUPS_NS, _APART)

    def differ(chosen: Mask) -> bool:
        """Return whether the ends of the chosen collectives lie clearly farther apart on one pair than on another."""
        scatter = np.median(apart[:, chosen], axis=1)
        least = max(apart_ns, share * float(np.median(lengths[chosen])))
        return bool(scatter.max() > least and CLEARLY * scatter.min() < scatter.max())

    operation = operations[rows, 0]
    kinds = [operation == one for one in distinct(operation)]
    return any(map(differ, [np.ones(len(rows), np.bool_), *(one for one in kinds if one.sum() >= LEAST_COMMON_STEPS)]))
