"""The assignment of parameters to buckets. Pure Python without torch.

A bucket holds gradients of one kind (data type and device), at most a cap of bytes of them unless one alone is larger.
Parameters are taken in reverse order of ``parameters()``, which is about the order in which backward finishes them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ddp_prof.variants import BYTES_PER_MB

Assignment = list[tuple[int, ...]]
"""For each bucket, in the order of launch, the positions of its parameters, in the order in which they were taken."""


class ParameterSize(NamedTuple):
    """Size of a parameter; parameters of equal ``kind`` may share a buffer."""

    numel: int
    bytes: int
    kind: Hashable


def assign_each(sizes: Sequence[ParameterSize]) -> Assignment:
    return [(index,) for index in reversed(range(len(sizes)))]


def assign_buckets(sizes: Sequence[ParameterSize], cap_bytes: float | Sequence[float] | None) -> Assignment:
    """Fill buckets greedily, last parameter first; ``None`` caps nothing: one bucket per kind.

    Of several caps the first holds for the first bucket, and so on; the last holds for all that follow.

    One bucket per kind is open at a time. Buckets come in the order in which backward is expected to fill them, that is
    by the position of their last parameter, since the launch of one waits for all those before it.
    """
    caps = [math.inf] if cap_bytes is None else [cap_bytes] if isinstance(cap_bytes, (int, float)) else [*cap_bytes]
    opened = 0
    closed: Assignment = []
    filling: dict[Hashable, list[int]] = {}
    left: dict[Hashable, float] = {}
    for index in reversed(range(len(sizes))):
        size = sizes[index]
        if size.kind in filling and size.bytes > left[size.kind]:
            closed.append(tuple(filling.pop(size.kind)))
        if size.kind not in filling:
            filling[size.kind], left[size.kind] = [], caps[min(opened, len(caps) - 1)]
            opened += 1
        filling[size.kind].append(index)
        left[size.kind] -= size.bytes
    closed.extend(map(tuple, filling.values()))
    return sorted(closed, key=lambda bucket: -bucket[-1])


def assign_by_readiness(
    sizes: Sequence[ParameterSize], cap_bytes: float | Sequence[float] | None, order: Sequence[int]
) -> Assignment:
    """Fill buckets greedily in the order in which gradients came, as torch's DDP does after its first step."""
    last_first = [*reversed(order)]
    assigned = assign_buckets([sizes[index] for index in last_first], cap_bytes)
    return [tuple(last_first[place] for place in bucket) for bucket in assigned]


def cap_in_bytes(size_mb: float | Sequence[float] | None) -> float | list[float] | None:
    if size_mb is None or isinstance(size_mb, (int, float, str)):
        return None if size_mb is None else check_bucket_size(size_mb) * BYTES_PER_MB
    if not size_mb:
        raise ValueError("bucket_size_mb must name at least one cap")
    return [check_bucket_size(size) * BYTES_PER_MB for size in size_mb]


def check_bucket_size(size: float) -> float:
    """``size`` itself if it is a positive number of MiB."""
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        raise TypeError(f"bucket_size_mb must be a number of MiB or None, got {size!r}")
    if not size > 0:
        raise ValueError(f"bucket_size_mb must be positive or None, got {size}")
    return size
