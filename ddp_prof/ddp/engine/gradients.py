"""The gradients of one bucket and the buffer in which they travel.

Each gradient is copied once, into its view of the bucket's flat buffer and divided on the way. It is never divided
where it lies: autograd may give the gradients of two parameters one storage, as of ``a[None] + b[None]``. The view
then *is* the parameter's gradient, so nothing is copied back, and a gradient that autograd accumulated in the view is
only divided. A view has the strides of its parameter (torch's gradient layout contract): fused optimizers read
parameter, gradient and state in the order of memory.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from ddp_prof.ddp.engine.streams import StreamFence

if TYPE_CHECKING:
    from collections.abc import Sequence


class GradientBucket:
    """Gradients that travel together.

    Args:
        index: Position in the order of launch.
        parameters: Owners of the gradients.
        multiple: The buffer's length is padded with zeros to a multiple of this.

    Attributes:
        index: Position in the order of launch.
        parameters: Owners of the gradients, in the order of the buffer.
        views: The gradients in the buffer, in the same order.
        missing: How many of them have not been taken in this step.
        refused: Those whose gradient of this step is sparse.
    """

    def __init__(self, index: int, parameters: Sequence[torch.nn.Parameter], multiple: int = 1) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        self.missing = len(self.parameters)
        self.refused: list[torch.nn.Parameter] = []
        self._fence = StreamFence()
        self._multiple = multiple
        self._allocate()
        self._taken = [False] * len(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def is_taken(self, slot: int) -> bool:
        """Whether the bucket already holds this parameter's gradient of this step."""
        return self._taken[slot]

    def take(self, slot: int, scale: float) -> bool:
        """Take one gradient over, times ``scale``; zeros where there is none. Says whether there was one.

        The parameter is left without a gradient: what autograd may still produce for it in this step must not be
        added to a buffer in flight. A sparse gradient counts as none and is noted in :attr:`refused`: to raise here
        would leave the other ranks waiting for this bucket.
        """
        parameter = self.parameters[slot]
        gradient = parameter.grad
        parameter.grad = None
        self._taken[slot] = True
        self.missing -= 1
        if gradient is not None and gradient.layout is not torch.strided:
            self.refused.append(parameter)
            gradient = None
        _scale_into(self.views[slot], gradient, scale)
        self._fence.note(parameter.device)
        return gradient is not None

    def take_missing(self, scale: float) -> list[int]:
        """Take what no hook brought; returns the slots that had no gradient at all."""
        missing = [slot for slot, taken in enumerate(self._taken) if not taken]
        return [slot for slot in missing if not self.take(slot, scale)]

    def tensor(self) -> torch.Tensor:
        """What is reduced: one dense tensor, for use on the current stream."""
        self._fence.wait(self._buffer.device)
        return self._buffer

    def give_back(self, slot: int, is_used: bool, late: torch.Tensor | None) -> None:
        """Make the reduced gradient the parameter's own again.

        Args:
            slot: Which parameter.
            is_used: ``False`` leaves a parameter without gradient that no rank used.
            late: Reduced contributions that came after the gradient was taken; added.
        """
        parameter = self.parameters[slot]
        gradient = self.views[slot]
        unsynchronized = parameter.grad  # of a backward under no_sync since the gradient was taken
        for addend in (late, unsynchronized):
            if addend is not None:
                gradient.add_(addend)
        if is_used or late is not None or unsynchronized is not None:
            parameter.grad = gradient

    def _allocate(self) -> None:
        self._buffer = flat_buffer(self.parameters, self._multiple)
        self.views = flat_views(self._buffer, self.parameters)

    def reset(self) -> None:
        """Forget which gradients were taken; the buffer stays, since its views are the parameters' gradients."""
        self.missing = len(self.parameters)
        self._taken = [False] * len(self.parameters)
        self.refused.clear()


def flat_buffer(parameters: Sequence[torch.nn.Parameter], multiple: int = 1) -> torch.Tensor:
    """Zeros for all parameters, which are of one data type and device; the length is a multiple of ``multiple``."""
    first = parameters[0]
    numel = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(-(-numel // multiple) * multiple, dtype=first.dtype, device=first.device)


def flat_views(buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """One view of the buffer for each parameter, one behind the other, each with its parameter's shape and strides."""
    ends = itertools.accumulate(parameter.numel() for parameter in parameters)
    return [
        buffer.as_strided(parameter.shape, gradient_strides(parameter), end - parameter.numel())
        for parameter, end in zip(parameters, ends, strict=True)
    ]


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides where it is dense and does not overlap itself, else row-major ones."""
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    if dense.stride() == parameter.stride():
        return dense.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _scale_into(view: torch.Tensor, gradient: torch.Tensor | None, scale: float) -> None:
    if gradient is None:
        view.zero_()
    elif gradient is view:  # autograd accumulated in the buffer
        view.mul_(scale)
    else:
        torch.mul(gradient.detach(), scale, out=view)
