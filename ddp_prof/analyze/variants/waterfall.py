"""The waterfall: by how much each variant changes each part of a step; and what changed between two runs of a variant.

The mean step of a run is divided into parts that sum to it exactly, in whole nanoseconds. All parts lie within the
windows of steps, see :mod:`.step_breakdown`, so none is negative:

- *compute*: compute of the rank, without contention;
- *contention*: what simultaneous communication adds to compute, if known;
- *transfer*: exposed communication in which data moves, without the tail;
- *tail*: exposed communication after the last compute of backward, without waits for peers;
- *wait*: exposed communication in which a peer had not arrived;
- *calls*: the host's work around blocking collectives;
- *rest*: everything else: data loading, the host between phases, idle device.

The difference of two runs is then the sum of the differences of their parts. Medians would not sum, so these are means,
each with the interval of :mod:`ddp_prof.analyze.statistics`. A change within the intervals of both runs is not
significant. The intervals of the changes of the step and of all parts hold together with 95 %: that of the step is as
wide as that of a test at 2.5 %, and each of the parts' as that of a test at 2.5 % divided by the number of parts (C. E.
Bonferroni, 1936). So of two runs that are alike, only one pair in twenty has anything that is said to have changed.

Between two runs of one variant, the collective that caused a change is looked for. The end of a collective is the sum
of four times: its launch, measured from the end of backward's compute; the time until it starts (behind other
collectives, or when its input is ready); its wait for peers; and its transfer. So a change of one of the four moves its
end by as much::

    before   backward ############|
             bucket 3         L..NNNN            L: launch, N: it runs
    after    backward ############|
             bucket 3             L..NNNN       launched 4 later, so the tail is 4 longer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, median_low

import numpy as np

from ddp_prof.analyze.collectives.collective import Collective
from ddp_prof.analyze.collectives.exposed_time import TAIL, backward_end_ns, wait_end_ns
from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.core.operations import Part, assign_instants, cut_pauses
from ddp_prof.analyze.core.passes import seem_lost
from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.kernels.contention import Contention, measure_contention
from ddp_prof.analyze.kernels.kernel_times import KernelRuns
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame
from ddp_prof.analyze.statistics import MISSES, half_width_of_change, half_width_of_steps, mean_per_draw
from ddp_prof.analyze.why_unknown import INCOMPLETE_COMMUNICATES, LOST_MAY_COMMUNICATE, NO_COMMUNICATION, NOT_TIMED
from ddp_prof.columns import ALWAYS, USUALLY, WITH_ROOM, column, derived, result_columns
from ddp_prof.manifest import Caveat
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, select
from ddp_prof.variants import variant_position


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a step, or their differences between two steps; the known parts sum to ``step_ns`` exactly."""

    compute_ns: int = column("compute of the rank, without contention", stays=USUALLY)
    contention_ns: int | None = column(
        "what simultaneous communication adds to compute",
        null="not known of a run: then it is in compute",
        stays=USUALLY,
    )
    transfer_ns: int = column("exposed communication in which data moves, without the tail", stays=USUALLY)
    tail_ns: int | None = column(
        "exposed communication after the last compute of backward, without waits",
        null="when backward ends is not known of a run: then it is in transfer",
        stays=USUALLY,
    )
    wait_ns: int | None = column(
        "exposed communication in which a peer had not arrived",
        null="the ranks of a run could not be compared: then it is in transfer and tail",
        stays=USUALLY,
    )
    calls_ns: int | None = column(
        "the host's work around blocking collectives",
        null="the clocks of host and device disagree: then it is in the rest",
        stays=USUALLY,
    )
    rest_ns: int = column("everything else: data, the host between phases, idle device", stays=USUALLY)
    step_ns: int = column("sum of the parts", key="sum_ms", stays=WITH_ROOM)


