"""How much earlier a step would end if a collective took no time: the recorded dependencies replayed without it.

Dependencies, of which the last one counts:

- An operation begins after the end of the operation before it on its stream, the ends of the operations that its stream
  waits for, and its launch.
- A launch comes after the last call in which its thread, or the main thread, could wait for the device.
- Such a call ends after the operation that it waits for.

The delay behind the last dependency is kept from the recording, and so are all other lengths. So each time is the
maximum of some earlier times, to each of which a length is added::

    C      a collective, with two times: ``arrive`` when it may begin, and ``end``
    k, c   operations, with their ``end``; operations to which nothing refers are joined with the next operation
    S      a call that waits, with its ``end``

    stream 20   ......CCCCCC         arrive(C) + duration       = end(C)
    stream 7    kkkk........ccc      max(end(k), end(C)) + 3    = end(c)      c waits for C

Such an addition is a *link* between two times. The end of a step is the longest of all chains of links; without a
collective, its duration counts as 0. Times are ordered so that each comes after the times on which it depends. Then a
chain that does not go through a time has one link from before that time to after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.core.backward_waits import waits_in_backward
from ddp_prof.analyze.core.bucket_copies import find_bucket_copies
from ddp_prof.analyze.core.edges import HostCalls
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.work import Work
from ddp_prof.analyze.intervals import Intervals
from ddp_prof.analyze.kernels.kernel_times import KINDS, OTHER, kind_of_compute
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Floats,
    Ints,
    Mask,
    Table,
    concatenate,
    distinct,
    distinct_rows,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, Trace

_NEVER = -(2**60)
"""Stands for minus infinity where the longest chain is looked for; sums with it do not overflow."""


@dataclass(frozen=True)
class Recorded:
    """What the trace of a rank holds for its replays, without the trace.

    Attributes:
        work: Its operations. The other columns refer to rows of it.
        stream: The stream of each operation, as a number of ``Dependencies.stream``.
        place: The position of each operation's launch in the order of all calls.
        thread: The thread that launched each operation; ``UNKNOWN`` if its launch is not in the trace.
        kind: The kind of each operation by its name, as a position in ``(*KINDS, OTHER)``.
        producer, consumer: Each ``consumer`` waits for the end of its ``producer``, an operation of another stream.
        syncs: The calls in which the host could wait for the device.
        trains: The threads that train, see :attr:`.RankEvents.training_threads`.
        communication: When the device communicates.
        copies: The copies out of buckets on the stream of compute.
        waits_in_backward: Indices in ``syncs`` of the calls that wait in backward.
        ends: The operations with which each step ends.
    """

    work: Work
    stream: Ints
    place: Ints
    thread: Ints
    kind: Ints
    producer: Ints
    consumer: Ints
    syncs: HostCalls
    trains: frozenset[int]
    communication: Intervals
    copies: Ints
    waits_in_backward: Ints
    ends: Ends

    @cached_property
    def computed(self) -> Computed:
        """How long each operation computes, and how much of that beside communication."""
        work = self.work
        compute_ns = np.where(work.category == Category.COMPUTE, work.end_ns - work.start_ns, 0)
        beside_ns = self.communication.covered_ns(work.start_ns, work.start_ns + compute_ns)
        return Computed(compute_ns, beside_ns)


def record(rank: RankEvents, ends: Ends) -> Recorded:
    """Return what replays of a rank are made of; ``ends`` are the operations with which its steps end."""
    trace, dependencies, work = rank.trace, rank.dependencies(), rank.work
    row_of = positions(work.activity, len(trace.activities))
    producer, consumer = row_of[dependencies.edges.producer], row_of[dependencies.edges.consumer]
    inside = (producer != UNKNOWN) & (consumer != UNKNOWN)
    return Recorded(
        work=work,
        stream=dependencies.stream[work.activity],
        place=dependencies.place[work.activity],
        thread=take_or_unknown(trace.calls.lane, trace.launching_calls[work.activity]),
        kind=_kinds(trace, work.activity),
        producer=producer[inside],
        consumer=consumer[inside],
        syncs=rank.host_calls,
        trains=rank.training_threads,
        communication=rank.union_of(Category.COMMUNICATION),
        copies=np.sort(row_of[find_bucket_copies(rank)]),
        waits_in_backward=waits_in_backward(rank)[0],
        ends=ends,
    )


@dataclass(frozen=True)
class Times(Table):
    """The times of one device and its host between which links exist; each comes after those on which it depends.

    Attributes:
        time_ns: The recorded time.
        collective: Row in :class:`Work` of the collective that arrives at this time; ``UNKNOWN`` for a time of another
            kind.
    """

    time_ns: Ints
    collective: Ints


@dataclass(frozen=True)
class Links(Table):
    """Each row says: the time ``head`` is not before the time ``tail`` plus ``length_ns``.

    Attributes:
        tail, head: Rows of :class:`Times`. ``tail`` is ``UNKNOWN`` if ``head`` depends on no other time; ``length_ns``
            then is a time of the clock.
        length_ns: The length of the link.
        is_duration: 1 if the length is the duration of a collective, else 0.
        compute_ns: How much of the length is compute, which communication may slow. Kinds of kernels that it slows more
            than others count more.
        beside_ns: How much of ``compute_ns`` ran at the same time as communication.
        rank: Index of the rank of ``head`` among the ranks that were joined.
    """

    tail: Ints
    head: Ints
    length_ns: Ints
    is_duration: Ints
    compute_ns: Ints
    beside_ns: Ints
    rank: Ints


@dataclass(frozen=True)
class Computed(Table):
    """The compute of each row of :class:`Work`, and how much of it ran beside communication."""

    compute_ns: Ints
    beside_ns: Ints


@dataclass(frozen=True)
class Ends(Table):
    """The times with which steps end: a step ends at the latest of its rows.

    Attributes:
        step: Index of the step; in joined replays, its key.
        row: Row of :class:`Work` of an operation at whose end the step ends; in a replay, a row of :class:`Times`.
        before_ns: How much earlier than that the step ends: the duration of an operation that begins as the step ends,
            else 0.
    """

    step: Ints
    row: Ints
    before_ns: Ints


@dataclass(frozen=True)
class Replay:
    """What is needed to replay a rank, or several ranks together: times, links between them, and the ends of steps."""

    times: Times
    links: Links
    ends: Ends

    @cached_property
    def heads(self) -> Ints:
        """The rows of the links, ordered by their head."""
        return np.argsort(self.links.head, kind="stable")


def _no_rows() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Without:
    """What is left out of a replay.

    Attributes:
        rows: Rows of :class:`Work`: these operations and their launches take no time. What waits for one of them still
            waits for what was before it.
        syncs: Indices in ``HostCalls`` of the calls that no longer wait for the device.
        leaves_gaps: Whether the delay before each of ``rows`` stays; what follows may need that time, too.
        held_ns: For each row of :class:`Work`, how much of the delay from when it could begin to its start is left out;
            ``None`` to leave out nothing.
    """

    rows: Ints = field(default_factory=_no_rows)
    syncs: Ints = field(default_factory=_no_rows)
    leaves_gaps: bool = False
    held_ns: Ints | None = None


NOTHING = Without()


def find_replay(
    recorded: Recorded, without: Without = NOTHING, slowed: Mapping[str, float] | None = None
) -> Replay | None:
    """Return the times of a device and the links between them.

    Args:
        recorded: What the trace holds of the rank.
        without: What is left out.
        slowed: How much more than the average, as a factor, communication slows each kind of kernels; 1 for kinds
            without a factor. ``None`` if it slows nothing.

    Returns:
        The replay; ``None`` if a link contradicts the order of the calls.
    """
    work, stream, syncs = recorded.work, recorded.stream, recorded.syncs
    producer, consumer = recorded.producer, recorded.consumer
    own_ns = _added_to_stream(work, without)
    upto_ns = np.cumsum(own_ns)  # only differences within a stream are used
    spared_ns, spared_syncs_ns = _spared_launches(recorded, without)

    # Only operations to which something refers are kept, with a time each, and those behind which the weight changes.
    weight = _weigh(recorded, slowed or {})
    is_kept = work.is_collective | (False if slowed is None else _change_weight(recorded, weight))
    is_kept[np.concatenate([producer, consumer, syncs.awaited, recorded.ends.row])] = True
    times, end_of, begin_of, sync_of = _order_times(work, recorded.place, is_kept, syncs)
    kept, collectives = np.flatnonzero(is_kept), np.flatnonzero(work.is_collective)

    # ``later``: each kept operation that is not the first of its stream; ``earlier``: the kept one before it.
    later = kept[1:][stream[kept[1:]] == stream[kept[:-1]]]
    earlier = kept[np.searchsorted(kept, later) - 1]
    launches = _find_last_launches(recorded, without, kept, own_ns - upto_ns - spared_ns)
    sync_before = syncs.last_before(syncs.thread, recorded.trains, syncs.start_ns, syncs.place)
    waits = ~np.isin(syncs.awaits, without.syncs)
    along_streams = _PlainLinks(
        end_of[earlier], begin_of[later], upto_ns[later] - upto_ns[earlier], first_row=earlier + 1, end_row=later + 1
    )
    between_streams = _PlainLinks(
        end_of[producer], begin_of[consumer], own_ns[consumer], first_row=consumer, end_row=consumer + 1
    )
    by_launches = _PlainLinks(
        take_or_unknown(sync_of, launches.after),
        begin_of[launches.head],
        launches.due_ns + upto_ns[launches.head] - take_or_unknown(syncs.end_ns, launches.after, 0),
        first_row=launches.row,
        end_row=launches.head + 1,
    )
    since_ns = syncs.start_ns - spared_syncs_ns - take_or_unknown(syncs.end_ns, sync_before, 0)
    between_syncs = _PlainLinks(take_or_unknown(sync_of, sync_before), sync_of, since_ns + syncs.lag_ns)
    until_awaited = _PlainLinks(
        end_of[syncs.awaited[waits]], sync_of[syncs.awaits[waits]], syncs.lag_ns[syncs.awaits[waits]]
    )
    durations = _PlainLinks(
        begin_of[collectives], end_of[collectives], (work.end_ns - work.start_ns)[collectives], is_duration=1
    )
    links = _make_links(
        (along_streams, between_streams, by_launches, between_syncs, until_awaited, durations), recorded, weight
    )
    ends = _place_ends(recorded.ends, work.is_collective, begin_of, end_of)
    return Replay(times, links, ends) if np.all(links.tail < links.head) else None


class _PlainLinks(NamedTuple):
    """Links of one kind, before it is known how much of them is compute.

    Attributes:
        tail, head, length_ns, is_duration: See :class:`Links`.
        first_row: The first of the operations whose compute each link contains, row by row of :class:`Work`.
        end_row: The row after the last of them; the same as ``first_row`` if it contains none.
    """

    tail: Ints
    head: Ints
    length_ns: Ints
    first_row: Ints | int = 0
    end_row: Ints | int = 0
    is_duration: int = 0


def _make_links(kinds: Sequence[_PlainLinks], recorded: Recorded, weight: Floats) -> Links:
    """Return the links of all kinds, with the compute that each contains; ``weight`` is as from :func:`_weigh`."""
    columns = zip(*(np.broadcast_arrays(*kind) for kind in kinds), strict=True)
    tail, head, length_ns, first_row, end_row, is_duration = (np.concatenate(column) for column in columns)
    compute_ns, beside_ns = (
        _sum_rows(of_each_ns * weight, first_row, end_row)
        for of_each_ns in (recorded.computed.compute_ns, recorded.computed.beside_ns)
    )
    return Links(tail, head, length_ns, is_duration, compute_ns, beside_ns, np.zeros_like(tail))


class _LastLaunches(NamedTuple):
    """The launches that may delay an operation: of those after one call that waits, the last one.

    Attributes:
        row: The operation that is launched.
        head: The kept operation that it delays: itself, or the next one on its stream.
        after: The call that waits before the launch, as an index in ``HostCalls``; ``UNKNOWN`` if there is none.
        due_ns: When the launch lets its stream begin, less the position of the operation on it.
    """

    row: Ints
    head: Ints
    after: Ints
    due_ns: Ints


def _find_last_launches(recorded: Recorded, without: Without, kept: Ints, offset_ns: Ints) -> _LastLaunches:
    """Return the launches that may delay the kept operations.

    Args:
        recorded: What the trace holds of the rank.
        without: What is left out, the launches of which delay nothing.
        kept: Rows of the kept operations.
        offset_ns: What is added to the launch of each operation, so that those before one kept operation compare.
    """
    work = recorded.work
    # If nothing is known of what delayed an operation, its own start counts as its launch.
    launch_ns = np.where(work.bound_ns == NO_TIME, work.start_ns, work.launch_ns)
    is_there = np.ones(len(work), np.bool_)
    is_there[without.rows] = False
    next_kept = _next_on_stream(kept, recorded.stream)
    rows = np.flatnonzero((launch_ns != NO_TIME) & (next_kept != UNKNOWN) & is_there)
    after = recorded.syncs.last_before(
        recorded.thread[rows], recorded.trains, work.launch_ns[rows], recorded.place[rows]
    )
    due_ns = launch_ns[rows] + offset_ns[rows]
    first, last = _latest_of_each(due_ns, next_kept[rows], after)
    return _LastLaunches(rows[last], next_kept[rows[first]], after[first], due_ns[last])


def _place_ends(ends: Ends, is_collective: Mask, begin_of: Ints, end_of: Ints) -> Ends:
    """Return the ends by rows of times. A step that ends as a collective begins ends with the arrival of this.

    ``begin_of`` and ``end_of`` are those of :func:`_order_times`.
    """
    at_arrival = is_collective[ends.row] & (ends.before_ns > 0)
    return replace(
        ends,
        row=np.where(at_arrival, begin_of[ends.row], end_of[ends.row]),
        before_ns=np.where(at_arrival, 0, ends.before_ns),
    )


def _added_to_stream(work: Work, without: Without) -> Ints:
    """Return how long each operation makes its stream, in ns: its delay, and its duration if it is no collective.

    The duration of a collective is a link of its own. What is left out adds less.
    """
    lag_ns = work.start_ns - np.where(work.bound_ns == NO_TIME, work.start_ns, work.bound_ns)
    if without.held_ns is not None:
        lag_ns -= without.held_ns
    own_ns = lag_ns + np.where(work.is_collective, 0, work.end_ns - work.start_ns)
    own_ns[without.rows] = lag_ns[without.rows] if without.leaves_gaps else 0
    return own_ns


def _next_on_stream(kept: Ints, stream: Ints) -> Ints:
    """Return for each operation itself or the next kept one on its stream; ``UNKNOWN`` if none follows there.

    Operations are ordered by stream; ``kept`` are some of their rows, in this order, and ``stream`` has one element per
    operation.
    """
    at = np.searchsorted(kept, np.arange(len(stream)))
    following = take_or_unknown(kept, np.where(at < len(kept), at, UNKNOWN))
    found: Ints = np.where(take_or_unknown(stream, following) == stream, following, UNKNOWN)
    return found


def _order_times(work: Work, place: Ints, is_kept: Mask, syncs: HostCalls) -> tuple[Times, Ints, Ints, Ints]:
    """Make the times of a replay, in the order of the calls to which they belong.

    A collective has two times (arrival and end), any other kept operation has one, and so has a call that waits.

    Args:
        work: The operations.
        place: The position of each operation's launch in the order of all calls.
        is_kept: Which operations have times.
        syncs: The calls that wait.

    Returns:
        The times; for each operation, the row of its end; for each operation, the row of the time that dependencies
        delay: the arrival of a collective, else the end; and for each call that waits, the row of its end. Rows are
        ``UNKNOWN`` for operations that are not kept.
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
    """Find the latest launch among those that precede the same kept operation and follow the same call that waits.

    Only the latest of these launches can delay the operation.

    Args:
        due_ns: When each launch lets the operation begin.
        following: The kept operation that each launch precedes.
        after: The call that each launch follows.

    Returns:
        For each pair of operation and call, the position of one of its launches, and that of the latest.
    """
    first, pair = distinct_rows(following, after)
    by_due = np.argsort(due_ns, kind="stable")
    latest = np.zeros(len(first), np.int64)
    latest[pair[by_due]] = by_due  # of several values for one element, the last one written stays
    return first, latest


