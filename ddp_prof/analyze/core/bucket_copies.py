"""Copies out of what was communicated, such as those of DDP, which copies gradients out of their buckets."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.table import Ints, distinct
from ddp_prof.trace import Kind


def find_bucket_copies(rank: RankEvents) -> Ints:
    """Return the activities that copy out of buckets, on the stream with most compute.

    A memory copy within the device that needs a collective counts, and so do the copies directly behind it on the
    stream, as the other gradients of a bucket. Other copies there, such as those of a batch to the device, do not::

        stream 7    i kkkkkkkk...c1c2c3kkki       i: input, or a loss to the host; c1 needs the collective
        stream 20   ......CCCCCCC
    """
    activities, names = rank.trace.activities, rank.trace.names
    if rank.device is None or not len(rank.blocking.consumers):
        return np.empty(0, np.int64)
    rows = rank.dependencies().in_order
    rows = rows[rank.is_mine[rows] & (activities.lane[rows] == rank.compute_stream)]
    is_copy = activities.kind[rows] == Kind.COPY
    within = [one for one in distinct(activities.name_id[rows[is_copy]]) if is_copy_within_device(names[one])]
    is_copy &= np.isin(activities.name_id[rows], within)
    needs_one = is_copy & np.isin(rows, rank.blocking.consumers.consumer)
    # The last copy that needs a collective, and the last operation that is no such copy, at or before each row.
    place = np.arange(len(rows))
    needed, other = (np.maximum.accumulate(np.where(mask, place, -1)) for mask in (needs_one, ~is_copy))
    found: Ints = rows[is_copy & (needed > other)]
    return found


def is_copy_within_device(name: str) -> bool:
    """Return whether this is the name of a memory copy that neither begins nor ends at the host."""
    name = name.lower()
    return name.startswith("memcpy") and not ("htod" in name or "dtoh" in name)
