"""Recorded dependencies between device operations: which one could not begin before which other one had ended.

::

    stream 20   ......CCCCCCCCR             C: a collective, R: cudaEventRecord on stream 20
    stream 7    kkkkk..........Wccc         W: cudaStreamWaitEvent on stream 7, k: a kernel, c: a copy

A *wait* is a call that makes a stream wait for a CUDA event; its *record* is the call that recorded this event. A wait
makes an *edge* from its *producer*, the last operation launched on the record's stream before the record, to its
*consumer*, the first operation launched on the waiting stream after the wait. If the record's stream was itself made to
wait since its last operation, the record includes these waits: a stream without work passes waits on. Within a stream,
operations run in the order of their launch; no edge is made for that. "Before" and "after" refer to the order of the
API calls: their correlation ids, which a process counts up. No edge is guessed: a wait whose record is not in the trace
is counted as unresolved, and an edge whose consumer began before its producer ended is counted and left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ddp_prof.growing_column import in_file, in_order
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Sequences,
    Table,
    concatenate_columns,
    distinct,
    distinct_rows,
    is_in,
    positions,
    rows_of,
    select,
    take_or_unknown,
)
from ddp_prof.trace import HOST_WAITS, Category, Kind, SyncKind, Trace, numbers_grow

_LARGEST_NUMBER = 1 << 40
_NATURAL_GAP_NS = 5_000
"""Longest time from when an operation could begin to its start that needs no cause."""


@dataclass(frozen=True)
class Edges(Table):
    """Edges between two streams: ``consumer`` could not begin before ``producer`` had ended.

    Both are rows of the trace's activities. ``wait`` is the row of the call, in the trace's synchronizations, that made
    the edge.
    """

    producer: Ints
    consumer: Ints
    wait: Ints


@dataclass(frozen=True)
class Dependencies:
    """The edges of a trace, and the order in which operations were launched on its streams.

    A synchronization is a row of ``Trace.synchronizations``: a call that waits, records an event or copies.

    Attributes:
        edges: The edges that the times do not contradict.
        is_wait: For each synchronization, whether it makes a stream wait.
        is_resolved: For each synchronization, whether it makes a stream wait and its record is known.
        is_violated: For each synchronization, whether it made an edge which the times contradict.
        next_work: For each synchronization, the activity launched next on its stream or, if that stream gets no more
            work, on the first stream that waits for it; ``UNKNOWN`` if there is none.
        call_stream: For each synchronization, the number of its stream; unique over all processes.
        call_place: For each synchronization, its position in the order of calls; see :func:`_call_order`.
        place: For each activity, the position of its launch in the order of calls.
        in_order: The activities stream by stream, in the order of their launch; only those whose ``place`` is known.
        stream: For each activity, the number of its stream, in the same numbering as ``call_stream``.
        awaited, awaited_by: What resolved waits wait for, also if no operation follows them: each activity of
            ``awaited``, on another stream, is waited for by the synchronization of ``awaited_by``.
    """

    edges: Edges
    is_wait: Mask
    is_resolved: Mask
    is_violated: Mask
    next_work: Ints
    call_stream: Ints
    call_place: Ints
    place: Ints
    in_order: Ints
    stream: Ints
    awaited: Ints
    awaited_by: Ints


def find_dependencies(trace: Trace) -> Dependencies:
    """Return the dependencies between the operations of all streams of a trace; see the module's description."""
    activities, calls = trace.activities, trace.synchronizations
    stream = _streams(trace)
    of_activity, of_call = stream[: len(activities)], stream[len(activities) :]
    place, call_place = _call_order(trace)
    placed = rows_of(place != UNKNOWN)
    launches = Sequences(of_activity[placed], place[placed])  # finds the launch before or after a call on a stream

    # A wait is resolved if its record, the stream of the record, and the positions of both calls are known.
    is_wait = calls.kind == SyncKind.STREAM_WAIT
    record = np.where(is_wait & (calls.stream != UNKNOWN), calls.awaits, UNKNOWN)
    is_resolved = (record != UNKNOWN) & (take_or_unknown(calls.stream, record) != UNKNOWN)
    is_resolved &= (call_place != UNKNOWN) & (take_or_unknown(call_place, record) != UNKNOWN)
    if trace.inferred is not None:
        is_resolved &= ~_may_pass_on(trace, trace.inferred, is_resolved, record, of_activity, of_call, call_place)
    waits = np.flatnonzero(is_resolved)
    waits = waits[np.argsort(call_place[waits], kind="stable")]
    record = record[waits]

    # The next work of each call. A stream that gets no more work may be waited for by another stream, whose next work
    # counts instead: `relay_of` is the first wait whose record is on the call's stream and comes after the call.
    next_work = _rows_among(placed, launches.first_after(of_call, call_place))
    consumer = next_work[waits]
    relay = Sequences(of_call[record], call_place[record])
    relay_of = take_or_unknown(waits, relay.first_after(of_call, call_place))
    next_work = np.where(next_work == UNKNOWN, take_or_unknown(next_work, relay_of), next_work)

    # One edge for each wait and each operation that it waits for, if both ends are known and on different streams.
    recorded = _StreamCalls(of_call[record], call_place[record], launches)
    which, producer = _producers(
        _StreamCalls(of_call[waits], call_place[waits], launches), recorded, of_activity[placed]
    )
    producer = _rows_among(placed, producer)
    edges = Edges(producer, consumer[which], waits[which])
    is_other = (producer != UNKNOWN) & (take_or_unknown(of_activity, producer) != of_call[edges.wait])
    awaited, awaited_by = producer[is_other], edges.wait[is_other]
    crosses = (edges.producer != UNKNOWN) & (edges.consumer != UNKNOWN)
    edges = select(edges, crosses)
    edges = select(edges, of_activity[edges.producer] != of_activity[edges.consumer])

    # Leave out the edges that the recorded times contradict.
    order = in_file(launches.order) if isinstance(placed, slice) else in_order(placed, launches.order)
    contradicted = activities.end_ns[edges.producer] > activities.start_ns[edges.consumer]
    if trace.inferred is not None and trace.inferred[edges.wait].any():
        contradicted |= _misses_another(trace, trace.inferred, edges, call_place, place, of_activity, order)
    is_violated = np.zeros(len(calls), np.bool_)
    is_violated[edges.wait[contradicted]] = True
    return Dependencies(
        edges=select(edges, ~contradicted),
        is_wait=is_wait,
        is_resolved=is_resolved,
        is_violated=is_violated,
        next_work=next_work,
        call_stream=of_call,
        call_place=call_place,
        place=place,
        in_order=order,
        stream=of_activity,
        awaited=awaited,
        awaited_by=awaited_by,
    )


