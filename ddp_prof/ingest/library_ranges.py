"""What the ranges of a communication library round a launch tell of what was launched."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.trace import UNKNOWN, Category, Kind, select

if TYPE_CHECKING:
    from ddp_prof.trace import Calls, Ints, Mask, Spans, Trace

_COLLECTIVE = re.compile(
    r"^nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|AlltoAll|AllToAll|Gather|Scatter|Send|Recv)v?$"
)
_GROUP_END = "ncclGroupEnd"


def mark_copy_engine_collectives(trace: Trace) -> Trace:
    """Make copies COMMUNICATION whose launch call lies in the range of an NCCL collective, on the same thread.

    NCCL 2.28 and later lets the copy engines carry out collectives on symmetric windows. A collective within a group
    is launched by the ``ncclGroupEnd`` that follows it, so that range counts, too.
    """
    if not any(map(_COLLECTIVE.match, trace.names)):
        return trace
    ranges = _collective_ranges(trace.spans, trace.names)
    copies = np.flatnonzero((trace.activities.kind == Kind.COPY) & (trace.launching_calls != UNKNOWN))
    inside = _inside(select(trace.spans, ranges), select(trace.calls, trace.launching_calls[copies]))
    if not inside.any():
        return trace
    category = trace.activities.category.copy()
    category[copies[inside]] = Category.COMMUNICATION
    return replace(trace, activities=replace(trace.activities, category=category))


def _collective_ranges(spans: Spans, names: tuple[str, ...]) -> Ints:
    """Rows of the ranges of collectives, and of group ends with a collective since the last group end."""
    is_collective = np.array([bool(_COLLECTIVE.match(name)) for name in names] + [False])[spans.name_id]
    is_group_end = np.array([name == _GROUP_END for name in names] + [False])[spans.name_id]
    rows = np.flatnonzero(is_collective | is_group_end)
    rows = rows[np.lexsort((spans.start_ns[rows], spans.lane[rows], spans.process[rows]))]
    follows = np.zeros(len(rows), np.bool_)
    follows[1:] = is_collective[rows[:-1]] & _same_thread(spans, rows)
    return rows[is_collective[rows] | follows]


def _same_thread(spans: Spans, rows: Ints) -> Mask:
    """Whether each row but the first is of the same thread as the one before."""
    same: Mask = (np.diff(spans.process[rows]) == 0) & (np.diff(spans.lane[rows]) == 0)
    return same


def _inside(ranges: Spans, calls: Calls) -> Mask:
    """Whether each call starts within a range of its own thread."""
    inside = np.zeros(len(calls), np.bool_)
    for process, lane in np.unique(np.stack([ranges.process, ranges.lane]), axis=1).T:
        mine = select(ranges, (ranges.process == process) & (ranges.lane == lane))
        asked = np.flatnonzero((calls.process == process) & (calls.lane == lane))
        at = calls.start_ns[asked]
        begun = np.searchsorted(np.sort(mine.start_ns), at, side="right")
        ended = np.searchsorted(np.sort(mine.end_ns), at, side="right")
        inside[asked] = begun > ended
    return inside
