"""From one variant to the next: which part of a step each of them removed, and what it added.

The mean step of a run is divided into parts that sum to it exactly, in whole nanoseconds:

- *compute*: what the rank computes, less the contention;
- *contention*: what communication beside it adds to compute, where that is known;
- *transfer*: exposed communication in which bytes move, but the tail;
- *tail*: exposed communication after backward's compute, waiting left out;
- *wait*: exposed communication in which a peer had not arrived;
- *calls*: the host's work round blocking collectives, one by one;
- *rest*: what is left: data, the host between phases, idle device.

The difference of two runs then is the sum of the differences of their parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.frames import Framed, frame_of
from ddp_prof.analyze.variants.contention import measure_contention
from ddp_prof.trace import UNKNOWN
from ddp_prof.variants import variant_position

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.variants.contention import Contention, KernelSamples

PARTS = ("compute", "contention", "transfer", "tail", "wait", "calls", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A step, or a difference of two, in whole nanoseconds; the parts sum to ``step_ns`` exactly."""

    step_ns: int
    compute_ns: int
    contention_ns: int
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
        contention: How the contention was found, or why not; its part is 0 then and belongs to compute.
        knows_wait: Whether ranks could be compared; else the wait is part of transfer and tail.
    """

    label: str
    device: str
    steps: int
    contention: Contention
    knows_wait: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Parts):
    """What changed from one run to the next."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Waterfall(Framed):
    """Runs in the order in which variants build upon each other, and the changes between them.

    Attributes:
        left_out: Labels of runs without steps, which have no step time.
        warnings: Of all runs.
    """

    budgets: tuple[Budget, ...]
    changes: tuple[Change, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """A row a change."""
        return frame_of(self.changes)


def measure_waterfall(runs: Sequence[tuple[RunAnalysis, Sequence[KernelSamples]]]) -> Waterfall:
    """Order the runs and take the differences of their budgets.

    Args:
        runs: Each with the kernels of its ranks, from which contention is measured: within a run, and against those
            that do the same work.
    """
    contentions = [
        measure_contention(
            own, [kernel for other, kernels in runs if run.does_the_work_of(other) for kernel in kernels]
        )
        for run, own in runs
    ]
    priced = [(run, contention) for (run, _), contention in zip(runs, contentions, strict=True)]
    ordered = sorted(priced, key=lambda item: _position(item[0]))
    budgets = [_budget(run, contention) for run, contention in ordered]
    known = [budget for budget in budgets if budget is not None]
    return Waterfall(
        budgets=tuple(known),
        changes=tuple(_change(before, after) for before, after in pairwise(known)),
        left_out=tuple(run.label for (run, _), budget in zip(ordered, budgets, strict=True) if budget is None),
        warnings=tuple(dict.fromkeys(warning for run, _ in runs for warning in run.trace_warnings)),
    )


def _position(run: RunAnalysis) -> int:
    return variant_position(run.label if run.manifest is None else run.manifest.variant)


def _budget(run: RunAnalysis, contention: Contention) -> Budget | None:
    steps = sum(len(rank.times) for rank in run.ranks)
    if not steps:
        return None
    exposed = tail = wait = 0
    for rank, exposure in zip(run.ranks, run.exposures, strict=True):
        in_step = (rank.timings.step != UNKNOWN) & bool(len(rank.times))
        exposed += int(exposure.exposed_ns[in_step].sum())
        tail += int((exposure.tail_ns - exposure.tail_wait_ns)[in_step].sum())
        wait += int(exposure.exposed_wait_ns[in_step].sum())

    def mean(total: int) -> int:
        return round(total / steps)

    def mean_of(column: str) -> int:
        return mean(sum(int(np.sum(getattr(rank.times, column))) for rank in run.ranks))

    price = contention.contention_ns or 0
    parts = {
        "compute_ns": mean_of("compute_ns") - price,
        "contention_ns": price,
        "transfer_ns": mean(exposed - tail - wait),
        "tail_ns": mean(tail),
        "wait_ns": mean(wait),
        "calls_ns": mean_of("calls_ns"),
    }
    step_ns = mean_of("host_ns")
    return Budget(
        label=run.label,
        device=run.device,
        steps=steps,
        step_ns=step_ns,
        **parts,
        rest_ns=step_ns - sum(parts.values()),
        contention=contention,
        knows_wait=len(run.matches) > 0,
    )


def _change(before: Budget, after: Budget) -> Change:
    names = ("step_ns", *(f"{part}_ns" for part in PARTS))
    differences = {name: getattr(after, name) - getattr(before, name) for name in names}
    return Change(before=before.label, after=after.label, **differences)
