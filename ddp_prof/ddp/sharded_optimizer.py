"""An optimizer whose state is divided among the ranks (ZeRO stage 1, Rajbhandari et al. 2020).

    host        |  forward  |  backward  | ... synchronize ... |    optimizer.step     |
    rank 0      |###########|############|                     |[p0 p3][send p0 p3][get]|
    rank 1      |###########|############|                     |[p1 p2][get][send p1 p2]|
    state       rank 0 keeps the moments of p0 and p3, rank 1 those of p1 and p2

``p0`` is parameter 0, ``send`` and ``get`` are broadcasts to and from the other rank. Each parameter has one owner, the
only rank that keeps optimizer state for it and steps on it. After its step the owner broadcasts the parameter, in place
if it is large. The gradients must be averaged on all ranks before ``step`` is called.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_prof.bucket_assignment import assign_buckets
from ddp_prof.ddp.collective import (
    TensorSpec,
    check_group,
    compare_with_rank_0,
    describe_tensor,
    find_difference,
    launch_broadcast,
)
from ddp_prof.errors import CommunicationError

MESSAGE_BYTES = 2**20
"""Parameters of one owner that are smaller than this are copied together into messages of at most this many bytes."""
MESSAGES_AT_ONCE = 8
"""The most messages in flight at once; this bounds the memory of the copies."""
OF_PARAMETERS = ("params", "param_names")
"""Keys of a parameter group that hold its parameters; all other keys are options such as ``lr``."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps on this rank's part of the parameters and receives all other parameters from their owners.

    It can be copied and, with the default group, pickled.

    Args:
        params: Parameters or groups of parameters, the same on every rank, in the same order; this is checked.
        optimizer_cls: Class of the optimizer that steps on a rank's own part.
        process_group: The ranks that share the work; ``None`` is the default group.
        kwargs: Passed to ``optimizer_cls``.
    """

    local: torch.optim.Optimizer
    """The optimizer of this rank's part. It has the same groups as this optimizer, with only the owned parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        check_group(process_group)
        closure = inspect.signature(optimizer_cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{optimizer_cls.__name__} computes the loss itself, on all parameters at once, and cannot be sharded: "
                "use it as it is, or another optimizer"
            )
        halves = torch.linspace(-1, 1, 24).view(2, 3, 4).unbind()
        if not steps_alike(optimizer_cls, kwargs, halves, [[half] for half in halves]):
            raise ValueError(
                f"{optimizer_cls.__name__} steps on a parameter by what all parameters are, and a rank would give it "
                "its own ones alone: use it as it is, or another optimizer"
            )
        self._group = process_group
        # For each rank, the parameters that it owns.
        self._owned: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size(process_group))]
        super().__init__(params, kwargs)
        device = self.param_groups[0]["params"][0].device
        compare_with_rank_0(_describe(self.param_groups), _find_difference, process_group, device)
        self.local = optimizer_cls([self._own_part(group) for group in self.param_groups], **kwargs)
        self.defaults = self.local.defaults
        self._copy_options_from_local()

    @property
    def state(self) -> Any:
        """The state of this rank's part, by parameter, as of any optimizer: a program may read or clear it."""
        return self.local.state if hasattr(self, "local") else {}

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "local"):  # not while ``__init__`` makes an empty one
            self.local.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and choose an owner for each of its parameters.

        Each parameter, the largest first, goes to the rank that owns the fewest bytes so far.
        """
        if hasattr(self, "local"):  # not while ``__init__`` adds the first groups
            self._check_groups()
            self._copy_options_to_local()  # a scheduler may have changed them since the last step
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
        """Step on this rank's part, then broadcast the parameters; return what ``closure`` returned.

        ``closure`` computes the loss and is called once; ``None``: nothing is called or returned.
        """
        self._check_groups()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_options_to_local()
        self.local.step(**kwargs)
        self._exchange()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's part only: each rank saves and loads its own part.

        Under ``shard`` it holds the rank and the number of ranks.
        """
        self._copy_options_to_local()
        return {**self.local.state_dict(), "shard": self._place()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; raise CommunicationError if it is of another rank or world size."""
        place = state_dict.get("shard", self._place())
        if place != self._place():
            raise CommunicationError(
                "rank {} of {}: this is the optimizer state of rank {} of {}: each rank saves and loads its own".format(
                    *self._place(), *place
                )
            )
        self.local.load_state_dict({name: value for name, value in state_dict.items() if name != "shard"})
        self._copy_options_from_local()

    def _check_groups(self) -> None:
        """Raise CommunicationError if the program has changed which parameters the groups hold."""
        here = Counter(id(parameter) for group in self.param_groups for parameter in group["params"])
        if here != Counter(id(parameter) for owned in self._owned for parameter in owned):
            raise CommunicationError(
                "the parameters of a ShardedOptimizer's groups were changed: call add_param_group(), or make it anew"
            )

    def _place(self) -> tuple[int, int]:
        """Return this rank and the number of ranks."""
        return dist.get_rank(self._group), dist.get_world_size(self._group)

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with the same options and only the parameters that this rank owns."""
        owned = set(self._owned[dist.get_rank(self._group)])
        return {**_options(group), "params": [parameter for parameter in group["params"] if parameter in owned]}

    def _copy_options_to_local(self) -> None:
        """Copy the options of the groups to the local optimizer: schedulers change them here."""
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update(_options(group))

    def _copy_options_from_local(self) -> None:
        """Copy the options of the local optimizer's groups, with its defaults, to the groups of this optimizer."""
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update(_options(local))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's omission
    @torch.no_grad()
    def _exchange(self) -> None:
        """Broadcast all parameters from their owners, at most :data:`MESSAGES_AT_ONCE` messages at a time."""
        in_flight: deque[Callable[[], None]] = deque()
        for number, (owner, tensors) in enumerate(self._messages):
            in_flight.append(launch_broadcast(tensors, owner, self._group, number))
            if len(in_flight) == MESSAGES_AT_ONCE:
                in_flight.popleft()()
        for finish in in_flight:
            finish()
        # As a step in place does: a backward that needs the values from before is then an error of autograd. Parameters
        # without a gradient were sent as they were, and older graphs of theirs stay valid.
        for tensor in itertools.chain.from_iterable(self._owned):
            if tensor.grad is not None:
                torch.autograd.graph.increment_version(tensor)

    def _copied_attributes(self) -> dict[str, Any]:
        """Return the attributes that a copy or pickle takes over, by name."""
        own = "local", "_group", "_owned", "_messages"
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds; raise CommunicationError with a process group, which cannot be pickled."""
        if self._group is not None:
            raise CommunicationError(
                "an optimizer with its own process group cannot be pickled: save its state_dict() on each rank"
            )
        return self._copied_attributes()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptimizer:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._group)] = self._group  # so that ``deepcopy`` does not copy the group
        copied.__setstate__(copy.deepcopy(self._copied_attributes(), memo))
        return copied


def steps_alike(
    cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    together: Sequence[torch.Tensor],
    apart: Sequence[Sequence[torch.Tensor]],
) -> bool:
    """Whether an optimizer makes the same of some parameters as several make that have a part of them each.

    It is tried out, three steps on small tensors. True as well where that cannot be done, as for optimizers that need
    more than gradients or draw random numbers; and for those of torch, which are known.

    Args:
        cls: Class of the optimizers.
        options: Arguments of ``cls``.
        together: The values of the parameters of the one.
        apart: The same values in the same order, divided among several.
    """
    if cls.__module__.startswith("torch.optim"):
        return True

    def values_after(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what three steps make of parameters with these values."""
        parameters = [torch.nn.Parameter(each.clone()) for each in values]
        optimizer = cls(parameters, **options)
        step: Any = cls.step  # the constructor has added the hooks that are called for each optimizer
        for number in (1, 2, 3):
            for parameter, each in zip(parameters, values, strict=True):
                parameter.grad = torch.sin(number * (7 * each.square() + each))
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
        return [parameter.detach().flatten() for parameter in parameters]

    before = torch.random.get_rng_state()
    try:
        one = torch.cat(values_after(together))
        several = torch.cat([each for values in apart for each in values_after(values)])
    except Exception:
        return True
    finally:
        is_random = not torch.equal(before, torch.random.get_rng_state())
        torch.random.set_rng_state(before)
    moved = (one - torch.cat([values.flatten() for values in together])).abs().max()
    return is_random or bool((one - several).abs().max() <= 0.01 * moved)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group holds besides its parameters."""
    return {name: value for name, value in group.items() if name not in OF_PARAMETERS}


def _messages(owned: Sequence[Sequence[torch.Tensor]]) -> list[tuple[int, list[torch.Tensor]]]:
    """Return the owner and the tensors of each message.

    The messages of the owners alternate, so that all owners send at the same time. ``owned`` holds the parameters of
    each owner.
    """
    by_owner = []
    for owner, tensors in enumerate(owned):
        assigned = assign_buckets(tensors, MESSAGE_BYTES)
        by_owner.append([(owner, [tensors[index] for index in members]) for members in assigned])
    # Owners with fewer messages are filled up with None, which is left out.
    return [message for turn in itertools.zip_longest(*by_owner) for message in turn if message]


def _describe(groups: Sequence[dict[str, Any]]) -> list[tuple[TensorSpec, str]]:
    """Return for each parameter the properties that must be equal on all ranks, and about 8 of its values as text."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    names = [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]
    described = []
    for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
        sample = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // 8)].tolist()
        label = f"parameter {index if name is None else repr(name)}"
        described.append((describe_tensor(label, parameter), str(sample)))
    return described


def _find_difference(own: list[tuple[TensorSpec, str]], reference: list[tuple[TensorSpec, str]]) -> str | None:
    """Describe the first difference from rank 0 (``reference``), or return ``None``; each is as of :func:`_describe`.

    If parameters have no names, two parameters of equal shape may be in another order; only their values show that.
    """
    found = find_difference([described for described, _ in own], [described for described, _ in reference])
    values, expected = [sample for _, sample in own], [sample for _, sample in reference]
    # If the values are others than on rank 0, and not only in another order, nothing can be said about the order.
    if found or values == expected or sorted(values) != sorted(expected):
        return found
    # The same values stand in another order: find where rank 0 has the first value that is not in its place.
    first = next(index for index, pair in enumerate(zip(values, expected, strict=True)) if pair[0] != pair[1])
    place = reference[expected.index(values[first])][0].label
    return f"{own[first][0].label} is {place} on rank 0: give every rank the same parameters in the same order"
