"""Which collectives something waited for, and for how long: from recorded dependency edges alone.

An operation that needs a collective could begin at the latest of the end of the operation before it on its stream, the
start of its launch call, and the ends of everything else it waits for. From there to the end of the last collective
that it waits for, its stream *stands still for communication*::

    stream 20   ....CCCCCCCC...      the collective
    stream 7    kkkkkk......ccc      its consumer, a copy
    stands still      ^^^^^^

A collective that ended before had *slack*::

    stream 20   ..CCC..........
    stream 7    kkkkkkkkkkkkccc
    slack            ^^^^^^^

Where a collective runs on a stream that computes, its consumer is the next operation there that is no collective, and
the operation before that is the last one that is none either. Where the host itself communicates, as on a CPU, it
stands still in ``synchronize``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.core.attribution import Events
from ddp_prof.analyze.core.edges import Dependencies, HostCalls
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.core.steps import Steps
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.table import UNKNOWN, Ints, Mask, Table, begins_run, empty, positions, select, take_or_unknown
from ddp_prof.trace import Category, Trace

HELD_BY = ("collective", "operation before", "launch", "other wait")
"""What a consumer waited for last."""

_LONG_AGO = -(2**62)


@dataclass(frozen=True)
class Consumers(Table):
    """For each collective that is needed: the consumer that it delayed most, or left the least time, as activities.

    Attributes:
        slack_ns: How much later the collective could have ended without delaying the consumer; where the consumer's
            stream stood still for it, how long it did, negative.
        held_by: What the consumer waited for last, an index into :data:`HELD_BY`.
    """

    collective: Ints
    consumer: Ints
    slack_ns: Ints
    held_by: Ints


@dataclass(frozen=True)
class Stretches(Table):
    """When a stream stood still for communication; disjoint, each part of the collective that ended last."""

    start_ns: Ints
    end_ns: Ints
    collective: Ints
    consumer: Ints


@dataclass(frozen=True)
class Blocking:
    """What the streams of one device waited for.

    Attributes:
        unknown: Rows of collectives of which a consumer is known, but not when it was launched.
        unneeded: Rows of collectives that nothing is known to need.
    """

    stretches: Stretches
    consumers: Consumers
    unknown: Ints
    unneeded: Ints


def find_blocking(trace: Trace, dependencies: Dependencies, is_mine: Mask) -> Blocking:
    """When the streams of a device that compute stood still for its collectives."""
    activities, edges, stream = trace.activities, dependencies.edges, dependencies.stream
    end_ns, is_collective = activities.end_ns, activities.category == Category.COMMUNICATION
    computes = np.zeros(int(stream.max(initial=0)) + 1, np.bool_)
    computes[stream[is_mine & (activities.category == Category.COMPUTE)]] = True
    rows = dependencies.in_order[is_mine[dependencies.in_order]]
    rows = rows[computes[stream[rows]]]

    # Of each operation the first one from it on that is no collective: it needs what the others of its stream wait for.
    is_needer = ~is_collective[rows]
    needers = rows[is_needer]
    at = np.cumsum(is_needer) - is_needer
    needer = np.full(len(activities), UNKNOWN, np.int64)
    has_one = at < len(needers)
    has_one[has_one] = stream[needers[at[has_one]]] == stream[rows[has_one]]
    needer[rows[has_one]] = at[has_one]

    own = rows[has_one & ~is_needer]
    asked = np.concatenate([needer[edges.consumer], needer[own]])
    needed = np.concatenate([edges.producer, own])
    asked, needed = asked[asked != UNKNOWN], needed[asked != UNKNOWN]
    collective = is_collective[needed]
    other_ns = np.full(len(needers), _LONG_AGO)
    np.maximum.at(other_ns, asked[~collective], end_ns[needed[~collective]])
    asked, needed = asked[collective], needed[collective]
    last_ns = np.full(len(needers), _LONG_AGO)
    np.maximum.at(last_ns, asked, end_ns[needed])

    consumer = needers[asked]
    before, call = needers[asked - 1], trace.launching_calls[consumer]
    follows = (asked > 0) & (stream[before] == stream[consumer])
    launch_ns = np.where(call == UNKNOWN, _LONG_AGO, take_or_unknown(trace.calls.start_ns, call))
    last_ns, other_ns = last_ns[asked], other_ns[asked]
    reasons_ns = np.stack([np.where(follows, end_ns[before], _LONG_AGO), launch_ns, other_ns])
    could_ns = reasons_ns.max(axis=0)
    is_last = end_ns[needed] == last_ns
    slack_ns = np.where(is_last, could_ns, np.maximum(could_ns, last_ns)) - end_ns[needed]
    # What holds a consumer is what ended last; of several that end together the collective is not it.
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


def _disjoint(stretches: Stretches) -> Stretches:
    """Each instant to the stretch that ends last; of those that end together to the one that begins first.

    Taken from the last end backwards, what earlier ones cover goes from the earliest start so far on, up to that end.
    """
    found = select(stretches, np.lexsort((stretches.collective, stretches.start_ns, -stretches.end_ns)))
    covered_from = np.minimum.accumulate(found.start_ns)
    end = found.end_ns.copy()
    end[1:] = np.minimum(found.end_ns[1:], covered_from[:-1])
    found = Stretches(found.start_ns, end, found.collective, found.consumer)
    found = select(found, found.end_ns > found.start_ns)
    return select(found, np.argsort(found.start_ns, kind="stable"))


NO_WAITS = "no stream wait was recorded, and nothing else tells what needs the collectives"
NO_NEEDS = "no recorded wait is for a collective, so what needs the collectives is not in the trace"
NO_LAUNCH = "the trace does not tell the launch of {:,} of the device's operations"
NO_HOST_WAITS = "the trace does not tell when the host waits (ddp_prof.annotate.instrument(model) marks that)"


@dataclass(frozen=True)
class DependencyCoverage:
    """How completely dependencies are known.

    Attributes:
        source: ``cuda_events``, ``event_sync_ids``, ``kineto``, ``host`` (a CPU) or ``none``.
        waits: Of the rank's streams; on a CPU, of the host.
        resolved: Of how many the trace tells what they waited for; ``violations`` how many the times contradict.
        reason: Why blocking is not known, or not of all steps; ``None`` where it is.
        host_waits: How often the host of a device waited until a collective ended. What it launches afterwards comes
            later for it, which is no time in which a stream stands still: blocking does not bound what that costs.
    """

    source: str
    waits: int
    resolved: int
    violations: int
    reason: str | None
    host_waits: int = 0


@dataclass(frozen=True)
class RankBlocking:
    """What a rank waited for; collectives are rows of its events.

    Attributes:
        total_ns: ``None`` where not all of it is known.
        by_step_ns: In each step, for its collectives; ``UNKNOWN`` where that is not known.
        is_known: For each of the rank's events whether it is known what waited for it.
    """

    coverage: DependencyCoverage
    total_ns: int | None
    by_step_ns: Ints
    stretches: Stretches
    consumers: Consumers
    is_known: Mask

    @property
    def by_event_ns(self) -> Ints:
        """How long something stood still for each of the rank's events, ``UNKNOWN`` where that is not known."""
        lengths = self.stretches.end_ns - self.stretches.start_ns
        return np.where(self.is_known, sum_by_group(lengths, self.stretches.collective, len(self.is_known)), UNKNOWN)

    @property
    def known_stretches(self) -> Stretches:
        return select(self.stretches, self.is_known[self.stretches.collective])

    def unknown_times(self, events: Events) -> Intervals:
        """When those of the rank's collectives ran of which it is not known; beside the known stretches."""
        known = self.known_stretches
        doubtful = (events.category == Category.COMMUNICATION) & ~self.is_known
        return union(events.start_ns[doubtful], events.end_ns[doubtful]) - union(known.start_ns, known.end_ns)

    @property
    def consumer_of_event(self) -> Ints:
        """Row in :attr:`consumers` of each of the rank's events, ``UNKNOWN`` where nothing is known to need it."""
        return np.where(self.is_known, positions(self.consumers.collective, len(self.is_known)), UNKNOWN)


