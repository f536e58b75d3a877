"""What streams waited for where the profiler did not record it, inferred from the order of the program's calls.

New releases of CUDA and torch hide records of events: Nsight Systems 2024 has no row for ``cudaEventRecordWithFlags``,
and with CUDA 12.9 and later torch.profiler does not know the record of any wait. The calls are in the capture, and two
rules tell most of them.

*Directly after.* If a thread records an event and then lets streams wait, without a launch or another record between,
they wait for that record. So one stream hands over to another. (A stream that computes may as well begin to wait for
several operations, so for it the other rule decides if the record directly follows a launch on another stream.)

*In the order of launches.* A stream that computes waits for what other streams run in the order in which that was
launched. So gradients are taken from their all-reduces::

    thread    launch(20)  record  launch(7)  launch(20)  record  launch(7)  wait(7)  launch(7)  wait(7)
                             `-------------------------------------------------^                   |
                                                            `--------------------------------------'

Here a record counts if its thread made no stream wait since the launch before it, and all records after one operation
count as one. A wait whose record is known takes that operation, and all that were launched before it on its stream.

The second rule is an assumption about the program. Whatever contradicts it makes the waits since the last certain point
unknown again; a point is certain if nothing is outstanding:

- a wait when nothing is outstanding, or several in a row that are more than what is outstanding;
- operations outstanding on several streams, unless the stream waits for all of them in a row;
- operations that are outstanding still at the end, or when the host waits for the device, and a wait came after them;
- an event that would have been recorded again before an earlier wait for it.

What the times contradict, :mod:`ddp_prof.analyze.core.edges` finds.

The stream of a record without a row is that of its thread's last launch. A stream that waits directly after a record
does not wait for itself: if that launch is on the waiting stream, the record is on the stream launched on before.
"""

from __future__ import annotations

from collections import Counter
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
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, SyncKind, Trace, numbers_grow

_KINDS = (SyncKind.RECORD, SyncKind.STREAM_WAIT, SyncKind.HOST_WAIT_DEVICE)


def infer_waits(trace: Trace, events: Ints | None) -> Trace:
    """Give records of events their streams, and waits of streams their records, as the order of calls tells them.

    Args:
        trace: It has the rows of calls that record events, without streams where these are not known.
        events: Number of the event of each of the trace's synchronizations, ``UNKNOWN`` if it was not recorded;
            ``None`` if waits without a record are to be left so.
    """
    calls = trace.synchronizations
    is_open = (calls.kind == SyncKind.STREAM_WAIT) & (calls.awaits == UNKNOWN) & (calls.stream != UNKNOWN)
    has_no_stream = (calls.kind == SyncKind.RECORD) & (calls.stream == UNKNOWN)
    is_awaited = np.isin(np.flatnonzero(has_no_stream), calls.awaits)
    if not is_awaited.any() and not (has_no_stream.any() and events is not None and is_open.any()):
        return trace
    trace = _find_streams_of_records(trace)
    calls, inferred = trace.synchronizations, trace.inferred
    if events is None or not is_open.any() or not numbers_grow(trace.calls):
        return trace
    awaits, device, stream = calls.awaits.copy(), calls.device.copy(), calls.stream.copy()
    is_kept = np.ones(len(calls), np.bool_)
    for process in distinct(calls.process[is_open]):
        if len(distinct(trace.activities.device[trace.activities.process == process])) > 1:
            continue  # the host waits for one device, and streams of two may have the same number
        found = _Process(trace, process, events)
        found.infer()
        for wait, record in found.awaited.items():
            awaits[wait] = record
        for record, activity in found.moved.items():
            device[record], stream[record] = trace.activities.device[activity], trace.activities.lane[activity]
        is_kept[found.needless] = False
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


def _find_streams_of_records(trace: Trace) -> Trace:
    """Give each record without a stream that of the last launch of its thread before it."""
    calls, activities = trace.synchronizations, trace.activities
    records = np.flatnonzero((calls.kind == SyncKind.RECORD) & (calls.stream == UNKNOWN))
    last = _Launches(trace, records, by_thread=True).last
    device, stream, inferred = calls.device.copy(), calls.stream.copy(), np.zeros(len(calls), np.bool_)
    device[records], stream[records] = take_or_unknown(activities.device, last), take_or_unknown(activities.lane, last)
    inferred[records] = True
    return replace(trace, synchronizations=replace(calls, device=device, stream=stream), inferred=inferred)


class _Launches:
    """What was launched before and after calls, by the threads or by the processes that made them; rows of activities.

    ``other`` is what was launched last on another stream than ``last``.
    """

    def __init__(self, trace: Trace, calls: Ints, *, by_thread: bool) -> None:
        activities, own = trace.activities, trace.synchronizations
        launched = np.flatnonzero((trace.launching_calls != UNKNOWN) & (activities.correlation != UNKNOWN))
        owners = [(activities.process[launched], own.process[calls])]
        if by_thread:
            owners.append((trace.calls.lane[trace.launching_calls[launched]], own.thread[calls]))
        _, group = distinct_rows(*(np.concatenate(pair) for pair in owners))
        launches = Sequences(group[: len(launched)], activities.correlation[launched])
        order = launches.order
        begins = begins_run(group[order], activities.lane[launched[order]])
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
    """What a thread did last.

    Attributes:
        launch: The activity that it launched last.
        record: The record that it made since, if only waits for this record followed, and its ``event``, if known.
        follows_launch: Whether it made no stream that works wait since that launch.
    """

    launch: int = UNKNOWN
    record: int = UNKNOWN
    event: int = UNKNOWN
    follows_launch: bool = True


