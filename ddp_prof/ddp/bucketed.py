"""Bucketed: gradients are sent in buckets, each when backward has finished the last gradient in it.

    host      |  forward  |     backward     |synchronize|optimizer|
    compute   |###########|##################|           |#########|
    all-reduce                  [p9 p8 p7][p6 p5 p4] ... [p1 p0]   |

forward      computes the loss.
backward     the hook of each parameter: copy the gradient, divided, into its view of the bucket's buffer; the hook that
             fills the bucket launches its all-reduce and returns at once. Buckets keep their order.
synchronize  launch buckets that stayed incomplete (unused parameters: zeros), then wait for all that is in flight.
             The gradients stay views of the buffers: nothing is copied back.
optimizer    steps on the averaged gradients.

Few large messages use the wire better than many small ones, but the first leaves later and the last, which nothing
can hide, is longer: the cap of a bucket sets the balance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.ddp.engine.buckets import MB, assign_buckets
from ddp_prof.ddp.reducing import ReducingVariant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddp_prof.ddp.engine.buckets import Assignment, ParameterSize


class BucketedDDP(ReducingVariant):
    """From gradient hooks, one asynchronous all-reduce a full bucket.

    Args:
        module: What is trained.
        bucket_size_mb: A bucket holds at most so many MB (2**20 bytes); a larger parameter is alone in its own.
            ``None``: one bucket for all, of each data type and device.
        options: As in :class:`ReducingVariant`.

    Raises:
        TypeError: ``bucket_size_mb`` is no number.
        ValueError: It is not positive.
    """

    def __init__(self, module: torch.nn.Module, bucket_size_mb: float | None, **options: Any) -> None:
        self._cap_bytes = None if bucket_size_mb is None else check_bucket_size(bucket_size_mb) * MB
        super().__init__(module, **options)

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_buckets(sizes, cap_bytes=self._cap_bytes)


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
