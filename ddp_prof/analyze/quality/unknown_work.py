"""Why the overlap of a rank is not known: the trace does not hold all that it did."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.trace import Category

NOTHING = "no GPU activities, and no ddp_prof ranges that tell what the CPU did"
"""Of a rank without events."""

GRAPHS = "CUDA graphs were recorded whole, so what they compute and communicate is not in this trace"

UNMARKED_WAITS = "no range 'synchronize' tells when the host waits, so what it computed meanwhile is not known"
"""Of a CPU."""

NO_COMMUNICATION = "nothing in this trace is known to communicate"

MOST_UNNAMED = 0.01
"""Share of kernels, in number or time, up to which those without a name do not spoil the figures."""


def why_unknown(rank: RankEvents) -> str | None:
    """Why there is no share of communication that hides; ``None`` where there is one."""
    if _has_too_many_unnamed(rank):
        share = rank.trace.unresolved_names.share
        return f"{share:.0%} of the kernels have no name, so it is not known which of them communicate"
    if not len(rank.events):
        return NOTHING
    if np.any(rank.events.category == Category.OTHER):
        return GRAPHS
    if rank.hides_waits:
        return UNMARKED_WAITS
    return None if rank.union_of(Category.COMMUNICATION).length_ns else NO_COMMUNICATION


def merge_reasons(reasons: Collection[str | None]) -> str | None:
    """Combine the reasons of the parts of one rank's capture, or of several ranks, into one."""
    distinct = set(reasons)
    if GRAPHS in distinct or None in distinct:
        return GRAPHS if GRAPHS in distinct else None
    return max((reason for reason in distinct if reason), default=None, key=lambda reason: reason != NOTHING)


def reason_of_run(ranks: Sequence[tuple[str | None, bool]]) -> str | None:
    """Why the figures of a run are not known, or not all of them.

    Args:
        ranks: The reason of each rank, and whether it communicates. One that communicates decides first; otherwise one
            rank that is known is enough.
    """
    reasons = [reason for reason, _ in ranks]
    doubtful = [reason for reason, communicates in ranks if reason and communicates]
    if not doubtful and None in reasons:
        return None
    return merge_reasons(doubtful or reasons) if ranks else NO_COMMUNICATION


def hides_work(rank: RankEvents) -> bool:
    """Whether there is time of which it is not known what ran in it: CUDA graphs recorded whole, unnamed kernels."""
    return any(bool(np.any(rank.events.category == hidden)) for hidden in (Category.OTHER, Category.UNKNOWN))


def has_no_usable_events(rank: RankEvents) -> bool:
    """Whether the trace does not tell what the rank computed and communicated."""
    return not len(rank.events) or _has_too_many_unnamed(rank)


def _has_too_many_unnamed(rank: RankEvents) -> bool:
    return rank.trace.unresolved_names.share > MOST_UNNAMED
