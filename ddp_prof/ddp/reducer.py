"""The reducer of our variants: takes gradients, launches buckets in order, and sets the reduced gradients.

Every rank must launch the same collectives in the same order, even if their backward passes differ. Two rules ensure
this:

*Order.* Buckets are launched strictly by index. A full bucket waits until all buckets before it have been launched: on
another rank hooks may be called in another order, or other parameters may be unused. :meth:`Reducer.finish` launches
incomplete buckets, in order, with zeros for missing gradients, so no bucket waits for a hook that is never called.

*Late contributions.* A gradient is taken (copied into its bucket) at the first call of its hook. A second backward, or
re-entrant checkpointing, may call the hook again. What it then adds is a late contribution. It is kept in a separate
bucket, which is reduced in a second round at the end. This is so even if the first bucket has not been launched yet, as
that depends on timing, which differs between ranks. What a backward under ``no_sync`` adds is late, too, if a backward
outside of it follows in the step, even if that one does not reach the parameter; else it stays on this rank. Before the
second round the ranks vote, by one all-reduce, which parameters have late contributions. The buckets of these
parameters are reduced as a whole, with zeros for missing contributions. Without ``find_unused`` a rank takes part in
the vote only if it has late contributions itself. So in a step either every rank must have late contributions, not
necessarily of the same parameters, or no rank.

If ``zero_grad()`` drops gradients between backward and :meth:`Reducer.finish`, they are still reduced, because other
ranks may keep theirs. This rank then does not use the result.

The order holds for one reducer. A bucket that one rank launches in backward may be launched by :meth:`Reducer.finish`
on another rank, which does not use all of its parameters. If another reducer of the group has launched collectives in
between, they meet in another order there, and ranks would reduce buckets of two models together. That is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_prof.annotate.process_groups import name_group
from ddp_prof.bucket_assignment import Assignment
from ddp_prof.ddp.buckets import GradientBucket
from ddp_prof.ddp.collective import InFlight, launch_all_reduce, launches
from ddp_prof.errors import CommunicationError


class Reducer:
    """Averages the gradients of ``parameters`` over a process group, bucket by bucket, in the order of ``assignment``.

    A parameter that no rank used in a step is left without a gradient, as in one process. With ``find_unused`` the
    ranks find these parameters by a vote in each step, a small all-reduce in :meth:`finish` whose range has
    ``params=0``. Without it the sign of zeros in the buckets shows them, see :meth:`GradientBucket.take`.

    Parameters are named by their index in ``parameters``.

    Args:
        parameters: The trained parameters.
        assignment: For each bucket, in the order of launch, the indices of its parameters.
        group: The ranks that train together; ``None`` is the default group.
        find_unused: Whether the ranks vote in each step.

    Attributes:
        buckets: The buckets, in the order of launch.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        assignment: Assignment,
        group: dist.ProcessGroup | None,
        find_unused: bool,
    ) -> None:
        self._group, self._parameters = group, parameters
        self._group_name = name_group(group)["group"]
        self.buckets = [
            self._make_bucket(index, [parameters[member] for member in members])
            for index, members in enumerate(assignment)
        ]
        # For each parameter, its bucket and its slot (position) in the bucket.
        self._places = {
            member: (self.buckets[index], slot)
            for index, members in enumerate(assignment)
            for slot, member in enumerate(members)
        }
        self._assignment = assignment
        self._find_unused = find_unused
        # Divide before the sum, as torch's DDP: a sum of low-precision gradients could overflow.
        self._scale = 1.0 / dist.get_world_size(group)
        # How many collectives the group has launched, if only this reducer has launched any since its first gradient.
        self._expected_launches: int | None = None
        self._lock = threading.Lock()  # autograd has a thread per device
        self.order: list[int] = []
        """The parameters whose hooks were called in the last finished step, by index, in the order of the calls."""
        self._begin_step()

    def ready(self, index: int) -> None:
        """Take the gradient of one parameter, and launch the buckets that are complete with it."""
        with self._lock:
            bucket, slot = self._places[index]
            if self._expected_launches is None:
                self._expected_launches = launches[self._group_name]
            if not bucket.has_news(slot):  # a function that autograd called has no gradient for it
                return
            if bucket.taken[slot]:
                self._alone.add(index)
            for late in self._alone:
                self._take_late(late)
            self._alone.clear()
            if bucket.taken[slot]:
                return
            bucket.take(slot, self._scale)
            self._order.append(index)
            # ``_in_flight`` holds all launched buckets, so its length is the index of the next bucket.
            while len(self._in_flight) < len(self.buckets) and not self.buckets[len(self._in_flight)].missing:
                self.launch_next()

    def ready_alone(self, index: int) -> None:
        """Note that a backward under ``no_sync`` has added to a gradient, if that was taken before."""
        with self._lock:
            bucket, slot = self._places[index]
            if bucket.taken[slot] and bucket.has_news(slot):
                self._alone.add(index)

    def launch_next(self) -> InFlight:
        """Launch the next bucket in order, with zeros for parameters without a gradient; return its collective."""
        bucket = self.buckets[len(self._in_flight)]
        if bucket.missing:
            self._is_passed |= self._expected_launches not in (None, launches[self._group_name])
            members = self._assignment[bucket.index]
            self._unused.update(members[slot] for slot in bucket.take_missing(self._scale))
        flight = self._launch(bucket)
        if self._expected_launches is not None:
            self._expected_launches += 1
        self._in_flight.append(flight)
        return flight

    def launch_all(self) -> None:
        """Launch the remaining buckets, in order; what comes after that is late."""
        while len(self._in_flight) < len(self.buckets):
            self.launch_next()

    def is_dropped(self) -> bool:
        """Whether gradients were taken in this step and ``zero_grad()`` dropped all of them."""
        return bool(self._order) and all(bucket.is_dropped() for bucket in self.buckets)

    def finish(self, *, is_discarded: bool = False) -> None:
        """Launch the remaining buckets, wait for all, set the parameters' gradients and begin a new step.

        Args:
            is_discarded: All gradients of this step were dropped on this rank. A parameter that this rank did not use
                then gets no gradient either, whatever other ranks did.

        Raises:
            CommunicationError: A collective failed, a gradient is sparse, a parameter is frozen on this rank only, or
                collectives of another reducer may have been taken for those of this one. After the second and the
                third, training can go on.
        """
        # Of a discarded step: what backward did not reach, and zero_grad() may have left a gradient of zeros.
        places = self._places.items() if is_discarded else ()
        untouched = [index for index, (bucket, slot) in places if not bucket.taken[slot]]
        self.launch_all()  # the first round
        votes = self._launch_votes() if self._find_unused or self._came_late else None
        for flight in self._in_flight:
            flight.wait()
        # The counts of votes show which parameters no rank used, and which have late contributions on any rank.
        unused, late = self._unused, set[int]()
        if votes is not None:
            votes[1].wait()
            used_votes, late_votes = votes[0].tolist()
            unused = {index for index, count in enumerate(used_votes) if not count}
            late = {index for index, count in enumerate(late_votes) if count}
        used_by_others = [
            self._parameters[index]
            for index in (self._unused if self._is_passed else ())
            if self._places[index][0].is_unused(self._places[index][1]) is False
        ]
        # The parameters whose gradient becomes None: with zeros, weight decay and momentum would change them.
        without = self._unused if is_discarded else unused if self._find_unused else self._find_unused_by_all()
        self._restore_gradients(without, self._reduce_late(late))
        for index in untouched:
            if (gradient := self._parameters[index].grad) is not None:
                gradient.zero_()  # other ranks may have reached it, and dropped that, too
        # Raise errors only now, as the ranks have to launch the same collectives.
        sparse = [parameter for bucket in self.buckets for parameter in bucket.refused]
        frozen_here, self.order = self._frozen_here, self._order
        self._begin_step()
        self._raise_for(
            used_by_others,
            "was used on another rank only, and another variant has sent messages in this group meanwhile, so ranks "
            "may have mixed them up: give each variant a group of its own, process_group=dist.new_group()",
        )
        self._raise_for(sparse, "has a sparse gradient, which cannot be reduced: build its layer with sparse=False")
        self._raise_for(frozen_here, "is frozen here and trained on another rank: freeze it on all ranks or on none")

    def restore_memory(self) -> None:
        for bucket in self.buckets:
            bucket.restore_memory()

    def _find_unused_by_all(self) -> set[int]:
        """Return the parameters that no rank used in this step; only those that this rank did not use are checked."""
        places = {index: self._places[index] for index in self._unused}
        return {index for index, (bucket, slot) in places.items() if bucket.is_unused(slot)}

    def _make_bucket(self, index: int, parameters: Sequence[torch.nn.Parameter]) -> GradientBucket:
        return GradientBucket(index, parameters)

    def _launch(self, bucket: GradientBucket) -> InFlight:
        return launch_all_reduce(bucket.tensor(), self._group, bucket.index, len(bucket.parameters))

    def _take_late(self, index: int) -> None:
        """Keep a late contribution of a parameter in the bucket for the second round."""
        bucket, slot = self._places[index]
        if bucket.index not in self._late:
            self._late[bucket.index] = GradientBucket(bucket.index, bucket.parameters)
        is_dropped, gradient = bucket.take_late(slot)
        if is_dropped:  # earlier late contributions were dropped, too
            self._late[bucket.index].add(slot, None, self._scale)
        if gradient is not None:
            self._late[bucket.index].add(slot, gradient, self._scale)
        self._came_late.add(index)

    def _launch_votes(self) -> tuple[torch.Tensor, InFlight]:
        """Launch the sum of the votes of all ranks; return the votes and the collective.

        The votes are ``[2, parameters]``: row 0 is 1 for each parameter that the rank used, row 1 is 1 for each
        parameter with late contributions. After the collective they are the numbers of such ranks.
        """
        votes = torch.zeros(2, len(self._places), dtype=torch.int32)
        votes[0] = 1
        votes[0, list(self._unused)] = 0
        votes[1, list(self._came_late)] = 1
        if self.buckets:
            votes = votes.to(self.buckets[0].parameters[0].device)
        return votes, launch_all_reduce(votes, self._group, len(self.buckets), 0)

    def _reduce_late(self, late: set[int]) -> dict[int, torch.Tensor]:
        """Reduce late contributions in a second round; return their average for each parameter in ``late``."""
        numbers = sorted({self._places[index][0].index for index in late})
        second = {  # a new bucket holds zeros: this rank has no late contributions in it
            number: self._late.get(number) or GradientBucket(number, self.buckets[number].parameters)
            for number in numbers
        }
        flights = [
            launch_all_reduce(bucket.tensor(), self._group, number, len(bucket.parameters), late=1)
            for number, bucket in second.items()
        ]
        for flight in flights:
            flight.wait()
        places = {index: self._places[index] for index in late}
        return {index: second[bucket.index].views[slot] for index, (bucket, slot) in places.items()}

    def _restore_gradients(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        """Set the gradients of all parameters: ``None`` for ``unused`` ones, and the ``late`` averages are added.

        It also notes the parameters that are frozen on this rank and have a gradient from another rank.
        """
        for index, (bucket, slot) in self._places.items():
            if index in self._unused and not bucket.parameters[slot].requires_grad and bucket.views[slot].any():
                self._frozen_here.append(bucket.parameters[slot])  # ``any`` makes the host wait for a GPU
            bucket.restore_gradient(slot, index not in unused, late.get(index))

    def _begin_step(self) -> None:
        """Forget all about the last step."""
        for bucket in self.buckets:
            bucket.reset()
        self._in_flight: list[InFlight] = []  # the launched buckets
        self._late: dict[int, GradientBucket] = {}  # the buckets of late contributions, by bucket index
        self._came_late: set[int] = set()  # parameters with late contributions
        self._alone: set[int] = set()  # parameters to which ``no_sync`` has added since they were taken
        self._order: list[int] = []  # parameters in the order of the calls of their hooks
        self._unused: set[int] = set()  # parameters without a gradient on this rank
        self._frozen_here: list[torch.nn.Parameter] = []
        self._expected_launches = None
        self._is_passed = False  # whether another one has, before a bucket that another rank may have launched earlier

    def _raise_for(self, parameters: Sequence[torch.nn.Parameter], reason: str) -> None:
        if parameters:
            rank, shape = dist.get_rank(self._group), tuple(parameters[0].shape)
            raise CommunicationError(f"rank {rank}: a parameter of shape {shape} {reason}")
