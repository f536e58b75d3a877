"""Which collectives something waited for, and for how long: from recorded dependencies (:mod:`.edges`) alone.

The *consumer* of a collective is the operation that needs its result. Without the collective, it could begin at the
latest of: the end of the operation before it on its stream, the start of its launch call, and the ends of everything
else it waits for, and of what its collectives wait for. From then to the end of the last collective that it waits for,
its stream *stands still for communication*. A collective that ended earlier had *slack*. C is a collective, c its
consumer, k other kernels::

    stream 20         ....CCCCCCCC...          stream 20   ..CCC..........
    stream 7          kkkkkk......ccc          stream 7    kkkkkkkkkkkkccc
    stands still            ^^^^^^             slack            ^^^^^^^

On a stream that computes, the consumer of a collective is the next operation that is not a collective. A host that
communicates, as on a CPU, stands still in ``synchronize``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ddp_prof.analyze.core.attribution import Events
from ddp_prof.analyze.core.edges import Dependencies, HostCalls
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.core.steps import Steps
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.columns import by_number, count_noun
from ddp_prof.growing_column import filtered
from ddp_prof.table import (
    NEVER,
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Table,
    begins_run,
    count_before,
    distinct,
    distinct_rows,
    empty,
    is_among,
    is_in,
    parts_of,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, SyncKind, Trace

HELD_BY = ("collective", "operation before", "launch", "other wait")
"""What a consumer waited for last: a collective, the operation before it on its stream, its launch, or another wait."""

BESIDE = 1.05
"""Streams that stand still for this many times as long as communication is exposed do so beside compute of others.

