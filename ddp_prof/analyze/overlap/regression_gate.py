"""A run held against requirements: what is not known fails, and a regression is one only beyond both runs' spread.

Two medians are taken for different where their notches do not overlap; a notch reaches 1.57 IQR / sqrt(n) to both sides
(McGill, Tukey and Larsen, "Variations of Box Plots", The American Statistician 32, 1978; about 95 % confidence). The
ranks of a step wait for one another, so n is the number of steps, not of measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddp_prof.analyze.overlap.overlap import RankOverlap, StepOverlap, TraceOverlap

LEAST_STEPS = 3
"""Steps of each rank from which a median has a spread."""

LEAST_IN_STEPS = 0.95
"""Share of a rank's communication that must belong to its steps, for these to stand for it."""

NOTCH = 1.57

DEFAULT_REGRESSION = 0.05

NO_STEPS = "no steps in this trace: see --step-range"

Unit = Literal["ratio", "ns", "ranks"]


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a run must meet; ``None`` where nothing is asked.

    Attributes:
        min_overlap: Least share of communication that compute hides, 0 to 1, on each rank.
        max_exposed_ns: Most exposed communication a step, in the median over the steps of each rank.
        max_tail_ns: Most communication after backward's last compute, likewise.
        baseline: Another run, than which steps may not be slower nor expose more.
        max_regression: By how much they may, as a share of the baseline.
        all_ranks: Whether the traces of every rank of the job must be there.
    """

    min_overlap: float | None = None
    max_exposed_ns: float | None = None
    max_tail_ns: float | None = None
    baseline: TraceOverlap | None = None
    max_regression: float = DEFAULT_REGRESSION
    all_ranks: bool = False


@dataclass(frozen=True, slots=True)
class GateResult:
    """How a run stands to one requirement.

    Attributes:
        unit: ``ratio``, ``ns`` a step, or ``ranks``; of all numbers here.
        measured: ``None`` where the trace does not tell it, and then ``status`` is ``unknown``.
        limit: What it may be at most, of an overlap and of ranks at least; ``None`` where it hangs on an unknown
            baseline.
        rank: The rank that decides, ``None`` where all do together.
        baseline: The median of the run compared with.
        spread: By how much two medians must differ to be told apart.
        reason: Why it is unknown, or passed although beyond the limit; else empty.
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
    """One run and its verdicts."""

    run: TraceOverlap
    verdicts: tuple[GateResult, ...]

    @property
    def passed(self) -> bool:
        """Whether something was required and all of it is met."""
        return bool(self.verdicts) and all(verdict.status == "passed" for verdict in self.verdicts)


def check_run(run: TraceOverlap, requirements: Requirements) -> GateReport:
    """Hold a run against each requirement."""
    return GateReport(run, tuple(_verdicts(run, requirements)))


def _verdicts(run: TraceOverlap, asked: Requirements) -> Iterator[GateResult]:
    if asked.all_ranks:
        yield _judge_presence(run)
    if asked.min_overlap is not None:
        yield _judge_worst(run, "min overlap", "ratio", asked.min_overlap, _overlap)
    if asked.max_exposed_ns is not None:
        yield _judge_worst(run, "max exposed", "ns", asked.max_exposed_ns, _median_exposed)
    if asked.max_tail_ns is not None:
        yield _judge_worst(run, "max tail", "ns", asked.max_tail_ns, _median_tail)
    if asked.baseline is not None:
        yield _judge_regression(run, asked.baseline, "step time", asked.max_regression, _step_times)
        yield _judge_regression(run, asked.baseline, "exposed", asked.max_regression, _exposed_times)


def _judge_presence(run: TraceOverlap) -> GateResult:
    if run.world_size is None:
        reason = "the traces do not tell how many ranks the job has"
        return GateResult("all ranks", "ranks", None, None, "unknown", reason)
    found = len(run.ranks)
    return GateResult("all ranks", "ranks", found, run.world_size, "passed" if found >= run.world_size else "failed")


