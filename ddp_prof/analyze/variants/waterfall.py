"""From one variant to the next: which part of a step each of them removed, and what it added.

The mean step of a run is divided into parts that sum to it exactly, in whole nanoseconds:

- *compute*: what the rank computes, less the contention;
- *contention*: what communication beside it adds to compute, where that is known;
- *transfer*: exposed communication in which bytes move, but the tail;
- *tail*: exposed communication after the last compute of backward, waiting left out;
- *wait*: exposed communication in which a peer had not arrived;
- *calls*: the host's work round blocking collectives, one by one;
- *rest*: what is left: data, the host between phases, idle device.

The difference of two runs then is the sum of the differences of their parts. How far a mean may be off in 95 of 100
cases follows from the scatter of the steps (Student's t; the ranks of a step wait for one another, so a step counts
once). A change within that is none that can be told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import TAIL, WHENS
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.frames import Framed, frame_of
from ddp_prof.analyze.quality.unknown_work import NO_COMMUNICATION, NOTHING
from ddp_prof.analyze.statistics import LEAST_STEPS, half_width_of_mean
from ddp_prof.analyze.variants.contention import measure_contention
from ddp_prof.trace import UNKNOWN
from ddp_prof.variants import variant_position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.variants.contention import Contention, KernelSamples
    from ddp_prof.manifest import Caveat
    from ddp_prof.trace import Ints

SAMPLED = ("step", "compute", "transfer", "tail", "wait", "calls", "rest")
"""What is measured of each step; contention is measured of a whole run."""
PARTS = ("compute", "contention", "transfer", "tail", "wait", "calls", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A step, or a difference of two, in whole nanoseconds; the parts that are known sum to ``step_ns`` exactly.

    Attributes:
        contention_ns: ``None`` where it is not known of the run, or of one of the two; it is part of compute then.
    """

    step_ns: int
    compute_ns: int
    contention_ns: int | None
    transfer_ns: int
    tail_ns: int
    wait_ns: int
    calls_ns: int
    rest_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Parts):
    """The mean step of a run, over steps and ranks.

    Attributes:
        steps: Steps of all ranks that it is the mean of.
        contention: How the contention was found, or why not.
        knows_wait: Whether ranks could be compared; else the wait is part of transfer and tail.
        half_width_ns: Of each part, and of ``step``, half of the mean's 95 % interval; empty with too few steps.
    """

    label: str
    device: str
    steps: int
    contention: Contention
    knows_wait: bool
    half_width_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Parts):
    """What changed from one run to the next.

    Attributes:
        half_width_ns: As of :class:`Budget`, of the change.
    """

    before: str
    after: str
    half_width_ns: Mapping[str, int]

    def is_beyond_spread(self, part: str) -> bool | None:
        """Whether a part, or ``step``, changed by more than both runs' spread; ``None`` where that is not known."""
        half_width = self.half_width_ns.get(part)
        change: int | None = getattr(self, f"{part}_ns")
        return None if half_width is None or change is None else abs(change) > half_width


