"""The passes of backward in each step: a step that accumulates gradients, or trains two networks, has several.

A pass is a sequence of compute of backward that was launched without compute of another kind in between. Each pass has
an end on the device, the end of its last compute. Communication that the pass launched, or that was launched after
it to reduce its gradients, belongs to the pass, and its tail is the part after this end::

    main thread     f          g                 launches of forward, for two micro-batches
    autograd          a.N        b.M             launches of backward (a, b) and of a reduction in each (N, M)
    device          ff.aa......gg.bb......       compute
    reductions          NNNNNN      MMMMMM
    tail                  ####        ####       of two passes

Compute that waits for reduced gradients (see :mod:`.reduced_gradients`) does not make a pass end later.

Two passes are separated by any of these, if it is launched between them:

- compute of forward;
- compute outside of backward that the main thread launches, because this thread waits while autograd runs. Compute of
  other threads, such as a data loader's, and an optimizer that autograd's thread runs in a hook, separate nothing;
- on a CPU, where threads of operators are not known, compute outside of all phases, if the step has none in forward;
- the start of another range of backward on the main thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.attribution import (
    BACKWARD_PHASE,
    OPTIMIZER_PHASE,
    SYNCHRONIZE_PHASE,
    Events,
    first_by_step,
    last_by_step,
)
from ddp_prof.analyze.intervals import Intervals
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import (
    NEVER,
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


@dataclass(frozen=True)
class Passes(Table):
    """One row per pass, ordered by step and launch.

    Attributes:
        step: Index into the rank's steps.
        begins_ns: From then on, what the host launches belongs to this pass and no longer to the one before.
        first_ns: First launch of its compute. In the second pass of a step and later ones, the start of the range of
            backward that contains this launch, if this range began after the last launch of the pass before.
        last_ns: Last launch of its compute.
        end_ns: End of its last compute on the device that does not wait for reduced gradients; ``NO_TIME`` if all of it
            does.
    """

    step: Ints
    begins_ns: Ints
    first_ns: Ints
    last_ns: Ints
    end_ns: Ints

    def count(self, steps: int) -> Ints:
        """Return the number of passes of each step; ``steps`` is the number of steps."""
        return np.bincount(self.step, minlength=steps)

    @property
    def any_several(self) -> bool:
        """Whether any step has several passes."""
        return bool(np.any(self.step[1:] == self.step[:-1]))

    def of_launches(self, step: Ints, phase: Ints, launch_ns: Ints, is_point_to_point: Mask) -> Ints:
        """Return the row of the pass to which each launch of communication belongs; ``UNKNOWN`` if its step has none.

        A launch between two passes belongs to the earlier one until the next pass begins (``begins_ns``), as it reduces
        the earlier pass's gradients. Only a send or receive outside of backward belongs to the next pass: a stage of a
        pipeline that waits for its next micro-batch is no tail.

        Args:
            step: Step of each launch, ``UNKNOWN`` outside of all steps.
            phase: Phase of each launch.
            launch_ns: Time of each launch.
            is_point_to_point: Whether it is a send or a receive.
        """
        # first:behind are the rows of the step's passes. `launch_ns + 1` finds a pass that begins at the launch, too.
        first, behind = (np.searchsorted(self.step, step, side=side) for side in ("left", "right"))
        has_pass = (step != UNKNOWN) & (behind > first)
        row = np.maximum(first, Sequences(self.step, self.begins_ns).last_before(np.maximum(step, 0), launch_ns + 1))
        row = np.where(has_pass, row, UNKNOWN)
        is_between = has_pass & (launch_ns > take_or_unknown(self.last_ns, row)) & (row + 1 < behind)
        waits = is_point_to_point & ~np.isin(phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE))
        return np.where(is_between & waits, row + 1, row)


def whole_passes(events: Events, steps: int, follows: Mask) -> Passes:
    """Return one pass for each step with compute of backward, whatever lies between.

    Args:
        events: The events of the rank.
        steps: Number of its steps.
        follows: Which events wait for reduced gradients.
    """
    rows = np.flatnonzero(
        (events.category == Category.COMPUTE) & (events.phase == BACKWARD_PHASE) & (events.step != UNKNOWN)
    )
    at_ns, step = events.launch_or_start_ns[rows], events.step[rows]
    first_ns = first_by_step(at_ns, step, steps)
    last_ns, end_ns = (last_by_step(column, step, steps) for column in (at_ns, _ends_ns(events, follows)[rows]))
    found = np.flatnonzero(last_ns != NO_TIME)
    return Passes(found, first_ns[found], first_ns[found], last_ns[found], end_ns[found])


def _ends_ns(events: Events, follows: Mask) -> Ints:
    """Return when each event ends; ``NO_TIME`` for what makes no pass end later."""
    return np.where(follows, NO_TIME, events.end_ns)


def find_passes(
    events: Events, steps: int, follows: Mask, ranges: Intervals, main_thread: int, *, on_host: bool
) -> Passes:
    """Return the passes of a rank.

    Args:
        events: The events of the rank.
        steps: Number of its steps.
        follows: Which events wait for reduced gradients.
        ranges: The ranges of backward that the main thread opened.
        main_thread: The thread that runs the steps.
        on_host: Whether the host itself computes.
    """
    whole, at_ns = whole_passes(events, steps, follows), events.launch_or_start_ns
    if not len(whole):
        return whole
    first_ns, last_ns = np.full(steps, NEVER), np.full(steps, NO_TIME)
    first_ns[whole.step], last_ns[whole.step] = whole.first_ns, whole.last_ns
    # A step may have several passes if something that separates passes was launched between its first and last launch
    # of backward, or if a range of backward began there. All other steps keep their one pass.
    parts = (events.category == Category.COMPUTE) & (events.step != UNKNOWN)
    parts &= _part_passes(events, main_thread, on_host=on_host)
    parts &= (at_ns >= first_ns[events.step]) & (at_ns <= last_ns[events.step])
    is_parted = np.zeros(steps, np.bool_)
    is_parted[events.step[parts]] = True
    opened = [np.searchsorted(ranges.start_ns, column, side="right") for column in (whole.first_ns, whole.last_ns)]
    is_parted[whole.step[opened[0] < opened[1]]] = True
    if not is_parted.any():
        return whole
    chosen = np.flatnonzero(np.append(is_parted, False)[events.step])
    several = _parted(select(events, chosen), follows[chosen], ranges, main_thread, on_host=on_host)
    passes = concatenate(select(whole, ~is_parted[whole.step]), several)
    return select(passes, np.lexsort((passes.first_ns, passes.step)))


def _part_passes(events: Events, main_thread: int, *, on_host: bool) -> Mask:
    """Return which events separate two passes if they are compute and were launched between the two."""
    is_forward, is_unknown = events.phase == _FORWARD_PHASE, events.phase == UNKNOWN
    if on_host:
        with_forward = distinct(events.step[is_forward & (events.category == Category.COMPUTE)])
        by_main = is_unknown & ~np.isin(events.step, with_forward)
    else:
        by_main = (is_unknown | (events.phase == OPTIMIZER_PHASE)) & (events.launcher == main_thread)
    found: Mask = is_forward | by_main
    return found


def _parted(events: Events, follows: Mask, ranges: Intervals, main_thread: int, *, on_host: bool) -> Passes:
    """Return the passes of steps that may have several; ``events`` are the events of these steps."""
    at_ns = events.launch_or_start_ns
    computes = events.category == Category.COMPUTE
    is_backward = computes & (events.phase == BACKWARD_PHASE)
    parts = computes & _part_passes(events, main_thread, on_host=on_host)
    # Compute of backward, and compute that separates passes, in the order of launches; `opened` is the number of ranges
    # of backward that had begun at each launch.
    rows = np.flatnonzero(is_backward | parts)
    rows = rows[np.lexsort((is_backward[rows], at_ns[rows], events.step[rows]))]
    of_backward, step, at = is_backward[rows], events.step[rows], at_ns[rows]
    opened = np.searchsorted(ranges.start_ns, at, side="right")

    # A pass begins at each launch of backward that does not directly follow one of the same step and range.
    begins = begins_run(of_backward, step, np.where(of_backward, opened, UNKNOWN)) & of_backward
    number = np.cumsum(begins)[of_backward] - 1
    passes = int(begins.sum())
    first = at[begins]  # of each pass: its first launch, last launch, end and step, and the last launch before it
    last, end = np.full(passes, NO_TIME), np.full(passes, NO_TIME)
    np.maximum.at(last, number, at[of_backward])
    np.maximum.at(end, number, _ends_ns(events, follows)[rows[of_backward]])
    own_step, before = step[begins], np.append(NO_TIME, last[:-1])
    before[begins_run(own_step)] = NO_TIME
    range_ns = np.append(NO_TIME, ranges.start_ns)[opened[begins]]
    first = np.where((range_ns > before) & (before != NO_TIME), range_ns, first)

    # Communication that is launched after forward of the later pass began belongs to the later pass. In a step without
    # forward, compute without a phase on the main thread counts as forward.
    is_forward = events.phase == _FORWARD_PHASE
    without_forward = ~np.isin(events.step, distinct(events.step[is_forward]))
    opens = np.flatnonzero(is_forward | (parts & (events.phase == UNKNOWN) & without_forward))
    # Only launches of the pass's own step count.
    following = Sequences(events.step[opens], at_ns[opens]).first_after(own_step, before)
    next_ns = take_or_unknown(at_ns[opens], following, NEVER)
    return Passes(own_step, np.where(before == NO_TIME, first, np.minimum(first, next_ns)), first, last, end)


def seem_lost(collectives: Ints, knows_backward: Mask) -> Mask:
    """Return in which steps the range of backward seems to be lost, so that sums over steps lack them.

    Such a step has as many collectives as one whose backward is known; one without backward, such as one that
    evaluates, has fewer.

    Args:
        collectives: Their number in each step.
        knows_backward: For each step, whether it is known when its backward ran.
    """
    usual = collectives[knows_backward & (collectives > 0)]
    found: Mask = ~knows_backward & (collectives >= usual.min(initial=np.iinfo(np.int64).max))
    return found
