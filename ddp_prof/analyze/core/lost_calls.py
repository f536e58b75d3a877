"""Which steps seem to lack calls, with all that these launched, as where the buffer of a profiler keeps the last ones.

A step that launches less than others, such as a micro-batch without communication, loses nothing. Calls of a step seem
to be lost if

- no launch was recorded in it although other steps launch (the step is *silent*), or
- it lies beside a silent step and launches less than any other, or
- it launches nothing in a phase in which all other steps launch, or
- it is the first or the last one and launches much less than the others, which launch the same, or
- it is the first one and begins just when work does that was launched before, as where a tool cut all before a time, or
- it has work whose number lies between those of its calls and is that of none, and launches less than any other, or
- it has fewer nodes of CUDA graphs than most steps that launch as much, or
- it lacks some of what most steps launch, where the numbers of its calls jump as far as over it in those steps, or
- nothing that communicates was launched in a range of a collective, although it is in most ranges of that name, or
- that is so in many other steps, here and there, so that of all launches as large a share is lost.

Where the numbers of its calls tell that none was lost, a step counts all the same: see :mod:`.call_numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddp_prof.analyze.core.call_numbers import StepNumbers, find_step_numbers
from ddp_prof.analyze.core.steps import Phases, Steps
from ddp_prof.analyze.core.unlaunched import Unlaunched
from ddp_prof.communication import NCCL_RANGE
from ddp_prof.range_names import COLLECTIVES, parse_ranges
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Floats,
    Ints,
    Mask,
    distinct,
    is_in,
    parts_of,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, Kind, Trace, numbers_grow

CUT_SHARE = 0.9
"""The first or the last step seems to be cut off if it launches less than this fraction of any other step."""

LEAST_REACH = 0.5
"""Smallest fraction of the ranges of other steps through which launches reach, for a step to seem cut off by it."""

SHORT_OF = 0.7
"""Its own launches then reach through less than this part of that fraction."""

LEAST_ALIKE = 3
"""Smallest number of other steps that must all launch in a phase, for a step that launches nothing there to count as
incomplete."""

MOST_UNUSUAL = 0.05
"""Largest fraction of its launches, or else one, that other steps do not have, for a step that lacks some of theirs."""

_SHORT_PERIOD = 3
"""Two steps that lack some launches, at most so far apart, tell that one in so many does; else it takes three."""

_MOST_COMPARED = 64
"""Largest number of steps with which one that lacks some launches is compared."""

_MOST_WITH_LOSSES = 8
"""The same where these may lack some as well."""

_MANY = 1 / 3
"""Smallest fraction of the steps that lack some collectives, and two at least, for the others to lack launches, too."""

_SURELY_SOME = 3
"""Smallest number of launches that a step is expected to lack: the chance that it lacks none is 5 % (``exp(-3)``)."""

_LEAST_LOST = 3
"""Smallest number of lost collectives that tell how many launches are lost."""

_AS_NEAR = 2
"""Other launches are as near to a lost collective if the time without them is at most so many times that of others."""

GROUP_END = "ncclGroupEnd"
"""NCCL's call that launches the collectives of a group."""


