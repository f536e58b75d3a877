"""Operations that are held up because all streams of a device share one hardware queue.

A device begins the operations of a hardware queue in the order of their launch. If all streams share one queue, an
operation that has to wait holds up the operations behind it, although these could begin. Digits are the operations k1,
k2, ... and C2::

    launched    k1 k2 k3 C         C has to wait for k1 only
    stream 7    1111222233333
    stream 20   ....        CCC    held up until k3 begins; with a queue of its own, C would begin together with k2

    launched    C1 k4 C2 k5        C2 has to wait for C1, which is before it on its stream
    stream 20   CCCCCCCCCCC222     C: C1
    stream 7    444        555     k5 is behind C2 in the queue, so it is held up until C2 begins
"""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.core.work import Work
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, distinct, take_or_unknown


def find_held_ns(work: Work, stream: Ints, place: Ints, rows: Ints | slice = slice(None)) -> Ints:
    """Return how long each operation was held up by operations of other streams that were launched before it.

    That is the time from when the operation could begin until the last of these operations had begun. It is 0 where
    one of them began after the operation, as one common queue would not allow that, and where the order of launch is
    not known.

    Args:
        work: The operations of a rank.
        stream: The number of each operation's stream.
        place: The position of each operation's launch in the order of all calls; ``UNKNOWN`` if it is not known.
        rows: The operations of which to tell it; by default all.

    Returns:
        Nanoseconds for each of ``rows``; at most the time from when the operation could begin to its start.
    """
    bound_ns, start_ns = work.bound_ns[rows], work.start_ns[rows]
    # For each operation, the latest begin of all operations of other streams that were launched before it.
    begun_ns = np.full(len(start_ns), NO_TIME)
    for one in distinct(stream):
        own = np.flatnonzero((stream == one) & (place != UNKNOWN))
        own = own[np.argsort(place[own], kind="stable")]
        latest_ns = np.maximum.accumulate(work.start_ns[own])
        others = np.flatnonzero(stream[rows] != one)
        before = np.searchsorted(place[own], place[rows][others], side="left") - 1
        begun_ns[others] = np.maximum(begun_ns[others], take_or_unknown(latest_ns, before, NO_TIME))
    is_held = (bound_ns != NO_TIME) & (bound_ns < begun_ns) & (begun_ns <= start_ns)
    return np.where(is_held, begun_ns - bound_ns, 0)
