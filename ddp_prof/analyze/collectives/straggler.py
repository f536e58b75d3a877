"""Who arrives last at the collectives, how often, by how much, and what that costs the step; and one step to look at.

A rank *arrives* at a collective when its own part begins. Its *lag* is how much later that is than the median of the
other ranks, on the common clock; in a step the largest one counts, since a late rank is late for one collective and
the others wait there, or it stays late for all that follow::

    rank 0   L CCCCCCCCCC       waits for 5
    rank 1        L CCCCC       lag 5, arrives last
    rank 2    LCCCCCCCCCC

A lag below the residual of the clocks is no lag: nobody is said to be last. Where the clocks cannot be compared there
are no lags. The *cost* of a step is put down to the rank with the largest lag: the longest exposed wait of another rank
at the collectives of the step where that rank arrived last. A capture without steps is no step: each collective counts
by itself, and each rank has a cost, which is the longest exposed wait of another rank at those where it arrived last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_prof.analyze.collectives.exposed_time import WHENS, PhaseParts, wait_end_ns
from ddp_prof.analyze.collectives.matching import Matches
from ddp_prof.analyze.collectives.run_analysis import LEAST_PAIRS, Alignment, ClockOffset, RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.quality import why_no_steps
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, RankResult, make_frame, none_for_unknown
from ddp_prof.table import begins_run, select
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, take_or_unknown

Floats = NDArray[np.float64]


CHANCE = 0.05
"""Largest accepted probability that equal ranks give a straggler by chance."""


@dataclass(frozen=True, slots=True)
class RankSkew(RankResult):
    """One rank; ``None`` where nothing was matched.

    Attributes:
        last_collectives: Those at which it arrived last, by more than the residual.
        last_steps: Steps in which it had the largest lag, by more than the residual; 0 without steps.
        lag_ns: Median over the steps, without steps over the collectives; negative where it is early.
        lag_when_last_ns: Median over those in which it had the largest lag; ``None`` where there are none.
        exposed_wait_ns: Its own wait for others that no compute hid, summed.
        cost_ns: Summed cost of the steps in which it had the largest lag; without steps its cost in the capture. This
            and the wait are ``None`` where it is not known of some rank what hides.
    """

    rank: int | None
    process: int
    device: int | None
    collectives: int
    last_collectives: int
    last_steps: int
    lag_ns: int | None
    worst_lag_ns: int | None
    exposed_wait_ns: int | None
    cost_ns: int | None
    qualifier: str = ""
    of_several: bool = False
    lag_when_last_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StepSkew:
    """One step, by its key; figures of each rank are in the order of :attr:`RunSkew.ranks`.

    Attributes:
        last: Index of the rank that arrived last; ``None`` where no lag is above the residual.
        cost_ns: Longest exposed wait of another rank where that one arrived last; 0 where nobody did. ``None`` as of
            :class:`RankSkew`.
        waits_ns: The exposed wait of each rank; ``None`` where it has no matched collective in the step, likewise.
    """

    step: int
    lags_ns: tuple[int | None, ...]
    last: int | None
    cost_ns: int | None
    waits_ns: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSkew(FrameResult):
    """The skew of a run.

    Attributes:
        steps: Those with matched collectives; empty where the traces tell no steps.
        straggler: Index of the rank that arrives last in more steps than chance would have it; ``None`` if none does.
    """

    ranks: tuple[RankSkew, ...]
    steps: tuple[StepSkew, ...]
    straggler: int | None
    alignment: Alignment
    reason: str | None
    warnings: tuple[str, ...]
    has_steps: bool = True

    def to_frame(self) -> DataFrame:
        """One row per rank."""
        return make_frame(RankSkew, self.ranks)


def measure_skew(run: RunAnalysis) -> RunSkew:
    ranks, matches, alignment = run.ranks, run.matches, run.alignment
    takes_part = matches.rows != UNKNOWN
    step = np.full(len(matches), UNKNOWN, np.int64)  # of the ranks that differ the first one's
    waits = np.zeros(matches.rows.shape, np.int64)  # exposed ones, 0 where a rank took no part
    for index in reversed(range(len(ranks))):
        own = matches.rows[:, index]
        key = take_or_unknown(ranks[index].keys, own)
        step = np.where(key == UNKNOWN, step, key)
        waits[:, index] = np.maximum(0, take_or_unknown(run.exposures[index].exposed_wait_ns, own))
    knows_exposed = not any(rank.reason for rank in ranks if len(rank.timings))
    lags = _lags(ranks, matches, alignment)
    if alignment.residual_p95_ns is None:
        lags[:] = np.nan  # the clocks tell nothing about who came first
    least = alignment.residual_p95_ns or 0
    compared, late = lags, last = lags, _last_to_arrive(lags, least)
    by_step = np.argsort(step, kind="stable")
    by_step = by_step[step[by_step] != UNKNOWN]
    of_steps: list[Ints] = []  # rows of the matches of each
    if run.has_steps and len(by_step):
        of_steps = np.split(by_step, np.flatnonzero(begins_run(step[by_step]))[1:])
        compared = np.array([_largest_lags(lags[rows]) for rows in of_steps])
        late = _last_to_arrive(compared, least)
    steps = tuple(
        StepSkew(
            step=int(step[rows][0]),
            lags_ns=tuple(_int_or_none(lag) for lag in compared[row]),
            last=None if late[row] == UNKNOWN else int(late[row]),
            cost_ns=_step_cost(waits[rows[last[rows] == late[row]]], late[row]) if knows_exposed else None,
            waits_ns=tuple(
                wait if known and knows_exposed else None
                for wait, known in zip(waits[rows].sum(axis=0).tolist(), takes_part[rows].any(axis=0), strict=True)
            ),
        )
        for row, rows in enumerate(of_steps)
    )

    def cost_of(rank: int) -> int | None:
        if not knows_exposed:
            return None
        of_rank = [one.cost_ns or 0 for one in steps if one.last == rank]
        return sum(of_rank) if steps else _step_cost(waits[last == rank], rank)

    exposed_wait = waits[by_step if of_steps else slice(None)].sum(axis=0)
    of_ranks = tuple(
        RankSkew(
            rank=rank.rank,
            process=rank.process,
            device=rank.device,
            collectives=int(takes_part[:, index].sum()),
            last_collectives=int((last == index).sum()),
            last_steps=sum(one.last == index for one in steps),
            lag_ns=_median_lag(compared[:, index]),
            worst_lag_ns=_int_or_none(_largest_lags(compared[:, [index]])[0]),
            exposed_wait_ns=int(exposed_wait[index]) if len(matches) and knows_exposed else None,
            cost_ns=cost_of(index),
            qualifier=rank.qualifier,
            of_several=rank.of_several,
            lag_when_last_ns=_median_lag(compared[late == index, index]),
        )
        for index, rank in enumerate(ranks)
    )
    return RunSkew(
        ranks=of_ranks,
        steps=steps,
        straggler=_straggler([rank.last_steps for rank in of_ranks]),
        alignment=alignment,
        reason=_why_unknown(run),
        warnings=run.warnings,
        has_steps=run.has_steps,
    )


def _why_unknown(run: RunAnalysis) -> str | None:
    if [rank.world_size for rank in run.ranks] == [1]:
        return "the job has a single rank"
    if len(run.ranks) < 2:
        how = "give the others, too (--one-run joins files)"
        return f"that takes the traces of at least two ranks of a run; {how}"
    if not run.has_steps and (reason := why_no_steps((rank.reason for rank in run.ranks), "")):
        return reason
    if not len(run.matches):
        return run.matches.doubt or "no collective of one rank is known to be that of another"
    if run.alignment.residual_p95_ns is None:
        shared = f"one shares fewer than {LEAST_PAIRS} collectives with the first"
        return f"clocks of the files cannot be compared: {shared}"
    return None


def _lags(ranks: Sequence[RankCollectives], matches: Matches, alignment: Alignment) -> Floats:
    """For each matched collective and rank, the lag; NaN where the rank took no part."""
    start = matches.column(ranks, "start_ns")
    common = [alignment.offset_for(rank.clock).common_ns(start[:, index]) for index, rank in enumerate(ranks)]
    # Floats hold whole nanoseconds only up to some months, so times count from the first one.
    columns = np.stack(common, axis=1) if common else start
    present = matches.rows != UNKNOWN
    origin = columns.min(initial=np.iinfo(np.int64).max, where=present)
    arrival = np.where(present, (columns - origin).astype(np.float64), np.nan)
    lags = np.full(arrival.shape, np.nan)
    for index in range(len(ranks)):
        took_part = present[:, index]
        lags[took_part, index] = arrival[took_part, index] - np.nanmedian(
            np.delete(arrival[took_part], index, axis=1), axis=1
        )
    return lags


def _last_to_arrive(lags: Floats, least: int) -> Ints:
    """The column of each row's largest lag, ``UNKNOWN`` where it is not above ``least``."""
    known = np.where(np.isnan(lags), -np.inf, lags)
    if not known.size:
        return np.full(len(known), UNKNOWN, np.int64)
    return np.where(known.max(axis=1) > least, known.argmax(axis=1), UNKNOWN)


