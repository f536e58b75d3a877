"""Which stream or host waits for which operation, as Nsight Systems recorded it.

What a row of the synchronization table means depends on the release: the name of the API call tells it, never
``syncType``. The record that a wait is for is told

- by the table of event records (``--cuda-event-trace=true``): the latest record of the same event by the same process
  that was called before the wait. Handles of events are reused, so it is not the first;
- else by ``eventSyncId``, which numbers the records of a process: of a wait for the latest record it exceeds the number
  of records before the wait by a constant. Where most waits have this constant, and none exceeds it, it holds. The
  stream of a record is then that of its thread's last launch before it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddp_prof.ingest.sqlite_columns import SqliteFile, constant_column
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, Sequences, count_before, fill, take_or_unknown
from ddp_prof.trace import Synchronizations, SyncKind, Trace, concatenate, distinct, distinct_rows, empty, select

EVENTS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
SYNCHRONIZATIONS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"

_CALL_NAMES = {
    "EventRecord": SyncKind.RECORD,
    "StreamWaitEvent": SyncKind.STREAM_WAIT,
    "EventSynchronize": SyncKind.HOST_WAIT_EVENT,
    "StreamSynchronize": SyncKind.HOST_WAIT_STREAM,
    "DeviceSynchronize": SyncKind.HOST_WAIT_DEVICE,
    "CtxSynchronize": SyncKind.HOST_WAIT_DEVICE,
    "Memcpy": SyncKind.COPY,
}
_COLUMNS = ("start", "correlationId", "globalPid", "deviceId", "streamId", "eventId", "eventSyncId")
_NO_IDS = (UNKNOWN, 0, 2**32 - 1)
_LAW_HOLDS = 0.5
"""Share of a process's waits that must have the constant; torch waits for most events as soon as they are recorded."""

NOT_RECORDED = "no stream waits were recorded"
NO_CALLS = "no CUDA API calls were recorded"
NO_EVENTS = "event records were not recorded (nsys profile --cuda-event-trace=true records them)"


def read_synchronizations(file: SqliteFile) -> tuple[Synchronizations, str, str | None]:
    """The calls that make a stream or the host wait, the source of this, and why it is not known (or ``None``)."""
    calls = _calls(file)
    if not len(calls):
        return calls, "none", NOT_RECORDED if CALLS in file.columns else NO_CALLS
    noted = file.read_integers(SYNCHRONIZATIONS, _COLUMNS)
    call = _match_calls(calls, noted)
    row = np.full(len(calls), UNKNOWN, np.int64)
    told = np.flatnonzero(call != UNKNOWN)[::-1]
    row[call[told]] = told  # of several rows of a call the first stays
    calls = replace(
        calls, device=take_or_unknown(noted["deviceId"], row), stream=take_or_unknown(noted["streamId"], row)
    )
    is_wait = np.isin(calls.kind, (SyncKind.STREAM_WAIT, SyncKind.HOST_WAIT_EVENT)) & (row != UNKNOWN)
    if not np.any(is_wait & (calls.kind == SyncKind.STREAM_WAIT)):
        return calls, "none", NOT_RECORDED
    events = file.read_integers(EVENTS, _COLUMNS)
    if len(events["correlationId"]):
        return _match_by_event(calls, is_wait, take_or_unknown(noted["eventId"], row), events), "cuda_events", None
    awaits = _match_by_sync_id(calls, is_wait, take_or_unknown(noted["eventSyncId"], row))
    if awaits is None:
        return calls, "none", NO_EVENTS
    return replace(calls, awaits=awaits), "event_sync_ids", None


def _calls(file: SqliteFile) -> Synchronizations:
    """All calls of interest, in the order of their numbers; their streams and records not known yet."""
    if not file.has_columns(CALLS, "nameId", "correlationId", "globalTid", "end") or not file.has_columns(
        "StringIds", "id", "value"
    ):
        return empty(Synchronizations)
    alike = " OR ".join(f"value GLOB 'cu*{name}*'" for name in _CALL_NAMES)
    kinds = {
        number: kind
        for number, name in file.rows(
            f"SELECT id, value FROM {file.bounded_table('StringIds')} WHERE typeof(id) = 'integer' AND ({alike})"
        )
        for part, kind in _CALL_NAMES.items()
        if name.startswith((f"cuda{part}", f"cu{part}"))  # cudaStreamWaitEvent_v3020, cuStreamWaitEvent_ptsz
    }
    columns = ("start", "end", "globalTid", "correlationId", "nameId")
    of_interest = f"nameId IN ({', '.join(map(str, kinds))})"
    found = file.query(", ".join(columns), CALLS, of_interest) if kinds else ()
    batches = [[file.batch_integers(batch, name).copy() for name in columns] for batch in found]
    if not batches:
        return empty(Synchronizations)
    start, end, tid, correlation, name = (np.concatenate(column) for column in zip(*batches, strict=True))
    numbers = sorted(kinds)
    calls = fill(
        Synchronizations,
        len(start),
        kind=np.array([kinds[number] for number in numbers], np.int64)[np.searchsorted(numbers, name)],
        start_ns=start,
        end_ns=np.maximum(start, end),
        process=tid >> 24 & 0xFFFFFF,
        thread=tid & 0xFFFFFF,
        correlation=correlation,
    )
    return select(calls, np.lexsort((start, correlation)))


