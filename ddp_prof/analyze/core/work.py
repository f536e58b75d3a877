"""The operations of a device, and what delayed each of them: the host, or which other operation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.edges import Dependencies, HostCalls
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, Table, begins_run, positions, take_or_unknown
from ddp_prof.trace import Category, Trace

BACK_TO_BACK_NS = 20_000
"""20 microseconds: an operation that waited only for another one begins at most so long after the other one's end."""


@dataclass(frozen=True)
class Work(Table):
    """The operations of one device, stream by stream in the order of their launch.

    Attributes:
        activity: Row of the operation in the trace's activities.
        category: See :class:`ddp_prof.trace.Category`.
        start_ns, end_ns: When it ran.
        bound_by: Row in this table of the operation that delayed it: it waited for its end last. ``UNKNOWN`` if its
            launch came later than that, or nothing delayed it.
        launch_ns: Start of the launch call; ``NO_TIME`` if it is not in the trace.
        after_sync: Row in this table of the operation that its thread last waited for before the launch; ``UNKNOWN`` if
            there is none.
    """

    activity: Ints
    category: Ints
    start_ns: Ints
    end_ns: Ints
    bound_by: Ints
    launch_ns: Ints
    after_sync: Ints

    @property
    def bound_ns(self) -> Ints:
        """When each operation could begin: the end of ``bound_by``, or its launch; ``NO_TIME`` if neither is known."""
        return np.where(self.bound_by == UNKNOWN, self.launch_ns, self.end_ns[self.bound_by])

    @property
    def is_collective(self) -> Mask:
        rows: Mask = self.category == Category.COMMUNICATION
        return rows


def find_work(trace: Trace, dependencies: Dependencies, calls: HostCalls, trains: Collection[int]) -> Work:
    """Return the operations of a device, with what delayed each of them.

    While one of the threads that train (``trains``) waits for the device, the others are taken to launch nothing.
    """
    activities, rows = trace.activities, calls.work
    place = positions(rows, len(activities))
    start, end, stream = activities.start_ns[rows], activities.end_ns[rows], dependencies.stream[rows]
    launching = trace.launching_calls[rows]
    launch = take_or_unknown(trace.calls.start_ns, launching, NO_TIME)

    # The latest counts: the launch, the end of the operation before on the stream, or the end of another stream's
    # operation (``producer``) that the operation (``consumer``) waits for.
    bound_by, bound_ns = np.full(len(rows), UNKNOWN, np.int64), launch.copy()
    follows = np.flatnonzero(~begins_run(stream))
    later = follows[end[follows - 1] >= bound_ns[follows]]
    bound_by[later], bound_ns[later] = later - 1, end[later - 1]
    producer, consumer = place[dependencies.edges.producer], place[dependencies.edges.consumer]
    known = (producer != UNKNOWN) & (consumer != UNKNOWN)
    producer, consumer = producer[known], consumer[known]
    order = np.lexsort((end[producer], consumer))[::-1]
    order = order[begins_run(consumer[order])]  # of several producers, the one that ends last
    producer, consumer = producer[order], consumer[order]
    later_edge = end[producer] >= bound_ns[consumer]
    bound_by[consumer[later_edge]] = producer[later_edge]

    # For each launch, the last call before it in which its thread really waited for the device.
    thread = take_or_unknown(trace.calls.lane, launching)
    any_place = np.full(len(rows), np.iinfo(np.int64).max)
    after = calls.last_before(thread, trains, launch, any_place, calls.waited)
    return Work(rows, activities.category[rows], start, end, bound_by, launch, take_or_unknown(calls.latest, after))
