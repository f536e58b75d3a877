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

from typing import TYPE_CHECKING

from ddp_prof.ddp.base import ReducingVariant
from ddp_prof.ddp.engine.buckets import MB, assign_buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from ddp_prof.ddp.engine.buckets import Assignment, ParameterSize


class BucketedDDP(ReducingVariant):
    """From gradient hooks, one asynchronous all-reduce a full bucket.

    Args:
        module: What is trained.
        bucket_size_mb: A bucket holds at most so many MB (2**20 bytes); a larger parameter is alone in its own.
            ``None``: one bucket for all, of each data type and device.
        process_group: As in :class:`ReducingVariant`.
        find_unused_parameters: As in :class:`ReducingVariant`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        bucket_size_mb: float | None,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        if bucket_size_mb is not None and not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be positive or None, got {bucket_size_mb}")
        self._cap_bytes = None if bucket_size_mb is None else bucket_size_mb * MB
        super().__init__(module, process_group=process_group, find_unused_parameters=find_unused_parameters)

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_buckets(sizes, cap_bytes=self._cap_bytes)
