"""Which collectives something waited for, and for how long: from recorded dependency edges alone.

An operation that needs a collective could otherwise begin at the latest of: the end of the operation before it on its
stream, the start of its launch call, and the ends of everything else it waits for. From there to the end of the last
collective that it waits for, its stream *stands still for communication*; a collective that ended earlier had *slack*::

    stream 20   ....CCCCCCCC...      the collective       ..CCC..........
    stream 7    kkkkkk......ccc      its consumer         kkkkkkkkkkkkccc
    stands still      ^^^^^^         slack                     ^^^^^^^

On a stream that computes, the consumer of a collective is the next operation that is not a collective. A host that
communicates, as on a CPU, stands still in ``synchronize``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.core.attribution import Events
from ddp_prof.analyze.core.edges import Dependencies, HostCalls
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.core.steps import Steps
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, Table, begins_run, empty, positions, select, take_or_unknown
from ddp_prof.trace import Category, Trace

HELD_BY = ("collective", "operation before", "launch", "other wait")
"""What a consumer waited for last."""


@dataclass(frozen=True)
class Consumers(Table):
    """For each collective that something needs: the consumer with the least slack (both rows of activities).

    Attributes:
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
    """When streams stood still for communication: disjoint, each belonging to the collective that ended last."""

    start_ns: Ints
    end_ns: Ints
    collective: Ints
    consumer: Ints


@dataclass(frozen=True)
class Blocking:
    """What the streams of one device waited for; ``unknown`` and ``unneeded`` are rows of collectives.

    Those in ``unknown`` have a consumer whose launch is not known, those in ``unneeded`` have no known consumer.
    """

    stretches: Stretches
    consumers: Consumers
    unknown: Ints
    unneeded: Ints


def find_blocking(trace: Trace, dependencies: Dependencies, is_mine: Mask) -> Blocking:
    activities, edges, stream = trace.activities, dependencies.edges, dependencies.stream
    end_ns, is_collective = activities.end_ns, activities.category == Category.COMMUNICATION
    computes = np.zeros(int(stream.max(initial=0)) + 1, np.bool_)
    computes[stream[is_mine & (activities.category == Category.COMPUTE)]] = True
    rows = dependencies.in_order[is_mine[dependencies.in_order]]
    rows = rows[computes[stream[rows]]]

    # The consumer of each operation's waits: the operation itself or, if it is a collective, the next one on its stream
    # that is not. `nth` holds indices into `consumers`.
    can_consume = ~is_collective[rows]
    consumers = rows[can_consume]
    at = np.cumsum(can_consume) - can_consume
    consumer_of = np.full(len(activities), UNKNOWN, np.int64)
    has_one = at < len(consumers)
    has_one[has_one] = stream[consumers[at[has_one]]] == stream[rows[has_one]]
    consumer_of[rows[has_one]] = at[has_one]

    own = rows[has_one & ~can_consume]
    nth = np.concatenate([consumer_of[edges.consumer], consumer_of[own]])
    needed = np.concatenate([edges.producer, own])
    nth, needed = nth[nth != UNKNOWN], needed[nth != UNKNOWN]
    collective = is_collective[needed]
    other_ns = np.full(len(consumers), NO_TIME)
    np.maximum.at(other_ns, nth[~collective], end_ns[needed[~collective]])
    nth, needed = nth[collective], needed[collective]
    last_ns = np.full(len(consumers), NO_TIME)
    np.maximum.at(last_ns, nth, end_ns[needed])

    consumer = consumers[nth]
    before, call = consumers[nth - 1], trace.launching_calls[consumer]
    follows = (nth > 0) & (stream[before] == stream[consumer])
    launch_ns = take_or_unknown(trace.calls.start_ns, call, NO_TIME)
    last_ns, other_ns = last_ns[nth], other_ns[nth]
    reasons_ns = np.stack([np.where(follows, end_ns[before], NO_TIME), launch_ns, other_ns])
    could_ns = reasons_ns.max(axis=0)
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


def _disjoint(stretches: Stretches) -> Stretches:
    """Cut stretches so that none overlap: an instant goes to the stretch that ends last, or of these begins first."""
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
NO_LAUNCH = "the trace does not tell the launch of {:,} of the device's operations"
NO_COPIES = "calls for copies were recorded, but no copy, so what copies waited for, or held up, is not known"
NO_HOST_WAITS = (
    "the trace does not tell when the host waits (ddp_prof.annotate marks that: instrument(model) of DDP or "
    "FSDP2, else synchronize() around the wait)"
)