def _largest_lags(lags: Floats) -> Floats:
    """The largest lag of each rank in the rows of a step, NaN where it has none."""
    known = np.where(np.isnan(lags), -np.inf, lags).max(axis=0, initial=-np.inf)
    result: Floats = np.where(np.isinf(known), np.nan, known)
    return result


def _step_cost(waits_ns: Ints, late: int) -> int:
    """The longest wait of any rank but the late one, over the collectives at which that one arrived last."""
    return 0 if late == UNKNOWN else int(np.delete(waits_ns.sum(axis=0), late).max(initial=0))


def _straggler(times_last: Sequence[int]) -> int | None:
    """The rank that is last most often, if chance explains that in at most one run of twenty.

    Steps without a late rank are no trials. Any rank could be the one, so their number multiplies the probability.
    """
    ranks = len(times_last)
    if ranks < 2 or not any(times_last):
        return None
    most = max(times_last)
    is_told = ranks * _binomial_tail(most, sum(times_last), 1 / ranks) < CHANCE
    return times_last.index(most) if is_told else None


def _binomial_tail(times: int, trials: int, chance: float) -> float:
    """The upper tail of the binomial distribution: ``times`` or more hits in so many trials."""
    whole = math.lgamma(trials + 1)
    return math.fsum(
        math.exp(
            whole - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
            + hits * math.log(chance) + (trials - hits) * math.log1p(-chance)
        )
        for hits in range(times, trials + 1)
    )  # fmt: skip


