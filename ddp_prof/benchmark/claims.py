"""Whether the claims of the published study hold for a set of timings.

A *claim* is an effect, a threshold, and the side on which the effect must lie. For any set of timings of one testbed,
the study's own included, it holds, or does not hold, or cannot be decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddp_prof.benchmark import effects
from ddp_prof.benchmark.effects import FLAT, HARDLY, NAIVE, OVERLAP
from ddp_prof.present.text import percent
from ddp_prof.variants import BUCKETED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_prof.benchmark.settings import Timing
    from ddp_prof.benchmark.statistics import Effect, Side, Truth

FEW = 0.10
"""A saving below this share of communication is attributed to the calls, not to the bytes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the published study about variants.

    Attributes:
        name: Its key.
        text: What it says of its figure, which is named where it is not obvious.
        measure: The effect that it is about: a share, 0 to 1.
        side: On which side of the threshold the effect lies where the claim holds.
    """

    name: str
    text: str
    measure: Callable[[Sequence[Timing]], Effect | None]
    side: Side = "above"
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Whether a claim holds for a set of timings.

    Attributes:
        effect: ``None`` where the settings that it needs were not measured; then ``holds`` is ``cannot tell``.
        text: What the claim says.
    """

    name: str
    effect: Effect | None
    holds: Truth
    text: str


def _best_bucket_over_overlap(timings: Sequence[Timing]) -> Effect | None:
    size = effects.fastest_bucket_size(timings)
    if size is None:
        return None
    return effects.saving(timings, OVERLAP, (BUCKETED, size), choices=len(effects.bucket_sizes(timings)))


CLAIMS = (
    Claim(
        "half_of_naive", "under naive, communication takes more than half of the step",
        partial(effects.communication_share, variant=NAIVE), "above", 0.5,
    ),
    Claim(
        "flat_hardly_helps", f"flat takes less than {percent(HARDLY)} off naive's step",
        partial(effects.saving, before=NAIVE, after=FLAT), "below", HARDLY,
    ),
    Claim(
        "bytes_dominate", f"one call for all gradients takes less than {percent(FEW)} off naive's communication",
        partial(effects.saving, before=NAIVE, after=FLAT, quantity=effects.communication_of), "below", FEW,
    ),
    Claim(
        "overlap_beats_naive", "overlap has a shorter step than naive (share of naive's step)",
        partial(effects.saving, before=NAIVE, after=OVERLAP),
    ),
    Claim(
        "overlap_beats_flat", "overlap has a shorter step than flat (share of flat's step)",
        partial(effects.saving, before=FLAT, after=OVERLAP),
    ),
    Claim(
        "hidden_is_not_saved",
        "overlap takes more off communication than off the step (difference, share of naive's step)",
        effects.hidden_but_not_saved,
    ),
    Claim(
        "context_hides_more",
        "at longer contexts, communication is a smaller share of the step (shortest minus longest)",
        effects.share_drop_with_context,
    ),
    Claim(
        "buckets_beat_overlap", "buckets of the best size have a shorter step than overlap (share of overlap's step)",
        _best_bucket_over_overlap,
    ),
    Claim(
        "100_mb_beats_1_mb", "buckets of 100 MB have a shorter step than buckets of 1 MB (share of the step)",
        partial(effects.saving, before=(BUCKETED, 1.0), after=(BUCKETED, 100.0)),
    ),
    Claim(
        "inner_bucket_waits_least",
        "a bucket size between the smallest and the largest leaves the least communication",
        partial(effects.inner_bucket_saving, quantity=effects.communication_of),
    ),
    Claim(
        "inner_bucket_is_fastest", "a bucket size between the smallest and the largest has the shortest step",
        partial(effects.inner_bucket_saving, quantity=effects.step_of),
    ),
)  # fmt: skip


def check_claims(timings: Sequence[Timing]) -> tuple[ClaimResult, ...]:
    """Put a set of timings, of one testbed, to each claim."""
    return tuple(_check(claim, timings) for claim in CLAIMS)


def _check(claim: Claim, timings: Sequence[Timing]) -> ClaimResult:
    effect = claim.measure(timings)
    holds: Truth = effect.is_beyond(claim.side, claim.threshold) if effect else "cannot tell"
    return ClaimResult(claim.name, effect, holds, claim.text)
