"""How long a step took, what filled that time (each nanosecond counted once), and the device's phase at each instant.

The window of a step contains everything that was launched in it::

    window               |----------------------|
    compute              ..######......######....
    communication        .....#######............
    memory               ..............##........
    compute only           ***         ******
    overlapped                ***
    exposed                      ****
    exposed memory                   (what neither compute nor communication covers)
    idle                 all the rest

The length of a step is that of its range on the host or, if the host runs ahead, the time from its first work on the
device to that of the next step. Everything that lies in it counts, whichever step launched it::

    host      |0||1||2|
    device    .0000000000.1111111111.2222222222
    step 0     |---------|
    step 1                |---------|            the length of step 2 is not known: no step follows

The first work of a step is the first operation on the stream on which the step computes most, so that copies which are
fetched ahead on another stream begin no step.

While a rank computes nothing, its phase follows from the compute before and after. f is compute of forward, b of
backward, o of the optimizer::

    compute      ffff...ff....bbbb..bbb....oo
    inside of        fff          bb              the compute before and after is of one phase
    between               f->b         b->o       the compute before is of another phase than the compute after
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE, Events, last_by_step
from ddp_prof.analyze.core.steps import Phases, Steps
from ddp_prof.analyze.intervals import Intervals, union_by_group
from ddp_prof.range_names import FORWARD, OPTIMIZER, PHASES
from ddp_prof.table import (
    NEVER,
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Table,
    begins_run,
    concatenate,
    distinct_rows,
    is_in,
    parts_of,
    rows_of,
    select,
)
from ddp_prof.trace import Category


@dataclass(frozen=True)
class StepBreakdown(Table):
    """What filled the window of each step; see the module's description.

    There is one row per step, and ``compute_only + overlapped + exposed + exposed_memory + idle == window`` exactly.
    Communication is only that which was launched in the step. Compute and memory are everything that ran in the window.

    Attributes:
        start_ns, end_ns: The window.
        comm_ns: Communication, of which ``overlapped_ns`` beside compute and ``exposed_ns`` without.
        exposed_memory_ns: Copies without compute or communication at the same time.
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
        return self.end_ns - self.start_ns


def find_windows(events: Events, steps: Steps, *, on_host: bool) -> tuple[Ints, Ints]:
    """Return the start and the end of the window of each step of a rank. A step that launched nothing has an empty one.

    Args:
        events: The events of the rank.
        steps: Its steps.
        on_host: Whether the host itself computes: the window then includes the step's range.
    """
    # From the first start to the last end of what each step launched.
    start, end = np.full(len(steps), NEVER), np.full(len(steps), -NEVER)
    if on_host:
        start, end = steps.start_ns.copy(), steps.end_ns.copy()
    rows = rows_of(events.step >= 0)
    np.minimum.at(start, events.step[rows], events.start_ns[rows])
    np.maximum.at(end, events.step[rows], events.end_ns[rows])
    launched = end >= start
    return np.where(launched, start, 0), np.where(launched, end, 0)


def measure_breakdown(
    events: Events, windows: tuple[Ints, Ints], union_of: Callable[[Category], Intervals]
) -> StepBreakdown:
    """Return what filled the window of each step of a rank.

    Args:
        events: The events of the rank.
        windows: The windows of its steps; see :func:`find_windows`.
        union_of: Returns when the rank did work of a category.
    """
    (start, end), count = windows, len(windows[0])
    compute, memory = union_of(Category.COMPUTE), union_of(Category.MEMORY)
    bare_memory = memory - compute
    bare_communication = union_of(Category.COMMUNICATION) - compute - memory

    rows = (events.category == Category.COMMUNICATION) & (events.step >= 0)
    comm_start, comm_end, comm_step = union_by_group(events.start_ns[rows], events.end_ns[rows], events.step[rows])

    def beside_own_comm_ns(of: Intervals) -> Ints:
        """Return for each step how much of ``of`` lies beside the step's own communication."""
        return sum_by_group(of.covered_ns(comm_start, comm_end), comm_step, count)

    comm_ns = sum_by_group(comm_end - comm_start, comm_step, count)
    overlapped = beside_own_comm_ns(compute)
    compute_only = compute.covered_ns(start, end) - overlapped
    exposed_memory = bare_memory.covered_ns(start, end) - beside_own_comm_ns(bare_memory)
    return StepBreakdown(
        start_ns=start,
        end_ns=end,
        comm_ns=comm_ns,
        overlapped_ns=overlapped,
        exposed_ns=comm_ns - overlapped,
        compute_only_ns=compute_only,
        exposed_memory_ns=exposed_memory,
        idle_ns=(end - start) - comm_ns - compute_only - exposed_memory,
        other_comm_ns=bare_communication.covered_ns(start, end) - beside_own_comm_ns(bare_communication),
    )


