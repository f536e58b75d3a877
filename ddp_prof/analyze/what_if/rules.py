"""Which gradients share a bucket, by the rules of torch's DDP and of our variants; gradients in order of readiness.

torch: a bucket is closed by the gradient with which it *reaches* its cap; the first one may have a cap of its own
(1 MiB, if no ``bucket_cap_mb`` is given). Ours: a bucket holds *at most* its cap, unless one gradient is larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.bucket_assignment import assign_buckets
from ddp_prof.table import Ints
from ddp_prof.variants import BYTES_PER_MB

FIRST_BUCKET_BYTES = 2**20
"""torch's cap of the first bucket, where ``bucket_cap_mb`` is not given; older torch has it always."""
DEFAULT_MB = 25.0


@dataclass(frozen=True, slots=True)
class _Sized:
    nbytes: int
    dtype: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class TorchRule:
    """torch's rule: its cap is over ``low_bytes`` and at most ``high_bytes``.

    ``first_bytes`` is the cap of the first bucket, ``None`` if it has that of the others; ``is_either``: both
    would give the same buckets today.
    """

    first_bytes: float | None
    low_bytes: float
    high_bytes: float
    is_either: bool = False

    def buckets(self, sizes: Ints, cap_bytes: float) -> list[list[int]]:
        """Fill buckets with this cap; the first one keeps its own."""
        first = cap_bytes if self.first_bytes is None else min(self.first_bytes, cap_bytes)
        return fill_until_reached(sizes, first, cap_bytes)


def mebibytes(size: int) -> str:
    """Format bytes in the unit of ``bucket_cap_mb``, small ones in KiB or bytes."""
    if size < 1024:
        return f"{size} bytes"
    mib = size / BYTES_PER_MB
    return f"{mib:,.1f} MiB" if mib >= 0.1 else f"{size / 1024:.3g} KiB"


def find_rule(sizes: Ints, calls: int) -> tuple[float, float] | None:
    """The caps of the first and of the other buckets, in bytes, that give so many: torch's default, else the largest.

    The larger the cap, the fewer the buckets: each ends no earlier. So the largest cap is found by halving.
    """
    upto = np.cumsum(sizes)
    default = DEFAULT_MB * BYTES_PER_MB
    if _count_buckets(upto, FIRST_BUCKET_BYTES, default, calls) == calls:
        return FIRST_BUCKET_BYTES, default
    for most_first in (FIRST_BUCKET_BYTES, math.inf):
        low, high = 1, max(1, int(upto[-1]))
        while low < high:
            cap = (low + high + 1) // 2
            if _count_buckets(upto, min(most_first, cap), cap, calls) >= calls:
                low = cap
            else:
                high = cap - 1
        if _count_buckets(upto, min(most_first, low), low, calls) == calls:
            return min(most_first, low), low
    return None


def _count_buckets(upto: Ints, first_bytes: float, cap_bytes: float, most: int) -> int:
    """How many buckets :func:`fill_until_reached` makes, by cumulative sizes of gradients; at most ``most + 1``."""
    count, end, before, cap = 0, 0, 0, first_bytes
    while end < len(upto) and count <= most:
        end = int(np.searchsorted(upto, before + cap)) + 1
        before, cap = int(upto[min(end, len(upto)) - 1]), cap_bytes
        count += 1
    return count


def fill_until_reached(sizes: Ints, first_bytes: float, cap_bytes: float) -> list[list[int]]:
    """Torch's rule: close a bucket when it reaches its cap."""
    buckets: list[list[int]] = [[]]
    filled, cap = 0, first_bytes
    for at, size in enumerate(sizes.tolist()):
        if buckets[-1] and filled >= cap:
            buckets.append([])
            filled, cap = 0, cap_bytes
        buckets[-1].append(at)
        filled += size
    return buckets


def fill_at_most(sizes: Ints, cap_bytes: float | None) -> list[list[int]]:
    """Our rule: at most the cap, unless a single gradient is larger."""
    backwards = [_Sized(size) for size in sizes[::-1].tolist()]
    return [[len(sizes) - 1 - at for at in bucket] for bucket in assign_buckets(backwards, cap_bytes)]


def torch_rule_of(sizes: Ints, buckets: Sequence[Sequence[int]]) -> TorchRule | None:
    """The rule that gives these buckets; ``None`` if none does.

    Each bucket but the last one is below its cap without its last gradient, and reaches it with that.
    """
    if not all(list(bucket) == list(range(bucket[0], bucket[-1] + 1)) for bucket in buckets):
        return None
    below = [int(sizes[list(bucket[:-1])].sum()) for bucket in buckets]
    reached = [int(sizes[list(bucket)].sum()) for bucket in buckets]
    if len(buckets) == 1:
        return TorchRule(None, below[0], math.inf)
    low, high = max(below[1:]), min([math.inf, *reached[1:-1]])
    may_be_small = below[0] < FIRST_BUCKET_BYTES <= reached[0]
    is_alike = max(low, below[0]) < min(high, reached[0])
    if may_be_small and low < high:  # torch's default, and that of all older versions
        return TorchRule(FIRST_BUCKET_BYTES, low, high, is_alike)
    return TorchRule(None, max(low, below[0]), min(high, reached[0])) if is_alike else None


def split_at_sums(sizes: Ints, sums: Ints) -> Ints | None:
    """The number of the part of each size, if consecutive parts have these sums; else ``None``."""
    if int(sizes.sum()) != int(sums.sum()):
        return None
    ends = np.cumsum(sums)
    upto = np.cumsum(sizes)
    if not np.isin(ends, upto).all():
        return None
    found: Ints = np.searchsorted(ends, upto, side="left")
    return found
