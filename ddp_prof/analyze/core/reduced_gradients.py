"""Compute that waits for reduced gradients: a comm hook's conversion, or an optimizer in backward.

Autograd's thread launches it during backward, on a stream of its own, so that it is no part of what computes the
gradients, and backward does not end with it::

    stream 7    bbbbbbbb...........      backward, which ends here
    stream 20   ....CCCCCCDDDDDD...      reductions
    stream 25   ..........c.....d..      conversions of what C and D reduced
"""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, MAY_REDUCE, Events, find_operations
from ddp_prof.analyze.core.edges import Dependencies
from ddp_prof.table import UNKNOWN, Mask, begins_run, positions
from ddp_prof.trace import Category, Kind, Trace


def need_reduced_gradients(trace: Trace, dependencies: Dependencies, events: Events, of_backward: Mask) -> Mask:
    """Return which events need what a reduction of their step reduced, while no collective needs them.

    An event needs what its stream waited for, or ran, before it in the same step, and is needed by what waits for its
    stream, or runs there, after it. If a collective of backward needs it, it may be a part of backward, as synchronized
    batch normalization or the steps of PowerSGD are.

    Args:
        trace: The trace of the events.
        dependencies: What waits for what.
        events: The events of a rank.
        of_backward: Which of them may need reduced gradients; those of the stream that computes gradients may not.
    """
    activities = trace.activities
    event_of = positions(events.activity, len(activities))
    rows = dependencies.in_order[event_of[dependencies.in_order] != UNKNOWN]
    event, place = event_of[rows], positions(rows, len(activities))
    is_collective = events.category[event] == Category.COMMUNICATION
    is_collective &= events.phase[event] == BACKWARD_PHASE
    is_reduction = is_collective & np.isin(find_operations(trace, activities.name_id[rows]), MAY_REDUCE)
    is_reduction &= activities.kind[rows] == Kind.KERNEL  # what copies communicate is not added up

    producer, consumer = place[dependencies.edges.producer], place[dependencies.edges.consumer]
    known = (producer != UNKNOWN) & (consumer != UNKNOWN)
    producer, consumer = producer[known], consumer[known]
    gets, gives = is_reduction.copy(), is_collective.copy()
    gets[consumer[is_reduction[producer]]] = True
    gives[producer[is_collective[consumer]]] = True
    # Of each operation: the last one at or before it that gets reduced gradients, and the next one that gives.
    begins = begins_run(dependencies.stream[rows], events.step[event])
    at = np.arange(len(rows))
    first = np.maximum.accumulate(np.where(begins, at, 0))
    needs = np.maximum.accumulate(np.where(gets, at, UNKNOWN)) >= first
    ends = np.append(begins[1:], True)[: len(rows)]
    last = np.minimum.accumulate(np.where(ends, at, len(rows))[::-1])[::-1]
    is_needed = np.minimum.accumulate(np.where(gives, at, len(rows))[::-1])[::-1] <= last
    found = np.zeros(len(events), np.bool_)
    found[event] = needs & ~is_needed
    return found & of_backward
