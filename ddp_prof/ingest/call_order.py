"""Infers what streams waited for from the order of the program's calls, where the profiler did not record it.

A stream waits for a CUDA event. A *record* is the call that puts the event behind the work which another stream has got
so far, so the wait ends when that work ends. New releases of CUDA and torch hide records: Nsight Systems 2024 has no
row for ``cudaEventRecordWithFlags``, and with CUDA 12.9 and later torch.profiler does not know the record of any wait.
But the calls are in the capture, and two rules find the records of most waits.

*Directly after.* If a thread records an event and then lets streams wait, without a launch or another record in
between, the streams wait for that record. In this way one stream hands over to another. (For a stream that computes,
such a wait may also be the first of several waits for earlier operations. So if the record directly follows a launch on
another stream, the next rule decides about this stream.)

*In the order of launches.* A stream that computes waits for the operations of other streams in the order in which they
were launched. In this way gradients are taken from their all-reduces::

    thread    launch(20)  record  launch(7)  launch(20)  record  launch(7)  wait(7)  launch(7)  wait(7)
                             `-------------------------------------------------^                   |
                                                            `--------------------------------------'

The numbers are streams: 20 communicates, 7 computes; the lines join a record and the wait for it. For this rule, a
record counts if its thread let no stream wait since its last launch, and all records after one operation count as one.
An operation is *outstanding* for a stream if its end was recorded and the stream has not waited for it. After a wait
whose record is known, that operation and all earlier operations of its stream are no longer outstanding.

The second rule is an assumption about the program. Each of these contradictions makes the waits since the last certain
point unknown again; a point is certain if nothing is outstanding:

- a wait when nothing is outstanding, or more waits in a row than operations are outstanding;
- operations outstanding on several streams, unless the stream waits for all of them in a row;
- operations that are still outstanding at the end, or when the host waits for the device, if a wait came after them;
- an event that would have been recorded again before an earlier wait for it.

Contradictions with the recorded times are found later, by :mod:`ddp_prof.analyze.core.edges`.

If a record's stream is not known, it is the stream of its thread's last launch. A stream that waits directly after a
record does not wait for itself: if that launch is on the waiting stream, the record is on the stream on which the
thread launched before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ddp_prof.ingest.wait_queue import Ask, Recorded, WaitQueue
from ddp_prof.table import (
    UNKNOWN,
    Ints,
    Sequences,
    begins_run,
    distinct,
    distinct_rows,
    is_in,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, SyncKind, Trace, numbers_grow

_KINDS = (SyncKind.RECORD, SyncKind.STREAM_WAIT, SyncKind.HOST_WAIT_DEVICE)


def infer_waits(trace: Trace, events: Ints | None) -> Trace:
    """Return the trace with inferred streams of event records, and with inferred records of stream waits.

    Args:
        trace: Its synchronizations include all calls that record events, with ``UNKNOWN`` for a stream that is not
            known.
        events: Number of the event of each of the trace's synchronizations, ``UNKNOWN`` if it was not recorded;
            ``None`` if no records of waits are to be inferred.
    """
    calls = trace.synchronizations
    # Waits without a record, records without a stream, and which of these records a known wait is for.
    is_open = (calls.kind == SyncKind.STREAM_WAIT) & (calls.awaits == UNKNOWN) & (calls.stream != UNKNOWN)
    hidden = np.flatnonzero((calls.kind == SyncKind.RECORD) & (calls.stream == UNKNOWN))
    asked = set(distinct(calls.process[hidden[np.isin(hidden, calls.awaits)]]))
    if events is not None:
        asked |= set(distinct(calls.process[hidden])) & set(distinct(calls.process[is_open]))
    if not asked:
        return trace
    # First the streams of records, from which the records of waits are then found, process by process.
    told = asked - _lossy_processes(trace)
    trace = _find_streams_of_records(trace, told)
    calls, inferred = trace.synchronizations, trace.inferred
    if events is None or not is_open.any() or not numbers_grow(trace.calls):
        return trace
    awaits, device, stream = calls.awaits.copy(), calls.device.copy(), calls.stream.copy()
    is_kept = np.ones(len(calls), np.bool_)
    for process in distinct(calls.process[is_open]):
        if process not in told:
            continue
        if len(distinct(trace.activities.device[trace.activities.process == process])) > 1:
            continue  # a host wait is for one device only, and streams of two devices may have the same number
        found = _Process(trace, process, events)
        found.infer()
        for wait, record in found.awaited.items():
            awaits[wait] = record
        for record, activity in found.moved.items():
            device[record], stream[record] = trace.activities.device[activity], trace.activities.lane[activity]
        is_kept[found.needless] = False
    # Leave out the needless waits; so rows that ``awaits`` refers to get new numbers.
    is_found = is_open & (awaits != UNKNOWN)
    if is_kept.all() and not is_found.any():
        return trace
    row_of = positions(np.flatnonzero(is_kept), len(calls))
    calls = replace(calls, awaits=take_or_unknown(row_of, awaits), device=device, stream=stream)
    return replace(
        trace,
        synchronizations=select(calls, is_kept),
        inferred=(is_found if inferred is None else inferred | is_found)[is_kept],
        sync_source="call_order",
        sync_reason=None,
    )


def _lossy_processes(trace: Trace) -> frozenset[int]:
    """Return the processes whose order of launches is not known, because the calls of some were not recorded.

    That is so if an activity without its call has a number between those of recorded calls: it was launched while they
    were recorded. An earlier one was launched before the recording began.
    """
    activities, found = trace.activities, list[int]()
    is_lost = (trace.launching_calls == UNKNOWN) & (activities.correlation != UNKNOWN)
    for process in distinct(activities.process[is_lost]):
        own = [of.correlation[of.process == process] for of in (trace.calls, trace.synchronizations)]
        recorded = np.concatenate(own)[np.concatenate(own) != UNKNOWN]
        lost = activities.correlation[is_lost & (activities.process == process)]
        if len(recorded) and np.any((lost > recorded.min()) & (lost < recorded.max())):
            found.append(process)
    return frozenset(found)


def _find_streams_of_records(trace: Trace, processes: Collection[int]) -> Trace:
    """Return the trace in which each record of ``processes`` has a stream: that of its thread's last launch before it.

    Records that have one already keep it.
    """
    calls, activities = trace.synchronizations, trace.activities
    is_hidden = (calls.kind == SyncKind.RECORD) & (calls.stream == UNKNOWN)
    records = np.flatnonzero(is_hidden & is_in(calls.process, sorted(processes)))
    last = _Launches(trace, records, by_thread=True).last
    device, stream, inferred = calls.device.copy(), calls.stream.copy(), np.zeros(len(calls), np.bool_)
    device[records], stream[records] = take_or_unknown(activities.device, last), take_or_unknown(activities.lane, last)
    inferred[records] = True
    return replace(trace, synchronizations=replace(calls, device=device, stream=stream), inferred=inferred)


class _Launches:
    """For each of some calls, which activities were launched just before and after it: rows of the activities.

    Args:
        trace: Holds the calls among its synchronizations.
        calls: Rows of the calls in the synchronizations.
        by_thread: Whether only launches of the thread that made a call count; else those of its process.

    Attributes:
        last: The last activity that was launched before each call, ``UNKNOWN`` if there is none.
        other: The last activity before each call that was launched on another stream than ``last``.
        next: The first activity that was launched after each call.
    """

    def __init__(self, trace: Trace, calls: Ints, *, by_thread: bool) -> None:
        """Find the activities; the class describes parameters and results."""
        activities, own = trace.activities, trace.synchronizations
        launched = np.flatnonzero((trace.launching_calls != UNKNOWN) & (activities.correlation != UNKNOWN))
        # Number the processes or threads in the same way for launches and calls: group is first that of each launch.
        owners = [(activities.process[launched], own.process[calls])]
        if by_thread:
            owners.append((trace.calls.lane[trace.launching_calls[launched]], own.thread[calls]))
        _, group = distinct_rows(*(np.concatenate(pair) for pair in owners))
        launches = Sequences(group[: len(launched)], activities.correlation[launched])
        order = launches.order
        begins = begins_run(group[order], activities.lane[launched[order]])
        # A run is launches on one stream in a row. The running maximum is the position where each launch's run began;
        # the launch before that position is on another stream, or of another group.
        before = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0)) - 1
        is_own = (before >= 0) & (group[order[before]] == group[order])
        other = np.full(len(launched), UNKNOWN, np.int64)
        other[order] = np.where(is_own, order[before], UNKNOWN)
        at = group[len(launched) :], own.correlation[calls]
        last = launches.last_before(*at)
        self.last = take_or_unknown(launched, last)
        self.other = take_or_unknown(launched, take_or_unknown(other, last))
        self.next = take_or_unknown(launched, launches.first_after(*at))


@dataclass
class _Thread:
    """The last calls of a thread, up to the call that is looked at.

    Attributes:
        launch: The activity that the thread launched last, a row of the activities.
        record: The last record that the thread made since that launch, a row of the synchronizations; ``UNKNOWN`` if
            there is none, or if the thread then let a stream wait for something else.
        event: Number of the event of ``record``, if it is known.
        follows_launch: Whether the thread, since that launch, let no stream that computes wait, and no stream for
            anything but ``record``.
    """

    launch: int = UNKNOWN
    record: int = UNKNOWN
    event: int = UNKNOWN
    follows_launch: bool = True


class _Call(NamedTuple):
    """A call that records an event, or makes a stream or the host wait.

    A *place* is the number of a call (its correlation): a process numbers its calls in their order.

    Attributes:
        row: Row of the call in the trace's synchronizations.
        kind, thread, stream, awaits, start_ns, end_ns: Columns of that table.
        place: Number of the call.
        event: Number of its event, ``UNKNOWN`` if that was not recorded.
        launch: The activity that its thread launched last, a row of the activities.
        other: The last activity that its thread launched on another stream than ``launch``.
        next_stream: Stream of the thread's next launch.
        launch_place: Place of the call that launched ``launch``.
        work_place: Place of the last launch on the call's stream.
        elsewhere_place: Place of the process's last launch on any other stream.
    """

    row: int
    kind: int
    thread: int
    place: int
    stream: int
    event: int
    awaits: int
    launch: int
    other: int
    next_stream: int
    launch_place: int
    work_place: int
    elsewhere_place: int
    start_ns: int
    end_ns: int


class _Process:
    """Applies the two rules to one process: goes through its calls that record events or wait, in their order.

    Args:
        trace: The trace.
        process: The process.
        event: Number of the event of each synchronization, ``UNKNOWN`` if it was not recorded.

    Attributes:
        awaited: The record that was found for each wait; both are rows of the synchronizations.
        moved: Records that cannot be on the stream of their thread's last launch; for each, an activity on the record's
            true stream.
        needless: Waits that waited for nothing: since the host waited for the whole device, only the waiting stream got
            work.
    """

    def __init__(self, trace: Trace, process: int, event: Ints) -> None:
        """List the process's calls with what was launched around them; the class describes the parameters."""
        calls, activities = trace.synchronizations, trace.activities
        # The calls in their order, and what the process launched.
        rows = np.flatnonzero((calls.process == process) & is_in(calls.kind, _KINDS) & (calls.correlation > 0))
        rows = rows[np.argsort(calls.correlation[rows], kind="stable")]
        own = activities.process == process
        launched = np.flatnonzero(own & (trace.launching_calls != UNKNOWN) & (activities.correlation != UNKNOWN))
        by_thread, of_all = (_Launches(trace, rows, by_thread=one) for one in (True, False))
        # The process's last launch before each call on another stream than the call's.
        is_elsewhere = take_or_unknown(activities.lane, of_all.last) != calls.stream[rows]
        elsewhere = np.where(is_elsewhere, of_all.last, of_all.other)
        self._calls = [
            _Call(*values)
            for values in zip(
                rows.tolist(),
                calls.kind[rows].tolist(),
                calls.thread[rows].tolist(),
                calls.correlation[rows].tolist(),
                calls.stream[rows].tolist(),
                event[rows].tolist(),
                calls.awaits[rows].tolist(),
                by_thread.last.tolist(),
                by_thread.other.tolist(),
                take_or_unknown(activities.lane, by_thread.next).tolist(),
                take_or_unknown(activities.correlation, by_thread.last).tolist(),
                _places_before(trace, launched, rows).tolist(),
                take_or_unknown(activities.correlation, elsewhere).tolist(),
                calls.start_ns[rows].tolist(),
                calls.end_ns[rows].tolist(),
                strict=True,
            )
        ]
        self._records = {call.row: call for call in self._calls if call.kind == SyncKind.RECORD}
        self._is_inferred = trace.inferred
        self._stream = activities.lane
        # Streams that have work, that compute, that only communicate; number of streams on which each thread launches.
        self._works = set(distinct(activities.lane[own]))
        computes = set(distinct(activities.lane[own & (activities.category == Category.COMPUTE)]))
        communicates = set(distinct(activities.lane[own & (activities.category == Category.COMMUNICATION)]))
        self._communicates = communicates - computes
        first, _ = distinct_rows(trace.calls.lane[trace.launching_calls[launched]], activities.lane[launched])
        self._streams_of = Counter(trace.calls.lane[trace.launching_calls[launched[first]]].tolist())
        self.awaited: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        self.needless: list[int] = []
        self._queues = {stream: WaitQueue(self.awaited) for stream in computes}
        self._threads: dict[int, _Thread] = {}
        self._stays: set[int] = set()
        """Records that are on the stream of their thread's last launch, because another stream waits for them."""
        self._either: dict[int, list[tuple[_Call, _Call]]] = {}
        """By stream: its waits directly after a record, and that record, which is either on the same stream or on the
        stream on which its thread launched before."""
        self._synchronized: _Call | None = None
        """The last call in which the host waited for the device."""
        self._last: dict[int, int] = {}
        """By event: the place of the last wait for it."""
        self._waited: dict[tuple[int, int], int] = {}
        """By stream and event: the last wait since the host waited for the device, a row of the synchronizations."""

    def infer(self) -> None:
        """Go through all calls once, and fill ``awaited``, ``moved`` and ``needless``."""
        for call in self._calls:
            if call.kind == SyncKind.HOST_WAIT_DEVICE:
                self._settle(call)
                continue
            thread = self._threads.setdefault(call.thread, _Thread())
            if thread.launch != call.launch:  # the thread has launched something since its last call
                thread.launch, thread.record, thread.follows_launch = call.launch, UNKNOWN, True
            if call.kind == SyncKind.STREAM_WAIT:
                self._wait(call, thread)
                continue
            thread.record, thread.event = call.row, call.event
            if self._is_hidden(call) and thread.follows_launch and thread.launch != UNKNOWN:
                self._record(call)
        self._settle()

    def _record(self, call: _Call) -> None:
        """Note that from the record ``call`` on, other streams can await the end of its thread's last launch."""
        for stream, queue in self._queues.items():
            if stream != call.stream:
                queue.record(call.stream, call.launch_place, Recorded(call.row, call.place))

    def _settle(self, call: _Call | None = None) -> None:
        """Note that nothing is outstanding, because ``call`` lets the host wait for the device or the trace ends."""
        for queue in self._queues.values():
            queue.settle()
        self._waited.clear()
        self._synchronized = call

    def _wait(self, call: _Call, thread: _Thread) -> None:
        """Find what ``call``, a wait of a stream, waits for: directly, or by asking the queue of the stream."""
        # queue: of a stream that computes. awaited: the record of this wait. directly: the record before the wait.
        queue, awaited, directly = self._queues.get(call.stream), call.awaits, UNKNOWN
        if awaited == UNKNOWN and self._is_needless(call):
            self.needless.append(call.row)
            return
        # The rule "directly after": the thread has just made a record, of the same event if events are known.
        if awaited == UNKNOWN and thread.record != UNKNOWN and call.thread != UNKNOWN:
            record = self._records[thread.record]
            is_same = UNKNOWN in (call.event, thread.event) or call.event == thread.event
            # On a stream that computes, this may be the first of several waits in the order of launches.
            may_be_next = queue is not None and queue.holds(record.stream, record.launch_place)
            may_be_next |= queue is not None and call.stream == self._stream_of(record) and not queue.is_empty
            if is_same and not may_be_next:
                can_await = self._can_await(call, record)
                directly = UNKNOWN if can_await is False else record.row
                if can_await:
                    awaited = self.awaited[call.row] = record.row
                    self._subsume(call, self._stream_of(record))
        # Note what this wait means for the next calls of the thread.
        if thread.record not in (awaited, directly):
            thread.record = UNKNOWN
        elif call.event != UNKNOWN:
            thread.event = call.event
        if queue is not None or thread.record == UNKNOWN:
            thread.follows_launch = False
        # Tell the queue of a stream that computes: ask it for the record, or take what is awaited as known.
        if queue is not None:
            if awaited == UNKNOWN:
                earlier = self._waited.get((call.stream, call.event))
                ask = Ask(call.row, call.place, self._last.get(call.event, 0), earlier)
                queue.ask(ask, follows_launch=bool(queue.asked) and call.work_place > queue.asked[-1].place)
            elif awaited in self._records:
                record = self._records[awaited]
                queue.take(self._stream_of(record), record.place)
        if call.event != UNKNOWN:
            self._last[call.event] = call.place
            self._waited[call.stream, call.event] = call.row

    def _is_needless(self, call: _Call) -> bool:
        """Return whether no other stream got work since the host waited for the device, and that wait has ended."""
        since = self._synchronized
        return since is not None and call.elsewhere_place < since.place and since.end_ns <= call.start_ns

    def _is_hidden(self, record: _Call) -> bool:
        """Return whether the stream of a record is inferred and was not recorded."""
        return self._is_inferred is not None and bool(self._is_inferred[record.row])

    def _stream_of(self, record: _Call) -> int:
        """Return the stream of a record, as far as it is known by now."""
        return int(self._stream[self.moved[record.row]]) if record.row in self.moved else record.stream

    def _can_await(self, call: _Call, record: _Call) -> bool | None:
        """Return whether ``call``, a wait directly after ``record``, can be for it; this may tell the record's stream.

        ``None`` means that the wait is for the record, but that the record can be on either of two streams.
        """
        stream, on = call.stream, self._stream_of(record)  # the stream that waits, and the record's as far as known
        if UNKNOWN in (stream, on):
            return False
        if stream not in self._works or not self._is_hidden(record):
            return True
        if stream != on:
            self._stays.add(record.row)
            # If both streams only communicate, the record may be on a third stream, from which both get their work.
            return not {stream, on} <= self._communicates
        # The wait would be for its own stream, so the record is on the stream on which the thread launched before.
        if record.row in self._stays or record.row in self.moved or record.other == UNKNOWN:
            return False
        if stream not in self._communicates and self._streams_of[record.thread] > 2:
            return False  # it may be on any of the others
        if {stream, int(self._stream[record.other])} <= self._communicates:
            return False
        if call.next_stream != stream:
            self._either.setdefault(stream, []).append((call, record))
            return None
        self.moved[record.row] = record.other
        return True

    def _subsume(self, call: _Call, on: int) -> None:
        """Settle earlier waits of ``call``'s stream for a record on either of two streams, if that makes no difference.

        It makes none if ``call`` is a wait for the second of these streams, ``on``, and the waiting stream got no work
        in between: then the earlier wait adds nothing to this one, on whichever stream its record is.
        """
        for earlier, record in self._either.pop(call.stream, ()):
            if call.work_place < earlier.place and on == int(self._stream[record.other]):
                self.awaited[earlier.row] = record.row


def _places_before(trace: Trace, launched: Ints, rows: Ints) -> Ints:
    """Return the place (number) of the last launch before each call on the call's stream, ``UNKNOWN`` without one.

    Args:
        trace: The trace.
        launched: Rows of the activities that were launched by a recorded call of the process.
        rows: Rows of the calls in the synchronizations.
    """
    activities, calls = trace.activities, trace.synchronizations
    _, group = distinct_rows(np.concatenate([activities.lane[launched], calls.stream[rows]]))
    launches = Sequences(group[: len(launched)], activities.correlation[launched])
    last = take_or_unknown(launched, launches.last_before(group[len(launched) :], calls.correlation[rows]))
    return take_or_unknown(activities.correlation, last)
