"""Base class of all variants: a module that computes like the one it wraps and synchronizes its gradients.

    variant = OverlapDDP(model)
    loss = criterion(variant(inputs), targets)
    loss.backward()
    variant.finish_gradient_synchronization()
    optimizer.step()

Gradients are averaged over the ranks; ``finish_gradient_synchronization`` waits until they are. To skip a step, call
``zero_grad()`` or ``discard()`` on every rank instead: the next step does not contain the gradients of the skipped one.
If a rank skips it because it failed before its backward, finish on every rank first: that rank then sends zeros.
A gradient may be a view of a buffer that the next step overwrites: keep a copy, not the tensor.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_prof import annotate
from ddp_prof.annotate.calls import leave_to_python
from ddp_prof.ddp.collective import check_group, check_rank_consistency
from ddp_prof.errors import CommunicationError


class DataParallel(torch.nn.Module, ABC):
    """Wraps ``module``: copies its parameters and buffers from rank 0, and averages its gradients over the ranks.

    A variant can be copied between steps; the copy uses the same process group. With the default group (``None``) it
    can also be pickled between steps.

    Attributes:
        module: The wrapped model.
        process_group: The ranks that train together; ``None`` is torch's default group.
        is_unfinished: Whether there are gradients that are not synchronized yet.
        is_blocking: Whether the variant launches its collectives after backward and waits for them.
    """

    is_blocking: ClassVar[bool] = False
    _not_copied: ClassVar[frozenset[str]] = frozenset({"_clock", "is_unfinished"})
    """Names of the attributes that a copy or pickle does not take over: :meth:`_set_up` creates them."""

    def __init__(
        self, module: torch.nn.Module, process_group: dist.ProcessGroup | None, schedule: Mapping[str, object]
    ) -> None:
        """Check that the model can be wrapped, and that all ranks have the same model and the same ``schedule``.

        ``schedule`` holds the options that determine the communication, by name. Raises CommunicationError.
        """
        super().__init__()
        leave_to_python()
        check_group(process_group)
        if torch.is_inference_mode_enabled():
            raise CommunicationError(
                "nothing can be trained that is made under torch.inference_mode(): wrap outside of it"
            )
        if any(isinstance(each, (DataParallel, DistributedDataParallel)) for each in module.modules()) or any(
            map(has_gradient_hook, module.parameters())
        ):
            raise CommunicationError(
                "the module, or a part of it, is wrapped already: wrap it once, or call remove() of the variant that "
                "has it"
            )
        _check_tensors(module)
        check_rank_consistency(module, {"variant": type(self).__name__, **schedule}, process_group)
        self.module = module
        self.process_group = process_group
        self._is_synchronizing = True

    def _set_up(self) -> None:
        """Create the attributes of :attr:`_not_copied`: the clock; in subclasses also hooks and buffers.

        It communicates nothing, as a copy may be made on one rank only.
        """
        self._clock = CommunicationClock()
        self.is_unfinished = False

    @property
    def communication_seconds(self) -> float:
        """The seconds that the last step waited for its gradients to be averaged; NaN if this is not known.

        On a CPU it is the time that the host waited. On a GPU it is the time that the stream waited, and reading this
        property waits for the device.
        """
        return self._clock.seconds()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission
    def finish_gradient_synchronization(self) -> None:
        """Finish averaging the gradients over the ranks. Call it after backward and before the optimizer's step.

        Within :meth:`no_sync` it communicates nothing. If the optimizer steps then, or :meth:`clip_grad_norm_` is
        called, our variants average the gradients first, and raise an error if they were changed meanwhile.
        Raises CommunicationError if a collective fails, usually because another rank ended. NCCL does not report this
        here: torch ends this process after the time limit of the group.
        """
        if self._is_synchronizing:
            self._finish()
        else:
            self._postpone()

    def _postpone(self) -> None:
        """Called instead of :meth:`_finish` within ``no_sync``. Torch's variants do nothing there."""

    def _catch_up(self) -> None:
        """Do the synchronization that :meth:`_postpone` postponed, if there is one."""

    def _finish(self) -> None:
        """Synchronize the gradients, within a range ``synchronize``, and measure how long that takes."""
        device = self.device
        self._clock.start(device)
        self.is_unfinished = False
        with annotate.synchronize():
            self._synchronize()
        self._clock.stop(device)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their common norm is at most ``max_norm``; return the norm before scaling.

        Call it on every rank, after :meth:`finish_gradient_synchronization`; norm and factor are the same on all ranks.
        A ``norm_type`` of 2 is the Euclidean norm, ``inf`` the largest absolute value. Raises CommunicationError if the
        gradients are not synchronized yet.
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
        """End the current step if ``zero_grad`` dropped its gradients before they were synchronized."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank, without communication, in the block.

        Put forward and backward of all but the last micro-batch of a step into it.
        """
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    def join(self, *_: Any, **__: Any) -> Any:
        """Raise CommunicationError: uneven inputs, for which DDP has ``join()``, are not supported."""
        raise CommunicationError("join() for uneven inputs is not supported: give each rank the same number of batches")

    def register_comm_hook(self, *_: Any, **__: Any) -> None:
        """Raise CommunicationError: of torch's hooks the variant ``torch`` has two, and ours have none."""
        raise CommunicationError(
            "communication hooks are not supported here: TorchDDP(model, comm_hook='bf16') or 'powersgd' has torch's"
        )

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
        """Return the parameters that the optimizer must be made with."""
        return self.trained_parameters()

    def kept_tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the variant keeps between steps, besides parameters and optimizer states."""
        return ()

    def _copied_attributes(self) -> dict[str, Any]:
        """Return the attributes that a copy or pickle takes over, by name."""
        return {name: value for name, value in self.__dict__.items() if name not in self._not_copied}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds; raise CommunicationError with a process group, which cannot be pickled."""
        if self.process_group is not None:
            raise CommunicationError(
                "a variant with its own process group cannot be pickled: pickle its module and wrap it again"
            )
        return self._copied_attributes()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's omission
        check_group(self.process_group)
        self._set_up()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Return a copy with its own module and buffers, in the same process group."""
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        memo[id(self.process_group)] = self.process_group  # so that ``deepcopy`` does not copy the group
        copy.__setstate__(deepcopy(self._copied_attributes(), memo))
        return copy


def _check_tensors(module: torch.nn.Module) -> None:
    """Raise CommunicationError if a parameter or buffer cannot be sent or reduced.

    It may have no shape yet (lazy modules), no values (meta device), values in other tensors (DTensor), or no strides
    (sparse tensors); or a parameter's gradient has another data type.
    """
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
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise CommunicationError(
                f"{name!r} is a {type(tensor).__name__}, which keeps its values in other tensors and cannot be sent to "
                "the other ranks: make it a plain tensor"
            )
        if tensor.layout is not torch.strided:
            raise CommunicationError(
                f"{name!r} is sparse and is not sent to the other ranks: keep it as an attribute that is no buffer, or "
                "make it dense"
            )
        if tensor.requires_grad and getattr(tensor, "grad_dtype", None) not in (None, tensor.dtype):
            raise CommunicationError(
                f"{name!r} is {tensor.dtype} and its gradient is to be {tensor.grad_dtype}, but a bucket has the data "
                "type of its parameters: leave grad_dtype as it is"
            )


class Layout(NamedTuple):
    """How a tensor lies in memory: data type, device, shape and strides."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tensor.dtype, tensor.device, tensor.shape, tensor.stride())


