"""Where the time of a step went, each nanosecond once, how long it took, and what the device was at in between.

The window of a step is that of what was launched in it::

    window               |----------------------|
    compute              ..######......######....
    communication        .....#######............
    memory               ..............##........
    compute only           ***         ******
    overlapped                ***
    exposed                      ****
    exposed memory                   (what neither compute nor communication covers)
    idle                 all the rest

Its length is told by one clock. Where the host keeps up with its device a step lasts as long as its range on the host.
Where the host runs ahead, that range tells when the step's work was asked for, and not when it was done. A step then
lasts from its first work on the device to that of the next step::

    host      |0||1||2|
    device    .0000000000.1111111111.2222222222
    step 0     |---------|
    step 1                |---------|            how long step 2 lasts is not known: no step follows

The first work of a step is the first on the stream on which it computes most. Streams work in the order of launches, so
that no such length is negative; a copy that is fetched ahead, on a stream of its own, begins no step. These windows do
not meet, and all that fills a length is what lies in its window, whichever step launched it: its parts sum to it.

While a rank computes nothing its phase is told by the compute before and after::

    compute      ffff...ff....bbbb..bbb....oo
    inside of         f         b             both neighbours are of that phase
    between              fb            bo     between two phases
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE, Events, last_by_step
from ddp_prof.analyze.core.steps import Phases, Steps
from ddp_prof.analyze.intervals import Intervals, union_by_group
from ddp_prof.range_names import FORWARD, OPTIMIZER, PHASES
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, Table, begins_run, distinct_rows, select
from ddp_prof.trace import Category


@dataclass(frozen=True)
class StepBreakdown(Table):
    """One row per step; in each, ``compute_only + overlapped + exposed + exposed_memory + idle == window`` exactly.

    Communication is what was launched in the step; compute and memory are all of the device's in the window, which goes
    from the first event launched in the step to the last such event's end. ``other_comm_ns`` is the part of ``idle_ns``
    in which communication of another step ran.
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
        return self.end_ns - self.start_ns


def measure_breakdown(
    events: Events, steps: Steps, union_of: Callable[[Category], Intervals], *, on_host: bool
) -> StepBreakdown:
    """Divide the window of each of a rank's steps. A step that launched nothing has an empty window.

    With ``on_host`` the host computes, whose range of a step then belongs to the window, too.
    """
    count = len(steps)
    compute, memory = union_of(Category.COMPUTE), union_of(Category.MEMORY)
    bare_memory = memory - compute
    bare_communication = union_of(Category.COMMUNICATION) - compute - memory

    # From the first start to the last end of what each step launched.
    start, end = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    if on_host:
        start, end = steps.start_ns.copy(), steps.end_ns.copy()
    rows = events.step >= 0
    np.minimum.at(start, events.step[rows], events.start_ns[rows])
    np.maximum.at(end, events.step[rows], events.end_ns[rows])
    launched = end >= start
    start, end = np.where(launched, start, 0), np.where(launched, end, 0)
    rows = (events.category == Category.COMMUNICATION) & (events.step >= 0)
    comm_start, comm_end, comm_step = union_by_group(events.start_ns[rows], events.end_ns[rows], events.step[rows])

    def beside_own_ns(of: Intervals) -> Ints:
        return sum_by_group(of.covered_ns(comm_start, comm_end), comm_step, count)

    comm_ns = sum_by_group(comm_end - comm_start, comm_step, count)
    overlapped = beside_own_ns(compute)
    compute_only = compute.covered_ns(start, end) - overlapped
    exposed_memory = bare_memory.covered_ns(start, end) - beside_own_ns(bare_memory)
    return StepBreakdown(
        start_ns=start,
        end_ns=end,
        comm_ns=comm_ns,
        overlapped_ns=overlapped,
        exposed_ns=comm_ns - overlapped,
        compute_only_ns=compute_only,
        exposed_memory_ns=exposed_memory,
        idle_ns=(end - start) - comm_ns - compute_only - exposed_memory,
        other_comm_ns=bare_communication.covered_ns(start, end) - beside_own_ns(bare_communication),
    )


def sum_by_group(values: Ints, group: Ints, groups: int) -> Ints:
    """The sums of groups as exact integers."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total


HOST, DEVICE = "host", "device"
"""Whose clock tells how long a step took."""


@dataclass(frozen=True)
class StepTimes(Table):
    """A row a measured step; none where the trace tells no steps. Parts are all of the rank's, whoever launched them.

    Attributes:
        start_ns: Start of the step's window; ``NO_TIME`` where its length is not known.
        length_ns: ``UNKNOWN`` where it is not known, and then the parts are 0.
        overlapped_ns: The part of ``compute_ns`` beside which there is communication.
        exposed_memory_ns: Copies beside which there is neither compute nor communication.
        calls_ns: In ``synchronize``, what neither fills: the host's work round its calls.
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
        known: Mask = self.length_ns != UNKNOWN
        return known


def is_ahead(work_ns: int, outside_ns: int) -> bool:
    """Whether the host runs ahead, by the sums over steps of ``RankEvents.lead_ns``."""
    return 2 * outside_ns > work_ns


