"""The assignment of parameters to buckets; needs no torch, so that the buckets of a cap can be computed anywhere.

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
"""A cap in bytes that even an empty parameter exceeds, so that each parameter has a bucket of its own."""


class Gradient(Protocol):
    """What must be known of a gradient to assign it to a bucket; a tensor has these attributes."""

    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> object: ...

    @property
    def device(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Float32:
    """A gradient of 32-bit numbers; only its number of elements is known."""

    numel: int
    dtype: str = "float32"
    device: str = ""

    @property
    def nbytes(self) -> int:
        return 4 * self.numel


def bucket_bytes(counts: Sequence[int], cap_mb: float | None) -> tuple[int, ...]:
    """Return the bytes of each bucket, in the order of launch, of a model in float32.

    ``counts`` are the numbers of elements of its parameters, ``cap_mb`` is the cap of a bucket in MiB or ``None``.
    """
    gradients = [Float32(count) for count in counts]
    cap = None if cap_mb is None else cap_mb * BYTES_PER_MB
    return tuple(sum(gradients[index].nbytes for index in bucket) for bucket in assign_buckets(gradients, cap))


def assign_buckets(parameters: Sequence[Gradient], cap_bytes: float | Sequence[float] | None) -> Assignment:
    """Assign parameters to buckets, greedily and last parameter first; return the buckets in the order of launch.

    One bucket per kind (data type and device) is filled at a time, until the next gradient would exceed its cap. A
    bucket is launched only after all buckets before it, so buckets are ordered as backward is expected to complete
    them: by the parameter that was put in last.

    Args:
        parameters: The trained parameters, in the model's order.
        cap_bytes: The cap of all buckets; or the caps of the first buckets, of which the last is also the cap of all
            further buckets; or ``None``: no cap, so one bucket per kind.
    """
    caps = [math.inf] if cap_bytes is None else [cap_bytes] if isinstance(cap_bytes, (int, float)) else [*cap_bytes]
    opened = 0  # number of buckets so far
    closed: Assignment = []
    filling: dict[tuple[object, object], list[int]] = {}  # the open bucket of each kind
    left: dict[tuple[object, object], float] = {}  # the bytes that still fit into it
    for index in reversed(range(len(parameters))):
        kind, size = (parameters[index].dtype, parameters[index].device), parameters[index].nbytes
        if kind in filling and size > left[kind]:  # it does not fit into the open bucket
            closed.append(tuple(filling.pop(kind)))
        if kind not in filling:
            filling[kind], left[kind] = [], caps[min(opened, len(caps) - 1)]
            opened += 1
        filling[kind].append(index)
        left[kind] -= size
    closed.extend(map(tuple, filling.values()))
    return sorted(closed, key=lambda bucket: -bucket[-1])  # what was put in last has the lowest position


def assign_by_readiness(
    parameters: Sequence[Gradient], cap_bytes: float | Sequence[float] | None, order: Sequence[int]
) -> Assignment:
    """Assign parameters to buckets in the order in which their gradients became ready.

    Torch's DDP does so after its first step. ``order`` holds the positions of all parameters in that order; all else is
    as in :func:`assign_buckets`.
    """
    # ``assign_buckets`` begins with the last parameter, so the order is reversed for it.
    last_first = [*reversed(order)]
    assigned = assign_buckets([parameters[index] for index in last_first], cap_bytes)
    return [tuple(last_first[place] for place in bucket) for bucket in assigned]
