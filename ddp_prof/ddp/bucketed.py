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
can hide, is longer: the cap of a bucket sets the balance. Options change what is sent and when:

bucket_size_mb   several caps: ``[1, 25]`` lets a small first bucket leave early, as torch's DDP does by default.
rebuild_buckets  the first step shows in which order gradients come; then buckets are assigned anew in that order.

    order of parameters()   [p9 p8 p7]  [p6 p5 p4]      p5 comes last: both buckets wait for it
    order of readiness      [p9 p8 p6]  [p7 p4 p5]      only the second does

step_in_backward each bucket is stepped on as it arrives, see :mod:`ddp_prof.ddp.options.step_in_backward`.
compression      ``bf16``: half the bytes, see :mod:`ddp_prof.ddp.options.bf16_compression` for the error; or PowerSGD:
                 matrices as products of thin ones, see :mod:`ddp_prof.ddp.options.powersgd`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_prof.ddp.engine.bucket_assignment import assign_buckets, assign_by_readiness, cap_in_bytes
from ddp_prof.ddp.engine.collective import global_rank
from ddp_prof.ddp.engine.reducer import Reducer
from ddp_prof.ddp.options.bf16_compression import Bf16Reducer
from ddp_prof.ddp.options.powersgd import PowerSGD, PowerSGDReducer
from ddp_prof.ddp.options.step_in_backward import SteppingReducer
from ddp_prof.ddp.reducing import ReducingVariant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ddp_prof.ddp.engine.bucket_assignment import Assignment, ParameterSize


class BucketedDDP(ReducingVariant):
    """From gradient hooks, one asynchronous all-reduce a full bucket.

    Args:
        module: What is trained.
        bucket_size_mb: A bucket holds at most so many MB (2**20 bytes); a larger parameter is alone in its own.
            Several: caps of the first buckets, the last for all that follow. ``None``: one bucket for all, of each data
            type and device.
        rebuild_buckets: After the first step in which every parameter had a gradient on rank 0, assign buckets anew by
            the order in which these came there.
        compression: ``None``, ``"bf16"``, or a ``PowerSGD``. A copy of the variant starts without its errors.
        step_in_backward: Makes an optimizer of a bucket's parameters; each steps when its bucket has arrived, and after
            ``finish_gradient_synchronization`` all have. A copy of the variant has new optimizers.
        options: As in :class:`ReducingVariant`.

    Raises:
        TypeError: ``bucket_size_mb`` is no number.
        ValueError: It is not positive, there is no such compression, or options exclude each other.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        bucket_size_mb: float | Sequence[float] | None,
        *,
        rebuild_buckets: bool = False,
        compression: str | PowerSGD | None = None,
        step_in_backward: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(compression, PowerSGD) and compression not in (None, "bf16"):
            raise ValueError(f"compression must be None, 'bf16' or a PowerSGD, got {compression!r}")
        if isinstance(compression, PowerSGD) and (rebuild_buckets or options.get("find_unused_parameters")):
            raise ValueError("PowerSGD goes with neither rebuild_buckets nor find_unused_parameters: leave these out")
        if step_in_backward and (compression or rebuild_buckets or options.get("find_unused_parameters")):
            raise ValueError("step_in_backward goes with no other option: leave the others out")
        self._make_optimizer = step_in_backward
        self._cap_bytes = cap_in_bytes(bucket_size_mb)
        self._compression = compression
        self._is_rebuild_due = rebuild_buckets
        schedule = {
            "bucket_size_mb": bucket_size_mb,
            "rebuild_buckets": rebuild_buckets,
            "compression": compression,
            "step_in_backward": step_in_backward is not None,
        }
        super().__init__(module, schedule=schedule, **options)

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_buckets(sizes, cap_bytes=self._cap_bytes)

    def _make_reducer(self) -> Reducer:
        arguments = self._trained, self.assignment, self.process_group, self._find_unused
        if self._make_optimizer is not None:
            return SteppingReducer(*arguments, make_optimizer=self._make_optimizer)
        if isinstance(self._compression, PowerSGD):
            return PowerSGDReducer(*arguments, how=self._compression)
        return (Bf16Reducer if self._compression else Reducer)(*arguments)

    def optimizer_parameters(self) -> list[torch.nn.Parameter]:
        """What an optimizer is to step on: nothing is left where buckets have optimizers of their own."""
        return [] if self._make_optimizer is not None else super().optimizer_parameters()

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those of ``step_in_backward``, one a bucket."""
        return self._reducer.optimizers if isinstance(self._reducer, SteppingReducer) else ()

    def _synchronize(self) -> None:
        super()._synchronize()
        if self._is_rebuild_due:
            self._rebuild()

    def _rebuild(self) -> None:
        """Take rank 0's order, so that all ranks have the same buckets."""
        order = [self._reducer.order]
        dist.broadcast_object_list(order, global_rank(0, self.process_group), self.process_group)
        if len(order[0]) < len(self._trained):
            return
        self.assignment = assign_by_readiness(self._sizes(), self._cap_bytes, order[0])
        self._reducer = self._make_reducer()
        self._is_rebuild_due = False