def _match_calls(calls: Synchronizations, noted: dict[str, Ints]) -> Ints:
    """The call of each row of a table, by its number; where that comes again, the latest call before the row.

    A table without times has its rows in the order of the calls.
    """
    process, number, count = noted["globalPid"] >> 24 & 0xFFFFFF, noted["correlationId"], len(calls)
    _, group = distinct_rows(np.concatenate([calls.process, process]), np.concatenate([calls.correlation, number]))
    times = np.concatenate([calls.start_ns, noted["start"]])
    if np.all(noted["start"] == UNKNOWN):
        times = np.concatenate([count_before(group[:count]), count_before(group[count:])])
    _, place = np.unique(times, return_inverse=True)
    by_number = Sequences(group[:count], place[:count])
    latest = by_number.last_before(group[count:], place[count:] + 1)
    any_of = by_number.last_before(group[count:], np.full(len(number), len(place)))
    comes_again = np.bincount(group[:count], minlength=len(place))[group[count:]] > 1
    return np.where(number == UNKNOWN, UNKNOWN, np.where(comes_again, latest, any_of))


def _match_by_event(calls: Synchronizations, is_wait: Mask, event: Ints, noted: dict[str, Ints]) -> Synchronizations:
    """The waits and the records of the event table; a wait belongs to the latest record of its event before it."""
    process, rows = noted["globalPid"] >> 24 & 0xFFFFFF, len(noted["globalPid"])
    is_record = np.flatnonzero(calls.kind == SyncKind.RECORD)
    call = take_or_unknown(is_record, _match_calls(select(calls, is_record), noted))
    records = fill(
        Synchronizations,
        rows,
        kind=constant_column(SyncKind.RECORD, rows),
        start_ns=take_or_unknown(calls.start_ns, call, NO_TIME),
        end_ns=take_or_unknown(calls.end_ns, call, NO_TIME),
        process=process,
        thread=take_or_unknown(calls.thread, call),
        correlation=noted["correlationId"],
        device=noted["deviceId"],
        stream=noted["streamId"],
    )
    is_kept = calls.kind != SyncKind.RECORD
    waits = select(calls, is_kept)
    _, handle = distinct_rows(
        np.concatenate([process, waits.process]), np.concatenate([noted["eventId"], event[is_kept]])
    )
    places = records.correlation, waits.correlation
    if len(distinct_rows(calls.process, calls.correlation)[0]) < len(calls):  # numbers that come again tell no order
        _, place = np.unique(np.concatenate([records.start_ns, waits.start_ns]), return_inverse=True)
        places = place[:rows], place[rows:]
    found = Sequences(handle[:rows], places[0]).last_before(handle[rows:], places[1])
    return concatenate(records, replace(waits, awaits=np.where(is_wait[is_kept], found, UNKNOWN)))


def _match_by_sync_id(calls: Synchronizations, is_wait: Mask, sync_id: Ints) -> Ints | None:
    """The record of each wait by its ``eventSyncId``; ``None`` if the ids do not differ by a constant."""
    awaits = np.full(len(calls), UNKNOWN, np.int64)
    for process in distinct(calls.process):
        records = np.flatnonzero((calls.process == process) & (calls.kind == SyncKind.RECORD))
        waits = np.flatnonzero((calls.process == process) & is_wait & ~np.isin(sync_id, _NO_IDS))
        if len(waits):
            before = np.searchsorted(calls.correlation[records], calls.correlation[waits])
            beyond = sync_id[waits] - before
            if np.mean(beyond == beyond.max()) < _LAW_HOLDS:
                return None
            number = sync_id[waits] - beyond.max() - 1
            awaits[waits] = np.where(number >= 0, take_or_unknown(records, number), UNKNOWN)
    return awaits if np.any(awaits != UNKNOWN) else None


def find_streams_of_records(trace: Trace) -> Trace:
    """The trace with a stream of each record that has none: that of the last launch of its thread before it."""
    calls, activities = trace.synchronizations, trace.activities
    records = np.flatnonzero((calls.kind == SyncKind.RECORD) & (calls.stream == UNKNOWN))
    if trace.sync_source != "event_sync_ids" or not len(records):
        return trace
    launched = np.flatnonzero(trace.launching_calls != UNKNOWN)
    thread = trace.calls.lane[trace.launching_calls[launched]]
    _, group = distinct_rows(
        np.concatenate([activities.process[launched], calls.process[records]]),
        np.concatenate([thread, calls.thread[records]]),
    )
    launches = Sequences(group[: len(launched)], activities.correlation[launched])
    last = take_or_unknown(launched, launches.last_before(group[len(launched) :], calls.correlation[records]))
    device, stream = calls.device.copy(), calls.stream.copy()
    device[records], stream[records] = take_or_unknown(activities.device, last), take_or_unknown(activities.lane, last)
    return replace(trace, synchronizations=replace(calls, device=device, stream=stream))
