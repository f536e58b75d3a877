"""Changes the arguments of a program's ``DistributedDataParallel`` between two steps, in place.

``DistributedDataParallel.__init__`` is called again on the same object, so whoever holds the wrapper still holds it.
The module, its parameters, and what the optimizer knows of them are not touched. A new reducer takes the place of the
old one, which gives up its hooks on the parameters. Gradients that are views of old buckets hold the buckets' memory.

What ``__init__`` would forget is put back: the mode of training, hooks on the wrapper, the program's communication
hook. Parameters are equal on all ranks already, and are not sent.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

_KEPT = vars(torch.nn.Module()).keys() - {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
"""What a module has whether it wraps anything or not: the mode of training and its hooks."""


class Wrapped:
    """A ``DistributedDataParallel`` of the program, and how the program made it.

    Attributes:
        hook: State and function of the communication hook that the program registered.
    """

    def __init__(self, made: Any, init: Callable[..., None], given: inspect.BoundArguments) -> None:
        self._made, self._init, self._signature = weakref.ref(made), init, given.signature
        self._own = {name: value for name, value in given.arguments.items() if value is not made}
        self._self = next(iter(given.arguments))
        self.hook: tuple[Any, Any] | None = None

    def is_of(self, made: Any) -> bool:
        return self._made() is made

    def set(self, arguments: Mapping[str, Any]) -> None:
        """Make it with these arguments in place of the program's; call it on all ranks, between two steps.

        Nothing happens if the program has dropped it. Raises RuntimeError if that would change what is trained.
        """
        made = self._made()
        if made is None:
            return
        self._refuse()
        kept = {name: vars(made)[name] for name in _KEPT}
        is_synchronizing = made.require_backward_grad_sync
        made.reducer._remove_autograd_hooks()
        asked = {self._self: made, **self._own, **arguments, "init_sync": False}
        given = inspect.BoundArguments(self._signature, asked)
        with torch.enable_grad():
            self._init(*given.args, **given.kwargs)
        vars(made).update(kept)
        made.require_backward_grad_sync = is_synchronizing
        if self.hook:
            made.register_comm_hook(*self.hook)

    def _refuse(self) -> None:
        if self._own.get("mixed_precision") is not None or self._own.get("delay_all_reduce_named_params") is not None:
            raise RuntimeError("DistributedDataParallel with mixed_precision or delayed parameters cannot be set anew")
        if torch._dynamo.utils.counters["frames"]["total"]:
            raise RuntimeError("torch.compile has compiled the program for the buckets that it began with")
        if self.hook and self.hook[0] is not None and not isinstance(self.hook[0], torch.distributed.ProcessGroup):
            raise RuntimeError("the communication hook has a state, which may be of the buckets that it began with")