PARTS = tuple(one.name.removesuffix("_ns") for one in result_columns(Parts) if one.name != "step_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Parts):
    """The mean step of a run, over all steps of known length, divided into parts.

    Attributes:
        label: The run.
        device: Kind of device, ``cpu`` or ``cuda``.
        steps: The number of steps, over all ranks.
        contention: How much communication slows compute.
        knows_wait: Whether waits for peers are known; if not, they are in ``transfer_ns`` and ``tail_ns``.
        knows_tail: Whether it is known when backward ends; if not, its tail is in ``transfer_ns``.
        clocks_disagree: Whether steps last from device work to device work only because the clocks disagree.
        half_width_ns: For each part by name, how far its 95 % interval reaches from it.
    """

    label: str
    device: str
    steps: int
    contention: Contention
    knows_wait: bool
    knows_tail: bool
    clocks_disagree: bool
    half_width_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Parts):
    """The change from one run to the next."""

    before: str = column("the run before")
    after: str = column("the run after it")
    half_width_ns: Mapping[str, int] = column(
        "half of the 95 % interval of each change, by part; those of the step and of all parts hold together"
    )

    def is_beyond_spread(self, part: str) -> bool | None:
        """Return whether a part, or ``step``, changed by more than the spread of both runs; ``None`` if not known."""
        return _exceeds(part, getattr(self, f"{part}_ns"), self.half_width_ns.get(part))


def _exceeds(part: str, change_ns: int | None, half_width_ns: int | None) -> bool | None:
    """Return whether a change exceeds the spread; ``None`` if not known. One within what is rounded never does.

    The rest takes what the rounding of the other parts leaves, at most half a nanosecond each in either run.
    """
    if change_ns is not None and abs(change_ns) <= (len(PARTS) if part == "rest" else 0):
        return False
    return None if change_ns is None or half_width_ns is None else abs(change_ns) > half_width_ns


