"""How long each step took, on one clock, and what filled that time.

Where the host keeps up with its device a step lasts as long as its range on the host. Where the host runs ahead, that
range tells when the step's work was asked for, and not when it was done: most of it lies outside of the range. A step
then lasts from its first work on the device to that of the next step::

    host      |0||1||2|
    device    .0000000000.1111111111.2222222222
    step 0     |---------|
    step 1                |---------|            how long step 2 lasts is not known: no step follows

The first work of a step is the first on the stream on which it computes most. Streams work in the order of launches, so
that no such length is negative; a copy that is fetched ahead, on a stream of its own, begins no step.

The windows of steps do not meet, and all that fills a step's length is what lies in its window, whichever step launched
it. So the parts of a length sum to it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.attribution import SYNCHRONIZE_PHASE, Events
from ddp_prof.analyze.core.phases import Phases
from ddp_prof.analyze.core.steps import Steps
from ddp_prof.analyze.intervals import Intervals
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Ints, Mask, Table, distinct_rows

HOST, DEVICE = "host", "device"
"""Whose clock tells how long a step took."""


@dataclass(frozen=True)
class StepTimes(Table):
    """A row a measured step; none where the trace tells no steps.

    Compute, communication and copies are all of the rank's, whichever step launched them.

    Attributes:
        start_ns: Start of the step's window; ``NO_TIME`` where its length is not known.
        length_ns: Length of it; ``UNKNOWN`` where it is not known, and then the parts are 0.
        compute_ns: Compute in it; ``overlapped_ns`` is the part of it beside which there is communication.
        exposed_ns: Communication in it beside which there is no compute.
        exposed_memory_ns: Copies in it beside which there is neither.
        calls_ns: In ``synchronize``, what neither compute nor communication fills: the host's work round its calls.
    """

    start_ns: Ints
    length_ns: Ints
    compute_ns: Ints
    overlapped_ns: Ints
    exposed_ns: Ints
    exposed_memory_ns: Ints
    calls_ns: Ints

    @property
    def is_known(self) -> Mask:
        """For each step: is its length known?"""
        known: Mask = self.length_ns != UNKNOWN
        return known


def device_lead(events: Events, steps: Steps) -> tuple[Ints, Ints]:
    """For each step: the summed time of its work on the device, and what of it lies outside the step's host range."""
    rows = (events.step != UNKNOWN) & (events.activity != UNKNOWN)
    start, end, step = events.start_ns[rows], events.end_ns[rows], events.step[rows]
    within = np.minimum(end, steps.end_ns[step]) - np.maximum(start, steps.start_ns[step])
    work, outside = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    np.add.at(work, step, end - start)
    np.add.at(outside, step, end - start - np.maximum(0, within))
    return work, outside


def is_ahead(work_ns: int, outside_ns: int) -> bool:
    """Whether the host runs ahead: by the sums over steps of what :func:`device_lead` tells."""
    return 2 * outside_ns > work_ns


def measure_step_times(
    events: Events,
    steps: Steps,
    phases: Phases,
    union_of: Callable[[Category], Intervals],
    device_follows: Mask | None,
) -> StepTimes:
    """Measure the steps of a rank.

    Args:
        events: All of the rank's.
        steps: Its steps, which ``events.step`` points into.
        phases: The host's phases.
        union_of: The time covered by the events of a category.
        device_follows: Where the device's clock counts: of each step whether the next one is that which followed.
    """
    if device_follows is None:
        start, end, known = steps.start_ns, steps.end_ns, np.ones(len(steps), np.bool_)
    else:
        start = first_work(events, len(steps))
        end = np.append(start[1:], NO_TIME)
        known = device_follows & (start != NO_TIME) & (end >= start)
    start, end = np.where(known, start, NO_TIME), np.where(known, end, NO_TIME)
    compute, communication = union_of(Category.COMPUTE), union_of(Category.COMMUNICATION)
    busy = compute | communication
    compute_ns, busy_ns = compute.covered_ns(start, end), busy.covered_ns(start, end)
    all_ns = (busy | union_of(Category.MEMORY)).covered_ns(start, end)
    return StepTimes(
        start_ns=start,
        length_ns=np.where(known, end - start, UNKNOWN),
        compute_ns=compute_ns,
        overlapped_ns=(compute & communication).covered_ns(start, end),
        exposed_ns=busy_ns - compute_ns,
        exposed_memory_ns=all_ns - busy_ns,
        calls_ns=(phases.union_of(SYNCHRONIZE_PHASE) - busy).covered_ns(start, end),
    )


def first_work(events: Events, steps: int) -> Ints:
    """When each step begins on the device; ``NO_TIME`` where it does not compute there.

    Args:
        events: All of the rank's.
        steps: How many steps it has.
    """
    begins = np.full(steps, NO_TIME, np.int64)
    rows = np.flatnonzero((events.step != UNKNOWN) & (events.activity != UNKNOWN))
    computes = ~np.isin(events.category[rows], (Category.COMMUNICATION, Category.MEMORY))
    first, which = distinct_rows(events.step[rows], events.lane[rows])
    if not computes.any():
        return begins
    step, lane = events.step[rows][first], events.lane[rows][first]
    busy_ns, start_ns = np.zeros(len(first), np.int64), np.full(len(first), np.iinfo(np.int64).max)
    np.add.at(busy_ns, which[computes], (events.end_ns - events.start_ns)[rows][computes])
    np.minimum.at(start_ns, which, events.start_ns[rows])
    has_compute = np.isin(np.arange(len(first)), which[computes])
    # The busiest stream of each step comes last, and counts; of equally busy ones the first.
    order = np.lexsort((-lane, busy_ns, has_compute, step))
    begins[step[order]] = np.where(has_compute, start_ns, NO_TIME)[order]
    return begins