def _rows_among(chosen: Ints | slice, at: Ints) -> Ints:
    """Return rows from their positions among the chosen rows, which are those that :func:`.rows_of` returned."""
    return at if isinstance(chosen, slice) else take_or_unknown(chosen, at)


def _may_pass_on(
    trace: Trace,
    inferred: Mask,
    is_resolved: Mask,
    record: Ints,
    of_activity: Ints,
    of_call: Ints,
    call_place: Ints,
) -> Mask:
    """Return a mask of the synchronizations: the waits whose inferred record may be on another stream than assumed.

    A record that the capture does not hold is assumed to be on the stream of its thread's last launch. But if the
    thread has made a stream without work wait before, the record may be on that stream, which then passes its wait on.
    This makes no difference if the operation that the stream passes on runs on the waiting stream or on the assumed
    one.

    - ``inferred``: ``trace.inferred``, not ``None``: whether a wait's record, or a record's stream, is inferred.
    - ``is_resolved``, ``record``: For each synchronization: whether it is a wait with a known record, and its record's
      row.
    - ``of_activity``, ``of_call``: Number of the stream of each activity, and of each synchronization.
    - ``call_place``: Position of each synchronization in the order of calls.
    """
    calls = trace.synchronizations
    found = np.zeros(len(calls), np.bool_)
    silent = np.flatnonzero(is_resolved & ~np.isin(of_call, of_activity))
    waits = np.flatnonzero(is_resolved)
    waits = waits[inferred[record[waits]]]
    records = record[waits]
    # For each thread and each stream that its streams without work waited for: `since`, the first such wait's position.
    first, which = distinct_rows(calls.process[silent], calls.thread[silent], of_call[record[silent]])
    since = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(since, which, call_place[silent])
    from_streams = _streams_passed_on(of_call[silent], of_call[record[silent]])
    for wait, place in zip(silent[first].tolist(), since.tolist(), strict=True):
        same_thread = (calls.thread[records] == calls.thread[wait]) & (calls.process[records] == calls.process[wait])
        is_later = same_thread & (call_place[records] > place)
        # The silent stream waited for one stream; if that is silent too, it passes on all streams that it waited for.
        for passed_on in from_streams.get(int(of_call[record[wait]]), {int(of_call[record[wait]])}):
            found[waits[is_later & (of_call[waits] != passed_on) & (of_call[records] != passed_on)]] = True
    return found


