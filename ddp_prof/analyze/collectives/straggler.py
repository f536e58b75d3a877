"""Which rank makes the others wait, or which ranks together, and what that costs.

:mod:`.arrivals` says which rank is last in a step. The *cost* of a step is the largest time that another rank would
gain if the last rank were not late, queues behind its waits included (:mod:`.lateness`); it is attributed to the last
rank. In a capture without steps, each collective counts by itself. The cost of a rank is then the largest sum of
another rank's exposed waits at the collectives where it arrived last; it is not known if collectives queued behind
hidden ones of these waits.

Several ranks may be late together, as those of a slow node: then nothing is gained if only one of them were not late.
Such a group is found if its ranks have nearly the step's largest lag, without having waited for others, in more steps
than chance explains (:mod:`.late_by_chance`). Its cost is what another rank would gain if none of the group were late.
The lags of a node may be graded, as if one card is slower than the next: ranks that are late by less belong to it if
their lags lie clearly nearer to each other than to those of the other ranks, and they are the last ones in the same
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ddp_prof.analyze.collectives.alignment import LEAST_PAIRS
from ddp_prof.analyze.collectives.arrivals import Comparison, arrivals_of, compare_arrivals
from ddp_prof.analyze.collectives.late_by_chance import CHANCE_OF_COSTLY, find_late_together, find_straggler
from ddp_prof.analyze.collectives.lateness import find_queue, measure_lateness
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.skew import (
    LateGroup,
    LateInTurns,
    RankArrivals,
    RankSkew,
    RunSkew,
    StepSkew,
    int_or_none,
)
from ddp_prof.analyze.intervals import union_by_group
from ddp_prof.analyze.result_bases import measure_fields
from ddp_prof.analyze.why_unknown import why_no_steps
from ddp_prof.communication import OPERATIONS, POINT_TO_POINT
from ddp_prof.trace import UNKNOWN, Ints, Mask, take_or_unknown

_COSTLY = 0.5
"""Smallest part of the cost of the costliest step at which another step is costly, too."""

MAY_HAVE_RECEIVED_LATE = "may have waited for other ranks in sends and receives, which are not matched"
"""A doubt: the first stage of a pipeline ends its step last, whichever stage is slow."""

_EXPLAINS = 0.5
"""Smallest part of a lag that the rank's sends and receives last if they may be its cause."""

_SEPARATE = 2
"""Lags are graded if they lie apart from those of other ranks by this many times the most by which they differ."""


def measure_skew(run: RunAnalysis) -> RunSkew:
    """Return which rank arrives last at the matched collectives, by how much, and what that costs; see the module."""
    compared, notes = compare_arrivals(run)
    compared = _with_graded(compared, run.alignment.residual_p95_ns or 0)
    waits_ns = _exposed_waits(run)
    steps = _measure_steps(run, compared, waits_ns)
    takes_part = run.matches.rows != UNKNOWN
    rows = np.concatenate(compared.rows) if compared.rows else np.arange(len(run.matches))
    waited_ns: list[int | None] = [None] * len(run.ranks)
    if waits_ns is not None and len(rows):
        # Whether a rank waits whose collectives are found on no other rank is not known.
        known = zip(waits_ns[rows].sum(axis=0).tolist(), takes_part.any(axis=0), strict=True)
        waited_ns = [waited if is_matched else None for waited, is_matched in known]
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
        hides_waits=waits_ns is not None and run.device != "cpu" and _hides_waits(run, waits_ns),
    )


def _hides_waits(run: RunAnalysis, exposed_waits_ns: Ints) -> bool:
    """Return whether compute hides at least a tenth of what ranks wait for peers; see :func:`_exposed_waits`."""
    all_ns = sum(
        int(np.maximum(0, take_or_unknown(of_rank, run.matches.rows[:, index])).sum())
        for index, of_rank in enumerate(run.waits_ns)
    )
    return all_ns > 0 and int(exposed_waits_ns.sum()) <= 0.9 * all_ns


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