@dataclass(frozen=True, slots=True)
class Waterfall(Framed):
    """Runs in the order in which variants build upon each other, and the changes between them.

    Attributes:
        left_out: Labels of runs without steps, which have no step time.
        unknown: Labels of runs whose traces do not tell all that ran in their steps, as of CUDA graphs recorded whole.
        other_device: Labels of runs on another device than the first, ``cpu`` or ``cuda``, which are other jobs.
        warnings: Of all runs.
        caveats: Why runs are not representative, of all runs.
    """

    budgets: tuple[Budget, ...]
    changes: tuple[Change, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    caveats: tuple[Caveat, ...] = ()
    other_device: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """A row a change."""
        return frame_of(self.changes)


def measure_waterfall(runs: Sequence[tuple[RunAnalysis, Sequence[KernelSamples]]]) -> Waterfall:
    """Order the runs and take the differences of their budgets.

    Args:
        runs: Each with the kernels of its ranks, from which contention is measured: within a run, and against those
            that do the same work.
    """
    unknown = tuple(run.label for run, _ in runs if _is_unknown(run))
    told = [(run, kernels) for run, kernels in runs if not _is_unknown(run)]
    contentions = [
        measure_contention(
            own, [kernel for other, kernels in told if run.does_the_work_of(other) for kernel in kernels]
        )
        for run, own in told
    ]
    priced = [(run, contention) for (run, _), contention in zip(told, contentions, strict=True)]
    ordered = sorted(priced, key=lambda item: _position(item[0]))
    budgets = [(run, _budget(run, contention)) for run, contention in ordered]
    known = [(run.device, budget) for run, budget in budgets if budget is not None]
    alike = [budget for device, budget in known if device == known[0][0]]
    return Waterfall(
        budgets=tuple(alike),
        changes=tuple(_change(before, after) for before, after in pairwise(alike)),
        left_out=tuple(run.label for run, budget in budgets if budget is None),
        caveats=tuple(dict.fromkeys(caveat for run, _ in runs for caveat in run.caveats)),
        warnings=tuple(dict.fromkeys(warning for run, _ in runs for warning in run.trace_warnings)),
        other_device=tuple(budget.label for device, budget in known if device != known[0][0]),
        unknown=unknown,
    )


def _is_unknown(run: RunAnalysis) -> bool:
    """Whether a rank has steps of which the trace does not tell all that ran in them."""
    return any(len(rank.times) and rank.reason not in (None, NO_COMMUNICATION, NOTHING) for rank in run.ranks)


def _position(run: RunAnalysis) -> int:
    return variant_position(run.label if run.manifest is None else run.manifest.variant)


def _budget(run: RunAnalysis, contention: Contention) -> Budget | None:
    samples = _samples(run)
    steps = len(samples["step"])
    if not steps:
        return None

    def mean(part: str) -> int:
        return round(float(samples[part].sum()) / steps)

    price = contention.contention_ns
    parts = {f"{part}_ns": mean(part) for part in ("transfer", "tail", "wait", "calls")}
    compute_ns, step_ns = mean("compute"), mean("step")
    return Budget(
        label=run.label,
        device=run.device,
        steps=steps,
        step_ns=step_ns,
        compute_ns=compute_ns - (price or 0),
        contention_ns=price,
        **parts,
        rest_ns=step_ns - compute_ns - sum(parts.values()),
        contention=contention,
        knows_wait=len(run.matches) > 0,
        half_width_ns=_half_widths(samples, [len(rank.times) for rank in run.ranks if len(rank.times)], contention),
    )


def _samples(run: RunAnalysis) -> dict[str, Ints]:
    """The parts of each step of each rank, but for the contention; rank after rank."""
    columns: dict[str, list[Ints]] = {part: [np.empty(0, np.int64)] for part in SAMPLED}
    for rank, exposure in zip(run.ranks, run.exposures, strict=True):
        count = len(rank.times)
        rows = (rank.timings.step != UNKNOWN) & bool(count)
        step = rank.timings.step[rows]
        exposed = sum_by_group(exposure.exposed_ns[rows], step, count)
        wait = sum_by_group(exposure.exposed_wait_ns[rows], step, count)
        tail = exposure.pairs_ns[:, WHENS.index(TAIL)].sum(axis=1) - exposure.tail_wait_ns
        of_tail = sum_by_group(tail[rows], step, count)
        host, compute, calls = rank.times.host_ns, rank.times.compute_ns, rank.times.calls_ns
        transfer = exposed - wait - of_tail
        rest = host - compute - exposed - calls
        values = (host, compute, transfer, of_tail, wait, calls, rest)
        for part, column in zip(SAMPLED, values, strict=True):
            columns[part].append(column)
    return {part: np.concatenate(parts) for part, parts in columns.items()}


def _half_widths(samples: Mapping[str, Ints], counts: Sequence[int], contention: Contention) -> dict[str, int]:
    """By the steps that every rank has; ``counts`` says how many each has."""
    steps = min(counts)
    if steps < LEAST_STEPS:
        return {}
    by_rank = np.cumsum([0, *counts[:-1]])[:, np.newaxis] + np.arange(steps)
    found = {part: half_width_of_mean(column[by_rank].mean(axis=0)) for part, column in samples.items()}
    if contention.slowdown and contention.slowdown > 1 and contention.contention_ns:
        width = ((contention.slowdown_high or 0) - (contention.slowdown_low or 0)) / 2
        found["contention"] = round(contention.contention_ns * width / (contention.slowdown - 1))
        found["compute"] = round(float(np.hypot(found["compute"], found["contention"])))
    elif contention.contention_ns is not None:
        found["contention"] = 0
    return found


def _change(before: Budget, after: Budget) -> Change:
    if None in (before.contention_ns, after.contention_ns):
        before, after = without_contention(before), without_contention(after)
    names = [name for name in ("step", *PARTS) if name != "contention" or before.contention_ns is not None]
    differences = {f"{name}_ns": getattr(after, f"{name}_ns") - getattr(before, f"{name}_ns") for name in names}
    both = set(before.half_width_ns) & set(after.half_width_ns)
    half_width = {
        name: round(float(np.hypot(before.half_width_ns[name], after.half_width_ns[name])))
        for name in names
        if name in both
    }
    return Change(
        before=before.label, after=after.label, half_width_ns=half_width, **{"contention_ns": None, **differences}
    )


def without_contention(budget: Budget) -> Budget:
    """The same step with its contention as part of compute."""
    return replace(budget, compute_ns=budget.compute_ns + (budget.contention_ns or 0), contention_ns=None)
