"""Which operation a collective is, told from any name that a library gives it, and how busy it keeps a link."""

from __future__ import annotations

import re

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
"""What a name holds, letters only and small, and the operation that it then is; the first sign found counts."""

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
