"""Parameters of a module that wait for their all-gather when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ddp_prof import annotate
from ddp_prof.ddp.collective import InFlight

Parameter = torch.nn.Parameter | None


class Gathers:
    """The all-gathers in flight, at most one for each bucket."""

    def __init__(self) -> None:
        self.is_pending = False  # a bool, because ``torch.compile`` compiles once for each value
        self._in_flight: dict[int, InFlight] = {}  # by index of the bucket
        self._waited: set[tuple[int, torch.cuda.Stream | None]] = set()  # buckets with the streams that have waited

    def add(self, bucket: int, flight: InFlight) -> None:
        """Keep the all-gather that was launched for a bucket."""
        self._in_flight[bucket] = flight
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

    def settle(self) -> None:
        """Wait for all all-gathers in flight and forget them."""
        self.wait(list(self._in_flight))
        self._in_flight.clear()
        self._waited.clear()
        self.is_pending = False


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
