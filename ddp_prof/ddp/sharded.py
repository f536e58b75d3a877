"""Sharded: each rank keeps optimizer state and reduced gradients only for its part (shard) of the parameters.

    host            |  forward  |      backward      |synchronize|optimizer|  forward of the next step
    compute         |###########|####################|           |##|      |....###...###...###########
    reduce-scatter                  [b0] [b1] ... [bn]|
    all-gather                                                      [bn] ... [b1] [b0]|

In the row ``compute`` ``###`` is compute and dots are waiting. ``[b0]`` is the collective of bucket 0, which holds the
last layers.

forward      computes the loss. A layer waits only for the all-gather of its own parameters.
backward     the hook of a parameter divides the gradient and copies it into its bucket; the hook that fills the bucket
             launches its reduce-scatter, which gives each rank the average of its part. The memory of the bucket's
             buffer is freed when another bucket is launched after the end of the reduce-scatter.
synchronize  launches incomplete buckets (zeros for unused parameters), then waits for all reduce-scatters.
optimizer    steps on the shards; then the all-gathers are launched, beginning with the first layers.

State and gradients are divided among the ranks (ZeRO stages 1 and 2, Rajbhandari et al. 2020). A reduce-scatter and an
all-gather together send as much as one all-reduce, but the all-gather can overlap with the next forward.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_prof import annotate, range_names
from ddp_prof.annotate.hooks import is_on_host
from ddp_prof.ddp.all_reduce import ReducingVariant, Structure
from ddp_prof.ddp.buckets import (
    GradientBucket,
    TakenGradient,
    cap_in_bytes,
    flat_buffer,
    flat_views,
    hold_for_current_stream,
    in_reals,
)
from ddp_prof.ddp.collective import InFlight, all_gather, global_rank, launch, launch_all_reduce, reduce_scatter
from ddp_prof.ddp.reducer import Reducer
from ddp_prof.ddp.sharded_optimizer import ShardedOptimizer, steps_alike
from ddp_prof.errors import CommunicationError

Parameter = torch.nn.Parameter | None
NOT_BY_ELEMENT = frozenset(
    {
        *("LBFGS", "Adafactor", "Muon", "LAMB", "Lamb", "FusedLAMB", "FusedMixedPrecisionLamb", "LARS", "Lars"),
        *("Shampoo", "DistributedShampoo", "SOAP", "Prodigy", "DAdaptAdam", "DAdaptSGD", "NovoGrad", "FusedNovoGrad"),
    }
)
"""Classes of optimizers whose step depends on norms, products or shapes of whole parameters, or of all of them."""
NORMS = frozenset({torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm})
"""Functions that are refused for a gradient of which each rank has a part."""
WERE_IDLE = "were_idle"
"""Key in an optimizer's state of a shard: the parameters that were idle in any step, by position in the bucket."""


