"""Whether the time of collectives depends on their size. If it does not, a faster network would not shorten them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import FEW_BYTES, CollectiveTimings
from ddp_prof.communication import OPERATIONS
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints

LEAST_TIMES = 3
"""Smallest number of collectives that a size needs to count."""
LEAST_RATIO = 6
"""Smallest factor between the largest and the smallest size."""
LEAST_RATIO_OF_TRAFFIC = 3
"""Smallest factor between the largest size and the bytes that may have shared a link with one of the smallest.

gloo performs several collectives at once, and a small one may wait until the large ones before it are sent.
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
    known, else the duration. ``is_transfer``: it is known of all of them, and all ranks of the job are recorded.
    """

    operation: str
    small_bytes: int
    large_bytes: int
    small_ns: int
    large_ns: int
    is_transfer: bool


def find_alike_times(run: RunAnalysis, only: str | None = None) -> AlikeTimes | None:
    """Return an operation whose smallest and largest messages take equally long; ``None`` if there is none.

    If there are several, it is the one on which most time is spent. ``only`` is the operation to look at, ``None`` for
    all operations.
    """
    if not run.ranks:
        return None
    # Of each collective its operation, its size, its transfer time and its time; only those that count.
    columns = [
        (
            of_rank.operation,
            of_rank.bytes,
            transfer_ns,
            np.where(transfer_ns == UNKNOWN, of_rank.end_ns - of_rank.start_ns, transfer_ns),
        )
        for of_rank, transfer_ns in zip((rank.timings for rank in run.ranks), run.transfers_ns, strict=True)
    ]
    operation, size, transfer_ns, time_ns = map(np.concatenate, zip(*columns, strict=True))
    counts = (operation != UNKNOWN) & (size >= FEW_BYTES)
    if only is not None:
        counts &= operation == OPERATIONS.index(only)
    world = max((rank.world_size or 0 for rank in run.ranks), default=0)
    knows_job = world > 0 and not run.alignment.missing_ranks and not run.unrecorded
    found: dict[AlikeTimes, int] = {}  # with the time spent on the operation
    for code in dict.fromkeys(operation[counts].tolist()):
        is_it = counts & (operation == code)
        sizes, times = np.unique(size[is_it], return_counts=True)
        sizes = sizes[times >= LEAST_TIMES]
        if len(sizes) and sizes[-1] >= max(LEAST_RATIO * sizes[0], LEAST_BYTES):
            small, large = int(sizes[0]), int(sizes[-1])
            are_small, are_large = (is_it & (size == one) for one in (small, large))
            small_ns, large_ns = (round(float(np.median(time_ns[chosen]))) for chosen in (are_small, are_large))
            traffic = np.concatenate([_find_traffic(rank.timings, small, large) for rank in run.ranks])
            shares_link = large < LEAST_RATIO_OF_TRAFFIC * float(np.median(traffic[are_small]))
            if 0 < large_ns <= MOST_LONGER * small_ns and not shares_link:
                is_transfer = knows_job and not np.any(transfer_ns[are_small | are_large] == UNKNOWN)
                alike = AlikeTimes(OPERATIONS[code], small, large, small_ns, large_ns, is_transfer)
                found[alike] = int(time_ns[is_it].sum())
    return max(found, key=found.__getitem__, default=None)


def _find_traffic(timings: CollectiveTimings, small: int, unknown: int) -> Ints:
    """Return how many bytes a link may have carried while each collective of a rank, of ``small`` bytes, ran.

    These are its own, all bytes of those that began before it and had not ended, and of those that began later as many
    as its own: links are shared in equal parts, or in the order of starts. A size that is not known is taken for
    ``unknown``.
    """
    sizes = np.where(timings.bytes == UNKNOWN, unknown, timings.bytes)
    by_start, by_end = np.argsort(timings.start_ns, kind="stable"), np.argsort(timings.end_ns, kind="stable")
    starts, ends = timings.start_ns[by_start], timings.end_ns[by_end]

    def sum_before(order: Ints, values: Ints, place: Ints) -> Ints:
        """The sum of the first ``place`` values in an order."""
        sums: Ints = np.append(0, np.cumsum(values[order]))[place]
        return sums

    begun = np.searchsorted(starts, timings.start_ns, side="right")
    ended = np.searchsorted(ends, timings.start_ns, side="right")
    begun_at_end = np.searchsorted(starts, timings.end_ns, side="left")
    earlier = sum_before(by_start, sizes, begun) - sum_before(by_end, sizes, ended)
    at_most = np.minimum(sizes, small)
    later = sum_before(by_start, at_most, np.maximum(begun_at_end, begun)) - sum_before(by_start, at_most, begun)
    return earlier + later


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
