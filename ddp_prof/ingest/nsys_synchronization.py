"""Finds in an export of Nsight Systems what each wait of a stream or of the host is for.

A *record* is a call that records a CUDA event in a stream; a wait for the event waits for the work before the record.
The meaning of the column ``syncType`` depends on the release, so the name of the API call decides what kind of wait a
row is. The record that a wait is for is found

- in the table of event records (``--cuda-event-trace=true``): it is the process's latest record of the same event
  before the wait. It is not the first one, because handles of events are reused. Releases before 2025 leave records by
  ``cudaEventRecordWithFlags`` out, which torch calls since 2.9: of these, only the calls are known;
- else by ``eventSyncId``, which numbers the records of a process. If a wait is for the latest record, its id exceeds
  the number of records before the wait by a constant. The ids are trusted if most waits have the same difference and
  no wait has a larger one;
- else, if there is a table of event records that lacks some, by the order of the calls, see :mod:`.call_order`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ddp_prof.growing_column import in_parts
from ddp_prof.ingest.export_tables import ExportTables
from ddp_prof.ingest.names import ordering_kind
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Sequences,
    begins_run,
    concatenate_columns,
    constant_column,
    count_before,
    fill,
    is_in,
    positions,
    take_or_unknown,
)
from ddp_prof.trace import Synchronizations, SyncKind, concatenate, distinct, distinct_rows, empty, select

EVENTS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
SYNCHRONIZATIONS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"

_COLUMNS = ("start", "correlationId", "globalPid", "deviceId", "streamId", "eventId", "eventSyncId")
_NO_IDS = (UNKNOWN, 0, 2**32 - 1)
"""Values that stand for no id."""
_LEAST_SHARE = 0.5
"""At least this fraction of a process's waits must have the same difference, because torch waits for most events right
after their record."""

NOT_RECORDED = "no stream waits were recorded"
NO_CALLS = "no CUDA API calls were recorded"
NO_EVENTS = "event records were not recorded (nsys profile --cuda-event-trace=true records them)"


def process_ids(global_id: Ints) -> Ints:
    """Return the process in each global id; if all are of one process, the usual case, the column takes no memory."""
    low, high = (int(edge) >> 24 for edge in (global_id.min(), global_id.max())) if len(global_id) else (0, 0)
    if low == high:
        return constant_column(low & 0xFFFFFF, len(global_id))
    return in_parts(len(global_id), lambda rows: (global_id[rows] >> 24) & 0xFFFFFF)


def thread_ids(global_id: Ints) -> Ints:
    """Return the thread in each global id."""
    return in_parts(len(global_id), lambda rows: global_id[rows] & 0xFFFFFF)


class Found(NamedTuple):
    """The calls that order work, and what is known of them.

    Attributes:
        calls: The calls.
        source: Where the records of waits were found, see :attr:`.Trace.sync_source`.
        reason: Why records are not known; ``None`` if they are.
        events: Number of the event of each call, ``UNKNOWN`` if it was not recorded; ``None`` if there is no table of
            event records.
    """

    calls: Synchronizations
    source: str
    reason: str | None = None
    events: Ints | None = None


def read_rows(file: ExportTables) -> dict[str, dict[str, Ints]]:
    """Return the columns of the tables of waits and of event records: by table, then by column."""
    return {table: file.read_integers(table, _COLUMNS) for table in (SYNCHRONIZATIONS, EVENTS)}


def find_synchronizations(
    columns: Mapping[str, Ints], strings: Mapping[int, str], tables: Mapping[str, dict[str, Ints]], *, has_calls: bool
) -> Found:
    """Return the calls that order work, with their streams and the records that waits are for.

    Args:
        columns: Columns of all calls of the export; without rows if the table of calls lacks one of the columns.
        strings: The strings of the export by id.
        tables: What :func:`read_rows` returned.
        has_calls: Whether the export has a table of calls.
    """
    calls = _calls(columns, strings)
    if not len(calls):
        return Found(calls, "none", NOT_RECORDED if has_calls else NO_CALLS)
    # Find the row of each call in the table of waits, which tells device and stream.
    recorded, events = tables[SYNCHRONIZATIONS], tables[EVENTS]
    call = _match_calls(calls, recorded)
    row = np.full(len(calls), UNKNOWN, np.int64)
    matched = np.flatnonzero(call != UNKNOWN)[::-1]
    row[call[matched]] = matched  # reversed, so that a call with several rows gets the first row, written last
    calls = replace(
        calls, device=take_or_unknown(recorded["deviceId"], row), stream=take_or_unknown(recorded["streamId"], row)
    )
    is_wait = is_in(calls.kind, (SyncKind.STREAM_WAIT, SyncKind.HOST_WAIT_EVENT)) & (row != UNKNOWN)
    if not np.any(is_wait & (calls.kind == SyncKind.STREAM_WAIT)):
        return Found(calls, "none", NOT_RECORDED)
    by_number = _match_by_sync_id(calls, is_wait, take_or_unknown(recorded["eventSyncId"], row))
    if len(events["correlationId"]):
        of_call, from_start = take_or_unknown(recorded["eventId"], row), _processes_from_start(columns, strings)
        return _match_by_event(calls, is_wait, of_call, events, by_number, from_start)
    if by_number is None:
        return Found(calls, "none", NO_EVENTS)
    return Found(replace(calls, awaits=by_number), "event_sync_ids")


def _calls(columns: Mapping[str, Ints], strings: Mapping[int, str]) -> Synchronizations:
    """Return the calls that order work (:func:`.ordering_kind`), sorted by number, without streams and records."""
    kinds = {number: kind for number, name in strings.items() if (kind := ordering_kind(name)) is not None}
    # The calls with these names; numbers are the ids of the names, sorted for the look-up of the kinds.
    numbers = np.array(sorted(kinds), np.int64)
    rows = np.flatnonzero(is_in(columns["nameId"], numbers))
    if not len(rows):
        return empty(Synchronizations)
    start, end, tid, name = (columns[one][rows] for one in ("start", "end", "globalTid", "nameId"))
    calls = fill(
        Synchronizations,
        len(rows),
        kind=np.array([kinds[number] for number in numbers.tolist()], np.int64)[np.searchsorted(numbers, name)],
        start_ns=start,
        end_ns=np.maximum(start, end),
        process=process_ids(tid),
        thread=thread_ids(tid),
        correlation=columns["correlationId"][rows],
    )
    return select(calls, np.lexsort((start, calls.correlation)))


def _match_calls(calls: Synchronizations, table: dict[str, Ints]) -> Ints:
    """Return for each row of a table the call with its number, a row of ``calls``; ``UNKNOWN`` if there is none.

    If several calls of the process have that number, it is the latest call before the row. If the table has no times,
    its rows with one number are taken to be in the order of the calls.
    """
    process, number, count = process_ids(table["globalPid"]), table["correlationId"], len(calls)
    _, group = distinct_rows(concatenate_columns([calls.process, process]), np.concatenate([calls.correlation, number]))
    of_calls, of_rows = group[:count], group[count:]
    has_several = np.bincount(of_calls, minlength=len(group))[of_rows] > 1
    if not has_several.any():  # as in most captures: times do not matter
        return np.where(number == UNKNOWN, UNKNOWN, positions(of_calls, len(group))[of_rows])
    times = np.concatenate([calls.start_ns, table["start"]])
    if np.all(table["start"] == UNKNOWN):  # use positions among the rows with the same number instead of times
        times = np.concatenate([count_before(of_calls), count_before(of_rows)])
    _, place = np.unique(times, return_inverse=True)  # small numbers in the order of the times, as Sequences needs
    by_number = Sequences(of_calls, place[:count])
    # The latest call before each row, and any call with its number: the times of call and row may disagree.
    latest = by_number.last_before(of_rows, place[count:] + 1)
    any_of = by_number.last_before(of_rows, np.full(len(number), len(place)))
    return np.where(number == UNKNOWN, UNKNOWN, np.where(has_several, latest, any_of))


def _match_by_event(
    calls: Synchronizations,
    is_wait: Mask,
    event: Ints,
    events: dict[str, Ints],
    by_number: Ints | None,
    from_start: list[int],
) -> Found:
    """Return the records in the event table, the records that it lacks, and the waits, in this order.

    Each wait is for the latest record of its event before it. A wait for an event that is not in the table is for the
    record that ``by_number`` tells.

    Args:
        calls: The calls that order work.
        is_wait: Which of them wait for an event and have a row in the table of waits.
        event: Number of the event of each call, from the table of waits.
        events: Columns of the table of event records.
        by_number: The record of each wait by ``eventSyncId``, a row of ``calls``; ``None`` if these are not trusted.
        from_start: Processes that were recorded from their start.
    """
    # The records in the event table, with the times and threads of their calls.
    process, rows = process_ids(events["globalPid"]), len(events["globalPid"])
    is_record = np.flatnonzero(calls.kind == SyncKind.RECORD)
    call = take_or_unknown(is_record, _match_calls(select(calls, is_record), events))
    records = fill(
        Synchronizations,
        rows,
        kind=constant_column(SyncKind.RECORD, rows),
        start_ns=take_or_unknown(calls.start_ns, call, NO_TIME),
        end_ns=take_or_unknown(calls.end_ns, call, NO_TIME),
        process=process,
        thread=take_or_unknown(calls.thread, call),
        correlation=events["correlationId"],
        device=events["deviceId"],
        stream=events["streamId"],
    )
    is_lacking = calls.kind == SyncKind.RECORD
    is_lacking[call[call != UNKNOWN]] = False
    lacks = np.flatnonzero(is_lacking)
    # The waits, and for each the latest record of the same event of the same process before it.
    is_kept = calls.kind != SyncKind.RECORD
    waits = select(calls, is_kept)
    _, handle = distinct_rows(
        concatenate_columns([process, waits.process]), np.concatenate([events["eventId"], event[is_kept]])
    )
    places = records.correlation, waits.correlation
    # Repeated numbers give no order. Calls are sorted by number, so most often comparing neighbours tells.
    may_repeat = not begins_run(calls.correlation).all()
    if may_repeat and len(distinct_rows(calls.process, calls.correlation)[0]) < len(calls):
        _, place = np.unique(np.concatenate([records.start_ns, waits.start_ns]), return_inverse=True)
        places = place[:rows], place[rows:]
    found = Sequences(handle[:rows], places[0]).last_before(handle[rows:], places[1])
    if by_number is not None:  # rows of calls become rows of the result: table first, then the records that it lacks
        row_of = positions(np.concatenate([call, lacks]), len(calls))
        found = np.where(found == UNKNOWN, take_or_unknown(row_of, by_number[is_kept]), found)
    waits = replace(waits, awaits=np.where(is_wait[is_kept], found, UNKNOWN))
    # Leave out waits for events that were never recorded, and put the parts together.
    known = np.where(is_in(event, _NO_IDS), UNKNOWN, event)
    does_wait = ~_are_for_nothing(waits, select(calls, lacks), from_start)
    return Found(
        concatenate(records, select(calls, lacks), select(waits, does_wait)),
        "cuda_events",
        events=np.concatenate([events["eventId"], np.full(len(lacks), UNKNOWN), known[is_kept][does_wait]]),
    )


def _processes_from_start(columns: Mapping[str, Ints], strings: Mapping[int, str]) -> list[int]:
    """Return the processes that were recorded from their start: the export holds their first call of CUDA's driver."""
    numbers = [number for number, name in strings.items() if name.startswith("cuInit")]
    return distinct(process_ids(columns["globalTid"][is_in(columns["nameId"], numbers)]))


