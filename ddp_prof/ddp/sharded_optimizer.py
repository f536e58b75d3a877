"""An optimizer whose state is divided among the ranks (ZeRO stage 1, Rajbhandari et al. 2020).

    host        |  forward  |  backward  | ... synchronize ... |    optimizer.step     |
    rank 0      |###########|############|                     |[p0 p3][send p0 p3][get]|
    rank 1      |###########|############|                     |[p1 p2][get][send p1 p2]|
    state       rank 0 keeps the moments of p0 and p3, rank 1 those of p1 and p2

Each parameter has one owner, the only rank that keeps optimizer state for it and steps on it; then the owner broadcasts
the parameter, in place if it is large. The gradients must be averaged on all ranks before ``step`` is called.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_prof.bucket_assignment import assign_buckets
from ddp_prof.ddp.collective import (
    TensorSpec,
    compare_with_rank_0,
    describe_tensor,
    find_difference,
    launch_broadcast,
)
from ddp_prof.errors import CommunicationError

MESSAGE_BYTES = 2**20
"""Smaller parameters of an owner are sent together, in copies of at most this many bytes."""
MESSAGES_AT_ONCE = 8
"""Messages in flight at once; bounds the memory of the copies."""
OF_PARAMETERS = ("params", "param_names")
"""Keys of a group that hold its parameters; all other keys are options."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps on this rank's part of the parameters and receives the others from their owners.

    It can be copied and, with the default group, pickled.

    Args:
        params: Parameters or groups of them, the same on every rank, in the same order; this is checked.
        optimizer_cls: The optimizer that steps on a rank's own part.
        kwargs: Passed to ``optimizer_cls``.
    """

    local: torch.optim.Optimizer
    """This rank's optimizer; its groups are those of this one, with the parameters that the rank owns."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        closure = inspect.signature(optimizer_cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{optimizer_cls.__name__} computes the loss itself, on all parameters at once, and cannot be sharded: "
                "use it as it is, or another optimizer"
            )
        self._group = process_group
        self._owned: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size(process_group))]
        super().__init__(params, kwargs)
        device = self.param_groups[0]["params"][0].device
        compare_with_rank_0(_describe(self.param_groups), _find_difference, process_group, device)
        self.local = optimizer_cls([self._own_part(group) for group in self.param_groups], **kwargs)
        self.defaults = self.local.defaults
        self._copy_options_from_local()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; each parameter, the largest first, goes to the rank that owns the fewest bytes so far."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in sorted(group["params"], key=lambda tensor: -tensor.nbytes):
            min(self._owned, key=lambda owned: sum(tensor.nbytes for tensor in owned)).append(parameter)
        self._messages = _messages(self._owned)
        if hasattr(self, "local"):
            compare_with_rank_0(_describe([group]), _find_difference, self._group, group["params"][0].device)
            self.local.add_param_group(self._own_part(group))
            self._copy_options_from_local()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step on this rank's part, then broadcast the parameters; ``closure`` is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_options_to_local()
        self.local.step(**kwargs)
        self._exchange()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's part only: each rank saves and loads its own."""
        self._copy_options_to_local()
        return {**self.local.state_dict(), "shard": self._place()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; raises CommunicationError if rank or world size are not the same."""
        place = state_dict.get("shard", self._place())
        if place != self._place():
            raise CommunicationError(
                "rank {} of {}: this is the optimizer state of rank {} of {}: each rank saves and loads its own".format(
                    *self._place(), *place
                )
            )
        self.local.load_state_dict({name: value for name, value in state_dict.items() if name != "shard"})
        self._copy_options_from_local()

    def _place(self) -> tuple[int, int]:
        return dist.get_rank(self._group), dist.get_world_size(self._group)

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        owned = set(self._owned[dist.get_rank(self._group)])
        return {**_options(group), "params": [parameter for parameter in group["params"] if parameter in owned]}

    def _copy_options_to_local(self) -> None:
        """Copy options, which schedulers change in this optimizer's groups, to the local optimizer."""
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update(_options(group))

    def _copy_options_from_local(self) -> None:
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update(_options(local))

    @torch.no_grad()
    def _exchange(self) -> None:
        in_flight: deque[Callable[[], None]] = deque()
        for number, (owner, tensors) in enumerate(self._messages):
            in_flight.append(launch_broadcast(tensors, owner, self._group, number))
            if len(in_flight) == MESSAGES_AT_ONCE:
                in_flight.popleft()()
        for finish in in_flight:
            finish()

    def _copied_attributes(self) -> dict[str, Any]:
        own = "local", "_group", "_owned", "_messages"
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise CommunicationError(
                "an optimizer with its own process group cannot be pickled: save its state_dict() on each rank"
            )
        return self._copied_attributes()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptimizer:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._group)] = self._group
        copied.__setstate__(copy.deepcopy(self._copied_attributes(), memo))
        return copied


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in OF_PARAMETERS}


def _messages(owned: Sequence[Sequence[torch.Tensor]]) -> list[tuple[int, list[torch.Tensor]]]:
    """Return owner and tensors of each message; owners alternate, so that all of them send at the same time."""
    by_owner = []
    for owner, tensors in enumerate(owned):
        assigned = assign_buckets(tensors, MESSAGE_BYTES)
        by_owner.append([(owner, [tensors[index] for index in members]) for members in assigned])
    return [message for turn in itertools.zip_longest(*by_owner) for message in turn if message]


def _describe(groups: Sequence[dict[str, Any]]) -> list[tuple[TensorSpec, str]]:
    """Return for each parameter its properties that must be equal on all ranks, and some of its values."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    names = [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]
    described = []
    for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
        sample = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // 8)].tolist()
        label = f"parameter {index if name is None else repr(name)}"
        described.append((describe_tensor(label, parameter), str(sample)))
    return described


def _find_difference(own: list[tuple[TensorSpec, str]], reference: list[tuple[TensorSpec, str]]) -> str | None:
    """Describe the first difference; without names, only values show another order of parameters of equal shape."""
    found = find_difference([described for described, _ in own], [described for described, _ in reference])
    values, expected = [sample for _, sample in own], [sample for _, sample in reference]
    if found or values == expected or sorted(values) != sorted(expected):
        return found
    first = next(index for index, pair in enumerate(zip(values, expected, strict=True)) if pair[0] != pair[1])
    place = reference[expected.index(values[first])][0].label
    return f"{own[first][0].label} is {place} on rank 0: give every rank the same parameters in the same order"
