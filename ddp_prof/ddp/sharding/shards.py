"""A bucket whose gradients are reduced to shards and whose parameters are gathered from shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ddp_prof import range_names
from ddp_prof.ddp.engine.collective import InFlight, all_gather, is_on_host, launch, reduce_scatter
from ddp_prof.ddp.engine.gradients import GradientBucket, flat_buffer, flat_views
from ddp_prof.ddp.engine.reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Sequence


class ShardBucket(GradientBucket):
    """Parameters that lie one behind the other in memory, of which each rank updates an equal part.

    Args:
        index: Position in the order of launch.
        parameters: They become views of one flat tensor.
        group: ``None`` is the default group.

    Attributes:
        shard: This rank's part of the flat tensor, ``[padded length / world]``; what the optimizer steps on.
    """

    def __init__(self, index: int, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self._group = group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        super().__init__(index, parameters, multiple=world)
        self.release()
        self._flat = flat_buffer(parameters, world)
        for parameter, view in zip(parameters, flat_views(self._flat, self.parameters), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._own = slice(rank * len(self._flat) // world, (rank + 1) * len(self._flat) // world)
        self.shard = torch.nn.Parameter(self._flat[self._own])
        self._reduced = torch.zeros_like(self.shard, requires_grad=False)
        self._received: torch.Tensor | None = None

    def take(self, slot: int, scale: float) -> bool:
        """As of any bucket; the buffer, which is released after each reduction, is allocated again where needed."""
        if not len(self._buffer):
            self._allocate()
        return super().take(slot, scale)

    def release(self) -> None:
        """Free the memory of the full gradients."""
        self._buffer, self.views = self._buffer[:0].clone(), []

    def reduce(self) -> InFlight:
        """Launch the reduce-scatter: this rank gets the sum of its part.

        Gloo's own reduce-scatter is an all-reduce that does not say when it is done. There the ranks exchange parts,
        which is as much on the wire as a reduce-scatter, and add up in :meth:`give_shard`.
        """
        full = self.tensor()
        if self.shard.grad is not None:  # gradients add up until they are set to None
            self._reduced = torch.zeros_like(self._reduced)
        self._received = torch.empty_like(full) if is_on_host(full, self._group) else None

        def start() -> Any:
            if self._received is not None:
                return dist.all_to_all_single(self._received, full, group=self._group, async_op=True)
            return reduce_scatter(self._reduced, full, group=self._group, async_op=True)

        return launch(start, range_names.REDUCE_SCATTER, full, self._group, self.index, len(self))

    def gather(self) -> InFlight:
        """Launch the all-gather of the parameters, in place."""

        def start() -> Any:
            return all_gather(self._flat, self.shard.detach(), self._group, async_op=True)

        return launch(start, range_names.ALL_GATHER, self._flat, self._group, self.index, len(self))

    def give_shard(self, late: dict[int, torch.Tensor]) -> None:
        """Add the reduced gradient to the shard's own.

        Args:
            late: By slot, reduced contributions that came after the gradient was taken.
        """
        self.release()
        if self._received is not None:
            torch.sum(self._received.view(-1, len(self._reduced)), 0, out=self._reduced)
            self._received = None
        if late:
            full = flat_buffer(self.parameters, self._multiple)
            views = flat_views(full, self.parameters)
            for slot, tensor in late.items():
                views[slot].copy_(tensor)
            self._reduced.add_(full[self._own])
        if self.shard.grad is None:
            self.shard.grad = self._reduced
        else:
            self.shard.grad.add_(self._reduced)


class ShardReducer(Reducer):
    """Reduces each bucket to shards. Arguments as of :class:`Reducer`."""

    def shard_buckets(self) -> list[ShardBucket]:
        """The buckets, in the order of launch."""
        return cast("list[ShardBucket]", self.buckets)

    def _make_bucket(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> GradientBucket:
        return ShardBucket(index, parameters, self._group)

    def _launch(self, bucket: GradientBucket) -> InFlight:
        assert isinstance(bucket, ShardBucket)
        for earlier, flight in zip(self.shard_buckets(), self._in_flight, strict=False):
            if flight.is_completed():
                earlier.release()
        return bucket.reduce()

    def _give_back(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:  # noqa: ARG002  # a shard has all
        for bucket, members in zip(self.shard_buckets(), self._assignment, strict=True):
            bucket.give_shard({slot: late[index] for slot, index in enumerate(members) if index in late})
