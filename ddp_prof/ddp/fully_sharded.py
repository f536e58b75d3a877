"""Fsdp: PyTorch's own ``fully_shard`` (FSDP2, ZeRO stage 3) as a variant, to compare with.

    host            |        forward        |             backward              |synchronize|optimizer|
    compute         |   [u0]###[u1]###[u2]##|[u2]####[u1]####[u0]####           |           |###|
    all-gather       [u0][u1][u2]            [u1][u0]
    reduce-scatter                                [u2]    [u1]    [u0]

forward      before a unit runs, its parameters are gathered from all ranks; after it they are freed again. The gather
             of the next unit is launched early (prefetch).
backward     a unit's parameters are gathered once more; when its gradients are done, they are reduced to shards.
synchronize  nothing is left: backward ends when all gradients are reduced.
optimizer    steps on this rank's part of each parameter.

A unit is a block of the model (an element of a ``ModuleList``); what is in no block is the last unit. Each unit has a
bucket number in its ranges. Gathers of forward and of backward are told apart by the phase in which they are launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from ddp_prof.annotate.hooks import mark_fsdp_unit
from ddp_prof.ddp.base import DataParallel
from ddp_prof.ddp.collective import broadcast_state, communication_errors
from ddp_prof.errors import CommunicationError


class FullyShardedDDP(DataParallel):
    """``torch.distributed.fsdp.fully_shard`` of each block and of the whole.

    The module itself is changed: its parameters become ``DTensor`` s, of which each rank has a part. ``fully_shard``
    wants contiguous parameters with at least one dimension, of one data type in a unit, and every rank to use the same
    ones; it cannot be undone, copied or pickled.

    Args:
        module: What is trained.
        process_group: ``None`` is the default group.
        find_unused_parameters: Refused: there is no such option.
        options: Go to ``fully_shard``.
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
        """Not known: torch waits between the layers of forward and backward."""
        return float("nan")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients locally: put it round forward and backward of all but the last micro-batch."""
        self._require_sync(False)
        try:
            with super().no_sync():
                yield
        finally:
            self._require_sync(True)

    def remove(self) -> None:
        """Refused: torch has no way back from ``fully_shard``."""
        raise CommunicationError("fully_shard cannot be taken off a module: build the model again")

    def __getstate__(self) -> dict[str, Any]:
        raise CommunicationError("a module under fully_shard cannot be copied or pickled: save its state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        raise CommunicationError("a module under fully_shard cannot be copied or pickled: save its state_dict()")

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm: Any = super()._clip(max_norm, norm_type)
        whole: torch.Tensor = norm.full_tensor()  # of inf, ``item()`` would be the norm of this rank's part
        return whole

    def _require_sync(self, is_required: bool) -> None:
        assert isinstance(self.module, fsdp.FSDPModule)
        self.module.set_requires_gradient_sync(is_required)