class Layouts:
    """The layouts that the trained parameters had when a variant was made; its buckets rely on them."""

    def __init__(self, module: torch.nn.Module) -> None:
        trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
        self._known = [(name, parameter, Layout.of(parameter)) for name, parameter in trained]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission
    def check(self) -> None:
        """Raise CommunicationError if a parameter was converted or moved since the variant was made.

        The elements of its gradient could then lie in memory in another order than those of the parameter. Fused
        optimizers do not notice that and would compute wrong values.
        """
        for name, parameter, layout in self._known:
            if (now := Layout.of(parameter)) != layout:
                field = next(field for field in Layout._fields if getattr(now, field) != getattr(layout, field))
                raise CommunicationError(
                    f"parameter {name!r} was converted or moved after the variant was made: its {field} was "
                    f"{getattr(layout, field)} and is {getattr(now, field)}: convert the module first, then wrap it"
                )


class CommunicationClock:
    """Measures the time from :meth:`start` to :meth:`stop`.

    On a GPU both methods record an event on the current stream. The stream reaches the first event when the compute
    before it is done, and the second event when it has waited for the collectives. The time between them is exposed
    communication. The host's clock would only measure how long the launches take.
    """

    def __init__(self) -> None:
        self._begin: Any = 0.0
        self._end: Any = 0.0

    def start(self, device: torch.device) -> None:
        self._begin = self._end = _mark(device)

    def stop(self, device: torch.device) -> None:
        self._end = _mark(device)

    def seconds(self) -> float:
        """Return the last measured time in seconds; on a GPU, wait until its end is reached."""
        if isinstance(self._end, float):
            return float(self._end - self._begin)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000  # CUDA gives milliseconds