def _streams_passed_on(silent: Ints, on: Ints) -> dict[int, set[int]]:
    """Return, for each stream without work, the streams with work that it waited for, directly or through such streams.

    Args:
        silent: For each wait of a stream without work, the number of this stream.
        on: For each such wait, the number of the stream that it waited for.
    """
    awaited: dict[int, set[int]] = {stream: set() for stream in distinct(silent)}
    for stream, other in zip(silent.tolist(), on.tolist(), strict=True):
        awaited[stream].add(other)
    found: dict[int, set[int]] = {}
    for stream in awaited:
        reached, pending = {stream}, [stream]
        while pending:
            others = awaited.get(pending.pop(), set()) - reached
            reached |= others
            pending += others
        found[stream] = reached - awaited.keys()
    return found


def _misses_another(
    trace: Trace, inferred: Mask, edges: Edges, call_place: Ints, place: Ints, stream: Ints, in_order: Ints
) -> Mask:
    """Return a mask of the edges: the inferred ones that may be wrong, as the consumer may wait for a later collective.

    Such a collective was launched on another stream before the wait. It ended before the consumer began, but after
    everything that the consumer is known to need, by more than :data:`_NATURAL_GAP_NS`::

        stream 20   ..AAAABBBBB.       inferred: c waits for A
        stream 7    kkk........ccc     but c began only after B had ended: the wait may be for B

    - ``inferred``: ``trace.inferred``, not ``None``: whether a wait's record, or a record's stream, is inferred.
    - ``call_place``, ``place``: Position of each synchronization, and of each activity's launch, in the order of calls.
    - ``stream``: Number of each activity's stream.
    - ``in_order``: The activities stream by stream, in the order of their launch.
    """
    activities = trace.activities
    # `before`: the operation launched before each one on its stream.
    before = np.full(len(activities), UNKNOWN, np.int64)
    follows = stream[in_order[1:]] == stream[in_order[:-1]]
    before[in_order[1:][follows]] = in_order[:-1][follows]
    launch_ns = take_or_unknown(trace.calls.start_ns, trace.launching_calls, NO_TIME)
    # When each operation could have begun: after the operation before it, its launch, and all its known producers. The
    # shortest time from any launch to its operation is taken as the least for all.
    soonest_ns = max(0, int((activities.start_ns - launch_ns).min(initial=-NO_TIME, where=launch_ns != NO_TIME)))
    could_ns = np.maximum(take_or_unknown(activities.end_ns, before, NO_TIME), launch_ns + soonest_ns)
    np.maximum.at(could_ns, edges.consumer, activities.end_ns[edges.producer])
    is_collective = activities.category == Category.COMMUNICATION
    collectives = np.flatnonzero(is_collective & (place != UNKNOWN))
    collectives = collectives[np.argsort(activities.end_ns[collectives], kind="stable")]
    ends = activities.end_ns[collectives]
    # collectives[low:high] ended between when the consumer could have begun and when it did begin.
    rows = np.flatnonzero(inferred[edges.wait] & ~is_collective[edges.consumer])
    consumer = edges.consumer[rows]
    low = np.searchsorted(ends, could_ns[consumer] + _NATURAL_GAP_NS, side="right")
    high = np.searchsorted(ends, activities.start_ns[consumer], side="right")
    found = np.zeros(len(edges), np.bool_)
    for row, first, last in zip(
        rows[high > low].tolist(), low[high > low].tolist(), high[high > low].tolist(), strict=True
    ):
        others = collectives[first:last]
        is_other = (place[others] < call_place[edges.wait[row]]) & (stream[others] != stream[edges.consumer[row]])
        is_other &= activities.process[others] == activities.process[edges.consumer[row]]
        found[row] = is_other.any()
    return found


