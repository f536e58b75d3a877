"""A bucket whose gradients are reduced to shards and whose parameters are gathered from shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ddp_prof import range_names
from ddp_prof.annotate.hooks import is_on_host
from ddp_prof.ddp.collective import (
    InFlight,
    WorkGroup,
    all_gather,
    global_rank,
    launch,
    launch_all_reduce,
    reduce_scatter,
)
from ddp_prof.ddp.gradient_bucket import GradientBucket, TakenGradient, flat_buffer, flat_views, hold_for_current_stream
from ddp_prof.ddp.reducer import Reducer


class ShardGradient(torch.Tensor):
    """The gradient of a rank's part: an overflow that GradScaler finds in it is found on all ranks.

    Otherwise one rank would skip a step that the others take, and halve a scale that they keep.
    """

    group: dist.ProcessGroup | None
    bucket: int

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*arguments, **(keywords or {}))
        if function is torch._amp_foreach_non_finite_check_and_unscale_:
            (gradient, *_), found, _ = arguments
            launch_all_reduce(found, gradient.group, gradient.bucket, 0).wait()
        return result


class ShardBucket(GradientBucket):
    """Parameters that lie one behind the other in memory, of which each rank updates an equal part.

    Args:
        parameters: They become views of one flat tensor.

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
        self._taken_shard = TakenGradient(self.shard)
        self._before: torch.Tensor | None = None

    def take(self, slot: int, scale: float) -> bool:
        """As of any bucket; the buffer, which is released after each reduction, is allocated again where needed.

        From the first gradient on, a placeholder stands at the shard's, too, which is what ``zero_grad()`` reaches.
        """
        if not len(self._buffer):
            self._allocate()
        if self.missing == len(self.parameters):
            self._before = self.shard.grad
            self._taken_shard.reset()
            self.shard.grad = self._taken_shard
        else:
            self._drop_with_shard()
        return super().take(slot, scale)

    def take_late(self, slot: int) -> tuple[bool, torch.Tensor | None]:
        """As of any bucket; ``zero_grad()`` may have reached the shard alone."""
        late = self.parameters[slot].grad  # autograd has just added to it: after ``zero_grad()``
        was_dropped = self._drop_with_shard()
        self.parameters[slot].grad = late
        is_dropped, late = super().take_late(slot)
        if was_dropped:
            self._dropped.add(slot)
        return is_dropped or was_dropped, late

    def is_dropped(self) -> bool:
        return (self.missing < len(self.parameters) and self._is_shard_dropped()) or super().is_dropped()

    def release(self) -> None:
        self._buffer, self.views = self._buffer[:0].clone(), []

    def reduce(self) -> InFlight:
        """Launch the reduce-scatter: this rank gets the sum of its part.

        Gloo's own reduce-scatter is an all-reduce that does not say when it is done. There the ranks exchange parts,
        which is as much on the wire as a reduce-scatter, and add up in :meth:`give_shard`.
        """
        full = self.tensor()
        if self._before is not None:  # gradients add up until they are set to None
            self._reduced = torch.zeros_like(self._reduced)
        self._received = torch.empty_like(full) if is_on_host(full, self._group) else None

        def start() -> Any:
            if self._received is not None:
                return dist.all_to_all_single(self._received, full, group=self._group, async_op=True)
            return reduce_scatter(self._reduced, full, group=self._group, async_op=True)

        return launch(start, range_names.REDUCE_SCATTER, full, self._group, self.index, len(self))

    def gather(self) -> InFlight:
        """Launch the all-gather of the parameters, in place.

        Gloo's own all-gather receives a copy of everything. There each rank broadcasts its part, which needs none and
        takes less time.
        """

        def start() -> Any:
            if is_on_host(self._flat, self._group):
                parts = enumerate(self._flat.chunk(dist.get_world_size(self._group)))
                works = [
                    dist.broadcast(part, global_rank(rank, self._group), self._group, async_op=True)
                    for rank, part in parts
                ]
                return WorkGroup(works)
            return all_gather(self._flat, self.shard.detach(), self._group, async_op=True)

        return launch(start, range_names.ALL_GATHER, self._flat, self._group, self.index, len(self))

    def give_shard(self, late: dict[int, torch.Tensor]) -> None:
        """Add the reduced gradient to the shard's own."""
        hold_for_current_stream(self._buffer)  # it is of a hook's stream, which may use its memory again
        self.release()
        if self._received is not None:
            hold_for_current_stream(self._received)
            torch.sum(self._received.view(-1, len(self._reduced)), 0, out=self._reduced)
            self._received = None
        dropped = {slot for slot in range(len(self)) if self._changes_since_taken(slot)[0]}
        if dropped or self._dropped:  # what is dropped need not be finite
            ones = {slot: torch.ones_like(self.parameters[slot]) for slot in dropped | self._dropped}
            self._reduced.masked_fill_(self._own_part(ones) != 0, 0)
        kept = {slot: tensor for slot, tensor in late.items() if slot not in dropped}
        if kept:
            self._reduced.add_(self._own_part(kept))
        for slot, parameter in enumerate(self.parameters):
            parameter.grad = self._changes_since_taken(slot)[1]  # what came under ``no_sync`` waits for the next step
        if self._is_shard_dropped():
            self._before = self._reduced.zero_() if self._taken_shard.is_zeroed else None
        elif self._before is not None:
            self._before.add_(self._reduced)
        else:
            self._before = self._reduced.as_subclass(ShardGradient)
            self._before.group, self._before.bucket = self._group, self.index
        self.shard.grad, self._before = self._before, None

    def _is_shard_dropped(self) -> bool:
        return self.shard.grad is not self._taken_shard or self._taken_shard.is_zeroed

    def _drop_with_shard(self) -> bool:
        """Drop what was taken of each parameter where ``zero_grad()`` reached the shard; says whether it did."""
        is_dropped = self._is_shard_dropped()
        if is_dropped:
            for parameter, is_taken in zip(self.parameters, self._taken, strict=True):
                if is_taken:
                    parameter.grad = None
            self._before = None
            self._taken_shard.reset()
            self.shard.grad = self._taken_shard
        return is_dropped

    def _own_part(self, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """This rank's part of the bucket that holds these tensors by slot, and zeros elsewhere."""
        full = flat_buffer(self.parameters, self._multiple)
        views = flat_views(full, self.parameters)
        for slot, tensor in tensors.items():
            hold_for_current_stream(tensor)
            views[slot].copy_(tensor)
        return full[self._own]


class ShardReducer(Reducer):
    def shard_buckets(self) -> list[ShardBucket]:
        return cast("list[ShardBucket]", self.buckets)

    def _make_bucket(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> GradientBucket:
        return ShardBucket(index, parameters, self._group)

    def _launch(self, bucket: GradientBucket) -> InFlight:
        assert isinstance(bucket, ShardBucket)
        for earlier, flight in zip(self.shard_buckets(), self._in_flight, strict=False):
            if flight.is_completed():
                earlier.release()
        return bucket.reduce()

    def _restore_gradients(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:  # noqa: ARG002  # a shard has all
        for bucket, members in zip(self.shard_buckets(), self._assignment, strict=True):
            bucket.give_shard({slot: late[index] for slot, index in enumerate(members) if index in late})