@dataclass(frozen=True)
class StepLaunches:
    """What a process launched in its steps.

    Attributes:
        launch_ns: The times of all calls that launched something, sorted.
        lost_ns: The times of those without an activity.
        unlaunched: Activities whose calls were lost.
    """

    trace: Trace
    process: int
    steps: Steps
    launch_ns: Ints
    lost_ns: Ints
    unlaunched: Unlaunched

    @cached_property
    def counts(self) -> Ints:
        """Number of calls that launched something in each step, with those that were lost and whose work was not."""
        found, activities = self.steps.count_at(self.launch_ns), self.trace.activities
        if len(rows := self._placed.activity):
            rows = rows[is_in(activities.kind[rows], (Kind.KERNEL, Kind.GRAPH))]
            _, once = np.unique(activities.correlation[rows], return_index=True)
            found += np.bincount(self.step_of_activity[rows[once]], minlength=len(found))
        return found

    @cached_property
    def lost(self) -> Ints:
        """Number of these without an activity."""
        return self.steps.count_at(self.lost_ns)

    @cached_property
    def collective_ns(self) -> Ints:
        """The launch of each activity that communicates, as far as that is known."""
        activities, calls = self.trace.activities, self.trace.launching_calls
        rows = (activities.process == self.process) & (activities.category == Category.COMMUNICATION)
        known_ns = self.trace.calls.start_ns[calls[rows & (calls != UNKNOWN)]]
        placed = self._placed
        return np.append(known_ns, placed.after_ns[rows[placed.activity]])

    @cached_property
    def _placed(self) -> Unlaunched:
        """The activities whose calls were lost, and of which it is known that a step launched them."""
        return select(self.unlaunched, self.unlaunched.steps_of(self.steps) != UNKNOWN)

    @cached_property
    def step_of_activity(self) -> Ints:
        """The step that launched each activity of the process; ``UNKNOWN`` for all others."""
        mine, launching = self.trace.activities.process == self.process, self.trace.launching_calls
        found = self.steps.index_at(take_or_unknown(self.trace.calls.start_ns, launching, NO_TIME))
        found[~mine] = UNKNOWN
        found[self._placed.activity] = self._placed.steps_of(self.steps)
        return found

    @cached_property
    def collectives(self) -> Ints:
        """Number of activities that communicate and were launched in each step."""
        return self.steps.count_at(self.collective_ns)

    @cached_property
    def numbers(self) -> StepNumbers:
        """What the numbers of calls tell about each step."""
        return find_step_numbers(self.trace, self.process, self.steps, self.counts)

    def may_lack_calls(self, asked: Mask, *, if_unclear: bool) -> Mask:
        """Return which of the steps ``asked``, which launch less than others, may have lost calls, by their numbers.

        A program may launch less by itself, as where a batch is skipped, or a step of the optimizer. ``if_unclear`` is
        what counts where the numbers of calls before and behind the step are known, and do not tell.
        """
        rows, others = np.flatnonzero(asked), np.flatnonzero(~asked & (self.counts > 0))
        found: Mask = asked.copy()
        if len(rows) and len(others):
            fewest = int(self.counts[others].min())
            for row in rows.tolist():
                lack = fewest - int(self.counts[row])
                found[row] = not self.numbers.is_whole(row, others, lack, if_unclear=not if_unclear)
        return found


@dataclass(frozen=True)
class LostCalls:
    """Which steps seem to lack calls.

    Attributes:
        is_silent: For each step, whether no launch and no work was recorded in it, although other steps launch some.
        is_partial: For each step, whether a part of its calls seems to be lost.
        ranges: Number of ranges of collectives in each step.
        silent_ranges: Number of these in which a collective seems to be lost.
        lost_share: Which fraction of all launches seems to be lost one by one; 0 if that is not known.
    """

    is_silent: Mask
    is_partial: Mask
    ranges: Ints
    silent_ranges: Ints
    lost_share: float


def find_lost_calls(launches: StepLaunches, phases: Phases) -> LostCalls:
    """Return which steps seem to lack calls, with what these launched."""
    is_silent = _find_silent_steps(launches)
    ranges, silent_ranges, lost_share = _count_silent_ranges(launches)
    is_partial = silent_ranges > 0
    is_partial |= _lack_as_much_as_others(launches.counts, ranges, silent_ranges, lost_share)
    is_partial |= _launch_less_beside_silent(launches.counts, is_silent)
    is_partial |= _lack_phases(launches, phases, is_silent)
    is_partial |= _are_cut_off(launches)
    is_partial |= _begins_with_the_capture(launches)
    is_partial |= _lack_calls(launches)
    is_partial |= _lack_nodes(launches)
    is_partial |= _lack_launches(launches)
    return LostCalls(is_silent, is_partial, ranges, silent_ranges, lost_share)


def _find_silent_steps(launches: StepLaunches) -> Mask:
    """Return which steps seem to have lost all launches, since some step launched a kernel or a graph."""
    trace, steps, is_silent = launches.trace, launches.steps, launches.counts == 0
    if not is_silent.any() or is_silent.all():
        return np.zeros(len(steps), np.bool_)
    # Other work may have been launched, such as copies.
    launching = trace.launching_calls[
        (trace.activities.process == launches.process) & (trace.launching_calls != UNKNOWN)
    ]
    is_silent &= steps.count_at(trace.calls.start_ns[launching]) == 0
    return launches.may_lack_calls(is_silent, if_unclear=True)


