"""Which steps and phases launched work whose calls were not recorded, as the numbers of the other calls tell.

A process numbers its calls in order, so a call that was lost was made between those with the numbers before and behind
its own. If both are in one step, so was the lost one; the same holds for phases::

    step            |0...............||1...............|
    backward             |-------|         |-------|
    numbers         1 2   3  . 5   6  7 8   . 10 11  12     of recorded calls
    work without a call      4              9               4 is of step 0 and its backward, 9 is of step 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.steps import Phases, Steps
from ddp_prof.range_names import BACKWARD, PHASES
from ddp_prof.table import UNKNOWN, Ints, Mask, Table, empty
from ddp_prof.trace import Trace, numbers_grow

BACKWARD_PHASE = PHASES.index(BACKWARD)


@dataclass(frozen=True)
class Unlaunched(Table):
    """Activities of a process whose calls were lost between two recorded ones.

    Attributes:
        activity: Row of the trace's activities.
        after_ns: When the last of the recorded calls with lower numbers began.
        before_ns: When the first of those with higher numbers began.
        caller: The thread that made the calls with the numbers before and behind; ``UNKNOWN`` if these are two. While
            autograd launches backward, the thread that called it waits.
    """

    activity: Ints
    after_ns: Ints
    before_ns: Ints
    caller: Ints

    def steps_of(self, steps: Steps) -> Ints:
        """Return the step that launched each activity; ``UNKNOWN`` if the two calls are not in one step."""
        step = steps.index_at(self.after_ns)
        return np.where(step == steps.index_at(self.before_ns), step, UNKNOWN)

    def count_possible(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """Return how many of the activities may have been launched in each of these ranges."""
        begun = np.searchsorted(np.sort(self.after_ns), end_ns)
        found: Ints = begun - np.searchsorted(np.sort(self.before_ns), start_ns)
        return found

    def are_placed(self, steps: Steps, phases: Phases) -> Mask:
        """Return of which activities it is known which step launched them, and whether backward did.

        If ranges mark backward, they tell it, else the thread.
        """
        by_ranges = BACKWARD_PHASE in phases.kind
        is_known = (self.phases_of(phases) if by_ranges else self.caller) != UNKNOWN
        found: Mask = is_known & (self.steps_of(steps) != UNKNOWN)
        return found

    def phases_of(self, phases: Phases) -> Ints:
        """Return the phase (its row) that launched each activity; ``UNKNOWN`` if the two calls are not in one."""
        row = phases.row_at(self.after_ns)
        return np.where(row == phases.row_at(self.before_ns), row, UNKNOWN)


def find_unlaunched(trace: Trace, process: int) -> Unlaunched:
    """Return the activities of a process whose calls were lost; none if its numbers do not grow with time."""
    activities, calls = trace.activities, trace.calls
    asked = np.flatnonzero(
        (trace.launching_calls == UNKNOWN) & (activities.correlation != UNKNOWN) & (activities.process == process)
    )
    mine = np.flatnonzero((calls.process == process) & (calls.correlation != UNKNOWN)) if len(asked) else asked
    if not len(mine) or not numbers_grow(calls):
        return empty(Unlaunched)
    mine = mine[np.argsort(calls.correlation[mine], kind="stable")]
    behind = np.searchsorted(calls.correlation[mine], activities.correlation[asked])
    is_between = (behind > 0) & (behind < len(mine))
    asked, behind, start_ns = asked[is_between], behind[is_between], calls.start_ns[mine]
    # Threads take their numbers in turns, so times nearly grow with numbers.
    after_ns = np.maximum.accumulate(start_ns)[behind - 1]
    before_ns = np.minimum.accumulate(start_ns[::-1])[::-1][behind]
    caller = calls.lane[mine[behind - 1]]
    return Unlaunched(asked, after_ns, before_ns, np.where(caller == calls.lane[mine[behind]], caller, UNKNOWN))
