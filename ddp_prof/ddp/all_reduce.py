"""The variants that all-reduce their gradients: naive, flat, overlap, bucketed. Each improves on the one before.

In all of them a gradient is copied once, divided, into a buffer, and stays a view of it: nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_prof.ddp.bucket_assignment import (
    Assignment,
    ParameterSize,
    assign_buckets,
    assign_by_readiness,
    assign_each,
    cap_in_bytes,
)
from ddp_prof.ddp.collective import current_device, global_rank
from ddp_prof.ddp.reducing import ReducingVariant


class NaiveDDP(ReducingVariant):
    """After backward, one blocking all-reduce per parameter.

        host      |  forward  |     backward     |           synchronize           |optimizer|
        compute   |###########|##################|                                 |#########|
        all-reduce                               |[p9]|[p8]|[p7]| ... |[p1]|[p0]   |

    Nothing overlaps, and each parameter pays the latency of a collective of its own. Arguments as in
    :class:`ReducingVariant`.
    """

    is_blocking: ClassVar[bool] = True

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_each(sizes)

    def _synchronize(self) -> None:
        for _ in self._reducer.buckets:
            self._reducer.launch_next().wait()
        self._reducer.finish()


class FlatDDP(ReducingVariant):
    """After backward, one all-reduce of one flat buffer per data type and device.

        host      |  forward  |     backward     |      synchronize      |optimizer|
        compute   |###########|##################|                       |#########|
        all-reduce                               |[ p9 p8 p7 ... p1 p0 ] |

    Nothing overlaps, but the latency of a collective is paid once. Arguments as in :class:`ReducingVariant`.
    """

    is_blocking: ClassVar[bool] = True

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_buckets(sizes, cap_bytes=None)


class OverlapDDP(ReducingVariant):
    """From gradient hooks, one asynchronous all-reduce per parameter, while backward computes the next.

        host      |  forward  |     backward     |synchronize|optimizer|
        compute   |###########|##################|           |#########|
        all-reduce                [p9] [p8] [p7] ... [p1][p0]|

    The launches keep the order last parameter first: a gradient that comes early waits for its turn. ``synchronize``
    launches what no hook brought (unused parameters: zeros) and waits for all. What is exposed is the tail after
    backward; each parameter still pays the latency of a collective of its own. Arguments as in
    :class:`ReducingVariant`.
    """

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_each(sizes)


class BucketedDDP(ReducingVariant):
    """From gradient hooks, one asynchronous all-reduce per bucket: the hook that fills a bucket launches it.

        host      |  forward  |     backward     |synchronize|optimizer|
        compute   |###########|##################|           |#########|
        all-reduce                  [p9 p8 p7][p6 p5 p4] ... [p1 p0]   |

    Few large messages use the wire better than many small ones, but the first leaves later and the last, which nothing
    can hide, is longer: the cap of a bucket sets the balance. With ``rebuild_buckets`` the first step shows in which
    order gradients come; then buckets are assigned anew in that order.

        order of parameters()   [p9 p8 p7]  [p6 p5 p4]      p5 comes last: both buckets wait for it
        order of readiness      [p9 p8 p6]  [p7 p4 p5]      only the second does

    Args:
        module: What is trained.
        bucket_size_mb: Cap of a bucket in MiB, as torch's ``bucket_cap_mb``; a larger parameter has its own bucket.
            Several: caps of the first buckets, the last for all that follow; ``[1, 25]`` lets a small first bucket
            leave early, as torch's DDP does by default. ``None``: one bucket for all, of each data type and device.
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
