"""What the doctor's rules need to know of a rank and no other analysis measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, Events
from ddp_prof.analyze.core.backward_waits import waits_in_backward
from ddp_prof.analyze.core.bucket_copies import find_bucket_copies
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.critical.hardware_queue import find_held_ns
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.kernels.contention_limit import SlowdownLimit, limit_slowdown
from ddp_prof.analyze.kernels.device_use import measure_starvation
from ddp_prof.analyze.why_unknown import NOT_TIMED, why_unknown
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import (
    NEVER,
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    begins_run,
    concatenate,
    is_in,
    rows_of,
    select,
    take_or_unknown,
)
from ddp_prof.trace import HOST_WAITS, Category, SyncKind


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank; arrays and tuples have one element per step.

    Attributes:
        process, device: Which rank it is.
        is_gloo: Whether collectives have no activity on a device, which means that gloo runs them on the host.
        syncs: How often a thread that trains waited for the device between the first launch of a pass of backward and
            the last launch of a collective of this pass.
        sync_ns: The sum of the lengths of these waits.
        bare_ns: The part of the step in which the stream with most compute does nothing, not even communicate.
        unfed_ns: The same without the time before work that had been launched long before. Launching earlier cannot
            make the step shorter by more than that.
        copies_ns: How long copies out of buckets ran on the stream with most compute, in the steps whose length is
            known; if none is, in the windows of all steps.
        copy_launches_ns: Upper limit of the time in which the host launched these copies: the time since the launch
            before each of them.
        knows_syncs: Whether the trace contains the waits of the host.
        first_share: For each pass of backward that launches collectives, the fraction of it (0 to 1) that was over when
            it launched the first one; NaN if not known.
        serialized: Number of collectives that could have begun earlier, but began when an operation of another stream
            ended, or when an operation that was launched before them began.
        could_begin: Number of collectives for which it is known when they could have begun.
        graphs: Number of replays of CUDA graphs that were recorded as single activities.
        outside_ns: The host's time outside of all phases while nothing communicated; empty without ranges of forward.
        between_ns: How long nothing ran between a step and the next one; empty where the host runs ahead.
        starved_ns: How long the device was idle before its next work was launched; empty if not known, or where
            dependencies are known, which tell more.
        overhead_share: The fraction (0 to 1) of the time of the rank's steps in which the profiler itself was at work.
        slowdown: Times of kernels that limit how much communication can slow them; faster to read than ``contention``.
    """

    process: int
    device: int | None
    is_gloo: bool
    syncs: Ints
    sync_ns: Ints
    bare_ns: tuple[int, ...]
    unfed_ns: tuple[int, ...]
    copies_ns: tuple[int, ...]
    copy_launches_ns: tuple[int, ...]
    knows_syncs: bool
    first_share: tuple[float, ...]
    serialized: int
    could_begin: int
    graphs: int
    outside_ns: tuple[int, ...]
    between_ns: tuple[int, ...]
    starved_ns: tuple[int, ...]
    overhead_share: float
    slowdown: SlowdownLimit

    def without_steps(self) -> RankFacts:
        """Return the facts without those that have one element per step."""
        no_times: tuple[int, ...] = ()
        return replace(
            self,
            syncs=self.syncs[:0],
            sync_ns=self.sync_ns[:0],
            bare_ns=no_times,
            unfed_ns=no_times,
            copies_ns=no_times,
            copy_launches_ns=no_times,
            outside_ns=no_times,
            between_ns=no_times,
            starved_ns=no_times,
        )


def measure_facts(rank: RankEvents) -> RankFacts:
    """Measure the facts of a rank that the doctor's rules need and no other analysis has."""
    syncs, sync_ns = _syncs_in_backward(rank)
    # ``busy``: when the stream with most compute was busy; ``held``: its gaps that more launches would not have filled.
    events, on_stream = rank.events, rank.events.lane == rank.compute_stream
    busy = _union_of(events, on_stream)
    held = _held_gaps(busy, events, on_stream)
    is_copy = (events.activity != UNKNOWN) & np.isin(events.activity, find_bucket_copies(rank))
    start_ns, length_ns = _windows(rank)
    end_ns = start_ns + length_ns
    bare_ns = length_ns - busy.covered_ns(start_ns, end_ns)
    starved = measure_starvation(rank) if rank.blocking.coverage.reason else None
    overhead = union(rank.trace.overhead.start_ns, rank.trace.overhead.end_ns)
    windows = rank.breakdown
    if rank.clocks_disagree:
        windows_ns = rank.steps.start_ns, rank.steps.end_ns
    else:
        windows_ns = windows.start_ns, windows.end_ns
    overhead_ns = int(overhead.covered_ns(*windows_ns).sum())
    serialized, could_begin = _count_serialized(rank)
    return RankFacts(
        process=rank.process,
        device=rank.device,
        is_gloo=bool(np.all(rank.operations.activity == UNKNOWN)),
        syncs=syncs,
        sync_ns=sync_ns,
        bare_ns=tuple(bare_ns.tolist()),
        unfed_ns=tuple((bare_ns - held.covered_ns(start_ns, end_ns)).tolist()),
        copies_ns=tuple(_union_of(events, is_copy).covered_ns(start_ns, end_ns).tolist()),
        copy_launches_ns=tuple(_launches_ns(rank, is_copy).tolist()),
        knows_syncs=_knows_syncs(rank),
        first_share=tuple(_first_shares(rank)),
        serialized=serialized,
        could_begin=could_begin,
        graphs=int(np.count_nonzero(events.category == Category.OTHER)),
        outside_ns=tuple(_outside_phases_ns(rank)),
        between_ns=tuple(_between_steps_ns(rank)),
        starved_ns=() if starved is None else tuple(starved.tolist()),
        overhead_share=overhead_ns / max(1, int((windows_ns[1] - windows_ns[0]).sum())),
        slowdown=limit_slowdown(rank),
    )


