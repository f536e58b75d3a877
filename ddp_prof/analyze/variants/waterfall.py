"""The waterfall: which parts of a step each variant removed or added.

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
significant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import assign_instants, backward_end_ns, wait_end_ns
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.kernels.contention import Contention, measure_contention
from ddp_prof.analyze.kernels.kernel_times import KernelRuns
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame
from ddp_prof.analyze.statistics import half_width_of_change, half_width_of_steps, mean_per_draw
from ddp_prof.manifest import Caveat
from ddp_prof.trace import UNKNOWN, Ints, select
from ddp_prof.variants import variant_position

SAMPLED = ("step", "compute", "transfer", "tail", "wait", "calls", "rest")
"""The parts that are measured for each step; contention is measured for a whole run."""
PARTS = ("compute", "contention", "transfer", "tail", "wait", "calls", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a step, or of a difference of two steps; the known parts sum to ``step_ns`` exactly.

    Attributes:
        contention_ns: ``None`` if not known for a run; it is then part of compute.
        wait_ns: ``None`` if the ranks of a run could not be compared; it is then part of transfer and tail.
    """

    step_ns: int
    compute_ns: int
    contention_ns: int | None
    transfer_ns: int
    tail_ns: int
    wait_ns: int | None
    calls_ns: int
    rest_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Parts):
    """The mean step of a run, over all steps of known length; ``half_width_ns`` is half of each part's interval."""

    label: str
    device: str
    steps: int
    contention: Contention
    knows_wait: bool
    half_width_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Parts):
    """The change from one run to the next; ``half_width_ns`` as in :class:`Budget`, but of the change."""

    before: str
    after: str
    half_width_ns: Mapping[str, int]

    def is_beyond_spread(self, part: str) -> bool | None:
        """Whether a part, or ``step``, changed by more than both runs' spread; ``None`` if not known."""
        half_width = self.half_width_ns.get(part)
        change: int | None = getattr(self, f"{part}_ns")
        return None if half_width is None or change is None else abs(change) > half_width


