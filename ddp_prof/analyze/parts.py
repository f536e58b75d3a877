"""Measures a capture part by part, and merges the results; the integers are the same as if it was read as a whole.

Each part has a span, and spans do not overlap: lengths of time and numbers of events are measured within the span, so
they add up. A step and its collectives are measured completely in the part in whose span the step starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, or_

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis, analyze_trace
from ddp_prof.analyze.collectives.timing import BLOCKING, RankCollectives
from ddp_prof.analyze.core.rank_events import CaptureFacts, RankEvents, find_launches
from ddp_prof.analyze.core.step_breakdown import ALWAYS, BETWEEN_STEPS, NONE, DevicePhases, Lead, add_leads
from ddp_prof.analyze.intervals import Intervals
from ddp_prof.analyze.kernels.kernel_times import KernelRuns, find_kernel_runs, merge_keys
from ddp_prof.analyze.overlap import RankPart, TraceOverlap, measure_overlap, measure_rank_part, merge_rank_parts
from ddp_prof.analyze.quality import (
    Attribution,
    Diagnostics,
    gather_diagnostics,
    measure_attribution,
    merge_attributions,
    merge_reasons,
)
from ddp_prof.trace import UNKNOWN, Mask, Trace, concatenate, select

_AFTER_BACKWARD, _COMPUTE_STREAM = BLOCKING.index("after_backward"), BLOCKING.index("compute_stream")


@dataclass(frozen=True, eq=False)
class PartResult:
    """What is measured of one part.

    Attributes:
        assumed: Facts of the whole capture that were assumed; ``found`` are those that the part itself shows.
        leads: ``RankEvents.lead_of`` the steps that start in the span, by process and device.
        kernels: Those of each rank in the steps that start in the span; empty if launch shapes were not read.
    """

    assumed: CaptureFacts
    found: CaptureFacts
    leads: dict[tuple[int, int | None], Lead]
    diagnostics: Diagnostics
    attribution: Attribution
    ranks: tuple[RankPart, ...]
    overlap: TraceOverlap
    collectives: RunAnalysis
    kernels: tuple[KernelRuns, ...] = ()


def measure_part(
    trace: Trace, ranks: Sequence[RankEvents], span: Intervals, known: CaptureFacts | None, *, to_draw: bool
) -> PartResult:
    """Measure a part. Its ranks were found by ``known`` facts of the whole capture, or without by those of the part."""
    leads = {(rank.process, rank.device): rank.lead_of(span.holds(rank.steps.start_ns)) for rank in ranks}
    found = CaptureFacts(
        find_launches(trace),
        frozenset((rank.process, rank.device, thread) for rank in ranks for thread in rank.gradient_threads),
        frozenset((rank.process, rank.device) for rank in ranks if rank.runs_ahead),
    )
    diagnostics = gather_diagnostics(trace, ranks, span)
    return PartResult(
        assumed=known or found,
        found=found,
        leads=leads,
        diagnostics=diagnostics,
        attribution=measure_attribution(ranks, span),
        ranks=tuple(measure_rank_part(rank, span) for rank in ranks),
        overlap=measure_overlap(trace, (), diagnostics),
        collectives=_limit_to(span, ranks, analyze_trace(trace, ranks, to_draw=to_draw, diagnostics=diagnostics)),
        kernels=() if trace.shape_id is None else tuple(_kernels_of(rank, span) for rank in ranks),
    )


MOST_KERNELS = 2_000_000
"""Kernels of later parts are not kept: those of the first steps tell how much slower they are beside communication."""


def _kernels_of(rank: RankEvents, span: Intervals) -> KernelRuns:
    runs, in_span = find_kernel_runs(rank), np.append(span.holds(rank.steps.start_ns), False)
    chosen = in_span[runs.step]
    columns = {name: getattr(runs, name)[chosen] for name in ("kernel", "duration_ns", "beside_ns", "step")}
    return replace(runs, **columns, steps=int(in_span.sum()))


def merge_kernels(parts: Sequence[PartResult]) -> list[KernelRuns]:
    """The kernels of each rank, of steps only."""
    merged = []
    for of_rank in zip(*(part.kernels for part in parts if part.kernels), strict=True):
        keys, kernel = merge_keys((runs.keys, runs.kernel) for runs in of_rank)
        columns = {
            name: np.concatenate([getattr(runs, name) for runs in of_rank])
            for name in ("duration_ns", "beside_ns", "step")
        }
        merged.append(KernelRuns(tuple(keys), kernel, **columns, steps=sum(runs.steps for runs in of_rank)))
    return merged


def _limit_to(span: Intervals, ranks: Sequence[RankEvents], found: RunAnalysis) -> RunAnalysis:
    """The collectives of steps that start in the span, and collectives outside of steps that start in it."""
    limited = []
    for one, rank in zip(found.ranks, ranks, strict=True):
        own_step: Mask = np.append(span.holds(rank.steps.start_ns), False)
        timings, phases = one.timings, one.device_phases
        own = np.where(timings.step == UNKNOWN, span.holds(timings.start_ns), own_step[timings.step])
        of_span = replace(
            one,
            timings=select(timings, own),
            device_phases=select(phases, own_step[phases.step]),
            times=select(one.times, own_step[:-1]) if len(one.times) else one.times,
        )
        limited.append(of_span)
    return replace(found, ranks=tuple(limited))


def merge_facts(parts: Sequence[PartResult]) -> CaptureFacts:
    owners = {owner for part in parts for owner in part.leads}  # a device may have no work in a part
    leads = {owner: add_leads(part.leads[owner] for part in parts if owner in part.leads) for owner in owners}
    return CaptureFacts(
        reduce(or_, (part.found.launches for part in parts)),
        reduce(or_, (part.found.gradients for part in parts)),
        frozenset(owner for owner, lead in leads.items() if lead.is_ahead),
    )


def merge_parts(parts: Sequence[PartResult]) -> tuple[TraceOverlap, RunAnalysis]:
    """Merge the parts of one capture, ordered by time; each contains all ranks."""
    diagnostics = reduce(add, (part.diagnostics for part in parts))
    warnings, caveats = diagnostics.warnings(), diagnostics.all_caveats
    overlap = replace(
        parts[0].overlap,
        attribution=merge_attributions([part.attribution for part in parts]),
        ranks=tuple(map(merge_rank_parts, zip(*(part.ranks for part in parts), strict=True))),
        warnings=warnings,
        caveats=caveats,
    )
    ranks = tuple(
        _merge_rank_collectives(of_rank, diagnostics.busiest_stream(of_rank[0].process, of_rank[0].device))
        for of_rank in zip(*(part.collectives.ranks for part in parts), strict=True)
    )
    return overlap, replace(parts[0].collectives, ranks=ranks, trace_warnings=warnings, caveats=caveats)


def _merge_rank_collectives(parts: Sequence[RankCollectives], compute_stream: int) -> RankCollectives:
    """Merge the collectives of a rank; which stream computes most is known of the whole capture only."""
    groups = sorted({group for part in parts for group in part.groups})
    number = {group: index for index, group in enumerate(groups)}
    renumbered = []
    for part in parts:
        group = np.array([*(number[group] for group in part.groups), UNKNOWN], np.int64)
        renumbered.append(replace(part.timings, group=group[part.timings.group]))
    timings = concatenate(*renumbered)
    timings = select(timings, np.lexsort((timings.start_ns, timings.launch_ns, timings.step)))
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
        device_phases=concatenate(select(phases, np.argsort(phases.step, kind="stable")), outside),
        pauses=concatenate(*(part.pauses for part in parts)),
        compute=reduce(or_, (part.compute for part in parts)),
        compute_stream=compute_stream,
        times=concatenate(*(part.times for part in parts)),
        reason=merge_reasons([part.reason for part in parts]),
        unknown_work=merge_reasons([part.unknown_work for part in parts]),
    )
