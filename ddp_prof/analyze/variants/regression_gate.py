"""Check a run against requirements: limits of its figures, and no regression against a baseline.

A requirement whose figure is not known is not met. A limit applies to a percentile of the steps of the worst rank, by
default to their median. A regression must exceed the spread of both runs: two medians count as different if their
difference is larger than its interval reaches to either side; see :mod:`ddp_prof.analyze.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import NormalDist, fmean
from typing import Any, Literal

import numpy as np

from ddp_prof.analyze.overlap import LEAST_IN_STEPS, RankOverlap, TraceOverlap, keys_of
from ddp_prof.analyze.statistics import (
    LEAST_STEPS,
    StepFigure,
    half_width_of_change,
    half_width_of_steps,
    mean_per_draw,
    median_of_steps,
)
from ddp_prof.analyze.step_cost import StepCost
from ddp_prof.analyze.why_unknown import NO_COMMUNICATION, why_no_steps
from ddp_prof.manifest import Manifest

DEFAULT_REGRESSION = 0.05

MEDIAN, WORST = 50, 100
"""Percentiles of the steps."""

NO_STEPS = "no whole step in this trace: see --step-range"
NO_LENGTHS = "neither the host's ranges nor the device's work tell how long a step took"

Unit = Literal["ratio", "ns", "ranks"]
OfSteps = dict[int, int]
"""Nanoseconds of each measured step, by the step's key."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements that a run must meet; ``None`` for a figure without a limit.

    Attributes:
        min_overlap: Smallest accepted fraction (0 to 1) of communication that is overlapped on each rank.
        max_exposed_ns, max_tail_ns, max_blocking_ns: Largest accepted time per step, of each rank. The time of the step
            at ``percentile`` counts.
        baseline: Another run, with which step time and exposed communication are compared.
        max_regression: Largest accepted increase against the baseline, as a fraction of the baseline.
        all_ranks: Whether the traces of all ranks of the job are required.
        incomparable: Differences between run and baseline that make their times incomparable, one text each.
        percentile: The percentile (0 to 100) of a rank's steps to which the limits of times apply.
        max_cost_ns: Largest accepted cost of communication per step, at ``percentile``: the time that waits for it and
            the time by which it slows compute, see :class:`.StepCost`.
    """

    min_overlap: float | None = None
    max_exposed_ns: float | None = None
    max_tail_ns: float | None = None
    baseline: TraceOverlap | None = None
    max_regression: float = DEFAULT_REGRESSION
    all_ranks: bool = False
    incomparable: tuple[str, ...] = ()
    percentile: float = MEDIAN
    max_blocking_ns: float | None = None
    max_cost_ns: float | None = None


@dataclass(frozen=True, slots=True)
class GateResult:
    """The verdict on one requirement of a run; times are per step.

    Attributes:
        requirement: Name of the requirement, such as ``max exposed``.
        unit: The unit of all numbers of the verdict.
        measured: The figure of the run; ``None`` if not known, and ``status`` then is ``unknown``.
        limit: The largest accepted value (for overlap and ranks: the smallest); ``None`` if the baseline is not known.
        status: Whether the requirement is met.
        reason: Why the figure is not known, why the run passed although it is beyond the limit, or what the figure does
            not cover; else empty.
        rank: The rank that decides, which is the worst one; ``None`` if all ranks do.
        baseline: The figure of the baseline; ``None`` if there is none, or it is not known.
        spread: The difference from the baseline must be larger than this to count as a regression.
    """

    requirement: str
    unit: Unit
    measured: float | None
    limit: float | None
    status: Literal["passed", "failed", "unknown"]
    reason: str = ""
    rank: RankOverlap | None = None
    baseline: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class GateReport:
    """The verdicts on all requirements of a run."""

    run: TraceOverlap
    verdicts: tuple[GateResult, ...]

    @property
    def passed(self) -> bool:
        """Whether there are requirements, and all of them are met."""
        return bool(self.verdicts) and all(verdict.status == "passed" for verdict in self.verdicts)

    @property
    def fails_against_baseline(self) -> bool:
        """Whether a figure is worse than that of the baseline."""
        return any(verdict.status == "failed" and verdict.baseline is not None for verdict in self.verdicts)


StepCosts = Mapping[str, Sequence[StepCost]]
"""What communication costs each step of each rank, by the rank's name."""


def check_run(run: TraceOverlap, requirements: Requirements, costs: StepCosts | None = None) -> GateReport:
    """Check a run against requirements; ``costs``, those of its steps, are needed if a cost is limited."""
    return GateReport(run, tuple(_verdicts(run, requirements, costs)))


class _UnknownFigure(Exception):  # noqa: N818
    """A figure is not known; the message is the reason."""


