"""What a step would gain if a collective took no time: the recorded edges replayed without its duration.

An operation begins after the last of: the end of the operation before it on its stream, the ends of what its stream
waits for, and its launch; the delay between that and its start is kept from the recording. A launch comes after the
last call in which its thread, or the main one, could wait for the device, and such a call ends after what it waits for.
All other lengths between these times are kept from the recording, too. So each time is the maximum of some earlier
times, each plus a length::

    C      a collective, with two times: ``arrive`` when it may begin, and ``end``
    k, c   operations, with their ``end``; operations that nothing refers to are joined with the next one
    S      a call that waits, with its ``end``

    stream 20   ......CCCCCC         arrive(C) + duration       = end(C)
    stream 7    kkkk........ccc      max(end(k), end(C)) + 3    = end(c)

The end of a step without a collective's duration is the longest of all chains of links, where the duration counts as 0.
Times are ordered so that each comes after those on which it depends. Then a chain that does not go through a time has a
link from before that time to after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ddp_prof.analyze.core.edges import HostCalls
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.kernels.kernel_times import KINDS, OTHER, kind_of_compute
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Table,
    begins_run,
    concatenate,
    distinct,
    distinct_rows,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, Trace

_NEVER = -(2**60)


@dataclass(frozen=True)
class Work(Table):
    """The operations of one device, stream by stream in the order of their launch.

    Attributes:
        bound_by: Row in this table of the operation that delayed it; ``UNKNOWN`` if its launch came last.
        launch_ns: Start of the launch call; ``NO_TIME`` if it is not in the trace.
        after_sync: Row in this table of what its thread last waited for before the launch; ``UNKNOWN`` if nothing.
    """

    activity: Ints
    category: Ints
    start_ns: Ints
    end_ns: Ints
    bound_by: Ints
    launch_ns: Ints
    after_sync: Ints

    @property
    def bound_ns(self) -> Ints:
        """When each operation could begin; ``NO_TIME`` if nothing is known that delayed it."""
        return np.where(self.bound_by == UNKNOWN, self.launch_ns, self.end_ns[self.bound_by])

    @property
    def is_collective(self) -> Mask:
        rows: Mask = self.category == Category.COMMUNICATION
        return rows


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

    thread = take_or_unknown(trace.calls.lane, launching)
    any_place = np.full(len(rows), np.iinfo(np.int64).max)
    after = calls.last_before(thread, rank.main_thread, launch, any_place, calls.waited)
    return Work(rows, activities.category[rows], start, end, bound_by, launch, take_or_unknown(calls.latest, after))


@dataclass(frozen=True)
class Times(Table):
    """Times of one device and its host, ordered so that each comes after those on which it depends.

    Attributes:
        collective: Row in :class:`Work` of the collective that arrives at this time, ``UNKNOWN`` for other times.
    """

    time_ns: Ints
    collective: Ints


@dataclass(frozen=True)
class Links(Table):
    """The time ``head`` is not before the time ``tail`` plus a length; both are rows of :class:`Times`.

    Attributes:
        tail: ``UNKNOWN`` if ``head`` depends on no other time; the length then is a time of the clock.
        is_duration: 1 if the length is the duration of a collective, else 0.
        compute_ns: How much of the length is compute, which communication may slow, and ``beside_ns`` the part of that
            which communication ran beside; of kinds of kernels that it slows more than others, more: see :func:`weigh`.
        first_row, end_row: The rows of :class:`Work` of which this is the compute; ``end_row`` is the first one behind.
        rank: Index of the rank of ``head`` among those that were joined.
    """

    tail: Ints
    head: Ints
    length_ns: Ints
    is_duration: Ints
    compute_ns: Ints
    beside_ns: Ints
    first_row: Ints
    end_row: Ints
    rank: Ints


@dataclass(frozen=True)
class Computed(Table):
    """Of each row of :class:`Work`: its compute, the part beside communication, and its kind (see ``KINDS``)."""

    compute_ns: Ints
    beside_ns: Ints
    kind: Ints


@dataclass(frozen=True)
class Ends(Table):
    """What a step ends with: it ends when the last of these has come.

    Attributes:
        row: A row of :class:`Work`, whose end it is; in a replay a row of :class:`Times`.
        before_ns: How long before that the step ends. It is the duration of an operation that begins as the step ends.
    """

    step: Ints
    row: Ints
    before_ns: Ints


@dataclass(frozen=True)
class Replay:
    times: Times
    links: Links
    ends: Ends
    computed: Computed

    @cached_property
    def heads(self) -> Ints:
        return np.argsort(self.links.head, kind="stable")


def _no_rows() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Without:
    """What is left out of a replay: operations with their launches (rows of :class:`Work`), waits of the host, delays.

    Attributes:
        rows: What waits for one of these operations still does; they themselves take no time.
        syncs: Indices of the calls that no longer wait.
        leaves_gaps: Whether the time stays that passed before they began; what follows may need it, too.
        held_ns: How much of the time from when each row of :class:`Work` could begin to its start; ``None`` for none.
    """

    rows: Ints = field(default_factory=_no_rows)
    syncs: Ints = field(default_factory=_no_rows)
    leaves_gaps: bool = False
    held_ns: Ints | None = None


NOTHING = Without()


def find_replay(rank: RankEvents, work: Work, ends: Ends, without: Without = NOTHING) -> Replay | None:
    """The times of a device and the links between them; ``None`` if a link contradicts the order of calls."""
    trace, dependencies, syncs, main_thread = rank.trace, rank.dependencies(), rank.host_calls, rank.main_thread
    rows = np.arange(len(work))
    stream, place = dependencies.stream[work.activity], dependencies.place[work.activity]
    row_of = positions(work.activity, len(trace.activities))
    producer, consumer = row_of[dependencies.edges.producer], row_of[dependencies.edges.consumer]
    inside = (producer != UNKNOWN) & (consumer != UNKNOWN)
    producer, consumer = producer[inside], consumer[inside]

    bound_ns, is_collective = work.bound_ns, work.is_collective
    launch_ns = np.where(bound_ns == NO_TIME, work.start_ns, work.launch_ns)  # if nothing is known, its own start
    lag_ns = work.start_ns - np.where(bound_ns == NO_TIME, work.start_ns, bound_ns)
    if without.held_ns is not None:
        lag_ns -= without.held_ns
    own_ns = lag_ns + np.where(is_collective, 0, work.end_ns - work.start_ns)
    own_ns[without.rows] = lag_ns[without.rows] if without.leaves_gaps else 0
    upto_ns = np.cumsum(own_ns)  # only differences within a stream are used
    own_compute_ns = np.where(work.category == Category.COMPUTE, work.end_ns - work.start_ns, 0)
    own_beside_ns = rank.union_of(Category.COMMUNICATION).covered_ns(work.start_ns, work.start_ns + own_compute_ns)
    computed = Computed(own_compute_ns, own_beside_ns, _kinds(trace, work.activity))
    spared_ns, spared_syncs_ns = _spared_launches(rank, work, without)
    launch_ns = np.where(launch_ns == NO_TIME, NO_TIME, launch_ns - spared_ns)

    is_kept = is_collective.copy()
    is_kept[np.concatenate([producer, consumer, syncs.awaited, ends.row])] = True
    times, end_of, begin_of, sync_of = _order_times(work, place, is_kept, syncs)
    kept, collectives = np.flatnonzero(is_kept), np.flatnonzero(is_collective)
    at_arrival = is_collective[ends.row] & (ends.before_ns > 0)
    ends = replace(
        ends,
        row=np.where(at_arrival, begin_of[ends.row], end_of[ends.row]),
        before_ns=np.where(at_arrival, 0, ends.before_ns),
    )

    later = kept[1:][stream[kept[1:]] == stream[kept[:-1]]]
    earlier = kept[np.searchsorted(kept, later) - 1]
    at = np.searchsorted(kept, rows)
    next_kept = take_or_unknown(kept, np.where(at < len(kept), at, UNKNOWN))
    next_kept = np.where(take_or_unknown(stream, next_kept) == stream, next_kept, UNKNOWN)

    is_there = np.ones(len(work), np.bool_)
    is_there[without.rows] = False
    launched = np.flatnonzero((launch_ns != NO_TIME) & (next_kept != UNKNOWN) & is_there)
    thread = take_or_unknown(trace.calls.lane, trace.launching_calls[work.activity[launched]])
    after = syncs.last_before(thread, main_thread, work.launch_ns[launched], place[launched])
    due_ns = launch_ns[launched] - upto_ns[launched] + own_ns[launched]
    first, last = _latest_of_each(due_ns, next_kept[launched], after)
    latest_ns, latest = due_ns[last], launched[last]
    after, heads = after[first], next_kept[launched[first]]

    sync_before = syncs.last_before(syncs.thread, main_thread, syncs.start_ns, syncs.place)
    since_ns = syncs.start_ns - spared_syncs_ns - take_or_unknown(syncs.end_ns, sync_before, 0)
    waits = ~np.isin(syncs.awaits, without.syncs)
    found: list[tuple[Ints, Ints, Ints]] = [  # tail, head, length
        (end_of[earlier], begin_of[later], upto_ns[later] - upto_ns[earlier]),
        (end_of[producer], begin_of[consumer], own_ns[consumer]),
        (
            take_or_unknown(sync_of, after),
            begin_of[heads],
            latest_ns + upto_ns[heads] - take_or_unknown(syncs.end_ns, after, 0),
        ),
        (take_or_unknown(sync_of, sync_before), sync_of, since_ns + syncs.lag_ns),
        (end_of[syncs.awaited[waits]], sync_of[syncs.awaits[waits]], syncs.lag_ns[syncs.awaits[waits]]),
        (begin_of[collectives], end_of[collectives], (work.end_ns - work.start_ns)[collectives]),
    ]
    tail, head, length_ns = (np.concatenate(column) for column in zip(*found, strict=True))
    is_duration = np.repeat([0, 1], [len(tail) - len(collectives), len(collectives)])

    # The operations of each link; links of waits, and durations, have none.
    first_row, end_row = np.zeros(len(tail), np.int64), np.zeros(len(tail), np.int64)
    for column, known in (
        (first_row, np.concatenate([earlier + 1, consumer, latest])),
        (end_row, np.concatenate([later + 1, consumer + 1, heads + 1])),
    ):
        column[: len(known)] = known
    nothing = np.zeros_like(tail)
    links = Links(tail, head, length_ns, is_duration, nothing, nothing, first_row, end_row, nothing)
    return weigh(Replay(times, links, ends, computed)) if np.all(tail < head) else None


def _order_times(work: Work, place: Ints, is_kept: Mask, syncs: HostCalls) -> tuple[Times, Ints, Ints, Ints]:
    """Order times by their calls: two of a collective, one of another kept operation or of a call that waits.

    Returns the times; for each operation the row of its end, and the row that others delay, which for a collective is
    its arrival; and for each call that waits the row of its end.
    """
    kept, collectives = np.flatnonzero(is_kept), np.flatnonzero(work.is_collective)
    counts = [len(kept), len(collectives), len(syncs.place)]
    # At one place, an arrival comes before an end, and that before the call that waits for it.
    order = np.lexsort((np.repeat([1, 0, 2], counts), np.concatenate([place[kept], place[collectives], syncs.place])))
    completed, arrivals, sync_of = np.split(positions(order, len(order)), np.cumsum(counts)[:-1])
    end_of = np.full(len(work), UNKNOWN, np.int64)
    end_of[kept] = completed
    begin_of = end_of.copy()
    begin_of[collectives] = arrivals
    time_ns = np.concatenate([work.end_ns[kept], work.start_ns[collectives], syncs.end_ns])[order]
    times = Times(time_ns, take_or_unknown(collectives, positions(arrivals, len(order))))
    return times, end_of, begin_of, sync_of


def _latest_of_each(due_ns: Ints, following: Ints, after: Ints) -> tuple[Ints, Ints]:
    """Of launches that precede the same kept operation and follow the same call, only the latest matters.

    Returns a launch of each such pair, and the latest one.
    """
    first, pair = distinct_rows(following, after)
    by_due = np.argsort(due_ns, kind="stable")
    latest = np.zeros(len(first), np.int64)
    latest[pair[by_due]] = by_due  # of several values for one element, the last one written stays
    return first, latest


def _kinds(trace: Trace, activity: Ints) -> Ints:
    name_id = trace.activities.name_id[activity]
    kinds = [*KINDS, OTHER]
    of_name = np.zeros(len(trace.names), np.int64)
    for name in distinct(name_id):
        of_name[name] = kinds.index(kind_of_compute(trace.names[name]))
    return of_name[name_id]


def weigh(replay: Replay, weights: Mapping[str, float] | None = None) -> Replay:
    """Make the compute of each link that of its operations, times the weight of their kinds, 1 where none is given."""
    links, computed = replay.links, replay.computed
    of_kind = np.array([(weights or {}).get(kind, 1.0) for kind in (*KINDS, OTHER)])[computed.kind]

    def along(of_each_ns: Ints) -> Ints:
        sums_ns = np.append(0, np.cumsum(np.round(of_each_ns * of_kind).astype(np.int64)))
        found_ns: Ints = sums_ns[links.end_row] - sums_ns[links.first_row]
        return found_ns

    weighted = along(computed.compute_ns), along(computed.beside_ns)
    return replace(replay, links=replace(links, compute_ns=weighted[0], beside_ns=weighted[1]))


def _spared_launches(rank: RankEvents, work: Work, without: Without) -> tuple[Ints, Ints]:
    """How much earlier the host launches each operation, and begins each wait, without some launches.

    A launch takes the time from the one before on its thread, or from the end of the last wait. What is spared counts
    until the thread waits again: the wait then ends when what it waits for does.
    """
    syncs, trace = rank.host_calls, rank.trace
    spared_ns, of_syncs_ns = np.zeros(len(work), np.int64), np.zeros(len(syncs.start_ns), np.int64)
    if not len(without.rows):
        return spared_ns, of_syncs_ns
    launch_ns = work.launch_ns
    thread = take_or_unknown(trace.calls.lane, trace.launching_calls[work.activity])
    is_spared = np.zeros(len(work), np.bool_)
    is_spared[without.rows] = True
    for one in distinct(thread[is_spared & (launch_ns != NO_TIME)]):
        rows = np.flatnonzero((thread == one) & (launch_ns != NO_TIME))
        rows = rows[np.argsort(launch_ns[rows], kind="stable")]
        at = launch_ns[rows]
        own = np.flatnonzero(np.isin(syncs.thread, [one, rank.main_thread]))
        own = own[np.argsort(syncs.end_ns[own], kind="stable")]
        last = np.searchsorted(syncs.end_ns[own], at, side="right") - 1
        since_ns = np.maximum(take_or_unknown(syncs.end_ns[own], last, NO_TIME), np.append(NO_TIME, at[:-1]))
        took_ns = np.where(is_spared[rows] & (since_ns != NO_TIME), at - since_ns, 0)
        took_ns = np.minimum(took_ns, _LONGEST_LAUNCH_NS)
        upto_ns = np.append(0, np.cumsum(took_ns))
        first = np.searchsorted(at, take_or_unknown(syncs.end_ns[own], last, NO_TIME), side="left")
        spared_ns[rows] = upto_ns[1:] - upto_ns[first]
        begins = np.searchsorted(at, syncs.start_ns[own], side="left")
        previous = np.searchsorted(at, np.append(NO_TIME, syncs.end_ns[own][:-1]), side="left")
        of_syncs_ns[own] = np.maximum(0, upto_ns[begins] - upto_ns[np.minimum(previous, begins)])
    return spared_ns, of_syncs_ns


_LONGEST_LAUNCH_NS = 50_000
"""A longer time between two launches is the program's own, which it spends without this launch, too."""


