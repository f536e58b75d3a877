"""How much of what was recorded could be given to a step, and how backward was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.analyze.intervals import EVER
from ddp_prof.trace import UNKNOWN, select

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.intervals import Intervals


@dataclass(frozen=True, slots=True)
class Attribution:
    """How much of the work could be given to a step.

    Attributes:
        events: Events of all ranks.
        given_events: Those that belong to a step.
        time_ns: Summed duration of the events.
        given_time_ns: Summed duration of those that belong to a step.
        method: Where backward was known from: ``ranges``, ``inferred`` (from autograd's threads) or ``none``.
    """

    events: int
    given_events: int
    time_ns: int
    given_time_ns: int
    method: str

    @property
    def activities(self) -> float | None:
        """Share of the events, 0 to 1."""
        return _ratio(self.given_events, self.events)

    @property
    def device_time(self) -> float | None:
        """Share of their time, 0 to 1."""
        return _ratio(self.given_time_ns, self.time_ns)


def measure_attribution(ranks: Sequence[RankEvents], span: Intervals = EVER) -> Attribution:
    """How much of the work of all ranks that starts in a span belongs to a step, and how backward was told."""
    chosen = [select(rank.events, span.holds(rank.events.start_ns)) for rank in ranks]
    duration = [events.end_ns - events.start_ns for events in chosen]
    given = [(events.step != UNKNOWN) & rank.has_steps for events, rank in zip(chosen, ranks, strict=True)]
    return Attribution(
        events=sum(map(len, duration)),
        given_events=sum(int(flags.sum()) for flags in given),
        time_ns=sum(int(lengths.sum()) for lengths in duration),
        given_time_ns=sum(int(lengths[rows].sum()) for lengths, rows in zip(duration, given, strict=True)),
        method=_weakest(rank.backward for rank in ranks),
    )


def merge_attributions(parts: Sequence[Attribution]) -> Attribution:
    """Those of several files as one."""
    return Attribution(
        events=sum(part.events for part in parts),
        given_events=sum(part.given_events for part in parts),
        time_ns=sum(part.time_ns for part in parts),
        given_time_ns=sum(part.given_time_ns for part in parts),
        method=_weakest(part.method for part in parts),
    )


def _weakest(methods: Iterable[str]) -> str:
    found = set(methods)
    return next((name for name in ("inferred", "ranges") if name in found), "none")


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