Less than that are the moments before collectives begin.
"""


@dataclass(frozen=True)
class Consumers(Table):
    """One row per collective that something needs, with the one of its consumers that leaves it the least slack.

    Attributes:
        collective, consumer: Rows of activities; in :class:`RankBlocking`, ``collective`` is a row of a rank's events.
        slack_ns: How much later the collective could have ended without delaying the consumer. If the consumer's
            stream stood still for the collective, minus that time.
        held_by: What the consumer waited for last, an index into :data:`HELD_BY`.
    """

    collective: Ints
    consumer: Ints
    slack_ns: Ints
    held_by: Ints


@dataclass(frozen=True)
class Stretches(Table):
    """When streams stood still for communication: disjoint stretches of time, one per row.

    ``collective`` is the collective that ended last among those waited for, ``consumer`` the operation that waited for
    it. Both are rows of activities; in :class:`RankBlocking`, ``collective`` is a row of the rank's events.
    """

    start_ns: Ints
    end_ns: Ints
    collective: Ints
    consumer: Ints


OfCollectives = TypeVar("OfCollectives", Consumers, Stretches)


@dataclass(frozen=True)
class Blocking:
    """What the streams of one device waited for; all rows are rows of activities.

    Attributes:
        unknown: The collectives that have a consumer whose launch is not known.
        unneeded: The collectives that have no known consumer.
    """

    stretches: Stretches
    consumers: Consumers
    unknown: Ints
    unneeded: Ints


def find_blocking(trace: Trace, dependencies: Dependencies, is_mine: Mask) -> Blocking:
    """Return what the streams of one device that compute waited for; ``is_mine`` is a mask of its activities."""
    activities, edges, stream = trace.activities, dependencies.edges, dependencies.stream
    end_ns, is_collective = activities.end_ns, activities.category == Category.COMMUNICATION
    computes = np.zeros(int(stream.max(initial=0)) + 1, np.bool_)
    computes[stream[is_mine & (activities.category == Category.COMPUTE)]] = True
    rows = filtered(dependencies.in_order, lambda part: is_mine[part] & computes[stream[part]])

    # What an operation waits for is counted for its consumer: the operation itself or, if it is a collective, the next
    # operation on its stream that is none. `consumer_of` and `nth` hold indices into `consumers`.
    consumers = filtered(rows, lambda part: ~is_collective[part])
    consumer_of = np.full(len(activities), UNKNOWN, np.int64)
    at = 0  # the number of consumers before a part
    for part in parts_of(len(rows)):
        row = rows[part]
        can_consume = ~is_collective[row]
        nth = at + np.cumsum(can_consume) - can_consume
        at += int(np.count_nonzero(can_consume))
        has_one = nth < len(consumers)
        has_one[has_one] = stream[consumers[nth[has_one]]] == stream[row[has_one]]
        consumer_of[row[has_one]] = nth[has_one]

    # Pairs of a consumer (`nth`) and an operation that it needs (`needed`): from edges, and from collectives on its own
    # stream. `last_ns` is the end of the last collective of each consumer, `other_ns` that of its other operations.
    own = filtered(rows, lambda part: is_collective[part])
    nth = np.concatenate([consumer_of[edges.consumer], consumer_of[own]])
    needed = np.concatenate([edges.producer, own])
    del rows, own, consumer_of  # they may be as long as the trace: their memory serves what follows
    nth, needed = nth[nth != UNKNOWN], needed[nth != UNKNOWN]
    collective = is_collective[needed]
    # Only consumers of collectives matter, which are few: `which` is the number of each among them.
    few = np.unique(nth[collective])
    matters = collective | is_among(nth, few)
    nth, needed, collective = nth[matters], needed[matters], collective[matters]
    which = np.searchsorted(few, nth)
    other_ns, last_ns = np.full((2, len(few)), NO_TIME)
    np.maximum.at(other_ns, which[~collective], end_ns[needed[~collective]])
    nth, needed, which = nth[collective], needed[collective], which[collective]
    np.maximum.at(other_ns, which, _inputs_ns(trace, dependencies, is_mine & is_collective)[needed])
    np.maximum.at(last_ns, which, end_ns[needed])

    # When each consumer could have begun but for its collectives. The order of `reasons_ns` is that of HELD_BY[1:].
    consumer = consumers[nth]
    before, call = consumers[nth - 1], trace.launching_calls[consumer]
    follows = (nth > 0) & (stream[before] == stream[consumer])
    launch_ns = take_or_unknown(trace.calls.start_ns, call, NO_TIME)
    last_ns, other_ns = last_ns[which], other_ns[which]
    reasons_ns = np.stack([np.where(follows, end_ns[before], NO_TIME), launch_ns, other_ns])
    could_ns = reasons_ns.max(axis=0)
    # If the consumer stood still for a collective, `could_ns` is before the collective's end: the slack is negative.
    is_last = end_ns[needed] == last_ns
    slack_ns = np.where(is_last, could_ns, np.maximum(could_ns, last_ns)) - end_ns[needed]
    # What ended last held the consumer. If a collective ends together with another reason, the other reason counts.
    held_by = np.where(last_ns > could_ns, 0, 1 + reasons_ns.argmax(axis=0))
    is_known = call != UNKNOWN
    found = Consumers(needed, consumer, slack_ns, held_by)
    found = select(found, np.lexsort((found.consumer, slack_ns, needed)))

    blocks = is_last & (last_ns > could_ns) & is_known
    mine = np.flatnonzero(is_mine & is_collective)
    return Blocking(
        stretches=_disjoint(Stretches(could_ns[blocks], last_ns[blocks], needed[blocks], consumer[blocks])),
        consumers=select(found, begins_run(found.collective)),
        unknown=np.unique(needed[~is_known]),
        unneeded=np.setdiff1d(mine, needed),
    )


def _inputs_ns(trace: Trace, dependencies: Dependencies, are_collectives: Mask) -> Ints:
    """Return for each activity that is a collective the last end of an operation that is none and that it waits for.

    That is one before it on its stream, or one for which it, or a collective before it there, waits by an event. It is
    no later than the collective's start, and ``NO_TIME`` without such an operation, as for all other activities.
    """
    activities, edges, stream = trace.activities, dependencies.edges, dependencies.stream
    found = np.full(len(activities), NO_TIME)
    by_event = are_collectives[edges.consumer] & (activities.category[edges.producer] != Category.COMMUNICATION)
    np.maximum.at(found, edges.consumer[by_event], activities.end_ns[edges.producer[by_event]])
    for one in distinct(stream[are_collectives]):
        rows = filtered(dependencies.in_order, (stream == one).__getitem__)
        is_other = activities.category[rows] != Category.COMMUNICATION
        last_ns = np.where(is_other, activities.end_ns[rows], found[rows])
        np.maximum.accumulate(last_ns, out=last_ns)
        found[rows] = np.where(is_other, NO_TIME, np.minimum(last_ns, activities.start_ns[rows]))
    return found


def _disjoint(stretches: Stretches) -> Stretches:
    """Return the stretches, cut so that none overlap, ordered by start.

    An instant goes to the stretch that ends last; if several end together, to the one that begins first.
    """
    # In descending order of ends, the stretches before a row cover all time from their earliest start to its end.
    found = select(stretches, np.lexsort((stretches.collective, stretches.start_ns, -stretches.end_ns)))
    covered_from = np.minimum.accumulate(found.start_ns)
    end = found.end_ns.copy()
    end[1:] = np.minimum(found.end_ns[1:], covered_from[:-1])
    found = Stretches(found.start_ns, end, found.collective, found.consumer)
    found = select(found, found.end_ns > found.start_ns)
    return select(found, np.argsort(found.start_ns, kind="stable"))


NO_WAITS = "no stream wait was recorded, and nothing else tells what needs the collectives"
NO_NEEDS = "no recorded wait is for a collective, so what needs the collectives is not in the trace"
NEEDS_LOST = "waits seem to be lost: for some collectives none was recorded, although most steps have one there"
NO_LAUNCH = "the trace does not tell the launch of {:,} of the device's operations"
NO_CONSUMER = "the launch of what waited for a collective is not in the trace"
NO_NODES = "what needs a collective within a CUDA graph is not recorded"
ON_OTHER_DEVICE = "what needs a collective runs on another device of the process"
NO_STREAMS = "the trace does not tell on which streams work ran"
NO_SETS = "calls that set memory were recorded, but no memory set, so how long these took is not known"
NO_LAUNCHES = "which calls launched some communication is not known, so what it waited for, or held up, is not known"
NO_COPIES = "calls for copies were recorded without the copies, so what these waited for, or held up, is not known"
NO_HOST_WAITS = (
    "the trace does not tell when the host waits (ddp_prof.annotate marks that: instrument(model) of DDP or "
    "FSDP2, else synchronize() around the wait)"
)


@dataclass(frozen=True)
class DependencyCoverage:
    """How completely the dependencies of a rank are known.

    Attributes:
        source: What tells the dependencies: ``cuda_events``, ``event_sync_ids``, ``kineto``, ``call_order`` (inferred,
            at least in part), ``host`` (a CPU) or ``none``.
        waits: How many times the rank's streams (on a CPU, its host) were made to wait.
        resolved: How many of these waits have a known record, so that it is known what was waited for.
        violations: How many of these waits the recorded times contradict.
        reason: Why blocking is not known for all steps; ``None`` if it is.
        host_waits: How often the host of a device waited until a collective ended, before it launched more. No stream
            stands still meanwhile: the host launches the next operations later, and this cost is not part of blocking.
        host_waits_usually: Whether it waited so in at least half of the steps that communicate.
    """

    source: str
    waits: int
    resolved: int
    violations: int
    reason: str | None
    host_waits: int = 0
    host_waits_usually: bool = False


@dataclass(frozen=True)
class RankBlocking:
    """How long a rank stood still for communication; collectives are rows of its events.

    Attributes:
        total_ns: The sum of all stretches; ``None`` if not all of them are known.
        by_step_ns: How long the rank stood still for the collectives of each step; ``UNKNOWN`` if not known.
        is_known: For each of the rank's events, whether it is known what waited for it. It is ``True`` for events that
            do not communicate, unless nothing is known in their step.
    """

    coverage: DependencyCoverage
    total_ns: int | None
    by_step_ns: Ints
    stretches: Stretches
    consumers: Consumers
    is_known: Mask

    @property
    def by_event_ns(self) -> Ints:
        """For each of the rank's events, how long a stream or the host stood still for it; ``UNKNOWN`` if not known."""
        lengths = self.stretches.end_ns - self.stretches.start_ns
        return np.where(self.is_known, sum_by_group(lengths, self.stretches.collective, len(self.is_known)), UNKNOWN)

    @property
    def known_stretches(self) -> Stretches:
        """The stretches of the collectives of which all consumers are known."""
        return select(self.stretches, self.is_known[self.stretches.collective])

    def unknown_times(self, events: Events) -> Intervals:
        """Return when collectives ran of which blocking is not known, without the known stretches of others."""
        known = self.known_stretches
        doubtful = (events.category == Category.COMMUNICATION) & ~self.is_known
        return union(events.start_ns[doubtful], events.end_ns[doubtful]) - union(known.start_ns, known.end_ns)

    @property
    def consumer_of_event(self) -> Ints:
        """For each of the rank's events, its row in :attr:`consumers`; ``UNKNOWN`` if it has no known consumer."""
        return np.where(self.is_known, positions(self.consumers.collective, len(self.is_known)), UNKNOWN)