def join_replays(
    replays: Sequence[Replay], common_ns: Sequence[Ints], matches: Iterable[Sequence[int]]
) -> tuple[Replay, Ints] | None:
    """Join the replays of several ranks: no rank goes on from a collective before all ranks have arrived.

    The steps of their ends must be the same numbers on all ranks. ``common_ns`` are the times on the common clock,
    ``matches`` the arrivals of each common collective, as rows of the concatenated times. The result is the replay in
    one order, and the place of each of those rows in it; ``None`` if the clocks contradict that order.
    """
    if len(replays) == 1:
        return replays[0], np.arange(len(replays[0].times))
    times = replace(concatenate(*(one.times for one in replays)), time_ns=np.concatenate(common_ns))
    order = np.argsort(times.time_ns, kind="stable")
    place = positions(order, len(times))
    for arrivals in matches:
        place[arrivals] = place[arrivals].max()
    first = np.cumsum([0, *(len(one.times) for one in replays)]).tolist()
    # A length without a tail is a time of the rank's own clock.
    links = concatenate(
        *(
            replace(
                one.links,
                head=place[one.links.head + offset],
                tail=np.where(one.links.tail == UNKNOWN, UNKNOWN, place[one.links.tail + offset]),
                rank=np.full(len(one.links), index),
                length_ns=one.links.length_ns
                + np.where(one.links.tail == UNKNOWN, (common - one.times.time_ns)[one.links.head], 0),
            )
            for index, (one, offset, common) in enumerate(zip(replays, first, common_ns, strict=False))
        )
    )
    times = select(times, order)
    since_ns = times.time_ns[links.head] - take_or_unknown(times.time_ns, links.tail, 0)
    links = replace(links, length_ns=np.where(links.is_duration == 1, since_ns, links.length_ns))
    ends = concatenate(
        *(replace(one.ends, row=place[one.ends.row + offset]) for one, offset in zip(replays, first, strict=False))
    )
    return (Replay(times, links, ends, replays[0].computed), place) if np.all(links.tail < links.head) else None


