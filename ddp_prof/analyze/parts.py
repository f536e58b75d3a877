"""Merges the results of a capture's parts; the integers are the same as if the capture was read as a whole.

Each part has a span, and spans do not overlap: lengths of time and numbers of events are measured within the span, so
they add up. A step and its collectives are measured completely in the part in whose span the step starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis, analyze_trace
from ddp_prof.analyze.collectives.timing import BLOCKING, RankCollectives
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import ALWAYS, BETWEEN_STEPS, NONE, DevicePhases
from ddp_prof.analyze.intervals import Intervals
from ddp_prof.analyze.overlap import (
    MOST_LOST,
    RankOverlap,
    StepLength,
    TraceOverlap,
    lost_ns,
    measure_overlap,
    measure_rank,
    without_figures,
)
from ddp_prof.analyze.quality import NOTHING, hides_work, measure_attribution, merge_attributions, merge_reasons
from ddp_prof.trace import NO_TIME, UNKNOWN, Mask, Trace, concatenate, select

_AFTER_BACKWARD, _COMPUTE_STREAM = BLOCKING.index("after_backward"), BLOCKING.index("compute_stream")


def analyze_part(trace: Trace, ranks: Sequence[RankEvents], span: Intervals, *, to_draw: bool) -> RunAnalysis:
    """The collectives of steps that start in the span, and collectives outside of steps that start in it."""
    found = analyze_trace(trace, ranks, to_draw=to_draw, warnings=())
    limited = []
    for one, rank in zip(found.ranks, ranks, strict=True):
        own_step: Mask = np.append(span.holds(rank.steps.start_ns), False)
        timings, phases = one.timings, one.device_phases
        own = np.where(timings.step == UNKNOWN, span.holds(timings.start_ns), own_step[timings.step])
        of_span = replace(
            one,
            timings=select(timings, own),
            device_phases=select(phases, own_step[phases.step]),
            backward_end_ns=np.where(own_step[:-1], one.backward_end_ns, NO_TIME),
            times=select(one.times, own_step[:-1]) if len(one.times) else one.times,
        )
        limited.append(of_span)
    return replace(found, ranks=tuple(limited))


def merge_part_analyses(
    parts: Sequence[RunAnalysis], compute_streams: Sequence[int], warnings: tuple[str, ...]
) -> RunAnalysis:
    """Merge the parts of one capture, ordered by time; ``compute_streams`` has each rank's, of the whole capture."""
    by_rank = zip(*(part.ranks for part in parts), strict=True)
    ranks = tuple(
        _merge_rank_collectives(ranks, stream) for ranks, stream in zip(by_rank, compute_streams, strict=True)
    )
    return replace(parts[0], ranks=ranks, trace_warnings=warnings)


def _merge_rank_collectives(parts: Sequence[RankCollectives], compute_stream: int) -> RankCollectives:
    groups = sorted({group for part in parts for group in part.groups})
    number = {group: index for index, group in enumerate(groups)}
    renumbered = []
    for part in parts:
        group = np.array([*(number[group] for group in part.groups), UNKNOWN], np.int64)
        renumbered.append(replace(part.timings, group=group[part.timings.group]))
    timings = concatenate(*renumbered)
    timings = select(timings, np.lexsort((timings.start_ns, timings.launch_ns, timings.step)))
    # Which stream computes most is known of the whole capture only.
    on_it = (timings.lane != UNKNOWN) & (timings.lane == compute_stream)
    is_after = timings.blocking == _AFTER_BACKWARD
    blocking = np.where(is_after, _AFTER_BACKWARD, np.where(on_it, _COMPUTE_STREAM, 0)).astype(np.int64)
    phases = concatenate(*(part.device_phases for part in parts))
    steps = len(parts[0].step_numbers)
    outside = DevicePhases(*(np.array([value]) for value in (steps, ALWAYS, BETWEEN_STEPS, NONE)))
    return replace(
        parts[0],
        timings=replace(timings, blocking=blocking),
        groups=tuple(groups),
        backward_end_ns=np.max([part.backward_end_ns for part in parts], axis=0),
        device_phases=concatenate(select(phases, np.argsort(phases.step, kind="stable")), outside),
        compute=reduce(lambda one, other: one | other, (part.compute for part in parts)),
        times=concatenate(*(part.times for part in parts)),
        reason=merge_reasons([part.reason for part in parts]),
        unknown_work=merge_reasons([part.unknown_work for part in parts]),
    )


_ADDED = ("kernels", "collectives", "compute_ns", "comm_ns", "overlapped_ns", "exposed_ns")


class PartOverlap(NamedTuple):
    """The overlap in the span of a part, and for each rank the results of ``hides_work`` and ``lost_ns``."""

    result: TraceOverlap
    hides_work: tuple[bool, ...]
    lost_ns: tuple[int, ...]


def measure_part_overlap(trace: Trace, ranks: Sequence[RankEvents], span: Intervals) -> PartOverlap:
    result = replace(
        measure_overlap(trace, (), warnings=()),
        attribution=measure_attribution(ranks, span),
        ranks=tuple(measure_rank(rank, span) for rank in ranks),
    )
    return PartOverlap(result, tuple(map(hides_work, ranks)), tuple(lost_ns(rank, span) for rank in ranks))


def merge_part_overlaps(parts: Sequence[PartOverlap], warnings: tuple[str, ...]) -> TraceOverlap:
    """Merge the parts of one capture, ordered by time; each contains all ranks."""
    by_rank = zip(*(part.result.ranks for part in parts), strict=True)
    hides = map(any, zip(*(part.hides_work for part in parts), strict=True))
    lost = map(sum, zip(*(part.lost_ns for part in parts), strict=True))
    return replace(
        parts[0].result,
        attribution=merge_attributions([part.result.attribution for part in parts]),
        ranks=tuple(map(_merge_rank_overlap, by_rank, hides, lost)),
        warnings=warnings,
    )


def _merge_rank_overlap(ranks: Sequence[RankOverlap], is_hidden: bool, lost: int) -> RankOverlap:
    steps = [step for rank in ranks for step in rank.steps]
    if is_hidden:
        unknown: dict[str, Any] = {"compute_only_ns": None, "idle_ns": None}
        steps = [replace(step, **unknown, length=replace(step.length, **unknown)) for step in steps]
    total = {name: sum(getattr(rank, name) for rank in ranks) for name in _ADDED}
    if lost > MOST_LOST * total["comm_ns"]:
        steps = list(map(without_figures, steps))
    hidden = [rank.backward_overlapped_ns for rank in ranks if rank.backward_overlapped_ns is not None]
    merged = replace(
        ranks[0],
        **total,
        backward_overlapped_ns=sum(hidden) if hidden else None,
        reason=merge_reasons([rank.reason for rank in ranks]),
        steps=tuple(steps),
    )
    if any(rank.reason != NOTHING for rank in ranks):
        return merged
    steps = [
        replace(without_figures(step), length=StepLength(step.length.start_ns, step.length.ns))
        for step in steps
        if step.host_ns is not None
    ]
    return replace(merged, compute_ns=None, comm_ns=None, overlapped_ns=None, exposed_ns=None, steps=tuple(steps))
