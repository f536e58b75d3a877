"""Which rank arrives last at collectives, how often, by how much, and what that costs.

A rank *arrives* at a collective when its own part of it begins. Its *lag* at this collective is how much later that is
than the median of the other ranks' arrivals, on the common clock. Its lag in a step is its largest lag at a collective
of the step: a late rank is either late for one collective, at which the others wait, or stays late for all collectives
that follow. L is the launch, C the collective::

    rank 0   L CCCCCCCCCC       waits for 5
    rank 1        L CCCCC       lag 5, arrives last
    rank 2    LCCCCCCCCCC

The rank with the largest lag is *last*. Of two that are as late in two communicators, it is the one that waited less
for others: the other one may be late because it waited for this one in a third communicator. If the lag is not above
the residual of the clocks, no rank is last. If clocks cannot be compared, there are no lags. The *cost* of a step is
the largest time that another rank would gain if the last rank were not late, queues behind its waits included
(:mod:`.lateness`); it is attributed to the last rank. In a capture without steps, each collective counts by itself. The
cost of a rank is then the largest sum of another rank's exposed waits at the collectives where it arrived last; it is
not known if collectives queued behind hidden ones of these waits.

Several ranks may be late together, as those of a slow node: then nothing is gained if only one of them were not late.
Such a group is found if its ranks have nearly the step's largest lag, without having waited for others, in more steps
than chance explains. Its cost is what another rank would gain if none of the group were late. The lags of a node may be
graded, as if one card is slower than the next: ranks that are late by less belong to it if their lags lie clearly
nearer to each other than to those of the other ranks, and they are the last ones in the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddp_prof.analyze.collectives.lateness import find_queue, measure_lateness
from ddp_prof.analyze.collectives.run_analysis import LEAST_PAIRS, Alignment, RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.intervals import union_by_group
from ddp_prof.analyze.result_bases import (
    DataFrame,
    FrameResult,
    RankResult,
    make_frame,
    measure_fields,
)
from ddp_prof.analyze.why_unknown import why_no_steps
from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, column, derived
from ddp_prof.communication import OPERATIONS, POINT_TO_POINT
from ddp_prof.manifest import format_ranges
from ddp_prof.table import begins_run
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, Mask, take_or_unknown

Floats = NDArray[np.float64]


CHANCE, _CHANCE_OF_COSTLY = 0.05, 0.02
"""Largest accepted probability that equal ranks give a straggler by chance: by all steps, and by the costly ones.

Of 1,500 drawn runs of 2 to 64 equal ranks with 6 to 50 steps, at most 5 in 100 had one by either test.
"""

_COSTLY = 0.5
"""Smallest part of the cost of the costliest step at which another step is costly, too."""

_ALIKE_LAGS = 0.1
"""Largest part of a lag by which another one may be smaller and still be alike."""

MAY_HAVE_RECEIVED_LATE = "may have waited for other ranks in sends and receives, which are not matched"
"""A doubt: the first stage of a pipeline ends its step last, whichever stage is slow."""

_EXPLAINS = 0.5
"""Smallest part of a lag that the rank's sends and receives last if they may be its cause."""

_NEARLY = 0.8
"""Smallest part of the largest lag of a step with which another rank is late together with its rank."""

_SEPARATE = 2
"""Lags are graded if they lie apart from those of other ranks by this many times the most by which they differ."""


@dataclass(frozen=True)
class RankArrivals:
    """How one rank arrives at collectives; the columns of :class:`RankSkew` are measured from it.

    Attributes:
        takes_part: For each matched collective of the run, whether the rank takes part in it.
        is_last: For each of them, whether the rank arrives last, with a lag above the residual.
        lags_ns: Its lag in each step or, without steps, at each matched collective; NaN where it has none.
        has_largest_lag: For each element of ``lags_ns``, whether it is the largest of all ranks, and above the
            residual.
        lags_before_ns: How late the rank was when each step began; ``None`` without steps.
        exposed_wait_ns, cost_ns: The columns with these names; ``None`` if the exposed time of some rank is not known.
        steps: Number of steps with matched collectives.
    """

    rank: RankCollectives
    takes_part: Mask
    is_last: Mask
    lags_ns: Floats
    has_largest_lag: Mask
    lags_before_ns: Floats | None
    exposed_wait_ns: int | None
    cost_ns: int | None
    steps: int


