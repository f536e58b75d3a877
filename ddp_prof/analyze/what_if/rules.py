"""Which gradients share a bucket, by the rules of torch's DDP and of our variants.

Gradients are listed in the order in which they become ready. In torch's DDP, the gradient with which a bucket *reaches*
its cap is its last one; the first bucket may have its own cap (1 MiB, if no ``bucket_cap_mb`` is given). In our
variants, a bucket holds *at most* its cap, unless a single gradient is larger.
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
"""torch's cap of the first bucket where ``bucket_cap_mb`` is not given; older versions of torch always use it."""
DEFAULT_MB = 25.0
"""torch's cap of the other buckets where ``bucket_cap_mb`` is not given, in MiB."""
_MOST_RULES = 100
"""Of so many rules :func:`find_rules` chooses at most, with a small first bucket, and without."""


@dataclass(frozen=True, slots=True)
class _Sized:
    """Stands for a tensor of this size in :func:`assign_buckets`."""

    nbytes: int
    dtype: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class TorchRule:
    """torch's rule as today's buckets show it; their cap itself is not recorded.

    Attributes:
        first_bytes: The cap of the first bucket; ``None`` if it is that of the other buckets.
        low_bytes, high_bytes: Any cap above ``low_bytes`` and up to ``high_bytes`` gives today's buckets.
        is_either: Whether the first bucket may as well have the cap of the others: today's buckets would be the same.
    """

    first_bytes: float | None
    low_bytes: float
    high_bytes: float
    is_either: bool = False

    @property
    def is_recent_torch(self) -> bool | None:
        """Whether torch is so recent that a cap that is given holds for the first bucket; ``None`` if not known.

        There a first bucket has a cap of its own only if ``bucket_cap_mb`` is not given, beside the default cap.
        """
        if self.first_bytes is None:
            return True
        return None if self.may_be_default or self.is_either else False

    @property
    def may_be_default(self) -> bool:
        """Whether today's buckets are those of torch where ``bucket_cap_mb`` is not given."""
        is_default = self.low_bytes < DEFAULT_MB * BYTES_PER_MB <= self.high_bytes
        return self.first_bytes is not None and is_default

    def buckets(self, sizes: Ints, cap_bytes: float) -> list[list[int]]:
        """Return the buckets with another cap, as positions in ``sizes``; the first one keeps its cap if smaller.

        Older versions of torch do so. In recent ones, the first bucket has the cap that is given as ``bucket_cap_mb``.
        """
        first = cap_bytes if self.first_bytes is None else min(self.first_bytes, cap_bytes)
        return fill_until_reached(sizes, first, cap_bytes)


def mebibytes(size: int) -> str:
    """Format bytes in the unit of ``bucket_cap_mb``, small ones in KiB or bytes."""
    if size < 1024:
        return f"{size} bytes"
    mib = size / BYTES_PER_MB
    return f"{mib:,.1f} MiB" if mib >= 0.1 else f"{size / 1024:.3g} KiB"


def find_rules(sizes: Ints, calls: int) -> list[tuple[float, float]]:
    """Return caps in bytes, of the first bucket and of the others, with which torch makes ``calls`` buckets.

    Each rule makes other buckets. If torch's default caps give this number, they are the only rule. Else the rules with
    a first bucket of 1 MiB are listed first, then those with one cap for all buckets; larger caps before smaller ones.

    Args:
        sizes: Bytes of each gradient, in the order in which they become ready.
        calls: The number of buckets: that of a step's collectives.
    """
    upto = np.cumsum(sizes)
    default = DEFAULT_MB * BYTES_PER_MB
    if _count_buckets(upto, FIRST_BUCKET_BYTES, default, calls) == calls:
        return [(FIRST_BUCKET_BYTES, default)]
    found: list[tuple[float, float]] = []
    for most_first in (FIRST_BUCKET_BYTES, math.inf):
        # The larger the cap, the fewer buckets: so bisection finds the largest cap that gives at least ``calls``.
        low, high = 1, max(1, int(upto[-1]))
        while low < high:
            cap = (low + high + 1) // 2
            if _count_buckets(upto, min(most_first, cap), cap, calls) >= calls:
                low = cap
            else:
                high = cap - 1
        cap, most = low, len(found) + _MOST_RULES
        while cap > 0 and len(found) < most and _count_buckets(upto, min(most_first, cap), cap, calls) == calls:
            first = min(most_first, cap)
            found.append((first, cap))
            # The next smaller cap that closes a bucket earlier: the largest bucket's bytes without its last gradient.
            buckets = fill_until_reached(sizes, first, cap)
            cap = max(int(sizes[one[:-1]].sum()) for one in (buckets[1:] if first < cap else buckets) or [[]])
    return list(dict.fromkeys(found))