def _streams(trace: Trace) -> Ints:
    """Return one array: a number for the stream of each activity, then for the stream of each synchronization.

    Two streams with the same id in two processes have different numbers. Synchronizations may have another device
    number than activities (nsys 2026.2). Therefore the device is used only if streams of two devices of one process
    have the same id.
    """
    activities, calls = trace.activities, trace.synchronizations
    # As many combinations with the device as without it: no id is used on two devices of a process.
    first, _ = distinct_rows(activities.process, activities.device, activities.lane)
    of_process = distinct_rows(activities.process[first], activities.lane[first])[0]
    columns = [(activities.process, calls.process), (activities.lane, calls.stream)]
    if len(of_process) != len(first):
        columns.insert(1, (activities.device, calls.device))
    return in_file(distinct_rows(*map(concatenate_columns, columns))[1])


def _call_order(trace: Trace) -> tuple[Ints, Ints]:
    """Return the positions of the activities' launches, and of the synchronizations, in the order of a process's calls.

    A position is the correlation id of the call, from 1 on; ``UNKNOWN`` if it is not known. If a thread's ids do not
    grow with time, they were used more than once; then a position is the call's start time in nanoseconds.
    """
    calls, activities, own = trace.calls, trace.activities, trace.synchronizations
    if numbers_grow(calls):
        number = activities.correlation
        in_range = (number > 0) & (number < _LARGEST_NUMBER)
        return number if in_range.all() else np.where(in_range, number, UNKNOWN), own.correlation
    is_known = own.start_ns != NO_TIME
    low = min(int(calls.start_ns.min()), int(own.start_ns.min(initial=0, where=is_known)))
    started = take_or_unknown(calls.start_ns, trace.launching_calls)
    launched = np.where(trace.launching_calls == UNKNOWN, UNKNOWN, started - low)
    return launched, np.where(is_known, own.start_ns - low, UNKNOWN)


class _StreamCalls:
    """Calls on streams, each with the last operation launched on its stream before the call.

    Attributes:
        stream: Number of each call's stream.
        place: Position of each call in the order of calls.
        work: Row in ``launches`` of the last operation before each call; ``UNKNOWN`` if there is none.
    """

    def __init__(self, stream: Ints, place: Ints, launches: Sequences) -> None:
        self.stream = stream
        self.place = place
        self.work = launches.last_before(stream, place)