class ShardGradient(torch.Tensor):
    """The gradient of a shard. If GradScaler finds an overflow in it on one rank, all ranks are told.

    Otherwise one rank would skip a step and halve the scale, and the others would not. Its norm is refused: to clip by
    it, or to step by it, would be to do so by another norm on each rank.
    """

    group: dist.ProcessGroup | None
    bucket: int

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Call the function; after GradScaler's check for overflows, tell it all ranks. Torch calls this.

        Raises CommunicationError for a norm.
        """
        if function in NORMS:
            raise CommunicationError(
                "the norm of a part of the gradients, of which each rank has another one: variant.clip_grad_norm_() "
                "clips by the norm of all, and returns it; of an optimizer that steps by norms, use another one, such "
                "as AdamW, or another variant"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*arguments, **(keywords or {}))
        if function is torch._amp_foreach_non_finite_check_and_unscale_:
            (gradient, *_), found, _ = arguments  # the gradients, a flag for an overflow, the inverse of the scale
            # The largest and no sum: fused optimizers leave out a step if the flag is 1, and take it if it is 2.
            launch_all_reduce(found, gradient.group, gradient.bucket, 0, dist.ReduceOp.MAX).wait()
        return result


class Shard(torch.nn.Parameter):
    """A rank's part of a bucket, on which the optimizer steps.

    A change by ``data`` counts as one of the part itself, and is noticed by its version; any gradient that it is given
    becomes a :class:`ShardGradient`.
    """

    group: dist.ProcessGroup | None = None
    bucket = 0

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.nn.Parameter.data.__set__(self, values)  # type: ignore[attr-defined]

    @property
    def grad(self) -> torch.Tensor | None:
        return torch.nn.Parameter.grad.__get__(self)  # type: ignore[union-attr, no-any-return]

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, (TakenGradient, ShardGradient)):
            gradient = gradient.as_subclass(ShardGradient)
            gradient.group, gradient.bucket = self.group, self.bucket
        torch.nn.Parameter.grad.__set__(self, gradient)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


# torch steps on several parameters by one kernel only if it knows their class.
getattr(sys.modules[torch.optim.Optimizer.__module__], "_foreach_supported_types", []).append(Shard)


class Idle:
    """Keeps the parameters of a bucket that have no gradient unchanged while the optimizer steps on the whole shard.

    As in one process, such an idle parameter is neither decayed nor moved by momentum: its elements of the shard and of
    the optimizer's state are saved before the step and restored after it. An optimizer that counts its steps has one
    count for the whole shard. So a parameter that was idle in a step cannot be stepped on later: its count would be
    wrong. The same holds for SGD with dampening, which does not dampen the first gradient of a parameter.

    Args:
        shard: This rank's part of the bucket.
        slices: For each parameter of the bucket, its elements in the shard; an empty slice if the shard has none.
    """

    def __init__(self, shard: torch.nn.Parameter, slices: Sequence[slice]) -> None:
        self._shard, self._slices = shard, slices
        self._slots: set[int] = set()  # the idle parameters of this step, by position in the bucket
        self._kept: list[tuple[torch.Tensor, slice, torch.Tensor]] = []  # tensor, part of it, values to restore
        self._optimizer: torch.optim.Optimizer | None = None  # the optimizer that steps at the moment

    def leave_out(self, slots: set[int]) -> None:
        """Set which parameters (``slots``: positions in the bucket) have no gradient from now on.

        If a closure called this during an optimizer's step, their elements are saved now.
        """
        self._slots = slots
        if self._optimizer is not None:
            self._keep(self._optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the elements that the optimizer must not change.

        Raises CommunicationError if a parameter that was idle before has a gradient now and the optimizer counts steps.
        """
        self._optimizer = optimizer
        self._keep(optimizer)

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore the elements that :meth:`_keep` saved before the step, in the shard and in the optimizer's state."""
        for tensor, part, values in self._kept:
            tensor[part] = values
        if self._optimizer is not None:
            # A momentum that the step has made could not be saved before. Idle parameters get a momentum of zero.
            momentum = self._elements(self._optimizer).get("momentum_buffer")
            if momentum is not None and not any(momentum is tensor for tensor, *_ in self._kept):
                for slot in self._slots:
                    momentum[self._slices[slot]] = 0
            # Noted in the optimizer's state, so that it is saved and loaded with the state.
            state = self._optimizer.state.get(self._shard, {})
            if state and self._slots and self._shard.grad is not None:
                state[WERE_IDLE] = sorted(self._slots.union(state.get(WERE_IDLE, ())))
        self._kept, self._optimizer = [], None

    @torch.no_grad()
    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the elements of idle parameters in the shard and in the optimizer's state, as for ``before_step``."""
        if self._shard.grad is None:
            return
        state = optimizer.state.get(self._shard, {})
        # An optimizer whose state has more than a momentum, such as Adam, counts its steps.
        has_count = bool(state.keys() - {"momentum_buffer", WERE_IDLE}) or self._is_dampened(optimizer)
        if has_count and set(state.get(WERE_IDLE, ())) - self._slots:
            self._optimizer = None
            raise CommunicationError(
                "a parameter has a gradient after steps in which no rank used it: the optimizer's count of steps "
                "includes those, since sharded steps on flat parts of buckets: use another variant, or use the "
                "parameter in each step (add its sum, times 0, to the loss)"
            )
        # Copy the elements of idle parameters, in the shard and in each tensor of the optimizer's state.
        tensors = [self._shard.detach(), *self._elements(optimizer).values()]
        parts = [self._slices[slot] for slot in self._slots]
        self._kept = [(tensor, part, tensor[part].clone()) for tensor in tensors for part in parts]

    def _is_dampened(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer dampens all gradients of a parameter but the first."""
        groups = [group for group in optimizer.param_groups if any(each is self._shard for each in group["params"])]
        return any(group.get("dampening") for group in groups)

    def _elements(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return those tensors of the optimizer's state that have an element for each element of the shard, by name."""
        return {
            name: value
            for name, value in optimizer.state.get(self._shard, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == self._shard.shape
        }


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
        # Slots whose ``grad`` is a placeholder for their part of the shard's gradient, from one reduction to the next.
        self._held: set[int] = set()
        self._stale: set[int] = set()  # slots whose part of the shard's gradient was dropped since the last reduction
        self.idle = Idle(self.shard, self._own_slices)
        self._note_version()

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
        # The first gradient of a step; later ones check whether ``zero_grad()`` was called since.
        if self.missing == len(self.parameters):
            self._before = self.shard.grad
            self._taken_shard.reset()
            self.shard.grad = self._taken_shard
        else:
            self._drop_with_shard()
        self._release_held(slot)
        return super().take(slot, scale)

    def _release_held(self, slot: int) -> None:
        """Give a parameter its own ``grad`` again; note if the program dropped or replaced the one that was reduced."""
        if slot in self._held:
            self._held.discard(slot)
            self._placeholders[slot].is_held = False
            is_dropped, self.parameters[slot].grad = self._changes_since_taken(slot)
            if is_dropped:
                self._stale.add(slot)

    def release_zeroed(self) -> None:
        """After ``zero_grad()`` of the optimizer, which knows only the shard: no parameter has a gradient any more."""
        if self.shard.grad is None:
            for slot in list(self._held):
                self._release_held(slot)
            self._stale.clear()

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
            given |= self._with_gradient - self._stale
        self.shard.grad, self._before = gradient, None
        self._with_gradient, self._stale = given, set()
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


def _forget_placeholders(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Take away placeholders for gradients, which nothing replaces any more; keep what autograd has added to them."""
    for parameter in parameters:
        if isinstance(parameter.grad, TakenGradient):
            parameter.grad = parameter.grad.added


def _refuse_shared_memory(module: torch.nn.Module) -> None:
    """Raise CommunicationError if a trained parameter shares memory with another parameter or with a buffer.

    Parameters become views of buckets, each with a place of its own, so a change of one would no longer be one of the
    other. One parameter under several names is fine.
    """
    named = [(*each, True) for each in module.named_parameters()] + [(*each, False) for each in module.named_buffers()]
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name, tensor, is_parameter and tensor.requires_grad)
        for name, tensor, is_parameter in named
        if tensor.layout is torch.strided and tensor.numel()
    )
    reach: list[Any] = []  # those that may reach into what comes next
    for span in spans:
        start, _, name, tensor, is_trained = span
        reach = [other for other in reach if other[1] > start]
        for _, _, known, other, is_other_trained in reach:
            if (is_trained or is_other_trained) and tensor.device == other.device and _overlap(tensor, other):
                raise CommunicationError(
                    f"{known!r} and {name!r} share memory, and sharded gives each parameter a place of its own: make "
                    "one of them a copy (clone()), or one parameter of both, or use another variant"
                )
        reach.append(span)


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between the first byte of a tensor and the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have an element at one place, as halves of the columns of a matrix do not."""
    first = min(one.data_ptr(), other.data_ptr())
    offsets = [tensor.data_ptr() - first for tensor in (one, other)]
    size = one.element_size()
    if other.element_size() != size or any(offset % size for offset in offsets):
        return True
    end = max(offset + _extent(tensor) for offset, tensor in zip(offsets, (one, other), strict=True))
    is_used = torch.zeros(end // size, dtype=torch.bool)
    own, others = (
        is_used.as_strided(tensor.shape, tensor.stride(), offset // size)
        for offset, tensor in zip(offsets, (one, other), strict=True)
    )
    own.fill_(True)
    return bool(others.any())


class ShardReducer(Reducer):
    """A reducer whose buckets are reduce-scattered: each rank gets only its part of a bucket's averages."""

    buckets: list[ShardBucket]  # type: ignore[assignment]  # _make_bucket makes no others

    def _make_bucket(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> GradientBucket:
        return ShardBucket(index, parameters, self._group)

    def _launch(self, bucket: GradientBucket) -> InFlight:
        """Launch the reduce-scatter of a bucket; free the buffers of earlier buckets that have been reduced by now."""
        assert isinstance(bucket, ShardBucket)
        # Earlier buckets are those with a collective in flight, so ``zip`` ends with them.
        for earlier, flight in zip(self.buckets, self._in_flight, strict=False):
            if flight.is_completed():
                earlier.release()
        return bucket.reduce()

    def _restore_gradients(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        """Give each shard its gradient; ``unused`` and ``late`` name parameters by index, buckets by slot."""
        for bucket, members in zip(self.buckets, self._assignment, strict=True):
            bucket.give_shard(
                {slot for slot, index in enumerate(members) if index in unused},
                {slot: late[index] for slot, index in enumerate(members) if index in late},
            )


class ShardedDDP(ReducingVariant):
    """Sharded: one reduce-scatter per bucket from gradient hooks; one all-gather per bucket after the optimizer's step.

    The optimizer must be made with :meth:`optimizer_parameters`, which are flat parts of buckets. So it must step
    element by element (SGD, Adam, AdamW), with the same learning rate and weight decay for all parameters. Those of
    :data:`NOT_BY_ELEMENT`, and others of which a try shows it, raise CommunicationError at their step; so do, at
    construction, parameters that share memory. Only an optimizer's step may change the parts.

    After a step, reading a parameter through its module waits for its all-gather. Before you read a parameter from a
    list of your own, call :meth:`wait_for_parameters`.

    A parameter that no rank used in a step is left as it is. If it is used later, SGD goes on as in one process, but
    the step of an optimizer that counts its steps (Adam) raises CommunicationError: with ``find_unused_parameters`` on
    all ranks, without it on the ranks that keep a part of the parameter.

    If ``torch.amp.GradScaler`` finds an overflow on one rank, all ranks skip the step.

    ``bucket_size_mb`` is as in :class:`BucketedDDP`, ``options`` are as in :class:`ReducingVariant`.
    """

    _reducer_type: ClassVar[type[Reducer]] = ShardReducer
    _reducer: ShardReducer
    _not_copied: ClassVar[frozenset[str]] = ReducingVariant._not_copied | {
        *("_gathers", "_layers", "_is_alone", "_awaited", "_by_element")
    }

    def __init__(
        self, module: torch.nn.Module, bucket_size_mb: float | Sequence[float] | None = 25.0, **options: Any
    ) -> None:
        self._cap_bytes = cap_in_bytes(bucket_size_mb)
        super().__init__(module, schedule={"bucket_size_mb": bucket_size_mb}, **options)

    def _set_up(self) -> None:
        """Create the attributes that a copy does not take over, and let reading a parameter wait for its all-gather.

        Raises CommunicationError if parameters share memory.
        """
        _refuse_shared_memory(self.module)
        super()._set_up()
        _follow_zero_grad()
        _variants.add(self)
        self._is_alone = False  # whether a backward under ``no_sync`` made gradients that have not been reduced since
        self._gathers = Gathers()
        self._by_element: dict[type, bool] = {}  # what is known of classes of optimizers
        self._layers: list[torch.nn.Module] = []
        self._await_parameters()
        remover = weakref.finalize(self, _forget_placeholders, self._trained)
        remover.atexit = False

    def _await_parameters(self) -> None:
        """Let reading a parameter wait for its all-gather, in all layers that the module has now."""
        bucket_of = {id(parameter): bucket.index for bucket in self._reducer.buckets for parameter in bucket.parameters}
        layers = list(self.module.modules())
        # TorchScript reads parameters by itself, without their dictionary.
        self._layers = [layer for layer in layers if not isinstance(layer, torch.jit.ScriptModule)]
        self._is_scripted = len(self._layers) < len(layers)
        for layer in self._layers:
            if not isinstance(layer._parameters, AwaitedParameters):
                layer._parameters = AwaitedParameters(layer._parameters, bucket_of, self._gathers)
        self._awaited = Structure(self.module)

    def optimizer_parameters(self) -> list[torch.nn.Parameter]:
        """Return this rank's part of each bucket; the optimizer must be made with these instead of the parameters."""
        return [bucket.shard for bucket in self._reducer.buckets]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as every :class:`ReducingVariant`; for compiled modules, wait for all parameters before."""
        for bucket in self._reducer.buckets:
            bucket.check_shard()
            if torch.is_grad_enabled():
                bucket.release_zeroed()
        # Parameters may have moved to new layers, as by ``register_parametrization``, which do not wait for them yet.
        if not torch.compiler.is_compiling() and not self._awaited.is_unchanged():
            self.wait_for_parameters()
            self._await_parameters()
        if torch.compiler.is_compiling() or any(
            layer._compiled_call_impl is not None or "_orig_mod" in layer._modules for layer in self._layers
        ):
            self.wait_for_parameters()  # a wait within compiled code would break its graph into pieces
        return super().forward(*args, **kwargs)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Prepare the shards for a step; raise CommunicationError if the optimizer cannot step on them.

        Called by a hook before a step of any optimizer.
        """
        is_within_other = self._is_stepping  # an optimizer may call another one
        super().before_step(optimizer)
        # Refuse optimizers that would step on the wrong tensors or on gradients that are not reduced.
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in stepped for parameter in self._trained):
            raise CommunicationError(
                "the optimizer steps on the module's parameters, whose gradients sharded keeps in parts: "
                "make it of variant.optimizer_parameters()"
            )
        if not self._is_own(optimizer):
            return
        if isinstance(optimizer, ShardedOptimizer):
            raise CommunicationError(
                "sharded divides the optimizer's state already, and a ShardedOptimizer would give every rank one "
                "rank's part: use the optimizer itself"
            )
        if self._is_alone and all(bucket.shard.grad is None for bucket in self._reducer.buckets):
            raise CommunicationError(
                "optimizer.step() on gradients that are not synchronized: sharded keeps a part of each parameter's "
                "state on each rank and cannot step on a rank's own gradients: run the last micro-batch outside of "
                "no_sync()"
            )
        if not self._steps_by_element(optimizer):
            raise CommunicationError(
                f"{type(optimizer).__name__} does not step element by element, and sharded gives it flat parts of "
                "buckets: use another optimizer, such as AdamW, or another variant"
            )
        self.wait_for_parameters()  # an all-gather may still read the part that the optimizer changes
        for bucket in self._reducer.buckets:
            if not is_within_other:
                bucket.check_shard()
            bucket.restore_memory()  # the program may have given parameters other values, as by ``data``, since forward
            bucket.drop_zeroed()
            bucket.idle.before_step(optimizer)

    def _steps_by_element(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps on each element by itself, by its name, and as far as a try on a matrix tells."""
        kind, whole = type(optimizer), torch.linspace(-1, 1, 24)
        if kind not in self._by_element:
            self._by_element[kind] = NOT_BY_ELEMENT.isdisjoint(base.__name__ for base in kind.__mro__) and steps_alike(
                kind, optimizer.defaults, [whole.view(4, 6)], [[whole[:5]], [whole[5:]]]
            )
        return self._by_element[kind]

    def on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Restore idle parameters and launch the all-gathers. Called by a hook after a step of any optimizer."""
        super().on_step(optimizer)
        if self._is_own(optimizer):
            self.wait_for_parameters()  # those of an optimizer that this one has called
            for bucket in self._reducer.buckets:
                bucket.idle.after_step()
            # The last bucket holds the first layers, which the next forward needs first.
            for bucket in reversed(self._reducer.buckets):
                self._gathers.add(bucket.index, bucket.gather())
            if self._is_scripted:
                self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Wait for all all-gathers: then all parameters may be read, on a GPU by the current stream."""
        self._gathers.settle()

    def on_zero_grad(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
        """Drop the gradients of the parameters of which an optimizer has dropped those of the parts."""
        dropped = {id(part) for group in optimizer.param_groups for part in group["params"]}
        for bucket in self._reducer.buckets:
            for parameter in bucket.parameters if id(bucket.shard) in dropped else ():
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    if parameter.grad.requires_grad:
                        parameter.grad.detach_()
                    parameter.grad.zero_()

    def remove(self) -> None:
        self.wait_for_parameters()
        _variants.discard(self)
        for layer in self._layers:  # plain dictionaries again, which do not wait
            layer._parameters = dict(layer._parameters)
        _forget_placeholders(self._trained)
        super().remove()

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients of all ranks' shards by their common norm; return the norm before, equal on all ranks.

        Raises ValueError if ``norm_type`` is not positive.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, got {norm_type}")
        for bucket in self._reducer.buckets:
            bucket.drop_zeroed()
        own = [shard.grad for shard in self.optimizer_parameters()]
        gradients = [gradient.as_subclass(torch.Tensor) for gradient in own if gradient is not None]
        parts = [torch.linalg.vector_norm(gradient, norm_type).double().to(self.device) for gradient in gradients]
        # With a zero in front, so that there is an element even if this rank has no gradient.
        norms = torch.stack([torch.zeros((), dtype=torch.double, device=self.device), *parts])
        is_largest = math.isinf(norm_type)
        total = norms.max() if is_largest else norms.pow(norm_type).sum()
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        launch_all_reduce(total, self.process_group, len(self._reducer.buckets), 0, operation).wait()
        norm = total if is_largest else total.pow(1 / norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's ``clip_grad_norm_``
        for gradient in gradients:
            gradient.mul_(factor.to(gradient))
        return norm

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        self._is_alone |= not self._is_synchronizing
        super().on_gradient(index, parameter)

    def discard(self) -> None:
        super().discard()
        self._is_alone = False

    def _synchronize(self) -> None:
        """Reduce what is left and give the shards their gradients; raise an error if a parameter is frozen now."""
        self.wait_for_parameters()  # also those of layers that did not run
        if not all(parameter.requires_grad for parameter in self._trained):
            raise CommunicationError(
                "a parameter was frozen after the variant was made, but sharded steps on flat parts of buckets: "
                "call remove() and wrap the module again"
            )
        super()._synchronize()
        self._is_alone = False

    def _copied_attributes(self) -> dict[str, Any]:
        self.wait_for_parameters()
        return super()._copied_attributes()


_variants: weakref.WeakSet[ShardedDDP] = weakref.WeakSet()
"""Those that are told of each ``zero_grad`` of an optimizer."""


@cache
def _follow_zero_grad() -> None:
    """Tell all sharded variants when an optimizer drops gradients; do this once per process.

    The parts have none where the program has only set gradients of parameters, or a backward under ``no_sync`` has made
    them, so nothing changes in the parts by which it could be noticed.
    """
    original = torch.optim.Optimizer.zero_grad

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission
    @wraps(original)
    def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        original(optimizer, set_to_none)
        for variant in list(_variants):
            variant.on_zero_grad(optimizer, set_to_none=set_to_none)

    setattr(torch.optim.Optimizer, "zero_grad", zero_grad)  # noqa: B010  # mypy refuses an assignment


class Gathers:
    """The all-gathers in flight, at most one for each bucket."""

    def __init__(self) -> None:
        self.is_pending = False  # a bool, because ``torch.compile`` compiles once for each value
        self._in_flight: dict[int, InFlight] = {}  # by index of the bucket
        self._waited: set[tuple[int, torch.cuda.Stream | None]] = set()  # buckets with the streams that have waited

    def add(self, bucket: int, flight: InFlight) -> None:
        """Keep the all-gather that was launched for a bucket."""
        self._in_flight[bucket] = flight
        self.is_pending = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission, as of is_initialized
    def wait(self, buckets: Iterable[int]) -> None:
        """Wait until the parameters of these buckets may be read by the host, on a GPU by the current stream."""
        # Each stream that reads a bucket has to wait.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        due = [bucket for bucket in buckets if bucket in self._in_flight and (bucket, stream) not in self._waited]
        if not due:
            return
        with annotate.synchronize():  # also within forward: gloo blocks the host here
            for bucket in due:
                self._in_flight[bucket].wait()
                self._waited.add((bucket, stream))

    def settle(self) -> None:
        """Wait for all all-gathers in flight and forget them."""
        self.wait(list(self._in_flight))
        self._in_flight.clear()
        self._waited.clear()
        self.is_pending = False


class AwaitedParameters(dict[str, Parameter]):
    """The dictionary ``_parameters`` of one module; reading a parameter waits for its all-gather.

    Attributes, ``parameters()``, ``state_dict()``, ``load_state_dict()``, ``to()``, copies and pickles of a module all
    use this dictionary. Hooks on layers would not suffice: attention reads ``out_proj.weight`` without a call of
    ``out_proj``, and a ``ParameterList`` is never called. A copy or pickle of it is a plain dictionary.

    Args:
        parameters: The module's parameters by name.
        bucket_of: The index of the bucket of each trained parameter, by the parameter's ``id``.
        gathers: The all-gathers in flight.
    """

    def __init__(self, parameters: Mapping[str, Parameter], bucket_of: Mapping[int, int], gathers: Gathers) -> None:
        super().__init__(parameters)
        self._gathers, self._bucket_of = gathers, bucket_of
        self._buckets = {name: bucket_of[id(each)] for name, each in parameters.items() if id(each) in bucket_of}

    def __setitem__(self, name: str, parameter: Parameter) -> None:
        """Set a parameter: one of another bucket, as when a weight is tied, or one of none."""
        self._buckets.pop(name, None)
        if id(parameter) in self._bucket_of:
            self._buckets[name] = self._bucket_of[id(parameter)]
        super().__setitem__(name, parameter)

    def __getitem__(self, name: str) -> Parameter:
        if self._gathers.is_pending and name in self._buckets:
            self._gathers.wait([self._buckets[name]])
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # that would be this method

    def items(self) -> Any:
        self._wait_for_all()
        return super().items()

    def values(self) -> Any:
        self._wait_for_all()
        return super().values()

    def pop(self, name: str, *default: Any) -> Any:
        self._wait_for_all()
        return super().pop(name, *default)

    def copy(self) -> dict[str, Parameter]:
        return dict(self.items())

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def _wait_for_all(self) -> None:
        if self._gathers.is_pending:
            self._gathers.wait(self._buckets.values())
