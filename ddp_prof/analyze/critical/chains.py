"""What delayed each operation, followed backwards: these chains make up the critical path of a step.

An operation begins after the last of three: the end of the operation before it on its stream, the ends of what its
stream waits for, and its launch. From the end of a step backwards, the last of the three leads to an earlier operation,
and so on to the start of the step::

    host        L......S...........L              S: the host waits for the device
    stream 7    .kkkk..............kkk
    stream 20   .....CCCCCCCCCCCC
    path        lkkkkCCCCCCCCCCCChhlkkk           l: launch, h: host

Before a launch, the path stays on the host back to the last time when the launching thread waited for the device, and
goes on with what the thread waited for. So the parts of a path follow one another without a gap or an overlap. Chains
are stored from collective to collective, which is enough to compare ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Table, begins_run, positions, take_or_unknown
from ddp_prof.trace import Category

PARTS = ("compute", "copies", "queue", "launch", "host")
COMPUTE, COPIES, QUEUE, LAUNCH, HOST = range(len(PARTS))


@dataclass(frozen=True)
class Chains(Table):
    """One row per collective, followed backwards from its start, then one per step, followed backwards from its end.

    Attributes:
        activity: The collective's row in the trace's activities; ``UNKNOWN`` for a step.
        step: Index of the step. A chain goes back to the start of the step's window at most.
        before: Row in this table of the collective that the chain leads to; ``UNKNOWN`` if it leads to none.
        from_ns: The earliest time of the chain; the :data:`PARTS` fill the time from there to its latest.
    """

    activity: Ints
    step: Ints
    before: Ints
    from_ns: Ints
    compute_ns: Ints
    copies_ns: Ints
    queue_ns: Ints
    launch_ns: Ints
    host_ns: Ints


@dataclass(frozen=True)
class Work(Table):
    """The operations of one device, stream by stream in the order of their launch.

    Attributes:
        part: Index into :data:`PARTS` for its time; ``UNKNOWN`` for a collective.
        bound_by: Row in this table of the operation that delayed it; ``UNKNOWN`` if its launch came last.
        launch_ns: Start of the launch call; ``NO_TIME`` if it is not in the trace.
        after_sync: Row in this table of what its thread last waited for before the launch; ``UNKNOWN`` if nothing.
    """

    activity: Ints
    start_ns: Ints
    end_ns: Ints
    part: Ints
    bound_by: Ints
    launch_ns: Ints
    after_sync: Ints


def find_work(rank: RankEvents) -> Work:
    """What delayed each operation of a device. When the main thread waits, launches of autograd's threads wait, too."""
    trace, dependencies, calls = rank.trace, rank.dependencies(), rank.host_calls
    activities, rows = trace.activities, calls.work
    place = positions(rows, len(activities))
    start, end, stream = activities.start_ns[rows], activities.end_ns[rows], dependencies.stream[rows]
    launching = trace.launching_calls[rows]
    launch = take_or_unknown(trace.calls.start_ns, launching, NO_TIME)

    bound_by, bound_ns = np.full(len(rows), UNKNOWN, np.int64), launch.copy()
    follows = np.flatnonzero(~begins_run(stream))
    later = follows[end[follows - 1] >= bound_ns[follows]]
    bound_by[later], bound_ns[later] = later - 1, end[later - 1]
    producer, consumer = place[dependencies.edges.producer], place[dependencies.edges.consumer]
    known = (producer != UNKNOWN) & (consumer != UNKNOWN)
    producer, consumer = producer[known], consumer[known]
    order = np.lexsort((end[producer], consumer))[::-1]
    order = order[begins_run(consumer[order])]  # of several producers, the one that ends last
    producer, consumer = producer[order], consumer[order]
    later_edge = end[producer] >= bound_ns[consumer]
    bound_by[consumer[later_edge]] = producer[later_edge]

    category = activities.category[rows]
    part = np.where(category == Category.MEMORY, COPIES, np.where(category == Category.COMMUNICATION, UNKNOWN, COMPUTE))
    thread = take_or_unknown(trace.calls.lane, launching)
    any_place = np.full(len(rows), np.iinfo(np.int64).max)
    after = calls.last_before(thread, rank.main_thread, launch, any_place, calls.waited)
    return Work(rows, start, end, part, bound_by, launch, take_or_unknown(calls.latest, after))


def follow_chains(
    work: Work, activities_step: Ints, window_start_ns: Ints, window_end_ns: Ints, last_activity: Ints
) -> Chains:
    """The chains of all collectives and steps of a device.

    ``activities_step`` is the step of each activity of the trace, ``last_activity`` the activity with which each step's
    window ends.
    """
    place = positions(work.activity, len(activities_step))
    collectives = np.flatnonzero(work.part == UNKNOWN)
    row_of = positions(collectives, len(work))
    steps = np.arange(len(window_start_ns))
    last = take_or_unknown(place, last_activity)

    step = np.concatenate([activities_step[work.activity[collectives]], steps])
    to_ns = np.concatenate([work.start_ns[collectives], window_end_ns])
    # A collective outside of all steps has no window: its chain is empty.
    least_ns = np.where(step == UNKNOWN, to_ns, np.minimum(take_or_unknown(window_start_ns, step), to_ns))
    now_ns = to_ns.copy()
    parts = np.zeros((len(PARTS), len(step)), np.int64)
    before = np.full(len(step), UNKNOWN, np.int64)

    def take(rows: Ints, until_ns: Ints, part: Ints | int) -> None:
        until_ns = np.clip(until_ns, least_ns[rows], now_ns[rows])
        parts[part, rows] += now_ns[rows] - until_ns
        now_ns[rows] = until_ns

    def arrive(rows: Ints, at: Ints) -> Ints:
        """Go back to the start of an operation; a collective ends the chain. Return the rows that are not at an end."""
        is_end = work.part[at] == UNKNOWN
        before[rows[is_end]] = row_of[at[is_end]]
        rows, at = rows[~is_end], at[~is_end]
        take(rows, work.start_ns[at], work.part[at])
        current[rows] = at
        return rows

    current = np.concatenate([collectives, last])
    active = np.flatnonzero(now_ns > least_ns)
    ends = active[active >= len(collectives)]
    known = ends[current[ends] != UNKNOWN]
    active = np.concatenate([active[active < len(collectives)], arrive(known, current[known])])
    while len(active := active[now_ns[active] > least_ns[active]]):
        at = current[active]
        source = work.bound_by[at]
        launched = source == UNKNOWN
        rows = active[launched]
        if len(rows):
            launch_ns = work.launch_ns[at[launched]]
            take(rows, launch_ns, np.where(launch_ns == NO_TIME, HOST, LAUNCH))
            source[launched] = work.after_sync[at[launched]]
            on_host = rows[source[launched] == UNKNOWN]
            take(on_host, least_ns[on_host], HOST)
        goes_on = source != UNKNOWN
        rows, source, gap = active[goes_on], source[goes_on], np.where(launched, HOST, QUEUE)[goes_on]
        take(rows, work.end_ns[source], gap)
        active = arrive(rows, source)
    activity = np.concatenate([work.activity[collectives], np.full(len(steps), UNKNOWN)])
    return Chains(activity, step, before, now_ns, *parts)