def _producers(waits: _StreamCalls, records: _StreamCalls, stream: Ints) -> tuple[Ints, Ints]:
    """Return pairs of a wait and an operation that it waits for, as two arrays: rows of ``waits``, rows of operations.

    Each wait makes a pair with the last operation on its record's stream, ``UNKNOWN`` if that stream had no work before
    the record. It makes more pairs if the record's stream had been made to wait since that operation.

    Args:
        waits: The waits, in the order of their calls.
        records: The record of each wait, row by row.
        stream: Number of the stream of each operation.
    """
    own = np.arange(len(waits.stream)), records.work
    # A record passes waits on if its stream was made to wait after the stream's last operation.
    last_wait = Sequences(waits.stream, waits.place).last_before(records.stream, records.place)
    passes = (last_wait != UNKNOWN) & (take_or_unknown(waits.work, last_wait) == records.work)
    if not passes.any():
        return own
    # Go through these records, and the waits of their streams, in the order of calls. Within a stream, the operation
    # launched last ends last: passing on one operation per stream is enough.
    relays = np.isin(waits.stream, np.unique(records.stream[passes]))
    rows = np.concatenate([np.flatnonzero(passes), np.flatnonzero(relays)])
    is_record = np.arange(len(rows)) < passes.sum()
    order = np.argsort(np.where(is_record, records.place[rows], waits.place[rows]), kind="stable")
    # By stream: its last operation, and what it was made to wait for since (operations by their stream).
    pending: dict[int, tuple[int, dict[int, int]]] = {}
    passed: dict[int, dict[int, int]] = {}  # by row of `waits`: what its record passes on, likewise
    rows, is_record = rows[order], is_record[order]
    # Of a record its stream; of a wait its stream, the stream's last operation, and the wait's producer and its stream.
    columns = (
        np.where(is_record, records.stream[rows], waits.stream[rows]),
        waits.work[rows],
        records.work[rows],
        take_or_unknown(stream, records.work[rows]),
    )
    for row, records_it, on, work, producer, producer_on in zip(
        rows.tolist(), is_record.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        if records_it:
            passed[row] = dict(pending[on][1])
            continue
        if on not in pending or pending[on][0] != work:  # the stream got new work: what it waited for before is done
            pending[on] = work, {}
        if row in passed:
            pending[on][1].update(passed[row])
        if producer != UNKNOWN:
            pending[on][1][producer_on] = producer
    pairs = [(row, producer) for row, found in passed.items() for producer in found.values()]
    which, producers = np.array(pairs, np.int64).reshape(-1, 2).T
    return np.append(own[0], which), np.append(own[1], producers)


class HostCalls:
    """The calls in which the host could wait for a device, and the operations that each call waits for.

    Attributes:
        work: Rows of the device's activities, stream by stream in the order of their launch.
        rows: Rows of the calls in the trace's synchronizations, ordered by end.
        thread, place, start_ns, end_ns: Of each call: its thread, its position in the order of calls, and its times.
        awaited: Operations that calls wait for, as indices into ``work``; a call may wait for several.
        awaits: For each element of ``awaited``, the index (into ``rows``) of the call that waits for it.
        latest: For each call, the awaited operation that ends last, as index into ``work``; ``UNKNOWN`` if there is
            none.
        waited: Indices of the calls in which the host really waited: an awaited operation ended after the call began.
        lag_ns: For each call, the time from its start or the end of its ``latest``, whichever is later, to its end.
    """

    def __init__(self, trace: Trace, dependencies: Dependencies, work: Ints) -> None:
        """``work`` are rows of the activities of one rank, in the order of :attr:`Dependencies.in_order`."""
        calls, process = trace.synchronizations, trace.activities.process[work[:1]]
        stream, work_place = in_order(dependencies.stream, work), in_order(dependencies.place, work)
        may_wait = is_in(calls.kind, (*HOST_WAITS, SyncKind.COPY))
        rows = np.flatnonzero(may_wait & is_in(calls.process, process))
        rows = rows[np.argsort(calls.end_ns[rows], kind="stable")]
        self.work, self.rows = work, rows
        self.thread, self.place = calls.thread[rows], dependencies.call_place[rows]
        self.start_ns, self.end_ns = calls.start_ns[rows], calls.end_ns[rows]

        # Calls that copy, that wait for the whole device, and that wait for a stream or an event.
        kind = calls.kind[rows]
        copying, of_device = (np.flatnonzero(kind == one) for one in (SyncKind.COPY, SyncKind.HOST_WAIT_DEVICE))
        of_stream = np.flatnonzero((kind != SyncKind.COPY) & (kind != SyncKind.HOST_WAIT_DEVICE))
        # The last operation before the call on its stream or, of a wait for an event, before the event's record.
        launches = Sequences(stream, work_place)
        by_event = kind[of_stream] == SyncKind.HOST_WAIT_EVENT
        mark = np.where(by_event, calls.awaits[rows[of_stream]], rows[of_stream])  # the record, or the call itself
        marked = [take_or_unknown(column, mark) for column in (dependencies.call_stream, dependencies.call_place)]
        on_stream = launches.last_before(*marked)
        copies = np.flatnonzero(trace.activities.kind[work] == Kind.COPY)
        # A copying call waits for its own copy: if several copies have the call's correlation id, the last one launched
        # not after the call (hence + 1). np.unique turns positions into ranks, which are small numbers.
        of_copies, of_calls = trace.activities.correlation[work[copies]], calls.correlation[rows[copying]]
        _, number = distinct_rows(np.concatenate([of_copies, of_calls]))
        places = np.concatenate([dependencies.place[work[copies]], self.place[copying]])
        _, place = np.unique(places, return_inverse=True)
        by_number = Sequences(number[: len(copies)], place[: len(copies)])
        copy = take_or_unknown(copies, by_number.last_before(number[len(copies) :], place[len(copies) :] + 1))
        awaits, awaited = [copying, of_stream], [copy, on_stream]
        # A call that waits for the whole device waits for the last operation of each stream.
        for one in distinct(stream) if len(of_device) else ():
            awaits.append(of_device)
            awaited.append(launches.last_before(np.full(len(of_device), one), self.place[of_device]))
        # If the stream was itself made to wait since then, the call waits for the same, as in a barrier of torch.
        row_of = positions(work, len(trace.activities))
        producer, waits = row_of[dependencies.awaited], dependencies.awaited_by
        since = take_or_unknown(work_place, on_stream)
        for one in distinct(take_or_unknown(stream, producer[producer != UNKNOWN])):
            of_one = np.flatnonzero(take_or_unknown(stream, producer) == one)
            places = dependencies.call_place[waits[of_one]]
            last = Sequences(dependencies.call_stream[waits[of_one]], places).last_before(*marked)
            is_pending = (last != UNKNOWN) & (take_or_unknown(places, last) > since)
            awaits.append(of_stream)
            awaited.append(np.where(is_pending, take_or_unknown(producer[of_one], last), UNKNOWN))
        self.awaits, self.awaited = np.concatenate(awaits), np.concatenate(awaited)
        # An operation that ends after the call returned was not what it waited for.
        end_ns = in_order(trace.activities.end_ns, work)
        ends = take_or_unknown(end_ns, self.awaited, NO_TIME)
        known = (self.awaited != UNKNOWN) & (ends <= self.end_ns[self.awaits])
        self.awaits, self.awaited = self.awaits[known], self.awaited[known]
        by_end = np.argsort(ends[known], kind="stable")
        self.latest = np.full(len(rows), UNKNOWN, np.int64)
        self.latest[self.awaits[by_end]] = self.awaited[by_end]  # the last value written stays
        until_ns = take_or_unknown(end_ns, self.latest, NO_TIME)
        self.waited = np.flatnonzero(until_ns > self.start_ns)
        self.lag_ns = self.end_ns - np.maximum(self.start_ns, until_ns)

    def last_before(
        self, thread: Ints, trains: Collection[int], time_ns: Ints, place: Ints, among: Ints | slice = slice(None)
    ) -> Ints:
        """Return, for each thread and time, the last call of this thread or of those that train that had ended by then.

        Args:
            thread: One thread per element of the result.
            trains: The threads whose calls count for every element, see :attr:`.RankEvents.training_threads`.
            time_ns: The call ended at this time or earlier.
            place: The call comes before this position in the order of calls.
            among: Selects the calls that count; by default all.

        Returns:
            Indices into ``rows``; ``UNKNOWN`` where there is no such call.
        """
        found = np.full(len(thread), UNKNOWN, np.int64)
        for one in set(distinct(thread)) - {UNKNOWN}:
            is_own = thread == one
            rows = np.arange(len(self.rows))[among]
            own = rows[np.isin(self.thread[rows], [one, *trains])]
            at = np.searchsorted(self.end_ns[own], time_ns[is_own], side="right") - 1
            while np.any(is_later := (at >= 0) & (take_or_unknown(self.place[own], at) >= place[is_own])):
                at -= is_later  # a call that ended at that very instant can come later: step back by one
            found[is_own] = take_or_unknown(own, np.maximum(at, UNKNOWN))
        return found
