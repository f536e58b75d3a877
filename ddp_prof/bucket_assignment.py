"""The assignment of parameters to buckets; needs no torch, so that what a cap would give is known without it.

A bucket holds gradients of one kind (data type and device). It holds at most a cap of bytes, unless a single gradient
is larger. Parameters are taken in reverse order of ``parameters()``, about the order in which backward finishes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ddp_prof.variants import BYTES_PER_MB

Assignment = list[tuple[int, ...]]
"""For each bucket, in the order of launch, the positions of its parameters."""
EACH_ALONE = -1.0
"""A cap in bytes that even an empty parameter exceeds, so that each has a bucket of its own."""


class Gradient(Protocol):
    """What a bucket holds, such as a tensor."""

    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> object: ...

    @property
    def device(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Float32:
    """A gradient of 32-bit numbers of which only the size is known."""

    numel: int
    dtype: str = "float32"
    device: str = ""

    @property
    def nbytes(self) -> int:
        return 4 * self.numel


def bucket_bytes(counts: Sequence[int], cap_mb: float | None) -> tuple[int, ...]:
    """Return the bytes of each bucket, in the order of launch, of gradients with so many 32-bit numbers."""
    gradients = [Float32(count) for count in counts]
    cap = None if cap_mb is None else cap_mb * BYTES_PER_MB
    return tuple(sum(gradients[index].nbytes for index in bucket) for bucket in assign_buckets(gradients, cap))


def assign_buckets(parameters: Sequence[Gradient], cap_bytes: float | Sequence[float] | None) -> Assignment:
    """Fill buckets greedily, last parameter first. Without a cap (``None``) there is one bucket per kind.

    A sequence of caps is for the first buckets; its last cap also for all others.

    One bucket per kind is open at a time. A bucket is launched only after all buckets before it, so they are ordered as
    backward is expected to fill them: by the parameter that was put in last.
    """
    caps = [math.inf] if cap_bytes is None else [cap_bytes] if isinstance(cap_bytes, (int, float)) else [*cap_bytes]
    opened = 0
    closed: Assignment = []
    filling: dict[tuple[object, object], list[int]] = {}
    left: dict[tuple[object, object], float] = {}
    for index in reversed(range(len(parameters))):
        kind, size = (parameters[index].dtype, parameters[index].device), parameters[index].nbytes
        if kind in filling and size > left[kind]:
            closed.append(tuple(filling.pop(kind)))
        if kind not in filling:
            filling[kind], left[kind] = [], caps[min(opened, len(caps) - 1)]
            opened += 1
        filling[kind].append(index)
        left[kind] -= size
    closed.extend(map(tuple, filling.values()))
    return sorted(closed, key=lambda bucket: -bucket[-1])


def assign_by_readiness(
    parameters: Sequence[Gradient], cap_bytes: float | Sequence[float] | None, order: Sequence[int]
) -> Assignment:
    """Fill buckets greedily in the order in which gradients became ready, as torch's DDP does after its first step."""
    last_first = [*reversed(order)]
    assigned = assign_buckets([parameters[index] for index in last_first], cap_bytes)
    return [tuple(last_first[place] for place in bucket) for bucket in assigned]
