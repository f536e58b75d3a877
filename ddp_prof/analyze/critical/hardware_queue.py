"""Operations that begin only after others that were launched before them, on any stream, as in one queue for all.

A device lets the operations of a queue begin in the order of their launch. If all streams share one, an operation that
waits keeps those behind it from beginning, though nothing that these wait for is missing::

    launched    k1 k2 k3 C         C needs k1 only
    stream 7    1111222233333
    stream 20   ....        CCC    held up until k3 begins; with a queue of its own it begins with k2

    launched    C1 k4 C2 k5        C2 is behind C1 on its stream, and k5 behind C2 in the queue
    stream 20   CCCCCCCCCCC222
    stream 7    444        555
"""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.critical.replay import Work
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, distinct, take_or_unknown

NEXT_NS = 20_000
"""Largest gap between the end of an operation and the start of another one that may have waited for it."""


def find_held_ns(rank: RankEvents, work: Work) -> Ints:
    """How long after it could begin each operation was held up by those of other streams that were launched before it.

    It is 0 where one of these began after it, which a common queue does not allow, and where the order is not known.

    Returns:
        Nanoseconds, of each row of ``work``; at most from the time when it could begin to its start.
    """
    dependencies, bound_ns = rank.dependencies(), work.bound_ns
    stream, place = dependencies.stream[work.activity], dependencies.place[work.activity]
    begun_ns = np.full(len(work), NO_TIME)  # when the last of those launched before began
    for one in distinct(stream):
        own = np.flatnonzero((stream == one) & (place != UNKNOWN))
        own = own[np.argsort(place[own], kind="stable")]
        latest_ns = np.maximum.accumulate(work.start_ns[own])
        others = np.flatnonzero(stream != one)
        before = np.searchsorted(place[own], place[others], side="left") - 1
        begun_ns[others] = np.maximum(begun_ns[others], take_or_unknown(latest_ns, before, NO_TIME))
    is_held = (bound_ns != NO_TIME) & (bound_ns < begun_ns) & (begun_ns <= work.start_ns)
    return np.where(is_held, begun_ns - bound_ns, 0)
