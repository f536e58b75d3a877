"""Finds the outermost of optimizer steps that run within each other.

An optimizer may call another one: ``ZeroRedundancyOptimizer`` and ``ddp_prof.ddp.ShardedOptimizer`` step on a rank's
part by an optimizer of their own and then send the parameters to the other ranks. Only the step that the program called
is one of its training.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any


class OuterSteps:
    """Told by hooks when a step of an optimizer begins and ends, it answers whether that is the outermost one."""

    def __init__(self) -> None:
        self._running = threading.local()  # ``optimizer`` (its ``id``) and ``call`` of each thread's outermost step

    def begins(self, optimizer: Any) -> bool:
        """Return whether a step that begins is in no other one; to be called by a hook that torch itself calls."""
        frame, within = sys._getframe(2), getattr(self._running, "call", None)
        # A step that raised calls no hook at its end, but is no longer on the stack either.
        if within is not None and _is_on_stack(within, frame.f_back):
            return False
        self._running.optimizer, self._running.call = id(optimizer), _call_of(frame)
        return True

    def ends(self, optimizer: Any) -> bool:
        """Return whether the step that ends is the outermost one."""
        if getattr(self._running, "optimizer", None) != id(optimizer):
            return False
        self._running.optimizer = self._running.call = None
        return True


def _call_of(frame: FrameType) -> tuple[int, CodeType]:
    """Return what tells a call from the others on the stack.

    The frame itself would keep the variables of a step that raised, such as those of one that ran out of memory.
    """
    return id(frame), frame.f_code


def _is_on_stack(call: tuple[int, CodeType], frame: FrameType | None) -> bool:
    while frame is not None and _call_of(frame) != call:
        frame = frame.f_back
    return frame is not None
