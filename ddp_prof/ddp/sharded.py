"""Sharded: each rank keeps optimizer state and reduced gradients only for its part of the parameters.

    host            |  forward  |      backward      |synchronize|optimizer|  forward of the next step
    compute         |###########|####################|           |##|      |....###...###...###########
    reduce-scatter                  [b0] [b1] ... [bn]|
    all-gather                                                      [bn] ... [b1] [b0]|

forward      computes the loss. A layer waits only for the all-gather of its own parameters.
backward     the hook of a parameter divides the gradient and copies it into its bucket; the hook that fills the bucket
             launches its reduce-scatter, which gives each rank the average of its part. The memory of the full
             gradients is freed at the first launch after the end of the reduce-scatter.
synchronize  launches incomplete buckets (zeros for unused parameters), then waits for all reduce-scatters.
optimizer    steps on the shards; then the all-gathers are launched, first that of the first layers.

State and gradients are divided among the ranks (ZeRO stages 1 and 2, Rajbhandari et al. 2020). A reduce-scatter and an
all-gather together send as much as one all-reduce, but the all-gather can overlap with the next forward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_prof import annotate, range_names
from ddp_prof.annotate.hooks import is_on_host
from ddp_prof.ddp.all_reduce import ReducingVariant
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
from ddp_prof.ddp.sharded_optimizer import ShardedOptimizer
from ddp_prof.errors import CommunicationError

Parameter = torch.nn.Parameter | None


class ShardGradient(torch.Tensor):
    """The gradient of a rank's part; an overflow that GradScaler finds in it is reported on all ranks.

    Otherwise one rank would skip a step and halve the scale, and the others would not.
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