def _lag_before_ns(of: RankArrivals) -> int | None:
    """Return the rank's median lag at the beginning of the steps in which it had the largest lag."""
    return None if of.lags_before_ns is None else _median_lag(of.lags_before_ns[of.has_largest_lag])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSkew(RankResult):
    """The skew of one rank; ``None`` if nothing was matched."""

    rank: int | None = column("number of the rank", measure=lambda of: of.rank.rank, null="it is not known")
    process: int = column("number of the operating system's process", measure=lambda of: of.rank.process)
    device: int | None = column("number of the GPU", measure=lambda of: of.rank.device, null="the host computes")
    collectives: int = column("its collectives", measure=lambda of: len(of.rank.timings), stays=WITH_ROOM)
    matched: int = column(
        "collectives that are found on another rank",
        default=0,
        measure=lambda of: int(of.takes_part.sum()),
        stays=WITH_ROOM,
    )
    last_collectives: int = column(
        "collectives at which the rank arrived last, with a lag above the residual of the clocks",
        measure=lambda of: int(of.is_last.sum()),
        stays=WITH_ROOM,
    )
    last_steps: int = column(
        "steps in which it had the largest lag, above the residual; 0 without steps",
        measure=lambda of: int(of.has_largest_lag.sum()) if of.steps else 0,
    )
    lag_ns: int | None = column(
        "per step, its largest delay behind the others' median: median over steps, or over collectives without steps",
        measure=lambda of: _median_lag(of.lags_ns),
        null="no clocks can be compared",
        is_signed=True,
        stays=ALWAYS,
    )
    worst_lag_ns: int | None = column(
        "the largest lag of any step",
        measure=lambda of: _int_or_none(_largest_lags(of.lags_ns[:, None])[0]),
        null="no clocks can be compared",
        is_signed=True,
        stays=USUALLY,
    )
    exposed_wait_ns: int | None = column(
        "sum of its own exposed waits for other ranks",
        measure=lambda of: of.exposed_wait_ns,
        null="the exposed time of some rank is not known",
    )
    cost_ns: int | None = column(
        "sum of the costs of the steps in which it had the largest lag; without steps, its cost in the capture",
        measure=lambda of: of.cost_ns,
        null="the exposed time of some rank is not known; nothing was matched; collectives of no step queued for waits",
    )
    qualifier: str = column(
        "name of its file, if ranks of several files are called alike; else empty",
        default="",
        measure=lambda of: of.rank.qualifier,
    )
    of_several: bool = column(
        "whether its process uses several devices", default=False, measure=lambda of: of.rank.of_several
    )
    lag_when_last_ns: int | None = column(
        "median lag over the steps, or collectives, in which it had the largest one",
        default=None,
        measure=lambda of: _median_lag(of.lags_ns[of.has_largest_lag]),
        null="there are none",
    )
    lag_before_ns: int | None = column(
        "how late it was already when these steps began, by their ranges on the host: the median",
        default=None,
        measure=_lag_before_ns,
        null="there are no such steps, or the host's clock does not tell when they began",
        is_signed=True,
    )
    all_steps: int = column("steps with matched collectives", default=0, measure=lambda of: of.steps, in_document=False)

    @property
    @derived(
        "steps in which the rank arrived last",
        key="last_steps",
        null="no steps are marked",
        stays=ALWAYS,
        in_document=False,
        after="last_collectives",
    )
    def last_of_steps(self) -> int | None:
        """The same as ``last_steps``, but ``None`` without steps."""
        return self.last_steps if self.all_steps else None

    @property
    @derived(
        "share of the steps in which the rank arrived last",
        key="last_%",
        null="no steps are marked",
        stays=WITH_ROOM,
        in_document=False,
        after="last_of_steps",
    )
    def last_ratio(self) -> float | None:
        """``last_steps`` over all steps with matched collectives, 0 to 1."""
        return self.last_steps / self.all_steps if self.all_steps else None

    @property
    @derived(
        "exposed time in which a peer had not arrived, mean per step",
        key="exposed_wait_ms",
        null="the exposed time of some rank is not known",
        stays=WITH_MUCH_ROOM,
        in_document=False,
        after="worst_lag_ns",
    )
    def mean_exposed_wait_ns(self) -> float | None:
        """``exposed_wait_ns`` divided by the number of steps; without steps, that of the capture."""
        return None if self.exposed_wait_ns is None else self.exposed_wait_ns / max(1, self.all_steps)

    @property
    @derived(
        "what another rank would gain at most without the lag of this one, mean per step",
        key="costs_others_ms",
        null="the exposed time of some rank is not known; nothing was matched; collectives of no step queued for waits",
        stays=USUALLY,
        in_document=False,
        after="mean_exposed_wait_ns",
    )
    def mean_cost_ns(self) -> float | None:
        """``cost_ns`` divided by the number of steps; without steps, that of the capture."""
        return None if self.cost_ns is None else self.cost_ns / max(1, self.all_steps)

    @property
    def cost_when_last_ns(self) -> int | None:
        """What the rank costs the others in a step in which it had the largest lag: the mean of these steps."""
        return None if self.cost_ns is None or not self.last_steps else round(self.cost_ns / self.last_steps)


@dataclass(frozen=True, slots=True)
class StepSkew:
    """The skew of one step. Figures per rank are in the order of :attr:`RunSkew.ranks`."""

    step: int = column("key of the step")
    lags_ns: tuple[int | None, ...] = column("the largest lag of each rank", null="no clocks can be compared")
    last: int | None = column("index of the rank that arrived last", null="no lag is above the residual")
    cost_ns: int | None = column(
        "the step's cost, 0 if no rank was last", null="the exposed time of some rank is not known"
    )
    waits_ns: tuple[int | None, ...] = column(
        "the exposed wait of each rank",
        default=(),
        null="the exposed time of some rank is not known; the rank has no matched collective in the step",
    )
    lag_before_ns: int | None = column(
        "how late the rank that arrived last was already when the step began", default=None, null="no rank was last"
    )