def _are_for_nothing(waits: Synchronizations, hidden: Synchronizations, from_start: list[int]) -> Mask:
    """Return a mask of the waits of streams for events that were never recorded: CUDA lets such waits pass.

    A wait is one of these if its record was not found, the trace holds the process from its start, and the process made
    no ``hidden`` record before the wait.

    Args:
        waits: The waits.
        hidden: Records that the event table lacks.
        from_start: Processes that were recorded from their start.
    """
    found: Mask = (waits.kind == SyncKind.STREAM_WAIT) & (waits.awaits == UNKNOWN) & (waits.stream != UNKNOWN)
    for process in distinct(waits.process[found]):
        is_own = waits.process == process
        first = hidden.correlation[hidden.process == process].min(initial=np.iinfo(np.int64).max)
        found[is_own] &= (process in from_start) & (waits.correlation[is_own] < first)
    return found


def _match_by_sync_id(calls: Synchronizations, is_wait: Mask, sync_id: Ints) -> Ints | None:
    """Return the record of each wait by its ``eventSyncId``, a row of ``calls``; ``None`` if ids cannot be trusted.

    Args:
        calls: The calls that order work, sorted by number.
        is_wait: Which of them wait for an event.
        sync_id: The ``eventSyncId`` of each call.
    """
    awaits = np.full(len(calls), UNKNOWN, np.int64)
    for process in distinct(calls.process):
        records = np.flatnonzero((calls.process == process) & (calls.kind == SyncKind.RECORD))
        waits = np.flatnonzero((calls.process == process) & is_wait & ~is_in(sync_id, _NO_IDS))
        if len(waits):
            before = np.searchsorted(calls.correlation[records], calls.correlation[waits])
            beyond = sync_id[waits] - before  # the same, and largest, for waits for the latest record
            if np.mean(beyond == beyond.max()) < _LEAST_SHARE:
                return None
            number = sync_id[waits] - beyond.max() - 1
            awaits[waits] = np.where(number >= 0, take_or_unknown(records, number), UNKNOWN)
    return awaits if np.any(awaits != UNKNOWN) else None
