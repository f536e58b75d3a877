"""What the numbers of calls tell about steps that launch less than others: whether calls of theirs were lost.

A process numbers its calls in order. Some numbers are of calls that no profiler records, about as many for each call
that it does record. A step that launches less by itself uses up fewer of these; one that lost calls lacks their numbers
as well::

    numbers of a step                1a .2 3b .4 5c .6 7d .8      four of eight are not recorded
    of one that launches half        9a .10 11b .12               two are not
    of one that lost c and d         13a .14 15b .16 .17 .18 .19 .20      six are not
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.steps import Steps
from ddp_prof.growing_column import in_order
from ddp_prof.table import UNKNOWN, Ints, Mask, at_rows, begins_run, rows_of, take_or_unknown
from ddp_prof.trace import Trace, numbers_grow

_LEAST_USED = 3
"""Smallest number of steps whose numbers are compared as to how many they use up."""

_SOON = 2
"""A step's first call comes soon after its start if it does so within this many times the median of other steps."""


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of the steps of a process that no recorded call has.

    Attributes:
        launches: Number of launches of each step.
        missing: By whether they are counted from the step's own first call, and up to its own last call (else from the
            last call before the step, and up to the first one behind it): how many of each step, ``UNKNOWN`` if that
            call was not recorded.
        used: How many numbers lie between the last call before each step and the first one behind it, ``UNKNOWN`` if
            one of these calls was not recorded.
        begins_soon, ends_soon: Whether the first call of each step comes as soon after its start as in other steps, and
            the last one before its end.
    """

    launches: Ints
    missing: dict[tuple[bool, bool], Ints]
    used: Ints
    begins_soon: Mask
    ends_soon: Mask

    def is_whole(self, step: int, others: Ints, lack: int, *, if_unclear: bool = False) -> bool:
        """Return whether a step lost no calls, as its numbers tell, though it launches ``lack`` less than each other.

        ``others`` are the steps that launch more. If the numbers that they use up differ by more than such losses would
        make, the result is ``if_unclear``.
        """
        fewest = int(self.launches[others].min(initial=np.iinfo(np.int64).max))
        # Calls of a step without launches, such as a wait at its end, tell nothing of what came before or after them.
        launches_some = bool(self.launches[step])
        from_own = launches_some and self.missing[False, True][step] == UNKNOWN and bool(self.begins_soon[step])
        to_own = launches_some and self.missing[True, False][step] == UNKNOWN and bool(self.ends_soon[step])
        missing = self.missing[from_own, to_own]
        others = others[missing[others] != UNKNOWN]
        if lack <= 0 or missing[step] == UNKNOWN or not len(others):
            return False
        is_apart = np.abs(others - step) > 1  # what was lost between two steps is missing in both
        usual = missing[others[is_apart] if is_apart.any() else others]
        least, most = int(usual.min()), int(usual.max())
        by_itself, with_losses = least * max(0, fewest - lack) / fewest, least + lack
        if most - least > with_losses - by_itself:
            return if_unclear
        return bool(missing[step] < (by_itself + with_losses) / 2)

    @property
    def are_used_alike(self) -> bool:
        """Whether steps use up about as many numbers, although they launch more or less.

        A step that launches less by itself uses up fewer numbers, by one at least for each launch. So calls were lost,
        of some steps or of all.
        """
        asked = (self.launches > 0) & (self.used != UNKNOWN)
        if asked.sum() < _LEAST_USED:
            return False
        used, launched = (np.abs(of[asked] - np.median(of[asked])).sum() for of in (self.used, self.launches))
        return bool(2 * used < launched)


def find_step_numbers(trace: Trace, process: int, steps: Steps, launches: Ints) -> StepNumbers:
    """Return which numbers of the steps of a process no recorded call has; ``launches`` is how many each launches."""
    at_ns, number = _calls_in_order(trace, process)
    begun, ended = np.searchsorted(at_ns, steps.start_ns), np.searchsorted(at_ns, steps.end_ns)
    has_some = ended > begun

    first, last = dict[bool, Ints](), dict[bool, Ints]()
    first[False], first[True] = _numbers_around(number, begun)
    last[True], last[False] = _numbers_around(number, ended)
    first[True], last[True] = (np.where(has_some, numbers, UNKNOWN) for numbers in (first[True], last[True]))
    is_between = (first[False] != UNKNOWN) & (last[False] != UNKNOWN)
    used, missing = np.where(is_between, last[False] - first[False], UNKNOWN), {}
    for from_own in (False, True):
        for to_own in (False, True):
            numbers = last[to_own] - first[from_own] + 1
            recorded = ended - begun + (not from_own) + (not to_own)
            is_known = (first[from_own] != UNKNOWN) & (last[to_own] != UNKNOWN)
            missing[from_own, to_own] = np.where(is_known, np.maximum(0, numbers - recorded), UNKNOWN)
    after_ns = take_or_unknown(at_ns, np.where(has_some, begun, UNKNOWN)) - steps.start_ns
    before_ns = steps.end_ns - take_or_unknown(at_ns, np.where(has_some, ended - 1, UNKNOWN))
    return StepNumbers(launches, missing, used, _are_soon(after_ns, has_some), _are_soon(before_ns, has_some))


def _calls_in_order(trace: Trace, process: int) -> tuple[Ints, Ints]:
    """Return the times and the numbers of a process's calls in the order of time; none if numbers do not grow with it.

    A call of the driver within one of the runtime has its number, and counts once.
    """
    calls = trace.calls
    mine = (calls.process == process) & (calls.correlation != UNKNOWN)
    rows = rows_of(mine & numbers_grow(calls))
    at_ns, number = at_rows(calls.start_ns, rows), at_rows(calls.correlation, rows)
    if np.any(number[1:] < number[:-1]):
        order = np.argsort(number, kind="stable")
        at_ns, number = in_order(at_ns, order), in_order(number, order)
    once = rows_of(begins_run(number))
    at_ns, number = at_rows(at_ns, once), at_rows(number, once)
    if np.any(at_ns[1:] < at_ns[:-1]):
        order = np.argsort(at_ns, kind="stable")
        at_ns, number = in_order(at_ns, order), in_order(number, order)
    return at_ns, number


def _numbers_around(number: Ints, places: Ints) -> tuple[Ints, Ints]:
    """Return the largest number before each of some places, and the least from it on; ``UNKNOWN`` without any.

    Several threads take their numbers in turns, so these are not the numbers beside the place.
    """
    if not len(number):
        return np.full_like(places, UNKNOWN), np.full_like(places, UNKNOWN)
    # Of the numbers between two places, one is looked at: the columns of a trace may be long, and places are few.
    cuts = np.unique(np.append(places[places < len(number)], 0))
    largest = np.maximum.accumulate(np.maximum.reduceat(number, cuts))
    least = np.minimum.accumulate(np.minimum.reduceat(number, cuts)[::-1])[::-1]
    at = np.searchsorted(cuts, places)
    return take_or_unknown(largest, at - 1), take_or_unknown(least, np.where(at < len(cuts), at, UNKNOWN))


def _are_soon(time_ns: Ints, is_known: Mask) -> Mask:
    """Return which of the times are no longer than usual."""
    found: Mask = is_known & (time_ns <= _SOON * np.median(time_ns[is_known])) if is_known.any() else is_known
    return found
