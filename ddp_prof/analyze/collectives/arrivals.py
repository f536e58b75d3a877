"""Which rank arrives last in each step, or at each collective, and by how much.

A rank *arrives* at a collective when its own part of it begins. Its *lag* at this collective is how much later that is
than the median of the other ranks' arrivals, on the common clock. Its lag in a step is its largest lag at a collective
of the step: a late rank is either late for one collective, at which the others wait, or stays late for all collectives
that follow. L is the launch, C the collective::

    rank 0   L CCCCCCCCCC       waits for 5
    rank 1        L CCCCC       lag 5, arrives last
    rank 2    LCCCCCCCCCC

The rank with the largest lag is *last*. Of two that are as late in two communicators, it is the one that waited less
for others: the other one may be late because it waited for this one in a third communicator. If the lag is not above
the residual of the clocks, no rank is last. If clocks cannot be compared, there are no lags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.columns import by_number, count_noun
from ddp_prof.table import Floats, begins_run
from ddp_prof.trace import NEVER, NO_TIME, UNKNOWN, Ints, Mask, take_or_unknown

_ALIKE_LAGS = 0.1
"""Largest part of a lag by which another one may be smaller and still be alike."""

_NEARLY = 0.8
"""Smallest part of the largest lag of a step with which another rank is late together with its rank."""


@dataclass(frozen=True)
class Comparison:
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


def compare_arrivals(run: RunAnalysis) -> tuple[Comparison, tuple[str, ...]]:
    """Return which rank arrives last in each step, and a note if some steps cannot be compared."""
    lags_ns = _lags(run)
    least = run.alignment.residual_p95_ns or 0
    last = _last_to_arrive(lags_ns, least)
    step = _keys_of_matches(run)
    of_steps = _rows_of_steps(step) if run.has_steps else []
    if not of_steps:
        nobody = np.zeros((0, len(run.ranks)), np.bool_)
        return Comparison(last, lags_ns, last, (), (), nobody, nobody, _lags_before(run, ())), ()
    of_steps, notes = _leave_out_steps_that_lack_ranks(of_steps, run.matches.rows != UNKNOWN)
    keys = tuple(int(step[rows[0]]) for rows in of_steps)
    last[~np.isin(step, (UNKNOWN, *keys))] = UNKNOWN
    of_steps_ns = np.array([largest_lags(lags_ns[rows]) for rows in of_steps])
    waits_ns, arrivals = _waits_at_matches(run), arrivals_of(run)
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
    return Comparison(last, of_steps_ns, late, keys, tuple(of_steps), among_late, by_itself, before_ns), notes


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
        lack = by_number(lacking, "lacks", "lack")
        note = f"{lacking} of {count_noun(steps, 'step')} {lack} a rank, which may have arrived last there"
        return of_steps, (note,)
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


def _lags(run: RunAnalysis) -> Floats:
    """Return how much later (ns) each rank (column) arrives at each matched collective (row) than the others' median.

    A value is NaN if the rank took no part, or if clocks cannot be compared.
    """
    if run.alignment.residual_p95_ns is None:
        return np.full(run.matches.rows.shape, np.nan)
    return _behind_others(arrivals_of(run), run.matches.rows != UNKNOWN)


def arrivals_of(run: RunAnalysis) -> Ints:
    """Return when each rank (column) arrives at each matched collective (row), on the common clock.

    The values mean nothing where a rank takes no part.
    """
    start = run.matches.column(run.ranks, "start_ns")
    common = [run.alignment.offset_for(rank.clock).common_ns(start[:, index]) for index, rank in enumerate(run.ranks)]
    return np.stack(common, axis=1) if common else start


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
    origin = columns.min(initial=NEVER, where=present)
    arrival = np.where(present, (columns - origin).astype(np.float64), np.nan)
    lags = np.full(arrival.shape, np.nan)
    for index in range(columns.shape[1]):
        took_part = present[:, index] & (present.sum(axis=1) > 1)
        lags[took_part, index] = arrival[took_part, index] - np.nanmedian(
            np.delete(arrival[took_part], index, axis=1), axis=1
        )
    return lags


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
    since = arrivals.min(axis=0, initial=NEVER, where=nearly)
    waited_ns = waits_ns.sum(axis=0, where=arrivals < since)
    found: Mask = nearly.any(axis=0) & (waited_ns <= _ALIKE_LAGS * largest)
    return found


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


def largest_lags(lags: Floats) -> Floats:
    """Return the largest lag of each rank (column) over all rows; NaN if the rank has no lag in any row."""
    known = np.where(np.isnan(lags), -np.inf, lags).max(axis=0, initial=-np.inf)
    result: Floats = np.where(np.isinf(known), np.nan, known)
    return result
