"""Variants side by side: what a step costs and how much of its communication hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.variants import BASELINE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_prof.analyze.overlap.overlap import StepOverlap, TraceOverlap


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """One run. Times are medians over the steps of all ranks; ``None`` where the trace holds no steps.

    Attributes:
        step_ns: The host's time of a step.
        step_spread_ns: Interquartile range of it.
        collectives: Collectives a step.
        overlap_ratio: Share of all communication of all ranks that compute hides, 0 to 1.
        speedup: Step time of the ``naive`` run over this one's; ``None`` where there is no such run.
    """

    label: str
    device: str
    ranks: int
    steps: int
    step_ns: float | None
    step_spread_ns: float | None
    collectives: float | None
    comm_ns: float | None
    overlapped_ns: float | None
    exposed_ns: float | None
    tail_ns: float | None
    overlap_ratio: float | None
    backward_overlap_ratio: float | None
    speedup: float | None


def compare_variants(results: Sequence[TraceOverlap]) -> tuple[VariantSummary, ...]:
    """Summarize each run, in the order given."""
    naive = next((_median(result, lambda step: step.host_ns) for result in results if result.label == BASELINE), None)
    return tuple(_summary(result, naive) for result in results)


def _summary(result: TraceOverlap, naive_ns: float | None) -> VariantSummary:
    step_ns = _median(result, lambda step: step.host_ns)
    hosts = [step.host_ns for step in _steps(result) if step.host_ns is not None]
    return VariantSummary(
        label=result.label,
        device=result.device,
        ranks=len(result.ranks),
        steps=max((sum(step.host_ns is not None for step in rank.steps) for rank in result.ranks), default=0),
        step_ns=step_ns,
        step_spread_ns=float(np.subtract(*np.percentile(hosts, [75, 25]))) if hosts else None,
        collectives=_median(result, lambda step: step.collectives),
        comm_ns=_median(result, lambda step: step.comm_ns),
        overlapped_ns=_median(result, lambda step: step.overlapped_ns),
        exposed_ns=_median(result, lambda step: step.exposed_ns),
        tail_ns=_median(result, lambda step: step.tail_ns),
        overlap_ratio=_share(result, "overlapped_ns"),
        backward_overlap_ratio=_share(result, "backward_overlapped_ns"),
        speedup=naive_ns / step_ns if naive_ns and step_ns else None,
    )


def _steps(result: TraceOverlap) -> list[StepOverlap]:
    """The steps that the trace tells; the whole capture is none."""
    return [step for rank in result.ranks for step in rank.steps if step.host_ns is not None]


def _median(result: TraceOverlap, of: Callable[[StepOverlap], int | None]) -> float | None:
    values = [value for value in map(of, _steps(result)) if value is not None]
    return float(np.median(values)) if values else None


def _share(result: TraceOverlap, part: str) -> float | None:
    """The part's share of communication over the ranks where both are known."""
    known = [rank for rank in result.ranks if rank.comm_ns and getattr(rank, part) is not None]
    total = sum(rank.comm_ns or 0 for rank in known)
    return sum(getattr(rank, part) for rank in known) / total if total else None
