"""Any optimizer with its state divided among the ranks (ZeRO stage 1, Rajbhandari et al. 2020).

    host        |  forward  |  backward  | ... synchronize ... |    optimizer.step     |
    rank 0      |###########|############|                     |[p0 p3][send p0 p3][get]|
    rank 1      |###########|############|                     |[p1 p2][get][send p1 p2]|
    state       rank 0 keeps the moments of p0 and p3, rank 1 those of p1 and p2

Each parameter has one owner, which alone keeps optimizer state for it and steps on it; then the owner broadcasts the
parameter. The gradients are not this class's business: all ranks have the averaged ones when ``step`` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_prof.ddp.engine.broadcast import by_kind, launch_broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps on this rank's part of the parameters and brings the others from their owners.

    Args:
        params: Parameters or groups of them, the same on every rank.
        optimizer_cls: The optimizer that steps on a rank's own part.
        process_group: ``None`` is the default group.
        kwargs: Go to ``optimizer_cls``.

    Attributes:
        local: This rank's optimizer; ``None`` where the rank owns nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self._make, self._options, self._group = optimizer_cls, kwargs, process_group
        self._rank, self._world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._owned: list[list[torch.Tensor]] = [[] for _ in range(self._world)]
        self._local_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.local: torch.optim.Optimizer | None = None
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Divide one more group among the ranks: each parameter goes to the rank that has the fewest bytes so far."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        own = []
        for parameter in group["params"]:
            owner = min(range(self._world), key=lambda rank: sum(tensor.nbytes for tensor in self._owned[rank]))
            self._owned[owner].append(parameter)
            if owner == self._rank:
                own.append(parameter)
        if own:
            self._add_local({**group, "params": own}, group)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step on this rank's part, then give every rank all parameters.

        Args:
            closure: As of any optimizer: computes the loss again and returns it.
            kwargs: Go to the step of ``optimizer_cls``.

        Raises:
            CommunicationError: A rank is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, local in self._local_groups:  # learning rate schedules change the groups
            local.update({key: value for key, value in group.items() if key != "params"})
        if self.local is not None:
            self.local.step(**kwargs)
        self._exchange()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's part only: each rank saves and loads its own."""
        return {} if self.local is None else self.local.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave on this rank of as many ranks."""
        if self.local is not None:
            self.local.load_state_dict(state_dict)
        for group, local in self._local_groups:
            group.update({key: value for key, value in local.items() if key != "params"})

    def _add_local(self, local_group: dict[str, Any], group: dict[str, Any]) -> None:
        if self.local is None:
            self.local = self._make([local_group], **self._options)
        else:
            self.local.add_param_group(local_group)
        local = self.local.param_groups[-1]
        group.update({key: value for key, value in local.items() if key != "params"})  # defaults of optimizer_cls
        self._local_groups.append((group, local))

    @torch.no_grad()
    def _exchange(self) -> None:
        """One broadcast an owner, data type and device; all are in flight together."""
        launched = [
            launch_broadcast(members, owner, self._group, owner + number * self._world)
            for owner, owned in enumerate(self._owned)
            for number, members in enumerate(by_kind(owned))
        ]
        for finish in launched:
            finish()
