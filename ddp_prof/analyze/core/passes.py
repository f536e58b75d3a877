"""The passes of backward in each step: a step that accumulates gradients, or trains two networks, has several.

A pass is compute of backward that was launched without compute of another kind between. Each pass has an end on the
device, and the communication that it launched, or that was launched after it for it, has this end::

    main thread     f          g                 forward
    autograd          a.N        b.M             backward, and a reduction in it
    device          ff.aa......gg.bb......
    reductions          NNNNNN      MMMMMM
    tail                  ####        ####       of two passes

What parts two passes, if it is launched between them:

- compute of forward;
- compute outside of backward that the main thread launches, which waits while autograd runs. Compute of other threads,
  such as a data loader's, and an optimizer that autograd's thread runs in a hook, part nothing;
- on a CPU, where threads of operators are not known, compute outside of all phases, if the step has none in forward;
- the start of another range of backward on the main thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, OPTIMIZER_PHASE, SYNCHRONIZE_PHASE, Events, last_by_step
from ddp_prof.analyze.intervals import Intervals
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Sequences,
    Table,
    begins_run,
    concatenate,
    distinct,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category

_FORWARD_PHASE = PHASES.index(FORWARD)
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Passes(Table):
    """One row per pass, ordered by step and launch; times of the host are those of the device if clocks disagree.

    Attributes:
        step: Index into the rank's steps.
        begins_ns: From then on, what the host launches is of this pass and no longer of the one before.
        first_ns, last_ns: First and last launch of its compute; with a range of its own, the first is its start.
        end_ns: End of its last compute.
    """

    step: Ints
    begins_ns: Ints
    first_ns: Ints
    last_ns: Ints
    end_ns: Ints

    def count(self, steps: int) -> Ints:
        """The number of passes of each step."""
        return np.bincount(self.step, minlength=steps)

    @property
    def any_several(self) -> bool:
        """Whether a step has several."""
        return bool(np.any(self.step[1:] == self.step[:-1]))

    def of_launches(self, step: Ints, phase: Ints, launch_ns: Ints, is_point_to_point: Mask) -> Ints:
        """The row of the pass that each launch of communication is of; ``UNKNOWN`` if its step has none.

        A launch between two passes is of the earlier one, as it reduces its gradients, until forward begins. Only a
        send or receive is of the next one: a stage of a pipeline that waits for its next micro-batch is no tail.
        """
        first, behind = (np.searchsorted(self.step, step, side=side) for side in ("left", "right"))
        has_pass = (step != UNKNOWN) & (behind > first)
        row = np.maximum(first, Sequences(self.step, self.begins_ns).last_before(np.maximum(step, 0), launch_ns + 1))
        row = np.where(has_pass, row, UNKNOWN)
        is_between = has_pass & (launch_ns > take_or_unknown(self.last_ns, row)) & (row + 1 < behind)
        waits = is_point_to_point & ~np.isin(phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE))
        return np.where(is_between & waits, row + 1, row)


def launch_or_start_ns(events: Events) -> Ints:
    return np.where(events.launch_ns == NO_TIME, events.start_ns, events.launch_ns)


def whole_passes(events: Events, steps: int) -> Passes:
    """One pass for each step with compute of backward."""
    rows = np.flatnonzero(
        (events.category == Category.COMPUTE) & (events.phase == BACKWARD_PHASE) & (events.step != UNKNOWN)
    )
    at_ns, step = launch_or_start_ns(events)[rows], events.step[rows]
    first_ns = -last_by_step(-at_ns, step, steps)
    last_ns, end_ns = (last_by_step(column, step, steps) for column in (at_ns, events.end_ns[rows]))
    found = np.flatnonzero(last_ns != NO_TIME)
    return Passes(found, first_ns[found], first_ns[found], last_ns[found], end_ns[found])


def find_passes(events: Events, steps: int, ranges: Intervals, main_thread: int, *, on_host: bool) -> Passes:
    """Find the passes of a rank.

    Args:
        events: Of the rank.
        steps: Number of its steps.
        ranges: The ranges of backward that the main thread opened; none if clocks disagree.
        main_thread: The thread that runs the steps.
        on_host: Whether the host itself computes.
    """
    whole, at_ns = whole_passes(events, steps), launch_or_start_ns(events)
    if not len(whole):
        return whole
    first_ns, last_ns = np.full(steps, _NEVER), np.full(steps, NO_TIME)
    first_ns[whole.step], last_ns[whole.step] = whole.first_ns, whole.last_ns
    parts = (events.category == Category.COMPUTE) & (events.step != UNKNOWN)
    parts &= _part_passes(events, main_thread, on_host=on_host)
    parts &= (at_ns >= first_ns[events.step]) & (at_ns <= last_ns[events.step])
    is_parted = np.zeros(steps, np.bool_)
    is_parted[events.step[parts]] = True
    opened = [np.searchsorted(ranges.start_ns, column, side="right") for column in (whole.first_ns, whole.last_ns)]
    is_parted[whole.step[opened[0] < opened[1]]] = True
    if not is_parted.any():
        return whole
    chosen = select(events, np.flatnonzero(np.append(is_parted, False)[events.step]))
    several = _parted(chosen, ranges, main_thread, on_host=on_host)
    passes = concatenate(select(whole, ~is_parted[whole.step]), several)
    return select(passes, np.lexsort((passes.first_ns, passes.step)))


def _part_passes(events: Events, main_thread: int, *, on_host: bool) -> Mask:
    """Which compute parts two passes if it was launched between them."""
    is_forward, is_unknown = events.phase == _FORWARD_PHASE, events.phase == UNKNOWN
    if on_host:
        with_forward = distinct(events.step[is_forward & (events.category == Category.COMPUTE)])
        by_main = is_unknown & ~np.isin(events.step, with_forward)
    else:
        by_main = (is_unknown | (events.phase == OPTIMIZER_PHASE)) & (events.launcher == main_thread)
    found: Mask = is_forward | by_main
    return found


def _parted(events: Events, ranges: Intervals, main_thread: int, *, on_host: bool) -> Passes:
    """The passes of steps with several; ``events`` are those of these steps."""
    at_ns = launch_or_start_ns(events)
    computes = events.category == Category.COMPUTE
    is_backward = computes & (events.phase == BACKWARD_PHASE)
    parts = computes & _part_passes(events, main_thread, on_host=on_host)
    rows = np.flatnonzero(is_backward | parts)
    rows = rows[np.lexsort((is_backward[rows], at_ns[rows], events.step[rows]))]
    of_backward, step, at = is_backward[rows], events.step[rows], at_ns[rows]
    opened = np.searchsorted(ranges.start_ns, at, side="right")

    # A pass begins at each launch of backward that does not directly follow one of the same step and range.
    begins = begins_run(of_backward, step, np.where(of_backward, opened, UNKNOWN)) & of_backward
    number = np.cumsum(begins)[of_backward] - 1
    passes = int(begins.sum())
    first = at[begins]
    last, end = np.full(passes, NO_TIME), np.full(passes, NO_TIME)
    np.maximum.at(last, number, at[of_backward])
    np.maximum.at(end, number, events.end_ns[rows[of_backward]])
    own_step, before = step[begins], np.append(NO_TIME, last[:-1])
    before[begins_run(own_step)] = NO_TIME
    range_ns = np.append(NO_TIME, ranges.start_ns)[opened[begins]]
    first = np.where((range_ns > before) & (before != NO_TIME), range_ns, first)

    # What forward launches between two passes, or the main thread where the step has no forward, is of the later one.
    is_forward = events.phase == _FORWARD_PHASE
    without_forward = ~np.isin(events.step, distinct(events.step[is_forward]))
    opens = np.flatnonzero(is_forward | (parts & (events.phase == UNKNOWN) & without_forward))
    # Of the pass's own step: where clocks disagree, these are times of the device, where steps can run into each other.
    following = Sequences(events.step[opens], at_ns[opens]).first_after(own_step, before)
    next_ns = take_or_unknown(at_ns[opens], following, _NEVER)
    return Passes(own_step, np.where(before == NO_TIME, first, np.minimum(first, next_ns)), first, last, end)
