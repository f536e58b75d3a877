"""The bucket of ``sharded``: its parameters are views of one flat tensor, of which each rank updates a part."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_prof import range_names
from ddp_prof.annotate.process_groups import is_on_host
from ddp_prof.ddp.buckets import (
    GradientBucket,
    TakenGradient,
    flat_buffer,
    flat_views,
    hold_for_current_stream,
    in_reals,
)
from ddp_prof.ddp.collective import InFlight, all_gather, global_rank, launch, reduce_scatter
from ddp_prof.ddp.shard import Idle, Shard
from ddp_prof.errors import CommunicationError


class ShardBucket(GradientBucket):
    """A bucket whose parameters become views of one flat tensor, of which each rank updates an equal part.

    Attributes:
        shard: This rank's part of the flat tensor, ``[padded length / world]``; the optimizer steps on it.
        idle: Keeps the parameters without a gradient unchanged in a step.
    """

    def __init__(self, index: int, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self._group = group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        super().__init__(index, parameters, multiple=world)
        self.release()  # the buffer of gradients, until the first gradient comes
        self._flat = flat_buffer(parameters, world)
        self._flat_views = flat_views(self._flat, self.parameters)
        for parameter, view in zip(parameters, self._flat_views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._own = slice(rank * len(self._flat) // world, (rank + 1) * len(self._flat) // world)
        self.shard = Shard(self._flat[self._own])
        self.shard.group, self.shard.bucket = group, index
        self._reduced = torch.zeros_like(self.shard, requires_grad=False)  # the average of this rank's part
        self._received: torch.Tensor | None = None  # with gloo: this rank's part from each rank, to be added up
        self._taken_shard = TakenGradient(self.shard)  # the shard's ``grad`` during the reduction
        self._before: torch.Tensor | None = None  # the shard's ``grad`` before, to which the new gradient is added
        self._own_slices = self._find_own_slices()
        self._with_gradient: set[int] = set()  # slots that are part of the shard's gradient
        self._used_here: set[int] = set()  # slots for which this rank itself had a gradient that is part of it
        # Slots whose ``grad`` is a placeholder for their part of the shard's gradient, from one reduction to the next.
        self._held: set[int] = set()
        self._stale: set[int] = set()  # slots whose part of the shard's gradient was dropped since the last reduction
        self._zeroed: set[int] = set()  # those of them that were set to zeros, which is a gradient, and not to ``None``
        self.idle = Idle(self.shard, self._own_slices)
        self._own_tensors = self._count_tensors()
        self._note_version()

    def _count_tensors(self) -> int:
        """Return how many tensors lie in the memory of the parameters."""
        return torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)

    def has_aliases(self) -> bool:
        """Whether the program has tensors in the memory of the parameters, such as ``data`` or those of a state dict.

        What reads them does not wait for an all-gather, as the parameters themselves do.
        """
        return self._count_tensors() > self._own_tensors

    def _note_version(self) -> None:
        """Note the state of the shard's values, to notice later changes."""
        self._version, self._address = self.shard._version, self.shard.data_ptr()

    def check_shard(self) -> None:
        """Raise CommunicationError if something but an optimizer's step changed the shard since its last all-gather."""
        if (self._version, self._address) != (self.shard._version, self.shard.data_ptr()):
            raise CommunicationError(
                "a tensor of optimizer_parameters() was changed, and not by a step of a torch.optim.Optimizer, so the "
                "other ranks do not have the change: change the module's parameters instead, on every rank"
            )

    def note_step(self) -> None:
        """Tell autograd that a step has changed the parameters that have a gradient, as a step in place does.

        All-gathers write past the parameters. Without this, a backward through a graph from before the step would use
        the new values in silence. Other parameters keep their values, so older graphs of theirs stay valid. Whether
        another rank alone had a gradient is known only of parameters of which the shard has a part.
        """
        if self.shard.grad is None:
            return
        for slot in self._with_gradient:
            own = self._own_slices[slot]
            if slot in self._used_here or own.stop > own.start:
                torch.autograd.graph.increment_version(self.parameters[slot])

    def _find_own_slices(self) -> list[slice]:
        """Return for each parameter the slice of :attr:`shard` with its elements; empty if the shard has none."""
        ends = itertools.accumulate(parameter.numel() for parameter in self.parameters)
        first, length = self._own.start, len(self.shard)
        return [
            slice(
                min(max(end - parameter.numel() - first, 0), length),
                min(max(end - first, 0), length),
            )
            for parameter, end in zip(self.parameters, ends, strict=True)
        ]

    def is_unused(self, slot: int) -> bool | None:
        """Whether no rank had a gradient for this slot: then all elements are -0.0.

        ``None`` if the shard has no element of the parameter, as it is then not known.
        """
        # With gloo the parts of the ranks are not added up yet: one row per rank.
        received = self._reduced if self._received is None else self._received.view(self._multiple, -1)
        parts = in_reals(received[..., self._own_slices[slot]])
        return not bool(parts.any()) and bool(parts.signbit().all()) if parts.numel() else None

    def take(self, slot: int, scale: float) -> bool:
        """Copy one gradient into the buffer; the first gradient of a step also gives the shard a placeholder."""
        if not len(self._buffer):
            self._allocate()
        self._release_held(slot)
        # The first gradient of a step; later ones check whether ``zero_grad()`` was called since.
        if self.missing == len(self.parameters):
            self._before = self.shard.grad
            if self._before is None:
                self._used_here.clear()
            self._taken_shard.reset()
            self.shard.grad = self._taken_shard
        elif self.parameters[slot].grad is not None:  # what is only filled up, at the end, brings nothing new
            self._drop_with_shard()
        has_gradient = super().take(slot, scale)
        if has_gradient:
            self._used_here.add(slot)
        return has_gradient

    def _release_held(self, slot: int) -> None:
        """Give a parameter its own ``grad`` again; note if the program dropped or replaced the one that was reduced."""
        if slot in self._held:
            self._held.discard(slot)
            self._placeholders[slot].is_held = False
            is_dropped, self.parameters[slot].grad = self._changes_since_taken(slot)
            if is_dropped:
                self._stale.add(slot)
                self._zeroed |= {slot} if self._placeholders[slot].is_zeroed else set()

    def release_zeroed(self) -> None:
        """After ``zero_grad()`` of the optimizer, which knows only the shard: no parameter has a gradient any more."""
        if self.shard.grad is None:
            for slot in list(self._held):
                self._release_held(slot)
            self._stale.clear()
            self._zeroed.clear()

    def drop_zeroed(self) -> None:
        """Drop from the shard's gradient what the program dropped by ``zero_grad()`` of the module, or ``grad = None``.

        Called before the shard's gradient is used, unless a reduction does so.
        """
        zeroed = {slot for slot in self._held if self._changes_since_taken(slot)[0]}
        if not zeroed or self.shard.grad is None:
            return
        for slot in zeroed:
            self.shard.grad[self._own_slices[slot]] = 0
            if not self._placeholders[slot].is_zeroed:  # a gradient of zeros is one
                self._with_gradient.discard(slot)
        if not self._with_gradient:
            self.shard.grad = None
        self.idle.leave_out(set(range(len(self.parameters))) - self._with_gradient)

    def check_gradients(self) -> None:
        """Raise CommunicationError if a parameter has a gradient that is not in the shard's, which a step would miss.

        The program has set it or added to it, or a backward under ``no_sync`` has, and it was not reduced since.
        """
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            gradient = parameter.grad
            if gradient is not None and (gradient is not placeholder or placeholder.added is not None):
                raise CommunicationError(
                    "the gradient of a parameter was set or added to since backward, and not averaged over the ranks, "
                    "and sharded steps on parts of gradients: change those of variant.optimizer_parameters() instead"
                )

    def take_late(self, slot: int) -> tuple[bool, torch.Tensor | None]:
        """As in :class:`GradientBucket`; the gradient is dropped, too, if ``zero_grad()`` was called for the shard."""
        late = self.parameters[slot].grad  # autograd has just added to it, so it must survive ``_drop_with_shard``
        was_dropped = self._drop_with_shard()  # the optimizer's ``zero_grad()`` knows only the shard
        self.parameters[slot].grad = late
        is_dropped, late = super().take_late(slot)
        if was_dropped:
            self._dropped.add(slot)
        return is_dropped or was_dropped, late

    def is_dropped(self) -> bool:
        return (self.missing < len(self.parameters) and self._is_shard_dropped()) or super().is_dropped()

    def restore_memory(self) -> None:
        """Make parameters that were given other memory views of the flat tensor again, with their present values."""
        for parameter, view in zip(self.parameters, self._flat_views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view
        self._note_version()

    def release(self) -> None:
        """Free the buffer of gradients; the next :meth:`take` allocates it again."""
        self._buffer, self.views = self._buffer[:0].clone(), []

    def reduce(self) -> InFlight:
        """Launch the reduce-scatter, which gives this rank the sum over the ranks of its part of the buffer.

        Gloo's reduce-scatter is an all-reduce that does not report its completion. So with gloo each rank sends every
        other rank that rank's part (all-to-all), which sends as many bytes as a reduce-scatter. :meth:`give_shard` then
        adds up what was received.
        """
        full = self.tensor()
        if self._before is not None:  # the shard's gradient, to which the new one is added, may share its storage
            self._reduced = torch.zeros_like(self._reduced)
        self._received = torch.empty_like(full) if is_on_host(full, self._group) else None

        def start() -> Any:
            if self._received is not None:
                return dist.all_to_all_single(self._received, full, group=self._group, async_op=True)
            return reduce_scatter(self._reduced, full, group=self._group, async_op=True)

        return launch(start, range_names.REDUCE_SCATTER, full, self._group, self.index, len(self.parameters))

    def gather(self) -> InFlight:
        """Launch the all-gather of the parameters, which gives each rank the updated parts of all ranks, in place.

        Gloo's all-gather needs a copy of the whole tensor. So with gloo each rank broadcasts its part, which needs no
        copy and takes less time.
        """

        def start() -> Any:
            if is_on_host(self._flat, self._group):
                parts = enumerate(self._flat.chunk(dist.get_world_size(self._group)))
                return [
                    dist.broadcast(part, global_rank(rank, self._group), self._group, async_op=True)
                    for rank, part in parts
                ]
            return all_gather(self._flat, self.shard.detach(), self._group, async_op=True)

        flight = launch(start, range_names.ALL_GATHER, self._flat, self._group, self.index, len(self.parameters))
        self._note_version()
        return flight

    def give_shard(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        """Set the shard's gradient after the reduction, and the gradients of the bucket's parameters.

        The parameters keep no reduced gradient, only what a backward under ``no_sync`` has added for the next step.

        Args:
            unused: Slots without a gradient on any rank: the optimizer leaves these parameters as they are.
            late: Reduced late contributions by slot; they are added.
        """
        hold_for_current_stream(self._buffer)  # it belongs to a hook's stream, which may use its memory again
        self.release()
        if self._received is not None:
            hold_for_current_stream(self._received)
            torch.sum(self._received.view(self._multiple, -1), 0, out=self._reduced)
            self._received = None
        # Set the elements of dropped gradients to zero, not by a product with zeros, as they may be infinite.
        dropped = {slot for slot in range(len(self.parameters)) if self._changes_since_taken(slot)[0]}
        if dropped or self._dropped:
            ones = {slot: torch.ones_like(self.parameters[slot]) for slot in dropped | self._dropped}
            self._reduced.masked_fill_(self._own_part(ones) != 0, 0)
        # Late contributions count unless they were dropped, too.
        kept = {slot: tensor for slot, tensor in late.items() if slot not in dropped}
        if kept:
            self._reduced.add_(self._own_part(kept))
        # The slots that have a gradient: not the unused or dropped ones; zeroed ones have a gradient of zeros.
        given = set(range(len(self.parameters))) - unused - dropped - self._dropped | kept.keys()
        given |= {slot for slot in dropped if self._placeholders[slot].is_zeroed}
        own = [self._changes_since_taken(slot)[1] for slot in range(len(self.parameters))]  # of ``no_sync``
        # Choose the shard's ``grad``: after ``zero_grad()`` None or zeros, else the new gradient plus the former one.
        gradient: torch.Tensor | None = self._reduced
        if self._is_shard_dropped():
            gradient = self._reduced.zero_() if self._taken_shard.is_zeroed else None
            given = self._with_gradient | given if self._taken_shard.is_zeroed else set()
        elif self._before is not None:
            for slot in self._stale:
                self._before[self._own_slices[slot]] = 0
            gradient = self._before.add_(self._reduced)
            given |= self._with_gradient - (self._stale - self._zeroed)
        self.shard.grad, self._before = gradient, None
        self._with_gradient, self._stale, self._zeroed = given, set(), set()
        self.idle.leave_out(set(range(len(self.parameters))) - given)
        for slot, gradient in enumerate(own):
            self._hold(slot, gradient)

    def _hold(self, slot: int, own: torch.Tensor | None) -> None:
        """Set a parameter's ``grad`` after the reduction; ``own`` is what a backward under ``no_sync`` has added.

        If the shard's gradient has a part of the parameter, ``grad`` is a placeholder for it. So it is noticed if the
        program drops it, by ``zero_grad()`` of the module or of the variant, or reads it.
        """
        if slot not in self._with_gradient:
            self.parameters[slot].grad = own
            return
        placeholder = self._placeholders[slot]
        placeholder.reset()
        placeholder.is_held = True
        placeholder.added, placeholder.is_touched = own, own is not None
        self.parameters[slot].grad = placeholder
        self._held.add(slot)

    def _is_shard_dropped(self) -> bool:
        """Whether ``zero_grad()`` has set the shard's ``grad`` to ``None`` or zeros since its placeholder was set."""
        return self.shard.grad is not self._taken_shard or self._taken_shard.is_zeroed

    def _drop_with_shard(self) -> bool:
        """Drop all gradients that were taken so far if ``zero_grad()`` was called for the shard; return whether it was.

        The shard then gets a new placeholder, for the gradients that come after that.
        """
        is_dropped = self._is_shard_dropped()
        if is_dropped:
            for parameter, is_taken in zip(self.parameters, self.taken, strict=True):
                if is_taken:
                    parameter.grad = None
            self._before = None
            self._taken_shard.reset()
            self.shard.grad = self._taken_shard
        return is_dropped

    def _own_part(self, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a buffer that holds the tensors, given by slot, and zeros in all other slots."""
        full = flat_buffer(self.parameters, self._multiple)
        views = flat_views(full, self.parameters)
        for slot, tensor in tensors.items():
            hold_for_current_stream(tensor)
            views[slot].copy_(tensor)
        return full[self._own]