def _kinds(trace: Trace, activity: Ints) -> Ints:
    """Return the kind of each activity by its name, as a position in ``(*KINDS, OTHER)``."""
    name_id = trace.activities.name_id[activity]
    kinds = [*KINDS, OTHER]
    of_name = np.zeros(len(trace.names), np.int64)
    for name in distinct(name_id):
        of_name[name] = kinds.index(kind_of_compute(trace.names[name]))
    return of_name[name_id]


def _weigh(recorded: Recorded, slowed: Mapping[str, float]) -> Floats:
    """Return how much more than the average communication slows each operation, as a factor; 0 if it is no compute."""
    of_kind = np.array([slowed.get(kind, 1.0) for kind in (*KINDS, OTHER)])[recorded.kind]
    weight: Floats = np.where(recorded.work.category == Category.COMPUTE, of_kind, 0.0)
    return weight


def _change_weight(recorded: Recorded, weight: Floats) -> Mask:
    """Return behind which operations another weight begins on their stream: communication slows a link evenly.

    An operation that ends after a later one of its stream does not count, as in a CUDA graph: times have an order.
    """
    work, stream = recorded.work, recorded.stream
    found = np.zeros(len(work), np.bool_)
    for one in distinct(stream):
        rows = np.flatnonzero(stream == one)
        until_ns = np.where(work.is_collective[rows], work.start_ns[rows], work.end_ns[rows])
        later_ns = np.minimum.accumulate(until_ns[::-1])[::-1]
        found[rows[:-1]] = (weight[rows[1:]] != weight[rows[:-1]]) & (work.end_ns[rows[:-1]] <= later_ns[1:])
    return found


