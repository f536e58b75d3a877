"""Whether the time of collectives depends on their size. If it does not, a faster network would not shorten them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import FEW_BYTES
from ddp_prof.communication import OPERATIONS
from ddp_prof.trace import NO_TIME, UNKNOWN

LEAST_TIMES = 3
"""Smallest number of collectives that a size needs to count."""
LEAST_RATIO = 6
"""Smallest factor between the largest and the smallest size.

A smaller one tells nothing, because gloo performs several collectives at once, which share a link.
"""
LEAST_BYTES = 1 << 20
"""Smallest size of the largest message; the time of smaller ones is latency in any case.

Messages below :data:`.FEW_BYTES` do not count.
"""
MOST_LONGER = 1.1
"""Largest factor by which the largest message may take longer than the smallest, for both to take equally long."""


@dataclass(frozen=True, slots=True)
class AlikeTimes:
    """Two sizes of an operation that take equally long.

    ``small_ns`` and ``large_ns`` are the median times of the collectives of these sizes: the transfer time where it is
    known, else the duration.
    """

    operation: str
    small_bytes: int
    large_bytes: int
    small_ns: int
    large_ns: int


def find_alike_times(run: RunAnalysis, only: str | None = None) -> AlikeTimes | None:
    """Return an operation whose smallest and largest messages take equally long; ``None`` if there is none.

    If there are several, it is the one on which most time is spent. ``only`` is the operation to look at, ``None`` for
    all operations.
    """
    if not run.ranks:
        return None
    # Of each collective its operation, its size and its time; only those that count.
    columns = [
        (
            of_rank.operation,
            of_rank.bytes,
            np.where(transfer_ns == UNKNOWN, of_rank.end_ns - of_rank.start_ns, transfer_ns),
        )
        for of_rank, transfer_ns in zip((rank.timings for rank in run.ranks), run.transfers_ns, strict=True)
    ]
    operation, size, time_ns = map(np.concatenate, zip(*columns, strict=True))
    counts = (operation != UNKNOWN) & (size >= FEW_BYTES)
    if only is not None:
        counts &= operation == OPERATIONS.index(only)
    operation, size, time_ns = operation[counts], size[counts], time_ns[counts]
    found: dict[AlikeTimes, int] = {}  # with the time spent on the operation
    for code in dict.fromkeys(operation.tolist()):
        is_it = operation == code
        sizes, times = np.unique(size[is_it], return_counts=True)
        sizes = sizes[times >= LEAST_TIMES]
        if len(sizes) and sizes[-1] >= max(LEAST_RATIO * sizes[0], LEAST_BYTES):
            small, large = int(sizes[0]), int(sizes[-1])
            small_ns, large_ns = (round(float(np.median(time_ns[is_it & (size == one)]))) for one in (small, large))
            if 0 < large_ns <= MOST_LONGER * small_ns:
                found[AlikeTimes(OPERATIONS[code], small, large, small_ns, large_ns)] = int(time_ns[is_it].sum())
    return max(found, key=found.__getitem__, default=None)


def count_equal_passes(pass_ends_ns: Sequence[int | None], sizes: Sequence[int | None], updates: Sequence[int]) -> int:
    """Return the number of passes of backward in a step if all of them reduce the same sizes in the same order, else 1.

    It is 1, too, if a pass or a size is not known (``None`` or negative), or if an optimizer updates parameters between
    the passes: it needs the gradients of the passes before, which may be of another model.

    Args:
        pass_ends_ns: For each collective of gradients of the step, in order, the end of the compute of its pass.
        sizes: Its bytes.
        updates: Its :attr:`.CollectiveTimings.updates`.
    """
    if len(set(updates)) > 1:
        return 1
    passes: dict[int, list[int]] = {}
    for end_ns, size in zip(pass_ends_ns, sizes, strict=True):
        if end_ns is None or end_ns == NO_TIME or size is None or size == UNKNOWN:
            return 1
        passes.setdefault(end_ns, []).append(size)
    return len(passes) if len({tuple(one) for one in passes.values()}) == 1 else 1
