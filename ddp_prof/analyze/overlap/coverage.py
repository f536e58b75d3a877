"""How much of the recorded work was assigned to steps, and how backward was identified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.intervals import EVER, Intervals
from ddp_prof.trace import UNKNOWN, select


@dataclass(frozen=True, slots=True)
class Attribution:
    """How much of the work was assigned to steps.

    Attributes:
        events: Events of all ranks.
        attributed_events: Those that belong to a step.
        time_ns: Summed duration of the events.
        attributed_time_ns: Summed duration of those that belong to a step.
        method: Where backward was known from: ``ranges``, ``inferred`` (from autograd's threads) or ``none``.
    """

    events: int
    attributed_events: int
    time_ns: int
    attributed_time_ns: int
    method: str

    @property
    def activities(self) -> float | None:
        """Share of the events, 0 to 1."""
        return _ratio(self.attributed_events, self.events)

    @property
    def device_time(self) -> float | None:
        """Share of their time, 0 to 1."""
        return _ratio(self.attributed_time_ns, self.time_ns)


def measure_attribution(ranks: Sequence[RankEvents], span: Intervals = EVER) -> Attribution:
    """How much of the work of all ranks that starts in a span belongs to a step, and how backward was told."""
    return merge_attributions([_measure_rank_attribution(rank, span) for rank in ranks])


def _measure_rank_attribution(rank: RankEvents, span: Intervals) -> Attribution:
    events = select(rank.events, span.holds(rank.events.start_ns))
    duration = events.end_ns - events.start_ns
    given = (events.step != UNKNOWN) & rank.has_steps
    return Attribution(len(given), int(given.sum()), int(duration.sum()), int(duration[given].sum()), rank.backward)


def merge_attributions(parts: Sequence[Attribution]) -> Attribution:
    """Sum the attribution of several ranks or files; the method is the weakest of theirs."""
    return Attribution(
        events=sum(part.events for part in parts),
        attributed_events=sum(part.attributed_events for part in parts),
        time_ns=sum(part.time_ns for part in parts),
        attributed_time_ns=sum(part.attributed_time_ns for part in parts),
        method=next((name for name in ("inferred", "ranges") if name in {part.method for part in parts}), "none"),
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