def _judge_worst(
    run: TraceOverlap,
    requirement: str,
    unit: Unit,
    limit: float,
    measure: Callable[[RankOverlap], float | str],
) -> GateResult:
    """The worst rank decides. With an unknown rank nobody is known to be it, but a rank that fails is enough."""
    figures = [(measure(rank), rank) for rank in run.ranks]
    known = [(figure, rank) for figure, rank in figures if not isinstance(figure, str)]
    unknown = [(figure, rank) for figure, rank in figures if isinstance(figure, str)]
    if known:
        worst = min if unit == "ratio" else max
        measured, rank = worst(known, key=lambda value: value[0])
        met = measured >= limit if unit == "ratio" else measured <= limit
        if not (met and unknown):
            return GateResult(requirement, unit, measured, limit, "passed" if met else "failed", rank=rank)
    reason, unknown_rank = next(iter(unknown), ("no ranks in this trace", None))
    return GateResult(requirement, unit, None, limit, "unknown", reason, unknown_rank)


def _judge_regression(
    run: TraceOverlap,
    baseline: TraceOverlap,
    requirement: str,
    max_regression: float,
    measure: Callable[[RankOverlap], Sequence[int] | str],
) -> GateResult:
    """A regression exceeds the limit, and by more than both runs' notches it exceeds the baseline."""
    name = f"{requirement} against baseline"
    if run.device != baseline.device:
        reason = f"a run on {run.device} cannot be compared with one on {baseline.device}"
        return GateResult(name, "ns", None, None, "unknown", reason)
    after, before = _pool(run, measure), _pool(baseline, measure)
    if isinstance(before, str):
        measured = None if isinstance(after, str) else after.median
        return GateResult(name, "ns", measured, None, "unknown", f"baseline: {before}")
    limit = before.median * (1 + max_regression)
    if isinstance(after, str):
        return GateResult(name, "ns", None, limit, "unknown", after, baseline=before.median)
    spread = after.notch + before.notch
    beyond_limit, beyond_spread = after.median > limit, after.median - before.median > spread
    return GateResult(
        name,
        "ns",
        after.median,
        limit,
        "failed" if beyond_limit and beyond_spread else "passed",
        "beyond the limit, but within both runs' spread" if beyond_limit and not beyond_spread else "",
        baseline=before.median,
        spread=spread,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """The steps of all ranks: their median, and how far it may be off."""

    median: float
    notch: float


def _pool(run: TraceOverlap, measure: Callable[[RankOverlap], Sequence[int] | str]) -> _Sample | str:
    """The steps of all ranks together."""
    values: list[int] = []
    counts = []
    for rank in run.ranks:
        of_rank = measure(rank)
        if isinstance(of_rank, str):
            return of_rank
        values += of_rank
        counts.append(len(of_rank))
    if min(counts, default=0) < LEAST_STEPS:
        return f"fewer than {LEAST_STEPS} steps tell no spread"
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return _Sample(median, NOTCH * (high - low) / min(counts) ** 0.5)


# What follows gives figures, or a text: why they are not known.


def _overlap(rank: RankOverlap) -> float | str:
    if rank.overlap_ratio is None:
        return rank.reason or "no communication in this trace"
    if any(step.idle_ns is None for step in rank.steps):
        return "CUDA graphs were recorded whole, and so not the collectives in them"
    return rank.overlap_ratio


def _median_exposed(rank: RankOverlap) -> float | str:
    exposed = _exposed_times(rank)
    return exposed if isinstance(exposed, str) else float(np.median(exposed))


def _median_tail(rank: RankOverlap) -> float | str:
    steps = _communicating_steps(rank)
    if isinstance(steps, str):
        return steps
    tails = [step.tail_ns for step in steps if step.tail_ns is not None]
    if len(tails) < len(steps):
        return "steps whose backward is not known: see --backward-range"
    return float(np.median(tails))


def _step_times(rank: RankOverlap) -> Sequence[int] | str:
    times = [step.host_ns for step in rank.steps if step.host_ns is not None]
    return times or NO_STEPS


def _exposed_times(rank: RankOverlap) -> Sequence[int] | str:
    steps = _communicating_steps(rank)
    return steps if isinstance(steps, str) else [step.exposed_ns for step in steps]


def _communicating_steps(rank: RankOverlap) -> Sequence[StepOverlap] | str:
    """The steps that communicate: one that only accumulates gradients would meet any limit."""
    overlap = _overlap(rank)
    if isinstance(overlap, str):
        return overlap
    told = [step for step in rank.steps if step.host_ns is not None]
    if not told:
        return NO_STEPS
    if sum(step.comm_ns for step in told) < LEAST_IN_STEPS * (rank.comm_ns or 0):
        return "too much of the communication belongs to no step"
    return [step for step in told if step.comm_ns]