def _with_graded(compared: Comparison, least: int) -> Comparison:
    """Return the comparison with those among the late who are late by less, as ranks of one node with graded lags.

    They are added to the ranks that are late together, or to the straggler, in the steps in which all of them arrive
    last, each of them by itself. Smaller lags than ``least`` are not told from the error of the clocks.
    """
    late, lags_ns = compared.among_late, compared.lags_ns
    ranks = lags_ns.shape[1]
    straggler = find_straggler(compared.late[compared.late != UNKNOWN], ranks)
    first = find_late_together(late) or (() if straggler is None else (straggler,))
    if not first or not len(late):
        return compared
    known = np.where(np.isnan(lags_ns), -np.inf, lags_ns)
    # A lag counts from the median of the others, so ranks before it seem to be twice as far from those behind it.
    typical = np.maximum(0, np.median(known[late[:, first].all(axis=1)], axis=0))
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


def _measure_steps(run: RunAnalysis, compared: Comparison, waits_ns: Ints | None) -> tuple[StepSkew, ...]:
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
                lags_ns=tuple(map(int_or_none, compared.lags_ns[at])),
                last=last,
                cost_ns=costs[at],
                waits_ns=tuple(waits),
                lag_before_ns=None if last is None else int_or_none(compared.before_ns[at, last]),
            )
        )
    return tuple(steps)


def _cost_of_rank(
    run: RunAnalysis, compared: Comparison, steps: Sequence[StepSkew], waits_ns: Ints | None, rank: int
) -> int | None:
    """Return what the rank with this index costs the others in the whole capture; ``None`` if it is not known."""
    if waits_ns is None or not np.any(run.matches.rows[:, rank] != UNKNOWN):
        return None
    if steps:
        return sum(step.cost_ns or 0 for step in steps if step.last == rank)
    if _delays_queues(run, compared.last, rank):
        return None
    # How long the other rank that waited longest waited at the collectives at which this rank arrived last.
    waited_ns = waits_ns[compared.last == rank].sum(axis=0)
    return int(np.delete(waited_ns, rank).max(initial=0))


def _costs_of_steps(run: RunAnalysis, of_steps: Sequence[Ints], late: Mask) -> Ints:
    """Return the largest time (ns) that another rank would gain in each step without the lags of its late ranks.

    - ``of_steps``: For each step, rows of ``run.matches``.
    - ``late``: For each step (row) and rank (column), whether the rank is late.
    """
    step = np.full(len(run.matches), UNKNOWN, np.int64)
    for number, rows in enumerate(of_steps):
        step[rows] = number
    arrivals = arrivals_of(run)
    exposed = [exposure.exposed_ns for exposure in run.exposures]
    gains = measure_lateness(run.ranks, run.matches.rows, arrivals, step, late, exposed)
    longest: Ints = gains.max(axis=1, initial=0)
    return longest


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
    late = [(step.last, step.cost_ns or 0) for step in steps if step.last is not None]
    costly = [rank for rank, cost in late if cost >= _COSTLY * costliest > 0]
    by_all = find_straggler([rank for rank, _ in late], len(ranks))
    by_costly = find_straggler(costly, len(ranks), CHANCE_OF_COSTLY)
    found = [index for index in (by_all, by_costly) if index is not None]
    return max(found, key=lambda index: ranks[index].cost_ns or 0, default=None)


def _measure_group(run: RunAnalysis, compared: Comparison, knows_costs: bool) -> LateGroup | None:
    """Return the ranks that are late together, and what that costs; ``None`` if there are none."""
    if not (ranks := find_late_together(compared.among_late)):
        return None
    steps = np.flatnonzero(compared.among_late[:, ranks].all(axis=1))
    costs = None
    if knows_costs:
        late = np.zeros((len(steps), len(run.ranks)), np.bool_)
        late[:, ranks] = True
        costs = tuple(_costs_of_steps(run, [compared.rows[step] for step in steps], late).tolist())
    lag_ns = round(float(np.median(compared.lags_ns[steps][:, ranks])))
    return LateGroup(ranks, lag_ns, len(steps), costs, tuple(compared.keys[step] for step in steps))


def _measure_turns(run: RunAnalysis, compared: Comparison) -> LateInTurns | None:
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


def _may_have_received_late(run: RunAnalysis, compared: Comparison, rank: int) -> bool:
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