def device_blocking(
    trace: Trace, dependencies: Dependencies, host_calls: HostCalls, is_mine: Mask, events: Events, steps: Steps
) -> RankBlocking:
    """Return the blocking of a rank with a device.

    - ``host_calls``: The calls in which its host could wait.
    - ``is_mine``: Mask of the trace's activities that are the rank's, including those of warm-up steps.
    - ``events``: The rank's events; collectives that are not among them, such as those of warm-up steps, are left out.
    - ``steps``: The steps of ``events``.
    """
    found = find_blocking(trace, dependencies, is_mine)
    row_of = positions(events.activity, len(trace.activities))
    collectives = np.flatnonzero(events.category == Category.COMMUNICATION)

    waits = _waits_of(trace, dependencies, is_mine)
    # Waits of which it is not known what they waited for, if they may concern the measured steps.
    is_doubtful = waits & (~dependencies.is_resolved | dependencies.is_violated)
    is_doubtful &= _can_matter(trace, dependencies, is_mine, row_of != UNKNOWN)
    awaited, delaying = _awaited_by_host(trace, host_calls, is_mine, row_of, collectives)
    in_steps = (events.step[rows] for rows in (delaying, collectives))
    waiting_steps, all_steps = (len(distinct(step[step != UNKNOWN])) for step in in_steps)
    # A job needs its gradients: if no collective has a known consumer, the trace lacks the consumers.
    has_consumers = len(np.setdiff1d(found.consumers.collective, found.unknown)) > 0
    tells_needs = waits.any() and (has_consumers or len(awaited))
    in_graphs = _of_graphs_that_compute(trace, found.unneeded)
    elsewhere = _needed_elsewhere(dependencies, is_mine, found.unneeded)
    unknown = np.concatenate([found.unknown, elsewhere, in_graphs if tells_needs else found.unneeded])
    unknown = row_of[unknown][row_of[unknown] != UNKNOWN]
    needed = np.concatenate([row_of[found.consumers.collective], awaited])
    lacking = _without_waits(trace, dependencies, events, collectives, steps, needed[needed != UNKNOWN])

    is_known = np.ones(len(events), np.bool_)
    is_known[unknown] = False
    is_known[is_in(events.step, events.step[lacking])] = False  # what else waited there is not known, either
    is_known[is_in(events.step, _doubtful_steps(trace, dependencies, is_doubtful, steps))] = False
    is_complete = is_known[collectives].all() and not is_doubtful.any()
    # An operation whose position in the order of calls is unknown may be, or need, a collective of its step or of the
    # step before.
    unplaced = row_of[np.flatnonzero(is_mine & (dependencies.place == UNKNOWN))]
    unplaced_in = events.step[unplaced[unplaced != UNKNOWN]]
    may_need = is_in(events.step, np.concatenate([unplaced_in, unplaced_in - 1])) | np.any(unplaced_in == UNKNOWN)
    is_known[may_need] = False
    # What needs a collective that was launched before the recording may have been, too.
    is_early = take_or_unknown(trace.launching_calls, events.activity[collectives]) == UNKNOWN
    is_known[np.setdiff1d(collectives[is_early], needed)] = False
    reason = None
    if not is_complete:
        of_waits = _why_waits_unknown(trace, waits, dependencies, is_doubtful)
        reasons = (
            # A trace with all synchronizations would not tell these two, either.
            (len(in_graphs) == len(collectives), NO_NODES),
            (len(elsewhere) > 0 and not is_doubtful.any() and not len(found.unknown), ON_OTHER_DEVICE),
            (of_waits is not None, of_waits),
            (len(unplaced_in) > 0, NO_LAUNCH.format(len(unplaced_in))),
            (tells_needs and len(lacking) > 0, NEEDS_LOST),
            (len(found.unknown) > 0, NO_CONSUMER),
            (not tells_needs, NO_NEEDS),
            (True, NO_NODES),
        )
        reason = next(why for holds, why in reasons if holds)
    elif not is_known[collectives].all():
        reason = NO_LAUNCH.format(len(unplaced_in))
    coverage = DependencyCoverage(
        source=trace.sync_source,
        waits=int(waits.sum()),
        resolved=int((waits & dependencies.is_resolved).sum()),
        violations=int((waits & dependencies.is_violated).sum()),
        reason=reason if len(collectives) else None,
        host_waits=len(delaying),
        host_waits_usually=len(delaying) > 0 and 2 * waiting_steps >= all_steps,
    )
    stretches, consumers = _of_events(found.stretches, row_of), _of_events(found.consumers, row_of)
    return _make_rank_blocking(coverage, stretches, consumers, is_known, events, len(steps))


