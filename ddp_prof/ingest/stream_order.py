"""Activities that begin before others of their stream that were launched before them, which no device does.

The operations of a stream begin in the order of their launches. They seem not to if the clock of their device jumps
back while it is recorded, so that work from before the jump and from after it lies at the same time::

    launches      a   b   c   d   e
    before        aa  bb  cc  dd  ee
    recorded      aa  bb  cc
                     dd  ee              the clock jumps back before d
"""

from __future__ import annotations

import numpy as np

from ddp_prof.table import UNKNOWN, Ints, distinct, parts_of
from ddp_prof.trace import Trace


def find_disordered(trace: Trace, order: Ints, stream: Ints) -> tuple[Ints, int]:
    """Return the activities (rows) that lie at the time of a jump back, and how many of them are out of order.

    What two threads launch at one time may begin in any order, and so may nodes of a graph: some activities that one
    thread launched by calls of their own must be out of order.

    Args:
        trace: The trace.
        order: Its activities by stream and start.
        stream: The stream of each activity in that order.
    """
    activities, launching = trace.activities, trace.launching_calls
    streams = distinct(stream[_that_precede_earlier_ones(trace, order, stream)])
    if not streams:
        return np.empty(0, np.int64), 0
    works = np.bincount(launching[launching != UNKNOWN], minlength=len(trace.calls))  # number of each call
    found, disordered = [np.empty(0, np.int64)], 0
    for one in streams:
        rows = order[slice(*np.searchsorted(stream, [one, one + 1]))]
        rows = rows[launching[rows] != UNKNOWN]
        rows = rows[works[launching[rows]] == 1]
        launch_ns, caller = trace.calls.start_ns[launching[rows]], trace.calls.lane[launching[rows]]
        if not any(np.any(np.diff(launch_ns[caller == thread]) < 0) for thread in distinct(caller)):
            continue
        # Some later one was launched before it, or some earlier one after it.
        is_wrong = launch_ns > np.minimum.accumulate(launch_ns[::-1])[::-1]
        is_wrong |= launch_ns < np.maximum.accumulate(launch_ns)
        wrong = rows[is_wrong]
        disordered += len(wrong)
        lies_there = activities.start_ns < activities.end_ns[wrong].max()
        lies_there &= activities.end_ns > activities.start_ns[wrong].min()
        lies_there &= activities.process == activities.process[wrong[0]]
        found.append(np.flatnonzero(lies_there & (activities.device == activities.device[wrong[0]])))
    return np.concatenate(found), disordered


def _that_precede_earlier_ones(trace: Trace, order: Ints, stream: Ints) -> Ints:
    """Return where in ``order`` an activity begins before the next one, although it was launched later."""
    activities, launching, found = trace.activities, trace.launching_calls, [np.empty(0, np.int64)]
    for part in parts_of(max(0, len(order) - 1)):
        with_next = slice(part.start, part.stop + 1)
        number, lane = activities.correlation[order[with_next]], stream[with_next]
        rows = part.start + np.flatnonzero((number[1:] < number[:-1]) & (lane[1:] == lane[:-1]))  # few
        own, after = order[rows], order[rows + 1]
        is_known = (activities.start_ns[own] < activities.start_ns[after]) & (activities.lane[own] != UNKNOWN)
        is_known &= (launching[own] != UNKNOWN) & (launching[after] != UNKNOWN)
        call, other = launching[own[is_known]], launching[after[is_known]]
        found.append(rows[is_known][trace.calls.start_ns[call] > trace.calls.start_ns[other]])
    return np.concatenate(found)
