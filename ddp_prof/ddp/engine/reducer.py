"""The reducer of our variants: takes gradients, launches buckets in order, gives the reduced gradients back.

Every rank must issue the same collectives in the same order, whatever its own backward does. Two rules see to it:

*Order.* Buckets are launched strictly by index. A bucket that is full waits until all those before it were launched:
on another rank hooks may fire in another order or leave other parameters unused. Incomplete buckets are launched, in
order, by :meth:`Reducer.finish`, with zeros for what is missing; so nothing ever waits for a hook that does not fire.

*Late contributions.* A gradient is taken at the first firing of its hook. Re-entrant checkpointing may fire a hook
again in the same backward; what arrives then is kept apart and reduced on its own at the end, whether or not the
bucket was already launched: that depends on timing, which differs between ranks, the count of firings does not.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp_prof.ddp.engine.collective import InFlight, launch_all_reduce
from ddp_prof.ddp.engine.gradients import GradientBucket
from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.ddp.engine.buckets import Assignment


class Reducer:
    """Averages the gradients of ``parameters`` over a process group, bucket by bucket.

    Args:
        parameters: Those that are trained, each once, in the same order on every rank.
        assignment: For each bucket the positions of its parameters.
        group: ``None`` is the default group.
        find_unused: Find out which parameters no rank used, by one small all-reduce in :meth:`finish` (its range
            carries ``params=0``); they are left without a gradient, as in one process. Otherwise they get zeros. It
            also lets ranks differ in their late contributions; without it each parameter must be late on all or none.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        assignment: Assignment,
        group: dist.ProcessGroup | None,
        find_unused: bool,
    ) -> None:
        self._group = group
        self.buckets = [
            self._make_bucket(index, [parameters[member] for member in members])
            for index, members in enumerate(assignment)
        ]
        self._places = {
            member: (self.buckets[index], slot)
            for index, members in enumerate(assignment)
            for slot, member in enumerate(members)
        }
        self._assignment = assignment
        self._find_unused = find_unused
        # Divide before the sum: a sum of low-precision gradients could overflow. torch's DDP does the same.
        self._scale = 1.0 / dist.get_world_size(group)
        self._lock = threading.Lock()  # autograd has a thread a device
        self._in_flight: list[InFlight] = []
        self._late: set[int] = set()
        self.order: list[int] = []
        """Positions of the parameters whose gradients came by hooks, in the order of the last finished step."""
        self._order: list[int] = []
        self._unused: set[int] = set()

    def ready(self, index: int) -> None:
        """Take the gradient of one parameter, which autograd just finished, and launch what this completes."""
        with self._lock:
            bucket, slot = self._places[index]
            if bucket.is_taken(slot):
                self._late.add(index)
                return
            bucket.take(slot, self._scale)
            self._order.append(index)
            if not bucket.missing:
                self._launch_full()

    def launch_next(self) -> InFlight:
        """Launch the next bucket in order; parameters that brought no gradient contribute zeros."""
        bucket = self.buckets[len(self._in_flight)]
        if bucket.missing:
            members = self._assignment[bucket.index]
            self._unused.update(members[slot] for slot in bucket.take_missing(self._scale))
        flight = self._launch(bucket)
        self._in_flight.append(flight)
        return flight

    def finish(self) -> None:
        """Launch what is left, wait for everything, give the gradients back.

        Raises:
            CommunicationError: A collective failed, or a gradient is sparse; then the next step can be taken.
        """
        while len(self._in_flight) < len(self.buckets):
            self.launch_next()
        bitmap = self._launch_used_bitmap() if self._find_unused else None
        for flight in self._in_flight:
            flight.wait()
        unused, late = (self._unused, self._late) if bitmap is None else self._read_used_bitmap(*bitmap)
        # Frozen since the variant was made: no gradient, or weight decay and momentum would move it.
        frozen = {index for index in self._unused if not self.parameter(index).requires_grad}
        self._give_back(unused if self._find_unused else frozen, self._reduce_late(sorted(late)))
        refused = [parameter for bucket in self.buckets for parameter in bucket.refused]
        self._reset()
        _check_dense(refused)

    def parameter(self, index: int) -> torch.nn.Parameter:
        """The parameter at a position."""
        bucket, slot = self._places[index]
        return bucket.parameters[slot]

    def kept_tensors(self) -> list[torch.Tensor]:
        """What is kept from step to step."""
        return [view for bucket in self.buckets for view in bucket.views]

    def _make_bucket(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> GradientBucket:
        return GradientBucket(index, parameters)

    def _launch(self, bucket: GradientBucket) -> InFlight:
        return launch_all_reduce(bucket.tensor(), self._group, bucket.index, len(bucket))

    def _launch_full(self) -> None:
        launched = len(self._in_flight)
        while launched < len(self.buckets) and not self.buckets[launched].missing:
            self.launch_next()
            launched += 1

    def _launch_used_bitmap(self) -> tuple[torch.Tensor, InFlight]:
        """Ask all ranks which parameters they used, and which came late: a sum of votes, one row each."""
        votes = torch.zeros(2, len(self._places), dtype=torch.int32)
        votes[0] = 1
        votes[0, list(self._unused)] = 0
        votes[1, list(self._late)] = 1
        if self.buckets:
            votes = votes.to(self.buckets[0].parameters[0].device)
        return votes, launch_all_reduce(votes, self._group, len(self.buckets), 0)

    def _read_used_bitmap(self, votes: torch.Tensor, flight: InFlight) -> tuple[set[int], set[int]]:
        flight.wait()
        used, late = votes.tolist()
        return (
            {index for index, count in enumerate(used) if not count},
            {index for index, count in enumerate(late) if count},
        )

    def _reduce_late(self, late: Sequence[int]) -> dict[int, torch.Tensor]:
        reduced = {}
        for index in late:
            bucket, slot = self._places[index]
            parameter = bucket.parameters[slot]
            own, parameter.grad = parameter.grad, None
            tensor = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if own is not None:
                torch.mul(own.detach(), self._scale, out=tensor)
            launch_all_reduce(tensor, self._group, bucket.index, 1, late=1).wait()
            reduced[index] = tensor
        return reduced

    def _give_back(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        for index, (bucket, slot) in self._places.items():
            bucket.give_back(slot, index not in unused, late.get(index))

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.order, self._order = self._order, []
        self._in_flight.clear()
        self._late.clear()
        self._unused.clear()


def _check_dense(refused: Sequence[torch.nn.Parameter]) -> None:
    for parameter in refused:
        raise CommunicationError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be reduced here: "
            "build its layer with sparse=False"
        )