def _of_events(found: OfCollectives, row_of: Ints) -> OfCollectives:
    """Return what is of collectives among a rank's events, as rows of these; ``row_of`` has one per activity."""
    found = replace(found, collective=row_of[found.collective])
    return select(found, found.collective != UNKNOWN)


def _awaited_by_host(
    trace: Trace, host_calls: HostCalls, is_mine: Mask, row_of: Ints, collectives: Ints
) -> tuple[Ints, Ints]:
    """Return the collectives that the host waited for, and those of them of which the wait delayed a launch.

    What nothing follows delays no launch, such as the synchronization with which a recording ends.

    - ``row_of``: The row of events of each activity; ``collectives`` and the results are such rows.
    """
    awaited = row_of[host_calls.work[host_calls.latest[host_calls.waited]]]
    waits_for = np.isin(awaited, collectives)
    last_launch_ns = take_or_unknown(trace.calls.start_ns, trace.launching_calls[is_mine], NO_TIME).max(initial=NO_TIME)
    return awaited[waits_for], awaited[waits_for & (host_calls.end_ns[host_calls.waited] <= last_launch_ns)]


def _without_waits(
    trace: Trace, dependencies: Dependencies, events: Events, collectives: Ints, steps: Steps, needed: Ints
) -> Ints:
    """Return the collectives of which waits seem to be lost: all of their step, or some that most other steps have.

    ``collectives``, ``needed`` and the result are rows of ``events``; ``needed`` are those that something needs.
    """
    places, calls = _Places(events, dependencies, collectives), trace.synchronizations
    later = places.awaited_later(trace, dependencies, steps)
    of_steps = np.setdiff1d(_without_needs(events, collectives, needed), later)
    # How many calls of each step record events, and how many let streams wait for them.
    is_mine = is_in(calls.process, trace.activities.process[places.activity[:1]])
    event_calls = [
        steps.count_at(calls.start_ns[is_mine & (calls.kind == kind)])
        for kind in (SyncKind.RECORD, SyncKind.STREAM_WAIT)
    ]
    return np.union1d(of_steps, _without_usual_waits(places, dependencies, later, event_calls))


