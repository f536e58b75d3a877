"""The collectives of a capture, from those of its parts: each is known where its step starts."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import analyze_trace
from ddp_prof.analyze.collectives.timing import BLOCKING, CollectiveTimings
from ddp_prof.analyze.core.device_phases import ALWAYS, BETWEEN_STEPS, NONE, DevicePhases
from ddp_prof.analyze.quality.unknown_work import merged_reason
from ddp_prof.trace import NO_TIME, UNKNOWN, concatenate, select

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.timing import RankCollectives
    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.intervals import Intervals
    from ddp_prof.trace import Ints, Mask, Trace

_AFTER_BACKWARD, _COMPUTE_STREAM = BLOCKING.index("after_backward"), BLOCKING.index("compute_stream")


def analyze_part(trace: Trace, ranks: Sequence[RankEvents], span: Intervals, *, to_draw: bool) -> RunAnalysis:
    """The collectives of the steps that start in a span, and of those outside of steps that start in it."""
    found = analyze_trace(trace, ranks, to_draw=to_draw)
    return replace(
        found,
        ranks=tuple(_of_span(one, rank, span) for one, rank in zip(found.ranks, ranks, strict=True)),
        trace_warnings=(),
    )


def _of_span(found: RankCollectives, rank: RankEvents, span: Intervals) -> RankCollectives:
    own_step: Mask = np.append(span.holds(rank.steps.start_ns), False)
    timings = found.timings
    own = np.where(timings.step == UNKNOWN, span.holds(timings.start_ns), own_step[timings.step])
    phases = found.device_phases
    return replace(
        found,
        timings=select(timings, own),
        device_phases=select(phases, own_step[phases.step]),
        backward_end_ns=np.where(own_step[:-1], found.backward_end_ns, NO_TIME),
        times=select(found.times, own_step[:-1]) if len(found.times) else found.times,
    )


def merge_part_analyses(
    parts: Sequence[RunAnalysis], compute_streams: Sequence[int], warnings: tuple[str, ...]
) -> RunAnalysis:
    """The parts of one capture, in the order of time, as one.

    Args:
        parts: What is known of the collectives of each.
        compute_streams: Of each rank, over the whole capture.
        warnings: What the capture does not let one say.
    """
    by_rank = zip(*(part.ranks for part in parts), strict=True)
    ranks = tuple(_merged(ranks, stream) for ranks, stream in zip(by_rank, compute_streams, strict=True))
    return replace(parts[0], ranks=ranks, trace_warnings=warnings)


def _merged(parts: Sequence[RankCollectives], compute_stream: int) -> RankCollectives:
    groups = sorted({group for part in parts for group in part.groups})
    number = {group: index for index, group in enumerate(groups)}
    timings = concatenate(*(_renumbered(part, number) for part in parts))
    timings = select(timings, np.lexsort((timings.start_ns, timings.launch_ns, timings.step)))
    phases = concatenate(*(part.device_phases for part in parts))
    steps = len(parts[0].step_numbers)
    outside = DevicePhases(*(np.array([value]) for value in (steps, ALWAYS, BETWEEN_STEPS, NONE)))
    return replace(
        parts[0],
        timings=replace(timings, blocking=_blocking(timings, compute_stream)),
        groups=tuple(groups),
        backward_end_ns=np.max([part.backward_end_ns for part in parts], axis=0),
        device_phases=concatenate(select(phases, np.argsort(phases.step, kind="stable")), outside),
        compute=reduce(lambda one, other: one | other, (part.compute for part in parts)),
        times=concatenate(*(part.times for part in parts)),
        reason=merged_reason([part.reason for part in parts]),
    )


def _renumbered(part: RankCollectives, number: Mapping[str, int]) -> CollectiveTimings:
    index = np.array([*(number[group] for group in part.groups), UNKNOWN], np.int64)
    return replace(part.timings, group=index[part.timings.group])


def _blocking(timings: CollectiveTimings, compute_stream: int) -> Ints:
    """Which stream computes most is known of the whole alone."""
    on_it = (timings.lane != UNKNOWN) & (timings.lane == compute_stream)
    codes = np.where(on_it, _COMPUTE_STREAM, 0)
    return np.where(timings.blocking == _AFTER_BACKWARD, _AFTER_BACKWARD, codes).astype(np.int64)
