"""What was recorded of a process: which of its steps are whole, and whether its host and devices share one clock.

This is found once, before anything is measured. Two decisions follow from it. Every figure obeys them, because the
events of a rank are selected accordingly (:mod:`.rank_events`):

*Steps that count.* A profiler may lose activities, for whole steps or parts of them, and keep the calls that launched
them. A step is complete if each launch in it has an activity, none of its activities has impossible times, and none of
its kernels takes no time. If most steps have activities with impossible times, no step is complete.
Incomplete steps are no samples: they and their events are left out, as warm-up is::

    step        |0........||1........||2........|
    launches      a  b  c     a  b  c    a  b  c
    activities     aa bb cc        cc              only step 0 is complete

A step that lost copies is not complete, either. But if most steps lost some, or all that communicate, these copies hide
no more than the figures that need them (``hides_copies``), unless they may communicate: what communicates, and computes
beside it, was recorded. Nor is a step complete that seems to have lost calls with all that they launched, see
:mod:`.lost_calls`.

*One clock.* If the clocks of host and device disagree (:mod:`.clocks`), no time between a call and an activity means
anything, and the start of each launch counts as unknown. Figures that need only the device's clock stay, unless its
unit is another one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.core.clocks import Clocks, compare_clocks
from ddp_prof.analyze.core.lost_calls import StepLaunches, find_lost_calls, names_of_collectives
from ddp_prof.analyze.core.steps import Phases, Steps
from ddp_prof.analyze.core.unlaunched import find_unlaunched
from ddp_prof.columns import by_number, percent
from ddp_prof.communication import DEVICE_BARRIER, operation_of
from ddp_prof.notes import Doubt
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    distinct,
    is_among,
    is_in,
    rows_of,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, Kind, SyncKind, Trace

MOST_ALWAYS_LOST = 0.01
"""Some launches may make no activity in any step: up to this fraction, what most steps lack counts as no loss.