def device_blocking(
    trace: Trace, dependencies: Dependencies, host_calls: HostCalls, is_mine: Mask, events: Events, steps: Steps
) -> RankBlocking:
    """Of a rank with a device; collectives that are none of its events, as those of warm-up steps, are left out."""
    found = find_blocking(trace, dependencies, is_mine)
    row_of = positions(events.activity, len(trace.activities))
    collectives = np.flatnonzero(events.category == Category.COMMUNICATION)

    calls = trace.synchronizations
    process, device = (column[is_mine][:1] for column in (trace.activities.process, trace.activities.device))
    waits = dependencies.is_wait & (calls.process == process)
    if np.any((trace.activities.process == process) & ~is_mine):
        own_streams = np.unique(dependencies.stream[is_mine])
        waits &= (calls.device == device) | np.isin(dependencies.call_stream, own_streams)
    is_doubtful = waits & (~dependencies.is_resolved | dependencies.is_violated)
    awaited = host_calls.work[host_calls.latest[host_calls.waited]]
    host_waits = int(np.isin(row_of[awaited], collectives).sum())
    # A job needs its gradients: where nothing is known to need any collective, what does is not in the trace.
    tells_needs = waits.any() and (len(found.consumers) or host_waits)
    unknown = found.unknown if tells_needs else np.append(found.unknown, found.unneeded)
    unknown = row_of[unknown][row_of[unknown] != UNKNOWN]

    is_known = np.ones(len(events), np.bool_)
    is_known[unknown] = False
    # What a doubtful wait holds up is launched after it: in its step, or in the next one.
    asked_ns = calls.start_ns[is_doubtful]
    within = steps.index_at(asked_ns)
    following = np.minimum(np.searchsorted(steps.start_ns, asked_ns), len(steps) - 1)
    is_known[np.isin(events.step, np.concatenate([within, following]))] = False
    is_told = is_known[collectives].all() and not is_doubtful.any()
    # What has no place in the order of calls may need, or be, a collective of its step, or need one of the step before.
    unplaced = row_of[np.flatnonzero(is_mine & (dependencies.place == UNKNOWN))]
    step = events.step[unplaced[unplaced != UNKNOWN]]
    is_known[np.isin(events.step, np.concatenate([step, step - 1])) | np.any(step == UNKNOWN)] = False
    reason = None
    if not is_told:
        reason = _reason(trace, waits, dependencies, is_doubtful, len(step), tells_needs=bool(tells_needs))
    elif not is_known[collectives].all():
        reason = NO_LAUNCH.format(len(step))
    coverage = DependencyCoverage(
        source=trace.sync_source,
        waits=int(waits.sum()),
        resolved=int((waits & dependencies.is_resolved).sum()),
        violations=int((waits & dependencies.is_violated).sum()),
        reason=reason if len(collectives) else None,
        host_waits=host_waits,
    )
    stretches = replace(found.stretches, collective=row_of[found.stretches.collective])
    consumers = replace(found.consumers, collective=row_of[found.consumers.collective])
    return _make_rank_blocking(
        coverage,
        select(stretches, stretches.collective != UNKNOWN),
        select(consumers, consumers.collective != UNKNOWN),
        is_known,
        events,
        len(steps),
    )


