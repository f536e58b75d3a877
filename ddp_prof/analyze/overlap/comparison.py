"""Variants side by side: what a step costs and how much of its communication hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.statistics import StepMedian, median_of_steps
from ddp_prof.variants import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.overlap.overlap import StepOverlap, TraceOverlap


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """One run. Times are medians over the steps of all ranks; ``None`` where the trace holds no steps.

    Times of communication are medians over the steps that communicate: steps that only accumulate gradients are none.

    Attributes:
        steps: Of one rank.
        step_ns: The host's time of a step.
        step_spread_ns: Interquartile range of it.
        step_half_width_ns: Half of the median's interval; ``None`` with too few steps. ``exposed_half_width_ns``
            likewise.
        collectives: Collectives a step.
        overlapped_ns: ``comm_ns`` less ``exposed_ns``, so that the figures of a row sum.
        tail_ns: At most ``exposed_ns``; ``None`` where the backward of a step that communicates is not known.
        overlap_ratio: Share of all communication of all ranks that compute hides, 0 to 1.
        overlap_ratio_without_outliers: The same without the steps that alone hold a large part of the exposed time;
            ``None`` where there are none.
        window_ns: The device's window of a step that communicates; ``compute_only_ns`` and ``exposed_memory_ns`` are
            parts of it, and ``idle_ns`` is what they and communication leave of it.
        speedup: Step time of the ``naive`` run over this one's; ``None`` where there is no such run, or where it ran on
            another device.
    """

    label: str
    device: str
    ranks: int
    steps: int
    step_ns: int | None
    step_spread_ns: int | None
    collectives: float | None
    comm_ns: int | None
    overlapped_ns: int | None
    exposed_ns: int | None
    tail_ns: int | None
    overlap_ratio: float | None
    backward_overlap_ratio: float | None
    speedup: float | None
    step_half_width_ns: int | None = None
    exposed_half_width_ns: int | None = None
    overlap_ratio_without_outliers: float | None = None
    window_ns: int | None = None
    compute_only_ns: int | None = None
    exposed_memory_ns: int | None = None
    idle_ns: int | None = None


def compare_variants(results: Sequence[TraceOverlap]) -> tuple[VariantSummary, ...]:
    """Summarize each run, in the order given."""
    naive = next((result for result in results if result.label == BASELINE), None)
    return tuple(_summary(result, naive) for result in results)


def _summary(result: TraceOverlap, naive: TraceOverlap | None) -> VariantSummary:
    steps = _steps(result)
    communicating = [step for step in steps if step.comm_ns] or steps
    hosts = [step.host_ns for step in steps if step.host_ns is not None]
    step = _median(result, "host_ns", steps)
    comm, exposed, tail, collectives = (
        _median(result, name, communicating) for name in ("comm_ns", "exposed_ns", "tail_ns", "collectives")
    )
    tells_tail = all(step.tail_ns is not None for step in communicating)
    outliers = result.outliers
    return VariantSummary(
        label=result.label,
        device=result.device,
        ranks=len(result.ranks),
        steps=_steps_of_a_rank(result),
        step_ns=_value(step),
        step_spread_ns=round(float(np.subtract(*np.percentile(hosts, [75, 25])))) if hosts else None,
        collectives=collectives.value if collectives else None,
        comm_ns=_value(comm),
        overlapped_ns=round(comm.value) - round(exposed.value) if comm and exposed else None,
        exposed_ns=_value(exposed),
        tail_ns=_value(tail) if tells_tail else None,
        overlap_ratio=_share(result, "overlapped_ns"),
        backward_overlap_ratio=_share(result, "backward_overlapped_ns"),
        speedup=_speedup(result.device, step, naive),
        step_half_width_ns=_half_width(step),
        exposed_half_width_ns=_half_width(exposed),
        overlap_ratio_without_outliers=outliers.overlap_ratio_without if outliers else None,
        **_parts(result, communicating, comm),
    )


def _speedup(device: str, step: StepMedian | None, naive: TraceOverlap | None) -> float | None:
    if naive is None or naive.device != device or step is None or not step.value:
        return None
    baseline = _median(naive, "host_ns", _steps(naive))
    return baseline.value / step.value if baseline else None


def _parts(result: TraceOverlap, steps: Sequence[StepOverlap], comm: StepMedian | None) -> dict[str, int | None]:
    """Medians of the parts of the window; what is left of the median window is idle."""
    names = ("window_ns", "compute_only_ns", "exposed_memory_ns")
    window, *filled = (*(_value(_median(result, name, steps)) for name in names), _value(comm))
    known = [length for length in filled if length is not None]
    idle = None if window is None or len(known) < len(filled) else max(0, window - sum(known))
    return {**dict(zip(names, (window, *filled), strict=False)), "idle_ns": idle}


def _value(median: StepMedian | None) -> int | None:
    return None if median is None else round(median.value)


def _half_width(median: StepMedian | None) -> int | None:
    return None if median is None or median.half_width is None else round(median.half_width)


def _steps_of_a_rank(result: TraceOverlap) -> int:
    return max((len(rank.told_steps) for rank in result.ranks), default=0)


def _steps(result: TraceOverlap) -> list[StepOverlap]:
    return [step for rank in result.ranks for step in rank.told_steps]


def _median(result: TraceOverlap, name: str, steps: Sequence[StepOverlap]) -> StepMedian | None:
    values = [value for step in steps if (value := getattr(step, name)) is not None]
    return median_of_steps(values, len(values) // max(1, len(result.ranks)))


def _share(result: TraceOverlap, part: str) -> float | None:
    """The part's share of communication over the ranks where both are known."""
    known = [rank for rank in result.ranks if rank.overlap_ratio is not None and getattr(rank, part) is not None]
    total = sum(rank.comm_ns or 0 for rank in known)
    return sum(getattr(rank, part) for rank in known) / total if total else None
