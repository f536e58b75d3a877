"""What stands at a parameter's ``grad`` while its gradient is on its way.

The gradient itself lies in a bucket that is being reduced, where nobody may read or change it. With nothing at ``grad``
nobody could tell that ``zero_grad()`` was called meanwhile. So a tensor without memory stands there, which sees what is
done to it:

    set to None, or zeroed     by ``zero_grad()``: what was taken is not wanted any more
    added to                   by autograd in a second backward: a late contribution, which it keeps
    anything else              would read a gradient that is not there yet: an error
"""

from __future__ import annotations

from typing import Any

import torch

from ddp_prof.errors import CommunicationError

_aten = torch.ops.aten


class TakenGradient(torch.Tensor):
    """Stands for the gradient of ``parameter``.

    Attributes:
        is_touched: Whether any of this was done to it.
        added: The sum of what autograd added.
        is_zeroed: Whether ``zero_grad(set_to_none=False)`` zeroed it.
        is_replaced: Whether autograd put the sum in its place, as it does where it makes a graph of backward.
    """

    is_touched = False
    added: torch.Tensor | None = None
    is_zeroed = False
    is_replaced = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own do

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> TakenGradient:
        made: TakenGradient = cls._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"a gradient of shape {tuple(self.shape)} that is not synchronized yet"

    def reset(self) -> None:
        """Forget what was done to it."""
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