@dataclass(frozen=True, slots=True)
class Waterfall(FrameResult):
    """Runs in the order in which variants build upon each other, and the changes between them.

    Attributes:
        budgets: The mean step of each run.
        changes: The change from each run to the next one, so one less than there are budgets.
        warnings, caveats: Of all runs.
        left_out: Labels of runs without steps, which have no step time.
        untimed: Labels of runs with steps whose length is not known.
        unknown: Labels of runs in whose steps not everything is known, for example because of CUDA graphs that were
            recorded as a whole.
        other_device: Labels of runs on another device (``cpu`` or ``cuda``) than the first run.
    """

    budgets: tuple[Budget, ...]
    changes: tuple[Change, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    caveats: tuple[Caveat, ...] = ()
    other_device: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    untimed: tuple[str, ...] = ()

    def to_frame(self) -> DataFrame:
        """One row per change."""
        return make_frame(Change, self.changes)


Analyzed = tuple["RunAnalysis", "Sequence[KernelRuns]"]
"""A run, with the kernels of its ranks."""


def measure_waterfall(runs: Sequence[Analyzed]) -> Waterfall:
    """Measure the mean step of each run, order the runs by variant, and subtract each run from the next one.

    The kernels of each run also serve to measure the contention of the other runs.
    """
    unknown = tuple(run.label for run, _ in runs if _has_unknown_work(run))
    measured = measure_budgets(runs)
    # Runs are only compared with runs on the same kind of device as the first one.
    same_device = [one for one in measured if one.run.device == measured[0].run.device]
    unmeasured = [run for run, _ in runs if not any(one.run is run for one in measured) and run.label not in unknown]
    return Waterfall(
        budgets=tuple(one.budget for one in same_device),
        changes=tuple(subtract_budgets(*match_parts(*pair)) for pair in pairwise(same_device)),
        left_out=tuple(run.label for run in unmeasured if not run.has_steps),
        untimed=tuple(run.label for run in unmeasured if run.has_steps),
        caveats=tuple(dict.fromkeys(caveat for run, _ in runs for caveat in run.caveats)),
        warnings=tuple(dict.fromkeys(warning for run, _ in runs for warning in run.trace_warnings)),
        other_device=tuple(one.budget.label for one in measured if one not in same_device),
        unknown=unknown,
    )


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A run and its mean step in parts."""

    run: RunAnalysis
    budget: Budget


def measure_budgets(runs: Sequence[Analyzed], reference: Sequence[Analyzed] = ()) -> list[MeasuredRun]:
    """Return the mean steps of runs in the order of variants; runs whose mean step is not known are left out.

    Contention is measured with the kernels of all runs with the same workload, also of those in ``reference``.
    """

    def position(analyzed: Analyzed) -> int:
        """Return the position of a run's variant in the order in which variants build upon each other."""
        run, _ = analyzed
        return variant_position(run.label if run.manifest is None else run.manifest.variant)

    found = []
    for run, kernels in sorted(runs, key=position):
        if _has_unknown_work(run):
            continue
        others = [of_other for other, of_other in (*runs, *reference) if run.has_same_workload(other)]
        contention = measure_contention(kernels, [kernel for of_other in others for kernel in of_other])
        knows_wait = len(run.matches) > 0 or run.is_alone
        if budget := _measure_budget(run, contention, knows_wait=knows_wait, knows_tail=_knows_tail(run)):
            found.append(MeasuredRun(run, budget))
    return found


def _has_unknown_work(run: RunAnalysis) -> bool:
    """Return whether a rank has steps but not all of its events are known, or not how long they took.

    Also if the run has several ranks, and nothing that was recorded on their devices is known to communicate: what does
    may count as compute, or was lost.
    """
    ranks = [rank for rank in run.ranks if len(rank.times)]
    reasons = {rank.reason for rank in ranks if rank.device is not None}
    is_silent = bool(reasons) and reasons <= {NO_COMMUNICATION, LOST_MAY_COMMUNICATE, INCOMPLETE_COMMUNICATES}
    if is_silent and max((rank.world_size or 1 for rank in ranks), default=1) > 1:
        return True
    return any(rank.unknown_work or rank.reason in NOT_TIMED for rank in ranks)


def _knows_tail(run: RunAnalysis) -> bool:
    """Return whether it is known when backward ends, on each rank with collectives, and is not lost in some steps."""
    for timings in (rank.timings for rank in run.ranks if len(rank.timings)):
        rows = np.flatnonzero(timings.step != UNKNOWN)
        knows_end = (timings.backward_end_ns != NO_TIME)[rows]
        known, collectives = np.bincount(timings.step[rows], knows_end), np.bincount(timings.step[rows])
        if not knows_end.any() or seem_lost(collectives, known > 0).any():
            return False
    return True


def _measure_budget(
    run: RunAnalysis,
    contention: Contention,
    *,
    knows_wait: bool,
    knows_tail: bool,
    of_ranks: Collection[int | None] | None = None,
) -> Budget | None:
    """Return the mean step of a run in parts; ``None`` if no step has a known length.

    Unless ``knows_wait``, waits for peers are not separated from transfer and tail; unless ``knows_tail``, the tail is
    not separated from transfer. ``of_ranks`` are the ranks whose steps count; by default all of them.
    """
    counted = [
        (rank, wait_ns)
        for rank, wait_ns in zip(run.ranks, run.waits_ns, strict=True)
        if of_ranks is None or rank.rank in of_ranks
    ]
    clocks_disagree = any(rank.clocks_disagree for rank in run.ranks)
    # For each rank, the parts that are told: one value per step. What is not told apart is in another part.
    ranks = []
    for rank, wait_ns in counted:
        parts = _measure_step_parts(rank, wait_ns if knows_wait else np.full_like(wait_ns, UNKNOWN))
        if not knows_wait:
            del parts["wait"]
        if not knows_tail:
            parts["transfer"] = parts["transfer"] + parts.pop("tail")
        if clocks_disagree:  # then all of it counts as rest
            del parts["calls"]
        ranks.append(parts)
    steps = sum(len(parts["step"]) for parts in ranks)
    if not steps:
        return None
    # Integers, so that the parts sum to the step: the rest is what the other parts leave of it.
    mean = {part: round(sum(int(parts[part].sum()) for parts in ranks) / steps) for part in ranks[0]}
    price = contention.contention_ns
    exposed_ns = mean["transfer"] + mean.get("tail", 0) + mean.get("wait", 0)
    # Half of the interval of each part. Contention is subtracted from compute, so its interval adds to that of compute.
    keys = [rank.step_keys[: len(rank.times)][rank.times.is_known] for rank, _ in counted]
    halves = {part: half_width_of_steps([parts[part] for parts in ranks], mean_per_draw, keys) for part in ranks[0]}
    widths = {part: half for part, half in halves.items() if half is not None}
    if price is not None and widths:
        compute, width = widths.pop("compute"), contention.half_width_ns
        if width is not None:
            widths |= {"contention": width, "compute": half_width_of_change(compute, width)}
    if any(rank.lost_share for rank in run.ranks):  # each step lacks some work, and no interval knows how much
        widths = {part: width for part, width in widths.items() if part == "step"}
    return Budget(
        label=run.label,
        device=run.device,
        steps=steps,
        step_ns=mean["step"],
        compute_ns=mean["compute"] - (price or 0),
        contention_ns=price,
        transfer_ns=mean["transfer"],
        tail_ns=mean.get("tail"),
        wait_ns=mean.get("wait"),
        calls_ns=mean.get("calls"),
        rest_ns=mean["step"] - mean["compute"] - exposed_ns - mean.get("calls", 0),
        contention=contention,
        knows_wait=knows_wait,
        knows_tail=knows_tail,
        clocks_disagree=clocks_disagree,
        half_width_ns={part: round(width) for part, width in widths.items()},
    )


def _measure_step_parts(rank: RankCollectives, wait_ns: Ints) -> dict[str, Ints]:
    """Return the parts of each step of a rank whose length is known, in nanoseconds; contention is in ``compute``.

    Args:
        rank: The rank.
        wait_ns: How long each of its collectives waited for peers; ``UNKNOWN`` where that is not known.
    """
    times = select(rank.times, rank.times.is_known)
    start, end = times.start_ns, times.start_ns + times.length_ns
    # Instants without compute. If collectives of two steps run at once, an instant is wait if one of them waits for a
    # peer; otherwise it is tail if one of them is in the tail of its step.
    first, last = assign_instants(rank.timings)
    wait_end = wait_end_ns(rank.timings, wait_ns)
    wait, tail = (
        cut_pauses(rank.timings, rank.pauses, part)
        for part in (Part(first, wait_end), Part(np.clip(backward_end_ns(rank), wait_end, last), last))
    )
    waiting = union(wait.start_ns, wait.end_ns) - rank.compute
    in_tail = union(tail.start_ns, tail.end_ns) - rank.compute - waiting
    waiting_ns, tail_ns = waiting.covered_ns(start, end), in_tail.covered_ns(start, end)
    return {
        "step": times.length_ns,
        "compute": times.compute_ns,
        "transfer": times.exposed_ns - waiting_ns - tail_ns,
        "tail": tail_ns,
        "wait": waiting_ns,
        "calls": times.calls_ns,
        "rest": times.length_ns - times.compute_ns - times.exposed_ns - times.calls_ns,
    }


def match_parts(before: MeasuredRun, after: MeasuredRun) -> tuple[Budget, Budget]:
    """Return the mean steps of two runs with the same parts.

    If waits, the tail, or contention, are not known in one of the runs, they are not separated in the other one either.
    If a rank was recorded in one of the runs only, its steps do not count: ranks differ in what they compute.
    """
    shared = _shared_ranks(before.run, after.run)
    budgets = (before.budget, after.budget)
    known = {name: all(getattr(one, name) for one in budgets) for name in ("knows_wait", "knows_tail")}
    first, second = (
        one.budget
        if shared is None and all(getattr(one.budget, name) == value for name, value in known.items())
        else _measure_budget(one.run, one.budget.contention, **known, of_ranks=shared) or one.budget
        for one in (before, after)
    )
    if None not in (first.contention_ns, second.contention_ns):
        return first, second
    first, second = (
        replace(one, compute_ns=one.compute_ns + (one.contention_ns or 0), contention_ns=None)
        for one in (first, second)
    )
    return first, second


def _shared_ranks(before: RunAnalysis, after: RunAnalysis) -> set[int | None] | None:
    """Return the ranks that both runs have; ``None`` if both have the same ones, or it is not known which these are."""
    first, second = ({rank.rank for rank in run.ranks if len(rank.times)} for run in (before, after))
    return first & second or None if first != second and None not in first | second else None


def subtract_budgets(before: Budget, after: Budget) -> Change:
    """Return the change of each part that both runs have, from ``before`` to ``after``.

    If clocks disagree in one of them, its steps were measured in another way, and no change is known to be one.
    """
    found: dict[str, int | None] = {f"{name}_ns": None for name in ("step", *PARTS)}
    half_width = {}
    tested = before.half_width_ns.keys() & after.half_width_ns.keys() & {*PARTS}
    # How much wider an interval is that holds together with the others, by the normal distribution. The step has half
    # of all misses, as it is what most want to know; the parts share the other half.
    usual = NormalDist().inv_cdf(1 - MISSES / 2)
    of_step, of_part = (NormalDist().inv_cdf(1 - MISSES / 4 / number) / usual for number in (1, max(1, len(tested))))
    for name in ("step", *PARTS):
        old, new = getattr(before, f"{name}_ns"), getattr(after, f"{name}_ns")
        if old is not None and new is not None:
            found[f"{name}_ns"] = new - old
            is_comparable = before.clocks_disagree == after.clocks_disagree
            if is_comparable and name in before.half_width_ns and name in after.half_width_ns:
                width = half_width_of_change(before.half_width_ns[name], after.half_width_ns[name])
                half_width[name] = round((of_step if name == "step" else of_part) * width)
    return Change(before=before.label, after=after.label, half_width_ns=half_width, **found)  # type: ignore[arg-type]


LAUNCH, QUEUEING, WAIT, TRANSFER, DURATION = "launch", "queueing", "wait", "transfer", "duration"
_START = "start"
"""When a collective starts, from the end of backward's compute: its launch and the time until it starts."""

Key = tuple[str | None, int | None, int | None]
"""What identifies a collective in each step: operation and bucket or, without a bucket, the position in the step."""


@dataclass(frozen=True, slots=True)
class CollectiveChange:
    """Which time of one collective of a step changed, on average over steps and ranks.

    Attributes:
        op: Operation of the collective.
        bucket: Number of its bucket; ``None`` if it has none.
        index: Its position in the step; ``None`` if it has a bucket.
        moved: The time that changed: ``launch``, ``queueing`` (from launch to start, whatever it waited for), ``wait``
            or ``transfer``; or ``duration``, if wait and transfer cannot be distinguished.
        by_ns: By how much that time changed, in nanoseconds; a launch is measured from the end of backward's compute.
    """

    op: str | None
    bucket: int | None
    index: int | None
    moved: str
    by_ns: int


@dataclass(frozen=True, slots=True)
class PartChange:
    """How a part of the mean step, or the step itself, changed from one run of a variant to the next."""

    part: str = column("part of the mean step, or ``step``", stays=ALWAYS)
    before_ns: int | None = column("in the first run", null="the part is not known", stays=USUALLY)
    after_ns: int | None = column("in the second run", null="the part is not known", stays=USUALLY)
    half_width_ns: int | None = column(
        "half of the change's 95 % interval; those of the step and of all parts hold together",
        null="too few steps, or the clocks of host and device disagree in one of the runs",
        key="change_±_ms",
        stays=USUALLY,
    )
    cause: CollectiveChange | None = column(
        "the collective with the largest share of a change of communication",
        null="the change is not beyond the spread, or no collective changed",
    )

    @property
    @derived("after less before", null="the part is not known", stays=ALWAYS, after="after_ns")
    def change_ns(self) -> int | None:
        return None if self.before_ns is None or self.after_ns is None else self.after_ns - self.before_ns

    @property
    @derived("whether the change exceeds the spread of both runs", null="not known")
    def is_beyond_spread(self) -> bool | None:
        return _exceeds(self.part, self.change_ns, self.half_width_ns)


def compare_before_after(
    before: Analyzed, after: Analyzed, reference: Sequence[Analyzed] = ()
) -> tuple[PartChange, ...]:
    """Return how the step and each of its parts changed between two runs of a variant.

    Empty if a run has no steps, or if the devices differ. See :func:`.measure_budgets` for ``reference``.
    """
    measured = measure_budgets([before, after], reference)
    if len({one.run.device for one in measured}) != 1 or len(measured) != 2:
        return ()
    first, second = match_parts(*measured)
    difference = subtract_budgets(first, second)
    # Whether the tail of one run, which is known, is in its transfer, because that of the other run is not known.
    mixes_tails = measured[0].budget.knows_tail != measured[1].budget.knows_tail
    collectives = [measure_collectives(run).collectives for run, _ in (before, after)]
    if (shared := _shared_ranks(before[0], after[0])) is not None:
        collectives = [tuple(one for one in of_run if one.rank in shared) for of_run in collectives]
    if first.wait_ns is None:  # waits are not known in one run, so they belong to transfer and tail in both
        collectives = [tuple(replace(one, exposed_wait_ns=None) for one in of_run) for of_run in collectives]
    found = []
    for part in ("step", *PARTS):
        old, new = getattr(first, f"{part}_ns"), getattr(second, f"{part}_ns")
        has_cause = part in _EXPOSED and not mixes_tails and difference.is_beyond_spread(part)
        cause = _find_cause(part, collectives[0], collectives[1], new - old) if has_cause else None
        found.append(PartChange(part, old, new, difference.half_width_ns.get(part), cause))
    return tuple(found)


def _without_wait_ns(collective: Collective) -> int:
    """Return the exposed time of a collective without its wait for peers.

    The wait comes first and the tail last. So the tail lies within this time, or contains it.
    """
    return collective.exposed_ns - (collective.exposed_wait_ns or 0)


_EXPOSED: dict[str, Callable[[Collective], int]] = {
    "tail": lambda collective: min(collective.when_ns(TAIL), _without_wait_ns(collective)),
    "wait": lambda collective: collective.exposed_wait_ns or 0,
    "transfer": lambda collective: max(0, _without_wait_ns(collective) - collective.when_ns(TAIL)),
}


def _find_cause(
    part: str, before: Sequence[Collective], after: Sequence[Collective], change_ns: int
) -> CollectiveChange | None:
    """Find the collective that contributed most to a change of a part, and which of its times changed.

    A change of its wait for peers only counts for the part ``wait``, and no other time does there: a launch moves the
    wait, but does not make it longer. A launch and the time until the start only count if the collective also starts
    later (or earlier): a collective that is launched as much earlier as it then waits longer is no cause.

    Args:
        part: ``tail``, ``wait`` or ``transfer``.
        before: The collectives of the first run.
        after: Those of the second run.
        change_ns: The change of the part.

    Returns:
        The collective and its time; ``None`` if no time of it changed significantly in the direction of the change.
    """
    old, new = _group_by_key(before), _group_by_key(after)
    old_steps, new_steps = (
        len({one.step_identity for one in run if one.step_key is not None}) for run in (before, after)
    )
    sign = 1 if change_ns > 0 else -1

    def share(collectives: Sequence[Collective], steps: int) -> float:
        """Return what these collectives contribute to the part in the mean step."""
        return sum(map(_EXPOSED[part], collectives)) / steps

    shares = {key: sign * (share(new[key], new_steps) - share(old[key], old_steps)) for key in old.keys() & new.keys()}
    # Bucket 1 of two is not bucket 1 of eight: collectives of one number are compared only if both runs have the same.
    if not shares or _usual_counts(before) != _usual_counts(after):
        return None
    # Sorted first, so that the choice among equal ones does not depend on the order of a set.
    key = max(sorted(shares, key=str), key=shares.__getitem__)
    sizes, others = ({one.bytes for one in of[key]} - {None} for of in (old, new))
    if sizes and others and not sizes & others:
        return None
    moves = {
        name: _significant_change(_mean_per_step(old[key], name), _mean_per_step(new[key], name))
        for name in _TIMES
        if (name == WAIT) == (part == "wait")
    }
    in_direction = {name: by for name, by in moves.items() if by is not None and sign * by > 0}
    if in_direction.pop(_START, None) is None:
        in_direction = {name: by for name, by in in_direction.items() if name not in (LAUNCH, QUEUEING)}
    if not in_direction:
        return None
    moved = max(in_direction, key=lambda name: abs(in_direction[name]))
    return CollectiveChange(*key, moved=moved, by_ns=round(in_direction[moved]))


def _usual_counts(collectives: Sequence[Collective]) -> dict[str | None, int]:
    """Return for each operation of how many collectives a step of a rank usually has."""
    counts = Counter((one.op, one.step_identity) for one in collectives if one.step_key is not None)
    by_op: dict[str | None, list[int]] = {}
    for (op, _), count in counts.items():
        by_op.setdefault(op, []).append(count)
    return {op: median_low(found) for op, found in by_op.items()}


def _group_by_key(collectives: Sequence[Collective]) -> dict[Key, list[Collective]]:
    """Return for each key the collectives of all steps and ranks that have it; those outside of steps are left out."""
    found: dict[Key, list[Collective]] = {}
    for collective in collectives:
        if collective.step_key is not None:
            index = collective.index if collective.bucket is None else None
            found.setdefault((collective.op, collective.bucket, index), []).append(collective)
    return found


_TIMES: dict[str, Callable[[Collective], int | None]] = {
    LAUNCH: lambda collective: (
        None
        if collective.before_backward_end_ns is None or collective.queueing_ns is None
        else -collective.before_backward_end_ns - collective.queueing_ns
    ),
    QUEUEING: lambda collective: collective.queueing_ns,
    WAIT: lambda collective: collective.wait_ns,
    TRANSFER: lambda collective: collective.transfer_ns,
    DURATION: lambda collective: collective.duration_ns if collective.wait_ns is None else None,
    _START: lambda collective: (
        None if collective.before_backward_end_ns is None else -collective.before_backward_end_ns
    ),
}


def _mean_per_step(collectives: Sequence[Collective], name: str) -> list[float]:
    """Return the mean over the ranks of a time of :data:`_TIMES`, for each step; empty if a step has no known value."""
    steps: dict[int | None, list[int | None]] = {}
    for collective in collectives:
        steps.setdefault(collective.step_key, []).append(_TIMES[name](collective))
    known = [[value for value in values if value is not None] for values in steps.values()]
    return [sum(values) / len(values) for values in known] if all(known) else []


def _significant_change(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return the change of the mean; ``None`` unless it is known to exceed the interval of the difference."""
    widths = [half_width_of_steps([times], mean_per_draw) for times in (before, after)]
    if widths[0] is None or widths[1] is None:
        return None
    by = float(np.mean(after) - np.mean(before))
    return by if abs(by) > half_width_of_change(widths[0], widths[1]) else None