def sum_by_group(values: Ints, group: Ints, groups: int) -> Ints:
    """Return the sum of the values of each group 0, 1, 2, ..., as an exact integer."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total


HOST, DEVICE = "host", "device"
"""The clock that measures the length of a step."""


@dataclass(frozen=True)
class StepTimes(Table):
    """How long each measured step took, and what ran meanwhile, whichever step launched it.

    There is one row per measured step, and none in a capture without steps.

    Attributes:
        start_ns: Start of the step; ``NO_TIME`` if its length is not known.
        length_ns: Length of the step; ``UNKNOWN`` if it is not known, and then all columns below are 0.
        compute_ns: Time during which the rank computes.
        overlapped_ns: The part of ``compute_ns`` during which there is communication.
        exposed_ns: Communication without compute at the same time.
        exposed_memory_ns: Copies without compute or communication at the same time.
        calls_ns: Time in ``synchronize`` without compute or communication: the host's work around its calls.
    """

    start_ns: Ints
    length_ns: Ints
    compute_ns: Ints
    overlapped_ns: Ints
    exposed_ns: Ints
    exposed_memory_ns: Ints
    calls_ns: Ints

    @property
    def compute_only_ns(self) -> Ints:
        """Compute without communication at the same time; means nothing where the length is not known."""
        return self.compute_ns - self.overlapped_ns

    @property
    def idle_ns(self) -> Ints:
        """What compute, exposed communication and exposed copies leave of the length, where that is known."""
        return self.length_ns - self.compute_ns - self.exposed_ns - self.exposed_memory_ns

    @property
    def is_known(self) -> Mask:
        known: Mask = self.length_ns != UNKNOWN
        return known


MOST_OUTSIDE = 0.05
"""Largest fraction of the steps' device work that may lie outside of their ranges on the host.