def _verdicts(run: TraceOverlap, asked: Requirements, costs: StepCosts | None) -> Iterator[GateResult]:
    """Yield the verdict on each requirement."""
    if asked.all_ranks:
        yield _judge_presence(run)
    if asked.min_overlap is not None:
        yield _judge_worst(run, "min overlap", "ratio", asked.min_overlap, _overlap)
    limits = {"exposed": asked.max_exposed_ns, "tail": asked.max_tail_ns}
    which = ""
    if asked.percentile != MEDIAN:
        is_worst = asked.percentile == WORST
        which = ", worst step" if is_worst else f", percentile {asked.percentile:g} of steps"
    for what, limit in limits.items():
        if limit is not None:
            of_steps = partial(_at_percentile, f"{what}_ns", asked.percentile)
            yield _judge_worst(run, f"max {what}{which}", "ns", limit, of_steps)
    if asked.max_blocking_ns is not None:
        yield _judge_blocking(run, f"max blocking{which}", asked.max_blocking_ns, asked.percentile)
    if asked.max_cost_ns is not None and costs is not None:
        yield _judge_cost(run, f"max cost{which}", asked.max_cost_ns, asked.percentile, costs)
    if asked.baseline is not None and asked.incomparable:
        reason = f"not comparable with the baseline: {', '.join(asked.incomparable)}"
        for name in ("step time against baseline", "exposed against baseline"):
            yield GateResult(name, "ns", None, None, "unknown", reason)
    elif asked.baseline is not None:
        exposed = partial(_times, "exposed_ns")
        yield _judge_regression(run, asked.baseline, "step time", asked.max_regression, _step_times)
        yield _judge_regression(run, asked.baseline, "exposed", asked.max_regression, exposed)


def _at_percentile(name: str, percentile: float, rank: RankOverlap) -> float:
    """Return the percentile of an attribute of the rank's steps; raises :class:`_UnknownFigure`."""
    return float(np.percentile(list(_times(name, rank).values()), percentile))


def _judge_blocking(run: TraceOverlap, requirement: str, limit: float, percentile: float) -> GateResult:
    """Judge the time in which something stands still; where it is not known, its upper limit may be below ``limit``."""
    verdict = _judge_worst(run, requirement, "ns", limit, partial(_at_percentile, "blocking_ns", percentile))
    waits = sum(rank.dependencies.host_waits for rank in run.ranks if rank.dependencies)
    if verdict.status == "passed" and waits:
        reason = f"of streams only: what the host's own waits for collectives cost is not included ({waits})"
        return replace(verdict, reason=reason)
    if verdict.status == "unknown":
        of_steps = partial(_at_percentile, "blocking_at_most_ns", percentile)
        at_most = _judge_worst(run, requirement, "ns", limit, of_steps)
        if at_most.status == "passed":
            return replace(at_most, reason="measured: an upper limit, from the times of launches")
    return verdict


def _judge_cost(run: TraceOverlap, requirement: str, limit: float, percentile: float, costs: StepCosts) -> GateResult:
    """Judge the sum of blocking and contention of each step.

    Where it is not known, its upper limit may be below the accepted value, or its lower limit above.
    """

    def of_steps(end: str, rank: RankOverlap) -> float:
        """Return the percentile of the costs of a rank's steps.

        ``end`` is "" for the costs themselves, "low_" and "high_" for their limits. Raises :class:`_UnknownFigure`.
        """
        _overlap(rank)  # raises if it is not known
        chosen = {id(step) for step in rank.communicating_steps}
        pairs = zip(rank.steps, costs[rank.name], strict=True)
        steps = [found for step, found in pairs if id(step) in chosen and found.step_ns is not None]
        if not steps:
            raise _UnknownFigure(NO_LENGTHS if rank.marked_steps else NO_STEPS)
        parts_ns = [(getattr(step, f"blocking_{end}ns"), getattr(step, f"contention_{end}ns")) for step in steps]
        if any(None in of_step for of_step in parts_ns):
            reasons = [
                step.reasons[part] for part in ("contention", "blocking") for step in steps if part in step.reasons
            ]
            raise _UnknownFigure(reasons[0] if reasons else "the interval of contention is not known")
        return float(np.percentile([sum(of_step) for of_step in parts_ns], percentile))

    verdict = _judge_worst(run, requirement, "ns", limit, partial(of_steps, ""))
    if verdict.status != "unknown":
        return verdict
    at_most = _judge_worst(run, requirement, "ns", limit, partial(of_steps, "high_"))
    if at_most.status == "passed":
        return replace(at_most, reason="measured: an upper limit, as not all of the cost is known")
    at_least = _judge_worst(run, requirement, "ns", limit, partial(of_steps, "low_"))
    if at_least.status == "failed":
        return replace(at_least, reason="measured: a lower limit, as not all of the cost is known")
    return verdict


