"""What communication costs a run: waits for it, and the slowdown of compute; and how much could be gained at most.

No other schedule can gain more than the time in which something waits: it can hide communication, but not avoid the
slowdown of the compute beside it. No faster network can gain more than this time and the slowdown together. See
:mod:`.step_cost` for the parts of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame_from_rows
from ddp_prof.analyze.statistics import FEW_STEPS
from ddp_prof.analyze.step_columns import StepOverlap
from ddp_prof.analyze.step_cost import (
    NO_BLOCKING,
    NO_LENGTH,
    NO_OVERLAP,
    ON_CPU,
    PARTS,
    Slowed,
    StepCost,
    divide_step,
    find_slowed,
)
from ddp_prof.analyze.variants.comparison import VariantSummary, compare_variants, waits_at_most_ns


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of communication in a step of a run, or of a rank: medians over the steps that communicate.

    Attributes:
        blocking_ns: Time in which something stands still for communication; ``None`` if not known.
        blocking_reason: Why ``blocking_ns`` is not known; ``None`` if it is.
        contention_ns: How much longer the compute beside communication takes than alone; ``None`` if not known.
        contention_low_ns, contention_high_ns: Its 95 % interval. If the slowdown is not known, 0 and all time beside
            communication; ``None`` if that time is not known either.
        kappa: How many times as long the same kernels take beside communication, see :class:`Contention`. The cost of a
            rank has the kappa of its run.
        kernels_compared: Number of different kernels from which ``kappa`` was measured.
        reason: Why ``contention_ns``, or its interval, is not known; ``None`` if both are.
        medians_ns: By name of each part of :class:`StepCost`, and for ``step``: its median. Medians need not sum. It is
            ``None`` for a part that is not known in some step.
    """

    blocking_ns: int | None
    contention_ns: int | None
    contention_low_ns: int | None
    contention_high_ns: int | None
    kappa: float | None
    kernels_compared: int
    reason: str | None
    medians_ns: dict[str, int | None] | None = None
    blocking_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a step could gain at most; ``None`` if not known, for ``reason``.

    Attributes:
        schedule_ns: Gain if all communication were hidden: blocking time, or exposed time if that is not known.
        network_ns: Gain if communication took no time and no part of the GPU: ``schedule_ns`` and contention, or the
            median over steps of the sum of both, if that is more.
        low_ns, high_ns: The interval of ``network_ns``, from that of contention.
    """

    schedule_ns: int | None
    network_ns: int | None
    low_ns: int | None
    high_ns: int | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RankCost:
    """The cost for one rank; ``steps`` has an element for each of the rank's steps, in their order."""

    name: str
    cost: Cost
    bounds: Bounds
    steps: tuple[StepCost, ...]


@dataclass(frozen=True, slots=True)
class RunCost(FrameResult):
    """What communication costs in a run: a typical step, and each step of each rank."""

    cost: Cost
    bounds: Bounds
    ranks: tuple[RankCost, ...]

    @property
    def steps(self) -> dict[str, tuple[StepCost, ...]]:
        """The steps of each rank, by the rank's name."""
        return {rank.name: rank.steps for rank in self.ranks}

    def to_frame(self) -> DataFrame:
        """Return a table with one row per step of each rank; times are in nanoseconds."""
        names = [field.name for field in fields(StepCost) if field.name not in ("reasons", "standstill_by_ns")]
        rows = [
            {"rank": rank.name, "position": at} | {name: getattr(step, name) for name in names}
            for rank in self.ranks
            for at, step in enumerate(rank.steps)
        ]
        return make_frame_from_rows(["rank", "position", *names], rows)


def measure_run_cost(result: TraceOverlap, measure_contention: Callable[[], Contention]) -> RunCost:
    """Return the cost of communication in a run; for ``measure_contention`` see :func:`contention_of`."""
    (summary,) = compare_variants([result])
    contention = contention_of(summary, measure_contention)
    slowed = find_slowed(contention, summary.device)
    of_ranks = [
        [divide_step(step, slowed, rank.dependencies.reason if rank.dependencies else None) for step in rank.steps]
        for rank in result.ranks
    ]

    def bounds_of(summary: VariantSummary, cost: Cost, ranks: Sequence[RankOverlap]) -> Bounds:
        """Return the bounds of a step of these ranks."""
        return find_bounds(summary, cost, [step for rank in ranks for step in rank.communicating_steps], slowed)

    def add_medians(cost: Cost, ranks: Sequence[int]) -> Cost:
        """Return the cost with medians over the steps that communicate, of the ranks with these indices."""
        chosen = []
        for rank in ranks:
            communicating = {id(step) for step in result.ranks[rank].communicating_steps}
            pairs = zip(result.ranks[rank].steps, of_ranks[rank], strict=True)
            chosen += [found for step, found in pairs if id(step) in communicating and found.step_ns is not None]
        return replace(cost, medians_ns=_medians(chosen))

    # Each rank's cost is measured like that of a run with this rank only.
    costs = []
    for at, rank in enumerate(result.ranks):
        (own,) = compare_variants([replace(result, ranks=(rank,))]) if len(result.ranks) > 1 else (summary,)
        cost = add_medians(_with_blocking_reason(measure_cost(own, contention), [rank]), [at])
        costs.append(RankCost(rank.name, cost, bounds_of(own, cost, [rank]), tuple(of_ranks[at])))
    cost = _with_blocking_reason(measure_cost(summary, contention), result.ranks)
    cost = add_medians(cost, range(len(result.ranks)))
    return RunCost(cost, bounds_of(summary, cost, result.ranks), tuple(costs))