def _sum_rows(values: Floats, first_row: Ints, end_row: Ints) -> Ints:
    """Return the sum of the values, rounded each, from each first row up to, but without, each end row."""
    upto = np.append(0, np.cumsum(np.round(values).astype(np.int64)))
    found: Ints = upto[end_row] - upto[first_row]
    return found


def _spared_launches(recorded: Recorded, without: Without) -> tuple[Ints, Ints]:
    """Return how much earlier the host launches each operation, and begins each wait, without the left-out launches.

    A launch takes the time since the launch before it on its thread, or since the end of the thread's last wait, but at
    most :data:`_LONGEST_LAUNCH_NS`. The time that is saved adds up until the thread waits again: that wait ends when
    the operation that it waits for ends. The call that launches a copy could wait for it: that of a left-out copy goes
    with it, and so does its length, which is part of the time until the next launch.

    Returns:
        Nanoseconds for each operation, and for each call in which the host could wait.
    """
    syncs, work, thread = recorded.syncs, recorded.work, recorded.thread
    spared_ns, of_syncs_ns = np.zeros(len(work), np.int64), np.zeros(len(syncs.start_ns), np.int64)
    if not len(without.rows):
        return spared_ns, of_syncs_ns
    launch_ns = work.launch_ns
    is_spared = np.zeros(len(work), np.bool_)
    is_spared[without.rows] = True
    for one in distinct(thread[is_spared & (launch_ns != NO_TIME)]):
        # The launches of the thread, and the waits of it or of those that train, in order of time.
        rows = np.flatnonzero((thread == one) & (launch_ns != NO_TIME))
        rows = rows[np.argsort(launch_ns[rows], kind="stable")]
        at = launch_ns[rows]
        own = np.flatnonzero(np.isin(syncs.thread, [one, *recorded.trains]))
        own = own[np.argsort(syncs.end_ns[own], kind="stable")]
        # ``took_ns``: what each left-out launch takes. ``upto_ns``: the sum of that before each launch.
        last = np.searchsorted(syncs.end_ns[own], at, side="right") - 1
        other = own[~np.isin(syncs.start_ns[own], at[is_spared[rows]])]  # no calls that launch what is left out
        waited_ns = take_or_unknown(syncs.end_ns[other], np.searchsorted(syncs.end_ns[other], at, "right") - 1, NO_TIME)
        since_ns = np.maximum(waited_ns, np.append(NO_TIME, at[:-1]))
        took_ns = np.where(is_spared[rows] & (since_ns != NO_TIME), at - since_ns, 0)
        took_ns = np.minimum(took_ns, _LONGEST_LAUNCH_NS)
        upto_ns = np.append(0, np.cumsum(took_ns))
        # What is saved since the last wait, until each launch, and until the begin of each wait.
        first = np.searchsorted(at, take_or_unknown(syncs.end_ns[own], last, NO_TIME), side="left")
        spared_ns[rows] = upto_ns[1:] - upto_ns[first]
        begins = np.searchsorted(at, syncs.start_ns[own], side="right")  # with its own launch, of a copy
        previous = np.searchsorted(at, np.append(NO_TIME, syncs.end_ns[own][:-1]), side="left")
        of_syncs_ns[own] = np.maximum(0, upto_ns[begins] - upto_ns[np.minimum(previous, begins)])
    return spared_ns, of_syncs_ns


