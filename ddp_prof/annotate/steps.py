"""Marks steps by counting: a step lasts from one step of the optimizer to the next.

``ddp-prof capture`` and the callbacks for trainers count in the same way, so a run has the same steps whichever of them
marks the steps.

The optimizer that counts is the first one that steps, or a later one that takes over: its parameters, or the training,
as in programs that train one model after another. One that another optimizer calls within its step does not count. A
step that a GradScaler leaves out for an overflow counts, too. If the program has no optimizer of torch, each forward of
the first DDP whose backward reduces gradients begins a step.

Step 0 begins at the first sign of training (a DDP or an FSDP2 unit is created, or a backward pass begins, or a trainer
starts). It is marked as warm-up, because its true start is not known, and the construction of a DDP communicates. The
step with the first forward of a DDP is marked as warm-up, too, and the one after it, in which ranks agree on the order
of the buckets (with ``static_graph`` the two after it); and a step that lasted until another optimizer took over. The
last step is marked as not finished. If the program marks its steps by ``annotate.step``, only these are recorded.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ddp_prof import range_names
from ddp_prof.annotate import bucket_marks, hooks, ranges
from ddp_prof.annotate.hooks import process_range
from ddp_prof.annotate.outer_steps import OuterSteps
from ddp_prof.annotate.tracebacks import stands_for

TAKES_OVER = 10
"""Another optimizer counts from now on if it has made so many steps while the one that counts made none: few networks
wait so long for another one that is trained beside them, and if one does, the shorter steps tell more."""

counts: list[CountedSteps] = []
"""The object that marks steps now, as the only element; empty if none does."""

at_skipped_step: list[Callable[[Optimizer], None]] = []
"""Called with an optimizer after each step of a GradScaler that did not call it, because gradients had overflowed."""


class CountedSteps:
    """Counts the steps of the program from :meth:`begin` to :meth:`stop`, and opens a range for each.

    Args:
        at_step: Is called with the index of the next step between two steps, and at :meth:`begin`.
        marks: Whether it opens ranges; if not, it only counts.

    Attributes:
        index: Index of the current step; -1 before the first one.
    """

    def __init__(self, at_step: Callable[[int], None] | None = None, *, marks: bool = True) -> None:
        """Register the hooks that count: after each step of an optimizer or a scaler, before a synchronized forward."""
        self.index = -1
        self._at_step, self._marks = at_step, marks
        self._optimizer: weakref.ref[Any] | None = None  # its steps are counted
        self._counted: Any = None  # its parameters, which the program may delete
        self._since: Any = None  # for each optimizer that stepped since then, how often
        self._ddp: weakref.ref[Any] | None = None  # the first DDP with a synchronized forward
        self._counts_forwards: bool | None = None  # whether there is no optimizer; None: not known yet
        self._range: ranges.OpenRange | None = None
        self._outer_steps = OuterSteps()
        self._handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        _follow_scalers()
        at_skipped_step.append(self._count)
        bucket_marks.at_synchronized_forward.append(self._count_forward)
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
        """Emit a range in the current step which says that the program ends before this step is complete."""
        if self._range is not None:
            self._mark(unfinished=1)

    def _mark(self, **fields: int) -> None:
        """Emit a range within the current step that says more about it than was known when it began."""
        with ranges.NestedRange(range_names.format_range(range_names.STEP, index=self.index, **fields)):
            pass

    def stop(self) -> None:
        """Count no more: remove the hooks, and end the range of the current step, which is marked as unfinished."""
        for handle in self._handles:
            handle.remove()
        if self._count in at_skipped_step:
            at_skipped_step.remove(self._count)
        if self._count_forward in bucket_marks.at_synchronized_forward:
            bucket_marks.at_synchronized_forward.remove(self._count_forward)
        if self in counts:
            counts.remove(self)
        self.mark_unfinished()
        self.close()

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        self._outer_steps.begins(optimizer)

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        """Count a step of an optimizer that no other one has called."""
        if self._outer_steps.ends(optimizer):
            self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        """Begin the next step if ``optimizer`` is the one that counts; called after each step of any, or a skipped one.

        Another optimizer takes over if it shares parameters with the one that counts, and that one is gone or does not
        step while it steps twice: some programs make a new optimizer for each epoch. If it shares none, after
        :data:`TAKES_OVER` steps; or after two if the one that counts is gone and no other one steps.
        """
        is_own = self._optimizer is None or self._optimizer() is optimizer
        often = 1
        if not is_own:
            self._since[optimizer] = often = self._since.get(optimizer, 0) + 1
            is_gone = self._optimizer() is None  # type: ignore[misc]  # not own: there is one
            shares = (is_gone or often > 1) and any(parameter in self._counted for parameter in _parameters(optimizer))
            if not shares and often < (2 if is_gone and len(self._since) == 1 else TAKES_OVER):
                return
        if self._optimizer is None or not is_own:
            self._optimizer = weakref.ref(optimizer)
            self._counted = WeakIdKeyDictionary(dict.fromkeys(_parameters(optimizer)))
        self._since = weakref.WeakKeyDictionary()
        if self.index >= 0:
            self._begin_step(is_warmup=often > 1)  # it holds as many steps of the new optimizer
            # The rank is recorded in each step: without a DDP, no forward pass is marked with it.
            if self._marks and dist.is_available() and dist.is_initialized():
                with process_range(type(optimizer).__name__, _parameters(optimizer)):
                    pass

    def _count_forward(self, ddp: Any) -> None:
        """Begin the next step if ``ddp`` is the first DDP and the program has no optimizer of torch.

        Called before each forward of any DDP whose backward reduces gradients.
        """
        if self._optimizer is not None or self.index < 0:
            return
        if self._ddp is None:
            self._ddp = weakref.ref(ddp)  # its first pass belongs to step 0
        elif self._ddp() is ddp:
            if self._counts_forwards is None:  # asked once: this looks at all objects
                self._counts_forwards = not any(issubclass(type(one), Optimizer) for one in gc.get_objects())
            if self._counts_forwards:
                self._begin_step()

    def _begin_step(self, *, is_warmup: bool = False) -> None:
        """End the range of the current step, call ``at_step``, and open the range of the next step.

        ``is_warmup``: whether the step that ends here was none like the others, which was not known when it began.
        """
        is_warmup |= hooks.has_agreed_unseen() or bucket_marks.agreement_follows
        if self._range is not None and self.index > 0 and is_warmup:
            self._mark(late_warmup=1)
        warmup = {"warmup": 1} if self.index < 0 or bucket_marks.agreement_follows else {}
        name = range_names.format_range(range_names.STEP, index=self.index + 1, **warmup)
        if self._range is not None:  # a step lasts until the next one: what the name costs belongs to this step
            ranges.prepare(name)
        self.close()
        self.index += 1
        if self._at_step is not None:
            self._at_step(self.index)
        if not self._marks:
            return
        if not (ranges.steps_are_marked or ranges.monitor_marks_steps):
            self._range = ranges.OpenRange(name)
        bucket_marks.agreement_follows = False


@cache
def _follow_scalers() -> None:
    """Replace ``GradScaler.step`` by one that also calls :data:`at_skipped_step`; do this once per process."""
    scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # the latter before torch 2.3
    original = scaler.step

    @stands_for(original)
    def step(scaling: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step as torch's does, and find out whether the optimizer was called."""
        called: list[Any] = []
        handle = register_optimizer_step_post_hook(lambda *_: called.append(True))
        try:
            result = original(scaling, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        inner = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's, which wraps it
        if not called and isinstance(inner, Optimizer):
            for call in tuple(at_skipped_step):
                call(inner)
        return result

    scaler.step = step


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