def _without_needs(events: Events, collectives: Ints, needed: Ints) -> Ints:
    """Return the collectives of steps in which nothing is known to need one, although in most steps something is.

    The waits of such a step were lost. All arguments but ``events`` and the result are rows of these.
    """
    step = events.step[collectives]
    has_needs = np.isin(step, events.step[needed])
    all_steps, with_needs = (len(distinct(step[rows])) for rows in (step != UNKNOWN, (step != UNKNOWN) & has_needs))
    found: Ints = collectives[~has_needs & (step != UNKNOWN)]
    return found if 2 * with_needs > all_steps else found[:0]


class _Places:
    """The place of each collective among those of its step, in the order of their calls.

    Steps are compared that have as many collectives.

    Attributes:
        rows, activity, step: Of each collective that is an activity in a step: its row of events, of activities, and
            its step.
        which: The number of its place; steps with another number of collectives have other places.
        count: The number of places.
    """

    def __init__(self, events: Events, dependencies: Dependencies, collectives: Ints) -> None:
        """``collectives`` are rows of ``events``."""
        rows: Ints = collectives[(events.step[collectives] != UNKNOWN) & (events.activity[collectives] != UNKNOWN)]
        self.rows = rows[np.lexsort((dependencies.place[events.activity[rows]], events.step[rows]))]
        self.step, self.activity = events.step[self.rows], events.activity[self.rows]
        of_step = np.bincount(self.step)[self.step] if len(rows) else self.step
        first, self.which = distinct_rows(of_step, count_before(self.step))
        self.count = len(first)

    def awaited_later(self, trace: Trace, dependencies: Dependencies, steps: Steps) -> Ints:
        """Return the collectives of the last step whose consumers may come behind the recording.

        Those at their place in most other steps are waited for after that step only, or nothing was launched after the
        wait, as it is in most other steps.
        """
        awaited_ns = np.full(len(trace.activities), NEVER)
        edges = dependencies.edges
        np.minimum.at(awaited_ns, edges.producer, trace.synchronizations.start_ns[edges.wait])
        is_last = self.step == len(steps) - 1
        is_later = ~is_last & (awaited_ns[self.activity] >= steps.end_ns[self.step])
        is_later &= awaited_ns[self.activity] != NEVER
        has_unused = dependencies.next_work[dependencies.awaited_by] == UNKNOWN
        is_unused = is_among(self.activity, dependencies.awaited[has_unused])
        of_later, of_unused, of_others = (
            np.bincount(self.which, rows, self.count) for rows in (is_later, is_unused & ~is_last, ~is_last)
        )
        may_come = ((of_later > 0) & (2 * of_later >= of_others))[self.which]
        may_come |= is_unused & (2 * of_unused < of_others)[self.which]
        found: Ints = self.rows[is_last & may_come]
        return found