class Idle:
    """The parameters of a bucket without a gradient, which an optimizer must not change; it steps on the whole shard.

    As in one process, such a parameter is neither decayed nor moved by momentum. An optimizer with a count of steps has
    one for the whole shard. So a parameter that was left out before cannot be stepped on: its count would be wrong.

    Args:
        shard: This rank's part of the bucket.
        slices: Where the parameters lie in it; empty for those of which it has nothing.
    """

    def __init__(self, shard: torch.nn.Parameter, slices: Sequence[slice]) -> None:
        self._shard, self._slices = shard, slices
        self._slots: set[int] = set()
        self._were_idle: set[int] = set()
        self._kept: list[tuple[torch.Tensor, slice, torch.Tensor]] = []
        self._optimizer: torch.optim.Optimizer | None = None

    def leave_out(self, slots: set[int]) -> None:
        """Note which have no gradient from now on; within a step, whose closure found that, keep what is there."""
        self._slots = slots
        if self._optimizer is not None:
            self._keep(self._optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what the optimizer must not change; raise CommunicationError for a parameter that is used late."""
        self._optimizer = optimizer
        self._keep(optimizer)

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore the elements that :meth:`_keep` saved before the step, in the shard and in the optimizer's state."""
        for tensor, part, values in self._kept:
            tensor[part] = values
        if self._optimizer is not None:
            momentum = self._elements(self._optimizer).get("momentum_buffer")
            if momentum is not None and not any(momentum is tensor for tensor, *_ in self._kept):  # made in this step
                for slot in self._slots:
                    momentum[self._slices[slot]] = 0
        self._kept, self._optimizer = [], None

    @torch.no_grad()
    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state.get(self._shard, {})
        if not state:
            self._were_idle = set()
        if self._shard.grad is None:
            return
        if state.keys() - {"momentum_buffer"} and self._were_idle - self._slots:
            self._optimizer = None
            raise CommunicationError(
                "a parameter has a gradient after steps in which no rank used it: the optimizer's count of steps "
                "includes those, since sharded steps on flat parts of buckets: use another variant, or use the "
                "parameter in each step (add its sum, times 0, to the loss)"
            )
        self._were_idle = self._were_idle | self._slots
        tensors = [self._shard.detach(), *self._elements(optimizer).values()]
        parts = [self._slices[slot] for slot in self._slots]
        self._kept = [(tensor, part, tensor[part].clone()) for tensor in tensors for part in parts]

    def _elements(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The optimizer's state that has one element for each of the shard."""
        return {
            name: value
            for name, value in optimizer.state.get(self._shard, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == self._shard.shape
        }


class ShardBucket(GradientBucket):
    """A bucket whose parameters become views of one flat tensor, of which each rank updates an equal part.

    ``shard`` is this rank's part, ``[padded length / world]``; the optimizer steps on it.
    """

    def __init__(self, index: int, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self._group = group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        super().__init__(index, parameters, multiple=world)
        self.release()
        self._flat = flat_buffer(parameters, world)
        self._flat_views = flat_views(self._flat, self.parameters)
        for parameter, view in zip(parameters, self._flat_views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._own = slice(rank * len(self._flat) // world, (rank + 1) * len(self._flat) // world)
        self.shard = torch.nn.Parameter(self._flat[self._own])
        self._reduced = torch.zeros_like(self.shard, requires_grad=False)
        self._received: torch.Tensor | None = None
        self._taken_shard = TakenGradient(self.shard)
        self._before: torch.Tensor | None = None
        self._own_slices = self._find_own_slices()
        self._with_gradient: set[int] = set()
        self.idle = Idle(self.shard, self._own_slices)

    def _find_own_slices(self) -> list[slice]:
        """For each parameter, where this rank's part of it lies in :attr:`shard`; empty if it has none."""
        ends = itertools.accumulate(parameter.numel() for parameter in self.parameters)
        first, length = self._own.start, len(self.shard)
        return [
            slice(
                min(max(end - parameter.numel() - first, 0), length),
                min(max(end - first, 0), length),
            )
            for parameter, end in zip(self.parameters, ends, strict=True)
        ]

    def is_unused(self, slot: int) -> bool:
        """Whether no rank had a gradient of this parameter; not known, so false, if this rank has no part of it."""
        received = self._reduced if self._received is None else self._received.view(-1, len(self._reduced))
        parts = in_reals(received[..., self._own_slices[slot]])
        return parts.numel() > 0 and not bool(parts.any()) and bool(parts.signbit().all())

    def take(self, slot: int, scale: float) -> bool:
        """Copy one gradient; the first of a step also sets the shard's ``grad`` to a placeholder."""
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
        late = self.parameters[slot].grad  # autograd has just added to it, so it must survive ``_drop_with_shard``
        was_dropped = self._drop_with_shard()  # ``zero_grad()`` may have been called for the shard only
        self.parameters[slot].grad = late
        is_dropped, late = super().take_late(slot)
        if was_dropped:
            self._dropped.add(slot)
        return is_dropped or was_dropped, late

    def is_dropped(self) -> bool:
        return (self.missing < len(self.parameters) and self._is_shard_dropped()) or super().is_dropped()

    def restore_memory(self) -> None:
        """Make the parameters views of the flat tensor again, with the values that they were given meanwhile."""
        for parameter, view in zip(self.parameters, self._flat_views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

    def release(self) -> None:
        """Free the buffer; the next :meth:`take` allocates it again."""
        self._buffer, self.views = self._buffer[:0].clone(), []

    def reduce(self) -> InFlight:
        """Launch the reduce-scatter: this rank gets the sum of its part.

        Gloo's reduce-scatter is an all-reduce that does not report its completion. So with gloo the ranks exchange
        their parts, which sends as many bytes, and :meth:`give_shard` adds them up.
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
        """Launch the all-gather of the parameters, in place.

        Gloo's all-gather would receive a copy of the whole tensor. So with gloo each rank broadcasts its part, which
        needs no copy and takes less time.
        """

        def start() -> Any:
            if is_on_host(self._flat, self._group):
                parts = enumerate(self._flat.chunk(dist.get_world_size(self._group)))
                return [
                    dist.broadcast(part, global_rank(rank, self._group), self._group, async_op=True)
                    for rank, part in parts
                ]
            return all_gather(self._flat, self.shard.detach(), self._group, async_op=True)

        return launch(start, range_names.ALL_GATHER, self._flat, self._group, self.index, len(self.parameters))

    def give_shard(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        """Set the shard's gradient; of parameters in ``unused``, which no rank used, it has no part."""
        hold_for_current_stream(self._buffer)  # it belongs to a hook's stream, which may use its memory again
        self.release()
        if self._received is not None:
            hold_for_current_stream(self._received)
            torch.sum(self._received.view(-1, len(self._reduced)), 0, out=self._reduced)
            self._received = None
        dropped = {slot for slot in range(len(self.parameters)) if self._changes_since_taken(slot)[0]}
        if dropped or self._dropped:  # not by a product with zeros: the dropped values may be infinite
            ones = {slot: torch.ones_like(self.parameters[slot]) for slot in dropped | self._dropped}
            self._reduced.masked_fill_(self._own_part(ones) != 0, 0)
        kept = {slot: tensor for slot, tensor in late.items() if slot not in dropped}
        if kept:
            self._reduced.add_(self._own_part(kept))
        given = set(range(len(self.parameters))) - unused - dropped - self._dropped | kept.keys()
        given |= {slot for slot in dropped if self._placeholders[slot].is_zeroed}
        for slot, parameter in enumerate(self.parameters):
            parameter.grad = self._changes_since_taken(slot)[1]  # gradients of ``no_sync`` are kept for the next step
        if self._is_shard_dropped():
            self._before = self._reduced.zero_() if self._taken_shard.is_zeroed else None
            given = self._with_gradient | given if self._taken_shard.is_zeroed else set()
        elif self._before is not None:
            self._before.add_(self._reduced)
            given |= self._with_gradient
        else:
            self._before = self._reduced.as_subclass(ShardGradient)
            self._before.group, self._before.bucket = self._group, self.index
        self.shard.grad, self._before = self._before, None
        self._with_gradient = given
        self.idle.leave_out(set(range(len(self.parameters))) - given)

    def _is_shard_dropped(self) -> bool:
        return self.shard.grad is not self._taken_shard or self._taken_shard.is_zeroed

    def _drop_with_shard(self) -> bool:
        """Drop the taken gradients if ``zero_grad()`` was called for the shard; return whether it was."""
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
        """Return this rank's part of a buffer that holds these tensors in their slots, and zeros elsewhere."""
        full = flat_buffer(self.parameters, self._multiple)
        views = flat_views(full, self.parameters)
        for slot, tensor in tensors.items():
            hold_for_current_stream(tensor)
            views[slot].copy_(tensor)
        return full[self._own]


class ShardReducer(Reducer):
    buckets: list[ShardBucket]  # type: ignore[assignment]  # _make_bucket makes no others

    def _make_bucket(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> GradientBucket:
        return ShardBucket(index, parameters, self._group)

    def _launch(self, bucket: GradientBucket) -> InFlight:
        """Reduce a bucket; free the full gradients of earlier buckets that have been reduced meanwhile."""
        assert isinstance(bucket, ShardBucket)
        for earlier, flight in zip(self.buckets, self._in_flight, strict=False):
            if flight.is_completed():
                earlier.release()
        return bucket.reduce()

    def _restore_gradients(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        for bucket, members in zip(self.buckets, self._assignment, strict=True):
            bucket.give_shard(
                {slot for slot, index in enumerate(members) if index in unused},
                {slot: late[index] for slot, index in enumerate(members) if index in late},
            )


class ShardedDDP(ReducingVariant):
    """Sharded: one reduce-scatter per bucket from gradient hooks; one all-gather per bucket after the optimizer's step.

    The optimizer must step element by element (SGD, Adam, AdamW) and on :meth:`optimizer_parameters`, which are flat
    parts of buckets: all parameters have the same learning rate and weight decay. A parameter that no rank used is left
    as it is; if it is used later, SGD goes on as in one process, and for an optimizer that counts its steps (Adam) the
    step raises CommunicationError. After a step, reading a parameter through its module waits for its all-gather;
    before you read a parameter from a list of your own, call :meth:`wait_for_parameters`. If ``torch.amp.GradScaler``
    finds an overflow on one rank, all ranks skip the step.

    ``bucket_size_mb`` as in :class:`BucketedDDP`, ``options`` as in :class:`ReducingVariant`. With
    ``find_unused_parameters`` all ranks raise that error, without it those that keep a part of the parameter.
    """

    _reducer_type: ClassVar[type[Reducer]] = ShardReducer
    _reducer: ShardReducer
    _not_copied: ClassVar[frozenset[str]] = ReducingVariant._not_copied | {"_gathers", "_layers", "_is_alone"}

    def __init__(
        self, module: torch.nn.Module, bucket_size_mb: float | Sequence[float] | None = 25.0, **options: Any
    ) -> None:
        self._cap_bytes = cap_in_bytes(bucket_size_mb)
        super().__init__(module, schedule={"bucket_size_mb": bucket_size_mb}, **options)

    def _set_up(self) -> None:
        super()._set_up()
        self._is_alone = False  # whether backward brought gradients under ``no_sync`` that were not reduced since
        self._gathers = Gathers()
        bucket_of = {id(parameter): bucket.index for bucket in self._reducer.buckets for parameter in bucket.parameters}
        self._layers = list(self.module.modules())
        for layer in self._layers:
            layer._parameters = AwaitedParameters(layer._parameters, bucket_of, self._gathers)

    def optimizer_parameters(self) -> list[torch.nn.Parameter]:
        return [bucket.shard for bucket in self._reducer.buckets]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or any(
            layer._compiled_call_impl is not None or "_orig_mod" in layer._modules for layer in self._layers
        ):
            self.wait_for_parameters()  # a wait within compiled code would break its graph into pieces
        return super().forward(*args, **kwargs)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        super().before_step(optimizer)
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
        self.wait_for_parameters()  # an all-gather may still read the part that the optimizer changes
        for bucket in self._reducer.buckets:
            bucket.idle.before_step(optimizer)

    def on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        super().on_step(optimizer)
        if self._is_own(optimizer):
            for bucket in self._reducer.buckets:
                bucket.idle.after_step()
            for bucket in reversed(self._reducer.buckets):
                self._gathers.add(bucket.index, bucket.gather())

    def wait_for_parameters(self) -> None:
        self._gathers.settle()

    def remove(self) -> None:
        self.wait_for_parameters()
        for layer in self._layers:
            layer._parameters = dict(layer._parameters)
        super().remove()

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, got {norm_type}")
        gradients = [shard.grad for shard in self.optimizer_parameters() if shard.grad is not None]
        parts = [torch.linalg.vector_norm(gradient, norm_type).double().to(self.device) for gradient in gradients]
        own = torch.stack([torch.zeros((), dtype=torch.double, device=self.device), *parts])
        is_largest = math.isinf(norm_type)
        total = own.max() if is_largest else own.pow(norm_type).sum()
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        launch_all_reduce(total, self.process_group, len(self._reducer.buckets), 0, operation).wait()
        norm = total if is_largest else total.pow(1 / norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
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


class Gathers:
    """The all-gathers in flight, by the index of their bucket."""

    def __init__(self) -> None:
        self.is_pending = False  # a bool, because ``torch.compile`` compiles once for each value
        self._in_flight: dict[int, InFlight] = {}
        self._waited: set[tuple[int, torch.cuda.Stream | None]] = set()

    def add(self, bucket: int, flight: InFlight) -> None:
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
        self.wait(list(self._in_flight))
        self._in_flight.clear()
        self._waited.clear()
        self.is_pending = False


class AwaitedParameters(dict[str, Parameter]):
    """The parameters of one module; reading one waits for its all-gather. A copy or pickle is a plain dictionary.

    A module keeps its parameters in a dictionary, ``_parameters``. Attributes, ``parameters()``, ``state_dict()``,
    ``load_state_dict()``, ``to()``, copies and pickles all use it, so the dictionary waits. Hooks on layers would not
    suffice: attention reads ``out_proj.weight`` without a call of ``out_proj``, and a ``ParameterList`` is never
    called. ``bucket_of`` maps the ``id`` of a parameter to the index of its bucket.
    """

    def __init__(self, parameters: Mapping[str, Parameter], bucket_of: Mapping[int, int], gathers: Gathers) -> None:
        super().__init__(parameters)
        self._gathers = gathers
        self._buckets = {name: bucket_of[id(each)] for name, each in parameters.items() if id(each) in bucket_of}

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
