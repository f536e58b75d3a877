"""Counts the collectives of steps and times those that are waited for one by one, from the ranges that mark them."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

from ddp_prof import range_names
from ddp_prof.manifest import MessageTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Message(NamedTuple):
    """One collective: its bytes, and nanoseconds of the host's clock from its launch to its end."""

    bytes: int
    duration_ns: int


class MessageLog:
    """An ``annotate.Sink`` that notes each collective and lets other ranges pass.

    Args:
        settle: Waits for the device. Called before a message and within its time, so that its time is its own; a
            variant that does not block in each call must get one that does nothing.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self.messages: list[Message] = []
        self._settle = settle

    def push(self, text: str) -> None:
        """See ``annotate.Sink``."""

    def pop(self) -> None:
        """See ``annotate.Sink``."""

    def start(self, text: str) -> object:
        """See ``annotate.Sink``."""
        parsed = range_names.parse_range(text)
        if parsed.name not in range_names.COLLECTIVES:
            return None
        self._settle()
        return parsed.number("bytes"), time.perf_counter_ns()

    def end(self, token: object) -> None:
        """See ``annotate.Sink``."""
        if token is None:
            return
        self._settle()
        end_ns = time.perf_counter_ns()
        assert isinstance(token, tuple)
        size, start_ns = token
        self.messages.append(Message(size, end_ns - start_ns))


def summarize(messages: Sequence[Message]) -> tuple[MessageTimes, ...]:
    """One row a size, the smallest first."""
    durations: dict[int, list[int]] = {}
    for size, duration_ns in messages:
        durations.setdefault(size, []).append(duration_ns)
    return tuple(
        MessageTimes(size, len(times), round(statistics.median(times)), min(times))
        for size, times in sorted(durations.items())
    )
