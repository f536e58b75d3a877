"""Boxes out of intervals: on which row each lies, and what is known of it."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ddp_prof.present import theme
from ddp_prof.present.timeline.model import Boxes
from ddp_prof.range_names import PHASES
from ddp_prof.trace import UNKNOWN, Ints, Mask

CODE = {category: code for code, category in enumerate(theme.CATEGORIES)}
PHASE_CODE = np.array([*(CODE[phase] for phase in PHASES), CODE[theme.COMPUTE]], np.int64)
"""What compute is drawn as, by the phase that launched it; the last one is found by ``UNKNOWN``."""


class View(NamedTuple):
    """What is shown of a trace, in its own nanoseconds."""

    zero_ns: int
    start_ns: int
    end_ns: int

    def is_visible(self, start_ns: Ints, end_ns: Ints) -> Mask:
        """Which intervals are seen, if only in part; an instant lasts as long as a nanosecond."""
        seen: Mask = (start_ns < self.end_ns) & (np.maximum(end_ns, start_ns + 1) > self.start_ns)
        return seen


def stack(start_ns: Ints, end_ns: Ints) -> Ints:
    """The row of each interval: the topmost that is free where it starts.

    0000..333
    .1111.....
    ..222222..
    """
    level = np.zeros(len(start_ns), np.int64)
    if np.all(start_ns[1:] >= end_ns[:-1]):
        return level
    order = np.argsort(start_ns, kind="stable")
    if np.all(start_ns[order][1:] >= end_ns[order][:-1]):
        return level
    busy: list[tuple[int, int]] = []  # (end, row)
    free: list[int] = []
    for item in order.tolist():
        while busy and busy[0][0] <= start_ns[item]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        level[item] = row
        heapq.heappush(busy, (int(end_ns[item]), row))
    return level


def nest(start_ns: Ints, end_ns: Ints) -> Ints:
    """The row of each interval: one below the one that it lies in.

    000000000..
    .1111.1111.
    ..2........

    Intervals that cross, as ranges of a thread never do, are stacked.
    """
    if np.all(start_ns[1:] >= np.maximum(end_ns, start_ns + 1)[:-1]):
        return np.zeros(len(start_ns), np.int64)
    order = np.lexsort((-end_ns, start_ns))
    start, end = start_ns[order], end_ns[order]
    ended = np.searchsorted(np.sort(np.maximum(end, start + 1)), start, side="right")
    level = np.empty(len(order), np.int64)
    level[order] = np.arange(len(order)) - ended
    for row in range(int(level.max(initial=0)) + 1):
        own = level[order] == row
        if np.any(start[own][1:] < end[own][:-1]):
            return stack(start_ns, end_ns)
    return level


_OPTIONAL = ("name_id", "step", "bucket", "bytes", "phase", "call", "shape", "registers", "collective", "consumer")


def make_boxes(view: View, start_ns: Ints, end_ns: Ints, category: Ints, **columns: Ints) -> Boxes:
    """Boxes on the panel's own time; columns not given hold ``UNKNOWN``, levels are those of a stack."""
    optional = dict.fromkeys(_OPTIONAL, np.broadcast_to(np.int64(UNKNOWN), len(start_ns)))
    if "level" not in columns:
        columns["level"] = stack(start_ns, end_ns)
    return Boxes(
        start_ns=start_ns - view.zero_ns,
        end_ns=end_ns - view.zero_ns,
        category=category,
        **(optional | columns),
    )


def codes_of(category: str, rows: int) -> Ints:
    """A column of one category."""
    return np.broadcast_to(np.int64(CODE[category]), rows)
