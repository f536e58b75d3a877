"""Contention: the time by which communication slows all kernels of a run together.

Executions with the same name and launch shape at the same position in the step (the n-th launch of these) are compared:
those beside communication with those alone::

    step 3   compute  aaaabbbb        step 4   compute  aaaabbbbbb      b takes 6 instead of 4
             NCCL                              NCCL         NNNNNN      beside communication N

The executions may be from one run or from several, for example ``naive`` and ``overlap``. Within one run, an execution
that is slow for another reason is a little more likely to overlap communication, so two runs are more reliable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ddp_prof.analyze.kernels.kernel_times import (
    COMMUNICATION,
    UNNAMED,
    KernelRuns,
    is_mostly_overlapped,
    kind_of_compute,
    medians_by_key,
    merge_keys,
)
from ddp_prof.analyze.statistics import LEAST_STEPS, Numbers, intervals_of_sums, student_t
from ddp_prof.growing_column import in_file, in_order
from ddp_prof.table import Floats, concatenate_columns, constant_column, count_before
from ddp_prof.trace import UNKNOWN, Ints, Mask, distinct, distinct_rows

LEAST_KERNELS = 5
"""Smallest number of different kernels (name and position in the step) that must be compared for a figure."""

SAME_WORK, AGREEING, AGREEING_NS = 0.9, 0.05, 1000
"""Two ranks have the same work if at least this fraction of the kernels that ran alone on both takes equally long.

