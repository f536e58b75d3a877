"""PyTorch's DistributedDataParallel and ``fully_shard``, with the interface of our own variants, for comparison."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_prof import annotate
from ddp_prof.annotate import OpenRange
from ddp_prof.annotate.fsdp_marks import mark_fsdp_unit
from ddp_prof.annotate.process_groups import Hook, MarkingGroup, is_on_host
from ddp_prof.ddp.base import DataParallel, Layouts
from ddp_prof.ddp.collective import broadcast_state, communication_error, communication_errors
from ddp_prof.errors import CommunicationError, first_line
from ddp_prof.variants import COMM_HOOKS


class TorchDDP(DataParallel):
    """Torch: PyTorch's DistributedDataParallel.

        host      |  forward  |            backward             |optimizer|
        compute   |###########|##################               |#########|
        synchronize                              |wait, copy back|
        all-reduce                  [bucket 0][bucket 1] ... [n] |

    forward      computes the loss; DDP prepares its buckets.
    backward     DDP copies gradients into its buckets, launches each when it is full, and waits for all of them before
                 ``backward`` returns. In the first step there is one bucket; then DDP makes new ones in the order in
                 which gradients became ready.
    synchronize  lies within backward: from the launch of the last bucket to the end of backward.
    optimizer    steps on the averaged gradients.

    A communication hook of DDP marks the buckets with ranges; ``mark_buckets=False`` leaves DDP unchanged. With a hook,
    DDP does not divide gradients while it copies them. NCCL then averages within the collective, without a pass over
    memory. Gloo cannot average, so the hook divides, which costs one pass over memory more than an unchanged DDP.

    ``comm_hook`` is one of torch's hooks that send fewer bytes; a range marks each of their messages.

    bf16      torch's ``bf16_compress_hook``: buckets are sent as bfloat16, half the bytes of float32.
    powersgd  torch's ``powerSGD_hook`` with matrix rank 1: each gradient matrix is sent as the product of two thin
              matrices (Vogels, Karimireddy and Jaggi 2019), in three messages per bucket. The first two steps are sent
              uncompressed, as torch requires.

    Args:
        mark_buckets: Mark each bucket's all-reduce by a communication hook. Without it ``communication_seconds`` is
            NaN, and only kernels show the buckets.
        comm_hook: ``None``, ``"bf16"`` or ``"powersgd"``. A copy of the variant starts without the compression errors
            that PowerSGD keeps from step to step.
        options: Passed to DDP.
    """

    _ddp: DistributedDataParallel | None
    _not_copied: ClassVar[frozenset[str]] = DataParallel._not_copied | {"_ddp", "_layouts", "_open_range", "_reduce"}

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        mark_buckets: bool = True,
        comm_hook: str | None = None,
        **options: Any,
    ) -> None:
        if comm_hook not in (None, *COMM_HOOKS):
            raise ValueError(f"comm_hook must be None, {' or '.join(map(repr, COMM_HOOKS))}, got {comm_hook!r}")
        if comm_hook and not mark_buckets:
            raise ValueError("comm_hook requires mark_buckets: torch's own hooks are marked, too")
        self._options = {"find_unused_parameters": find_unused_parameters, **options}
        schedule = {"mark_buckets": mark_buckets, "comm_hook": comm_hook, **self._options}
        super().__init__(module, process_group, schedule)
        if comm_hook == "powersgd" and not all(parameter.dim() for parameter in self.trained_parameters()):
            raise CommunicationError("torch's powerSGD_hook takes no scalar parameter: choose bf16 or no hook")
        self._mark_buckets, self._comm_hook = mark_buckets, comm_hook
        self._set_up()
        # For copies: the model is equal on all ranks already, and maybe only one rank makes a copy. Before 2.7 torch's
        # DDP has no such option, and all ranks must make one.
        if "init_sync" in inspect.signature(DistributedDataParallel).parameters:
            self._options["init_sync"] = False

    def _set_up(self) -> None:
        """Create the attributes that a copy does not take over: torch's DDP and its communication hook."""
        super()._set_up()
        try:
            with communication_errors(self.process_group, "DDP's comparison of the models"):
                ddp = DistributedDataParallel(self.module, process_group=self.process_group, **self._options)
        except RuntimeError as error:
            raise CommunicationError(f"DistributedDataParallel cannot take this model: {first_line(error)}") from error
        self._layouts = Layouts(self.module)
        # Stored past ``Module.__setattr__``: as a submodule its parameters would be listed twice.
        self.__dict__["_ddp"] = ddp
        self._open_range: OpenRange | None = None
        if self._mark_buckets:
            hook: Hook | None = default_hooks.bf16_compress_hook if self._comm_hook else None
            state: PowerSGDState | None = None
            if self._comm_hook == "powersgd":
                # The epsilon is for gradients of unused parameters: zeros have no orthonormal columns.
                state = PowerSGDState(None, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
                hook = _compress
            self._reduce = partial(MarkingGroup(self.process_group).reduce_bucket, hook=hook, state=state)
            # A weak reference: DDP, which self keeps, must not keep self. DDP calls it and does not outlive self.
            owner = weakref.ref(self)
            ddp.register_comm_hook(None, lambda _state, bucket: owner()._reduce_bucket(bucket))  # type: ignore[union-attr]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's DDP; raise CommunicationError if a parameter was converted or moved since it was made."""
        assert self._ddp is not None, "not after remove()"
        self._forget_dropped()
        self._layouts.check()
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
        """The seconds from the launch of the last bucket to the end of backward; NaN without ``mark_buckets``.

        On a GPU they begin when the stream reaches that launch, so the compute before it is done.
        """
        return super().communication_seconds if self._mark_buckets else float("nan")

    def no_sync(self) -> Any:
        assert self._ddp is not None, "not after remove()"
        return self._ddp.no_sync()

    def remove(self) -> None:
        self.__dict__["_ddp"] = None

    def _forget_dropped(self) -> None:
        """End the ``synchronize`` range of a step for which ``finish_gradient_synchronization`` was not called."""
        self.finish_gradient_synchronization()

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Launch the all-reduce of one of DDP's buckets and return its future; DDP's communication hook calls this.

        The last bucket of a step also opens the ``synchronize`` range.
        """
        operation, rank = f"all-reduce of bucket {bucket.index()}", dist.get_rank(self.process_group)
        future, spans = self._reduce(bucket)
        if bucket.is_last():
            self._clock.start(bucket.buffer().device)
            self._open_range = annotate.start_synchronize()

        # Gloo's thread may hold the last reference to this function, so the function must hold neither the group nor
        # DDP: the thread would destroy the group, which waits for its threads, and abort.
        def completed(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            """End the bucket's ranges and return the reduced bucket; raise CommunicationError if that failed."""
            for span in spans:
                span.end()  # backward may return before gloo's thread ends the range
            try:
                return done.value()
            except RuntimeError as error:
                raise communication_error(rank, operation, error) from error

        return future.then(completed)


def sent_bytes(gradient: torch.Tensor, comm_hook: str | None) -> int:
    """Return how many bytes a rank contributes to the all-reduces of a gradient.

    ``None`` sends the gradient as it is, ``"bf16"`` sends it as bfloat16, and ``"powersgd"`` sends a matrix as two
    vectors if these are smaller than half of it.
    """
    numel = gradient.numel()
    if comm_hook == "bf16":
        return 2 * numel
    if comm_hook == "powersgd" and gradient.dim() > 1:
        # A matrix of rows x columns as a column and a row vector. Torch compresses only if that at least halves it.
        products = gradient.shape[0] + numel // gradient.shape[0]
        numel = products if 2 * products < numel else numel
    return numel * gradient.element_size()


def _compress(state: PowerSGDState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Launch torch's ``powerSGD_hook`` for a bucket and return its future; with gloo, wait for it before returning."""
    future = powerSGD_hook(state, bucket)
    group: Any = state.process_group
    if is_on_host(bucket.buffer(), group.marked):
        # Else gloo's threads would launch a bucket's later messages in an order that differs between ranks: a hang.
        waiting = annotate.start_synchronize()
        try:
            with communication_errors(group.marked, f"all-reduce of bucket {bucket.index()}"):
                future.wait()
        finally:
            waiting.end()
    return future


class FullyShardedDDP(DataParallel):
    """Fsdp: ``torch.distributed.fsdp.fully_shard`` (FSDP2, ZeRO stage 3) on each block and on the whole model.

        host            |        forward        |             backward              |synchronize|optimizer|
        compute         |   [u0]###[u1]###[u2]##|[u2]####[u1]####[u0]####           |           |###|
        all-gather       [u0][u1][u2]            [u1][u0]
        reduce-scatter                                [u2]    [u1]    [u0]

    forward      a unit's parameters are gathered from all ranks before it runs and freed after it. The gather of the
                 next unit is launched early (prefetch).
    backward     a unit's parameters are gathered again; when its gradients are ready, they are reduced to shards.
    synchronize  has nothing to do: backward ends when all gradients are reduced.
    optimizer    steps on this rank's part of each parameter.

    A unit (``u0``, ``u1``, ... above) is a block of the model, that is, an element of a ``ModuleList``. All other
    parameters are the last unit. The ranges hold the unit's number as their bucket. Whether a gather belongs to forward
    or to backward is seen from the phase in which it was launched.

    The module itself is changed: its parameters become ``DTensor`` s, of which each rank has a part. ``fully_shard``
    requires contiguous parameters with at least one dimension and one data type per unit, and every rank must use the
    same parameters. The wrapped module cannot be unwrapped, copied or pickled.

    ``options`` are passed to ``fully_shard``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        if find_unused_parameters:
            raise CommunicationError("fsdp cannot find unused parameters: leave find_unused_parameters out")
        if not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_all_gather"):
            raise CommunicationError(
                f"fsdp needs torch 2.9 or later to mark its collectives, this is {torch.__version__}"
            )
        super().__init__(module, process_group, options)
        broadcast_state(module, process_group)
        self._set_up()
        mesh = DeviceMesh.from_group(process_group or dist.distributed_c10d._get_default_group(), self.device.type)
        # The whole model comes last: ``fully_shard`` then takes only the parameters that no block has.
        units = [block for blocks in module.modules() if isinstance(blocks, torch.nn.ModuleList) for block in blocks]
        for index, unit in enumerate([*units, module]):
            try:
                sharded = fsdp.fully_shard(unit, mesh=mesh, **options)
            except (ValueError, NotImplementedError, AssertionError) as error:
                raise CommunicationError(f"fully_shard cannot take this model: {str(error).splitlines()[0]}") from error
            mark_fsdp_unit(sharded, index)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with communication_errors(self.process_group, "FSDP's gather in forward"):
            return self.module(*args, **kwargs)

    @property
    def communication_seconds(self) -> float:
        """NaN, as it is not known: torch waits for gathers and reductions between the layers."""
        return float("nan")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them, in the block; FSDP then keeps them whole on each rank."""
        module: Any = self.module  # an FSDPModule
        module.set_requires_gradient_sync(False)
        try:
            with super().no_sync():
                yield
        finally:
            module.set_requires_gradient_sync(True)

    def remove(self) -> None:
        """Raise an error: ``fully_shard`` cannot be undone."""
        raise CommunicationError("fully_shard cannot be taken off a module: build the model again")

    def __getstate__(self) -> dict[str, Any]:
        raise CommunicationError("a module under fully_shard cannot be copied or pickled: save its state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        raise CommunicationError("a module under fully_shard cannot be copied or pickled: save its state_dict()")

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm: Any = super()._clip(max_norm, norm_type)
        whole: torch.Tensor = norm.full_tensor()  # for ``inf``, ``item()`` gives only this rank's norm
        return whole
