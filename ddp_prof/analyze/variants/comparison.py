"""Compare variants: how long a step takes, how much of its communication is overlapped, and the speed-up over naive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from ddp_prof.analyze.core.blocking import ON_OTHER_DEVICE
from ddp_prof.analyze.overlap import TraceOverlap, keys_of
from ddp_prof.analyze.statistics import RatioOfRepeats, half_width_of_change, half_width_of_steps, ratio_of_repeats
from ddp_prof.analyze.step_columns import StepLength, StepOverlap, hide
from ddp_prof.analyze.typical import PARTS, distances_from_medians, find_typical_step
from ddp_prof.analyze.variants.regression_gate import find_differences
from ddp_prof.analyze.why_unknown import GRAPHS, NOT_TIMED, reason_of_run
from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, Hidden, column, derived
from ddp_prof.manifest import Manifest
from ddp_prof.variants import UNKNOWN_VARIANT, VARIANTS, is_baseline, variant_and_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """The figures of one run.

    Each time is a median over the steps of all ranks, except for the parts of a whole, which add up to it:
    ``overlapped_ns`` and ``exposed_ns`` to ``comm_ns``, and ``parts_ns`` to ``nearest_step_ns``. ``step_ns`` is the
    median over all steps. The other times are medians over the steps that communicate (steps that only accumulate
    gradients do not), or over all steps if none communicates. A time is ``None`` if it is not known, as in a capture
    without steps.
    """

    label: str = column("the variant of data parallelism", key="variant", stays=ALWAYS, describes=True)
    device: str = column("kind of device", stays=WITH_ROOM, describes=True)
    ranks: int = column("ranks of the job that were measured", stays=WITH_ROOM)
    steps: int = column("steps of the rank with most of these", stays=USUALLY)
    step_ns: int | None = column("median length of a step", null="no step has a known length", stays=ALWAYS)
    step_spread_ns: int | None = column(
        "interquartile range of the lengths of steps", null="of a single step", key="spread_ms", stays=WITH_ROOM
    )
    collectives: float | None = column(
        "collectives per step", null="none is known, and their time is not known either", stays=WITH_ROOM
    )
    comm_ns: int | None = column("communication", null="not known", stays=USUALLY)
    communicating_step_ns: int | None = column(
        "median length of a step that communicates", default=None, null="no such step has a known length"
    )
    overlapped_ns: int | None = column(
        "``comm_ns`` without ``exposed_ns``, which are medians", null="one of them is not known", stays=WITH_ROOM
    )
    exposed_ns: int | None = column(
        "communication without compute at the same time",
        null="no steps are marked, or ``reason`` says why",
        stays=ALWAYS,
    )
    blocking_ns: int | None = column(
        "time in which a stream (on a CPU: the host) stood still for communication",
        default=None,
        null="of some step it is not known",
        stays=USUALLY,
    )
    slowed_ns: int | None = column(
        "contention: what communication slows the compute beside it by",
        default=None,
        null="kernels were not compared, or too few of them",
        stays=WITH_MUCH_ROOM,
        in_document=False,  # the run's cost has it
    )
    tail_ns: int | None = column(
        "exposed communication after the last compute of backward", null="of some step it is not known", stays=USUALLY
    )
    exposed_memory_ns: int | None = column(
        "memory copies without compute or communication, in the step that is nearest to all medians",
        default=None,
        null="its parts are not known",
        stays=WITH_MUCH_ROOM,
    )
    overlap_ratio: float | None = column(
        "share of all communication of all ranks that compute hides", null="not known", key="overlap_%", stays=ALWAYS
    )
    backward_overlap_ratio: float | None = column(
        "share of it that compute of backward hides", null="not known", key="in_backward_%", stays=WITH_ROOM
    )
    speedup: float | None = column(
        "step time of the baseline over that of this run",
        null="there is no baseline on this kind of device, or ``confounded_by`` or ``other_job`` says why",
        stays=USUALLY,
        decimals=2,
    )
    overlap_ratio_without_outliers: float | None = column(
        "``overlap_ratio`` without the steps that stand out", default=None, null="no steps do"
    )
    window_ns: int | None = column("from the first to the last work of a step", default=None, null="not known")
    nearest_step_ns: int | None = column(
        "length of the step that is nearest to all medians", default=None, null="its parts are not known"
    )
    compute_only_ns: int | None = column(
        "compute without communication in that step", default=None, null="its parts are not known"
    )
    idle_ns: int | None = column("idle time in that step", default=None, null="its parts are not known")
    parts_ns: Mapping[str, int | None] = column(
        "the parts of that step by name, which sum to its length",
        default_factory=lambda: dict.fromkeys(PARTS),
        null="each is null if they are not known",
    )
    blocking_at_most_ns: int | None = column(
        "upper limit of ``blocking_ns``", default=None, null="of some step it is not known"
    )
    hideable_ns: int | None = column(
        "what hiding communication gains at most where ``blocking_ns`` is known: this time or, if that is less, the "
        "time in which the stream with most compute runs nothing of its own",
        default=None,
        null="``blocking_ns`` is",
    )
    blocked_steps: int | None = column(
        "steps of all ranks in which something stood still", default=None, null="of some step it is not known"
    )
    reason: str | None = column("why exposed time, or the overlap, is not known", default=None, null="both are known")
    host_waits: int = column("how often a host waited for a collective, over all ranks", default=0)
    host_waits_usually: bool = column(
        "whether a host waited for a collective in at least half of the steps that communicate", default=False
    )
    serves_other_devices: bool = column(
        "whether devices of a process wait for each other's communication, so that exposed time bounds no gain",
        default=False,
        in_document=False,
    )
    communicating_steps: int = column("steps that communicate, of the rank with most of these", default=0)
    others_communicate: bool = column("whether other steps communicate, too, but not in backward", default=False)
    world_size: int | None = column("ranks of the job", default=None, null="not known")
    speedup_low: float | None = column(
        "lower end of the 95 % interval of the speed-up: over the rounds of turns, else by the intervals of both "
        "medians, for these two captures alone",
        default=None,
        null="not known",
    )
    speedup_high: float | None = column("upper end of it", default=None, null="not known")
    supported: bool | None = column("whether that interval excludes 1", default=None, null="not known")
    confounded_by: str | None = column(
        "what explains most of the difference: ``compute``, which no variant changes, as if the machine was busier "
        "during one of the captures, or ``compute beside communication``, which communication may slow as well",
        default=None,
        null="nothing",
    )
    other_job: str | None = column(
        "what differs beside the variant, such as ``ranks 8 and 2``, from the baseline or, without one, from the first "
        "run: then there is no speed-up",
        default=None,
        null="nothing is known to",
    )
    speedup_from: str | None = column(
        "where the speed-up comes from: ``turns`` or ``captures``", default=None, null="there is none"
    )
    turns_ns: Mapping[str, float] = column(
        "median step of each round of training in turns, unprofiled; empty without turns", default_factory=dict
    )
    # Drawing steps (bootstrap) takes longer than all other figures, and most tables do not show its result.
    find_step_half_width: Callable[[], int | None] | None = field(default=None, repr=False, compare=False)
    find_exposed_half_width: Callable[[], int | None] | None = field(default=None, repr=False, compare=False)

    @property
    @derived("how far the 95 % interval of ``step_ns`` reaches from it", null="too few steps", after="speedup")
    def step_half_width_ns(self) -> int | None:
        """How far the interval of ``step_ns`` reaches from it."""
        return self.find_step_half_width() if self.find_step_half_width else None

    @property
    @derived(
        "how far the 95 % interval of ``exposed_ns`` reaches from it", null="too few steps", after="step_half_width_ns"
    )
    def exposed_half_width_ns(self) -> int | None:
        """How far the interval of ``exposed_ns`` reaches from it."""
        return self.find_exposed_half_width() if self.find_exposed_half_width else None

    @property
    @derived(
        "communication, hidden or not, as a share of the step",
        key="comm_of_step_%",
        null="not known",
        stays=USUALLY,
        in_document=False,
        after="comm_ns",
    )
    def communication_ratio(self) -> float | None:
        """Communication of a step that communicates, overlapped or not, divided by the length of such a step."""
        if self.reason == GRAPHS:  # more of it may be in them
            return None
        return self.comm_ns / self.communicating_step_ns if self.comm_ns and self.communicating_step_ns else None

    @property
    @derived(
        "half of the 95 % interval of the speed-up",
        key="speedup_±",
        null="not known",
        stays=USUALLY,
        decimals=2,
        in_document=False,
        after="speedup",
    )
    def speedup_half_width(self) -> float | None:
        """Half of the interval from ``speedup_low`` to ``speedup_high``."""
        low, high = self.speedup_low, self.speedup_high
        return None if low is None or high is None else (high - low) / 2

    def is_as_fast_as(self, other: VariantSummary) -> bool:
        """Return whether the steps of two runs differ by no more than the interval of the difference.

        ``False`` if the interval is not known.
        """
        if self.speedup_from == TURNS:
            found = ratio_in_turns(self, other)
            return found is not None and not found.is_clear
        if self.step_ns is None or other.step_ns is None:
            return False
        half_widths = self.step_half_width_ns, other.step_half_width_ns
        known = [half_width for half_width in half_widths if half_width is not None]
        return len(known) == 2 and abs(self.step_ns - other.step_ns) <= half_width_of_change(*known)

    @property
    def gain_at_most(self) -> float | None:
        """Upper limit of the fraction (0 to 1) of a communicating step that overlapping all communication would save.

        If the blocking time is known and in most steps no host waited for communication, the limit is ``hideable_ns``.
        Otherwise it is the smaller one of the exposed time and ``blocking_at_most_ns``, but not less than
        ``hideable_ns``. ``None`` if not known, as when another device waits, or if the exposed time is longer than the
        step, as when communication runs during later steps.
        """
        exposed_ns, whole_ns = self.exposed_ns, self.communicating_step_ns
        if self.reason or self.serves_other_devices or not whole_ns or exposed_ns is None or exposed_ns > whole_ns:
            return None
        hideable_ns = self.blocking_ns if self.hideable_ns is None else self.hideable_ns
        if hideable_ns is not None and not self.host_waits_usually:
            return hideable_ns / whole_ns
        limits_ns = (exposed_ns, self.blocking_at_most_ns)
        limit_ns = min(limit_ns for limit_ns in limits_ns if limit_ns is not None)
        return max(limit_ns, hideable_ns or 0) / whole_ns


TURNS, CAPTURES = "turns", "captures"
"""How a speed-up was measured: by training in turns, see :mod:`ddp_prof.benchmark.turns`, or by the captured steps."""


def compare_variants(
    results: Sequence[TraceOverlap],
    turns: Mapping[Path, Mapping[str, float]] | None = None,
    manifests: Sequence[Manifest | None] = (),
) -> tuple[VariantSummary, ...]:
    """Summarize runs, with their speed-ups over the run of the variant ``naive``, if there is one.

    A run of another job, with other ranks, GPUs or another model, has no speed-up: ``other_job`` says what differs from
    that run or, without it, from the first one.

    Args:
        results: The runs.
        turns: For each run, under its first file: the median step of each round of training in turns, by the round. If
            these times are known for ``naive``, all speed-ups come from them, and runs without them have no speed-up.
        manifests: The ``run.json`` of each run; ``None`` for a run without one.
    """
    summaries = tuple(replace(_summarize(result), turns_ns=(turns or {}).get(result.trace, {})) for result in results)
    base = next((position for position, summary in enumerate(summaries) if is_baseline(summary.label)), None)
    reference, settings = base or 0, [*manifests] or [None] * len(results)
    differing = [
        find_differences(result, results[reference], own, settings[reference])
        for result, own in zip(results, settings, strict=True)
    ]
    if base is None:
        return tuple(
            replace(summary, other_job=", ".join(differs) or None)
            for summary, differs in zip(summaries, differing, strict=True)
        )
    naive = summaries[base]
    with_speedup = _with_speedup_in_turns if naive.turns_ns else _with_speedup
    return tuple(
        replace(summary, other_job=", ".join(differs)) if differs else with_speedup(summary, naive)
        for summary, differs in zip(summaries, differing, strict=True)
    )


def ratio_in_turns(before: VariantSummary, after: VariantSummary) -> RatioOfRepeats | None:
    """Return the step time of ``before`` divided by that of ``after``, by the rounds of turns that both runs have.

    ``None`` for fewer than three such rounds.
    """
    common = [ns / after.turns_ns[key] for key, ns in before.turns_ns.items() if after.turns_ns.get(key)]
    return ratio_of_repeats(common)


def _with_speedup_in_turns(run: VariantSummary, naive: VariantSummary) -> VariantSummary:
    """Add the speed-up over the naive run by training in turns, if it is known."""
    found = ratio_in_turns(naive, run)
    if found is None or run.device != naive.device:
        return run
    if run is naive:
        return replace(run, speedup=1.0, speedup_from=TURNS)
    return replace(
        run,
        speedup=found.value,
        speedup_low=found.low,
        speedup_high=found.high,
        supported=found.is_clear,
        speedup_from=TURNS,
    )


COMPUTE, SLOWED = "compute", "compute beside communication"
"""What may explain a difference. Compute may be longer by the communication that a variant puts beside it."""
EXPLAINED_BY = {
    COMPUTE: "compute, which no variant changes",
    SLOWED: "longer compute, by a busier machine or by the communication beside it",
}
"""The words for each."""
_MOST = 0.5
"""A cause that accounts for a larger fraction of a difference than this accounts for most of it."""


def _with_speedup(run: VariantSummary, naive: VariantSummary) -> VariantSummary:
    """Add the speed-up over the naive run by the captured steps.

    If most of the difference is compute, there is no speed-up: ``confounded_by`` is set instead. The machine changed,
    or communication slows more compute; the captures do not tell which. The relative error of a ratio is the root of
    the summed squares of both relative errors.
    """
    before_ns, after_ns = naive.step_ns, run.step_ns
    if run.device != naive.device or not before_ns or not after_ns:
        return run
    if run is naive:
        return replace(run, speedup=1.0, speedup_from=CAPTURES)
    gained_ns = before_ns - after_ns
    compute_before_ns, compute_after_ns = _compute_ns(naive), _compute_ns(run)
    computes_alike = VARIANTS.get(variant_and_size(run.label)[0], UNKNOWN_VARIANT).computes_as_naive
    if computes_alike and compute_before_ns is not None and compute_after_ns is not None:
        # Idle time does not count as such a cause: the gaps between blocking collectives belong to the variant.
        by_compute_ns = compute_before_ns - compute_after_ns
        if by_compute_ns * gained_ns > _MOST * gained_ns**2:  # compute / gain > _MOST, also if both are negative
            may_be_slowed = 0 < -by_compute_ns <= (run.parts_ns.get("overlapped") or 0)
            return replace(run, confounded_by=SLOWED if may_be_slowed else COMPUTE, supported=False)
    speedup, half_widths = before_ns / after_ns, (naive.step_half_width_ns, run.step_half_width_ns)
    if None in half_widths:
        return replace(run, speedup=speedup, speedup_from=CAPTURES)
    before, after = ((half_width or 0) / ns for half_width, ns in zip(half_widths, (before_ns, after_ns), strict=True))
    error = speedup * half_width_of_change(before, after)
    low, high = speedup - error, speedup + error
    is_clear = not low <= 1 <= high
    return replace(run, speedup=speedup, speedup_low=low, speedup_high=high, supported=is_clear, speedup_from=CAPTURES)


def _compute_ns(run: VariantSummary) -> int | None:
    """Return how long the step that is nearest to all medians computes, beside communication and alone."""
    overlapped_ns = run.parts_ns.get("overlapped")
    return None if run.compute_only_ns is None or overlapped_ns is None else run.compute_only_ns + overlapped_ns


def _summarize(result: TraceOverlap) -> VariantSummary:
    """Return the figures of a run without a speed-up."""
    ranks, outliers = result.ranks, result.outliers
    reason = reason_of_run([(rank.reason, bool(rank.collectives)) for rank in ranks])
    by_rank = _steps_of_figures(result, reason)
    steps = [step for of_rank in by_rank for step in of_rank]

    communicating = [rank.communicating_steps for rank in ranks]
    # How many steps there are is told by ranks whose figures are known: others may have steps that were left out there.
    known = [rank for rank in ranks if not rank.reason] or ranks
    lengths = [ns for rank in ranks for ns in rank.lengths_ns]
    nearest = _length_of_typical_step(by_rank)
    comm_ns = _rounded_median(_known_values(steps, "comm_ns"))
    # The steps whose exposed time is not known may be all steps of a rank: the other steps do not stand for them.
    knows_exposed = all(step.exposed_ns is not None for step in steps if step.comm_ns is not None)
    exposed_ns = _rounded_median(_known_values(steps, "exposed_ns")) if knows_exposed else None
    with_exposed = [[step for step in of_rank if step.exposed_ns is not None] for of_rank in by_rank]
    find_exposed_half_width = _half_width_on_demand(
        [_known_values(of_rank, "exposed_ns") for of_rank in with_exposed],
        [keys_of(of_rank) for of_rank in with_exposed],
    )
    blocking_ns = _values_if_all_known(steps, "blocking_ns")
    return VariantSummary(
        label=result.label,
        device=result.device,
        ranks=len(result.job_ranks),
        world_size=result.world_size,
        steps=max((len(rank.marked_steps) for rank in known), default=0),
        communicating_steps=max(map(len, communicating), default=0),
        others_communicate=any(
            len(of_rank) < sum(bool(step.comm_ns) for step in rank.marked_steps)
            for rank, of_rank in zip(ranks, communicating, strict=True)
        ),
        step_ns=_rounded_median(lengths),
        step_spread_ns=round(float(np.subtract(*np.percentile(lengths, [75, 25])))) if len(lengths) > 1 else None,
        find_step_half_width=_half_width_on_demand(
            [rank.lengths_ns for rank in ranks], [keys_of(rank.timed_steps) for rank in ranks]
        ),
        communicating_step_ns=_rounded_median(_known_values([step.length for step in steps], "ns")),
        window_ns=_rounded_median(_known_values(steps, "window_ns")),
        # If no collective was seen and the time of communication is not known, there may have been some: ``None``.
        collectives=_median(_known_values(steps, "collectives")) or (None if comm_ns is None else 0.0),
        comm_ns=comm_ns,
        exposed_ns=exposed_ns,
        overlapped_ns=None if comm_ns is None or exposed_ns is None else comm_ns - exposed_ns,
        find_exposed_half_width=find_exposed_half_width if knows_exposed else None,
        overlap_ratio=_share_of_communication(result, "overlapped_ns") if knows_exposed else None,
        backward_overlap_ratio=_share_of_communication(result, "backward_overlapped_ns") if knows_exposed else None,
        overlap_ratio_without_outliers=outliers.overlap_ratio_without if outliers else None,
        reason=reason,
        tail_ns=_rounded_median(_values_if_all_known(steps, "tail_ns")),
        blocking_ns=_rounded_median(blocking_ns),
        hideable_ns=_rounded_median(list(map(_hideable_ns, steps))) if blocking_ns else None,
        blocking_at_most_ns=_rounded_median(_values_if_all_known(steps, "blocking_at_most_ns")),
        blocked_steps=sum(map(bool, blocking_ns)) if len(blocking_ns) == len(steps) else None,
        host_waits=sum(rank.dependencies.host_waits for rank in ranks if rank.dependencies),
        host_waits_usually=any(rank.dependencies.host_waits_usually for rank in ranks if rank.dependencies),
        serves_other_devices=any(rank.dependencies.reason == ON_OTHER_DEVICE for rank in ranks if rank.dependencies),
        nearest_step_ns=nearest.ns,
        compute_only_ns=nearest.compute_only_ns,
        exposed_memory_ns=nearest.exposed_memory_ns,
        idle_ns=nearest.idle_ns,
        parts_ns={name: getattr(nearest, f"{name}_ns") for name in PARTS},
        speedup=None,
    )


def _steps_of_figures(result: TraceOverlap, reason: str | None) -> list[tuple[StepOverlap, ...]]:
    """Return for each rank the steps that figures are medians of: those that communicate or, without such steps, all.

    If no step communicates although communication was seen or may be missing in the trace, figures that rest on
    launches are hidden: 0 would be false. ``reason`` is why exposed time is not known.
    """
    communicating = [rank.communicating_steps for rank in result.ranks]
    if any(communicating):
        return communicating
    marked = [rank.marked_steps for rank in result.ranks]
    is_lost = any(rank.comm_ns for rank in result.ranks) or reason == GRAPHS or reason in NOT_TIMED
    return [tuple(hide(step, Hidden.LAUNCHES) for step in of_rank) for of_rank in marked] if is_lost else marked


def _hideable_ns(step: StepOverlap) -> int:
    """Return what hiding its communication makes a step shorter by at most; its blocking time must be known.

    A step is no shorter than what its stream with most compute runs, whatever other streams stand still for meanwhile.
    """
    blocking_ns = step.blocking_ns or 0
    return blocking_ns if step.length.spare_ns is None else min(blocking_ns, step.length.spare_ns)


def waits_at_most_ns(summary: VariantSummary, step: StepOverlap) -> int:
    """Return what hiding the communication of a step gains at most, in the way of :attr:`VariantSummary.gain_at_most`.

    ``summary`` is that of the run of the step.
    """
    hideable_ns = _hideable_ns(step)
    if summary.hideable_ns is not None and not summary.host_waits_usually:
        return hideable_ns
    limits_ns = [limit_ns for limit_ns in (step.exposed_ns, step.blocking_at_most_ns) if limit_ns is not None]
    return max(min(limits_ns, default=0), hideable_ns)


def _length_of_typical_step(by_rank: Sequence[Sequence[StepOverlap]]) -> StepLength:
    """Return the length and the parts of the typical step, on the rank on which they are nearest to the medians.

    The parts of one step add up to its length, which medians of parts would not. All figures are ``None`` if a part of
    some step is not known.
    """
    steps = [
        (position if step.step_key is None else step.step_key, step.length)
        for of_rank in by_rank
        for position, step in enumerate(of_rank)
        if step.length.ns is not None
    ]
    rows = [[getattr(length, f"{name}_ns") for name in PARTS] for _, length in steps]
    if not rows or any(ns is None for row in rows for ns in row):
        return StepLength()
    keys, parts = np.array([key for key, _ in steps]), np.array(rows, np.int64)
    own = np.flatnonzero(keys == find_typical_step(keys, parts))
    _, length = steps[int(own[distances_from_medians(parts)[own].argmin()])]
    return length


def _half_width_on_demand(ranks: Sequence[Sequence[float]], keys: Sequence[Sequence[int]]) -> Callable[[], int | None]:
    """Return a function that measures how far the interval of the median over the steps of all ranks reaches.

    The arguments are those of ``half_width_of_steps``.
    """
    return partial(_measure_half_width, tuple(map(tuple, ranks)), tuple(map(tuple, keys)))


@lru_cache(maxsize=64)
def _measure_half_width(ranks: tuple[tuple[float, ...], ...], keys: tuple[tuple[int, ...], ...]) -> int | None:
    """Return how far the interval reaches from the median, in nanoseconds; ``None`` if there are too few steps.

    It is a function of the module so that a summary can be pickled, and takes tuples so that results can be kept.
    """
    half_width = half_width_of_steps(ranks, keys=keys)
    return None if half_width is None else round(half_width)


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _rounded_median(values: Sequence[float]) -> int | None:
    median = _median(values)
    return None if median is None else round(median)


def _known_values(steps: Sequence[StepOverlap | StepLength], name: str) -> list[float]:
    return [value for step in steps if (value := getattr(step, name)) is not None]


def _values_if_all_known(steps: Sequence[StepOverlap], name: str) -> list[float]:
    """Return the values of an attribute, none of them if it is not known in some step."""
    values = _known_values(steps, name)
    return values if len(values) == len(steps) else []


def _share_of_communication(result: TraceOverlap, part: str) -> float | None:
    """Return an attribute of the ranks, such as ``overlapped_ns``, as a fraction of their communication.

    It is the sum over the ranks for which both are known, divided by the sum of their communication; ``None`` if there
    is no such rank.
    """
    known = [rank for rank in result.ranks if rank.overlap_ratio is not None and getattr(rank, part) is not None]
    total = sum(rank.comm_ns or 0 for rank in known)
    return sum(getattr(rank, part) for rank in known) / total if total else None