@dataclass(frozen=True, slots=True)
class LateGroup:
    """Ranks that are late together; see the module.

    Attributes:
        ranks: Their indices.
        lag_ns: The median of their lags in the steps in which all of them are late.
        costs_ns: For each of these steps, the largest time that another rank would gain if none of them were late;
            ``None`` if the exposed time of some rank is not known.
        keys: The keys of these steps.
    """

    ranks: tuple[int, ...]
    lag_ns: int
    steps: int
    costs_ns: tuple[int, ...] | None
    keys: tuple[int, ...] = ()

    @property
    def cost_ns(self) -> int | None:
        """The mean of the steps' costs."""
        return None if self.costs_ns is None else round(sum(self.costs_ns) / self.steps)


@dataclass(frozen=True, slots=True)
class LateInTurns:
    """Ranks that are late in turns: other ones in other steps.

    Attributes:
        ranks: The indices of the ranks that are late in each step, by its key; steps without such ranks are left out.
        costs_ns: For each step, the largest time that another rank would gain if none of its late ranks were late.
    """

    ranks: Mapping[int, tuple[int, ...]]
    costs_ns: tuple[int, ...]

    @property
    def cost_ns(self) -> int:
        """The mean of the steps' costs."""
        return round(sum(self.costs_ns) / len(self.costs_ns))

    @property
    def median_cost_ns(self) -> int:
        """The median of the steps' costs: 0 if most steps lose nothing."""
        return round(float(np.median(self.costs_ns)))


@dataclass(frozen=True, slots=True)
class RunSkew(FrameResult):
    """The skew of a run.

    Attributes:
        steps: The steps with matched collectives; empty if the traces mark no steps.
        straggler: Index of the rank that is last in more steps, or in more of the costly ones, than chance explains;
            ``None`` if there is none.
        reason: Why lags are not known; ``None`` if they are.
        group: The ranks that are late together in more steps than chance explains; ``None`` if there are none.
        doubt: Why the straggler, or the group, may not be the cause of its lag; ``None`` if nothing says so.
        in_turns: The ranks that are late in each step if there is no straggler and no group; ``None`` if there is, if
            their cost is not known, or if some of them may have received late. Also on a CPU, where ranks take each
            other's time, so that one of them is always late.
        costs_ns: For each step, the largest time that another rank would gain if the straggler, or none of the group,
            were late; ``None`` if there are none of these, or it is not known.
    """

    ranks: tuple[RankSkew, ...]
    steps: tuple[StepSkew, ...]
    straggler: int | None
    alignment: Alignment
    reason: str | None
    warnings: tuple[str, ...]
    has_steps: bool = True
    group: LateGroup | None = None
    doubt: str | None = None
    in_turns: LateInTurns | None = None
    costs_ns: tuple[int, ...] | None = None

    def to_frame(self) -> DataFrame:
        """Return a table with one row per rank."""
        return make_frame(RankSkew, self.ranks)

    def names_of(self, ranks: Sequence[int]) -> str:
        """Return the names of several ranks, given their indices: ``ranks 4-7``, or one name after the other."""
        named = [self.ranks[index] for index in ranks]
        if any(rank.name != f"rank {rank.rank}" for rank in named):
            return ", ".join(rank.name for rank in named)
        plural = "s" if len(named) > 1 else ""
        return f"rank{plural} {format_ranges(sorted(rank.rank for rank in named if rank.rank is not None))}"

    @property
    def latest(self) -> RankSkew | None:
        """The straggler or, if there is none, the rank that is last most often.

        ``None`` if several ranks are last equally often, if no rank is ever last, or if lags are not known.
        """
        if self.straggler is not None:
            return self.ranks[self.straggler]
        times = [rank.last_steps if self.steps else rank.last_collectives for rank in self.ranks]
        most = max(times, default=0)
        return self.ranks[times.index(most)] if most and times.count(most) == 1 and not self.reason else None


def measure_skew(run: RunAnalysis) -> RunSkew:
    """Return which rank arrives last at the matched collectives, by how much, and what that costs; see the module."""
    compared, notes = _compare_arrivals(run)
    compared = _with_graded(compared, run.alignment.residual_p95_ns or 0)
    waits_ns = _exposed_waits(run)
    steps = _measure_steps(run, compared, waits_ns)
    takes_part = run.matches.rows != UNKNOWN
    rows = np.concatenate(compared.rows) if compared.rows else np.arange(len(run.matches))
    waited_ns: list[int | None] = [None] * len(run.ranks)
    if waits_ns is not None and len(rows):
        waited_ns = waits_ns[rows].sum(axis=0).tolist()
    arrivals = [
        RankArrivals(
            rank=rank,
            takes_part=takes_part[:, index],
            is_last=compared.last == index,
            lags_ns=compared.lags_ns[:, index],
            has_largest_lag=compared.late == index,
            lags_before_ns=compared.before_ns[:, index] if compared.rows else None,
            exposed_wait_ns=waited_ns[index],
            cost_ns=_cost_of_rank(run, compared, steps, waits_ns, index),
            steps=len(steps),
        )
        for index, rank in enumerate(run.ranks)
    ]
    ranks = tuple(RankSkew(**measure_fields(RankSkew, of_rank)) for of_rank in arrivals)
    straggler, group = _latest(ranks, steps), _measure_group(run, compared, waits_ns is not None)
    late = group.ranks if group else () if straggler is None else (straggler,)
    costs_ns = None
    if late and waits_ns is not None:
        without = np.isin(np.arange(len(run.ranks)), late)[None, :] & np.ones((len(steps), 1), np.bool_)
        costs_ns = tuple(_costs_of_steps(run, compared.rows, without).tolist())
    return RunSkew(
        ranks=ranks,
        steps=steps,
        straggler=straggler,
        alignment=run.alignment,
        reason=_why_unknown(run),
        warnings=(*run.warnings, *notes),
        has_steps=run.has_steps,
        group=group,
        doubt=MAY_HAVE_RECEIVED_LATE if any(_may_have_received_late(run, compared, index) for index in late) else None,
        in_turns=None if late or waits_ns is None or run.device == "cpu" else _measure_turns(run, compared),
        costs_ns=costs_ns,
    )


