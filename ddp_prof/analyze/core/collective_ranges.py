"""The collectives of one process by its ranges: launch time, bucket and size of each.

Ours, from launch to completion; else gloo's own, ``gloo:all_reduce``, from when a thread of gloo takes it up.

Which operation a collective is, by any name that a library gives it, and how busy it keeps a link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.intervals import innermost
from ddp_prof.range_names import COLLECTIVES, Range, parse_ranges
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Ints, Mask, Table, Trace, take_or_unknown

ALL_REDUCE = "all_reduce"
NOTIFY = "notify"
"""Of DeepEP: tells peers how much a dispatch or combine will bring them. A part of that one, not another collective."""

OPERATIONS = (
    ALL_REDUCE,
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
    "gather",
    "scatter",
    "barrier",
    "reduce",
    NOTIFY,
)
"""All that are told apart; a table holds an index into it."""

_SIGNS = (
    ("notifydispatch", NOTIFY),
    ("notifycombine", NOTIFY),
    ("onecclreducebase", None),  # so it is called for an all-reduce, too
    ("allreduce", ALL_REDUCE),
    ("onerankreduce", ALL_REDUCE),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("crossdevicereduce", ALL_REDUCE),
    ("alltoall", "all_to_all"),
    ("moeaa", "all_to_all"),  # moeA2ADispatchKernel
    ("broadcast", "broadcast"),
    ("bcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("ncclsend", "send_recv"),
    ("ncclrecv", "send_recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("barrier", "barrier"),
    ("deepep", "all_to_all"),  # its dispatch and combine
    ("reduce", "reduce"),
)
"""Substrings of names (lower-case letters only) and their operations; the first match counts."""

POINT_TO_POINT = "send_recv"


def operation_of(name: str) -> str | None:
    """The operation, ``None`` where the name does not tell: ``ncclDevKernel_Generic`` may be any.

    >>> operation_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    """
    letters = re.sub(r"[^a-z]", "", name.lower())
    if letters in ("send", "recv"):
        return POINT_TO_POINT
    return next((operation for sign, operation in _SIGNS if sign in letters), None)


def bus_factor(operation: str | None, ranks: int | None) -> float | None:
    """Bus bandwidth over algorithm bandwidth; ``None`` where unknown.

    As nccl-tests define it (doc/PERFORMANCE.md), with the larger of input and output as the size: what an ideal link
    carries, whatever the number of ranks.
    """
    if ranks is None or ranks < 1:
        return None
    if operation == ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "reduce") else None


GLOO = "gloo:"
"""How torch.profiler's names of gloo's collectives begin."""


@dataclass(frozen=True)
class CollectiveRanges(Table):
    """One row per range, in the order of the trace; a range lasts from the launch to the completion that the host saw.

    Attributes:
        span: Row in the trace's spans.
        name_id: Index into ``Trace.names``.
        operation: Index into :data:`OPERATIONS`.
        bucket: Number of the bucket; ``UNKNOWN`` where the name has none.
        bytes: Size of the message; ``UNKNOWN`` likewise.
    """

    span: Ints
    start_ns: Ints
    end_ns: Ints
    name_id: Ints
    operation: Ints
    bucket: Ints
    bytes: Ints

    def launched_in(self, launch_ns: Ints) -> Ints:
        """Row of the range that was opened last before, or at, each launch and is open still; ``UNKNOWN`` if none."""
        return innermost(self.start_ns, self.end_ns, launch_ns)

    def ranges_of_activities(self, trace: Trace, chosen: Mask | Ints) -> Ints:
        """Row of the range that each of some activities was launched in; ``UNKNOWN`` of what is no collective."""
        row = self.launched_in(take_or_unknown(trace.calls.start_ns, trace.launching_calls[chosen], NO_TIME))
        return np.where(trace.activities.category[chosen] == Category.COMMUNICATION, row, UNKNOWN)


def find_collective_ranges(trace: Trace, process: int) -> CollectiveRanges:
    """The ranges round the collectives of a process."""
    names, mine = parse_ranges(trace.names, *COLLECTIVES), trace.spans.process == process
    if not np.any(mine & np.isin(trace.spans.name_id, list(names))) and not np.any(trace.activities.process == process):
        gloo = {index: operation_of(name) for index, name in enumerate(trace.names) if name.startswith(GLOO)}
        names = {index: Range(operation, {}) for index, operation in gloo.items() if operation is not None}
    span = np.flatnonzero(mine & np.isin(trace.spans.name_id, list(names)))
    name_id = trace.spans.name_id[span]

    def number(key: str) -> Ints:
        known = {index: parsed.number(key) for index, parsed in names.items()}
        values = [known[index] for index in name_id.tolist()]
        return np.array([UNKNOWN if value is None else value for value in values], np.int64)

    operation = [OPERATIONS.index(names[index].name) for index in name_id.tolist()]
    return CollectiveRanges(
        span=span,
        start_ns=trace.spans.start_ns[span],
        end_ns=trace.spans.end_ns[span],
        name_id=name_id,
        operation=np.array(operation, np.int64),
        bucket=number("bucket"),
        bytes=number("bytes"),
    )
