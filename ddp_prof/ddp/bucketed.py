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
can hide, is longer: the cap of a bucket sets the balance. Options change what is sent when:

bucket_size_mb   several caps: ``[1, 25]`` lets a small first bucket leave early, as torch's DDP does by default.
rebuild_buckets  the first step shows in which order gradients come; then buckets are assigned anew in that order.

    order of parameters()   [p9 p8 p7]  [p6 p5 p4]      p5 comes last: both buckets wait for it
    order of readiness      [p9 p8 p6]  [p7 p4 p5]      only the second does
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_prof.ddp.bucket_assignment import assign_buckets, assign_by_readiness, cap_in_bytes
from ddp_prof.ddp.collective import current_device, global_rank
from ddp_prof.ddp.reducing import ReducingVariant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddp_prof.ddp.bucket_assignment import Assignment, ParameterSize


class BucketedDDP(ReducingVariant):
    """From gradient hooks, one asynchronous all-reduce a full bucket.

    Args:
        module: What is trained.
        bucket_size_mb: A bucket holds at most so many MB (2**20 bytes); a larger parameter is alone in its own.
            Several: caps of the first buckets, the last for all that follow. ``None``: one bucket for all, of each data
            type and device.
        rebuild_buckets: After the first step in which every parameter had a gradient on rank 0, assign buckets anew by
            the order in which these came there.
        options: As in :class:`ReducingVariant`.

    Raises:
        TypeError: ``bucket_size_mb`` is no number.
        ValueError: It is not positive.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        bucket_size_mb: float | Sequence[float] | None,
        *,
        rebuild_buckets: bool = False,
        **options: Any,
    ) -> None:
        self._cap_bytes = cap_in_bytes(bucket_size_mb)
        self._is_rebuild_due = rebuild_buckets
        schedule = {"bucket_size_mb": bucket_size_mb, "rebuild_buckets": rebuild_buckets}
        super().__init__(module, schedule=schedule, **options)

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_buckets(sizes, cap_bytes=self._cap_bytes)

    def _synchronize(self) -> None:
        super()._synchronize()
        if self._is_rebuild_due:
            self._rebuild()

    def _rebuild(self) -> None:
        """Take rank 0's order, so that all ranks have the same buckets."""
        order = [self._reducer.order]
        with current_device(self.device):
            dist.broadcast_object_list(order, global_rank(0, self.process_group), self.process_group)
        if len(order[0]) < len(self._trained):
            return
        self.assignment = assign_by_readiness(self._sizes(), self._cap_bytes, order[0])
        self._reducer = self._make_reducer()
        self._is_rebuild_due = False