A step is then incomplete only if it lacks more activities than the step that lacks the fewest.
"""

MICROSECOND_NS = 1000

MOST_UNLAUNCHED = 0.1
"""Largest fraction of the time of compute without a recorded call with which steps are known by what they launched."""

MOST_NAMED = 8
"""Largest number of steps whose numbers a note lists."""

LOST_CALLS = (
    "which calls launched much of compute is not known, so neither is what a step launched, nor what is backward"
)


@dataclass(frozen=True)
class Recording:
    """What was recorded of one process.

    Attributes:
        launches: Number of its calls that launched something.
        lost_ns: Start of each of these calls that has no activity, because the profiler lost it.
        are_unnumbered: Whether launches without an activity are not lost, because activities lack their numbers.
        step_launches: Number of calls that launched something in each step.
        precedes_other_work: For each step, whether much was launched between it and the next one; see
            :func:`_precede_other_work`.
        precedes_collectives: For each of these steps, whether at least half as many collectives as in a step were
            among that work: then it seems to be a step whose range was lost.
        step_lost: Number of a step's launches without an activity; 0 if activities lack their numbers in all steps.
        step_collectives: Number of activities that communicate and were launched in each step.
        step_lost_copies: Number of calls for copies or memory sets in each step without an activity; 0 if none has one.
        are_copies_local: Whether the copies that these calls asked for communicate with nobody.
        are_lost_alike: Whether most steps that lack the fewest launches lack those at the same places.
        are_copies_alike: The same for calls for copies.
        is_overlong: For each step, whether an activity with an impossible start or end was launched in it.
        is_timeless: For each step, whether a kernel that takes no time was launched in it, although some step has none,
            or most kernels of its name take some.
        is_torn: For each step, whether the clock of the device jumps in it or behind it.
        is_silent: For each step, whether no launch and no work was recorded in it, although other steps launch some.
        is_partial: For each step, whether the calls of a part of it seem to be lost, too.
        step_ranges: Number of ranges of collectives in each step.
        step_silent_ranges: Number of these in which a collective seems to be lost; see
            :mod:`.lost_calls`.
        lost_share: Which fraction of all launches seems to be lost one by one, with their work; 0 if that is not known.
        clocks: How the times of host and devices fit together.
        unlaunched: Fraction of the time of its compute without a recorded call, though other compute has one. What was
            launched before the recording began is left out, and what began in incomplete steps.
    """

    launches: int
    lost_ns: Ints
    are_unnumbered: bool
    step_launches: Ints
    precedes_other_work: Mask
    precedes_collectives: Mask
    step_lost: Ints
    step_collectives: Ints
    step_lost_copies: Ints
    are_copies_local: bool
    are_lost_alike: bool
    are_copies_alike: bool
    is_overlong: Mask
    is_timeless: Mask
    is_torn: Mask
    is_silent: Mask
    is_partial: Mask
    step_ranges: Ints
    step_silent_ranges: Ints
    lost_share: float
    clocks: Clocks
    unlaunched: float

    @property
    def lacks_calls(self) -> bool:
        """Whether calls that launched much of its compute were lost, as those of a thread.

        What a step launched is then not known, nor which compute is backward's.
        """
        return self.unlaunched > MOST_UNLAUNCHED

    @property
    def lost(self) -> int:
        """Number of launches without an activity."""
        return len(self.lost_ns)

    @property
    def loses_work(self) -> bool:
        """Whether the profiler lost work: activities alone, or with the calls that launched them."""
        return bool(self.lost or self._loses_copies.any() or self.is_silent.any() or self.is_partial.any())

    @property
    def lacks_copies(self) -> Mask:
        """For each step, whether it is incomplete because copies of it were lost."""
        return self._loses_copies & (not self.hides_copies)

    @property
    def hides_copies(self) -> bool:
        """Whether steps that lost copies alone count, without the figures that need these.

        That is so if most steps that are not damaged otherwise lost some, or all of them that communicate.
        """
        asked = ~(self._has_other_damage | (self.step_lost > self.always_lost))
        loses, communicates = self._loses_copies & asked, asked & (self.step_collectives > 0)
        are_most = 2 * loses.sum() > asked.sum() or (communicates.any() and loses[communicates].all())
        return bool(self.are_copies_local and loses.any() and are_most)

    @property
    def _loses_copies(self) -> Mask:
        """For each step, whether copies of it were lost: any, unless most lost as many as the step that lost fewest.

        Some calls may make no copy in any step, such as those of 0 bytes.
        """
        least = int(self.step_lost_copies.min(initial=np.iinfo(np.int64).max))
        is_usual = self.are_copies_alike and 2 * (self.step_lost_copies == least).sum() > len(self.step_lost_copies)
        lost: Mask = self.step_lost_copies > (least if is_usual else 0)
        return lost

    @property
    def are_most_overlong(self) -> bool:
        """Whether most steps have an activity with an impossible start or end: then no time can be trusted."""
        return bool(2 * self.is_overlong.sum() > len(self.is_overlong) > 1)

    @property
    def is_incomplete(self) -> Mask:
        """For each step, whether it was not recorded completely."""
        found: Mask = (self.step_lost > self.always_lost) | self._has_other_damage | self.are_most_overlong
        found |= self.lacks_copies
        return found

    @property
    def always_lost(self) -> int:
        """Number of launches without an activity that is normal: the least of all steps, if few and in most of them."""
        lost, launches = (column[self.step_launches > 0] for column in (self.step_lost, self.step_launches))
        if not len(lost):
            return 0
        best, of = int(lost.min()), int(launches[lost.argmin()])
        is_usual = self.are_lost_alike and 2 * (lost == best).sum() > len(lost)
        return best if is_usual and best <= MOST_ALWAYS_LOST * of else 0

    @property
    def _has_other_damage(self) -> Mask:
        """For each step, whether it is incomplete for another reason than lost activities."""
        found: Mask = self.is_overlong | self.is_timeless | self.is_silent | self.is_partial
        return found | self.is_torn if self.clocks.jumps(loses_work=self.loses_work) else found

    @property
    def clocks_disagree(self) -> bool:
        """Whether the clocks of host and device disagree; see :mod:`.clocks`."""
        return self.clocks.disagree(loses_work=self.loses_work)

    @property
    def units_differ(self) -> bool:
        """Whether the times of host and device are in different units."""
        return self.clocks_disagree and self.clocks.are_stretched

    def notes(self, names: list[str]) -> tuple[str, ...]:
        """Return a doubt for each kind of damage; ``names`` are the names of the steps."""
        notes = list[str]()
        without = f"no activity{' with their number' if self.are_unnumbered else ', which the profiler lost'}"
        without_there = without.replace("activity", "activity there", 1)

        def leave_out(steps: Mask, why: str) -> None:
            """Note that these steps, if there are any, are left out; ``why`` may speak of {them} and {their} work."""
            if count := int(steps.sum()):
                words = {"them": by_number(count, "it", "them"), "their": by_number(count, "its", "their")}
                notes.append(f"{name_steps(names, steps)} left out: {why.format(**words)}")

        is_lost = (self.step_lost > self.always_lost) & (self._loses_copies | ~self._has_other_damage)
        launches, lost = (int(column[is_lost].sum()) for column in (self.step_launches, self.step_lost))
        leave_out(is_lost, f"{lost:,} of {launches:,} launches in {{them}} {by_number(lost, 'has', 'have')} {without}")
        counts = ~self.is_incomplete & (self.step_launches > 0)
        if (always := self.always_lost) and counts.any():
            do, each = ("counts", "it") if counts.sum() == 1 else ("count", "each of them")
            lack = "1 launch has" if always == 1 else f"{always:,} launches have"
            notes.append(f"{name_steps(names, counts)} {do}, although {lack} no activity in {each}")
        loses = self._loses_copies
        copies = int(self.step_lost_copies[loses].sum())
        calls = by_number(
            copies, "a call that copies or sets memory has", f"{copies:,} calls that copy or set memory have"
        )
        if self.hides_copies:
            notes.append(
                f"{name_steps(names, loses)}: {calls} {without_there}, so no figure that needs copies is known"
            )
        else:
            leave_out(loses, f"{calls} {without_there}")
        leave_out(self.is_overlong, "an activity in {them} has an impossible start or end")
        if self.are_most_overlong:
            why = "most steps have activities with an impossible start or end, so no time can be trusted"
            leave_out(~self.is_overlong, why)
        leave_out(self.is_timeless, "a kernel in {them} takes no time, which is impossible")
        if self.clocks.jumps(loses_work=self.loses_work):
            leave_out(self.is_torn, "the clock of its device jumps in {them} or behind")
        leave_out(self.is_silent, "no launch was recorded in {them}")
        is_partial = self.is_partial & ~self.is_overlong & ~self.is_silent
        lacks_collectives = is_partial & (self.step_silent_ranges > 0)
        ranges, silent = (int(of[lacks_collectives].sum()) for of in (self.step_ranges, self.step_silent_ranges))
        leave_out(
            lacks_collectives,
            f"collectives in {{them}} seem to be recorded only in part: in {silent:,} of {ranges:,} ranges of "
            "collectives nothing was launched that is known to communicate",
        )
        leave_out(is_partial & ~lacks_collectives, "{their} launches seem to be recorded only in part")
        if self.lost_share and counts.any():
            notes.append(
                f"launches seem to be lost one by one, about {percent(self.lost_share)} of all: also in the steps that "
                "count, so figures are of what was recorded"
            )
        if self.precedes_collectives.any():
            which = name_steps(names, self.precedes_collectives)
            notes.append(
                f"after {which}, as much as in half of a step or more was launched before the next one, collectives "
                "included, but in no range of a step: figures per step leave it out"
            )
        if self.clocks_disagree:
            notes.append(self.clocks.describe_disagreement())
        return (*map(Doubt, notes), *([LOST_CALLS] if self.lacks_calls else []))


def name_steps(names: list[str], chosen: Mask) -> str:
    """Return words for the chosen steps: ``step 3``, ``steps 3 to 9 (7 of 20)`` or ``steps 1, 4 (2 of 20)``."""
    rows: list[int] = np.flatnonzero(chosen).tolist()
    if len(rows) == 1:
        return names[rows[0]]
    which = [names[row].removeprefix("step ") for row in rows]
    if len(rows) > 2 and rows == list(range(rows[0], rows[-1] + 1)):
        shown = f"{which[0]} to {which[-1]}"
    else:
        more = len(rows) - MOST_NAMED
        shown = ", ".join(which[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"steps {shown} ({len(rows)} of {len(names)})"


def find_recording(trace: Trace, process: int, steps: Steps, phases: Phases) -> Recording:
    """Return what was recorded of a process; without steps, the columns of steps are empty."""
    lost, is_launch, are_unnumbered = _find_launches_without_activity(trace, process)
    lost_ns = trace.calls.start_ns[lost]
    launch_ns = np.sort(trace.calls.start_ns[is_launch], kind="stable")  # nearly in order
    unlaunched = find_unlaunched(trace, process)
    launches = StepLaunches(trace, process, steps, launch_ns, lost_ns, unlaunched)
    lost_calls, step_lost = find_lost_calls(launches, phases), launches.lost
    if are_unnumbered and not _are_some_numbered(launches):
        step_lost = np.zeros_like(step_lost)
    # The steps that launched activities with an impossible start or end, and kernels that take no time.
    overlong = trace.overlong[trace.activities.process[trace.overlong] == process]
    timeless = _find_timeless(trace, process)
    is_timeless = _are_launched_in(trace, timeless, steps)
    if is_timeless.all():  # the profiler tells no durations of these kernels, or it damaged some in each step
        is_timeless = _are_launched_in(trace, _that_usually_last(trace, timeless, process), steps)
    step_lost_copies, are_copies_alike, are_copies_local = _count_lost_copies(trace, process, steps)
    precedes_lost_steps = _precede_lost_steps(launch_ns, launches.collective_ns, steps)
    precedes_other_work = _precede_other_work(trace, process, steps) | precedes_lost_steps
    precedes_collectives = precedes_other_work & _precede_as_much(launches.collective_ns, steps)
    clocks = compare_clocks(trace, process)
    found = Recording(
        launches=len(launch_ns),
        lost_ns=lost_ns[:0] if are_unnumbered else lost_ns,
        are_unnumbered=are_unnumbered,
        step_launches=launches.counts,
        precedes_other_work=precedes_other_work,
        precedes_collectives=precedes_collectives | precedes_lost_steps,
        step_lost=step_lost,
        step_collectives=launches.collectives,
        step_lost_copies=step_lost_copies,
        are_copies_local=are_copies_local,
        are_lost_alike=_are_alike(launch_ns, lost_ns, steps),
        are_copies_alike=are_copies_alike,
        is_overlong=_are_launched_in(trace, overlong, steps),
        is_timeless=is_timeless,
        is_torn=steps.count_at(np.array([clocks.jump_ns])) > 0,
        is_silent=lost_calls.is_silent,
        is_partial=lost_calls.is_partial,
        step_ranges=lost_calls.ranges,
        step_silent_ranges=lost_calls.silent_ranges,
        lost_share=lost_calls.lost_share,
        clocks=clocks,
        unlaunched=0.0,
    )
    known = unlaunched.activity[unlaunched.are_placed(steps, phases)]
    return replace(found, unlaunched=_measure_unlaunched(trace, process, select(steps, found.is_incomplete), known))


def _precede_other_work(trace: Trace, process: int, steps: Steps) -> Mask:
    """Return the steps between which and the next one half as much as in a step was launched, and more than usual.

    It may be a step whose range was lost, or a validation: the time until the next step begins is no length of a step.
    """
    is_mine = (trace.activities.process == process) & (trace.launching_calls != UNKNOWN)
    has_activity = np.zeros(len(trace.calls), np.bool_)
    has_activity[trace.launching_calls[is_mine]] = True
    return _precede_as_much(trace.calls.start_ns[has_activity], steps)


def _precede_lost_steps(launch_ns: Ints, collective_ns: Ints, steps: Steps) -> Mask:
    """Return the steps between which and the next one numbers are missing, and half as much as in a step was launched.

    Collectives, too. If the ranges of most steps were lost, or only some steps have one, that much is usual.
    """
    number = steps.number
    found = np.append((np.diff(number) > 1) & (number[:-1] != UNKNOWN), False)[: len(steps)]
    for at_ns in (launch_ns, collective_ns):
        found &= _precede_as_much(at_ns, steps, is_ever_usual=False)
    return found


def _precede_as_much(launch_ns: Ints, steps: Steps, *, is_ever_usual: bool = True) -> Mask:
    """Return between which steps and the next one half as much as in a step was launched, and more than usual.

    Unless ``is_ever_usual``, nothing is usual there.
    """
    launch_ns = np.sort(launch_ns, kind="stable")  # nearly in order
    begun, ended = (np.searchsorted(launch_ns, at_ns) for at_ns in (steps.start_ns, steps.end_ns))
    between, found = begun[1:] - ended[:-1], np.zeros(len(steps), np.bool_)
    if len(between) and (usual := np.median(ended - begun)):
        found[:-1] = 2 * (between - (np.median(between) if is_ever_usual else 0)) >= usual
    return found


def _are_alike(calls_ns: Ints, lost_ns: Ints, steps: Steps) -> bool:
    """Return whether the steps that lost the fewest calls lost those at the same places among all of the step.

    Most do, and one more than half, since other calls of some steps may move these places.
    """
    calls_ns, lost_ns = np.sort(calls_ns), np.sort(lost_ns)
    of_step = steps.index_at(lost_ns)
    count = np.bincount(of_step[of_step != UNKNOWN], minlength=len(steps))
    if not len(steps) or not count.min():
        return True
    place = np.searchsorted(calls_ns, lost_ns) - np.searchsorted(calls_ns, steps.start_ns)[of_step]
    fewest = np.flatnonzero(count == count.min())
    _, times = np.unique(np.stack([place[of_step == step] for step in fewest]), axis=0, return_counts=True)
    return bool(times.max() >= min(len(fewest), len(fewest) / 2 + 1))


def _count_lost_copies(trace: Trace, process: int, steps: Steps) -> tuple[Ints, bool, bool]:
    """Return how many calls for copies in each step have no activity with their number, and two facts about these.

    These are whether they are at equal places in the steps, and whether their copies certainly communicate with nobody.
    Calls for memory sets count, too. None of either kind counts if no activity of that kind was recorded.
    """
    calls, activities = trace.synchronizations, trace.activities
    mine = activities.process == process
    recorded = [
        call
        for call, kind in ((SyncKind.COPY, Kind.COPY), (SyncKind.SET, Kind.MEMORY_SET))
        if np.any(mine & (activities.kind == kind))
    ]
    asked = np.flatnonzero(is_in(calls.kind, recorded) & (calls.process == process) & (calls.start_ns != NO_TIME))
    # Nearly all are among the few copies and memory sets; but a kernel may set memory, too.
    are_usual = mine & is_in(activities.kind, (Kind.COPY, Kind.MEMORY_SET))
    lost = asked[~is_among(calls.correlation[asked], activities.correlation[are_usual])]
    lost = lost[~is_among(calls.correlation[lost], activities.correlation[mine])]
    count = steps.count_at(calls.start_ns[lost])
    are_alike = _are_alike(calls.start_ns[asked], calls.start_ns[lost], steps)
    return count, are_alike, _are_local(trace, process, calls.start_ns[lost])


def _are_local(trace: Trace, process: int, copies_ns: Ints) -> bool:
    """Return whether the copies that were asked for at these times communicate with nobody.

    They may communicate if recorded copies do, if the process has several devices, or barriers between devices, or if
    they were asked for in a range of a collective.
    """
    activities, spans = trace.activities, trace.spans
    mine = activities.process == process
    communicates = mine & (activities.category == Category.COMMUNICATION)
    named = (trace.names[name_id] for name_id in distinct(activities.name_id[communicates]))
    if (
        len(distinct(activities.device[mine])) != 1
        or np.any(communicates & (activities.kind == Kind.COPY))
        or any(operation_of(name) == DEVICE_BARRIER for name in named)
    ):
        return False
    rows = np.flatnonzero((spans.process == process) & is_in(spans.name_id, names_of_collectives(trace)))
    begun, ended = (np.searchsorted(np.sort(copies_ns), of[rows]) for of in (spans.start_ns, spans.end_ns))
    return not np.any(ended > begun)


def _find_timeless(trace: Trace, process: int) -> Ints:
    """Return the kernels (rows) of a process whose duration of 0 is impossible.

    If all times are whole microseconds, as older torch.profiler writes them, a kernel that takes less may seem to take
    none: then the duration is impossible only if a kernel of the same name takes two microseconds or more.
    """
    activities = trace.activities
    kernels = np.flatnonzero((activities.kind == Kind.KERNEL) & (activities.process == process))
    took_ns = activities.end_ns[kernels] - activities.start_ns[kernels]
    is_timeless = took_ns == 0
    if not is_timeless.any():
        return kernels[:0]
    if not np.any(activities.start_ns[kernels] % MICROSECOND_NS) and not np.any(took_ns % MICROSECOND_NS):
        names = activities.name_id[kernels]
        is_timeless &= is_among(names, names[took_ns >= 2 * MICROSECOND_NS])
    found: Ints = kernels[is_timeless]
    return found


def _that_usually_last(trace: Trace, kernels: Ints, process: int) -> Ints:
    """Return which of these kernels have names of which most kernels of the process take two microseconds or more."""
    activities = trace.activities
    mine = (activities.kind == Kind.KERNEL) & (activities.process == process)
    lasts = activities.end_ns - activities.start_ns >= 2 * MICROSECOND_NS
    names = activities.name_id[kernels]
    usual = [name for name in distinct(names) if 2 * lasts[mine & (activities.name_id == name)].mean() > 1]
    found: Ints = kernels[np.isin(names, usual)]
    return found


def _are_launched_in(trace: Trace, activities: Ints, steps: Steps) -> Mask:
    """Return which steps launched one of these activities (rows)."""
    at = steps.index_at(take_or_unknown(trace.calls.start_ns, trace.launching_calls[activities], NO_TIME))
    found = np.zeros(len(steps), np.bool_)
    found[at[at != UNKNOWN]] = True
    return found


def _are_some_numbered(launches: StepLaunches) -> bool:
    """Return whether activities of some steps have the numbers of their launches, so that these steps can be measured.

    If collectives are among the activities without a number, such a step must have others: steps that accumulate
    gradients have none, and say nothing about steps that reduce them.
    """
    activities = launches.trace.activities
    unnumbered = (activities.process == launches.process) & (activities.correlation == UNKNOWN)
    is_numbered = (launches.counts > 0) & (launches.lost <= MOST_ALWAYS_LOST * launches.counts)
    if np.any(activities.category[unnumbered] == Category.COMMUNICATION):
        is_numbered &= launches.collectives > 0
    return bool(is_numbered.any())


def find_lost_launches(trace: Trace, process: int) -> tuple[Ints, Mask]:
    """Return the calls of a process whose activity was lost (rows), and all calls that launched something (a mask)."""
    without, is_launch, are_unnumbered = _find_launches_without_activity(trace, process)
    return without[:0] if are_unnumbered else without, is_launch


def _find_launches_without_activity(trace: Trace, process: int) -> tuple[Ints, Mask, bool]:
    """Return the calls of a process without an activity (rows), all that launched something, and whether none is lost.

    A number is a correlation id here. A call without an activity, but with the same number as the call before it on its
    thread, is a part of that call and does not count: for example a call of the driver within one of the runtime.

    A launch is lost only if no activity has its number. No launch is lost if about as many kernels lack a number as
    launches lack an activity, as with some releases of ROCm, because these launches may have launched these kernels.
    """
    calls, activities = trace.calls, trace.activities
    if trace.is_launch is None:
        return np.empty(0, np.int64), np.zeros(len(calls), np.bool_), False
    is_launch = trace.is_launch & (calls.process == process)
    has_activity = np.zeros(len(calls), np.bool_)
    has_activity[trace.launching_calls[rows_of(trace.launching_calls != UNKNOWN)]] = True
    lost = np.flatnonzero(is_launch & ~has_activity & (calls.correlation != UNKNOWN))
    mine = activities.process == process
    if len(lost):
        lost = lost[~is_among(calls.correlation[lost], activities.correlation[mine])]
        is_part = _are_parts(trace, process, lost)
        is_launch[lost[is_part]] = False
        lost = lost[~is_part]
    unnumbered = int((mine & (activities.kind == Kind.KERNEL) & (activities.correlation == UNKNOWN)).sum())
    are_unnumbered = bool(unnumbered and len(lost) - unnumbered <= MOST_ALWAYS_LOST * len(lost))
    return lost, is_launch, are_unnumbered


def are_launched_earlier(trace: Trace) -> Mask:
    """Return a mask of the activities that were launched before the recording began.

    A process numbers its calls in order, so their number is lower than those of all recorded calls.
    """
    activities, calls = trace.activities, trace.calls
    found = np.zeros(len(activities), np.bool_)
    asked = (trace.launching_calls == UNKNOWN) & (activities.correlation != UNKNOWN)
    for process in distinct(activities.process[asked]):
        numbers = calls.correlation[(calls.process == process) & (calls.correlation != UNKNOWN)]
        if len(numbers):
            found |= asked & (activities.process == process) & (activities.correlation < numbers.min())
    return found


def _are_parts(trace: Trace, process: int, rows: Ints) -> Mask:
    """Return whether each call in ``rows`` directly follows, on its thread, a call with the same correlation id."""
    calls, is_part = trace.calls, np.zeros(len(trace.calls), np.bool_)
    for lane in distinct(calls.lane[rows]):
        own = np.flatnonzero((calls.process == process) & (calls.lane == lane))
        own = own[np.argsort(calls.start_ns[own], kind="stable")]
        number = calls.correlation[own]
        is_part[own[1:][(number[1:] == number[:-1]) & (number[1:] != UNKNOWN)]] = True
    return is_part[rows]


def _measure_unlaunched(trace: Trace, process: int, incomplete: Steps, known: Ints) -> float:
    """Return the fraction of the time of compute without a recorded call; 0 if no compute has one.

    ``known`` are activities (rows) without a call whose step and phase are known all the same.
    """
    activities = trace.activities
    rows = rows_of((activities.process == process) & (activities.category == Category.COMPUTE))
    is_launched = trace.launching_calls[rows] != UNKNOWN
    if is_launched.all() or not is_launched.any():
        return 0.0
    took_ns = activities.end_ns[rows] - activities.start_ns[rows]
    is_lost = ~is_launched & ~are_launched_earlier(trace)[rows]
    is_lost &= incomplete.index_at(activities.start_ns[rows]) == UNKNOWN
    is_known = np.zeros(len(activities), np.bool_)
    is_known[known] = True
    is_lost &= ~is_known[rows]
    return float(took_ns[is_lost].sum() / max(1, took_ns.sum()))
