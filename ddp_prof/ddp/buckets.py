"""The buffer in which the gradients of a bucket are reduced together.

:mod:`ddp_prof.bucket_assignment` decides which parameters a bucket holds.

Each gradient is divided by the number of ranks and copied once, into its view of the bucket's flat buffer (it is
"taken"). It is not divided in place, because autograd may give the gradients of two parameters the same storage, for
example in ``a[None] + b[None]``. After the reduction the view *is* the parameter's ``grad``: nothing is copied back. If
autograd later accumulates a gradient in the view, that gradient is divided there and not copied. A view has the strides
of its parameter (torch's gradient layout contract), because fused optimizers read parameter, gradient and state in the
order of memory.

From the copy until the end of the reduction, the parameter's ``grad`` is a placeholder, :class:`TakenGradient`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ddp_prof.errors import CommunicationError
from ddp_prof.variants import BYTES_PER_MB

_aten = torch.ops.aten


def cap_in_bytes(size_mb: float | Sequence[float] | None) -> float | list[float] | None:
    """Return one cap or a sequence of caps in bytes instead of MiB; ``None`` is no cap.

    Raises ValueError or TypeError for anything but positive numbers.
    """
    # A text is no sequence of caps: ``check_bucket_size`` refuses it.
    if size_mb is None or isinstance(size_mb, (int, float, str)):
        return None if size_mb is None else check_bucket_size(size_mb) * BYTES_PER_MB
    if not size_mb:
        raise ValueError("bucket_size_mb must name at least one cap")
    return [check_bucket_size(size) * BYTES_PER_MB for size in size_mb]


def check_bucket_size(size: float) -> float:
    """Return ``size``, a number of MiB; raise TypeError if it is no number, ValueError if it is not positive."""
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        raise TypeError(f"bucket_size_mb must be a number of MiB or None, got {size!r}")
    if not size > 0:
        raise ValueError(f"bucket_size_mb must be positive or None, got {size}")
    return size


class GradientBucket:
    """A group of parameters whose gradients are reduced together, with the flat buffer that is sent.

    A *slot* is the position of a parameter in the bucket. A gradient is *taken* once it has been copied to the buffer.

    Args:
        index: Position of the bucket in the order of launch.
        parameters: The parameters, all of one data type and device.
        multiple: The buffer's length is padded with zeros to a multiple of this.

    Attributes:
        views: For each slot, the part of the buffer that holds the parameter's gradient, in the parameter's shape.
        taken: For each slot, whether the gradient has been taken in this step.
        missing: How many gradients have not been taken in this step.
        refused: Parameters whose gradient of this step is sparse, and so cannot be reduced.
    """

    def __init__(self, index: int, parameters: Sequence[torch.nn.Parameter], multiple: int = 1) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        self._fence = StreamFence()  # orders the reduction after the copies into the buffer
        self._multiple = multiple
        self._allocate()
        self.reset()
        self._placeholders = [TakenGradient(parameter) for parameter in self.parameters]

    def take(self, slot: int, scale: float) -> bool:
        """Copy the gradient of a slot, times ``scale``, into the buffer; return whether there was a gradient.

        If the parameter has no gradient, the buffer gets negative zeros (-0.0). After the reduction they tell whether
        any rank had a gradient, as a sum is -0.0 only if each addend is -0.0: see :meth:`is_unused`. ``scale`` is one
        divided by the number of ranks.
        """
        if self.missing == len(self.parameters):  # the first gradient of a step
            self._restore_views()
        gradient = self._require_dense(slot, self.parameters[slot].grad)
        self._place(slot)
        self.taken[slot] = True
        self.missing -= 1
        view = self.views[slot]
        if gradient is None:
            in_reals(view).fill_(-0.0)
        else:
            if gradient is not view:  # if it is, autograd accumulated in the buffer
                hold_for_current_stream(gradient)
            # view = 0 + scale * gradient: a product alone could be -0.0, but 0 plus -0.0 is +0.0.
            torch.add(self._zero, gradient.detach() if gradient.requires_grad else gradient, alpha=scale, out=view)
        self._fence.note(self._buffer.device)
        return gradient is not None

    def has_news(self, slot: int) -> bool:
        """Whether there is a gradient to take, or the one that was taken was dropped or added to since."""
        gradient, placeholder = self.parameters[slot].grad, self._placeholders[slot]
        return gradient is not placeholder or placeholder.is_touched if self.taken[slot] else gradient is not None

    def take_late(self, slot: int) -> tuple[bool, torch.Tensor | None]:
        """Return whether ``zero_grad()`` dropped the taken gradient, and what autograd has added since it was taken.

        The second result is ``None`` if autograd has added nothing or a sparse gradient. The parameter gets its
        placeholder again, so that further changes are noticed.
        """
        is_dropped, late = self._changes_since_taken(slot)
        if is_dropped:
            self._dropped.add(slot)
        self._place(slot)
        return is_dropped, self._require_dense(slot, late)

    def add(self, slot: int, gradient: torch.Tensor | None, scale: float) -> None:
        """Add ``gradient`` times ``scale`` to a slot of this bucket, which holds late contributions.

        ``None`` sets the slot to zeros.
        """
        if gradient is None:
            self.views[slot].zero_()
        else:
            hold_for_current_stream(gradient)
            self.views[slot].add_(gradient.detach(), alpha=scale)
        self._fence.note(self._buffer.device)

    def is_dropped(self) -> bool:
        """Whether ``zero_grad()`` dropped all gradients that were taken in this step; true if none was taken."""
        return all(self._changes_since_taken(slot)[0] for slot, taken in enumerate(self.taken) if taken)

    def is_unused(self, slot: int) -> bool | None:
        """Whether no rank had a gradient for this slot: then all elements of the reduced gradient are -0.0.

        Call it after the reduction, for a slot without a gradient on this rank. On a GPU the host waits.
        """
        parts = in_reals(self.views[slot])
        return not bool(parts.any()) and bool(parts.signbit().all())

    def restore_memory(self) -> None:
        """Repair what a conversion of the module has moved, such as ``module.cpu()`` and back: gradients."""
        self._restore_views()

    def _restore_views(self) -> None:
        """Make new views of the buffer if the views, which are the parameters' gradients, have other memory."""
        if [view.data_ptr() for view in self.views] != self._addresses:
            self._find_views()

    def take_missing(self, scale: float) -> list[int]:
        """Take the gradients of the slots for which no hook was called; return those slots that have no gradient."""
        missing = [slot for slot, taken in enumerate(self.taken) if not taken]
        return [slot for slot in missing if not self.take(slot, scale)]

    def tensor(self) -> torch.Tensor:
        """Return the buffer to reduce; the current stream waits until the copies into it are done."""
        self._fence.wait(self._buffer.device)
        hold_for_current_stream(self._buffer)
        return self._buffer

    def restore_gradient(self, slot: int, is_used: bool, late: torch.Tensor | None) -> None:
        """Set the parameter's ``grad`` after the reduction.

        Args:
            slot: The parameter's position in the bucket.
            is_used: Whether any rank had a gradient. If not, and nothing is to be added, ``grad`` becomes ``None``.
            late: The reduced late contributions, which are added; ``None`` if there are none.
        """
        gradient, parameter, placeholder = self.views[slot], self.parameters[slot], self._placeholders[slot]
        if parameter.grad is placeholder and not placeholder.is_touched and late is None:  # the usual case
            parameter.grad = gradient if is_used else None
            return
        # What autograd added without a report by the hook comes from a backward under ``no_sync``: it stays local.
        is_dropped, unsynchronized = self._changes_since_taken(slot)
        # ``is_dropped``: after the last backward; ``_dropped``: between two backwards of this step.
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
        """Make the placeholder of a slot the parameter's ``grad``."""
        placeholder = self._placeholders[slot]
        if placeholder.is_touched:
            placeholder.reset()
        self.parameters[slot].grad = placeholder

    def _changes_since_taken(self, slot: int) -> tuple[bool, torch.Tensor | None]:
        """Return whether ``zero_grad()`` dropped the taken gradient, and what autograd added since, or ``None``."""
        gradient, placeholder = self.parameters[slot].grad, self._placeholders[slot]
        if gradient is placeholder:
            return placeholder.is_zeroed, placeholder.added
        # ``grad`` is another tensor or ``None``. Only with ``create_graph`` did autograd itself put a new tensor there,
        # maybe after zeros; otherwise ``zero_grad()`` set it to ``None``, and what is there now came later.
        return placeholder.is_zeroed or not placeholder.is_replaced, gradient

    def _require_dense(self, slot: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient, or ``None`` if it is sparse.

        A sparse gradient is noted in :attr:`refused`. An error at this place would leave other ranks waiting.
        """
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
        self._addresses = [view.data_ptr() for view in self.views]  # to notice that a view was given other memory

    def reset(self) -> None:
        """Begin a step: no gradient is taken. The buffer stays as it is: its views are the parameters' gradients."""
        self.missing = len(self.parameters)
        self.refused: list[torch.nn.Parameter] = []
        self.taken = [False] * len(self.parameters)
        self._dropped: set[int] = set()  # slots whose taken gradient ``zero_grad()`` dropped before a late contribution


def in_reals(tensor: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat_buffer(parameters: Sequence[torch.nn.Parameter], multiple: int = 1) -> torch.Tensor:
    """Return a one-dimensional tensor of zeros with room for all parameters, in their data type and on their device.

    Its length is rounded up to a multiple of ``multiple``.
    """
    first = parameters[0]
    numel = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(-(-numel // multiple) * multiple, dtype=first.dtype, device=first.device)  # -(-a // b) rounds up


def flat_views(buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return one view of the buffer for each parameter, one after the other, with the parameter's shape and strides.

    They share its memory, but are no views to autograd, which refuses ``grad.detach_()`` on such, as many programs call
    it before they zero a gradient.
    """
    ends = itertools.accumulate(parameter.numel() for parameter in parameters)  # where each view ends in the buffer
    memory = buffer.untyped_storage()
    return [
        buffer.new_empty(0).set_(memory, end - parameter.numel(), parameter.shape, gradient_strides(parameter))
        for parameter, end in zip(parameters, ends, strict=True)
    ]


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if it is dense and does not overlap itself, else row-major ones."""
    # ``preserve_format`` keeps the strides only of such a tensor. On the meta device nothing is allocated.
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    if dense.stride() == parameter.stride():
        return dense.stride()
    return torch.empty(parameter.shape, device="meta").stride()


_NOT_SYNCHRONIZED = (
    "a gradient that is not synchronized: call finish_gradient_synchronization() after backward, before it"
)
_HELD = (
    "a gradient of which each rank keeps a part: use those of variant.optimizer_parameters(), and "
    "variant.clip_grad_norm_() to clip them"
)


class TakenGradient(torch.Tensor):
    """Placeholder for a parameter's ``grad`` while its gradient is being reduced.

    The gradient is in a bucket that is being reduced, so it must not be read or changed. If ``grad`` were ``None``, a
    call of ``zero_grad()`` in the meantime would not be noticed. So ``grad`` is a tensor without memory that notices
    operations on it:

        ``grad`` set to None, or zeroed   done by ``zero_grad()``: the taken gradient is dropped
        something added to ``grad``       done by autograd in a second backward: a late contribution; it is kept here
        a conversion of the module        makes another placeholder, if the gradient is held in parts (``is_held``)
        any other operation               would read a gradient that is not there: CommunicationError

    Attributes:
        is_held: Whether it stands for a gradient that was reduced, and of which each rank keeps a part.
        is_touched: Whether it was zeroed or added to since :meth:`reset`.
        added: The sum of what autograd added; ``None`` if it added nothing.
        is_zeroed: Whether it was zeroed, as by ``zero_grad(set_to_none=False)``.
        is_replaced: Whether autograd set ``grad`` to a new tensor, the sum, as it does with ``create_graph``.
    """

    is_held = False
    is_touched = False
    added: torch.Tensor | None = None
    is_zeroed = False
    is_replaced = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in torch's subclasses

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> TakenGradient:
        return cls._like(parameter, parameter.device)

    @classmethod
    def _like(cls, tensor: torch.Tensor, device: torch.device) -> TakenGradient:
        """Return a placeholder with the shape, strides and data type of ``tensor``, on ``device``."""
        made: TakenGradient = cls._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=device
        )
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return (
            f"a gradient of shape {tuple(self.shape)} that is {'in parts' if self.is_held else 'not synchronized yet'}"
        )

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Take another placeholder, as a conversion of the module makes; raise CommunicationError for values."""
        if not isinstance(values, TakenGradient):
            raise CommunicationError(f"data = ... of {_HELD if self.is_held else _NOT_SYNCHRONIZED}")
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]  # torch's stub has no descriptor

    def reset(self) -> None:
        self.is_touched, self.added, self.is_zeroed, self.is_replaced = False, None, False, False

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Note that a placeholder is zeroed or added to; raise CommunicationError for any other operation.

        Torch calls it for each operation on a placeholder. ``function`` is the operator, ``arguments[0]`` the tensor
        that it changes, or the list of tensors of an operator for several tensors (``_foreach_zero_``).
        """
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
            if function is _aten.add_.Tensor:  # in place: the placeholder stays the parameter's ``grad``
                return first
            first.is_replaced = True  # with ``create_graph`` autograd makes the returned tensor the ``grad``
            return first.added.clone()
        # The operator may take the placeholder as any of its arguments.
        taken = next((each for each in tree_leaves((arguments, keywords)) if isinstance(each, cls)), None)
        if taken is None or not taken.is_held:
            raise CommunicationError(f"{function} on {_NOT_SYNCHRONIZED}")
        if taken is first and function in (_aten._to_copy.default, _aten.clone.default):
            options = dict(keywords or {})
            device = torch.device(options.pop("device", None) or taken.device)
            bare = torch.empty_strided(taken.shape, taken.stride(), dtype=taken.dtype, device="meta")
            converted = cls._like(function(bare, **options), device)
            converted.is_held = True  # where a module's tensors are swapped, it takes the place of the first one
            return converted
        raise CommunicationError(f"{function} on {_HELD}")

    def _zero(self) -> TakenGradient:
        self.reset()
        self.is_touched = self.is_zeroed = True
        return self


class StreamFence:
    """Lets a collective wait for copies that were queued on several CUDA streams.

    Autograd runs the hook of a parameter on the stream of its layer. A collective waits only for the stream that is
    current at its launch, which is the stream of the bucket's last gradient. So each stream with copies records an
    event, and the current stream waits for these events before the launch. On a CPU nothing is done.
    """

    def __init__(self) -> None:
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def note(self, device: torch.device) -> None:
        """Record an event on the current stream of ``device``, after the work that has been queued on it."""
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
    """Keep a tensor's memory from being used again before the current stream is done with it.

    Without this torch's allocator orders the reuse by the stream that allocated the tensor only.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
