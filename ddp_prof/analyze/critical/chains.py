"""What bound each operation, followed backwards: the chains of which the critical path of a step is made.

An operation began when the last of three had come: the end of the operation before it on its stream, the ends of what
its stream had been told to wait for, and its launch. Backwards from the end of a step, what came last leads to an
operation before it in time, and so on to the start of the step::

    host        L......S...........L              S: the host waits for the device
    stream 7    .kkkk..............kkk
    stream 20   .....CCCCCCCCCCCC
    path        lkkkkCCCCCCCCCCCChhlkkk           l: launch, h: host

A launch was made when its thread came to it: the path stays on the host back to the last time when the thread waited
for the device, and goes on with what it waited for. So the parts of a path follow one another without a gap or an
overlap. Chains are kept from collective to collective: that is all that comparing ranks needs.
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
    """One row per collective, from its start backwards, then one per step, from its end backwards.

    Attributes:
        activity: Row in the trace's activities of the collective; ``UNKNOWN`` for a step.
        step: Index of the step, whose window's start ends the chain at the latest.
        before: Row here of the collective that the chain leads to; ``UNKNOWN`` where it reaches the window's start.
        from_ns: Where the chain ends going backwards; its :data:`PARTS` fill the time from there to where it begins.
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
        part: Index into :data:`PARTS` that its time counts for; ``UNKNOWN`` for a collective.
        bound_by: Row here of what it began after; ``UNKNOWN`` where it began after its launch.
        launch_ns: Start of the launch call; ``NO_TIME`` where the trace does not hold it.
        after_sync: Row here of what its thread had waited for before the launch; ``UNKNOWN`` for nothing.
    """

    activity: Ints
    start_ns: Ints
    end_ns: Ints
    part: Ints
    bound_by: Ints
    launch_ns: Ints
    after_sync: Ints


def find_work(rank: RankEvents) -> Work:
    """What bound each operation of a device. What the main thread waits for holds up autograd's launches, too."""
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
    order = order[begins_run(consumer[order])]  # of several the one that ends last
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

    ``activities_step`` is the step of each activity of the trace, ``last_activity`` what ends each step's window.
    """
    place = positions(work.activity, len(activities_step))
    collectives = np.flatnonzero(work.part == UNKNOWN)
    row_of = positions(collectives, len(work))
    steps = np.arange(len(window_start_ns))
    last = take_or_unknown(place, last_activity)

    step = np.concatenate([activities_step[work.activity[collectives]], steps])
    to_ns = np.concatenate([work.start_ns[collectives], window_end_ns])
    # What no step holds has no window: its chain is empty.
    least_ns = np.where(step == UNKNOWN, to_ns, np.minimum(take_or_unknown(window_start_ns, step), to_ns))
    now_ns = to_ns.copy()
    parts = np.zeros((len(PARTS), len(step)), np.int64)
    before = np.full(len(step), UNKNOWN, np.int64)

    def take(rows: Ints, until_ns: Ints, part: Ints | int) -> None:
        until_ns = np.clip(until_ns, least_ns[rows], now_ns[rows])
        parts[part, rows] += now_ns[rows] - until_ns
        now_ns[rows] = until_ns

    def arrive(rows: Ints, at: Ints) -> Ints:
        """Go through an operation; a collective ends the chain. Returns which go on."""
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