Above it, the device's clock measures steps (:attr:`Lead.is_ahead`), or a note is given (:func:`lacks_work`).
"""


class Lead(NamedTuple):
    """How far the host of a rank is ahead of its device, as sums over steps.

    Attributes:
        work_ns: Durations of the operations that the steps launched on the device.
        outside_ns: How much of ``work_ns`` lies outside of the step's own range on the host.
        between_ns: How much of ``work_ns`` lies between the range of a step and the range of the step that follows it.
        held_ns: Durations of all device work in the ranges, whichever step launched it.
        followed: Number of steps whose length is known by the device's clock.
    """

    work_ns: int
    outside_ns: int
    between_ns: int
    held_ns: int
    followed: int

    @property
    def is_ahead(self) -> bool:
        """Whether the length of a step is the time from its first device work to the next step's, and not its range.

        That is so if most work lies outside of the step's own range, or if more than :data:`MOST_OUTSIDE` of it lies
        between ranges, and so in no range. If each range contains as much work of the step before as it lacks of its
        own step, the range is as long as the step. Digits are the operations of the step with that number::

            host      |000000||111111||222222|         none is between ranges: the host's clock
            device    ....0000000.1111111.2222222

            host      |0000|    |1111|    |2222|       3 of 7 are between ranges: the device's clock
            device    .0000000...1111111...2222222
        """
        if 2 * self.outside_ns > self.work_ns:
            return True
        return self.between_ns > MOST_OUTSIDE * self.work_ns and self.followed > 0


def lacks_work(work_ns: int, held_ns: int) -> bool:
    """Return whether the steps' ranges on the host lack so much of the steps' device work that a note says so.

    The arguments are those of :class:`Lead`.
    """
    return held_ns < (1 - MOST_OUTSIDE) * work_ns


NO_LEAD = Lead(0, 0, 0, 0, 0)


def covered_by_each(start_ns: Ints, end_ns: Ints, low_ns: Ints, high_ns: Ints) -> Ints:
    """Return for each interval ``[low, high)`` the sum of the rows' durations within it.

    A row goes from its start to its end. Rows may overlap, and then count several times.
    """
    if not len(start_ns) or not len(low_ns):
        return np.zeros(len(low_ns), np.int64)
    first = min(int(start_ns.min()), int(low_ns.min()))
    borders = np.stack([high_ns, low_ns]) - first

    def since(time_ns: Ints) -> Ints:
        """Return the sum of the times from each of ``time_ns`` to each border, where the border comes later."""
        times = time_ns - first
        times.sort(kind="stable")  # takes few passes, as the times are nearly in order
        earlier = np.searchsorted(times, borders)
        sums = np.cumsum(times, out=times)  # the times are as many as events, so they are held once
        found: Ints = earlier * borders - np.where(earlier > 0, sums[earlier - 1], 0)
        return found

    # Before a border, a row that began adds the time since its start; one that ended takes that since its end away.
    before_high, before_low = since(start_ns) - since(end_ns)
    covered: Ints = before_high - before_low
    return covered


def measure_step_times(
    steps: Steps,
    phases: Phases,
    union_of: Callable[[Category], Intervals],
    device_steps: tuple[Ints, Ints, Mask] | None,
) -> StepTimes:
    """Return how long a rank's steps took, and what ran meanwhile.

    Args:
        steps: The steps of the rank.
        phases: The ranges of its phases on the host.
        union_of: Returns when the rank did work of a category.
        device_steps: ``None`` if the host's ranges are the steps. Else the device's clock measures them, and this is
            the result of :func:`find_device_steps`.
    """
    if device_steps is None:
        start, end, known = steps.start_ns, steps.end_ns, np.ones(len(steps), np.bool_)
    else:
        start, end, known = device_steps
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


def find_device_steps(events: Events, steps: Steps, is_followed: Mask) -> tuple[Ints, Ints, Mask]:
    """Return when each step begins on the device, when the next row begins there, and whether these times are a length.

    They are if the next row is the step that followed (``is_followed``), and if both times are known and in order.
    """
    start = first_work(events, len(steps))
    end = np.append(start[1:], NO_TIME)
    return start, end, is_followed & (start != NO_TIME) & (end >= start)


def first_work(events: Events, steps: int) -> Ints:
    """Return when each step begins on the device; ``NO_TIME`` if it computes nothing there.

    That is the start of its first operation on the stream on which it computes most. ``steps`` is the number of steps.
    """
    begins = np.full(steps, NO_TIME, np.int64)
    if not len(events):
        return begins
    # The events are grouped part by part, since they may be many, and then the groups of all parts.
    found = _group(concatenate(*(_group(_single_operations(events, part)) for part in parts_of(len(events)))))
    # The last value written stays: of the step's streams with compute, the busiest one; if several are equally busy,
    # the one with the lowest number.
    order = np.lexsort((-found.lane, found.busy_ns, found.computes, found.step))
    begins[found.step[order]] = np.where(found.computes, found.start_ns, NO_TIME)[order]
    return begins


@dataclass(frozen=True)
class _OfStream(Table):
    """One row per operation, or per step and stream.

    Attributes:
        step, lane: The step and the stream.
        busy_ns: How long it computes.
        start_ns: When it begins.
        computes: Whether it computes, 0 or 1.
    """

    step: Ints
    lane: Ints
    busy_ns: Ints
    start_ns: Ints
    computes: Ints


def _single_operations(events: Events, part: slice) -> _OfStream:
    """Return the operations of steps among a part of the events."""
    rows = part.start + np.flatnonzero((events.step[part] != UNKNOWN) & (events.activity[part] != UNKNOWN))
    computes = np.where(is_in(events.category[rows], (Category.COMMUNICATION, Category.MEMORY)), 0, 1)
    start_ns = events.start_ns[rows]
    busy_ns = computes * (events.end_ns[rows] - start_ns)
    return _OfStream(events.step[rows], events.lane[rows], busy_ns, start_ns, computes)


def _group(rows: _OfStream) -> _OfStream:
    """Return one row per step and stream."""
    first, which = distinct_rows(rows.step, rows.lane)
    start_ns, computes = np.full(len(first), NEVER), np.zeros(len(first), np.int64)
    np.minimum.at(start_ns, which, rows.start_ns)
    np.maximum.at(computes, which, rows.computes)
    busy_ns = sum_by_group(rows.busy_ns, which, len(first))
    return _OfStream(rows.step[first], rows.lane[first], busy_ns, start_ns, computes)


NONE = -2
"""The value of ``DevicePhases.before`` before a step's first compute, and of ``after`` after its last compute."""

