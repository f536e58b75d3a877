"""Base class of all variants: a module that computes like the one it wraps and synchronizes its gradients.

    variant = OverlapDDP(model)
    loss = criterion(variant(inputs), targets)
    loss.backward()
    variant.finish_gradient_synchronization()
    optimizer.step()

Gradients are averaged over the ranks. A step is finished by ``finish_gradient_synchronization``. Where it is skipped,
``zero_grad()`` on every rank is enough, or ``discard()``: the next step is without what backward brought. A gradient
may be a view of a buffer that the next step overwrites: keep a copy, not the tensor.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_prof import annotate
from ddp_prof.ddp.rank_consistency import check_rank_consistency
from ddp_prof.errors import CommunicationError


class DataParallel(torch.nn.Module, ABC):
    """``module``, whose parameters and buffers become those of rank 0, and the averaging of its gradients.

    A variant can be copied (the copy shares the process group) and, with the default group, which ``None`` is, pickled;
    both between steps only.

    Attributes:
        is_unfinished: Whether backward brought gradients that are not synchronized yet.
        is_blocking: Whether the variant waits for each collective before it does anything else.
    """

    is_blocking: ClassVar[bool] = False
    _not_copied: ClassVar[frozenset[str]] = frozenset({"_clock", "is_unfinished"})
    """Attributes that :meth:`_set_up` makes anew in a copy."""

    def __init__(
        self, module: torch.nn.Module, process_group: dist.ProcessGroup | None, schedule: Mapping[str, object]
    ) -> None:
        """Compare model and ``schedule`` over the ranks: the options that decide what is communicated, and when."""
        super().__init__()
        _check_initialized()
        if any(isinstance(each, (DataParallel, DistributedDataParallel)) for each in module.modules()) or any(
            map(has_gradient_hook, module.parameters())
        ):
            raise CommunicationError(
                "the module, or a part of it, is wrapped already: wrap it once, or call remove() of the variant that "
                "has it"
            )
        check_rank_consistency(module, {"variant": type(self).__name__, **schedule}, process_group)
        self.module = module
        self.process_group = process_group
        self._is_synchronizing = True

    def _set_up(self) -> None:
        """Make what is not copied: the clock; in subclasses hooks and buffers, too. Communicates nothing."""
        self._clock = CommunicationClock()
        self.is_unfinished = False

    @property
    def communication_seconds(self) -> float:
        """How long the last step waited for gradients; not a number where this is not known.

        The host's time on a CPU; on a GPU the device's, for which this waits.
        """
        return self._clock.seconds()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the average over the ranks. Does nothing within :meth:`no_sync`.

        Raises CommunicationError where a collective failed, as a rule because another rank ended; with NCCL that is not
        known here, and torch ends this process when the time limit of the group is over.
        """
        if not self._is_synchronizing:
            return
        device = self.device
        self._clock.start(device)
        self.is_unfinished = False
        with annotate.synchronize():
            self._synchronize()
        self._clock.stop(device)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients by one factor where their norm is above ``max_norm``; returns the norm they had.

        Call it on every rank, after :meth:`finish_gradient_synchronization`: all ranks have one norm and one factor.
        A ``norm_type`` of 2 is the Euclidean norm, ``inf`` the largest absolute value.
        """
        if self.is_unfinished:
            raise CommunicationError(
                "clip_grad_norm_() on gradients that are not synchronized: "
                "call finish_gradient_synchronization() after backward, before it"
            )
        return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.optimizer_parameters(), max_norm, norm_type)

    def discard(self) -> None:
        """Drop the gradients that backward brought, as where a step is skipped; call it on every rank.

        ``zero_grad()`` on every rank is enough, too: what it dropped is forgotten by the next forward.
        """
        for parameter in (*self.trained_parameters(), *self.optimizer_parameters()):
            parameter.grad = None
        self._forget_dropped()
        self.is_unfinished = False

    def _forget_dropped(self) -> None:
        """Forget what backward brought and ``zero_grad`` dropped; the averages of the next step are without it."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: put it round forward and backward of all but the last micro-batch."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    def _synchronize(self) -> None:  # torch's own have nothing left to do after backward
        pass

    @abstractmethod
    def remove(self) -> None:
        """Take the variant's hooks off the module, which then trains alone; the variant is of no use afterwards."""

    @property
    def device(self) -> torch.device:
        """Where the first parameter is; the CPU for a module without any."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """What communicates: each parameter that requires a gradient, once, in the module's order."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def optimizer_parameters(self) -> list[torch.nn.Parameter]:
        """What an optimizer is to step on."""
        return self.trained_parameters()

    def kept_tensors(self) -> Sequence[torch.Tensor]:
        """What the variant keeps from step to step besides parameters, gradients and the states of optimizers."""
        return ()

    def _copied_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._not_copied}

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise CommunicationError(
                "a variant with a process group of its own cannot be pickled: pickle its module and wrap it again"
            )
        return self._copied_attributes()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's omission
        _check_initialized()
        self._set_up()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        memo[id(self.process_group)] = self.process_group
        copy.__setstate__(deepcopy(self._copied_attributes(), memo))
        return copy


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise CommunicationError("there is no process group: call torch.distributed.init_process_group() first")


class CommunicationClock:
    """The time from :meth:`start` to :meth:`stop`.

    On a GPU both are events of the current stream. The first is reached when the compute queued before it is done, the
    second when the stream has waited for the collectives: between them lies communication that nothing hides. The
    host's clock would only see how long it takes to queue them.
    """

    def __init__(self) -> None:
        self._begin: Any = 0.0
        self._end: Any = 0.0

    def start(self, device: torch.device) -> None:
        self._begin = self._end = _mark(device)

    def stop(self, device: torch.device) -> None:
        self._end = _mark(device)

    def seconds(self) -> float:
        """The last time taken. Waits for the device where it is the device's."""
        if isinstance(self._end, float):
            return float(self._end - self._begin)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def add_hooks(listener: Any, parameters: Sequence[torch.nn.Parameter]) -> weakref.finalize[..., Any]:
    """Register hooks that report gradients and optimizer steps to ``listener``; returns a function that removes them.

    The hooks hold the listener weakly, so that a module whose variant was dropped trains alone again.
    """
    on_gradient, before_step, on_step = map(
        weakref.WeakMethod, (listener.on_gradient, listener.before_step, listener.on_step)
    )
    handles: list[RemovableHandle] = [
        parameter.register_post_accumulate_grad_hook(partial(_report, on_gradient, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    handles.append(register_optimizer_step_pre_hook(partial(_report, before_step)))
    handles.append(register_optimizer_step_post_hook(partial(_report, on_step)))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    remover = weakref.finalize(listener, remove)
    remover.atexit = False
    return remover


def _report(method: weakref.WeakMethod[Any], *arguments: Any) -> None:
    if (reported := method()) is not None:
        reported(*arguments)


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(getattr(hook, "func", None) is _report and hook.args[0]() is not None for hook in hooks)