def _judge_presence(run: TraceOverlap) -> GateResult:
    """Judge whether all ranks of the job are present; two files of a rank, or two devices of a process, count once."""
    found = run.rank_numbers
    if run.world_size is None or found is None:
        what = "how many ranks the job has" if run.world_size is None else "which process is which rank"
        return GateResult("all ranks", "ranks", None, None, "unknown", f"the traces do not tell {what}")
    passed = len(found) >= run.world_size
    return GateResult("all ranks", "ranks", len(found), run.world_size, "passed" if passed else "failed")


def _judge_worst(
    run: TraceOverlap, requirement: str, unit: Unit, limit: float, measure: Callable[[RankOverlap], float]
) -> GateResult:
    """Judge a figure by the worst rank.

    If the figure of some rank is not known, the verdict is ``unknown``, unless another rank fails.

    Args:
        run: The run.
        requirement: Name of the requirement.
        unit: Unit of figure and limit; a ratio must be at least the limit, other figures at most the limit.
        limit: The limit.
        measure: Returns the figure of a rank, or raises :class:`_UnknownFigure`.
    """
    known, unknown = [], []
    for rank in run.job_ranks:
        try:
            known.append((measure(rank), rank))
        except _UnknownFigure as why:  # noqa: PERF203  # each rank by itself
            unknown.append((str(why), rank))
    if known:
        worst = min if unit == "ratio" else max
        measured, decides = worst(known, key=lambda value: value[0])
        met = measured >= limit if unit == "ratio" else measured <= limit
        if not (met and unknown):
            return GateResult(requirement, unit, measured, limit, "passed" if met else "failed", rank=decides)
    reason, of_rank = unknown[0] if unknown else ("no ranks in this trace", None)
    if not known and len({why for why, _ in unknown}) == 1 < len(unknown):
        of_rank = None  # all ranks alike
    return GateResult(requirement, unit, None, limit, "unknown", reason, of_rank)


def _judge_regression(
    run: TraceOverlap,
    baseline: TraceOverlap,
    requirement: str,
    max_regression: float,
    measure: Callable[[RankOverlap], OfSteps],
) -> GateResult:
    """Judge whether a figure got worse than in the baseline.

    It fails if the median exceeds that of the baseline by more than the accepted increase, and also by more than the
    spread of both runs. Where it does not, the mean is judged likewise: where every second step takes twice as long,
    the median may be any of these steps. Its spread is wider, as two chances to fail are given.

    Args:
        run: The run.
        baseline: The run with which it is compared.
        requirement: What is compared, such as ``step time``.
        max_regression: The largest accepted increase, as a fraction of the baseline.
        measure: Returns the figure of each step of a rank, or raises :class:`_UnknownFigure`.
    """
    name = f"{requirement} against baseline"
    if run.device != baseline.device:
        reason = f"a run on {run.device} cannot be compared with one on {baseline.device}"
        return GateResult(name, "ns", None, None, "unknown", reason)
    after, before = (_median_over_ranks(one, measure) for one in (run, baseline))
    if isinstance(before, str):
        measured = None if isinstance(after, str) else after.value
        return GateResult(name, "ns", measured, None, "unknown", f"baseline: {before}")
    limit = before.value * (1 + max_regression)
    if isinstance(after, str):
        return GateResult(name, "ns", None, limit, "unknown", after, baseline=before.value)
    verdict = _compare(name, before, after, max_regression)
    if verdict.status == "passed":
        mean_before, mean_after = (_mean_over_ranks(one, measure) for one in (baseline, run))
        of_means = _compare(name, mean_before, mean_after, max_regression, wider=_TWO_CHANCES)
        if of_means.status == "failed":
            return replace(of_means, reason="means of the steps: their medians are not beyond limit and spread")
    return verdict


def _compare(name: str, before: StepFigure, after: StepFigure, max_regression: float, wider: float = 1) -> GateResult:
    """Compare a figure with that of the baseline; ``wider`` is a factor of their spread."""
    # Both conditions must hold to fail; where only the limit is exceeded, the reason says so.
    limit = before.value * (1 + max_regression)
    spread = wider * half_width_of_change(after.half_width or 0, before.half_width or 0)
    beyond_limit, beyond_spread = after.value > limit, after.value - before.value > spread
    return GateResult(
        name,
        "ns",
        after.value,
        limit,
        "failed" if beyond_limit and beyond_spread else "passed",
        "beyond the limit, but within both runs' spread" if beyond_limit and not beyond_spread else "",
        baseline=before.value,
        spread=spread,
    )


_TWO_CHANCES = NormalDist().inv_cdf(1 - 0.05 / 4) / NormalDist().inv_cdf(1 - 0.05 / 2)
"""How much wider an interval of 95 % is that misses the true value half as often."""


