"""The overlap of a capture, from that of its parts.

Lengths of time and numbers of events are measured in the span of a part, and spans do not meet, so they add up. A step
is measured as a whole in the part in whose span it starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddp_prof.analyze.overlap.coverage import measure_attribution, merge_attributions
from ddp_prof.analyze.overlap.overlap import measure_overlap, measure_rank
from ddp_prof.analyze.quality.unknown_work import NOTHING, hides_work, merged_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.intervals import Intervals
    from ddp_prof.analyze.overlap.overlap import RankOverlap, TraceOverlap
    from ddp_prof.trace import Trace


_ADDED = ("kernels", "collectives", "compute_ns", "comm_ns", "overlapped_ns", "exposed_ns")


class PartOverlap(NamedTuple):
    """What is measured in the span of a part.

    Attributes:
        hides_work: Of each rank, whether it is not known of some time what ran in it.
    """

    result: TraceOverlap
    hides_work: tuple[bool, ...]


def measure_part_overlap(trace: Trace, ranks: Sequence[RankEvents], span: Intervals) -> PartOverlap:
    """Measure what starts in the span of a part."""
    result = replace(
        measure_overlap(trace, ()),
        attribution=measure_attribution(ranks, span),
        ranks=tuple(measure_rank(rank, span) for rank in ranks),
        warnings=(),
    )
    return PartOverlap(result, tuple(map(hides_work, ranks)))


def merge_part_overlaps(parts: Sequence[PartOverlap], warnings: tuple[str, ...]) -> TraceOverlap:
    """The parts of one capture, in the order of time, as one; each knows all ranks."""
    by_rank = zip(*(part.result.ranks for part in parts), strict=True)
    hides = [any(flags) for flags in zip(*(part.hides_work for part in parts), strict=True)]
    return replace(
        parts[0].result,
        attribution=merge_attributions([part.result.attribution for part in parts]),
        ranks=tuple(_merged(ranks, hidden) for ranks, hidden in zip(by_rank, hides, strict=True)),
        warnings=warnings,
    )


def _merged(ranks: Sequence[RankOverlap], is_hidden: bool) -> RankOverlap:
    steps = [step for rank in ranks for step in rank.steps]
    if is_hidden:
        lengths = [replace(step.length, compute_only_ns=None, idle_ns=None) for step in steps]
        steps = [
            replace(step, compute_only_ns=None, idle_ns=None, length=length)
            for step, length in zip(steps, lengths, strict=True)
        ]
    total = {name: sum(getattr(rank, name) for rank in ranks) for name in _ADDED}
    hidden = [rank.backward_overlapped_ns for rank in ranks if rank.backward_overlapped_ns is not None]
    merged = replace(
        ranks[0],
        **total,
        backward_overlapped_ns=sum(hidden) if hidden else None,
        reason=merged_reason([rank.reason for rank in ranks]),
        steps=tuple(steps),
    )
    if any(rank.reason != NOTHING for rank in ranks):
        return merged
    return replace(merged, compute_ns=None, comm_ns=None, overlapped_ns=None, exposed_ns=None, steps=())