Two times are equally long if they differ by no more than 5 % or 1 us.
"""

SAME = 0.02
"""Largest deviation from 1 of the ratio of two times that count as equal."""


@dataclass(frozen=True, slots=True)
class Contention:
    """How much communication slows the compute beside it in one run; without figures if there is a ``reason``.

    A kernel needs ``alone`` without communication. An execution of it lasts ``duration``, of which ``beside`` has
    communication beside it. In the rest, ``duration - beside``, it does as much as alone. So during ``beside`` it does
    work that takes ``done = alone - (duration - beside)`` without communication. The slowdown is ``beside / done``,
    where both are summed over all compared executions::

        alone         ######          6
        duration      ####======      4 without communication, 6 beside it. done = 6 - 4 = 2, so the slowdown is 3

    Contention applies this slowdown to *all* time beside communication, that of kernels that were not compared, too::

        contention = sum over kinds of kernels of beside * (1 - 1 / slowdown)

    A kind of kernels has its own slowdown if enough of its kernels (:data:`LEAST_KERNELS`) and half of its time beside
    communication could be compared, and if its kernels are slowed otherwise than those of other kinds. All other kinds
    have the slowdown of their compared kernels together or, if there are none, of all compared kernels. The intervals
    are wide enough for two more doubts: each kind with enough kernels might have its own slowdown, and the kernels that
    were not compared might be slowed otherwise, as the compared kernels differ from each other.

    Attributes:
        kernels: Number of different kernels (name and position in the step) that were compared.
        runs: Number of executions with communication beside them that were compared.
        share: Compared fraction of the time of kernels beside communication, 0 to 1.
        slowdown: Slowdown of all compared executions together.
        slowdown_low, slowdown_high: Its 95 % interval; ``None`` for too few steps.
        slowed: Fraction of the time beside communication that is contention, 0 to 1.
        slowed_low, slowed_high: Its 95 % interval; ``None`` for too few steps.
        slowed_by_kind: Pairs of a kind of kernels and the same fraction for this kind.
        contention_ns: Contention in a step of a rank, on average; from all time beside communication, summed over
            streams.
        half_width_ns: Half of the width of its 95 % interval.
        reason: Why there are no figures; ``None`` if there are.
    """

    kernels: int = 0
    runs: int = 0
    share: float | None = None
    slowdown: float | None = None
    slowdown_low: float | None = None
    slowdown_high: float | None = None
    contention_ns: int | None = None
    reason: str | None = None
    half_width_ns: int | None = None
    slowed: float | None = None
    slowed_low: float | None = None
    slowed_high: float | None = None
    slowed_by_kind: tuple[tuple[str, float], ...] = ()


def measure_contention(ranks: Sequence[KernelRuns], reference: Sequence[KernelRuns] = ()) -> Contention:
    """Return the contention in a run: its kernels beside communication are compared with the same kernels alone.

    A kernel is compared with its executions on its own rank, and on ranks on which the kernels alone take as long as
    there. Other ranks may have other work.

    Args:
        ranks: The ranks of the run.
        reference: Ranks of other runs of the same model. Their executions alone are used where the run has none.
    """
    computing = list(map(_compute_in_steps, ranks))
    if not any(len(of_rank.kernel) for of_rank in computing):
        has_kernels = any(len(of_rank.kernel) for of_rank in ranks)
        which = "no GPU kernel is known to be of a step" if has_kernels else "no GPU kernels in steps"
        return Contention(reason=f"{which}: contention cannot be measured")
    runs = _join(computing, list(map(_compute_in_steps, reference)))
    is_mostly_beside: Mask = runs.own & is_mostly_overlapped(runs.duration_ns, runs.beside_ns)
    if not is_mostly_beside.any():
        return Contention(reason="no kernel ran beside communication for more than half of its time")

    # Each execution is compared with the median of those in its group that ran alone.
    group = _by_work(runs, runs.is_alone)
    alone_ns, has_alone = medians_by_key(group, runs.duration_ns, runs.is_alone)
    compared = runs.own & (runs.beside_ns > 0) & has_alone[group]
    kernels = len(np.unique(runs.key[compared & is_mostly_beside]))
    if kernels < LEAST_KERNELS:
        some = {0: "no kernel", 1: "only one kernel"}.get(kernels, f"only {kernels} kernels")
        counted = f"{some} ran both beside communication and alone"
        return Contention(reason=f"{counted}; {LEAST_KERNELS} are needed")
    if doubt := _other_difference(runs, is_mostly_beside):
        return Contention(reason=doubt)

    # How long the work that a compared execution did beside communication takes alone.
    rows = np.flatnonzero(compared)
    of_work_ns = alone_ns[group[rows]]
    done_ns = of_work_ns - (runs.duration_ns[rows] - runs.beside_ns[rows])
    if not of_work_ns.sum():
        return Contention(reason="the kernels that ran both beside communication and alone took no time alone")
    if done_ns.sum() <= 0:
        return Contention(
            reason="the compared kernels ran as long outside of communication as all their work takes alone"
        )
    slowdown = max(1.0, float(runs.beside_ns[rows].sum() / done_ns.sum()))
    errors_ns = _error_of_comparison(group, alone_ns, runs, compared, slowdown)
    estimate = _estimate(runs, compared, done_ns, errors_ns, sum(of_rank.steps for of_rank in ranks))
    return replace(estimate, kernels=kernels)


@dataclass(frozen=True)
class _Executions:
    """Executions of kernels that compute in steps, those of each rank in the order of their launches.

    Columns have one element per execution.

    Attributes:
        own: Whether it is of the run whose contention is measured, not of the reference.
        rank: Index of its rank; the ranks of the reference follow those of the run.
        step: Index of its step.
        key: Number of its kernel and position in the step (the n-th launch of this kernel).
        kind: Index of its kernel's kind in ``kinds``.
        duration_ns: Its duration.
        beside_ns: The part of this duration in which communication ran.
        kinds: The kinds of kernels.
    """

    own: Mask
    rank: Ints
    step: Ints
    key: Ints
    kind: Ints
    duration_ns: Ints
    beside_ns: Ints
    kinds: tuple[str, ...]

    @property
    def is_alone(self) -> Mask:
        """Whether no communication ran beside it."""
        alone: Mask = self.beside_ns == 0
        return alone


def _compute_in_steps(runs: KernelRuns) -> KernelRuns:
    """Return only the executions that compute and lie in a step."""
    computes = np.array([kind not in (COMMUNICATION, UNNAMED) for *_, kind in runs.keys], np.bool_)
    rows = np.flatnonzero(computes[runs.kernel] & (runs.step != UNKNOWN))
    kernel, duration_ns, beside_ns, step = (
        in_order(column, rows) for column in (runs.kernel, runs.duration_ns, runs.beside_ns, runs.step)
    )
    return replace(runs, kernel=kernel, duration_ns=duration_ns, beside_ns=beside_ns, step=step)


def _join(ranks: Sequence[KernelRuns], reference: Sequence[KernelRuns]) -> _Executions:
    """Return the executions of the ranks of a run, followed by those of its reference."""
    both = [*ranks, *reference]
    names, kernel = merge_keys(([key[:2] for key in runs.keys], runs.kernel) for runs in both)
    kinds, kind_of_name = np.unique([kind_of_compute(name) for name, _ in names], return_inverse=True)
    rank = concatenate_columns([constant_column(at, len(runs.kernel)) for at, runs in enumerate(both)])
    step = concatenate_columns([runs.step for runs in both])
    position = count_before(distinct_rows(rank, step, kernel)[1])  # rows are in the order of launches
    return _Executions(
        own=rank < len(ranks),
        rank=rank,
        step=step,
        key=in_file(distinct_rows(kernel, position)[1]),
        kind=in_order(kind_of_name, kernel),
        duration_ns=concatenate_columns([runs.duration_ns for runs in both]),
        beside_ns=concatenate_columns([runs.beside_ns for runs in both]),
        kinds=tuple(map(str, kinds)),
    )


def _estimate(
    runs: _Executions, compared: Mask, done_ns: Floats, errors_ns: tuple[float, float], steps_of_ranks: int
) -> Contention:
    """Return the figures of a run, without the number of its ``kernels``.

    Args:
        runs: The executions.
        compared: Whether each of them is compared.
        done_ns: How long the work that each compared execution did beside communication takes alone.
        errors_ns: See :func:`_error_of_comparison`.
        steps_of_ranks: Number of measured steps, summed over the ranks of the run.
    """
    # Executions that ran alone add nothing to any sum.
    rows = np.flatnonzero(runs.own & (runs.beside_ns > 0))
    is_compared, key, kind, kinds = compared[rows], runs.key[rows], runs.kind[rows], len(runs.kinds)
    # By step and kind of kernels: the compared time beside communication, what it takes alone, and all such time.
    all_ns = runs.beside_ns[rows]
    compared_ns, took_ns = all_ns * is_compared, np.zeros(len(rows))
    took_ns[is_compared] = done_ns
    first, unit = distinct_rows(runs.step)
    sums = _sums_by_step(unit[rows], len(first), kind, kinds, (compared_ns, took_ns, all_ns))
    del unit
    total = sums.sum(axis=0)
    compared_of_kind, took_of_kind, all_of_kind = np.split(total, 3)
    # Which kinds have their own slowdown: for the figures, and in a second way that only widens the intervals.
    has_enough = np.array([len(np.unique(key[is_compared & (kind == one)])) >= LEAST_KERNELS for one in range(kinds)])
    has_own = has_enough & (2 * compared_of_kind >= all_of_kind)
    has_own &= _differ_from_others(key, kind, compared_ns, took_ns, kinds)
    slowdown, slowed = float(_slowdown(total)), float(_slowed(has_own, total))
    slowed_by_kind = np.maximum(0.0, 1 - 1 / _slowdown_by_kind(has_own, compared_of_kind, took_of_kind)).tolist()
    # The intervals: by drawing the steps that communicate (bootstrap), widened by the error of what they are compared
    # with and, for contention, by how differently kernels are slowed. The error alone counts for a step or two.
    figures: list[Callable[[Numbers], Numbers]] = [_slowdown, partial(_slowed, has_own), partial(_slowed, has_enough)]
    communicating = sums[sums.any(axis=1)]
    intervals = intervals_of_sums(communicating, figures)
    if len(communicating) < LEAST_STEPS <= len(sums):
        intervals = [(float(figure(total)),) * 2 for figure in figures]
    of_slowdown, *of_slowed = intervals
    doubt_of_alone, above_median = (error_ns / took_of_kind.sum() for error_ns in errors_ns)
    slowdown_interval = _widest(slowdown, slowdown * doubt_of_alone, [of_slowdown], -slowdown * above_median)
    doubt_of_rest = _doubt_of_rest(key, is_compared, all_ns, took_ns)
    doubt_of_slowed = math.hypot(doubt_of_alone / slowdown, doubt_of_rest)
    slowed_interval = _widest(slowed, doubt_of_slowed, of_slowed, -above_median / slowdown)
    beside_of_step_ns = float(all_of_kind.sum()) / steps_of_ranks
    return Contention(
        runs=len(done_ns),
        share=float(compared_ns.sum() / all_ns.sum()),
        slowdown=slowdown,
        slowdown_low=slowdown_interval and slowdown_interval[0],
        slowdown_high=slowdown_interval and slowdown_interval[1],
        contention_ns=round(slowed * beside_of_step_ns),
        half_width_ns=slowed_interval and round((slowed_interval[1] - slowed_interval[0]) / 2 * beside_of_step_ns),
        slowed=slowed,
        slowed_low=slowed_interval and slowed_interval[0],
        slowed_high=slowed_interval and slowed_interval[1],
        slowed_by_kind=tuple(zip(runs.kinds, slowed_by_kind, strict=True)),
    )


def _widest(
    figure: float, doubt: float, intervals: Iterable[tuple[float, float] | None], bias: float
) -> tuple[float, float] | None:
    """Return an interval that contains all intervals of a figure, widened by an independent doubt (half a width).

    The true value may also lie by ``bias`` from the figure, to one side. ``None`` if all intervals are ``None``.
    """
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return None
    low, high = min(low for low, _ in known), max(high for _, high in known)
    return figure - math.hypot(figure - low, doubt) + min(0.0, bias), (
        figure + math.hypot(high - figure, doubt) + max(0.0, bias)
    )


def _doubt_of_rest(key: Ints, compared: Mask, beside_ns: Ints, done_ns: Floats) -> float:
    """Return the doubt of the slowed fraction from kernels that were not compared, as half of a 95 % interval.

    The compared kernels are a sample of the kernels that ran beside communication. The bootstrap draws from them, which
    tells how uncertain their mean is. The kernels that were not compared are like further draws, so their mean varies,
    too. Both count as much as the fraction of the time that was not compared; if too few kernels were compared for a
    bootstrap, the result is this fraction.

    Args:
        key: Number of each execution's kernel and position.
        compared: Whether each execution was compared.
        beside_ns: How much of each execution has communication beside it.
        done_ns: How long the work in this time takes alone.
    """
    beside, compared_ns, done = (
        np.bincount(key, weights=weights) for weights in (beside_ns, beside_ns * compared, done_ns * compared)
    )
    rows = np.flatnonzero((compared_ns > 0) & (done > 0))
    rest = (beside > 0) & (compared_ns == 0)
    left = float((beside - compared_ns).sum() / beside.sum())
    interval = _interval_of_kernels(compared_ns[rows], done[rows])
    if interval is None:
        return left
    count, others = len(rows), max(1, int(rest.sum()))
    return left * (interval[1] - interval[0]) / 2 * math.sqrt(1 + count / others)


def _interval_of_kernels(compared_ns: Numbers, done_ns: Numbers) -> tuple[float, float] | None:
    """Return the 95 % interval of the slowed fraction by drawing kernels; ``None`` for too few kernels.

    The arguments have one element per compared kernel: its time beside communication, and how long that takes alone.
    """
    sums = np.column_stack([compared_ns, done_ns])
    sums = sums[np.lexsort(sums.T)]  # keys are numbered as the file is written, and what is drawn must not depend on it
    (interval,) = intervals_of_sums(sums, [lambda drawn: 1 - drawn[:, 1] / np.maximum(1.0, drawn[:, 0])])
    return interval


def _differ_from_others(key: Ints, kind: Ints, compared_ns: Floats | Ints, done_ns: Floats, kinds: int) -> Mask:
    """Return for each kind whether its kernels are slowed otherwise than those of all other kinds.

    The difference of the two slowed fractions must exceed the uncertainty of both.

    - ``key``, ``kind``: Number of each execution's kernel and position, and of its kind.
    - ``compared_ns``: Its compared time beside communication.
    - ``done_ns``: How long the work in this time takes alone.
    - ``kinds``: Number of kinds.
    """
    compared, done = (np.bincount(key, weights=weights) for weights in (compared_ns, done_ns))
    of_key = np.zeros(len(compared), np.int64)
    of_key[key] = kind
    is_known = (compared > 0) & (done > 0)
    found = np.zeros(kinds, np.bool_)
    for one in range(kinds):
        intervals = [
            _interval_of_kernels(compared[rows], done[rows])
            for rows in (is_known & (of_key == one), is_known & (of_key != one))
        ]
        (low, high), (others_low, others_high) = (interval or (0.0, 1.0) for interval in intervals)
        found[one] = abs(low + high - others_low - others_high) > math.hypot(high - low, others_high - others_low)
    return found


def _error_of_comparison(
    group: Ints, alone_ns: Floats, runs: _Executions, compared: Mask, slowdown: float
) -> tuple[float, float]:
    """Return the error of the sum of the medians with which executions are compared: half of its 95 % interval, in ns.

    The standard error of the median of ``n`` normal values is 1.25 standard deviations, divided by the root of ``n``.
    Executions may scatter each by itself, or all of a step together, as at changing clocks; the larger error counts.
    How they scatter is known from those alone and, as those may be of a single step, from those beside communication.
    If some executions take much longer than most, the mean of those alone, with which the sum of those beside should
    be compared, is above their median. The second element is the sum of these differences, negative if below.

    Steps that communicate scatter as well; by how much, a bootstrap tells. It cannot of fewer than
    :data:`LEAST_STEPS`; then their executions count here, too.

    Args:
        group: Number of the group of each execution.
        alone_ns: Median of each group's executions alone.
        runs: The executions.
        compared: Whether each of them is compared with the median of its group.
        slowdown: By how much communication slows them.
    """
    groups = int(group.max()) + 1
    used, count = (np.bincount(group[rows], minlength=groups) for rows in (compared, runs.is_alone))
    rows = np.flatnonzero((runs.is_alone & (used[group] > 0)) | compared)
    of, alone = group[rows], runs.is_alone[rows]
    # About what each execution takes alone, and by how much this differs from the mean of such executions.
    took = runs.duration_ns[rows] - runs.beside_ns[rows] * (1 - 1 / slowdown)
    _, like = distinct_rows(of, alone.astype(np.int64))
    number = np.bincount(like)
    mean = (np.bincount(like, weights=took) / number)[like]
    several = number[like] > 1
    differs = (took - mean) * np.sqrt(number[like] / np.maximum(1, number[like] - 1))
    # The part that each execution has in the sum of the medians or, if too few steps communicate, in the other sum.
    _, step = distinct_rows(runs.own[rows].astype(np.int64), runs.step[rows])
    steps = int(step.max()) + 1
    of_few = len(np.unique(step[~alone])) < LEAST_STEPS
    of_median = used / np.maximum(1, count) * np.where(count > 2, 1.25, 1)
    weight = np.where(alone, of_median[of], 1.0)
    in_sum = alone | of_few
    # Each by itself.
    times = np.maximum(1, np.bincount(of[several], minlength=groups))
    variance = np.bincount(of[several], weights=differs[several] ** 2, minlength=groups) / times
    each = float((weight**2 * variance[of])[in_sum].sum())

    def by_step(chosen: Mask, values: Floats) -> Numbers:
        """Return the sum of what is chosen in each step, by the weights of its executions alone."""
        sums: Numbers = np.bincount(step[chosen], weights=values[chosen], minlength=steps)
        return sums

    # All of a step together: how much a step differs as a whole, and how much of the sum each step has.
    whole, differ = by_step(several, of_median[of] * mean), by_step(several, of_median[of] * differs)
    share = by_step(in_sum, weight * mean)
    known = whole > 0
    together = float((share**2).sum() * (differ[known] ** 2).sum() / max(1.0, (whole[known] ** 2).sum()))
    # How far the means of those alone are above their medians.
    means = np.bincount(of[alone], weights=took[alone], minlength=groups) / np.maximum(1, count)
    above = float((used * (means - alone_ns)).sum())  # what is used has executions alone
    return student_t(max(1, int(known.sum()) - 1)) * math.sqrt(max(each, together)), above


def _sums_by_step(step: Ints, steps: int, kind: Ints, kinds: int, columns: Sequence[Floats | Ints]) -> Floats:
    """Return the sum of each column by step and kind; shape (steps, columns x kinds), the kinds of a column together.

    ``steps`` and ``kinds`` are their numbers; ``step`` and ``kind`` have one element per row of the columns.
    """
    size = steps * kinds
    return np.column_stack(
        [np.bincount(step * kinds + kind, weights=column, minlength=size).reshape(-1, kinds) for column in columns]
    )


def _slowdown(drawn: Numbers) -> Numbers:
    """Return the slowdown of all compared executions together, for each draw of steps.

    ``drawn`` are sums of the rows that :func:`_sums_by_step` returns; shape (draws, 3 x kinds), or that of one draw.
    """
    beside, done, _ = np.split(drawn, 3, axis=-1)
    found: Numbers = np.maximum(1.0, beside.sum(axis=-1)) / np.maximum(1.0, done.sum(axis=-1))
    return found


def _slowed(has_own: Mask, drawn: Numbers) -> Numbers:
    """Return, for each bootstrap draw, which fraction of compute's time beside communication is contention.

    ``drawn`` is as in :func:`_slowdown`. ``has_own`` marks the kinds of kernels whose slowdown is estimated from their
    own executions; see :func:`_slowdown_by_kind` for all other kinds.
    """
    beside, done, everything = np.split(drawn, 3, axis=-1)
    slowed = everything * (1 - 1 / _slowdown_by_kind(has_own, beside, done))
    found: Numbers = slowed.sum(axis=-1) / np.maximum(1.0, everything.sum(axis=-1))
    return found


def _slowdown_by_kind(has_own: Mask, beside: Numbers, done: Numbers) -> Numbers:
    """Return the slowdown of each kind (last axis).

    A kind in ``has_own`` has its own. All other kinds have that of these other kinds together or, if nothing of them
    was compared, that of all kinds.

    Args:
        has_own: Which kinds have their own slowdown.
        beside: Compared time beside communication, by kind.
        done: How long the work in this time takes alone, by kind.
    """
    rest_ns, rest_done = ((~has_own * column).sum(axis=-1, keepdims=True) for column in (beside, done))
    every = np.maximum(1.0, beside.sum(axis=-1, keepdims=True)) / np.maximum(1.0, done.sum(axis=-1, keepdims=True))
    rest = np.where((rest_ns > 0) & (rest_done > 0), rest_ns / np.maximum(1.0, rest_done), every)
    found: Numbers = np.where(has_own & (beside > 0) & (done > 0), beside / np.maximum(1.0, done), rest)
    return found


def _by_work(runs: _Executions, sampled: Mask) -> Ints:
    """Return for each execution the number of the group whose samples it is compared with.

    A group is a kernel and position on all ranks of the run with the same work. If no sample of the run is in it, the
    execution is compared with other runs: the groups of one kernel and position there are one group. ``sampled`` are
    the samples: executions that others are compared with.
    """
    of_work = _same_work(runs, sampled)
    _, of_key = distinct_rows(runs.key, of_work)
    if runs.own.all() and len(distinct(of_work)) == 1:  # no other rank or run that has samples
        return of_key
    has_samples = np.bincount(of_key[runs.own & sampled], minlength=int(of_key.max()) + 1) > 0
    found: Ints = distinct_rows(runs.key, np.where(runs.own & has_samples[of_key], of_work, UNKNOWN))[1]
    return found


def _same_work(runs: _Executions, sampled: Mask) -> Ints:
    """Return for each execution a rank that stands for all ranks with the same work: the first of them, or its own.

    Two ranks have the same work if almost all of their kernels take equally long alone. The few kernels that do not
    are compared on their own rank. ``sampled`` is as in :func:`_by_work`.
    """
    key, rank = runs.key, runs.rank
    ranks = distinct(rank[runs.own])
    if len(ranks) == 1:
        return rank
    found: Ints = rank.copy()
    first = dict[int, tuple[Floats, Mask]]()
    keys, chosen = int(key.max()) + 1, runs.own & sampled
    order = np.argsort(rank, kind="stable")  # the rows of each rank one after another
    ordered = rank[order]
    for one in ranks:
        of_rank = order[slice(*np.searchsorted(ordered, (one, one + 1)))]
        ns, has = medians_by_key(key[of_rank], runs.duration_ns[of_rank], chosen[of_rank], keys)
        # Compare the rank with the first rank of each kind of work; if it fits none, it is the first of another kind.
        for other, (other_ns, other_has) in first.items():
            both = has & other_has
            agrees = np.abs(ns - other_ns) <= np.maximum(AGREEING * np.maximum(ns, other_ns), AGREEING_NS)
            if both.sum() >= LEAST_KERNELS and agrees[both].mean() >= SAME_WORK:
                found[of_rank[~both[key[of_rank]] | agrees[key[of_rank]]]] = other
                break
        else:
            first[one] = ns, has
    return found


def _other_difference(runs: _Executions, is_mostly_beside: Mask) -> str | None:
    """Return why the slowdown has another cause than communication; ``None`` if nothing shows that.

    It has another cause if kernels in steps that overlap communication are slower even when they run alone. These
    kernels are compared with the same kernels alone in other steps, on ranks with the same work or, if these have none,
    in the reference. If there are no other steps, the result is ``None``. ``is_mostly_beside`` marks the executions
    that communication overlaps for most of their time; steps with such an execution overlap communication.
    """
    _, step = distinct_rows(runs.rank, runs.step)
    in_communicating = np.isin(step, np.unique(step[is_mostly_beside]))
    sampled = runs.is_alone & ~in_communicating
    group = _by_work(runs, sampled)
    alone_ns, has_alone = medians_by_key(group, runs.duration_ns, sampled)
    control = runs.own & in_communicating & runs.is_alone & has_alone[group]
    if len(np.unique(runs.key[control])) < LEAST_KERNELS:
        return None
    duration, expected_ns = runs.duration_ns[control], alone_ns[group[control]]
    slowdown = float(duration.sum() / expected_ns.sum())
    # The bootstrap draws kernels, not steps: a kernel that is matched wrongly is slower in every step.
    low, high = _slowdown_interval(runs.key[control], duration, expected_ns) or (slowdown, slowdown)
    if low <= 1 + SAME and high >= 1 - SAME:
        return None
    return (
        f"kernels without communication beside them also take {slowdown:.2f} times as long in the "
        "steps that communicate: the steps differ otherwise, so contention cannot be measured"
    )


def _slowdown_interval(unit: Ints, taken_ns: Ints, expected_ns: Floats) -> tuple[float, float] | None:
    """Return the 95 % interval of the sum of ``taken_ns`` divided by the sum of ``expected_ns``.

    The bootstrap draws units (steps or kernels); ``unit`` is the number of each row's unit. ``None`` for too few units.
    """
    _, unit = np.unique(unit, return_inverse=True)
    sums = np.column_stack([np.bincount(unit, weights=taken_ns), np.bincount(unit, weights=expected_ns)])
    sums = sums[np.lexsort(sums.T)]  # what is drawn must not depend on the order in the file
    (interval,) = intervals_of_sums(sums, [lambda drawn: drawn[:, 0] / np.maximum(1.0, drawn[:, 1])])
    return interval