@dataclass(frozen=True)
class _Comparison:
    """Which rank is late, in each step or, in a capture without steps, at each matched collective.

    Attributes:
        last: For each match, the index of the rank that arrives last; ``UNKNOWN`` if there is none, and in steps that
            are left out.
        lags_ns: The largest lag of each rank (column) in each step (row); without steps, its lag at each match.
        late: The index of the late rank of each row of ``lags_ns``; ``UNKNOWN`` if there is none.
        keys: The key of each step. It and the following are empty without steps.
        rows: For each step, rows of the matches.
        among_late: For each step (row) and rank (column), whether the rank is the late one or nearly as late, or one of
            a group with graded lags.
        by_itself: For each of them, whether the rank is as late as it is without having waited for others.
        before_ns: How late each rank (column) was when each step (row) began; NaN where it is not known.
    """

    last: Ints
    lags_ns: Floats
    late: Ints
    keys: tuple[int, ...]
    rows: tuple[Ints, ...]
    among_late: Mask
    by_itself: Mask
    before_ns: Floats


def _compare_arrivals(run: RunAnalysis) -> tuple[_Comparison, tuple[str, ...]]:
    """Return which rank arrives last in each step, and a note if some steps cannot be compared."""
    lags_ns = _lags(run)
    least = run.alignment.residual_p95_ns or 0
    last = _last_to_arrive(lags_ns, least)
    step = _keys_of_matches(run)
    of_steps = _rows_of_steps(step) if run.has_steps else []
    if not of_steps:
        nobody = np.zeros((0, len(run.ranks)), np.bool_)
        return _Comparison(last, lags_ns, last, (), (), nobody, nobody, _lags_before(run, ())), ()
    of_steps, notes = _leave_out_steps_that_lack_ranks(of_steps, run.matches.rows != UNKNOWN)
    keys = tuple(int(step[rows[0]]) for rows in of_steps)
    last[~np.isin(step, (UNKNOWN, *keys))] = UNKNOWN
    of_steps_ns = np.array([_largest_lags(lags_ns[rows]) for rows in of_steps])
    waits_ns, arrivals = _waits_at_matches(run), _arrivals(run)
    waited_ns = np.array([waits_ns[rows].sum(axis=0) for rows in of_steps])
    late = _last_in_steps(run, of_steps, lags_ns, of_steps_ns, waited_ns, least)
    among_late, by_itself = np.zeros((2, *of_steps_ns.shape), np.bool_)
    for at in np.flatnonzero(late != UNKNOWN).tolist():
        rows, last_rank = of_steps[at], late[at]
        largest = of_steps_ns[at, last_rank]
        among_late[at] = _nearly_as_late(lags_ns[rows], arrivals[rows], waits_ns[rows], largest)
        by_itself[at] = _nearly_as_late(lags_ns[rows], arrivals[rows], waits_ns[rows], of_steps_ns[at])
        among_late[at, last_rank] = by_itself[at, last_rank] = True
    before_ns = _lags_before(run, keys)
    return _Comparison(last, of_steps_ns, late, keys, tuple(of_steps), among_late, by_itself, before_ns), notes


