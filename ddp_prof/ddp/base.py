"""The face that all variants share: a module that computes as the one it wraps and synchronizes its gradients.

    variant = OverlapDDP(model)
    loss = criterion(variant(inputs), targets)
    loss.backward()
    variant.finish_gradient_synchronization()
    optimizer.step()

Gradients are averaged over the ranks. A step is always finished by ``finish_gradient_synchronization``; should backward
raise, call it on every rank all the same and set the gradients to zero. A gradient may be a view of a buffer that the
next step overwrites: keep a copy, not the tensor. Buffers (as of batch normalisation) are not synchronized in training.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from ddp_prof.ddp import annotate
from ddp_prof.ddp.engine.buckets import ParameterSize
from ddp_prof.ddp.engine.reducer import Reducer
from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddp_prof.ddp.engine.buckets import Assignment


class DataParallel(torch.nn.Module, ABC):
    """A data-parallel variant: ``module`` and the averaging of its gradients over ``process_group``.

    Attributes:
        module: The wrapped module. Its parameters and buffers become those of rank 0.
        process_group: ``None`` is the default group.
        communication_seconds: Host seconds of the last ``finish_gradient_synchronization``. With gloo this is the wait
            for communication; with NCCL the host hardly waits, the device does.
        is_blocking: Whether the variant waits for each all-reduce before it does anything else.
    """

    is_blocking: ClassVar[bool] = False

    def __init__(self, module: torch.nn.Module, process_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise CommunicationError("there is no process group: call torch.distributed.init_process_group() first")
        self.module = module
        self.process_group = process_group
        self.communication_seconds = 0.0
        self._is_synchronizing = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module computes."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the average over the ranks. Does nothing within :meth:`no_sync`.

        Raises:
            CommunicationError: A collective failed, as a rule because another rank ended.
        """
        if not self._is_synchronizing:
            return
        begin = time.perf_counter()
        with annotate.synchronize():
            self._synchronize()
        self.communication_seconds = time.perf_counter() - begin

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: put it round forward and backward of all but the last micro-batch."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    @abstractmethod
    def _synchronize(self) -> None:
        """Do what backward has left to do."""

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """What communicates: each parameter that requires a gradient, once, in the module's order."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _broadcast_state(self) -> None:
        """Make parameters and buffers those of rank 0."""
        source = 0 if self.process_group is None else dist.get_global_rank(self.process_group, 0)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, source, self.process_group)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)


class ReducingVariant(DataParallel):
    """A variant that reduces its gradients itself: after backward where :attr:`is_blocking`, else from gradient hooks.

    Args:
        module: What is trained.
        process_group: ``None`` is the default group.
        find_unused_parameters: Leave parameters that no rank used in a step without a gradient, as one process would,
            at the price of one small all-reduce a step. Otherwise their gradient is zeros.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(module, process_group)
        self._broadcast_state()
        parameters = self.trained_parameters()
        self.assignment = self._assign([_size(parameter) for parameter in parameters])
        self._reducer = Reducer(parameters, self.assignment, process_group, find_unused_parameters)
        if not self.is_blocking:
            self._listen()

    @abstractmethod
    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        """Put parameters into buckets."""

    def _synchronize(self) -> None:
        self._reducer.finish()

    def _listen(self) -> None:
        """Hear of each gradient the moment backward has finished it."""
        for index, parameter in enumerate(self.trained_parameters()):
            hook = partial(self._on_gradient, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's omission

    def _on_gradient(self, index: int, _parameter: torch.Tensor) -> None:
        if self._is_synchronizing:
            self._reducer.ready(index)


def _size(parameter: torch.nn.Parameter) -> ParameterSize:
    return ParameterSize(parameter.numel(), parameter.nbytes, (parameter.dtype, parameter.device))
