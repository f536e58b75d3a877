"""A rank's part of a bucket, on which the optimizer steps, its gradient, and what of it a step leaves unchanged."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_prof.ddp.buckets import TakenGradient
from ddp_prof.ddp.collective import launch_all_reduce
from ddp_prof.errors import CommunicationError

NORMS = frozenset({torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm})
"""Functions that are refused for a gradient of which each rank has a part."""
WERE_IDLE = "were_idle"
"""Key in an optimizer's state of a shard: the parameters that were idle in any step, by position in the bucket."""
PLACE = "place"
"""Key in an optimizer's state of a shard: the rank whose shard it is, and the number of ranks."""


class ShardGradient(torch.Tensor):
    """The gradient of a shard. If GradScaler finds an overflow in it on one rank, all ranks are told.

    Otherwise one rank would skip a step and halve the scale, and the others would not. Its norm is refused: to clip by
    it, or to step by it, would be to do so by another norm on each rank.
    """

    group: dist.ProcessGroup | None
    bucket: int

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Call the function; after GradScaler's check for overflows, tell it all ranks. Torch calls this.

        Raises CommunicationError for a norm.
        """
        if function in NORMS:
            raise CommunicationError(
                "the norm of a part of the gradients, of which each rank has another one: variant.clip_grad_norm_() "
                "clips by the norm of all, and returns it; of an optimizer that steps by norms, use another one, such "
                "as AdamW, or another variant"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*arguments, **(keywords or {}))
        if function is torch._amp_foreach_non_finite_check_and_unscale_:
            (gradient, *_), found, _ = arguments  # the gradients, a flag for an overflow, the inverse of the scale
            # The largest and no sum: fused optimizers leave out a step if the flag is 1, and take it if it is 2.
            launch_all_reduce(found, gradient.group, gradient.bucket, 0, dist.ReduceOp.MAX).wait()
        return result


class Shard(torch.nn.Parameter):
    """A rank's part of a bucket, on which the optimizer steps.

    A change by ``data`` counts as one of the part itself, and is noticed by its version; any gradient that it is given
    becomes a :class:`ShardGradient`.
    """

    group: dist.ProcessGroup | None = None
    bucket = 0

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.nn.Parameter.data.__set__(self, values)  # type: ignore[attr-defined]

    @property
    def grad(self) -> torch.Tensor | None:
        return torch.nn.Parameter.grad.__get__(self)  # type: ignore[union-attr, no-any-return]

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, (TakenGradient, ShardGradient)):
            gradient = gradient.as_subclass(ShardGradient)
            gradient.group, gradient.bucket = self.group, self.bucket
        torch.nn.Parameter.grad.__set__(self, gradient)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


# torch steps on several parameters by one kernel only if it knows their class.
getattr(sys.modules[torch.optim.Optimizer.__module__], "_foreach_supported_types", []).append(Shard)


class Idle:
    """Keeps the parameters of a bucket that have no gradient unchanged while the optimizer steps on the whole shard.

    As in one process, such an idle parameter is neither decayed nor moved by momentum: its elements of the shard and of
    the optimizer's state are saved before the step and restored after it. An optimizer that counts its steps has one
    count for the whole shard. So a parameter that was idle in a step cannot be stepped on later: its count would be
    wrong. The same holds for SGD with dampening, which does not dampen the first gradient of a parameter.

    Args:
        shard: This rank's part of the bucket.
        slices: For each parameter of the bucket, its elements in the shard; an empty slice if the shard has none.
    """

    def __init__(self, shard: Shard, slices: Sequence[slice]) -> None:
        self._shard, self._slices = shard, slices
        self._slots: set[int] = set()  # the idle parameters of this step, by position in the bucket
        self._kept: list[tuple[torch.Tensor, slice, torch.Tensor]] = []  # tensor, part of it, values to restore
        self._optimizer: torch.optim.Optimizer | None = None  # the optimizer that steps at the moment

    def leave_out(self, slots: set[int]) -> None:
        """Set which parameters (``slots``: positions in the bucket) have no gradient from now on.

        If a closure called this during an optimizer's step, their elements are saved now.
        """
        self._slots = slots
        if self._optimizer is not None:
            self._keep(self._optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the elements that the optimizer must not change.

        Raises CommunicationError if the optimizer's state is that of another rank, or if a parameter that was idle
        before has a gradient now and the optimizer counts steps.
        """
        place = self._place()
        if (other := optimizer.state.get(self._shard, {}).get(PLACE, place)) != place:
            raise CommunicationError(
                "rank {} of {}: this is the optimizer state of rank {} of {}: under sharded each rank saves and loads "
                "its own, with the same number of ranks".format(*place, *other)
            )
        self._optimizer = optimizer
        self._keep(optimizer)

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore the elements that :meth:`_keep` saved before the step, in the shard and in the optimizer's state."""
        for tensor, part, values in self._kept:
            tensor[part] = values
        if self._optimizer is not None:
            # A momentum that the step has made could not be saved before. Idle parameters get a momentum of zero.
            momentum = self._elements(self._optimizer).get("momentum_buffer")
            if momentum is not None and not any(momentum is tensor for tensor, *_ in self._kept):
                for slot in self._slots:
                    momentum[self._slices[slot]] = 0
            # Noted in the optimizer's state, so that it is saved and loaded with the state.
            state = self._optimizer.state.get(self._shard, {})
            if state:
                state[PLACE] = self._place()
            if state and self._slots and self._shard.grad is not None:
                state[WERE_IDLE] = sorted(self._slots.union(state.get(WERE_IDLE, ())))
        self._kept, self._optimizer = [], None

    @torch.no_grad()
    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the elements of idle parameters in the shard and in the optimizer's state, as for ``before_step``."""
        if self._shard.grad is None:
            return
        state = optimizer.state.get(self._shard, {})
        # An optimizer whose state has more than a momentum, such as Adam, counts its steps.
        has_count = bool(state.keys() - {"momentum_buffer", WERE_IDLE, PLACE}) or self._is_dampened(optimizer)
        if has_count and set(state.get(WERE_IDLE, ())) - self._slots:
            self._optimizer = None
            raise CommunicationError(
                "a parameter has a gradient after steps in which no rank used it: the optimizer's count of steps "
                "includes those, since sharded steps on flat parts of buckets: use another variant, or use the "
                "parameter in each step (add its sum, times 0, to the loss)"
            )
        # Copy the elements of idle parameters, in the shard and in each tensor of the optimizer's state.
        tensors = [self._shard.detach(), *self._elements(optimizer).values()]
        parts = [self._slices[slot] for slot in self._slots]
        self._kept = [(tensor, part, tensor[part].clone()) for tensor in tensors for part in parts]

    def _place(self) -> list[int]:
        """Return this rank and the number of ranks, as a list, which torch loads with weights only."""
        return [dist.get_rank(self._shard.group), dist.get_world_size(self._shard.group)]

    def _is_dampened(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer dampens all gradients of a parameter but the first."""
        groups = [group for group in optimizer.param_groups if any(each is self._shard for each in group["params"])]
        return any(group.get("dampening") for group in groups)

    def _elements(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return those tensors of the optimizer's state that have an element for each element of the shard, by name."""
        return {
            name: value
            for name, value in optimizer.state.get(self._shard, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == self._shard.shape
        }