def _without_usual_waits(places: _Places, dependencies: Dependencies, later: Ints, event_calls: list[Ints]) -> Ints:
    """Return the collectives of which a wait seems to be lost, as those at the same place of most other steps have it.

    A stream waits for a collective, or the collective for other work::

        awaited in step 0   W W W W
        in step 1           W . W W     one is lost
        in step 2           W W W .     one is lost

    If more than half of the places differ between steps, most may be lost: then one step that has it tells it. No wait
    is lost where what needs a collective may come behind the recording (``later``), nor for what was launched before
    the recording; nor in a step that has a wait for none of its collectives, but no fewer ``event_calls`` of each kind
    than another one that has some.
    """
    activity, which, edges = places.activity, places.which, dependencies.edges
    waits = dependencies.next_work[dependencies.is_wait & dependencies.is_resolved]
    is_lost = np.zeros(len(activity), np.bool_)
    for has_wait, is_there in (
        (is_among(activity, edges.producer), is_in(places.rows, later)),
        (is_among(activity, edges.consumer), is_among(activity, waits)),
    ):
        share = np.bincount(which, has_wait, places.count) / np.bincount(which, minlength=places.count)
        differs = (share > 0) & (share < 1)
        lacks_it = ~(has_wait | is_there) & (share > (0 if 2 * differs.sum() > places.count else 0.5))[which]
        has_some = np.bincount(places.step, has_wait, len(event_calls[0])) > 0
        has_all = [counts >= counts[has_some].min(initial=np.iinfo(np.int64).max) for counts in event_calls]
        is_lost |= lacks_it & (has_some | ~np.all(has_all, axis=0))[places.step]
    found: Ints = places.rows[is_lost]
    return found