def measure_gains(replay: Replay, arrivals: Ints, step: int) -> Ints:
    """How much earlier a step would end if one of these collectives (rows of their arrivals) took no time, for each."""
    time_ns, links = replay.times.time_ns, replay.links
    ends = select(replay.ends, replay.ends.step == step)
    lasts, before_ns = ends.row, ends.before_ns
    if not len(arrivals) or not len(lasts):
        return np.zeros(len(arrivals), np.int64)
    first, last = int(arrivals.min()), int(lasts.max())
    low, high = np.searchsorted(links.head[replay.heads], [first, last], side="right")
    links = select(links, replay.heads[low:high])

    # The longest chain from each time to the end of the step.
    left = np.full(max(0, last - first) + 1, _NEVER)
    is_after = lasts >= first
    np.maximum.at(left, lasts[is_after] - first, -before_ns[is_after])
    within = np.flatnonzero(links.tail >= first)
    within = within[np.argsort(-links.tail[within], kind="stable")]
    to_end: list[int] = left.tolist()
    columns = (links.tail[within] - first, links.head[within] - first, links.length_ns[within])
    for tail, head, length in zip(*(column.tolist() for column in columns), strict=True):
        to_end[tail] = max(to_end[tail], length + to_end[head])
    left = np.array(to_end)

    chains_ns = take_or_unknown(time_ns, links.tail, 0) + links.length_ns + left[links.head - first]
    ends_ns = time_ns[lasts] - before_ns
    gains = []
    for arrival in arrivals.tolist():
        beside = chains_ns[(links.tail < arrival) & (links.head > arrival)]
        through = left[links.head[(links.tail == arrival) & (links.is_duration == 1)] - first]
        done = ends_ns[lasts <= arrival]
        without = [beside.max(initial=_NEVER), time_ns[arrival] + through.max(initial=_NEVER), done.max(initial=_NEVER)]
        gains.append(int(ends_ns.max() - max(without)))
    return np.array(gains, np.int64)
