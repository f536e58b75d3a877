"""What the published study concludes, as tests that any set of timings can be put to: the study's own or ours.

Each is a figure and a threshold that it lies above or below, by more than its spread, or does not, or cannot be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.benchmark import effects as measures
from ddp_prof.benchmark.effects import FLAT, NAIVE, OVERLAP
from ddp_prof.variants import BUCKETED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_prof.benchmark.evidence import Evidence, Side, Truth
    from ddp_prof.benchmark.settings import Timing

HARDLY = 0.05
"""A difference below this share of a step is hardly one."""
FEW = 0.10
"""A difference below this share of communication is taken for the calls', not the bytes'."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A statement about variants.

    Attributes:
        name: Key of its words.
        measure: The figure it is about: shares, 0 to 1.
        side: On which side of the threshold the figure lies where the statement holds.
    """

    name: str
    measure: Callable[[Sequence[Timing]], Evidence | None]
    side: Side
    threshold: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a conclusion holds for a set of timings.

    Attributes:
        evidence: ``None`` where the settings it takes were not measured; then ``holds`` is ``cannot tell``.
    """

    name: str
    evidence: Evidence | None
    holds: Truth


def _best_bucket_over_overlap(timings: Sequence[Timing]) -> Evidence | None:
    size = measures.fastest_bucket_size(timings)
    if size is None:
        return None
    return measures.saving(timings, OVERLAP, (BUCKETED, size), choices=len(measures.bucket_sizes(timings)))


CONCLUSIONS = (
    Conclusion("half_of_naive", lambda timings: measures.communication_share(timings, NAIVE), "above", 0.5),
    Conclusion("flat_hardly_helps", lambda timings: measures.saving(timings, NAIVE, FLAT), "below", HARDLY),
    Conclusion(
        "bytes_dominate",
        lambda timings: measures.saving(timings, NAIVE, FLAT, measures.communication_of),
        "below",
        FEW,
    ),
    Conclusion("overlap_beats_naive", lambda timings: measures.saving(timings, NAIVE, OVERLAP), "above", 0.0),
    Conclusion("overlap_beats_flat", lambda timings: measures.saving(timings, FLAT, OVERLAP), "above", 0.0),
    Conclusion("hidden_is_not_saved", measures.hidden_but_not_saved, "above", 0.0),
    Conclusion("context_hides_more", measures.share_drop_with_context, "above", 0.0),
    Conclusion("buckets_beat_overlap", _best_bucket_over_overlap, "above", 0.0),
    Conclusion(
        "100_mb_beats_1_mb",
        lambda timings: measures.saving(timings, (BUCKETED, 1.0), (BUCKETED, 100.0)),
        "above",
        0.0,
    ),
    Conclusion(
        "inner_bucket_waits_least",
        lambda timings: measures.inner_bucket_saving(timings, measures.communication_of),
        "above",
        0.0,
    ),
    Conclusion(
        "inner_bucket_is_fastest",
        lambda timings: measures.inner_bucket_saving(timings, measures.step_of),
        "above",
        0.0,
    ),
)


def judge(timings: Sequence[Timing]) -> tuple[Judgement, ...]:
    """Put a set of timings, of one place, to each conclusion."""
    return tuple(_judge(item, timings) for item in CONCLUSIONS)


def _judge(conclusion: Conclusion, timings: Sequence[Timing]) -> Judgement:
    evidence = conclusion.measure(timings)
    holds: Truth = evidence.is_beyond(conclusion.side, conclusion.threshold) if evidence else "cannot tell"
    return Judgement(conclusion.name, evidence, holds)