def _launch_less_beside_silent(counts: Ints, is_silent: Mask) -> Mask:
    """Return which steps lie beside a silent step, and launch less than any step that does not."""
    beside = (np.append(is_silent[1:], False) | np.append(False, is_silent[:-1])) & ~is_silent
    others = ~(is_silent | beside)
    found: Mask = beside & (counts < counts[others].min()) if others.any() else others
    return found


def _lack_phases(launches: StepLaunches, phases: Phases, is_silent: Mask) -> Mask:
    """Return which step launches nothing in a phase in which all others do; silent steps are not compared with."""
    steps, launch_ns, found = launches.steps, launches.launch_ns, np.zeros(len(is_silent), np.bool_)
    within = np.searchsorted(launch_ns, phases.end_ns) - np.searchsorted(launch_ns, phases.start_ns)
    within += launches.unlaunched.count_possible(phases.start_ns, phases.end_ns)
    of_phase = steps.index_at(phases.start_ns)
    for kind in distinct(phases.kind):
        rows = np.flatnonzero((phases.kind == kind) & (of_phase != UNKNOWN))
        rows = rows[~is_silent[of_phase[rows]]]
        asked = np.unique(of_phase[rows])
        in_phase = np.bincount(of_phase[rows], within[rows], len(steps))[asked]
        idle, busy = asked[in_phase == 0], asked[in_phase > 0]
        if len(idle) == 1 and len(asked) > LEAST_ALIKE:
            fewest = int(in_phase[in_phase > 0].min())
            found[idle] |= not launches.numbers.is_whole(int(idle[0]), busy, fewest)
    return found


def _measure_reach(launches: StepLaunches) -> tuple[Floats, Floats]:
    """Return how far launches reach through the range of each step, from 0 to 1.

    First how far the first one lies before the step's end, then how far the last one behind its start.
    """
    steps, launch_ns = launches.steps, launches.launch_ns
    begun, ended = (np.searchsorted(launch_ns, at) for at in (steps.start_ns, steps.end_ns))
    has_some, length_ns = ended > begun, np.maximum(1, steps.end_ns - steps.start_ns)
    first_ns, last_ns = (take_or_unknown(launch_ns, np.where(has_some, at, UNKNOWN)) for at in (begun, ended - 1))
    from_end, from_start = (steps.end_ns - first_ns) / length_ns, (last_ns - steps.start_ns) / length_ns
    return np.where(has_some, from_end, 0.0), np.where(has_some, from_start, 0.0)


def _are_cut_off(launches: StepLaunches) -> Mask:
    """Return which of the first and the last step seem to be cut off by the recording's begin or end.

    All other steps, more than :data:`LEAST_ALIKE`, launch the same number of collectives or of all work. Steps of
    gradient accumulation, which launch differently, are not compared. Nor is a last step cut off that launches as much
    behind its last collective as each of the others: it has fewer micro-batches, as at the end of the data. Of fewer
    steps, all others launch the same number of both, and the launches of the step do not reach as far through its range
    (:func:`_measure_reach`).
    """
    counts, of_collectives = launches.counts, launches.collectives
    is_cut = np.zeros(len(counts), np.bool_)
    inner = slice(1, len(counts) - 1)
    if len(counts[inner]) <= LEAST_ALIKE:
        outer = ((0, slice(1, None)), (len(counts) - 1, slice(0, -1)))
        for (step, others), reach in zip(outer, _measure_reach(launches), strict=True) if len(counts) > 2 else ():
            all_work, collectives, far = counts[others], of_collectives[others], reach[others]
            is_alike = len(distinct(all_work)) == len(distinct(collectives)) == 1 and far.min() > LEAST_REACH
            if is_alike and 0 < counts[step] < CUT_SHARE * all_work[0]:
                is_cut[step] = reach[step] < SHORT_OF * far.min()
    else:
        ends = _count_behind_collectives(launches)[1:]
        ends_as_others = ends.min() == ends.max() > 0
        all_work, collectives = counts[inner], of_collectives[inner]
        for step in (0,) if ends_as_others else (0, len(counts) - 1):
            if 0 < counts[step] < CUT_SHARE * all_work.min():
                lacks_some = collectives.min() == collectives.max() > of_collectives[step]
                is_cut[step] = lacks_some or all_work.min() == all_work.max()
    return launches.may_lack_calls(is_cut, if_unclear=False)