def _doubtful_steps(trace: Trace, dependencies: Dependencies, is_doubtful: Mask, steps: Steps) -> Ints:
    """Return the indices of the steps in which the consumer of a doubtful wait may be: it is launched after the wait.

    That is in the step of the wait, or in the next one. A wait between two steps, whose next work is launched before
    the step that follows, makes no step doubtful: its index is ``len(steps)``, which no event has.
    """
    wait_ns = trace.synchronizations.start_ns[is_doubtful]
    within = steps.index_at(wait_ns)
    following = np.searchsorted(steps.start_ns, wait_ns)
    launch_ns = take_or_unknown(trace.calls.start_ns, take_or_unknown(trace.launching_calls, dependencies.next_work))
    starts_ns = np.append(steps.start_ns, NO_TIME)[following]
    is_before = (dependencies.next_work[is_doubtful] != UNKNOWN) & (launch_ns[is_doubtful] < starts_ns)
    following[(within == UNKNOWN) & is_before] = len(steps)
    return np.concatenate([within, following])


def _waits_of(trace: Trace, dependencies: Dependencies, is_mine: Mask) -> Mask:
    """Return a mask of the synchronizations: the waits of the rank's streams.

    In a process with several devices, a call may have another device number than the activities, so the streams on
    which the rank's activities run count as well.
    """
    calls = trace.synchronizations
    process, device = (column[is_mine][:1] for column in (trace.activities.process, trace.activities.device))
    waits: Mask = dependencies.is_wait & (calls.process == process)
    if np.any((trace.activities.process == process) & ~is_mine):
        own_streams = distinct(dependencies.stream[is_mine])
        waits &= (calls.device == device) | is_in(dependencies.call_stream, own_streams)
    return waits


def _of_graphs_that_compute(trace: Trace, collectives: Ints) -> Ints:
    """Return those of the collectives that a CUDA graph ran beside compute: no wait of a stream tells what needs them.

    ``collectives`` are rows of activities.
    """
    if not len(collectives):
        return collectives
    computes = np.zeros(len(trace.calls) + 1, np.bool_)  # the last element is for UNKNOWN
    computes[trace.launching_calls[trace.activities.category == Category.COMPUTE]] = True
    computes[UNKNOWN] = False
    return collectives[computes[trace.launching_calls[collectives]]]


def _needed_elsewhere(dependencies: Dependencies, is_mine: Mask, collectives: Ints) -> Ints:
    """Return those of the collectives (rows of activities) for which a stream of another device waits.

    In a pipeline of devices of one process, copies between devices are needed by the device to which they go.
    """
    edges = dependencies.edges
    found: Ints = collectives[is_in(collectives, edges.producer[~is_mine[edges.consumer]])]
    return found


def _can_matter(trace: Trace, dependencies: Dependencies, is_mine: Mask, is_counted: Mask) -> Mask:
    """Return a mask of the synchronizations: those that may make a stream stand still for a collective that counts.

    That depends on the work that they delay: it must be among the events that count, and on a stream that computes or
    communicates. Else, as on a stream on which NCCL prepares its memory, the recorded times contain the delay. Of a
    synchronization on a stream whose number is unknown nothing is known, so it may matter.

    - ``is_mine``: Mask of the activities of the rank.
    - ``is_counted``: Mask of the activities that are among the rank's measured events.
    """
    next_work = dependencies.next_work
    works = is_mine & is_in(trace.activities.category, (Category.COMPUTE, Category.COMMUNICATION))
    counts = is_counted & is_in(dependencies.stream, distinct(dependencies.stream[works]))
    return np.append(counts, False)[next_work] | (trace.synchronizations.stream < 0)