def contention_of(summary: VariantSummary, measure_contention: Callable[[], Contention]) -> Contention:
    """Return the contention in a run; ``measure_contention`` is called only if something may be slowed."""
    may_slow = summary.device != "cpu" and summary.overlapped_ns
    return measure_contention() if may_slow else Contention()


def _with_blocking_reason(cost: Cost, ranks: Sequence[RankOverlap]) -> Cost:
    """Return the cost with the reason why its blocking time is not known: the first one that a rank has."""
    if cost.blocking_ns is not None:
        return cost
    reasons = (rank.dependencies.reason if rank.dependencies else rank.reason for rank in ranks)
    return replace(cost, blocking_reason=next(filter(None, reasons), NO_BLOCKING))


def _medians(steps: Sequence[StepCost]) -> dict[str, int | None] | None:
    """Return by name of each part, and for ``step``, its median in ns: ``None`` if it is not known in some step.

    Without steps, the result is ``None``.
    """
    if not steps:
        return None
    columns = {name: [getattr(step, f"{name}_ns") for step in steps] for name in ("step", *PARTS)}
    return {name: None if None in column else round(median(column)) for name, column in columns.items()}


def measure_cost(summary: VariantSummary, contention: Contention) -> Cost:
    """Return what communication costs a step of a run; ``contention`` is that of the run's kernels."""

    def unknown(reason: str, high_ns: int | None) -> Cost:
        """Return a cost without contention, which is at most ``high_ns`` if that is known."""
        low_ns = None if high_ns is None else 0
        return Cost(summary.blocking_ns, None, low_ns, high_ns, None, contention.kernels, reason)

    slowed, overlapped_ns = find_slowed(contention, summary.device), summary.overlapped_ns
    if summary.device == "cpu":
        return unknown(ON_CPU, None)
    if overlapped_ns is None or summary.reason:
        return unknown(summary.reason or NO_OVERLAP, None)
    contention_ns, low_ns, high_ns = slowed.of(overlapped_ns)
    if contention_ns is None:
        return unknown(slowed.reason or NO_OVERLAP, overlapped_ns)
    return Cost(
        blocking_ns=summary.blocking_ns,
        contention_ns=contention_ns,
        contention_low_ns=low_ns,
        contention_high_ns=high_ns,
        kappa=contention.slowdown,
        kernels_compared=contention.kernels,
        reason=None if low_ns is not None and high_ns is not None else FEW_STEPS,
    )


def find_bounds(
    summary: VariantSummary, cost: Cost, steps: Sequence[StepOverlap] = (), slowed: Slowed | None = None
) -> Bounds:
    """Return upper limits of what another schedule, and what another network, can gain in a step.

    Args:
        summary: The figures of the run.
        cost: The cost of communication in a step of it.
        steps: Its steps that communicate. A step with little to hide may have much contention, so the median of their
            sums may be above the sum of the medians.
        slowed: Which fraction of the time beside communication is contention.
    """
    if summary.gain_at_most is None or not summary.communicating_step_ns:
        return Bounds(None, None, None, None, summary.reason or cost.reason or NO_LENGTH)
    schedule_ns = round(summary.gain_at_most * summary.communicating_step_ns)

    # Of each step what waits, and what is slowed, compute and copies: the estimate, and the ends of its interval.
    of_steps = [
        (waits_ns, slowed.of(step.length.overlapped_ns + _beside_copies_ns(step, waits_ns)))
        for step, waits_ns in ((step, waits_at_most_ns(summary, step)) for step in steps)
        if slowed is not None and step.length.overlapped_ns is not None
    ]

    def with_contention(contention_ns: int | None, which: int) -> int | None:
        """Return the gain of a schedule and this contention together; ``None`` if the contention is not known."""
        if contention_ns is None:
            return None
        sums = [waits_ns + (contention[which] or 0) for waits_ns, contention in of_steps]
        return max(schedule_ns + contention_ns, round(median(sums)) if sums else 0)

    return Bounds(
        schedule_ns=schedule_ns,
        network_ns=with_contention(cost.contention_ns, 0),
        low_ns=with_contention(cost.contention_low_ns, 1),
        high_ns=with_contention(cost.contention_high_ns, 2),
        reason=cost.reason,
    )


def _beside_copies_ns(step: StepOverlap, waits_ns: int) -> int:
    """Return for how long at most copies run beside communication that nothing waits for, such as those out of buckets.

    Communication slows them as it does compute. They run in what is exposed and in which nothing waits; ``waits_ns`` is
    how long something does.
    """
    return max(0, (step.length.exposed_ns or 0) - waits_ns)