def _begins_with_the_capture(launches: StepLaunches) -> Mask:
    """Return a mask of the first step if it seems to have begun before the capture does.

    A tool that cuts a trace at some time lets all begin there that ran then::

        cut           |
        step          |------------|-------------|
        its launches    c  d         a  b  c  d           a and b are lost
        work          |aa bb cc dd   aa bb cc dd          a runs at the cut

    No work begins at the very time at which a step's range does, unless a tool let both begin where it cut them.
    """
    trace, steps, found = launches.trace, launches.steps, np.zeros(len(launches.steps), np.bool_)
    if not len(steps) or not len(launches.launch_ns):
        return found
    first = int(steps.start_ns.argmin())
    at_ns, start_ns = int(steps.start_ns[first]), trace.activities.start_ns
    if at_ns == min(int(start_ns.min(initial=at_ns)), int(trace.spans.start_ns.min(initial=at_ns))):
        begins_there = (part.start + np.flatnonzero(start_ns[part] == at_ns) for part in parts_of(len(start_ns)))
        rows = np.concatenate([*begins_there, np.empty(0, np.int64)])
        is_mine = trace.activities.process[rows] == launches.process
        found[first] = np.any(is_mine & (trace.launching_calls[rows] == UNKNOWN))
    return found


def _count_behind_collectives(launches: StepLaunches) -> Ints:
    """Return how many launches each step has after that of its last collective; 0 if it has none."""
    steps, launch_ns = launches.steps, launches.launch_ns
    last_ns, at = steps.end_ns.copy(), steps.index_at(launches.collective_ns)
    last_ns[at[at != UNKNOWN]] = NO_TIME
    np.maximum.at(last_ns, at[at != UNKNOWN], launches.collective_ns[at != UNKNOWN])
    found: Ints = np.searchsorted(launch_ns, steps.end_ns) - np.searchsorted(launch_ns, last_ns, "right")
    return np.maximum(found, 0)


def _lack_calls(launches: StepLaunches) -> Mask:
    """Return which steps may have work whose call was lost, and have fewer launches than any step without such work.

    If all of that work was recorded, and none of it communicates, the step is known but for what launched that work.

    A process numbers its calls in order, so work without a call was launched between the calls before and after its
    number, which may be of two steps. Work whose calls are never recorded, as those of another driver, is in all steps
    alike.
    """
    trace, steps, counts = launches.trace, launches.steps, launches.counts
    found, activities = np.zeros(len(steps), np.bool_), trace.activities
    asked = (activities.process == launches.process) & (trace.launching_calls == UNKNOWN)
    asked &= activities.correlation != UNKNOWN
    if not len(steps) or not asked.any():
        return found
    mine = np.flatnonzero((trace.calls.process == launches.process) & (trace.calls.correlation != UNKNOWN))
    mine = mine[np.argsort(trace.calls.correlation[mine], kind="stable")]
    after = np.searchsorted(trace.calls.correlation[mine], activities.correlation[asked])
    is_between = (after > 0) & (after < len(mine))
    after, is_communication = after[is_between], (activities.category[asked] == Category.COMMUNICATION)[is_between]
    step, next_step = (steps.index_at(trace.calls.start_ns[mine[rows]]) for rows in (after - 1, after))
    # Between the calls of two steps it may be of either, or of one between them whose range was lost as well.
    is_first, is_second = step != UNKNOWN, (next_step != UNKNOWN) & (next_step != step)
    of_step = np.concatenate([step[is_first], next_step[is_second]])
    # Work whose step the numbers tell is counted already, and nothing of it is unknown.
    is_known = (step == next_step) & numbers_grow(trace.calls)
    is_communication = np.concatenate([(is_communication & ~is_known)[is_first], is_communication[is_second]])
    is_new = np.concatenate([~is_known[is_first], np.ones(int(is_second.sum()), np.bool_)])
    found[of_step] = True
    others = counts[~found & (counts > 0)]
    fewest = others.min() if len(others) else 0
    communicates = np.zeros(len(steps), np.bool_)
    communicates[of_step[is_communication]] = True
    lacks_work = counts + np.bincount(of_step[is_new], minlength=len(steps)) < fewest
    return found & (counts < fewest) & (communicates | lacks_work)


