"""Whether the time of collectives depends on their size. If it does not, a faster network would not shorten them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ddp_prof.analyze.collectives.collective import Collective
from ddp_prof.analyze.collectives.timing import FEW_BYTES

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


def find_alike_times(collectives: Iterable[Collective]) -> AlikeTimes | None:
    """Return an operation whose smallest and largest messages take equally long; ``None`` if there is none.

    If there are several, it is the one on which most time is spent.
    """
    # By operation and size: the time of each collective.
    times: dict[str, dict[int, list[int]]] = {}
    for one in collectives:
        if one.op is not None and one.bytes is not None and one.bytes >= FEW_BYTES:
            of_size = times.setdefault(one.op, {}).setdefault(one.bytes, [])
            of_size.append(one.duration_ns if one.transfer_ns is None else one.transfer_ns)
    found = []
    for operation, by_size in times.items():
        sizes = sorted(size for size, of_size in by_size.items() if len(of_size) >= LEAST_TIMES)
        if sizes and sizes[-1] >= max(LEAST_RATIO * sizes[0], LEAST_BYTES):
            small_ns, large_ns = (round(median(by_size[size])) for size in (sizes[0], sizes[-1]))
            if 0 < large_ns <= MOST_LONGER * small_ns:
                found.append(AlikeTimes(operation, sizes[0], sizes[-1], small_ns, large_ns))
    return max(found, key=lambda alike: sum(map(sum, times[alike.operation].values())), default=None)