def _median_over_ranks(run: TraceOverlap, measure: Callable[[RankOverlap], OfSteps]) -> StepFigure | str:
    """Return the median over the steps of all ranks, or a text that says why it is not known."""
    try:
        by_rank = [measure(rank) for rank in run.job_ranks]
        found = median_of_steps([list(times.values()) for times in by_rank], [list(times) for times in by_rank])
    except _UnknownFigure as why:
        return str(why)
    is_known = found is not None and found.half_width is not None
    return found if found and is_known else f"fewer than {LEAST_STEPS} steps, so no spread is known"


def _mean_over_ranks(run: TraceOverlap, measure: Callable[[RankOverlap], OfSteps]) -> StepFigure:
    """Return the mean over the steps of all ranks, of which the median is known."""
    by_rank = [measure(rank) for rank in run.job_ranks]
    values, keys = [list(times.values()) for times in by_rank], [list(times) for times in by_rank]
    return StepFigure(fmean(chain(*values)), half_width_of_steps(values, mean_per_draw, keys))


def _overlap(rank: RankOverlap) -> float:
    """Return the overlap ratio of a rank; raises :class:`_UnknownFigure`."""
    if rank.overlap_ratio is None:
        raise _UnknownFigure(rank.reason or NO_COMMUNICATION)
    return rank.overlap_ratio


def _step_times(rank: RankOverlap) -> OfSteps:
    """Return the length of each step of a rank; raises :class:`_UnknownFigure`."""
    if not rank.lengths_ns:
        raise _UnknownFigure(NO_LENGTHS if rank.marked_steps else why_no_steps([rank.reason], NO_STEPS))
    return dict(zip(keys_of(rank.timed_steps), rank.lengths_ns, strict=True))


def _times(name: str, rank: RankOverlap) -> OfSteps:
    """Return an attribute of each step of a rank that communicates, in nanoseconds; raises :class:`_UnknownFigure`.

    Steps that only accumulate gradients do not count: they would meet any limit.
    """
    _overlap(rank)  # raises if it is not known how much is overlapped: then these times are not known either
    if not rank.marked_steps:
        raise _UnknownFigure(NO_STEPS)
    if sum(step.comm_ns or 0 for step in rank.marked_steps) < LEAST_IN_STEPS * (rank.comm_ns or 0):
        raise _UnknownFigure("too much of the communication belongs to no step")
    if rank.exposed_between_ns > (1 - LEAST_IN_STEPS) * (rank.exposed_ns or 0):
        raise _UnknownFigure("too much of the exposed communication belongs to no step")
    times = [getattr(step, name) for step in rank.communicating_steps]
    if None in times and name == "tail_ns":
        raise _UnknownFigure("steps whose backward is not known: see --backward-range")
    if None in times:
        unknown = rank.dependencies.reason if rank.dependencies else None
        raise _UnknownFigure(unknown or "it is not known what some of its steps waited for")
    return dict(zip(keys_of(rank.communicating_steps), times, strict=True))


def find_differences(
    run: TraceOverlap,
    baseline: TraceOverlap,
    manifest: Manifest | None = None,
    baseline_manifest: Manifest | None = None,
) -> tuple[str, ...]:
    """Return the differences that make two runs incomparable, one text each, such as "ranks 2 and 4".

    They are found in the traces and in both ``run.json``. The variant and its settings may differ, since these are what
    is compared. A value that one of the traces does not contain is no difference.
    """
    pairs: list[tuple[str, Any, Any]]
    pairs = [("ranks", run.world_size, baseline.world_size), ("GPUs", _gpus(run), _gpus(baseline))]
    found = {what: f"{what} {own} and {other}" for what, own, other in pairs if own and other and own != other}
    if manifest is None or baseline_manifest is None:
        return tuple(found.values())
    pairs = [(what, getattr(manifest, name), getattr(baseline_manifest, name)) for name, what in _SAME.items()]
    pairs.append(("GPUs", manifest.machine.get("gpus") or "none", baseline_manifest.machine.get("gpus") or "none"))
    by_manifest = {what: f"{what} {own} and {other}" for what, own, other in pairs if own != other}
    return tuple((by_manifest | found).values())


def _gpus(run: TraceOverlap) -> str | None:
    """Return the names of the GPUs of all ranks; ``None`` if one is not known."""
    names = {rank.gpu for rank in run.ranks}
    return None if None in names else ", ".join(sorted(map(str, names)))


_SAME = {
    "model_size": "model",
    "batch_size": "batch size",
    "seq_len": "sequence length",
    "world_size": "ranks",
    "device": "device",
    "backend": "backend",
}
"""The attributes of a manifest that must be equal for times to be comparable, with the words for them."""
