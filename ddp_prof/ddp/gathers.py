"""All-gathers in flight, for which whoever reads a parameter waits.

A module keeps its parameters in a dictionary, ``_parameters``. Attributes, ``parameters()``, ``state_dict()``,
``load_state_dict()``, ``to()``, copies and pickles all go through it, so it is the dictionary that waits. Hooks on
layers would not do: attention reads ``out_proj.weight`` and never calls ``out_proj``; nobody calls a ``ParameterList``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ddp_prof import annotate
from ddp_prof.ddp.collective import InFlight

Parameter = torch.nn.Parameter | None


class Gathers:
    """The all-gathers in flight, by the index of their bucket.

    Attributes:
        is_pending: Whether one may be in flight. A flag of its own: ``torch.compile`` compiles once for each value.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._in_flight: dict[int, InFlight] = {}
        self._waited: set[tuple[int, torch.cuda.Stream | None]] = set()

    def add(self, bucket: int, flight: InFlight) -> None:
        """Let readers wait for this one."""
        self._in_flight[bucket] = flight
        self.is_pending = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission, as of is_initialized
    def wait(self, buckets: Iterable[int]) -> None:
        """Return when parameters of these buckets may be read: by the host, on a GPU by the current stream.

        Raises:
            CommunicationError: A rank is gone.
        """
        # Another stream that reads the same bucket has to wait, too.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        due = [bucket for bucket in buckets if bucket in self._in_flight and (bucket, stream) not in self._waited]
        if not due:
            return
        with annotate.synchronize():  # in forward, too: gloo blocks the host here
            for bucket in due:
                self._in_flight[bucket].wait()
                self._waited.add((bucket, stream))

    def settle(self) -> None:
        """Wait for all; then nothing is in flight any more."""
        self.wait(list(self._in_flight))
        self._in_flight.clear()
        self._waited.clear()
        self.is_pending = False


class AwaitedParameters(dict[str, Parameter]):
    """The parameters of one module: to read one waits for its all-gather. A copy or pickle is a plain dictionary.

    Args:
        parameters: Those of the module.
        bucket_of: By the ``id`` of a parameter, the index of the bucket in which it is gathered.
        gathers: What to wait for.
    """

    def __init__(self, parameters: Mapping[str, Parameter], bucket_of: Mapping[int, int], gathers: Gathers) -> None:
        super().__init__(parameters)
        self._gathers = gathers
        self._buckets = {name: bucket_of[id(each)] for name, each in parameters.items() if id(each) in bucket_of}

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