def _mark(device: torch.device) -> Any:
    """Return the host's time in seconds, or for a GPU an event on its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def add_hooks(listener: Any, parameters: Sequence[torch.nn.Parameter]) -> weakref.finalize[..., Any]:
    """Register hooks that report gradients and optimizer steps to ``listener``; return a function that removes them.

    The hooks call ``listener.on_gradient(index, parameter)`` when the gradient of ``parameters[index]`` is accumulated,
    and ``before_step`` and ``on_step`` before and after each step of any optimizer. They hold only a weak reference to
    the listener: when the listener is deleted the hooks are removed, and its module trains alone again.
    """
    on_gradient, before_step, on_step = map(
        weakref.WeakMethod, (listener.on_gradient, listener.before_step, listener.on_step)
    )
    handles = [
        _add_gradient_hook(parameter, partial(_report, on_gradient, index))
        for index, parameter in enumerate(parameters)
    ]
    _hook_all_optimizers()
    key = object()
    _before_steps[key], _after_steps[key] = before_step, on_step

    def remove() -> None:
        for handle in handles:
            handle.remove()
        del _before_steps[key], _after_steps[key]

    # Calls ``remove`` when the listener is deleted, or when it is called itself; not when the program ends.
    remover = weakref.finalize(listener, remove)
    remover.atexit = False
    return remover


_before_steps: dict[object, weakref.WeakMethod[Any]] = {}
"""Methods that are called before each step of any optimizer, by a key for each listener."""
_after_steps: dict[object, weakref.WeakMethod[Any]] = {}
"""Methods that are called after each step of any optimizer, by the same keys."""


@cache
def _hook_all_optimizers() -> None:
    """Register torch's hooks for all optimizers of the process, once, for all listeners.

    A hook for each listener would be removed when the listener is deleted. Where that happens within a step, by the
    garbage collection, torch raises an error, because it is going through its hooks.
    """
    register_optimizer_step_pre_hook(partial(_report_to_all, _before_steps))
    register_optimizer_step_post_hook(partial(_report_to_all, _after_steps))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission
def _report_to_all(
    methods: Mapping[object, weakref.WeakMethod[Any]], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    for method in list(methods.values()):
        _report(method, optimizer)


def _add_gradient_hook(parameter: torch.nn.Parameter, hook: Any) -> RemovableHandle:
    """Register a hook for when the gradient is accumulated; in a copy, the parameter may be frozen at the moment."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses a hook otherwise
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(is_trained)
    return handle


def _report(method: weakref.WeakMethod[Any], *arguments: Any) -> None:
    """Call the method, unless the object to which it belongs has been deleted."""
    if (reported := method()) is not None:
        reported(*arguments)


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether :func:`add_hooks` has registered a hook on the parameter for a listener that still exists."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(getattr(hook, "func", None) is _report and hook.args[0]() is not None for hook in hooks)


def has_hook_before(parameter: torch.Tensor) -> bool:
    """Whether a hook of the program sees the parameter's gradient before that of :func:`add_hooks` does."""
    first = next(iter((parameter._post_accumulate_grad_hooks or {}).values()), None)
    return getattr(first, "func", None) is not _report
