"""Sharded: each rank keeps the optimizer state and the reduced gradients of its part of the parameters only.

    host            |  forward  |      backward      |synchronize|optimizer|  forward of the next step
    compute         |###########|####################|           |##|      |....###...###...###########
    reduce-scatter                  [b0] [b1] ... [bn]|
    all-gather                                                      [bn] ... [b1] [b0]|

forward      computes the loss. A layer waits for the all-gather of its own parameters, while later ones are in flight.
backward     the hook of each parameter: copy the gradient, divided, into its bucket; the hook that fills the bucket
             launches its reduce-scatter, which leaves each rank the average of its part. The memory of the full
             gradients is freed when the next launch finds the reduce-scatter done.
synchronize  launch buckets that stayed incomplete (unused parameters: zeros), then wait for all that is in flight.
optimizer    steps on the shards; its end launches the all-gathers, the first layers' bucket first.

State and gradients are divided among the ranks (ZeRO stages 1 and 2, Rajbhandari et al. 2020). A reduce-scatter and an
all-gather together send what one all-reduce does, but the second half hides behind the next forward.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_prof.ddp import annotate
from ddp_prof.ddp.engine.bucket_assignment import assign_buckets, cap_in_bytes
from ddp_prof.ddp.engine.hooks import removal
from ddp_prof.ddp.reducing import ReducingVariant
from ddp_prof.ddp.sharding.shards import ShardReducer
from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddp_prof.ddp.engine.bucket_assignment import Assignment, ParameterSize
    from ddp_prof.ddp.engine.collective import InFlight
    from ddp_prof.ddp.engine.reducer import Reducer


class ShardedDDP(ReducingVariant):
    """From gradient hooks, one reduce-scatter a full bucket; after the optimizer's step, one all-gather a bucket.

    The optimizer must step element by element (SGD, Adam, AdamW) and on :meth:`optimizer_parameters`, which are flat
    parts of buckets: every parameter has the same learning rate and weight decay, and a parameter that no rank used
    counts as one whose gradient is zeros. Between the optimizer's step and the end of the next forward, read parameters
    through ``state_dict()`` or after :meth:`wait_for_parameters`. A layer's parameters are used in its own ``forward``
    only, unless the layer that owns them ran before.

    Args:
        module: What is trained.
        bucket_size_mb: As of :class:`BucketedDDP`.
        options: As of :class:`ReducingVariant`, without ``find_unused_parameters``.
    """

    _not_copied: ClassVar[frozenset[str]] = ReducingVariant._not_copied | {"_gathers", "_layer_hooks"}

    def __init__(
        self, module: torch.nn.Module, bucket_size_mb: float | Sequence[float] | None = 25.0, **options: Any
    ) -> None:
        if options.get("find_unused_parameters"):
            raise CommunicationError(
                "sharded cannot leave unused parameters out, its optimizer steps on flat parts of buckets: "
                "use another variant or find_unused_parameters=False"
            )
        self._cap_bytes = cap_in_bytes(bucket_size_mb)
        super().__init__(module, schedule={"bucket_size_mb": bucket_size_mb}, **options)

    def _set_up(self) -> None:
        super()._set_up()
        self._gathers: dict[int, InFlight] = {}
        self._layer_hooks = self._hook_layers()

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_buckets(sizes, cap_bytes=self._cap_bytes)

    def _make_reducer(self) -> Reducer:
        return ShardReducer(self._trained, self.assignment, self.process_group, find_unused=False)

    def optimizer_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's part of each bucket."""
        return [bucket.shard for bucket in self._shards.shard_buckets()]

    def on_step(self) -> None:
        """Launch the all-gathers of what the optimizer changed. Called by a hook when a step on the shards ends."""
        self.wait_for_parameters()
        for bucket in reversed(self._shards.shard_buckets()):
            self._gathers[bucket.index] = bucket.gather()

    def wait_for_parameters(self) -> None:
        """Return when all parameters are those of the last step.

        Raises:
            CommunicationError: A rank is gone.
        """
        self._wait_for_buckets(list(self._gathers))

    def remove(self) -> None:
        """Take the variant's hooks off the module, which then trains alone; the variant is of no use afterwards."""
        self.wait_for_parameters()
        self._layer_hooks()
        super().remove()

    def _synchronize(self) -> None:
        self.wait_for_parameters()  # of layers that did not run
        super()._synchronize()

    @property
    def _shards(self) -> ShardReducer:
        assert isinstance(self._reducer, ShardReducer)
        return self._reducer

    def _check_frozen(self) -> None:
        super()._check_frozen()
        if not all(parameter.requires_grad for parameter in self._trained):
            raise CommunicationError(
                "a parameter was frozen after the variant was made, but sharded steps on flat parts of buckets: "
                "call remove() and wrap the module again"
            )

    def _hook_layers(self) -> weakref.finalize[..., Any]:
        """Let each layer wait for the all-gathers of its own parameters, and ``state_dict`` for all."""
        owner = weakref.ref(self)
        bucket_of = {id(parameter): bucket.index for bucket in self._shards.buckets for parameter in bucket.parameters}
        wait = partial(_wait_for_all, owner)
        handles: list[Any] = [self.module.register_state_dict_pre_hook(wait)]  # type: ignore[no-untyped-call]
        for layer in self.module.modules():
            parameters = map(id, layer.parameters(recurse=False))
            own = {bucket_of[parameter] for parameter in parameters if parameter in bucket_of}
            if own:
                handles.append(layer.register_forward_pre_hook(partial(_wait_for_layer, owner, sorted(own))))
        return removal(self, handles)

    def _wait_for_buckets(self, buckets: Sequence[int]) -> None:
        pending = [bucket for bucket in buckets if bucket in self._gathers]
        if not pending:
            return
        with annotate.synchronize():  # in forward, too: gloo blocks the host here
            for bucket in pending:
                self._gathers.pop(bucket).wait()


def _wait_for_layer(owner: weakref.ref[ShardedDDP], buckets: Sequence[int], *_: object) -> None:
    variant = owner()
    if variant is not None:
        variant._wait_for_buckets(buckets)


def _wait_for_all(owner: weakref.ref[ShardedDDP], *_: object) -> None:
    variant = owner()
    if variant is not None:
        variant.wait_for_parameters()