def _knows_syncs(rank: RankEvents) -> bool:
    """Return whether the trace contains the waits of the host for the device, and for what each waits.

    A trace may contain these even if it does not contain the waits of streams.
    """
    calls = rank.trace.synchronizations
    is_held = is_in(calls.kind, HOST_WAITS)
    for_unknown = (calls.kind == SyncKind.HOST_WAIT_EVENT) & (calls.awaits == UNKNOWN)
    for_unknown |= (calls.kind == SyncKind.HOST_WAIT_STREAM) & (calls.stream == UNKNOWN)
    return rank.device is None or rank.trace.sync_source != "none" or bool(is_held.any() and not for_unknown.any())


def _first_shares(rank: RankEvents) -> list[float]:
    """Return ``RankFacts.first_share``: which fraction of each pass of backward precedes its first collective."""
    operations, passes = rank.operations, rank.passes
    row = rank.pass_of_operation
    in_backward = (operations.phase == BACKWARD_PHASE) & (operations.launch_ns != NO_TIME)
    rows = np.flatnonzero((row != UNKNOWN) & in_backward)
    rows = rows[operations.launch_ns[rows] >= passes.first_ns[row[rows]]]
    rows = rows[np.lexsort((operations.launch_ns[rows], row[rows]))]
    rows = rows[begins_run(row[rows])]  # the first of each pass
    first_ns = passes.first_ns[row[rows]]
    # A pass lasts until its last launch, or on a CPU, until the end of its range.
    last_ns = (passes.last_ns if rank.device is not None else passes.end_ns)[row[rows]]
    known = (last_ns > first_ns) & (not rank.clocks_disagree)
    share = np.full(len(rows), np.nan)
    share[known] = np.minimum(1, (operations.launch_ns[rows] - first_ns)[known] / (last_ns - first_ns)[known])
    found: list[float] = share.tolist()
    return found


def _syncs_in_backward(rank: RankEvents) -> tuple[Ints, Ints]:
    """Return ``syncs`` and ``sync_ns`` of :class:`RankFacts`: number and length of the waits in backward, per step."""
    waits, step = waits_in_backward(rank)
    length_ns = (rank.host_calls.end_ns - rank.host_calls.start_ns)[waits]
    return np.bincount(step, minlength=len(rank.steps)), sum_by_group(length_ns, step, len(rank.steps))


def _outside_phases_ns(rank: RankEvents) -> list[int]:
    """Return ``RankFacts.outside_ns``: the host's time of each step that no phase and no communication covers.

    Without ranges of forward, its time would be outside, too. Where the clocks disagree, a range of the host says
    nothing about times of the device.
    """
    if not rank.has_steps or rank.clocks_disagree or PHASES.index(FORWARD) not in rank.phases.kind:
        return []
    phases = concatenate(rank.phases, rank.inferred_backward)
    covered = union(phases.start_ns, phases.end_ns) | _union_of(rank.events, rank.is_backward)
    covered |= rank.union_of(Category.COMMUNICATION)
    covered_ns = covered.covered_ns(rank.steps.start_ns, rank.steps.end_ns)
    outside: list[int] = (rank.steps.end_ns - rank.steps.start_ns - covered_ns).tolist()
    return outside if covered_ns.any() else []


def _between_steps_ns(rank: RankEvents) -> list[int]:
    """Return ``RankFacts.between_ns``: how long nothing ran between each step and the step that followed it."""
    if not rank.has_steps or not len(rank.events) or rank.runs_ahead or why_unknown(rank) in NOT_TIMED:
        return []
    start_ns, end_ns = rank.steps.end_ns[:-1], rank.steps.start_ns[1:]
    busy = union(rank.events.start_ns, rank.events.end_ns)
    between: list[int] = (end_ns - start_ns - busy.covered_ns(start_ns, end_ns))[rank.is_followed[:-1]].tolist()
    return between


def _windows(rank: RankEvents) -> tuple[Ints, Ints]:
    """Return start and length of each step whose length is known or, if none is, of the window of each step."""
    times = select(rank.step_times, rank.step_times.is_known)
    return (times.start_ns, times.length_ns) if len(times) else (rank.breakdown.start_ns, rank.breakdown.window_ns)