def _lack_nodes(launches: StepLaunches) -> Mask:
    """Return which steps lack nodes of CUDA graphs: most steps that launch as much have the same number, and more.

    A launch of a graph has an activity as long as one of its nodes has.
    """
    trace, found = launches.trace, np.zeros(len(launches.steps), np.bool_)
    # The activities in each step of calls that launched several, as those of a graph.
    call = trace.launching_calls[(trace.activities.process == launches.process) & (trace.launching_calls != UNKNOWN)]
    nodes_of_call = np.bincount(call, minlength=len(trace.calls))
    of_steps = launches.steps.count_at(trace.calls.start_ns[call[nodes_of_call[call] > 1]])
    for count in distinct(launches.counts[of_steps > 0]):
        rows = np.flatnonzero(launches.counts == count)
        nodes, times = np.unique(of_steps[rows], return_counts=True)
        if times.max() > max(LEAST_ALIKE, len(rows) / 2):
            found[rows] = of_steps[rows] < nodes[times.argmax()]
    return found


def _lack_launches(launches: StepLaunches) -> Mask:
    """Return which steps lack calls together with the work that these launched.

    Most steps launch as much, and the step launches the same but for what it lacks, where the numbers of its calls jump
    as far as over these launches in any of those steps. A step that launches less by itself, such as one of fewer
    micro-batches, uses up fewer numbers::

        numbers of a step      1a 2b 4c 5d 7e          3 and 6 are of calls that launch nothing
        of one with losses     8a   11c   14e          b and d are lost
        of one without b, d    8a   10c   12e

    If every second step, or every third, is such a one, nothing is lost: the program does so. Of longer periods there
    must be two.

    If no number of launches is usual, each step is compared with several: see :func:`_lack_some_of_each_other`.
    """
    counts, times = np.unique(launches.counts[launches.counts > 0], return_counts=True)
    if not len(counts):
        return np.zeros(len(launches.steps), np.bool_)
    if times.max() <= max(1, len(launches.steps) / 2):
        found = _lack_some_of_each_other(launches)
    else:
        found = _lack_some_of_most(launches, int(counts[times.argmax()]))
    first, *others = np.flatnonzero(found).tolist() or [0]
    period = others[0] - first if others else 0
    is_told = period <= _SHORT_PERIOD or len(others) > 1  # any two are as far apart as themselves
    if is_told and first < period > 1 and np.array_equal(np.flatnonzero(found), np.arange(first, len(found), period)):
        found[:] = False
    return found


class _Sequences:
    """What each step launches, in the order of the numbers of its calls."""

    def __init__(self, launches: StepLaunches) -> None:
        activities, step = launches.trace.activities, launches.step_of_activity
        rows = np.flatnonzero((step != UNKNOWN) & (activities.correlation != UNKNOWN))
        rows = rows[np.lexsort((activities.start_ns[rows], activities.correlation[rows], step[rows]))]
        self._step, self._name_id, self._number = step[rows], activities.name_id[rows], activities.correlation[rows]

    def of_step(self, at: int, more: int) -> tuple[Ints, Ints]:
        """Return the names and the numbers of what a step launches, and of ``more`` launches on either side of it."""
        begin, end = np.searchsorted(self._step, [at, at + 1]).tolist()
        own = slice(max(0, begin - more), end + more)
        return self._name_id[own], self._number[own]


def _lack_some_of_most(launches: StepLaunches, usual_count: int) -> Mask:
    """Return which steps lack some of what most steps launch, which launch equally often (``usual_count``)."""
    found = np.zeros(len(launches.steps), np.bool_)
    asked = np.flatnonzero((launches.counts > 0) & (launches.counts < usual_count))
    compared = np.flatnonzero((launches.counts == usual_count) & (launches.lost == 0))[:_MOST_COMPARED]
    if not len(asked) or not len(compared):
        return found
    sequences = _Sequences(launches)
    for more in (0, 1):  # what is lost at the end of a step is between it and the next one
        others = [sequences.of_step(at, more) for at in compared.tolist()]
        alike = [[numbers for other, numbers in others if np.array_equal(own, other)] for own, _ in others]
        usual = max(range(len(others)), key=lambda at: (len(alike[at]), len(others[at][0])))
        names, usual_numbers = others[usual][0], np.stack(alike[usual])
        for at in asked.tolist():
            own = sequences.of_step(at, more)
            most_unusual = max(1, int(MOST_UNUSUAL * len(own[0])))
            found[at] |= _lacks_some(*own, names, usual_numbers, most_unusual=most_unusual)
    return found