@dataclass(frozen=True, slots=True)
class Waterfall(FrameResult):
    """Runs in the order in which variants build upon each other, and the changes between them.

    Attributes:
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
    """Order the runs and subtract their budgets; each run is a reference for the contention of the others."""
    unknown = tuple(run.label for run, _ in runs if _has_unknown_work(run))
    measured = measure_budgets(runs)
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
    run: RunAnalysis
    budget: Budget


def measure_budgets(runs: Sequence[Analyzed], reference: Sequence[Analyzed] = ()) -> list[MeasuredRun]:
    """The budgets of runs in the order of variants; runs without a known budget are left out.

    Contention is also measured against the runs in ``reference`` that have the same workload.
    """

    def position(analyzed: Analyzed) -> int:
        run, _ = analyzed
        return variant_position(run.label if run.manifest is None else run.manifest.variant)

    found = []
    for run, kernels in sorted(runs, key=position):
        if _has_unknown_work(run):
            continue
        others = [of_other for other, of_other in (*runs, *reference) if run.has_same_workload(other)]
        contention = measure_contention(kernels, [kernel for of_other in others for kernel in of_other])
        if budget := _measure_budget(run, contention, knows_wait=len(run.matches) > 0):
            found.append(MeasuredRun(run, budget))
    return found


def _has_unknown_work(run: RunAnalysis) -> bool:
    """Whether the events of a rank with steps are not all known."""
    return any(len(rank.times) and rank.unknown_work for rank in run.ranks)


def _measure_budget(run: RunAnalysis, contention: Contention, *, knows_wait: bool) -> Budget | None:
    ranks = [
        _measure_step_parts(rank, wait_ns if knows_wait else np.full_like(wait_ns, UNKNOWN))
        for rank, wait_ns in zip(run.ranks, run.waits_ns, strict=True)
    ]
    samples = {part: np.concatenate([of_rank[part] for of_rank in ranks]) for part in SAMPLED} if ranks else {}
    if not ranks or not len(samples["step"]):
        return None
    if not knows_wait:
        del samples["wait"]
    mean = {part: round(float(column.sum()) / len(column)) for part, column in samples.items()}
    price = contention.contention_ns
    exposed_ns = mean["transfer"] + mean["tail"] + mean.get("wait", 0)
    keys = [rank.step_keys[: len(rank.times)][rank.times.is_known] for rank in run.ranks]
    halves = {part: half_width_of_steps([of_rank[part] for of_rank in ranks], mean_per_draw, keys) for part in samples}
    widths = {part: half for part, half in halves.items() if half is not None}
    if price is not None and widths:
        compute, width = widths.pop("compute"), contention.half_width_ns
        if width is not None:
            widths |= {"contention": width, "compute": half_width_of_change(compute, width)}
    return Budget(
        label=run.label,
        device=run.device,
        steps=len(samples["step"]),
        step_ns=mean["step"],
        compute_ns=mean["compute"] - (price or 0),
        contention_ns=price,
        transfer_ns=mean["transfer"],
        tail_ns=mean["tail"],
        wait_ns=mean.get("wait"),
        calls_ns=mean["calls"],
        rest_ns=mean["step"] - mean["compute"] - exposed_ns - mean["calls"],
        contention=contention,
        knows_wait=knows_wait,
        half_width_ns={part: round(width) for part, width in widths.items()},
    )


def _measure_step_parts(rank: RankCollectives, wait_ns: Ints) -> dict[str, Ints]:
    """The parts, without contention, of each step whose length is known."""
    times = select(rank.times, rank.times.is_known)
    start, end = times.start_ns, times.start_ns + times.length_ns
    # Instants without compute. If collectives of two steps run at once, an instant is wait if one of them waits for a
    # peer; otherwise it is tail if one of them is in the tail of its step.
    first, last = assign_instants(rank.timings)
    wait_end = wait_end_ns(rank.timings, wait_ns)
    waiting = union(first, wait_end) - rank.compute
    in_tail = union(np.clip(backward_end_ns(rank), wait_end, last), last) - rank.compute - waiting
    wait, tail = waiting.covered_ns(start, end), in_tail.covered_ns(start, end)
    return {
        "step": times.length_ns,
        "compute": times.compute_ns,
        "transfer": times.exposed_ns - wait - tail,
        "tail": tail,
        "wait": wait,
        "calls": times.calls_ns,
        "rest": times.length_ns - times.compute_ns - times.exposed_ns - times.calls_ns,
    }


def match_parts(before: MeasuredRun, after: MeasuredRun) -> tuple[Budget, Budget]:
    """The budgets of two runs with the same parts: a part that is not known in one is joined in the other, too."""
    first, second = (
        one.budget
        if before.budget.knows_wait == after.budget.knows_wait
        else _measure_budget(one.run, one.budget.contention, knows_wait=False) or one.budget
        for one in (before, after)
    )
    if None not in (first.contention_ns, second.contention_ns):
        return first, second
    first, second = (
        replace(one, compute_ns=one.compute_ns + (one.contention_ns or 0), contention_ns=None)
        for one in (first, second)
    )
    return first, second


def subtract_budgets(before: Budget, after: Budget) -> Change:
    found: dict[str, int | None] = {f"{name}_ns": None for name in ("step", *PARTS)}
    half_width = {}
    for name in ("step", *PARTS):
        old, new = getattr(before, f"{name}_ns"), getattr(after, f"{name}_ns")
        if old is not None and new is not None:
            found[f"{name}_ns"] = new - old
            if name in before.half_width_ns and name in after.half_width_ns:
                half_width[name] = round(half_width_of_change(before.half_width_ns[name], after.half_width_ns[name]))
    return Change(before=before.label, after=after.label, half_width_ns=half_width, **found)  # type: ignore[arg-type]
