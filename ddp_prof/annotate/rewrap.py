"""Changes the arguments of a program's ``DistributedDataParallel`` between two steps, in place.

``DistributedDataParallel.__init__`` is called again on the same object, so the program's references to the wrapper stay
valid. The module, its parameters and the optimizer's state are not touched. ``__init__`` makes a new reducer (DDP's
object that fills and reduces the buckets); the hooks of the old one are removed from the parameters. Gradients that are
views into old buckets keep the memory of these buckets. The new reducer has the parameters that required gradients when
the program made its wrapper, not those that do so between these two steps: a GAN's critic may be frozen then.

What ``__init__`` would reset is put back: whether the module trains or evaluates, hooks on the wrapper, the program's
communication hook. The parameters are equal on all ranks already, so they are not broadcast again.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

_KEPT = vars(torch.nn.Module()).keys() - {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
"""Names of the attributes that ``__init__`` of any module sets, but for parameters, buffers and submodules.

They are the mode (train or eval) and the hooks, which are put back after the second ``__init__``."""


class Wrapped:
    """A ``DistributedDataParallel`` of the program, and the arguments with which the program made it.

    Args:
        made: The ``DistributedDataParallel``; only a weak reference is kept.
        init: torch's ``DistributedDataParallel.__init__``.
        given: The program's arguments for it, ``self`` included.

    Attributes:
        hook: State and function of the communication hook that the program registered.
    """

    def __init__(self, made: Any, init: Callable[..., None], given: inspect.BoundArguments) -> None:
        """Keep the DDP and the program's arguments, for :meth:`set`; the class describes the parameters."""
        self._made, self._init, self._signature = weakref.ref(made), init, given.signature
        self._own = {name: value for name, value in given.arguments.items() if value is not made}  # without self
        self._self = next(iter(given.arguments))  # name of the first parameter, "self"
        parameters = given.arguments["module"].named_parameters()
        self._trained = {name for name, parameter in parameters if parameter.requires_grad}
        self.hook: tuple[Any, Any] | None = None

    def is_of(self, made: Any) -> bool:
        """Return whether this describes the ``DistributedDataParallel`` ``made``."""
        return self._made() is made

    def set(self, arguments: Mapping[str, Any]) -> None:
        """Initialize the DDP again, with ``arguments`` in place of the program's arguments of the same names.

        Call it on all ranks, between two steps. It does nothing if the program has dropped the DDP.

        Raises:
            RuntimeError: This DDP cannot be initialized again without a change to what is trained.
        """
        made = self._made()
        if made is None:
            return
        self._refuse()
        # What __init__ would reset.
        kept = {name: vars(made)[name] for name in _KEPT}
        is_synchronizing = made.require_backward_grad_sync
        made.reducer._remove_autograd_hooks()
        # Initialize with the program's arguments, some replaced; without sending the parameters.
        asked = {self._self: made, **self._own, **arguments, "init_sync": False}
        given = inspect.BoundArguments(self._signature, asked)
        trained = {parameter: parameter.requires_grad for parameter in made.module.parameters()}
        for name, parameter in made.module.named_parameters():
            parameter.requires_grad_(name in self._trained)
        with torch.enable_grad():
            self._init(*given.args, **given.kwargs)
        # Put back what it has reset.
        for parameter, is_trained in trained.items():
            parameter.requires_grad_(is_trained)
        vars(made).update(kept)
        made.require_backward_grad_sync = is_synchronizing
        if self.hook:
            made.register_comm_hook(*self.hook)

    def _refuse(self) -> None:
        """Raise RuntimeError if the DDP cannot be initialized again, with the reason."""
        if self._own.get("mixed_precision") is not None or self._own.get("delay_all_reduce_named_params") is not None:
            why = "it has mixed_precision or delayed parameters"
        elif torch._dynamo.utils.counters["frames"]["total"]:
            why = "torch.compile has compiled code, perhaps for its first buckets"
        elif self.hook and self.hook[0] is not None and not isinstance(self.hook[0], torch.distributed.ProcessGroup):
            why = "its communication hook has a state, perhaps of its first buckets"
        else:
            return
        cannot = "this DistributedDataParallel cannot change its settings within one run"
        raise RuntimeError(f"{cannot}, because {why}: leave out --in-process")