def _median_lag(lags: Floats) -> int | None:
    known = lags[~np.isnan(lags)]
    return round(float(np.median(known))) if len(known) else None


def _int_or_none(value: float) -> int | None:
    return None if np.isnan(value) else round(float(value))


class ExposedStretch(NamedTuple):
    """An exposed stretch of a collective: when and why, and whether a peer had not arrived."""

    when: str
    why: str
    is_wait: bool
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class CollectiveView:
    """One collective, in nanoseconds from the step's first time on any rank; ``None`` for what is not known."""

    index: int
    bucket: int | None
    bytes: int | None
    ready_ns: int | None
    launch_ns: int | None
    start_ns: int
    end_ns: int
    exposed: tuple[ExposedStretch, ...] | None


@dataclass(frozen=True, slots=True)
class RankStepView:
    """The collectives of one rank in the step; its compute, starts and ends, from the step's first time to its last."""

    name: str
    compute: tuple[tuple[int, int], ...]
    backward_end_ns: int | None
    collectives: tuple[CollectiveView, ...]


def view_step(run: RunAnalysis, step: int, ranks: Collection[int] | None = None) -> tuple[RankStepView, ...]:
    """The collectives of each rank, or some by their indices, in a step, by its key; ranks without any are left out."""
    drawn = []
    for index, (rank, wait_ns, parts) in enumerate(zip(run.ranks, run.waits_ns, run.parts, strict=True)):
        if ranks is not None and index not in ranks:
            continue
        rows = np.flatnonzero(rank.keys == step)
        if len(rows):
            drawn.append((rank, rows, wait_ns, parts, run.alignment.offset_for(rank.clock)))
    origin = min((int(clock.common_ns(_first_time(rank, rows))) for rank, rows, *_, clock in drawn), default=0)
    return tuple(_rank_view(*part, origin) for part in drawn)