def measure_step_times(
    events: Events, steps: Steps, phases: Phases, union_of: Callable[[Category], Intervals], device_follows: Mask | None
) -> StepTimes:
    """Measure a rank's steps; where the device's clock counts, ``device_follows`` says which the next one followed."""
    if device_follows is None:
        start, end, known = steps.start_ns, steps.end_ns, np.ones(len(steps), np.bool_)
    else:
        start = first_work(events, len(steps))
        end = np.append(start[1:], NO_TIME)
        known = device_follows & (start != NO_TIME) & (end >= start)
    start, end = np.where(known, start, NO_TIME), np.where(known, end, NO_TIME)
    compute, communication = union_of(Category.COMPUTE), union_of(Category.COMMUNICATION)
    exposed = communication - compute
    bare_memory, calls = union_of(Category.MEMORY) - compute - exposed, phases.union_of(SYNCHRONIZE_PHASE)
    return StepTimes(
        start_ns=start,
        length_ns=np.where(known, end - start, UNKNOWN),
        compute_ns=compute.covered_ns(start, end),
        overlapped_ns=(compute & communication).covered_ns(start, end),
        exposed_ns=exposed.covered_ns(start, end),
        exposed_memory_ns=bare_memory.covered_ns(start, end),
        calls_ns=(calls - compute - exposed).covered_ns(start, end),
    )


def first_work(events: Events, steps: int) -> Ints:
    """When each step begins on the device; ``NO_TIME`` where it does not compute there."""
    begins = np.full(steps, NO_TIME, np.int64)
    rows = np.flatnonzero((events.step != UNKNOWN) & (events.activity != UNKNOWN))
    computes = ~np.isin(events.category[rows], (Category.COMMUNICATION, Category.MEMORY))
    first, which = distinct_rows(events.step[rows], events.lane[rows])
    if not computes.any():
        return begins
    step, lane = events.step[rows][first], events.lane[rows][first]
    busy_ns = sum_by_group((events.end_ns - events.start_ns)[rows][computes], which[computes], len(first))
    start_ns = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(start_ns, which, events.start_ns[rows])
    has_compute = np.isin(np.arange(len(first)), which[computes])
    # The busiest stream of each step comes last, and counts; of equally busy ones the first.
    order = np.lexsort((-lane, busy_ns, has_compute, step))
    begins[step[order]] = np.where(has_compute, start_ns, NO_TIME)[order]
    return begins


NONE = -2
"""Stands for the phase before a step's first compute and after its last."""

BETWEEN_STEPS = -3
"""Both phases of the one stretch that stands for all time outside of the steps."""

ALWAYS = -(2**62)
"""Start of the first stretch of a step: earlier than any event."""


@dataclass(frozen=True)
class DevicePhases(Table):
    """Stretches of time by step and start; a stretch ends where the next one of the step starts, the last one never.

    Attributes:
        step: Index into the rank's steps; their number for the time outside of them.
        before: Phase of the compute that starts last before an instant of the stretch, an index into
            ``range_names.PHASES``; ``UNKNOWN`` where that belongs to no phase, ``NONE`` where there is none.
        after: The same of the compute that starts next.
    """

    step: Ints
    start_ns: Ints
    before: Ints
    after: Ints


def find_device_phases(events: Events, steps: int) -> DevicePhases:
    """The stretches of all steps, each of which has at least one; the last stretch is the time outside of them.

    Compute of no phase counts only in steps without any of forward: beside named phases it is a helper's, as a data
    loader's, and the rank's own phase goes on. So it does where an optimizer steps on a bucket and backward follows;
    where forward does, as in a step of two networks, backward was done.
    """
    rows = np.flatnonzero(
        (events.category == Category.COMPUTE) & (events.step != UNKNOWN) & (events.phase != SYNCHRONIZE_PHASE)
    )
    step, start, phase = events.step[rows], events.start_ns[rows], events.phase[rows]
    has_forward = np.zeros(steps, np.bool_)
    has_forward[step[phase == PHASES.index(FORWARD)]] = True
    counts = (phase != UNKNOWN) | ~has_forward[step]
    step, start, phase = step[counts], start[counts], phase[counts]
    if len(within := _within_backward(step, start, phase)):
        step, start, phase = (np.delete(column, within) for column in (step, start, phase))
    # Each step has one row before its first compute; each compute begins a stretch.
    step = np.concatenate([np.arange(steps + 1), step])
    start = np.concatenate([np.full(steps + 1, ALWAYS), start])
    phase = np.concatenate([np.full(steps, NONE), [BETWEEN_STEPS], phase])
    order = np.lexsort((start, step))
    step, start, before = step[order], start[order], phase[order]
    after = np.where(np.append(step[1:] == step[:-1], False), np.append(before[1:], NONE), NONE)
    return select(DevicePhases(step, start, before, after), begins_run(step, before, after))


def _within_backward(step: Ints, start_ns: Ints, phase: Ints) -> Ints:
    """The rows of an optimizer after which backward's is the next of another phase in the step."""
    is_backward = phase == BACKWARD_PHASE
    last_ns = last_by_step(np.where(is_backward, start_ns, NO_TIME), step, int(step.max(initial=-1)) + 1)
    within = np.flatnonzero(phase == PHASES.index(OPTIMIZER))
    within = within[start_ns[within] <= last_ns[step[within]]]
    if len(within):
        is_concerned = np.zeros(len(last_ns), np.bool_)
        is_concerned[step[within]] = True
        others = np.flatnonzero(is_concerned[step] & (phase != PHASES.index(OPTIMIZER)))
        others = others[np.lexsort((~is_backward[others], start_ns[others], step[others]))]
        # Steps laid end to end on one axis cannot reach into each other, so one search serves all of them.
        low = int(start_ns.min())
        axis = step * (int(start_ns.max()) - low + 1) + start_ns - low
        within = within[is_backward[others[np.searchsorted(axis[others], axis[within])]]]
    return within
