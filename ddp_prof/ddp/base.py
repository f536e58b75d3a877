"""Base class of all variants: a module that computes like the one it wraps and synchronizes its gradients.

    variant = OverlapDDP(model)
    loss = criterion(variant(inputs), targets)
    loss.backward()
    variant.finish_gradient_synchronization()
    optimizer.step()

Gradients are averaged over the ranks. A step is finished by ``finish_gradient_synchronization``. To skip a step, call
``zero_grad()`` or ``discard()`` on every rank instead: the next step does not contain its gradients. A gradient may be
a view of a buffer that the next step overwrites: keep a copy, not the tensor.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_prof import annotate
from ddp_prof.ddp.collective import check_rank_consistency
from ddp_prof.errors import CommunicationError


class DataParallel(torch.nn.Module, ABC):
    """Wraps ``module``: copies parameters and buffers from rank 0, and averages gradients.

    A variant can be copied; the copy shares the process group. With the default group (``None``) it can be pickled.
    Both only between steps.

    Attributes:
        is_unfinished: Whether there are gradients that are not synchronized yet.
        is_blocking: Whether the variant waits for each collective right after its launch.
    """

    is_blocking: ClassVar[bool] = False
    _not_copied: ClassVar[frozenset[str]] = frozenset({"_clock", "is_unfinished"})
    """Attributes that are not copied: :meth:`_set_up` creates them."""

    def __init__(
        self, module: torch.nn.Module, process_group: dist.ProcessGroup | None, schedule: Mapping[str, object]
    ) -> None:
        """Check that all ranks have the same model and ``schedule``, the options that determine the communication."""
        super().__init__()
        _check_initialized()
        if any(isinstance(each, (DataParallel, DistributedDataParallel)) for each in module.modules()) or any(
            map(has_gradient_hook, module.parameters())
        ):
            raise CommunicationError(
                "the module, or a part of it, is wrapped already: wrap it once, or call remove() of the variant that "
                "has it"
            )
        _check_materialized(module)
        check_rank_consistency(module, {"variant": type(self).__name__, **schedule}, process_group)
        self.module = module
        self.process_group = process_group
        self._is_synchronizing = True

    def _set_up(self) -> None:
        """Create what is not copied: the clock; in subclasses also hooks and buffers. Communicates nothing."""
        self._clock = CommunicationClock()
        self.is_unfinished = False

    @property
    def communication_seconds(self) -> float:
        """How long the last step waited for gradients; NaN if this is not known.

        On a CPU this is host time; on a GPU device time, and reading it waits for the device.
        """
        return self._clock.seconds()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging the gradients over the ranks.

        Within :meth:`no_sync` it communicates nothing: after the last micro-batch our variants then do it before the
        optimizer steps, or in :meth:`clip_grad_norm_`, and raise an error if the gradients were changed meanwhile.
        Raises CommunicationError if a collective fails, usually because another rank ended. NCCL does not report this
        here: torch ends this process after the time limit of the group.
        """
        if self._is_synchronizing:
            self._finish()
        else:
            self._postpone()

    def _postpone(self) -> None:
        """Called instead of :meth:`_finish` within ``no_sync``; torch's variants then do nothing."""

    def _catch_up(self) -> None:
        """Finish what was postponed."""

    def _finish(self) -> None:
        device = self.device
        self._clock.start(device)
        self.is_unfinished = False
        with annotate.synchronize():
            self._synchronize()
        self._clock.stop(device)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients by one factor if their norm is above ``max_norm``; return the norm before that.

        Call it on every rank, after :meth:`finish_gradient_synchronization`; norm and factor are the same on all ranks.
        A ``norm_type`` of 2 is the Euclidean norm, ``inf`` the largest absolute value.
        """
        if self.is_unfinished:
            raise CommunicationError(
                "clip_grad_norm_() on gradients that are not synchronized: "
                "call finish_gradient_synchronization() after backward, before it"
            )
        self._catch_up()
        return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.optimizer_parameters(), max_norm, norm_type)

    def discard(self) -> None:
        """Drop all gradients, synchronized or not, in order to skip a step; call it on every rank.

        ``zero_grad()`` on every rank has the same effect, from the next forward on.
        """
        for parameter in (*self.trained_parameters(), *self.optimizer_parameters()):
            parameter.grad = None
        self._forget_dropped()
        self.is_unfinished = False

    def _forget_dropped(self) -> None:
        """Forget gradients that ``zero_grad`` dropped before they were synchronized."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: use it around forward and backward of all but the last micro-batch."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    def _synchronize(self) -> None:
        pass  # torch's variants have nothing left to do after backward

    @abstractmethod
    def remove(self) -> None:
        """Take the variant's hooks off the module, which then trains alone; do not use the variant afterwards."""

    @property
    def device(self) -> torch.device:
        """Device of the first parameter; the CPU for a module without any."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """Return each parameter that requires a gradient, once, in the module's order."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def optimizer_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters for the optimizer."""
        return self.trained_parameters()

    def kept_tensors(self) -> Sequence[torch.Tensor]:
        """Return what the variant keeps between steps besides parameters, gradients and optimizer states."""
        return ()

    def _copied_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._not_copied}

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise CommunicationError(
                "a variant with its own process group cannot be pickled: pickle its module and wrap it again"
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


def _check_materialized(module: torch.nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    for name, tensor in tensors:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise CommunicationError(
                f"{name!r} has no shape before the first forward, as in LazyLinear: call the module once on a batch "
                "on every rank, then wrap it"
            )
        if tensor.is_meta:
            raise CommunicationError(
                f"{name!r} is on the meta device and has no values: call to_empty() and initialize the module, then "
                "wrap it"
            )


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tensor.dtype, tensor.device, tensor.shape, tensor.stride())


class Layouts:
    """The layouts of the trained parameters when a variant was made, to which its buckets belong."""

    def __init__(self, module: torch.nn.Module) -> None:
        trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
        self._known = [(name, parameter, Layout.of(parameter)) for name, parameter in trained]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission
    def check(self) -> None:
        """Raise CommunicationError if a parameter was converted or moved.

        Gradients would have one order in memory and the parameter another, which fused optimizers do not notice.
        """
        for name, parameter, layout in self._known:
            if (now := Layout.of(parameter)) != layout:
                field = next(field for field in Layout._fields if getattr(now, field) != getattr(layout, field))
                raise CommunicationError(
                    f"parameter {name!r} was converted or moved after the variant was made: its {field} was "
                    f"{getattr(layout, field)} and is {getattr(now, field)}: convert the module first, then wrap it"
                )


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise CommunicationError("there is no process group: call torch.distributed.init_process_group() first")


class CommunicationClock:
    """Measures the time from :meth:`start` to :meth:`stop`.

    On a GPU both record an event on the current stream. The first event is reached when the compute before it is done,
    the second when the stream has waited for the collectives: between them is exposed communication. The host's clock
    would only measure how long the launches take.
    """

    def __init__(self) -> None:
        self._begin: Any = 0.0
        self._end: Any = 0.0

    def start(self, device: torch.device) -> None:
        self._begin = self._end = _mark(device)

    def stop(self, device: torch.device) -> None:
        self._end = _mark(device)

    def seconds(self) -> float:
        """Return the last measured time; on a GPU, wait for it."""
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
    """Register hooks that report gradients and optimizer steps to ``listener``; return a function that removes them.

    The hooks hold a weak reference to the listener: a module whose variant was deleted trains alone again.
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
