"""Torch: PyTorch's own DistributedDataParallel with the interface of the other variants, to compare with.

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
With a hook DDP does not divide while it copies. On NCCL the hook lets the collective average, which costs no pass over
memory; gloo has no such operation, so there the hook divides, one pass more than DDP by itself.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.ddp import annotate
from ddp_prof.ddp.base import DataParallel
from ddp_prof.ddp.engine.collective import average_op, communication_error_of, communication_errors

if TYPE_CHECKING:
    from ddp_prof.ddp.annotate import OpenRange


class TorchDDP(DataParallel):
    """DistributedDataParallel.

    Args:
        module: What is trained.
        process_group: ``None`` is the default group.
        find_unused_parameters: As DDP's.
        mark_buckets: Mark each bucket's all-reduce by a communication hook. Without it ``communication_seconds`` is not
            known (NaN), and buckets can be told from kernels only.
        options: Go to DDP, whose own defaults hold.
    """

    _ddp: DistributedDataParallel | None
    _not_copied: ClassVar[frozenset[str]] = DataParallel._not_copied | {"_ddp", "_open_range"}

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        mark_buckets: bool = True,
        **options: Any,
    ) -> None:
        self._options = {"find_unused_parameters": find_unused_parameters, **options}
        super().__init__(module, process_group, {"mark_buckets": mark_buckets, **self._options})
        self._mark_buckets = mark_buckets
        self._set_up()
        # A copy is made of what is equal on all ranks already, and possibly on one of them alone.
        self._options["init_sync"] = False

    def _set_up(self) -> None:
        super()._set_up()
        ddp = DistributedDataParallel(self.module, process_group=self.process_group, **self._options)
        # Not a submodule: the module is one already, and its parameters would be listed twice.
        self.__dict__["_ddp"] = ddp
        self._open_range: OpenRange | None = None
        if self._mark_buckets:
            owner = weakref.ref(self)
            ddp.register_comm_hook(None, lambda _state, bucket: _owner(owner)._reduce_bucket(bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module computes."""
        assert self._ddp is not None, "not after remove()"
        with communication_errors(self.process_group, "DDP's exchange before forward"):
            return self._ddp(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """End the ``synchronize`` range; DDP has already waited, within backward."""
        if self._open_range is not None:
            self._open_range.end()
            self._open_range = None
            self._clock.stop(self.device)

    @property
    def communication_seconds(self) -> float:
        """From the launch of the last bucket, of a GPU from the end of the compute before it; NaN without marks."""
        return super().communication_seconds if self._mark_buckets else float("nan")

    def no_sync(self) -> Any:
        """DDP's own: put it round forward and backward of all but the last micro-batch."""
        assert self._ddp is not None, "not after remove()"
        return self._ddp.no_sync()

    def remove(self) -> None:
        """Drop DDP, which takes its hooks off the module."""
        self.__dict__["_ddp"] = None

    def _synchronize(self) -> None:
        """Nothing is left to do."""

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """All-reduce one bucket as DDP itself would, with a range from launch to completion."""
        tensor = bucket.buffer()
        op = average_op(tensor, self.process_group)
        if op == dist.ReduceOp.SUM:
            tensor.div_(dist.get_world_size(self.process_group))
        span = annotate.start_all_reduce(bucket.index(), tensor.nbytes, len(bucket.parameters()))
        what, rank = f"all-reduce of bucket {bucket.index()}", dist.get_rank(self.process_group)
        future = dist.all_reduce(tensor, op, self.process_group, async_op=True).get_future()
        if bucket.is_last():
            self._clock.start(tensor.device)
            self._open_range = annotate.start_synchronize()

        # Gloo's thread may be the last to drop this function. A process group that only it held would be destroyed
        # there, and abort, because it joins its threads: so it holds neither the group nor DDP.
        def completed(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            span.end()
            try:
                reduced: torch.Tensor = done.value()[0]
            except RuntimeError as error:
                raise communication_error_of(rank, what, error) from error
            return reduced

        result: torch.futures.Future[torch.Tensor] = future.then(completed)
        return result


def _owner(reference: weakref.ref[TorchDDP]) -> TorchDDP:
    """The variant of a communication hook; DDP, which calls the hook, does not outlive it."""
    owner = reference()
    assert owner is not None
    return owner
