"""Torch: PyTorch's own DistributedDataParallel behind the same face, to compare with.

    host      |  forward  |            backward             |optimizer|
    compute   |###########|##################               |#########|
    synchronize                              |wait, copy back|
    all-reduce                  [bucket 0][bucket 1] ... [n] |

forward      computes the loss; DDP prepares its buckets.
backward     DDP copies gradients into its buckets, each launched when full, and waits for all of them before
             ``backward`` returns. In the first step one bucket holds everything; then DDP makes new ones in the order
             in which gradients came.
synchronize  lies within backward: from the launch of the last bucket to the end of backward.
optimizer    steps on the averaged gradients.

DDP shows its buckets to a communication hook, which marks them with ranges; ``mark_buckets=False`` leaves DDP alone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.ddp import annotate
from ddp_prof.ddp.base import DataParallel
from ddp_prof.ddp.engine.collective import communication_error, communication_errors

if TYPE_CHECKING:
    from ddp_prof.ddp.annotate import OpenRange


class TorchDDP(DataParallel):
    """DistributedDataParallel.

    Args:
        module: What is trained.
        process_group: ``None`` is the default group.
        find_unused_parameters: As DDP's.
        mark_buckets: Mark each bucket's all-reduce by a communication hook. Without it ``communication_seconds`` is not
            known (NaN).
        options: Go to DDP. Its own defaults hold, but buffers are broadcast at construction only, as by all variants.
    """

    _ddp: DistributedDataParallel

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        mark_buckets: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(module, process_group)
        ddp = DistributedDataParallel(
            module, process_group=process_group, find_unused_parameters=find_unused_parameters, **options
        )
        if not {"broadcast_buffers", "forward_sync_buffers"} & options.keys():
            ddp.broadcast_buffers = False  # set afterwards: given at construction, older DDP would not send them at all
        # Not a submodule: the module is one already, and its parameters would be listed twice.
        self.__dict__["_ddp"] = ddp
        self._last_launch: tuple[OpenRange, float] | None = None
        if mark_buckets:
            ddp.register_comm_hook(None, lambda _state, bucket: self._reduce_bucket(bucket))
        else:
            self.communication_seconds = float("nan")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module computes."""
        with communication_errors(self.process_group, "DDP's exchange before forward"):
            return self._ddp(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """End the ``synchronize`` range; DDP has already waited, within backward."""
        if self._last_launch is not None:
            span, begin = self._last_launch
            span.end()
            self.communication_seconds = time.perf_counter() - begin
            self._last_launch = None

    def no_sync(self) -> Any:
        """DDP's own: put it round forward and backward of all but the last micro-batch."""
        return self._ddp.no_sync()

    def _synchronize(self) -> None:
        """Nothing is left to do."""

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """All-reduce one bucket as DDP itself would, with a range from launch to completion."""
        tensor = bucket.buffer()
        tensor.div_(dist.get_world_size(self.process_group))
        span = annotate.start_all_reduce(bucket.index(), tensor.nbytes, len(bucket.parameters()))
        what = f"all-reduce of bucket {bucket.index()}"
        future = dist.all_reduce(tensor, group=self.process_group, async_op=True).get_future()
        if bucket.is_last():
            self._last_launch = annotate.start_synchronize(), time.perf_counter()

        def completed(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            span.end()
            try:
                reduced: torch.Tensor = done.value()[0]
            except RuntimeError as error:
                raise communication_error(self.process_group, what, error) from error
            return reduced

        result: torch.futures.Future[torch.Tensor] = future.then(completed)
        return result
