"""Marks steps by counting: a step lasts from one step of the optimizer to the next.

Capture and the callbacks of trainers count alike, so a run has the same steps, whoever marks them.

Which optimizer: the first one that steps, or one that takes its parameters over. If the program has none of torch's,
each forward of the first DDP whose backward synchronizes begins a step.

Step 0 begins at the first sign of training (a DDP or an FSDP2 unit is created, or a backward pass begins, or a trainer
starts) and is marked as warm-up, because its true start is not known, and DDP's construction communicates. So is the
step after the first pass of a DDP: in it, ranks agree on the order of the buckets. The last step is marked as not
finished. If the program marks its steps by ``annotate.step``, only these are recorded as steps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_prof import range_names
from ddp_prof.annotate import hooks, ranges
from ddp_prof.annotate.hooks import process_range

counts: list[CountedSteps] = []
"""Who marks steps now: at most one does."""


class CountedSteps:
    """Marks steps from :meth:`begin` to :meth:`stop`; ``at_step(index)`` is called between two of them.

    If not ``marks``, it only counts.

    Attributes:
        index: Of the current step; -1 before the first one.
    """

    def __init__(self, at_step: Callable[[int], None] | None = None, *, marks: bool = True) -> None:
        self.index = -1
        self._at_step, self._marks = at_step, marks
        self._optimizer: Any = None
        self._since = set[int]()  # the ids of optimizers that stepped since self._optimizer did
        self._ddp: weakref.ref[Any] | None = None
        self._counts_forwards: bool | None = None
        self._range: ranges.OpenRange | None = None
        self._remove = register_optimizer_step_post_hook(self._count).remove
        hooks.at_synchronized_forward.append(self._count_forward)
        if marks:
            counts.append(self)

    def begin(self) -> None:
        """Begin step 0, unless it has begun."""
        if self.index < 0:
            self._begin_step()

    def close(self) -> None:
        """End the range of the current step."""
        if self._range is not None:
            self._range.end()
            self._range = None

    def mark_unfinished(self) -> None:
        """Mark that the current step is not complete: no step of the optimizer will end its range."""
        if self._range is not None:
            with ranges.NestedRange(range_names.format_range(range_names.STEP, index=self.index, unfinished=1)):
                pass

    def stop(self) -> None:
        self._remove()
        if self._count_forward in hooks.at_synchronized_forward:
            hooks.at_synchronized_forward.remove(self._count_forward)
        if self in counts:
            counts.remove(self)
        self.mark_unfinished()
        self.close()

    def _count(self, optimizer: Any, *_: Any) -> None:
        """Count a step of the first optimizer; called after a step of any.

        One that has parameters of it, and steps twice meanwhile, takes its place: some programs make one per epoch.
        """
        is_again = id(optimizer) in self._since
        if self._optimizer is None or (is_again and _parameters(optimizer) & _parameters(self._optimizer)):
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            self._since.add(id(optimizer))
            return
        self._since.clear()
        if self.index >= 0:
            self._begin_step()
            if (
                self._marks and dist.is_available() and dist.is_initialized()
            ):  # without DDP no forward pass is marked with the rank
                parameters = (one for group in optimizer.param_groups for one in group["params"])
                with process_range(type(optimizer).__name__, parameters):
                    pass

    def _count_forward(self, ddp: Any) -> None:
        """Count a synchronized forward of the first DDP if there is no optimizer; called before that of any."""
        if self._optimizer is not None or self.index < 0:
            return
        if self._ddp is None:
            self._ddp = weakref.ref(ddp)  # its first pass belongs to step 0
        elif self._ddp() is ddp:
            if self._counts_forwards is None:  # asked once: this looks at all objects
                self._counts_forwards = not any(issubclass(type(one), Optimizer) for one in gc.get_objects())
            if self._counts_forwards:
                self._begin_step()

    def _begin_step(self) -> None:
        self.close()
        self.index += 1
        if self._at_step is not None:
            self._at_step(self.index)
        if not self._marks:
            return
        if not ranges.steps_are_marked:
            warmup = {"warmup": 1} if self.index == 0 or hooks.agreement_follows else {}
            self._range = ranges.OpenRange(range_names.format_range(range_names.STEP, index=self.index, **warmup))
        hooks.agreement_follows = False


def _parameters(optimizer: Any) -> set[Any]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}