def _first_time(rank: RankCollectives, rows: Ints) -> Ints:
    timings = rank.timings
    times = np.concatenate([timings.ready_ns[rows], timings.launch_ns[rows], timings.start_ns[rows]])
    first: Ints = times[times != NO_TIME].min()
    return first


def _rank_view(
    rank: RankCollectives, rows: Ints, wait_ns: Ints, parts: Mapping[str, PhaseParts], clock: ClockOffset, origin: int
) -> RankStepView:
    timings = rank.timings

    def since(time_ns: Ints) -> list[Any]:
        moved = (clock.common_ns(time_ns) - origin).tolist()
        return [None if time == NO_TIME else shifted for time, shifted in zip(time_ns.tolist(), moved, strict=True)]

    window = union(_first_time(rank, rows)[np.newaxis], timings.end_ns[rows].max()[np.newaxis])
    compute = rank.compute & window
    found = _exposed(rank, rows, wait_ns, parts, compute, since)
    exposed = [None if rank.reason else tuple(found[row]) for row in rows.tolist()]
    times = (since(column[rows]) for column in (timings.ready_ns, timings.launch_ns, timings.start_ns, timings.end_ns))
    sizes = (none_for_unknown(column[rows]) for column in (timings.bucket, timings.bytes))
    columns: Any = zip(*sizes, *times, exposed, strict=True)
    return RankStepView(
        name=rank.name,
        compute=tuple(zip(since(compute.start_ns), since(compute.end_ns), strict=True)),
        backward_end_ns=since(rank.backward_end_ns[timings.step[rows[:1]]])[0],
        collectives=tuple(CollectiveView(index, *values) for index, values in enumerate(columns)),
    )


def _exposed(
    rank: RankCollectives,
    rows: Ints,
    wait_ns: Ints,
    parts: Mapping[str, PhaseParts],
    compute: Intervals,
    since: Callable[[Ints], list[int]],
) -> dict[int, list[ExposedStretch]]:
    """The exposed stretches of some collectives, in the time that ``since`` makes of the rank's own."""
    found: dict[int, list[ExposedStretch]] = {row: [] for row in rows.tolist()}
    wait_end = wait_end_ns(rank.timings, wait_ns)
    for why, every in parts.items():
        cells = select(every, np.isin(every.row, rows) & (every.start_ns < every.end_ns))
        cells = select(cells, np.argsort(cells.start_ns))
        bare = Intervals(cells.start_ns, cells.end_ns) - compute  # of disjoint cells: an instant belongs to one
        cell = np.searchsorted(cells.start_ns, bare.start_ns, side="right") - 1
        cut = np.clip(wait_end[cells.row[cell]], bare.start_ns, bare.end_ns)
        for is_wait, start, end in ((True, bare.start_ns, cut), (False, cut, bare.end_ns)):
            some = start < end
            owners = zip(cells.row[cell[some]].tolist(), cells.when[cell[some]].tolist(), strict=True)
            times = zip(since(start[some]), since(end[some]), strict=True)
            for (row, when), (begin, stop) in zip(owners, times, strict=True):
                found[row].append(ExposedStretch(WHENS[when], why, is_wait, begin, stop))
    return found