def _union_of(events: Events, chosen: Mask) -> Intervals:
    rows = rows_of(chosen)
    return union(events.start_ns[rows], events.end_ns[rows])


LAUNCHED_AHEAD_NS = 50_000
"""Work that was launched so long before its stream became idle did not wait for its launch; no launch takes so long."""


def _held_gaps(busy: Intervals, events: Events, on_stream: Mask) -> Intervals:
    """Return when a stream was idle although its next work had been launched long before it became idle.

    ``busy`` is when the stream was not idle, ``on_stream`` tells which of the events are on it.
    """
    rows = rows_of(on_stream)
    start_ns, launched_ns = events.start_ns[rows], events.launch_ns[rows]
    launch_ns = np.full(len(busy), NO_TIME)  # the latest launch among the events with which each busy stretch begins
    first = np.searchsorted(busy.start_ns, start_ns)
    begins = np.flatnonzero(take_or_unknown(busy.start_ns, np.minimum(first, len(busy) - 1)) == start_ns)
    unknown = np.where(launched_ns == NO_TIME, NEVER, launched_ns)
    np.maximum.at(launch_ns, first[begins], unknown[begins])
    idle_from, idle_to = busy.end_ns[:-1], busy.start_ns[1:]
    is_held = launch_ns[1:] < idle_from - LAUNCHED_AHEAD_NS
    return Intervals(idle_from[is_held], idle_to[is_held])  # none touches another: the stream is busy in between


def _launches_ns(rank: RankEvents, chosen: Mask) -> Ints:
    """Return an upper limit of the time that the host spent on launching the chosen events, for each step.

    For each launch, that is the time since the launch before it on the same thread or, for the first launch of a thread
    in a step, since the start of the step's range.
    """
    events = rank.events
    rows = np.flatnonzero((events.launch_ns != NO_TIME) & (events.step != UNKNOWN))
    rows = rows[np.lexsort((events.launch_ns[rows], events.launcher[rows], events.step[rows]))]
    launch_ns, step = events.launch_ns[rows], events.step[rows]
    # ``np.roll`` by 1: the launch before.
    since_ns = launch_ns - np.where(
        begins_run(step, events.launcher[rows]), rank.steps.start_ns[step], np.roll(launch_ns, 1)
    )
    return sum_by_group(since_ns[chosen[rows]], step[chosen[rows]], len(rank.steps))


def _count_serialized(rank: RankEvents) -> tuple[int, int]:
    """Return ``serialized`` and ``could_begin`` of :class:`RankFacts`, two numbers of collectives.

    A collective that began late does not count if its wait may be for an event record that was lost.
    """
    if rank.device is None or rank.blocking.coverage.reason:
        return 0, 0
    work = rank.work
    stream, place = (column[work.activity] for column in (rank.dependencies().stream, rank.dependencies().place))
    bound_ns = work.bound_ns
    rows = np.flatnonzero(work.is_collective & (bound_ns != NO_TIME))
    # Collectives that began later than they could, and the operations that ended shortly before each of them began:
    # positions ``first`` to ``last`` in ``by_end``.
    is_late = work.start_ns[rows] - bound_ns[rows] > BACK_TO_BACK_NS
    is_told = ~(is_late & is_in(work.activity[rows], _after_doubtful_waits(rank)))
    rows, is_late = rows[is_told], is_late[is_told]
    late = rows[is_late]
    by_end = np.argsort(work.end_ns, kind="stable")
    first = np.searchsorted(work.end_ns[by_end], work.start_ns[late] - BACK_TO_BACK_NS)
    last = np.searchsorted(work.end_ns[by_end], work.start_ns[late], side="right")
    # Held up until an operation launched before it began; else until one of another stream ended that ran already when
    # the collective could have begun.
    is_held = find_held_ns(work, stream, place, late) > BACK_TO_BACK_NS
    found = int(np.count_nonzero(is_held))
    late, first, last = late[~is_held], first[~is_held], last[~is_held]
    for row, low, high in zip(late.tolist(), first.tolist(), last.tolist(), strict=True):
        ended = by_end[low:high]
        found += bool(np.any((stream[ended] != stream[row]) & (work.start_ns[ended] < bound_ns[row])))
    return found, len(rows)


def _after_doubtful_waits(rank: RankEvents) -> Ints:
    """Return the activities directly after a wait that may be for another record than the one found.

    That is so if a record of which the profiler kept the call alone lies between the two::

        calls     record 1   wait for 1   record ?   wait for 1   launch
        recorded  record 1                (lost)                   is returned
    """
    calls, dependencies = rank.trace.synchronizations, rank.dependencies()
    place, own = dependencies.call_place, calls.process == rank.process
    lost = np.sort(place[own & (calls.kind == SyncKind.RECORD) & (calls.stream == UNKNOWN)])
    waits = np.flatnonzero(own & dependencies.is_resolved)
    before, since = np.searchsorted(lost, place[waits]), np.searchsorted(lost, place[calls.awaits[waits]])
    next_work = dependencies.next_work[waits[before > since]]
    found: Ints = next_work[next_work != UNKNOWN]
    return found