def _lack_some_of_each_other(launches: StepLaunches) -> Mask:
    """Return which steps lack some of what another one launches, if all use up as many numbers whatever they launch.

    As where calls were lost at random in most steps. Each is compared with those that launch most, which may lack other
    launches than the step does. Steps that launch what their data need use up as many numbers more.
    """
    counts, found = launches.counts, np.zeros(len(launches.steps), np.bool_)
    if not launches.numbers.are_used_alike:
        return found
    sequences = _Sequences(launches)
    compared = np.argsort(-counts, kind="stable")[:_MOST_WITH_LOSSES].tolist()
    for more in (0, 1):
        others = {other: sequences.of_step(other, more) for other in compared}
        for at in np.flatnonzero(counts > 0).tolist():
            own = sequences.of_step(at, more)
            found[at] |= any(
                _lacks_some(*own, names, numbers[None], most_unusual=len(own[0]) // 2)
                for other, (names, numbers) in others.items()
                if other != at
            )
    return found


def _lacks_some(names: Ints, numbers: Ints, usual_names: Ints, usual_numbers: Ints, *, most_unusual: int) -> bool:
    """Return whether a step lacks some of what other steps launch; see :func:`_lack_launches`.

    Args:
        names: Names of what the step launches, in the order of its calls.
        numbers: Numbers of these calls.
        usual_names: Names of what each of the other steps launches.
        usual_numbers: Numbers of these calls, a row per step.
        most_unusual: How many of its launches need not be among theirs, as where a library chooses another kernel.
    """
    usual, widest = usual_names.tolist(), np.diff(usual_numbers).max(axis=0, initial=0).tolist()
    known = np.flatnonzero(np.isin(names, usual_names))
    if not len(known):
        return False
    first, lacking, behind = int(known[0]), 0, 0
    place, from_number, unusual = usual.index(names[first]), int(numbers[first]), first
    for name, number in zip(names[first + 1 :].tolist(), numbers[first + 1 :].tolist(), strict=True):
        jump = number - from_number
        if place + 1 < len(usual) and usual[place + 1] == name and jump <= widest[place]:
            place, from_number, behind = place + 1, number, 0
            continue
        # Else some may be lost: it is the one of its name that is nearest to as far away in the other steps.
        named = place + 1 + np.flatnonzero(usual_names[place + 1 :] == name)
        over, between = usual_numbers[:, named] - usual_numbers[:, place, None], named - place - 1 - behind
        nearest = int(np.abs(over - jump).min(axis=0).argmin()) if len(named) else UNKNOWN
        # Without those between, numbers jump by as many less; a few of other calls are not in each step.
        if nearest == UNKNOWN or over[:, nearest].max() - max(0, between[nearest]) // 2 > jump:
            unusual, behind = unusual + 1, behind + 1
            continue
        lacking += int(between[nearest])
        place, from_number, behind = int(named[nearest]), number, 0
    return lacking > 0 and 2 * lacking > len(usual) - len(names) and unusual <= most_unusual


def _lack_as_much_as_others(counts: Ints, ranges: Ints, silent_ranges: Ints, lost_share: float) -> Mask:
    """Return which steps must lack launches because many others lack collectives here and there.

    Only of ranges of collectives it is known what each must launch. If launches are lost at random, and nothing was
    launched in s of r such ranges, a step with n launches lacks about n s / r of them, whether or not its collectives
    are among these.
    """
    launching = counts > 0
    lacking = launching & (silent_ranges > 0) & (silent_ranges < ranges)
    are_many = lacking.sum() >= max(2, _MANY * launching.sum())
    found: Mask = launching & are_many & (lost_share * counts >= _SURELY_SOME)
    return found


def _count_silent_ranges(launches: StepLaunches) -> tuple[Ints, Ints, float]:
    """Return how many ranges of collectives each step has, and in how many of them a collective seems to be lost.

    The last element is :attr:`LostCalls.lost_share`.

    Nothing that communicates was launched in these, although it was in most ranges of that name, or in all of them in
    some steps, and in none in others::

        step          |0..................||1..................|
        all_reduce     [C]  [C]  [C]        [C]  [ ]  [C]         one is lost in step 1
        send           [ ] [ ]              [ ] [ ]               a group is launched at its end

    None is lost in steps that have fewest ranges of that name that launch nothing, if most have: the program does so.

    Collectives are lost one by one if other launches were recorded as near to them as to other collectives; else all
    that was launched meanwhile is lost.
    """
    trace, process, steps = launches.trace, launches.process, launches.steps
    spans = trace.spans
    name_of = names_of_collectives(trace)
    mine = (spans.process == process) & (spans.is_open == 0) & is_in(spans.name_id, name_of)
    mine &= spans.end_ns > spans.start_ns  # else its end is not known, nor what was launched in it
    rows = np.flatnonzero(mine)
    rows = rows[steps.index_at(spans.start_ns[rows]) != UNKNOWN]
    silent = np.zeros(len(steps), np.int64)
    of_step = steps.index_at(spans.start_ns[rows])
    ranges = np.bincount(of_step, minlength=len(steps))
    if not len(rows):
        return ranges, silent, 0.0
    activities = trace.activities
    may = (activities.category == Category.UNKNOWN) & (activities.kind == Kind.KERNEL)  # a kernel without a name
    communicates = (activities.process == process) & ((activities.category == Category.COMMUNICATION) | may)
    calls = np.unique(trace.launching_calls[communicates & (trace.launching_calls != UNKNOWN)])
    call_ns, caller = trace.calls.start_ns[calls], trace.calls.lane[calls]
    launched = np.zeros(len(rows), np.bool_)
    for thread in distinct(spans.lane[rows]):
        own = np.flatnonzero(spans.lane[rows] == thread)
        at_ns = np.sort(call_ns[caller == thread])
        begun, ended = (np.searchsorted(at_ns, of[rows[own]]) for of in (spans.start_ns, spans.end_ns))
        launched[own] = ended > begun
    # A collective whose call was lost may have been launched in any of these ranges between its neighbours.
    unlaunched = select(launches.unlaunched, communicates[launches.unlaunched.activity])
    launched |= unlaunched.count_possible(spans.start_ns[rows], spans.end_ns[rows]) > 0
    names, is_lost = np.array([name_of[name_id] for name_id in spans.name_id[rows].tolist()]), np.zeros_like(launched)
    for name in sorted(set(names.tolist())):
        own = names == name
        of_name, without = (np.bincount(of_step[which], minlength=len(steps)) for which in (own, own & ~launched))
        in_each, of_each = without[of_name > 0], of_name[of_name > 0]
        is_all_or_none = np.all((in_each == 0) | (in_each == of_each))
        if (is_all_or_none or 2 * in_each.sum() < of_each.sum()) and np.any(in_each < of_each):
            fewest = in_each.min()
            usual = fewest if 2 * (in_each == fewest).sum() > len(in_each) else 0
            silent += np.where(without > usual, without, 0)
            is_lost |= own & ~launched & (without > usual)[of_step]
    # How long no launch was recorded around each range. `around`: the launches before and behind it.
    around = (
        np.searchsorted(launches.launch_ns, spans.start_ns[rows]) - 1,
        np.searchsorted(launches.launch_ns, spans.end_ns[rows]),
    )
    is_known = (around[0] >= 0) & (around[1] < len(launches.launch_ns))
    apart_ns = np.subtract(*(launches.launch_ns[at[is_known]] for at in reversed(around)))
    lost, others = apart_ns[is_lost[is_known]], apart_ns[launched[is_known]]
    are_told = is_lost.sum() >= _LEAST_LOST and len(lost) > 0 and len(others) > 0
    are_apart = are_told and np.median(lost) <= _AS_NEAR * np.median(others)
    return ranges, silent, float(is_lost.sum() / (is_lost | launched).sum()) if are_apart else 0.0


def names_of_collectives(trace: Trace) -> dict[int, str]:
    """Return the names of ranges of collectives by their index; those of ddp_prof are the kinds of these ranges."""
    found = {index: one.name for index, one in parse_ranges(trace.names, *COLLECTIVES).items()}
    named = ((index, name) for index, name in enumerate(trace.names) if name == GROUP_END or NCCL_RANGE.match(name))
    return found | dict(named)
