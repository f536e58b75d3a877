"""The hooks of a variant: on its parameters, and on optimizers that step too early.

They hold the variant weakly and go with it, so that a module whose variant was dropped trains alone again.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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

    def on_step(self) -> None:
        """An optimizer has stepped on this listener's parameters."""


def add_hooks(
    listener: Listener, parameters: Sequence[torch.nn.Parameter], stepped: Sequence[torch.Tensor]
) -> weakref.finalize[[Sequence[RemovableHandle]], Any]:
    """Let ``listener`` hear of the gradients of ``parameters`` and of steps on ``stepped``; refuse these if unfinished.

    Returns:
        What removes the hooks when it is called, or by itself when the listener is gone.
    """
    owner = weakref.ref(listener)
    handles = [
        parameter.register_post_accumulate_grad_hook(partial(_hear, owner, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    ids = frozenset(map(id, stepped))
    handles.append(register_optimizer_step_pre_hook(partial(_check_finished, owner, ids)))
    handles.append(register_optimizer_step_post_hook(partial(_report_step, owner, ids)))
    return removal(listener, handles)


def removal(owner: object, handles: Sequence[RemovableHandle]) -> weakref.finalize[[Sequence[RemovableHandle]], Any]:
    """What removes hooks when it is called, or by itself when their owner is gone."""
    remover = weakref.finalize(owner, _remove, handles)
    remover.atexit = False
    return remover


def is_heard(parameter: torch.Tensor) -> bool:
    """Whether a listener hears of this parameter's gradients."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(getattr(hook, "func", None) is _hear and hook.args[0]() is not None for hook in hooks)


def _hear(owner: weakref.ref[Listener], index: int, _parameter: torch.Tensor) -> None:
    listener = owner()
    if listener is not None:
        listener.on_gradient(index)


def _check_finished(
    owner: weakref.ref[Listener], stepped: frozenset[int], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    listener = owner()
    if listener is not None and listener.is_unfinished and _steps_on(optimizer, stepped):
        raise CommunicationError(
            "optimizer.step() on gradients that are not synchronized: "
            "call finish_gradient_synchronization() after backward, before the step"
        )


def _report_step(
    owner: weakref.ref[Listener], stepped: frozenset[int], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    listener = owner()
    if listener is not None and _steps_on(optimizer, stepped):
        listener.on_step()


def _steps_on(optimizer: torch.optim.Optimizer, stepped: frozenset[int]) -> bool:
    return any(id(parameter) in stepped for group in optimizer.param_groups for parameter in group["params"])


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