BETWEEN_STEPS = -3
"""The value of ``DevicePhases.before`` in the one stretch for all time outside of the steps."""

ALWAYS = -NEVER
"""Start of each step's first stretch: earlier than any event."""


@dataclass(frozen=True)
class DevicePhases(Table):
    """Stretches of time between starts of compute, from which the device's phase at each instant follows.

    They are ordered by step and start. A stretch ends where the step's next one starts; a step's last one never ends.

    Attributes:
        step: Index into the rank's steps; an index equal to the number of steps stands for the time outside of them.
        before: Phase of the last compute of the step that started before the stretch or at its start, an index into
            ``range_names.PHASES``; ``UNKNOWN`` if that compute belongs to no phase, ``NONE`` if there is no such
            compute.
        after: The same for the compute of the step that starts next.
    """

    step: Ints
    start_ns: Ints
    before: Ints
    after: Ints


def find_device_phases(events: Events, steps: int) -> DevicePhases:
    """Return the stretches of all steps, at least one per step; the last row is the time outside of steps.

    In a step with compute of forward, compute without a phase is ignored: it belongs to a helper such as a data loader,
    and the rank's own phase goes on. Compute of an optimizer is ignored if backward follows: it updates one bucket
    during backward. If forward follows, as in a step that trains two networks, backward was over, and the compute of
    the optimizer counts. ``steps`` is the number of steps.
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
    # The compute that starts next is that of the step's next row; a step's last row has none.
    order = np.lexsort((start, step))
    step, start, before = step[order], start[order], phase[order]
    after = np.where(np.append(step[1:] == step[:-1], False), np.append(before[1:], NONE), NONE)
    return select(DevicePhases(step, start, before, after), begins_run(step, before, after))


def _within_backward(step: Ints, start_ns: Ints, phase: Ints) -> Ints:
    """Return the rows of an optimizer's compute after which the step's next compute of another phase is backward's.

    Each argument has one element per compute: its step, its start and its phase.
    """
    is_backward = phase == BACKWARD_PHASE
    last_ns = last_by_step(np.where(is_backward, start_ns, NO_TIME), step, int(step.max(initial=-1)) + 1)
    within = np.flatnonzero(phase == PHASES.index(OPTIMIZER))
    within = within[start_ns[within] <= last_ns[step[within]]]  # else no backward follows
    if len(within):
        # Search each row's successor among the other phases' rows of these steps; backward is first of equal starts.
        is_concerned = np.zeros(len(last_ns), np.bool_)
        is_concerned[step[within]] = True
        others = np.flatnonzero(is_concerned[step] & (phase != PHASES.index(OPTIMIZER)))
        others = others[np.lexsort((~is_backward[others], start_ns[others], step[others]))]
        # On an axis with all steps end to end, steps cannot overlap, so one search is enough.
        low = int(start_ns.min())
        axis = step * (int(start_ns.max()) - low + 1) + start_ns - low
        within = within[is_backward[others[np.searchsorted(axis[others], axis[within])]]]
    return within