_LONGEST_LAUNCH_NS = 50_000
"""50 microseconds. What is longer between two launches is work of the program, which stays without the launch."""


def join_replays(
    replays: Sequence[Replay], common_ns: Sequence[Ints], matches: Iterable[Sequence[int]]
) -> tuple[Replay, Ints] | None:
    """Join the replays of several ranks into one.

    No rank goes on from a collective before all its ranks have arrived: the arrivals become a single time.

    Args:
        replays: One per rank; ``ends.step`` must be the key of the step, which all ranks share.
        common_ns: The times of each replay on the common clock.
        matches: For each collective, the arrivals of its ranks, as rows of the concatenated times of all replays.

    Returns:
        The joined replay, and for each row of the concatenated times its row in the joined replay; ``None`` if links
        contradict the order of the times on the common clock.
    """
    if len(replays) == 1:
        return replays[0], np.arange(len(replays[0].times))
    # Times of all ranks, in their common order. The arrivals of a collective take the place of the last of them.
    times = replace(concatenate(*(one.times for one in replays)), time_ns=np.concatenate(common_ns))
    order = np.argsort(times.time_ns, kind="stable")
    place = positions(order, len(times))
    for arrivals in matches:
        place[arrivals] = place[arrivals].max()
    first = np.cumsum([0, *(len(one.times) for one in replays)]).tolist()
    # A length without a tail is a time of the rank's own clock, and becomes one of the common clock.
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
    # The duration of a collective now counts from the last arrival.
    times = select(times, order)
    since_ns = times.time_ns[links.head] - take_or_unknown(times.time_ns, links.tail, 0)
    links = replace(links, length_ns=np.where(links.is_duration == 1, since_ns, links.length_ns))
    ends = concatenate(
        *(replace(one.ends, row=place[one.ends.row + offset]) for one, offset in zip(replays, first, strict=False))
    )
    return (Replay(times, links, ends), place) if np.all(links.tail < links.head) else None


def measure_gains(replay: Replay, arrivals: Ints, step: int) -> Ints:
    """Return how much earlier a step would end if a collective took no time, for each of some collectives.

    Args:
        replay: The joined replay of all ranks.
        arrivals: The row in its times of the arrival of each collective.
        step: Key of the step.

    Returns:
        Nanoseconds; shape of ``arrivals``.
    """
    # Only links between the first of the arrivals and the end of the step matter; ``left`` begins at ``first``.
    time_ns, links = replay.times.time_ns, replay.links
    ends = select(replay.ends, replay.ends.step == step)
    lasts, before_ns = ends.row, ends.before_ns
    if not len(arrivals) or not len(lasts):
        return np.zeros(len(arrivals), np.int64)
    first, last = int(arrivals.min()), int(lasts.max())
    low, high = np.searchsorted(links.head[replay.heads], [first, last], side="right")
    links = select(links, replay.heads[low:high])

    # The longest chain from each time to the end of the step, computed from the last time to the first.
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

    # Without a collective, the step ends with the longest of: the chains whose link passes over the arrival, the chain
    # through the collective with a duration of 0, and the ends that lie before it.
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