def _count_buckets(upto: Ints, first_bytes: float, cap_bytes: float, most: int) -> int:
    """Return how many buckets :func:`fill_until_reached` makes, without making them; at most ``most + 1``.

    ``upto`` has the cumulative sizes of the gradients: the bytes of each gradient and of all before it.
    """
    count, end, before, cap = 0, 0, 0, first_bytes
    while end < len(upto) and count <= most:
        # The bucket ends behind the first gradient with which the bytes reach the cap above those of earlier buckets.
        end = int(np.searchsorted(upto, before + cap)) + 1
        before, cap = int(upto[min(end, len(upto)) - 1]), cap_bytes
        count += 1
    return count


def fill_until_reached(sizes: Ints, first_bytes: float, cap_bytes: float) -> list[list[int]]:
    """Return the buckets by torch's rule, as positions in ``sizes``: a bucket is closed when it reaches its cap."""
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
    """Return the buckets by our variants' rule, as positions in ``sizes``: at most the cap, or one larger gradient."""
    # ``assign_buckets`` takes the parameters in their own order, which is the reverse of that of the gradients.
    backwards = [_Sized(size) for size in sizes[::-1].tolist()]
    return [[len(sizes) - 1 - at for at in bucket] for bucket in assign_buckets(backwards, cap_bytes)]


def torch_rule_of(sizes: Ints, buckets: Sequence[Sequence[int]]) -> TorchRule | None:
    """Return torch's rule with the caps that give these buckets; ``None`` if no cap does.

    Each bucket is below its cap without its last gradient. With its last gradient, each but the last bucket reaches it.
    """
    if not all(list(bucket) == list(range(bucket[0], bucket[-1] + 1)) for bucket in buckets):  # not consecutive
        return None
    # The bytes of each bucket without and with its last gradient.
    below = [int(sizes[list(bucket[:-1])].sum()) for bucket in buckets]
    reached = [int(sizes[list(bucket)].sum()) for bucket in buckets]
    if len(buckets) == 1:
        return TorchRule(None, below[0], math.inf)
    # The bounds of the cap by all buckets but the first; then whether the first one fits a cap of 1 MiB, or theirs.
    low, high = max(below[1:]), min([math.inf, *reached[1:-1]])
    may_be_small = below[0] < FIRST_BUCKET_BYTES <= reached[0]
    own_low, own_high = max(low, below[0]), min(high, reached[0])  # with the first bucket's bounds
    is_alike = own_low < own_high
    if may_be_small and low < high:  # torch's default, and that of all older versions
        return TorchRule(FIRST_BUCKET_BYTES, low, high, is_alike)
    return TorchRule(None, own_low, own_high) if is_alike else None


def split_at_sums(sizes: Ints, sums: Ints) -> Ints | None:
    """Divide ``sizes`` into consecutive groups with the given sums; return the number of the group of each size.

    ``None`` if no division has these sums.
    """
    if int(sizes.sum()) != int(sums.sum()):
        return None
    ends = np.cumsum(sums)
    upto = np.cumsum(sizes)
    # The end of each group must be the end of one of the sizes.
    if not np.isin(ends, upto).all():
        return None
    found: Ints = np.searchsorted(ends, upto, side="left")
    return found
