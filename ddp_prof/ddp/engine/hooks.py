"""The hooks of a variant: on its parameters, and on optimizers that step too early.

They hold the variant weakly and go with it, so that a module whose variant was dropped trains alone again.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """What hears of gradients and optimizers."""

    is_unfinished: bool

    def on_gradient(self, index: int) -> None:
        """Backward has finished the gradient of the parameter at this position."""


def add_hooks(
    listener: Listener, parameters: Sequence[torch.nn.Parameter], stepped: Sequence[torch.Tensor]
) -> weakref.finalize[[list[RemovableHandle]], Any]:
    """Let ``listener`` hear of the gradients of ``parameters``, and refuse a step on ``stepped`` while unfinished.

    Returns:
        What removes the hooks when it is called, or by itself when the listener is gone.
    """
    owner = weakref.ref(listener)
    handles = [
        parameter.register_post_accumulate_grad_hook(partial(_hear, owner, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    handles.append(register_optimizer_step_pre_hook(partial(_check_finished, owner, {id(own) for own in stepped})))
    remover = weakref.finalize(listener, _remove, handles)
    remover.atexit = False
    return remover


def _hear(owner: weakref.ref[Listener], index: int, _parameter: torch.Tensor) -> None:
    listener = owner()
    if listener is not None:
        listener.on_gradient(index)


def _check_finished(
    owner: weakref.ref[Listener], stepped: set[int], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    listener = owner()
    if listener is None or not listener.is_unfinished:
        return
    if any(id(parameter) in stepped for group in optimizer.param_groups for parameter in group["params"]):
        raise CommunicationError(
            "optimizer.step() on gradients that are not synchronized: "
            "call finish_gradient_synchronization() after backward, before the step"
        )


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
