"""Which gradients travel together: the assignment of parameters to buckets. Pure; knows no torch.

A bucket holds gradients of one kind (data type and device), at most a cap of bytes of them unless one alone is larger.
Parameters are taken in reverse order of ``parameters()``, which is about the order in which backward finishes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

MB = 2**20
"""Bytes of one MB, here and in ``bucket_size_mb``."""

Assignment = list[tuple[int, ...]]
"""For each bucket, in the order of launch, the positions of its parameters, in the order in which they were taken."""


class ParameterSize(NamedTuple):
    """What assignment has to know of a parameter; equal ``kind`` means: may share a buffer."""

    numel: int
    bytes: int
    kind: Hashable


def assign_each(sizes: Sequence[ParameterSize]) -> Assignment:
    """One bucket a parameter, last parameter first."""
    return [(index,) for index in reversed(range(len(sizes)))]


def assign_buckets(sizes: Sequence[ParameterSize], cap_bytes: float | None) -> Assignment:
    """Fill buckets greedily, last parameter first; ``None`` caps nothing: one bucket a kind.

    One bucket a kind is open at a time. Buckets come in the order in which backward is expected to fill them, that is
    by the position of their last parameter, since the launch of one waits for all those before it.
    """
    closed: Assignment = []
    filling: dict[Hashable, list[int]] = {}
    used: dict[Hashable, int] = {}
    for index in reversed(range(len(sizes))):
        size = sizes[index]
        if size.kind in filling and cap_bytes is not None and used[size.kind] + size.bytes > cap_bytes:
            closed.append(tuple(filling.pop(size.kind)))
        if size.kind not in filling:
            filling[size.kind], used[size.kind] = [], 0
        filling[size.kind].append(index)
        used[size.kind] += size.bytes
    closed.extend(map(tuple, filling.values()))
    return sorted(closed, key=lambda bucket: -bucket[-1])


def check_bucket_size(size: float) -> float:
    """``size`` itself where it is a positive number of MB.

    Raises:
        TypeError: It is no number; ``True`` is none.
        ValueError: It is not positive.
    """
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        raise TypeError(f"bucket_size_mb must be a number of MB or None, got {size!r}")
    if not size > 0:
        raise ValueError(f"bucket_size_mb must be positive or None, got {size}")
    return size