def _with_graded(compared: _Comparison, least: int) -> _Comparison:
    """Return the comparison with those among the late who are late by less, as ranks of one node with graded lags.

    They are added to the ranks that are late together, or to the straggler, in the steps in which all of them arrive
    last, each of them by itself. Smaller lags than ``least`` are not told from the error of the clocks.
    """
    late, lags_ns = compared.among_late, compared.lags_ns
    ranks = lags_ns.shape[1]
    straggler = _straggler([int((compared.late == rank).sum()) for rank in range(ranks)])
    first = _late_together(late) or (() if straggler is None else (straggler,))
    if not first or not len(late):
        return compared
    known = np.where(np.isnan(lags_ns), -np.inf, lags_ns)
    typical = np.median(known[late[:, first].all(axis=1)], axis=0)
    order = np.argsort(-typical, kind="stable")
    gaps = -np.diff(typical[order])
    for size in range(max(2, len(first)), ranks // 2 + 1):
        # The lags of the last ranks differ by less from each other than from the next one's.
        if {*first} <= {*order[:size].tolist()} and gaps[size - 1] >= _SEPARATE * gaps[: size - 1].max(initial=0):
            break
    else:
        return compared
    group, others = order[:size], order[size:]
    are_last = known[:, group].min(axis=1) > np.maximum(least, known[:, others].max(axis=1))
    steps = np.flatnonzero(are_last & late[:, first].all(axis=1) & compared.by_itself[:, group].all(axis=1))
    late = late.copy()
    late[np.ix_(steps, group)] = True
    return replace(compared, among_late=late)


def _measure_steps(run: RunAnalysis, compared: _Comparison, waits_ns: Ints | None) -> tuple[StepSkew, ...]:
    """Return the skew of each step; none without steps. ``waits_ns`` is from :func:`_exposed_waits`."""
    takes_part = run.matches.rows != UNKNOWN
    costs: list[int | None] = [None] * len(compared.rows)
    if waits_ns is not None:
        late = compared.late[:, None] == np.arange(len(run.ranks))
        costs = _costs_of_steps(run, compared.rows, late).tolist()
    steps = []
    for at, rows in enumerate(compared.rows):
        last = None if compared.late[at] == UNKNOWN else int(compared.late[at])
        waits: list[int | None] = [None] * len(run.ranks)
        if waits_ns is not None:
            summed = zip(waits_ns[rows].sum(axis=0).tolist(), takes_part[rows].any(axis=0), strict=True)
            waits = [wait if is_present else None for wait, is_present in summed]
        steps.append(
            StepSkew(
                step=compared.keys[at],
                lags_ns=tuple(map(_int_or_none, compared.lags_ns[at])),
                last=last,
                cost_ns=costs[at],
                waits_ns=tuple(waits),
                lag_before_ns=None if last is None else _int_or_none(compared.before_ns[at, last]),
            )
        )
    return tuple(steps)


def _cost_of_rank(
    run: RunAnalysis, compared: _Comparison, steps: Sequence[StepSkew], waits_ns: Ints | None, rank: int
) -> int | None:
    """Return what the rank with this index costs the others in the whole capture; ``None`` if it is not known."""
    if waits_ns is None or not len(run.matches):
        return None
    if steps:
        return sum(step.cost_ns or 0 for step in steps if step.last == rank)
    if _delays_queues(run, compared.last, rank):
        return None
    # How long the other rank that waited longest waited at the collectives at which this rank arrived last.
    waited_ns = waits_ns[compared.last == rank].sum(axis=0)
    return int(np.delete(waited_ns, rank).max(initial=0))


def _leave_out_steps_that_lack_ranks(of_steps: list[Ints], takes_part: Mask) -> tuple[list[Ints], tuple[str, ...]]:
    """Return the steps in which each rank takes part that takes part in any, and a note if others are left out.

    Where a rank was not recorded, it may have arrived last. If most steps lack a rank, all stay, and a note says so.

    - ``of_steps``: For each step, rows of the matches.
    - ``takes_part``: For each match (row) and rank (column), whether the rank takes part.
    """
    present = np.array([takes_part[rows].any(axis=0) for rows in of_steps])
    is_whole = np.all(present | ~present.any(axis=0), axis=1)
    lacking, steps = int((~is_whole).sum()), len(of_steps)
    if not lacking:
        return of_steps, ()
    if 2 * lacking > steps:
        return of_steps, (f"{lacking} of {steps} steps lack a rank, which may have arrived last there",)
    note = (
        f"ranks are not compared in {lacking} of {steps} steps: a rank that was not recorded there may have been last"
    )
    return [rows for rows, whole in zip(of_steps, is_whole, strict=True) if whole], (note,)


def _keys_of_matches(run: RunAnalysis) -> Ints:
    """Return the key of each match's step, ``UNKNOWN`` outside of steps.

    If ranks have different keys, that of the first rank counts.
    """
    step = np.full(len(run.matches), UNKNOWN, np.int64)
    for index, rank in enumerate(run.ranks):
        step = np.where(step == UNKNOWN, take_or_unknown(rank.keys, run.matches.rows[:, index]), step)
    return step


def _rows_of_steps(step: Ints) -> list[Ints]:
    """Return the rows of the matches of each step, in the order of the steps' keys."""
    rows = np.argsort(step, kind="stable")
    rows = rows[step[rows] != UNKNOWN]
    return np.split(rows, np.flatnonzero(begins_run(step[rows]))[1:]) if len(rows) else []


def _exposed_waits(run: RunAnalysis) -> Ints | None:
    """Return the exposed wait (ns) of each rank (column) at each match (row), 0 where the rank takes no part.

    ``None`` if the exposed time of some rank is not known.
    """
    if any(rank.reason for rank in run.ranks if len(rank.timings)):
        return None
    rows = run.matches.rows
    waits_ns = np.zeros(rows.shape, np.int64)
    for index, exposure in enumerate(run.exposures):
        waits_ns[:, index] = np.maximum(0, take_or_unknown(exposure.exposed_wait_ns, rows[:, index]))
    return waits_ns


def _why_unknown(run: RunAnalysis) -> str | None:
    """Return why lags are not known; ``None`` if they are."""
    if [rank.world_size for rank in run.ranks] == [1]:
        return "the job has a single rank"
    if len(run.ranks) < 2:
        return "the traces of at least two ranks of a run are needed (--one-run joins files)"
    if not run.has_steps and (reason := why_no_steps((rank.reason for rank in run.ranks), "")):
        return reason
    if not len(run.matches):
        return run.matches.doubt or _why_nothing_in_common(run)
    # Collectives align the clocks of files, and not those of the devices in one file.
    files = [rank.clock for rank in run.ranks]
    if off := [rank.name for rank in run.ranks if rank.clocks_disagree and files.count(rank.clock) > 1]:
        return f"times of the devices in one file cannot be compared: those of {off[0]} disagree with its host's clock"
    if run.alignment.residual_p95_ns is None:
        return f"clocks of the files cannot be compared: fewer than {LEAST_PAIRS} collectives link one to the first"
    return None


def _why_nothing_in_common(run: RunAnalysis) -> str:
    """Return why no collective is on more than one rank: no step is either, or the reason is not known."""
    keys = [set(rank.step_keys.tolist()) for rank in run.ranks if rank.marks_steps]
    if len(keys) == len(run.ranks) and len(set().union(*keys)) == sum(map(len, keys)):
        spans = " and ".join(f"{min(own)} to {max(own)}" for own in keys[:2] if own)
        return f"no step was recorded on more than one rank (such as {spans})"
    return "no collective was found on more than one rank"


def _lags(run: RunAnalysis) -> Floats:
    """Return how much later (ns) each rank (column) arrives at each matched collective (row) than the others' median.

    A value is NaN if the rank took no part, or if clocks cannot be compared.
    """
    if run.alignment.residual_p95_ns is None:
        return np.full(run.matches.rows.shape, np.nan)
    return _behind_others(_arrivals(run), run.matches.rows != UNKNOWN)


def _arrivals(run: RunAnalysis) -> Ints:
    """Return when each rank (column) arrives at each matched collective (row), on the common clock.

    The values mean nothing where a rank takes no part.
    """
    start = run.matches.column(run.ranks, "start_ns")
    common = [run.alignment.offset_for(rank.clock).common_ns(start[:, index]) for index, rank in enumerate(run.ranks)]
    return np.stack(common, axis=1) if common else start


def _costs_of_steps(run: RunAnalysis, of_steps: Sequence[Ints], late: Mask) -> Ints:
    """Return the largest time (ns) that another rank would gain in each step without the lags of its late ranks.

    - ``of_steps``: For each step, rows of ``run.matches``.
    - ``late``: For each step (row) and rank (column), whether the rank is late.
    """
    step = np.full(len(run.matches), UNKNOWN, np.int64)
    for number, rows in enumerate(of_steps):
        step[rows] = number
    arrivals = _arrivals(run)
    exposed = [exposure.exposed_ns for exposure in run.exposures]
    gains = measure_lateness(run.ranks, run.matches.rows, arrivals, step, late, exposed)
    longest: Ints = gains.max(axis=1, initial=0)
    return longest


def _lags_before(run: RunAnalysis, keys: Sequence[int]) -> Floats:
    """Return how much later (ns) than the median of the others each rank (column) begins each step (row).

    It is NaN if not known, as of ranks whose steps begin with their work on the device. ``keys`` are the keys of the
    steps.
    """
    begins = np.full((len(keys), len(run.ranks)), NO_TIME, np.int64)
    for index, rank in enumerate(run.ranks):
        is_aligned = run.alignment.residual_p95_ns is not None and len(rank.timings)
        if rank.marks_steps and rank.begins_on_host and is_aligned:
            own = dict(zip(rank.step_keys.tolist(), rank.times.start_ns.tolist(), strict=True))
            times = np.array([own.get(key, NO_TIME) for key in keys], np.int64)
            common = run.alignment.offset_for(rank.clock).common_ns(times)
            begins[:, index] = np.where(times == NO_TIME, NO_TIME, common)
    return _behind_others(begins, begins != NO_TIME)


def _behind_others(columns: Ints, present: Mask) -> Floats:
    """Return how much later each time of a row is than the median of the row's other times.

    Only times that are ``present`` count. The result is NaN where a time is not present, or is the only one of its row.
    """
    # Floats represent whole nanoseconds only up to some months, so times are relative to the first one.
    origin = columns.min(initial=np.iinfo(np.int64).max, where=present)
    arrival = np.where(present, (columns - origin).astype(np.float64), np.nan)
    lags = np.full(arrival.shape, np.nan)
    for index in range(columns.shape[1]):
        took_part = present[:, index] & (present.sum(axis=1) > 1)
        lags[took_part, index] = arrival[took_part, index] - np.nanmedian(
            np.delete(arrival[took_part], index, axis=1), axis=1
        )
    return lags


def _last_to_arrive(lags: Floats, least: int) -> Ints:
    """Return the column of each row's largest lag; ``UNKNOWN`` if that lag is not above ``least``."""
    known = np.where(np.isnan(lags), -np.inf, lags)
    if not known.size:
        return np.full(len(known), UNKNOWN, np.int64)
    return np.where(known.max(axis=1) > least, known.argmax(axis=1), UNKNOWN)


def _waits_at_matches(run: RunAnalysis) -> Ints:
    """Return how long each rank (column) waited at each match (row), hidden or not, in ns; 0 where it takes no part."""
    matches = run.matches.rows
    waits = [np.maximum(0, take_or_unknown(waits, matches[:, index])) for index, waits in enumerate(run.waits_ns)]
    return np.stack(waits, axis=1)


def _nearly_as_late(lags: Floats, arrivals: Ints, waits_ns: Ints, largest: float | Floats) -> Mask:
    """Return which ranks are nearly as late in a step as its last rank, but not because they waited for others.

    - ``lags``, ``arrivals``, ``waits_ns``: Of each rank (column) at each match (row) of the step.
    - ``largest``: The lag of the last rank; or for each rank the lag with which it is compared.
    """
    nearly = lags >= _NEARLY * largest  # NaN is not
    # What a rank had waited when it first was so late.
    since = arrivals.min(axis=0, initial=np.iinfo(np.int64).max, where=nearly)
    waited_ns = waits_ns.sum(axis=0, where=arrivals < since)
    found: Mask = nearly.any(axis=0) & (waited_ns <= _ALIKE_LAGS * largest)
    return found


def _last_in_steps(
    run: RunAnalysis, of_steps: Sequence[Ints], lags: Floats, compared: Floats, waited_ns: Ints, least: int
) -> Ints:
    """Return for each step the index of the rank that arrives last, or ``UNKNOWN``; see the module.

    - ``of_steps``: For each step, rows of the matches.
    - ``lags``: The lag of each rank (column) at each match (row).
    - ``compared``: The largest lag of each rank (column) in each step (row).
    - ``waited_ns``: How long it waited for others there.
    - ``least``: Smaller lags are not told from the error of the clocks.
    """
    matches, late = run.matches.rows, _last_to_arrive(compared, least)
    # Who takes part in the collectives at which the last rank has its largest lag.
    largest = compared[np.arange(len(late)), late]
    meets = np.array(
        [
            (matches[rows[lags[rows, last] == lag]] != UNKNOWN).any(axis=0)
            for rows, last, lag in zip(of_steps, late.tolist(), largest.tolist(), strict=True)
        ]
    )
    return _without_followers(compared, waited_ns, meets, late)


def _without_followers(lags: Floats, waited_ns: Ints, meets: Mask, last: Ints) -> Ints:
    """Return ``last`` with another rank where that one is as late, in another communicator, and waited less for others.

    - ``lags``, ``waited_ns``: The lag of each rank (column) in each step (row), and how long it waited there.
    - ``meets``: Whether it takes part in a collective at which the last rank has its largest lag.
    - ``last``: For each step, the rank with the largest lag, or ``UNKNOWN``.
    """
    steps = np.arange(len(last))
    lag = lags[steps, last]
    are_alike = (lags >= (1 - _ALIKE_LAGS) * lag[:, None]) & ~meets  # NaN is not
    waits = np.where(are_alike, waited_ns, np.iinfo(np.int64).max)
    follows = (last != UNKNOWN) & (waited_ns[steps, last] - waits.min(axis=1) > _ALIKE_LAGS * lag)
    return np.where(follows, waits.argmin(axis=1), last)


def _largest_lags(lags: Floats) -> Floats:
    """Return the largest lag of each rank (column) over all rows; NaN if the rank has no lag in any row."""
    known = np.where(np.isnan(lags), -np.inf, lags).max(axis=0, initial=-np.inf)
    result: Floats = np.where(np.isinf(known), np.nan, known)
    return result


def _delays_queues(run: RunAnalysis, last: Ints, late: int) -> bool:
    """Return whether a collective of another rank queued behind one that waited for the late rank beside compute.

    Its wait costs what the queue is exposed, of which exposed waits do not tell. ``last`` is the index of the rank that
    arrives last at each match.
    """
    for index, rank in enumerate(run.ranks):
        rows = run.matches.rows[last == late, index]
        rows = rows[rows != UNKNOWN]
        hides = run.waits_ns[index][rows] > run.exposures[index].exposed_wait_ns[rows]
        if index != late and np.isin(find_queue(rank.timings).before, rows[hides]).any():
            return True
    return False


def _latest(ranks: Sequence[RankSkew], steps: Sequence[StepSkew]) -> int | None:
    """Return the rank that is last in more steps than chance explains, or in more of the costly ones; or ``None``.

    A rank that writes checkpoints is late in few steps, and by chance each rank is last in the others, by little. Which
    steps are costly does not depend on who is last, so it is the same test. Of two such ranks, the costlier one counts.
    """
    costliest = max((step.cost_ns or 0 for step in steps), default=0)
    last = [step.last for step in steps if (step.cost_ns or 0) >= _COSTLY * costliest > 0]
    by_all = _straggler([rank.last_steps for rank in ranks])
    by_costly = _straggler([last.count(index) for index in range(len(ranks))], _CHANCE_OF_COSTLY)
    found = [index for index in (by_all, by_costly) if index is not None]
    return max(found, key=lambda index: ranks[index].cost_ns or 0, default=None)


def _straggler(times_last: Sequence[int], chance: float = CHANCE) -> int | None:
    """Return the rank that is last most often, if chance does not explain that; else ``None``.

    Chance explains it if in a run of equal ranks some rank is last as often with a probability of at least ``chance``.
    ``times_last`` is the number of steps in which each rank is last; steps in which none is do not
    count. As it could be any rank, the probability for one rank is multiplied by the number of ranks.
    """
    ranks = len(times_last)
    if ranks < 2 or not any(times_last):
        return None
    most = max(times_last)
    is_significant = ranks * _binomial_tail(most, sum(times_last), 1 / ranks) < chance
    return times_last.index(most) if is_significant else None


def _measure_group(run: RunAnalysis, compared: _Comparison, knows_costs: bool) -> LateGroup | None:
    """Return the ranks that are late together, and what that costs; ``None`` if there are none."""
    if not (ranks := _late_together(compared.among_late)):
        return None
    steps = np.flatnonzero(compared.among_late[:, ranks].all(axis=1))
    costs = None
    if knows_costs:
        late = np.zeros((len(steps), len(run.ranks)), np.bool_)
        late[:, ranks] = True
        costs = tuple(_costs_of_steps(run, [compared.rows[step] for step in steps], late).tolist())
    lag_ns = round(float(np.median(compared.lags_ns[steps][:, ranks])))
    return LateGroup(ranks, lag_ns, len(steps), costs, tuple(compared.keys[step] for step in steps))


def _measure_turns(run: RunAnalysis, compared: _Comparison) -> LateInTurns | None:
    """Return the ranks that are late in each step, and what that costs; ``None`` if some may have received late."""
    late = compared.among_late
    ever = np.flatnonzero(late.any(axis=0)).tolist()
    if not ever or any(_may_have_received_late(run, compared, index) for index in ever):
        return None
    ranks = {
        key: tuple(np.flatnonzero(of_step).tolist())
        for key, of_step in zip(compared.keys, late, strict=True)
        if of_step.any()
    }
    return LateInTurns(ranks, tuple(_costs_of_steps(run, compared.rows, late).tolist()))


def _late_together(late: Mask) -> tuple[int, ...]:
    """Return the ranks that are late together in more steps than chance explains; empty if there are no such.

    These are the rank that is late most often, and who is late in most of the same steps. Chance explains it if, were
    as many ranks late in each step, but any of them, some group of that size would be as often late together with a
    probability of at least :data:`CHANCE`. Lags are told from the median rank, so most ranks are no group.

    ``late`` tells for each step (row) and rank (column) whether the rank is late.
    """
    several = late[late.any(axis=1)]
    if not len(several):
        return ()
    first = several[:, several.sum(axis=0).argmax()]
    group = np.flatnonzero(2 * several[first].sum(axis=0) > first.sum())
    ranks, number = late.shape[1], len(group)
    if number < 2 or 2 * number > ranks:
        return ()
    # The chance that a group is among as many late ranks, in the mean over the steps.
    sizes = several.sum(axis=1)
    chance = float(np.mean([math.comb(size, number) for size in sizes.tolist()])) / math.comb(ranks, number)
    times = int(several[:, group].all(axis=1).sum())
    if chance >= 1 or math.comb(ranks, number) * _binomial_tail(times, len(several), chance) >= CHANCE:
        return ()
    return tuple(group.tolist())


def _may_have_received_late(run: RunAnalysis, compared: _Comparison, rank: int) -> bool:
    """Return whether a rank's sends and receives take long enough to explain its lag in most steps in which it is late.

    They are not matched, so it is not known how long the rank waited in them, and for whom.
    """
    own = run.ranks[rank]
    between = own.timings.operation == OPERATIONS.index(POINT_TO_POINT)
    late = np.flatnonzero(compared.among_late[:, rank])
    start_ns, end_ns, key = union_by_group(
        own.timings.start_ns[between], own.timings.end_ns[between], own.keys[between]
    )
    of_steps_ns = [int((end_ns - start_ns)[key == compared.keys[step]].sum()) for step in late.tolist()]
    explains = np.array(of_steps_ns) >= _EXPLAINS * compared.lags_ns[late, rank]
    return 2 * int(explains.sum()) > len(late)


def _binomial_tail(times: int, trials: int, chance: float) -> float:
    """Return the probability of ``times`` or more hits in ``trials`` trials, each of which hits with ``chance``."""
    # The sum of the binomial distribution, with logarithms because the factorials are too large.
    whole = math.lgamma(trials + 1)
    return math.fsum(
        math.exp(
            whole - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
            + hits * math.log(chance) + (trials - hits) * math.log1p(-chance)
        )
        for hits in range(times, trials + 1)
    )  # fmt: skip


def _median_lag(lags: Floats) -> int | None:
    """Return the median of the lags that are not NaN, in whole nanoseconds; ``None`` if there are none."""
    known = lags[~np.isnan(lags)]
    return round(float(np.median(known))) if len(known) else None


def _int_or_none(value: float) -> int | None:
    return None if np.isnan(value) else round(float(value))
