"""What the ranges of a communication library round a launch tell of what was launched."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.trace import UNKNOWN, Category, CollectiveMetadata, Kind, concatenate, distinct_rows, looked_up, select

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def name_operations(trace: Trace) -> Trace:
    """Name the operation of a collective as the range round its launch does, where the profiler noted none.

    A kernel's name is a hint only: NCCL carries out an all-to-all by a kernel called ``SendRecv``, and some releases
    carry out every operation by that one. Torch's ranges (``nccl:all_to_all``) say more than NCCL's own (``ncclSend``).
    """
    noted = trace.collective_metadata
    rows = (trace.activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    rows[noted.activity] = False
    asked = np.flatnonzero(rows)
    calls = select(trace.calls, trace.launching_calls[asked])
    op_id = np.full(len(asked), UNKNOWN, np.int64)
    for ranges, name_id in (_torch_ranges(trace), _nccl_ranges(trace)):
        open_range = _last_opened(select(trace.spans, ranges), calls)
        op_id = np.where(op_id == UNKNOWN, looked_up(name_id, open_range), op_id)
    told = op_id != UNKNOWN
    columns = {column.name: np.full(int(told.sum()), UNKNOWN, np.int64) for column in fields(CollectiveMetadata)}
    found = CollectiveMetadata(**{**columns, "activity": asked[told], "op_id": op_id[told]})
    return replace(trace, collective_metadata=concatenate(noted, found)) if told.any() else trace


def _torch_ranges(trace: Trace) -> tuple[Ints, Ints]:
    """Rows of torch's ranges round collectives, and the index of each one's name."""
    ids = [index for index, name in enumerate(trace.names) if name.startswith("nccl:")]
    rows = np.flatnonzero(np.isin(trace.spans.name_id, ids)) if ids else np.empty(0, np.int64)
    return rows, trace.spans.name_id[rows]


def _nccl_ranges(trace: Trace) -> tuple[Ints, Ints]:
    """The same of NCCL's own; the end of a group has the name of the last collective in it."""
    if not any(map(_COLLECTIVE.match, trace.names)):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = _collective_ranges(trace.spans, trace.names)
    name_id = trace.spans.name_id[rows]
    is_end = np.array([trace.names[index] == _GROUP_END for index in name_id.tolist()], np.bool_)
    return rows, np.where(is_end, np.roll(name_id, 1), name_id)


def _last_opened(ranges: Spans, calls: Calls) -> Ints:
    """Row of the range that the call's own thread had opened last, ``UNKNOWN`` where it is closed again."""
    found = np.full(len(calls), UNKNOWN, np.int64)
    for mine, asked in _by_thread(ranges, calls):
        mine = mine[np.argsort(ranges.start_ns[mine], kind="stable")]
        at = np.searchsorted(ranges.start_ns[mine], calls.start_ns[asked], side="right") - 1
        holds = (at >= 0) & (ranges.end_ns[mine[at]] > calls.start_ns[asked])
        found[asked[holds]] = mine[at[holds]]
    return found


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
    for mine, asked in _by_thread(ranges, calls):
        at = calls.start_ns[asked]
        begun = np.searchsorted(np.sort(ranges.start_ns[mine]), at, side="right")
        ended = np.searchsorted(np.sort(ranges.end_ns[mine]), at, side="right")
        inside[asked] = begun > ended
    return inside


def _by_thread(ranges: Spans, calls: Calls) -> Iterator[tuple[Ints, Ints]]:
    """Rows of the ranges and of the calls of each thread that has ranges."""
    first, which = distinct_rows(ranges.process, ranges.lane)
    for thread, row in enumerate(first.tolist()):
        asked = (calls.process == ranges.process[row]) & (calls.lane == ranges.lane[row])
        yield np.flatnonzero(which == thread), np.flatnonzero(asked)
