"""Where the time of a step went, each nanosecond once.

window               |----------------------|
compute              ..######......######....
communication        .....#######............
memory               ..............##........
compute only           ***         ******
overlapped                ***
exposed                      ****
exposed memory                   (what neither compute nor communication covers)
idle                 all the rest
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.core.attribution import Events
from ddp_prof.analyze.core.steps import Steps
from ddp_prof.analyze.intervals import Intervals, union_by_group
from ddp_prof.trace import Category, Ints, Table


@dataclass(frozen=True)
class StepBreakdown(Table):
    """One row per step; in each, ``compute_only + overlapped + exposed + exposed_memory + idle == window`` exactly.

    Communication is what was launched in the step; compute and memory are all of the device's in the window.

    Attributes:
        start_ns: Start of the window: of the first event launched in the step.
        end_ns: End of the window: of the last such event to end.
        comm_ns: ``overlapped_ns + exposed_ns``.
        other_comm_ns: The part of ``idle_ns`` in which communication of another step ran.
    """

    start_ns: Ints
    end_ns: Ints
    comm_ns: Ints
    overlapped_ns: Ints
    exposed_ns: Ints
    compute_only_ns: Ints
    exposed_memory_ns: Ints
    idle_ns: Ints
    other_comm_ns: Ints

    @property
    def window_ns(self) -> Ints:
        """Length of each window."""
        return self.end_ns - self.start_ns


class TimeParts(NamedTuple):
    """A stretch of time by what a rank did in it, each instant in one part."""

    compute_only: Intervals
    overlapped: Intervals
    exposed: Intervals
    exposed_memory: Intervals
    idle: Intervals


def divide_time(union_of: Callable[[Category], Intervals], window: Intervals) -> TimeParts:
    """The parts of a window whatever step they belong to; :func:`measure_breakdown` gives their lengths by step."""
    compute, communication, memory = (
        union_of(category) & window for category in (Category.COMPUTE, Category.COMMUNICATION, Category.MEMORY)
    )
    busy = compute | communication
    return TimeParts(
        compute_only=compute - communication,
        overlapped=communication & compute,
        exposed=communication - compute,
        exposed_memory=memory - busy,
        idle=window - (busy | memory),
    )


def measure_breakdown(
    events: Events, steps: Steps, union_of: Callable[[Category], Intervals], *, on_host: bool
) -> StepBreakdown:
    """Divide the window of each of a rank's steps. A step that launched nothing has an empty window.

    Args:
        events: All of the rank's.
        steps: Its steps, which ``events.step`` points into.
        union_of: The time covered by the events of a category.
        on_host: Whether the host computes, whose range of a step then belongs to the window, too.
    """
    count = len(steps)
    compute, memory = union_of(Category.COMPUTE), union_of(Category.MEMORY)
    communication = union_of(Category.COMMUNICATION)
    # Of a difference only the length is needed, and |A - B| = |A| - |A and B|, which spares making it.
    hidden_memory = memory & compute
    accompanied = (communication & compute) | (communication & memory)

    start, end = _windows(events, steps, on_host=on_host)
    rows = (events.category == Category.COMMUNICATION) & (events.step >= 0)
    comm_start, comm_end, comm_step = union_by_group(events.start_ns[rows], events.end_ns[rows], events.step[rows])

    def length_in_communication(of: Intervals) -> Ints:
        return sum_by_group(of.covered_ns(comm_start, comm_end), comm_step, count)

    comm_ns = sum_by_group(comm_end - comm_start, comm_step, count)
    overlapped = length_in_communication(compute)
    compute_only = compute.covered_ns(start, end) - overlapped
    memory_alone = memory.covered_ns(start, end) - hidden_memory.covered_ns(start, end)
    exposed_memory = memory_alone - (length_in_communication(memory) - length_in_communication(hidden_memory))
    communication_alone = communication.covered_ns(start, end) - accompanied.covered_ns(start, end)
    return StepBreakdown(
        start_ns=start,
        end_ns=end,
        comm_ns=comm_ns,
        overlapped_ns=overlapped,
        exposed_ns=comm_ns - overlapped,
        compute_only_ns=compute_only,
        exposed_memory_ns=exposed_memory,
        idle_ns=(end - start) - comm_ns - compute_only - exposed_memory,
        other_comm_ns=communication_alone
        - (length_in_communication(communication) - length_in_communication(accompanied)),
    )


def sum_by_group(values: Ints, group: Ints, groups: int) -> Ints:
    """The sum of the values of each group, as exact integers."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total


def _windows(events: Events, steps: Steps, *, on_host: bool) -> tuple[Ints, Ints]:
    """From the first start to the last end of what each step launched; on a CPU the host's range counts too."""
    start = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.full(len(steps), np.iinfo(np.int64).min)
    if on_host:
        start, end = steps.start_ns.copy(), steps.end_ns.copy()
    rows = events.step >= 0
    np.minimum.at(start, events.step[rows], events.start_ns[rows])
    np.maximum.at(end, events.step[rows], events.end_ns[rows])
    launched = end >= start
    return np.where(launched, start, 0), np.where(launched, end, 0)