def _reason(
    trace: Trace, waits: Mask, dependencies: Dependencies, is_doubtful: Mask, unplaced: int, *, tells_needs: bool
) -> str:
    if trace.sync_reason:
        return trace.sync_reason
    if not waits.any():
        return NO_WAITS
    if violated := int((is_doubtful & dependencies.is_violated).sum()):
        return f"{violated:,} of {int(waits.sum()):,} stream waits contradict the times of what they waited for"
    if unresolved := int(is_doubtful.sum()):
        return f"of {unresolved:,} of {int(waits.sum()):,} stream waits the trace does not tell what they waited for"
    if unplaced:
        return NO_LAUNCH.format(unplaced)
    if not tells_needs:
        return NO_NEEDS
    return "the launch of what waited for a collective is not in the trace"


def unknown_blocking(events: Events, steps: int, reason: str) -> RankBlocking:
    is_known = events.category != Category.COMMUNICATION
    coverage = DependencyCoverage("none", 0, 0, 0, reason)
    found = _make_rank_blocking(coverage, empty(Stretches), empty(Consumers), is_known, events, steps)
    return replace(found, total_ns=None, by_step_ns=np.full(steps, UNKNOWN))


def host_blocking(waiting: Intervals, waits: int, events: Events, steps: int) -> RankBlocking:
    """Of a rank whose host communicates; each wait belongs to the collective that ends last in it."""
    rows = np.flatnonzero(events.category == Category.COMMUNICATION)
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    end_ns = events.end_ns[rows]
    still = union(events.start_ns[rows], end_ns) & waiting
    # Of the collectives that began before the end of a stretch, the one that ends last is in flight at that end.
    is_latest = end_ns == np.maximum.accumulate(end_ns) if len(rows) else np.empty(0, np.bool_)
    latest = np.maximum.accumulate(np.where(is_latest, np.arange(len(rows)), 0))
    collective = rows[latest[np.searchsorted(events.start_ns[rows], still.end_ns) - 1]]
    stretches = Stretches(still.start_ns, still.end_ns, collective, np.full(len(still), UNKNOWN, np.int64))
    coverage = DependencyCoverage("host", waits, waits, 0, None)
    return _make_rank_blocking(coverage, stretches, empty(Consumers), np.ones(len(events), np.bool_), events, steps)


def _make_rank_blocking(
    coverage: DependencyCoverage, stretches: Stretches, consumers: Consumers, is_known: Mask, events: Events, steps: int
) -> RankBlocking:
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