class _Call(NamedTuple):
    """A call.

    Attributes:
        row: Its row in the trace's synchronizations; most others are columns of that table.
        launch: The activity that its thread launched last, and ``other``, the last one on another stream.
        next_stream: Stream of the thread's next launch.
        launch_place: Place of the launch of ``launch``.
        work_place, elsewhere_place: Places of the last launch on the call's stream, and on any other.
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
    """Goes through those calls of one process that record events and wait, in their order.

    Attributes:
        awaited: The records that were found, by wait.
        moved: Records that cannot be on the stream of their thread's last launch: an activity on their stream.
        needless: Waits for nothing that still ran: since the host waited for the device, only their stream got work.
    """

    def __init__(self, trace: Trace, process: int, event: Ints) -> None:
        calls, activities = trace.synchronizations, trace.activities
        rows = np.flatnonzero((calls.process == process) & np.isin(calls.kind, _KINDS) & (calls.correlation > 0))
        rows = rows[np.argsort(calls.correlation[rows], kind="stable")]
        own = activities.process == process
        launched = np.flatnonzero(own & (trace.launching_calls != UNKNOWN) & (activities.correlation != UNKNOWN))
        by_thread, of_all = (_Launches(trace, rows, by_thread=one) for one in (True, False))
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
        """Records that a stream with work awaits on the stream of their thread's last launch."""
        self._either: dict[int, list[tuple[_Call, _Call]]] = {}
        """By stream: waits directly after a record that is on that stream or on the one launched on before, with it."""
        self._synchronized: _Call | None = None
        self._last: dict[int, int] = {}
        """By event: the place of the last wait for it."""
        self._waited: dict[tuple[int, int], int] = {}
        """By stream and event: the last wait since the host waited for the device."""

    def infer(self) -> None:
        for call in self._calls:
            if call.kind == SyncKind.HOST_WAIT_DEVICE:
                self._settle(call)
                continue
            thread = self._threads.setdefault(call.thread, _Thread())
            if thread.launch != call.launch:
                thread.launch, thread.record, thread.follows_launch = call.launch, UNKNOWN, True
            if call.kind == SyncKind.STREAM_WAIT:
                self._wait(call, thread)
                continue
            thread.record, thread.event = call.row, call.event
            if self._is_hidden(call) and thread.follows_launch and thread.launch != UNKNOWN:
                for stream, queue in self._queues.items():
                    if stream != call.stream:
                        queue.record(call.stream, call.launch_place, Recorded(call.row, call.place))
        self._settle()

    def _settle(self, call: _Call | None = None) -> None:
        for queue in self._queues.values():
            queue.settle()
        self._waited.clear()
        self._synchronized = call

    def _wait(self, call: _Call, thread: _Thread) -> None:
        queue, awaited, directly = self._queues.get(call.stream), call.awaits, UNKNOWN
        if awaited == UNKNOWN and self._is_needless(call):
            self.needless.append(call.row)
            return
        if awaited == UNKNOWN and thread.record != UNKNOWN and call.thread != UNKNOWN:
            record = self._records[thread.record]
            is_same = UNKNOWN in (call.event, thread.event) or call.event == thread.event
            # A stream that computes may as well begin to wait in the order of launches, right after any record.
            may_be_next = queue is not None and queue.holds(record.stream, record.launch_place)
            may_be_next |= queue is not None and call.stream == self._stream_of(record) and not queue.is_empty
            if is_same and not may_be_next:
                can_await = self._can_await(call, record)
                directly = UNKNOWN if can_await is False else record.row
                if can_await:
                    awaited = self.awaited[call.row] = record.row
                    self._subsume(call, self._stream_of(record))
        if thread.record not in (awaited, directly):
            thread.record = UNKNOWN
        elif call.event != UNKNOWN:
            thread.event = call.event
        if queue is not None or thread.record == UNKNOWN:
            thread.follows_launch = False
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
        since = self._synchronized
        return since is not None and call.elsewhere_place < since.place and since.end_ns <= call.start_ns

    def _is_hidden(self, record: _Call) -> bool:
        return self._is_inferred is not None and bool(self._is_inferred[record.row])

    def _stream_of(self, record: _Call) -> int:
        return int(self._stream[self.moved[record.row]]) if record.row in self.moved else record.stream

    def _can_await(self, call: _Call, record: _Call) -> bool | None:
        """Whether a wait directly after a record can be for it, which may tell that record's stream.

        ``None`` means that it is, but the record is on either of two streams.
        """
        stream, on = call.stream, self._stream_of(record)
        if UNKNOWN in (stream, on):
            return False
        if stream not in self._works or not self._is_hidden(record):
            return True
        if stream != on:
            self._stays.add(record.row)
            # Between two streams that only communicate, the record may be on the one that both get their work from.
            return not {stream, on} <= self._communicates
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
        """A wait for the same stream follows, with no launch between: what an earlier wait adds is nothing."""
        for earlier, record in self._either.pop(call.stream, ()):
            if call.work_place < earlier.place and on == int(self._stream[record.other]):
                self.awaited[earlier.row] = record.row


def _places_before(trace: Trace, launched: Ints, rows: Ints) -> Ints:
    """Return the place of the last launch on the stream of each call before it, ``UNKNOWN`` if there is none."""
    activities, calls = trace.activities, trace.synchronizations
    _, group = distinct_rows(np.concatenate([activities.lane[launched], calls.stream[rows]]))
    launches = Sequences(group[: len(launched)], activities.correlation[launched])
    last = take_or_unknown(launched, launches.last_before(group[len(launched) :], calls.correlation[rows]))
    return take_or_unknown(activities.correlation, last)
