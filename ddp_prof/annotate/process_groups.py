"""Names process groups, tells where their collectives run, and marks the all-reduces of a bucket that one sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_prof import range_names
from ddp_prof.annotate import ranges
from ddp_prof.annotate.ranges import OpenRange

_NAMED_RANKS = 16
"""Most ranks that are listed in the name of a process group."""
DEFAULT_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""A communication hook of DDP: takes its state and a bucket, returns a future of the reduced bucket."""


def is_on_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether collectives of this tensor run on the host, that is, by gloo."""
    return not tensor.is_cuda or dist.get_backend(group) == dist.Backend.GLOO


def average_op(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.ReduceOp.RedOpType:
    """Return ``AVG`` if the backend divides within the all-reduce (NCCL), else ``SUM``: then the caller must divide."""
    return dist.ReduceOp.SUM if is_on_host(tensor, group) else dist.ReduceOp.AVG


def name_group(group: dist.ProcessGroup | None) -> dict[str, range_names.Value]:
    """Return the fields of a range for a process group: ``group``, torch's name and the ranks; ``ranks``, their number.

    For example ``{"group": "1 [0, 2]", "ranks": 2}``; ``None`` is the default group. The ranks belong to the name,
    because torch may give groups of different ranks the same name, for example when it splits a group.
    """
    group = group or dist.distributed_c10d._get_default_group()
    ranks = dist.get_process_group_ranks(group)
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", ..." if len(ranks) > _NAMED_RANKS else "")
    return {"group": f"{group.group_name} [{shown}]".replace("|", " "), "ranks": len(ranks)}


class MarkingGroup(dist.ProcessGroup):
    """Wraps a process group, and opens a range for each all-reduce of the bucket that is being reduced.

    Attributes:
        marked: The wrapped group.
        names: Fields of its ranges that name the group, see :func:`name_group`.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))  # type: ignore[call-arg]  # torch's stub
        self.marked = group or dist.distributed_c10d._get_default_group()
        self.names = name_group(self.marked)

    def reduce_bucket(
        self, bucket: Any, hook: Hook | None = None, state: Any = None
    ) -> tuple[torch.futures.Future[torch.Tensor], list[OpenRange]]:
        """Reduce a bucket of DDP by ``hook``, one of torch's, or if there is none, average it as DDP does.

        Returns:
            A future of the reduced bucket, and a list of the ranges of its messages. PowerSGD starts its second message
            when the first one has ended, so its range is added to the list later.
        """
        self.bucket, self.params, self.spans = bucket.index(), len(bucket.parameters()), list[OpenRange]()
        if hook is None:
            tensor = bucket.buffer()
            op = average_op(tensor, self.marked)
            if op == dist.ReduceOp.SUM:
                tensor.mul_(1 / self.size())  # rounds as DDP does
            work = self.mark(tensor, lambda: dist.all_reduce(tensor, op, self.marked, async_op=True))
            future = work.get_future().then(lambda done: done.value()[0])
        # A hook of torch calls all-reduce on the group that its state holds or is: give it this one for the call.
        elif hasattr(state, "process_group"):
            state.process_group, own = self, state.process_group
            future = hook(state, bucket)
            state.process_group = own
        else:
            future = hook(self, bucket)
        return future, self.spans

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        return self.mark(tensors[0], lambda: self.marked.allreduce(tensors, *options))

    def mark(self, tensor: torch.Tensor, launch: Callable[[], Any]) -> Any:
        """Call ``launch``, which starts an all-reduce of ``tensor``; return its work. The range ends with the work."""
        span = ranges.start_all_reduce(self.bucket, bytes_of(tensor), self.params, **self.names)
        self.spans.append(span)
        work = launch()
        work.get_future().add_done_callback(span.end)
        return work


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a bucket; of a sparse gradient, which is a bucket of its own, those of indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def sends_through_its_state(hook: Hook, state: Any, group: dist.ProcessGroup) -> bool:
    """Return whether the all-reduces of a hook go through the process group that its ``state`` is or holds.

    This is known of torch's own hooks. They may send less than their bucket: half of it (bfloat16), or two thin
    matrices (PowerSGD), so each of their messages needs a range of its own. False also if that group is not ``group``.
    """
    is_default = getattr(hook, "__module__", "") == DEFAULT_HOOKS and not hook.__name__.endswith("wrapper_hook")
    sends_by = getattr(state, "process_group", state) or dist.distributed_c10d._get_default_group()
    return (is_default or type(state).__name__ == "PowerSGDState") and sends_by is group