@dataclass(frozen=True)
class DependencyCoverage:
    """How completely dependencies are known.

    Attributes:
        source: ``cuda_events``, ``event_sync_ids``, ``kineto``, ``call_order`` (inferred, at least in part), ``host``
            (a CPU) or ``none``.
        waits: How many waits the rank's streams made; on a CPU, its host. ``resolved`` have a known producer, and the
            times contradict ``violations`` of them.
        reason: Why blocking is not known for all steps; ``None`` if it is.
        host_waits: How often the host of a device waited until a collective ended. No stream stands still meanwhile, so
            the cost, of what the host launches later, is not part of blocking.
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
        total_ns: ``None`` if not all of it is known.
        by_step_ns: For the collectives of each step; ``UNKNOWN`` if not known.
        is_known: For each of the rank's events, whether its consumers are known.
    """

    coverage: DependencyCoverage
    total_ns: int | None
    by_step_ns: Ints
    stretches: Stretches
    consumers: Consumers
    is_known: Mask

    @property
    def by_event_ns(self) -> Ints:
        """How long something stood still for each of the rank's events, ``UNKNOWN`` if not known."""
        lengths = self.stretches.end_ns - self.stretches.start_ns
        return np.where(self.is_known, sum_by_group(lengths, self.stretches.collective, len(self.is_known)), UNKNOWN)

    @property
    def known_stretches(self) -> Stretches:
        return select(self.stretches, self.is_known[self.stretches.collective])

    def unknown_times(self, events: Events) -> Intervals:
        """When collectives with unknown blocking ran, without the known stretches."""
        known = self.known_stretches
        doubtful = (events.category == Category.COMMUNICATION) & ~self.is_known
        return union(events.start_ns[doubtful], events.end_ns[doubtful]) - union(known.start_ns, known.end_ns)

    @property
    def consumer_of_event(self) -> Ints:
        """Row in :attr:`consumers` for each of the rank's events, ``UNKNOWN`` if it has no known consumer."""
        return np.where(self.is_known, positions(self.consumers.collective, len(self.is_known)), UNKNOWN)


def device_blocking(
    trace: Trace, dependencies: Dependencies, host_calls: HostCalls, is_mine: Mask, events: Events, steps: Steps
) -> RankBlocking:
    """Blocking of a rank with a device, without collectives that are not among its events (warm-up steps)."""
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
    is_doubtful &= _can_matter(trace, dependencies, is_mine, row_of != UNKNOWN)
    is_doubtful &= (
        (steps.index_at(calls.start_ns) != UNKNOWN) | (dependencies.next_work != UNKNOWN) | (calls.stream < 0)
    )
    awaited = host_calls.work[host_calls.latest[host_calls.waited]]
    host_waits = int(np.isin(row_of[awaited], collectives).sum())
    # A job needs its gradients: if no collective has a known consumer, the trace lacks the consumers.
    tells_needs = waits.any() and (len(found.consumers) or host_waits)
    unknown = found.unknown if tells_needs else np.append(found.unknown, found.unneeded)
    unknown = row_of[unknown][row_of[unknown] != UNKNOWN]

    is_known = np.ones(len(events), np.bool_)
    is_known[unknown] = False
    # The consumer of a doubtful wait is launched after the wait: in the same step, or in the next one.
    wait_ns = calls.start_ns[is_doubtful]
    within = steps.index_at(wait_ns)
    following = np.searchsorted(steps.start_ns, wait_ns)
    launch_ns = take_or_unknown(trace.calls.start_ns, take_or_unknown(trace.launching_calls, dependencies.next_work))
    starts_ns = np.append(steps.start_ns, NO_TIME)[following]
    is_before = (dependencies.next_work[is_doubtful] != UNKNOWN) & (launch_ns[is_doubtful] < starts_ns)
    following[(within == UNKNOWN) & is_before] = len(steps)
    is_known[np.isin(events.step, np.concatenate([within, following]))] = False
    is_complete = is_known[collectives].all() and not is_doubtful.any()
    # An operation without a place in the order of calls may be, or need, a collective of its step or the step before.
    unplaced = row_of[np.flatnonzero(is_mine & (dependencies.place == UNKNOWN))]
    step = events.step[unplaced[unplaced != UNKNOWN]]
    is_known[np.isin(events.step, np.concatenate([step, step - 1])) | np.any(step == UNKNOWN)] = False
    reason = None
    if not is_complete:
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


def _can_matter(trace: Trace, dependencies: Dependencies, is_mine: Mask, is_counted: Mask) -> Mask:
    """Mask of the synchronizations that may make a stream stand still for a collective that counts.

    A stream that neither computes nor communicates, such as one on which NCCL prepares its memory, may be made to wait.
    This delays its next work, whose recorded time tells when that was. If it has none, streams that wait for it are
    delayed. Nothing is known of a stream whose number is unknown.
    """
    activities, next_work = trace.activities, dependencies.next_work
    counts = is_mine & np.isin(activities.category, (Category.COMPUTE, Category.COMMUNICATION))
    matters: Mask = np.isin(dependencies.call_stream, dependencies.stream[counts])
    on = take_or_unknown(dependencies.stream, next_work)
    matters |= (next_work != UNKNOWN) & (on != dependencies.call_stream)
    matters &= (next_work == UNKNOWN) | np.append(is_counted, False)[next_work]
    return matters | (trace.synchronizations.stream < 0)


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
        return f"the trace does not tell what {unresolved:,} of {int(waits.sum()):,} stream waits waited for"
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
    """Blocking of a rank whose host communicates; each wait belongs to the collective that ends last in it."""
    rows = np.flatnonzero(events.category == Category.COMMUNICATION)
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    end_ns = events.end_ns[rows]
    still = union(events.start_ns[rows], end_ns) & waiting
    # Among the collectives that began before a stretch's end, the one that ends last still runs at that end.
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
