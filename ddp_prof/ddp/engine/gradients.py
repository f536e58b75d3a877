"""The gradients of one bucket and the buffer in which they travel.

A bucket of one parameter reduces the gradient where it lies: nothing is copied. A bucket of several copies each
gradient once, into its view of a flat buffer and divided on the way; the view then *is* the parameter's gradient, so
that nothing is copied back, and a gradient that autograd already accumulated in the view is only divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence


class GradientBucket:
    """Gradients that travel together.

    Attributes:
        index: Position in the order of launch.
        parameters: Owners of the gradients, in the order of the buffer.
        missing: How many of them have not been taken in this step.
    """

    def __init__(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        self.missing = len(self.parameters)
        self._alone = len(self.parameters) == 1
        self._buffer: torch.Tensor | None = None if self._alone else _flat_buffer(self.parameters)
        self._views: list[torch.Tensor | None] = [None] if self._alone else _views(self._buffer, self.parameters)
        self._taken = [False] * len(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def is_taken(self, slot: int) -> bool:
        """Whether the bucket already holds this parameter's gradient of this step."""
        return self._taken[slot]

    def take(self, slot: int, scale: float) -> bool:
        """Take one gradient over, times ``scale``; zeros where there is none. Says whether there was one.

        The parameter is left without a gradient: what autograd may still produce for it in this step must not be
        added to a buffer in flight.

        Raises:
            CommunicationError: The gradient is sparse.
        """
        parameter = self.parameters[slot]
        gradient = parameter.grad
        parameter.grad = None
        self._taken[slot] = True
        self.missing -= 1
        if gradient is not None and gradient.layout is not torch.strided:
            raise CommunicationError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be reduced here: "
                "build its layer with sparse=False"
            )
        if self._alone:
            self._views[slot] = _scaled_alone(parameter, gradient, scale)
        else:
            _scale_into(self._view(slot), gradient, scale)
        return gradient is not None

    def take_missing(self, scale: float) -> list[int]:
        """Take what no hook brought; returns the slots that had no gradient at all."""
        missing = [slot for slot, taken in enumerate(self._taken) if not taken]
        return [slot for slot in missing if not self.take(slot, scale)]

    def tensor(self) -> torch.Tensor:
        """What is reduced: one dense tensor."""
        return self._view(0) if self._buffer is None else self._buffer

    def give_back(self, slot: int, is_used: bool, late: torch.Tensor | None) -> None:
        """Make the reduced gradient the parameter's own again.

        Args:
            slot: Which parameter.
            is_used: ``False`` leaves a parameter without gradient that no rank used.
            late: Reduced contributions that came after the gradient was taken; added.
        """
        parameter = self.parameters[slot]
        gradient = self._view(slot)
        unsynchronized = parameter.grad  # of a backward under no_sync since the gradient was taken
        for addend in (late, unsynchronized):
            if addend is not None:
                gradient.add_(addend)
        if is_used or late is not None or unsynchronized is not None:
            parameter.grad = gradient

    def reset(self) -> None:
        """Be ready for the next step."""
        self.missing = len(self.parameters)
        self._taken = [False] * len(self.parameters)
        if self._alone:
            self._views = [None]  # the parameter alone keeps its gradient alive

    def _view(self, slot: int) -> torch.Tensor:
        view = self._views[slot]
        assert view is not None, "a gradient is taken before it is used"
        return view


def _flat_buffer(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    first = parameters[0]
    return torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=first.dtype, device=first.device)


def _views(buffer: torch.Tensor | None, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    assert buffer is not None
    parts = torch.split(buffer, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


def _scaled_alone(parameter: torch.nn.Parameter, gradient: torch.Tensor | None, scale: float) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
    return gradient.detach().contiguous().mul_(scale)


def _scale_into(view: torch.Tensor, gradient: torch.Tensor | None, scale: float) -> None:
    if gradient is None:
        view.zero_()
    elif gradient is view:  # autograd accumulated in the buffer
        view.mul_(scale)
    else:
        torch.mul(gradient.detach(), scale, out=view)