def _why_waits_unknown(trace: Trace, waits: Mask, dependencies: Dependencies, is_doubtful: Mask) -> str | None:
    """Return why it is not known what the rank's streams waited for; ``None`` if it is.

    ``waits`` and ``is_doubtful`` are masks of the synchronizations: the waits of these streams, and the doubtful ones.
    """
    if trace.sync_reason:
        return trace.sync_reason
    if not waits.any():
        return NO_WAITS
    every = count_noun(int(waits.sum()), "stream wait")
    if violated := int((is_doubtful & dependencies.is_violated).sum()):
        contradict = by_number(violated, "contradicts the times of what it", "contradict the times of what they")
        return f"{violated:,} of {every} {contradict} waited for"
    if unresolved := int(is_doubtful.sum()):
        return f"the trace does not tell what {unresolved:,} of {every} waited for"
    return None


def unknown_blocking(events: Events, steps: int, reason: str) -> RankBlocking:
    """Return a result in which nothing is known, for this reason; ``steps`` is the number of steps."""
    is_known = events.category != Category.COMMUNICATION
    coverage = DependencyCoverage("none", 0, 0, 0, reason)
    found = _make_rank_blocking(coverage, empty(Stretches), empty(Consumers), is_known, events, steps)
    return replace(found, total_ns=None, by_step_ns=np.full(steps, UNKNOWN))


def host_blocking(waiting: Intervals, waits: int, events: Events, steps: int) -> RankBlocking:
    """Return the blocking of a rank whose host communicates.

    The host stands still while it waits and a collective runs. Each such stretch belongs to the collective that ends
    last among those that began before the stretch's end.

    Args:
        waiting: When the host waits.
        waits: How many times it waits.
        events: The rank's events.
        steps: The number of its steps.
    """
    rows = np.flatnonzero(events.category == Category.COMMUNICATION)
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    end_ns = events.end_ns[rows]
    still = union(events.start_ns[rows], end_ns) & waiting
    # In the order of starts, `latest` is the collective with the last end so far: a row is it if its end equals the
    # running maximum, and else the last such row before it stays.
    is_latest = end_ns == np.maximum.accumulate(end_ns) if len(rows) else np.empty(0, np.bool_)
    latest = np.maximum.accumulate(np.where(is_latest, np.arange(len(rows)), 0))
    collective = rows[latest[np.searchsorted(events.start_ns[rows], still.end_ns) - 1]]
    stretches = Stretches(still.start_ns, still.end_ns, collective, np.full(len(still), UNKNOWN, np.int64))
    coverage = DependencyCoverage("host", waits, waits, 0, None)
    return _make_rank_blocking(coverage, stretches, empty(Consumers), np.ones(len(events), np.bool_), events, steps)


def _make_rank_blocking(
    coverage: DependencyCoverage, stretches: Stretches, consumers: Consumers, is_known: Mask, events: Events, steps: int
) -> RankBlocking:
    """Return the result with its sums: a step's sum is ``UNKNOWN`` if any of its events is not known."""
    length_ns = stretches.end_ns - stretches.start_ns
    step = events.step[stretches.collective]
    by_step_ns = sum_by_group(length_ns[step != UNKNOWN], step[step != UNKNOWN], steps)
    doubtful = events.step[~is_known]
    by_step_ns[doubtful[doubtful != UNKNOWN]] = UNKNOWN
    return RankBlocking(
        coverage=coverage,
        total_ns=int(length_ns.sum()) if is_known.all() else None,
        by_step_ns=by_step_ns,
        stretches=stretches,
        consumers=consumers,
        is_known=is_known,
    )
