"""Which call on the host launched each activity of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.trace import UNKNOWN

if TYPE_CHECKING:
    from ddp_prof.trace import Activities, Calls, Ints


def launching_calls(activities: Activities, calls: Calls) -> Ints:
    """Row in ``calls`` of the call that launched each activity, ``UNKNOWN`` where the trace holds none.

    Joined on process *and* correlation: the ids of two processes collide. Where several calls of a process carry one
    id (a runtime call and the driver call in it), the earliest row counts.
    """
    result = np.full(len(activities), UNKNOWN, np.int64)
    for process in np.unique(activities.process):
        asked = np.flatnonzero((activities.process == process) & (activities.correlation != UNKNOWN))
        offered = np.flatnonzero(calls.process == process)
        if len(asked) and len(offered):
            found = _positions(calls.correlation[offered], activities.correlation[asked])
            result[asked] = np.where(found == UNKNOWN, UNKNOWN, offered[found])
    return result


def _positions(keys: Ints, wanted: Ints) -> Ints:
    """First position in ``keys`` of each wanted value, ``UNKNOWN`` where it is absent."""
    if np.all(keys[1:] >= keys[:-1]):
        order, ordered = None, keys
    else:
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    position = at if order is None else order[at]
    return np.where(ordered[at] == wanted, position, UNKNOWN)
