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
import weakref
from collections.abc import Iterable, Sequence
from functools import cache, wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_prof.ddp.all_reduce import ReducingVariant, Structure
from ddp_prof.ddp.awaited_parameters import AwaitedParameters, Gathers
from ddp_prof.ddp.buckets import GradientBucket, TakenGradient, cap_in_bytes
from ddp_prof.ddp.collective import InFlight, launch_all_reduce
from ddp_prof.ddp.reducer import Reducer
from ddp_prof.ddp.shard_bucket import ShardBucket
from ddp_prof.ddp.sharded_optimizer import ShardedOptimizer, steps_alike
from ddp_prof.ddp.shared_memory import refuse_shared_memory
from ddp_prof.errors import CommunicationError

NOT_BY_ELEMENT = frozenset(
    {
        *("LBFGS", "Adafactor", "Muon", "LAMB", "Lamb", "FusedLAMB", "FusedMixedPrecisionLamb", "LARS", "Lars"),
        *("Shampoo", "DistributedShampoo", "SOAP", "Prodigy", "DAdaptAdam", "DAdaptSGD", "NovoGrad", "FusedNovoGrad"),
    }
)
"""Classes of optimizers whose step depends on norms, products or shapes of whole parameters, or of all of them."""


def _forget_placeholders(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Take away placeholders for gradients, which nothing replaces any more; keep what autograd has added to them."""
    with torch._C.DisableTorchFunctionSubclass():  # that a variant is deleted waits for no all-gather
        for parameter in parameters:
            if isinstance(parameter.grad, TakenGradient):
                parameter.grad = parameter.grad.added


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

    After a step, reading a parameter waits for its all-gather, through its module or from a list of your own. While a
    program keeps tensors that share memory with parameters, as ``data`` or a state dict does, the step itself waits.

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
        refuse_shared_memory(self.module)
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
        with torch._C.DisableTorchFunctionSubclass():  # nothing is read that an all-gather brings
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
            if id(bucket.shard) in stepped:
                bucket.check_gradients()
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
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for bucket in self._reducer.buckets:
                bucket.idle.after_step()
                if id(bucket.shard) in stepped:
                    bucket.note_step()
            has_aliases = any(bucket.has_aliases() for bucket in self._reducer.buckets)  # before a message is one
            # The last bucket holds the first layers, which the next forward needs first.
            for bucket in reversed(self._reducer.buckets):
                self._gathers.add(bucket.index, bucket.parameters, bucket.gather())
            if self._is_scripted or has_aliases:
                self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Wait for all all-gathers: then all parameters may be read, on a GPU by the current stream."""
        self._gathers.settle()

    def _check_model(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # that it looks at parameters waits for none
            super()._check_model()

    def on_zero_grad(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
        """Drop the gradients of the parameters of which an optimizer has dropped those of the parts."""
        dropped = {id(part) for group in optimizer.param_groups for part in group["params"]}
        buckets = [bucket for bucket in self._reducer.buckets if id(bucket.shard) in dropped]
        with torch._C.DisableTorchFunctionSubclass():  # that it gives up gradients waits for no all-gather
            for parameter in itertools.chain.from_iterable(bucket.parameters for bucket in buckets):
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
