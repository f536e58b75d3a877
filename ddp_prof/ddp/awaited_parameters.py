"""Parameters of a module that wait for their all-gather when they are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ddp_prof import annotate
from ddp_prof.ddp.collective import InFlight

Parameter = torch.nn.Parameter | None


class Gathers:
    """The all-gathers in flight, at most one for each bucket."""

    def __init__(self) -> None:
        self.is_pending = False  # a bool, because ``torch.compile`` compiles once for each value
        self._in_flight: dict[int, InFlight] = {}  # by index of the bucket
        self._waited: set[tuple[int, torch.cuda.Stream | None]] = set()  # buckets with the streams that have waited
        self._parameters: dict[int, Sequence[torch.nn.Parameter]] = {}  # of each bucket in flight

    def add(self, bucket: int, parameters: Sequence[torch.nn.Parameter], flight: InFlight) -> None:
        """Keep the all-gather that was launched for a bucket; its parameters wait for it when they are read."""
        self._in_flight[bucket] = flight
        self._parameters[bucket] = parameters
        for parameter in parameters:
            _await(parameter, partial(self.wait, [bucket]))
        self.is_pending = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission, as of is_initialized
    def wait(self, buckets: Iterable[int]) -> None:
        """Wait until the parameters of these buckets may be read by the host, on a GPU by the current stream."""
        # Each stream that reads a bucket has to wait.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        due = [bucket for bucket in buckets if bucket in self._in_flight and (bucket, stream) not in self._waited]
        if not due:
            return
        with annotate.synchronize():  # also within forward: gloo blocks the host here
            for bucket in due:
                self._in_flight[bucket].wait()
                self._waited.add((bucket, stream))
                for parameter in self._parameters[bucket]:
                    _await(parameter, None)

    def settle(self) -> None:
        """Wait for all all-gathers in flight and forget them."""
        self.wait(list(self._in_flight))
        self._in_flight.clear()
        self._waited.clear()
        self.is_pending = False


class Awaited:
    """Part of a parameter's class until a host thread has waited for its all-gather: any operation on it waits.

    A program may have parameters in a list of its own, as averages of weights do (``torch_ema``).
    """

    plain: type[torch.nn.Parameter]
    """The parameter's own class."""

    def wait(self) -> None:
        """Wait for the all-gather; each parameter has its own, until another thread has waited."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.wait()
        return deepcopy(self, memo)  # of its own class by now, as what is copied is

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.wait()
        return self.__reduce_ex__(protocol)

    def as_subclass(self, kind: Any) -> Any:
        """Wait before: torch asks no ``__torch_function__`` about it."""
        self.wait()
        return self.as_subclass(kind)

    def detach(self) -> Any:
        """Wait before; for ``nn.Parameter(parameter)``, which expects of a class of its own this class again."""
        self.wait()
        detached = self.detach()
        is_for_parameter = sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__
        return detached.as_subclass(type(self)) if is_for_parameter else detached

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        for each in tree_leaves((arguments, keywords)):
            if isinstance(each, Awaited):
                each.wait()
        with torch._C.DisableTorchFunctionSubclass():  # of what is being waited for on another thread
            return function(*arguments, **(keywords or {}))


@cache
def _waiting_class(plain: type[torch.nn.Parameter]) -> Any:
    """Return a class of parameters that wait, which has the name of their own class."""
    kind: Any = type(plain)
    return kind(plain.__name__, (Awaited, plain), {"plain": plain, "__module__": plain.__module__})


def _await(parameter: torch.nn.Parameter, wait: Callable[[], None] | None) -> None:
    """Let operations on a parameter call ``wait`` before, or with ``None`` no longer."""
    if isinstance(parameter, Awaited):
        parameter.__class__ = parameter.plain  # type: ignore[assignment]  # no more of Awaited
        del parameter.wait
    if wait is not None:
        parameter.wait = wait  # type: ignore[attr-defined]
        parameter.__class__ = _waiting_class(type(parameter))


class AwaitedParameters(dict[str, Parameter]):
    """The dictionary ``_parameters`` of one module; reading a parameter waits for its all-gather.

    Attributes, ``parameters()``, ``state_dict()``, ``load_state_dict()``, ``to()``, copies and pickles of a module all
    use this dictionary. Hooks on layers would not suffice: attention reads ``out_proj.weight`` without a call of
    ``out_proj``, and a ``ParameterList`` is never called. A copy or pickle of it is a plain dictionary.

    Args:
        parameters: The module's parameters by name.
        bucket_of: The index of the bucket of each trained parameter, by the parameter's ``id``.
        gathers: The all-gathers in flight.
    """

    def __init__(self, parameters: Mapping[str, Parameter], bucket_of: Mapping[int, int], gathers: Gathers) -> None:
        super().__init__(parameters)
        self._gathers, self._bucket_of = gathers, bucket_of
        self._buckets = {name: bucket_of[id(each)] for name, each in parameters.items() if id(each) in bucket_of}

    def __setitem__(self, name: str, parameter: Parameter) -> None:
        """Set a parameter: one of another bucket, as when a weight is tied, or one of none."""
        self._buckets.pop(name, None)
        if id(parameter) in self._bucket_of:
            self._buckets[name] = self._bucket_of[id(parameter)]
        super().__setitem__(name, parameter)

    def __getitem__(self, name: str) -> Parameter:
        if self._gathers.is_pending and name in self._buckets:
            self._gathers.wait([self._buckets[name]])
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # that would be this method

    def items(self) -> Any:
        self._wait_for_all()
        return super().items()

    def values(self) -> Any:
        self._wait_for_all()
        return super().values()

    def pop(self, name: str, *default: Any) -> Any:
        self._wait_for_all()
        return super().pop(name, *default)

    def copy(self) -> dict[str, Parameter]:
        return dict(self.items())

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def _wait_for_all(self) -> None:
        if self._gathers.is_pending:
            self._gathers.wait(self._buckets.values())
