"""Calls by which a host waits for its device, and the operations that each waits for."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.dependencies.edges import Dependencies
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Sequences, distinct, looked_up
from ddp_prof.trace import SyncKind, Trace


class HostCalls:
    """The calls by which a device's host could wait for it, and the operations that each waits for.

    Args:
        trace: The trace.
        dependencies: Its edges.
        work: Rows of the device's activities.

    Attributes:
        rows: In the trace's synchronizations, by their ends.
        awaited: Indices into ``work``; ``awaits`` the call of each.
        latest: Of each call the one of these that ends last, ``UNKNOWN`` where it waits for none.
        lag_ns: How long after the last of these, and after its own start, each call ended.
    """

    def __init__(self, trace: Trace, dependencies: Dependencies, work: Ints) -> None:
        calls, process = trace.synchronizations, trace.activities.process[work[:1]]
        numbers, stream = trace.activities.correlation[work], dependencies.stream[work]
        rows = np.flatnonzero((calls.kind >= SyncKind.HOST_WAIT_EVENT) & np.isin(calls.process, process))
        rows = rows[np.argsort(calls.end_ns[rows], kind="stable")]
        self.rows = rows
        self.thread, self.place = calls.thread[rows], dependencies.call_place[rows]
        self.start_ns, self.end_ns = calls.start_ns[rows], calls.end_ns[rows]

        kind, each = calls.kind[rows], np.arange(len(rows))
        launches = Sequences(stream, dependencies.place[work])
        by_event = kind == SyncKind.HOST_WAIT_EVENT
        mark = np.where(by_event, calls.awaits[rows], rows)  # the record of the event, or the call itself
        marked = dependencies.call_stream, dependencies.call_place
        on_stream = launches.last_before(*(looked_up(column, mark) for column in marked))
        by_number = np.argsort(numbers, kind="stable")
        at = np.searchsorted(numbers[by_number], calls.correlation[rows])
        copy = looked_up(by_number, np.where(at < len(work), at, UNKNOWN))
        copy = np.where(looked_up(numbers, copy) == calls.correlation[rows], copy, UNKNOWN)
        is_device = kind == SyncKind.HOST_WAIT_DEVICE
        awaited = [np.where(kind == SyncKind.COPY, copy, np.where(is_device, UNKNOWN, on_stream))]
        for one in distinct(stream):  # of each stream what was launched last before
            last = launches.last_before(np.full(len(rows), one), self.place)
            awaited.append(np.where(is_device, last, UNKNOWN))
        self.awaits, self.awaited = np.tile(each, len(awaited)), np.concatenate(awaited)
        end_ns = trace.activities.end_ns[work]
        ends = looked_up(end_ns, self.awaited, NO_TIME)
        known = (self.awaited != UNKNOWN) & (ends <= self.end_ns[self.awaits])
        self.awaits, self.awaited = self.awaits[known], self.awaited[known]
        by_end = np.argsort(ends[known], kind="stable")
        self.latest = np.full(len(rows), UNKNOWN, np.int64)
        self.latest[self.awaits[by_end]] = self.awaited[by_end]  # of several the last one written stays
        self.lag_ns = self.end_ns - np.maximum(self.start_ns, looked_up(end_ns, self.latest, NO_TIME))

    def last_before(self, thread: Ints, main_thread: int, time_ns: Ints, place: Ints) -> Ints:
        """The last call of the thread, or of the main one, that ended by a time and came before a place among calls.

        ``UNKNOWN`` for none.
        """
        found = np.full(len(thread), UNKNOWN, np.int64)
        for one in set(distinct(thread)) - {UNKNOWN}:
            asked = thread == one
            own = np.flatnonzero(np.isin(self.thread, (one, main_thread)))
            at = np.searchsorted(self.end_ns[own], time_ns[asked], side="right") - 1
            while np.any(is_later := (at >= 0) & (looked_up(self.place[own], at) >= place[asked])):
                at -= is_later  # of the same instant
            found[asked] = looked_up(own, np.maximum(at, UNKNOWN))
        return found
