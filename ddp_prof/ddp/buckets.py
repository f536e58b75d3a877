"""The buffer in which the gradients of a bucket are reduced; see :mod:`ddp_prof.bucket_assignment` for what is in it.

Each gradient is divided and copied once, into its view of the bucket's flat buffer. It is not divided in place, because
autograd may give the gradients of two parameters the same storage, for example in ``a[None] + b[None]``. The view then
*is* the parameter's gradient: nothing is copied back, and a gradient that autograd accumulated in the view is only
divided. A view has the strides of its parameter (torch's gradient layout contract), because fused optimizers read
parameter, gradient and state in the order of memory.

From the copy until the end of the reduction, the parameter's ``grad`` is a :class:`TakenGradient`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ddp_prof.errors import CommunicationError
from ddp_prof.variants import BYTES_PER_MB

_aten = torch.ops.aten


def cap_in_bytes(size_mb: float | Sequence[float] | None) -> float | list[float] | None:
    if size_mb is None or isinstance(size_mb, (int, float, str)):
        return None if size_mb is None else check_bucket_size(size_mb) * BYTES_PER_MB
    if not size_mb:
        raise ValueError("bucket_size_mb must name at least one cap")
    return [check_bucket_size(size) * BYTES_PER_MB for size in size_mb]


def check_bucket_size(size: float) -> float:
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        raise TypeError(f"bucket_size_mb must be a number of MiB or None, got {size!r}")
    if not size > 0:
        raise ValueError(f"bucket_size_mb must be positive or None, got {size}")
    return size


class GradientBucket:
    """Gradients that are reduced together.

    Attributes:
        index: Position in the order of launch.
        views: The gradients of ``parameters`` in the buffer, in the same order.
        taken: For each of them, whether it has been taken in this step.
        missing: How many have not been taken.
        refused: Parameters whose gradient of this step is sparse.
    """

    def __init__(self, index: int, parameters: Sequence[torch.nn.Parameter], multiple: int = 1) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        self._fence = StreamFence()
        self._multiple = multiple
        self._allocate()
        self.reset()
        self._placeholders = [TakenGradient(parameter) for parameter in self.parameters]

    def take(self, slot: int, scale: float) -> bool:
        """Copy one gradient, times ``scale``, or zeros if there is none; return whether there was one.

        The zeros are negative. A sum of zeros is negative only if all of them are: see :meth:`is_unused`.
        """
        gradient = self._require_dense(slot, self.parameters[slot].grad)
        self._place(slot)
        self.taken[slot] = True
        self.missing -= 1
        view = self.views[slot]
        if gradient is None:
            in_reals(view).fill_(-0.0)
        else:  # zero plus, so that none of the results is -0.0
            if gradient is not view:  # else autograd accumulated in the buffer
                hold_for_current_stream(gradient)
            torch.add(self._zero, gradient.detach() if gradient.requires_grad else gradient, alpha=scale, out=view)
        self._fence.note(self._buffer.device)
        return gradient is not None

    def take_late(self, slot: int) -> tuple[bool, torch.Tensor | None]:
        """Return whether ``zero_grad()`` dropped the taken gradient, and what autograd has added since it was taken."""
        is_dropped, late = self._changes_since_taken(slot)
        if is_dropped:
            self._dropped.add(slot)
        self._place(slot)
        return is_dropped, self._require_dense(slot, late)

    def add(self, slot: int, gradient: torch.Tensor | None, scale: float) -> None:
        """Add ``gradient`` times ``scale`` to this bucket of late contributions; ``None`` sets it to zeros."""
        if gradient is None:
            self.views[slot].zero_()
        else:
            hold_for_current_stream(gradient)
            self.views[slot].add_(gradient.detach(), alpha=scale)
        self._fence.note(self._buffer.device)

    def is_dropped(self) -> bool:
        """Whether ``zero_grad()`` dropped all gradients that were taken, and there are no new ones."""
        return all(self._changes_since_taken(slot)[0] for slot, taken in enumerate(self.taken) if taken)

    def is_unused(self, slot: int) -> bool:
        """Whether no rank had a gradient of this parameter, which this rank had none of; after the reduction.

        On a GPU the host waits.
        """
        parts = in_reals(self.views[slot])
        return not bool(parts.any()) and bool(parts.signbit().all())

    def restore_memory(self) -> None:
        """Make the views parts of the buffer again, which they are not after ``module.cpu()`` and back.

        Conversions of a module give its gradients, which are the views, other memory.
        """
        if [view.data_ptr() for view in self.views] != self._addresses:
            self._find_views()

    def take_missing(self, scale: float) -> list[int]:
        """Take the gradients for which no hook was called; return the slots without a gradient."""
        missing = [slot for slot, taken in enumerate(self.taken) if not taken]
        return [slot for slot in missing if not self.take(slot, scale)]

    def tensor(self) -> torch.Tensor:
        """Return the buffer to reduce, for use on the current stream."""
        self._fence.wait(self._buffer.device)
        hold_for_current_stream(self._buffer)
        return self._buffer

    def restore_gradient(self, slot: int, is_used: bool, late: torch.Tensor | None) -> None:
        """Set the parameter's ``grad`` to the reduced gradient plus ``late``, or to ``None`` if no rank used it."""
        gradient, parameter, placeholder = self.views[slot], self.parameters[slot], self._placeholders[slot]
        if parameter.grad is placeholder and not placeholder.is_touched and late is None:  # the usual case
            parameter.grad = gradient if is_used else None
            return
        is_dropped, unsynchronized = self._changes_since_taken(slot)  # the latter by a backward under no_sync
        if is_dropped or slot in self._dropped:
            gradient.zero_()
            is_used = is_dropped and placeholder.is_zeroed
            late = None if is_dropped else late
        for addend in (late, unsynchronized):
            if addend is not None:
                hold_for_current_stream(addend)
                gradient.add_(addend)
        has_gradient = is_used or late is not None or unsynchronized is not None
        parameter.grad = gradient if has_gradient else None

    def _place(self, slot: int) -> None:
        placeholder = self._placeholders[slot]
        if placeholder.is_touched:
            placeholder.reset()
        self.parameters[slot].grad = placeholder

    def _changes_since_taken(self, slot: int) -> tuple[bool, torch.Tensor | None]:
        """Return whether ``zero_grad()`` dropped the taken gradient, and what autograd has added since."""
        gradient, placeholder = self.parameters[slot].grad, self._placeholders[slot]
        if gradient is placeholder:
            return placeholder.is_zeroed, placeholder.added
        return not placeholder.is_replaced, gradient

    def _require_dense(self, slot: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``None`` for a sparse gradient, and note it: an error here would leave other ranks waiting."""
        if gradient is not None and gradient.layout is not torch.strided:
            self.refused.append(self.parameters[slot])
            return None
        return gradient

    def _allocate(self) -> None:
        self._buffer = flat_buffer(self.parameters, self._multiple)
        self._zero = self._buffer.new_zeros(())
        self._find_views()

    def _find_views(self) -> None:
        self.views = flat_views(self._buffer, self.parameters)
        self._addresses = [view.data_ptr() for view in self.views]

    def reset(self) -> None:
        """Forget which gradients were taken; the buffer stays, because its views are the parameters' gradients."""
        self.missing = len(self.parameters)
        self.refused: list[torch.nn.Parameter] = []
        self.taken = [False] * len(self.parameters)
        self._dropped: set[int] = set()


def in_reals(tensor: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat_buffer(parameters: Sequence[torch.nn.Parameter], multiple: int = 1) -> torch.Tensor:
    """Return zeros for all parameters, of one data type and device; the length is a multiple of ``multiple``."""
    first = parameters[0]
    numel = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(-(-numel // multiple) * multiple, dtype=first.dtype, device=first.device)


def flat_views(buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return one view of the buffer for each parameter, one after the other, with the parameter's shape and strides."""
    ends = itertools.accumulate(parameter.numel() for parameter in parameters)
    return [
        buffer.as_strided(parameter.shape, gradient_strides(parameter), end - parameter.numel())
        for parameter, end in zip(parameters, ends, strict=True)
    ]


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if it is dense and does not overlap itself, else row-major ones."""
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    if dense.stride() == parameter.stride():
        return dense.stride()
    return torch.empty(parameter.shape, device="meta").stride()


class TakenGradient(torch.Tensor):
    """Placeholder at a parameter's ``grad`` while its gradient is being reduced.

    The gradient is in a bucket that is being reduced, so it must not be read or changed. If ``grad`` were ``None``, a
    call of ``zero_grad()`` in the meantime would not be noticed. So ``grad`` is a tensor without memory that notices
    operations on it:

        set to None, or zeroed     by ``zero_grad()``: the taken gradient is dropped
        added to                   by autograd in a second backward: a late contribution, which it keeps
        anything else              would read a gradient that is not there yet: an error

    Attributes:
        is_touched: Whether it was zeroed or added to.
        added: The sum of what autograd added.
        is_replaced: Whether autograd set ``grad`` to the sum, as it does with ``create_graph``.
    """

    is_touched = False
    added: torch.Tensor | None = None
    is_zeroed = False
    is_replaced = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in torch's subclasses

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> TakenGradient:
        made: TakenGradient = cls._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"a gradient of shape {tuple(self.shape)} that is not synchronized yet"

    def reset(self) -> None:
        self.is_touched, self.added, self.is_zeroed, self.is_replaced = False, None, False, False

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        first = arguments[0]
        if function is _aten.zero_.default:
            return first._zero()
        if function is _aten._foreach_zero_.default:
            for tensor in first:
                tensor._zero() if isinstance(tensor, TakenGradient) else tensor.zero_()
            return None
        if function in (_aten.add_.Tensor, _aten.add.Tensor) and isinstance(first, TakenGradient) and not keywords:
            first.is_touched = True
            first.added = arguments[1].clone() if first.added is None else first.added + arguments[1]
            if function is _aten.add_.Tensor:
                return first
            first.is_replaced = True
            return first.added.clone()
        raise CommunicationError(
            f"{function} on a gradient that is not synchronized: "
            "call finish_gradient_synchronization() after backward, before it"
        )

    def _zero(self) -> TakenGradient:
        self.reset()
        self.is_touched = self.is_zeroed = True
        return self


class StreamFence:
    """Orders a launch after work that was queued on several CUDA streams.

    Autograd runs the hook of a parameter on the stream of its layer. A collective waits only for the stream that is
    current at its launch, which is the stream of the bucket's last gradient: copies on other streams need events.
    """

    def __init__(self) -> None:
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def note(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if stream not in self._events:
            self._events[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's omission
        self._events[stream].record(stream)

    def wait(self, device: torch.device) -> None:
        """Make the current stream of ``device`` wait for the events on other streams; the host does not wait."""
        if not self._events:
            return
        current = torch.cuda.current_stream(device)
        for stream, event in self._events.items():
            if stream != current:
                current.wait_event(event)


def hold_for_current_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of a tensor of another stream until the current stream has used it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
