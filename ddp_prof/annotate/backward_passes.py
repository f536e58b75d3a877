"""Marks backward passes, and in them DDP's wait for its buckets.

No hook of torch encloses a whole backward pass. So ``torch.autograd.backward``, which every ``loss.backward()`` calls,
is replaced by a function that opens a range around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from threading import get_ident
from typing import Any

import torch

from ddp_prof.annotate import ranges
from ddp_prof.annotate.ranges import OpenRange
from ddp_prof.annotate.tracebacks import hide_own_frames, stands_for


class BackwardPasses:
    """Marks backward passes, which nest if a part of the model is computed again (activation checkpointing).

    DDP may wait for its buckets at the end of a pass: a ``synchronize`` range is opened there. If the buckets have
    ranges, the outermost ``backward`` range ends where this wait begins, so that the communication after it counts as
    the tail of backward. Ranges of buckets that are still open are closed at the end of the outermost pass.
    """

    def __init__(self) -> None:
        self._open: list[OpenRange] = []
        self._depth = self._users = 0
        self._may_wait = self._ends_at_wait = False

    def acquire(self) -> Callable[[], None]:
        """Mark all passes from now on, and return the function :meth:`_release`, by which the caller stops this.

        All callers share one replacement of ``torch.autograd.backward``, so that a pass gets one range. It is taken
        back when every caller has called the function that it got.
        """
        hide_own_frames()
        self._users += 1
        if self._users == 1:
            self._original = original = torch.autograd.backward

            @stands_for(original)
            def marked(tensors: Any, *args: Any, **kwargs: Any) -> None:
                """Run ``torch.autograd.backward`` within a range, as long as marks are wanted."""
                if isinstance(tensors, Iterator):
                    tensors = tuple(tensors)  # _mark and original both read them
                with self._mark(tensors) if self._users else nullcontext():
                    original(tensors, *args, **kwargs)

            torch.autograd.backward = self._marked = marked
        return self._release

    def _release(self) -> None:
        self._users -= 1
        if not self._users and torch.autograd.backward is self._marked:
            torch.autograd.backward = self._original

    @contextmanager
    def _mark(self, tensors: Any) -> Iterator[None]:
        """Return a context that marks one backward pass, and DDP's wait for its buckets at the end of the pass.

        Args:
            tensors: The roots of the pass (one tensor or several), for example the loss.
        """
        self._depth += 1
        is_queued = False
        # own holds the backward range, waits the synchronize range; each closes what it holds.
        own, waits, thread = ExitStack(), ExitStack(), get_ident()

        def queue_begin_wait(_gradient: torch.Tensor) -> None:
            """Let autograd call ``begin_wait`` at the end of this pass.

            DDP queues its own callback when its last bucket is full, which is later, so it is called later.
            """
            nonlocal is_queued
            if not is_queued and not torch.compiler.is_compiling():  # compiled autograd refuses callbacks
                is_queued = True
                with suppress(RuntimeError):  # raised in a compiled pass
                    torch.autograd.Variable._execution_engine.queue_callback(begin_wait)

        def begin_wait() -> None:
            """End the backward range if buckets have ranges; open ``synchronize``. Autograd's thread may call this."""
            if get_ident() == thread:  # a nested range is cheaper
                if self._depth == 1 and self._ends_at_wait:
                    own.close()
                waits.enter_context(ranges.synchronize())
            else:
                waits.callback(ranges.start_synchronize().end)

        roots = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        # Autograd accepts callbacks only while it runs, and it may begin with any of the roots.
        hooks = [
            root.register_hook(queue_begin_wait)  # type: ignore[no-untyped-call]
            for root in roots
            if self._may_wait and isinstance(root, torch.Tensor) and root.requires_grad
        ]
        try:
            with own, waits:
                own.enter_context(ranges.backward())
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._depth -= 1
            if not self._depth:
                self._may_wait = False
                while self._open:
                    self._open.pop().end()

    def expect_wait(self, *, marks_buckets: bool) -> None:
        """Note that DDP reduces gradients in the next pass; ``marks_buckets``: whether each bucket gets a range."""
        self._may_wait, self._ends_at_wait = True, marks_buckets

    def add_bucket(self, span: OpenRange) -> None:
        """Close ``span``, the range of a bucket, at the end of the pass if it is still open then.

        gloo's thread may close it only later.
        """
        if self._depth:  # outside of a pass, a rank without a batch takes part in the reductions of the others
            self._open.append(span)


passes = BackwardPasses()
