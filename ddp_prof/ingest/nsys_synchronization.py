"""Reads from an export of Nsight Systems which stream or host waits for which operation.

The meaning of ``syncType`` depends on the release, so the name of the API call decides what kind of wait a row is. The
event record that a wait is for is found

- in the table of event records (``--cuda-event-trace=true``): it is the process's latest record of the same event
  before the wait. It is not the first one, because handles of events are reused. Releases before 2025 leave records of
  ``cudaEventRecordWithFlags`` out, which torch calls since 2.9: of these, only the calls are known;
- else by ``eventSyncId``, which numbers the records of a process. If a wait is for the latest record, its id exceeds
  the number of records before the wait by a constant. The ids are trusted if most waits have the same difference and
  none has a larger one;
- else, if there is a table that lacks some, by the order of the calls, see :mod:`.call_order`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ddp_prof.ingest.export_tables import ExportTables, constant_column
from ddp_prof.ingest.names import ORDERING_CALLS
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, Sequences, count_before, fill, positions, take_or_unknown
from ddp_prof.trace import Synchronizations, SyncKind, concatenate, distinct, distinct_rows, empty, select

EVENTS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
SYNCHRONIZATIONS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"

_COLUMNS = ("start", "correlationId", "globalPid", "deviceId", "streamId", "eventId", "eventSyncId")
_NO_IDS = (UNKNOWN, 0, 2**32 - 1)
_LEAST_SHARE = 0.5
"""Share of a process's waits that must have the constant: torch waits for most events right after their record."""

NOT_RECORDED = "no stream waits were recorded"
NO_CALLS = "no CUDA API calls were recorded"
NO_EVENTS = "event records were not recorded (nsys profile --cuda-event-trace=true records them)"


class Found(NamedTuple):
    """The calls that order work, the source of what they wait for, why it is not known, and the event of each call.

    Attributes:
        events: ``UNKNOWN`` for a call whose event was not recorded; ``None`` if there is no table of event records.
    """

    calls: Synchronizations
    source: str
    reason: str | None = None
    events: Ints | None = None


def read_rows(file: ExportTables) -> dict[str, dict[str, Ints]]:
    """Return the tables of waits and of event records, by name."""
    return {table: file.read_integers(table, _COLUMNS) for table in (SYNCHRONIZATIONS, EVENTS)}


def find_synchronizations(
    columns: Mapping[str, Ints], strings: Mapping[int, str], tables: Mapping[str, dict[str, Ints]], *, has_calls: bool
) -> Found:
    """Return what orders work, by the columns of all calls, the strings of the export, and :func:`read_rows`.

    ``has_calls`` tells whether the export has a table of calls: the columns also have no rows if it lacks one of them.
    """
    calls = _calls(columns, strings)
    if not len(calls):
        return Found(calls, "none", NOT_RECORDED if has_calls else NO_CALLS)
    recorded, events = tables[SYNCHRONIZATIONS], tables[EVENTS]
    call = _match_calls(calls, recorded)
    row = np.full(len(calls), UNKNOWN, np.int64)
    matched = np.flatnonzero(call != UNKNOWN)[::-1]
    row[call[matched]] = matched  # a call with several rows gets the first, which is written last
    calls = replace(
        calls, device=take_or_unknown(recorded["deviceId"], row), stream=take_or_unknown(recorded["streamId"], row)
    )
    is_wait = np.isin(calls.kind, (SyncKind.STREAM_WAIT, SyncKind.HOST_WAIT_EVENT)) & (row != UNKNOWN)
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
    """Return the calls of the kinds above, in the order of their numbers, without their streams and records."""
    kinds = {
        number: kind
        for part, kind in ORDERING_CALLS.items()
        for number, name in strings.items()
        if name.startswith((f"cuda{part}", f"cu{part}"))  # cudaStreamWaitEvent_v3020, cuStreamWaitEvent_ptsz
    }
    numbers = np.array(sorted(kinds), np.int64)
    rows = np.flatnonzero(np.isin(columns["nameId"], numbers))
    if not len(rows):
        return empty(Synchronizations)
    start, end, tid, name = (columns[one][rows] for one in ("start", "end", "globalTid", "nameId"))
    calls = fill(
        Synchronizations,
        len(rows),
        kind=np.array([kinds[number] for number in numbers.tolist()], np.int64)[np.searchsorted(numbers, name)],
        start_ns=start,
        end_ns=np.maximum(start, end),
        process=tid >> 24 & 0xFFFFFF,
        thread=tid & 0xFFFFFF,
        correlation=columns["correlationId"][rows],
    )
    return select(calls, np.lexsort((start, calls.correlation)))


def _match_calls(calls: Synchronizations, table: dict[str, Ints]) -> Ints:
    """Return the call of each row of a table, by its number.

    If several calls have that number, it is the latest one before the row. The rows of a table without times are in the
    order of the calls.
    """
    process, number, count = table["globalPid"] >> 24 & 0xFFFFFF, table["correlationId"], len(calls)
    _, group = distinct_rows(np.concatenate([calls.process, process]), np.concatenate([calls.correlation, number]))
    times = np.concatenate([calls.start_ns, table["start"]])
    if np.all(table["start"] == UNKNOWN):
        times = np.concatenate([count_before(group[:count]), count_before(group[count:])])
    _, place = np.unique(times, return_inverse=True)
    by_number = Sequences(group[:count], place[:count])
    latest = by_number.last_before(group[count:], place[count:] + 1)
    any_of = by_number.last_before(group[count:], np.full(len(number), len(place)))
    has_several = np.bincount(group[:count], minlength=len(place))[group[count:]] > 1
    return np.where(number == UNKNOWN, UNKNOWN, np.where(has_several, latest, any_of))


def _match_by_event(
    calls: Synchronizations,
    is_wait: Mask,
    event: Ints,
    events: dict[str, Ints],
    by_number: Ints | None,
    from_start: list[int],
) -> Found:
    """Return the records of the event table, the records that it lacks, and the waits.

    Each wait is for the latest record of its event before it. A wait for an event that is not in the table is for the
    record that ``by_number`` tells.
    """
    process, rows = events["globalPid"] >> 24 & 0xFFFFFF, len(events["globalPid"])
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
    lacks = np.setdiff1d(is_record, call)
    is_kept = calls.kind != SyncKind.RECORD
    waits = select(calls, is_kept)
    _, handle = distinct_rows(
        np.concatenate([process, waits.process]), np.concatenate([events["eventId"], event[is_kept]])
    )
    places = records.correlation, waits.correlation
    if len(distinct_rows(calls.process, calls.correlation)[0]) < len(calls):  # repeated numbers give no order
        _, place = np.unique(np.concatenate([records.start_ns, waits.start_ns]), return_inverse=True)
        places = place[:rows], place[rows:]
    found = Sequences(handle[:rows], places[0]).last_before(handle[rows:], places[1])
    if by_number is not None:
        row_of = positions(np.concatenate([call, lacks]), len(calls))
        found = np.where(found == UNKNOWN, take_or_unknown(row_of, by_number[is_kept]), found)
    waits = replace(waits, awaits=np.where(is_wait[is_kept], found, UNKNOWN))
    known = np.where(np.isin(event, _NO_IDS), UNKNOWN, event)
    does_wait = ~_are_for_nothing(waits, select(calls, lacks), from_start)
    return Found(
        concatenate(records, select(calls, lacks), select(waits, does_wait)),
        "cuda_events",
        events=np.concatenate([events["eventId"], np.full(len(lacks), UNKNOWN), known[is_kept][does_wait]]),
    )


def _processes_from_start(columns: Mapping[str, Ints], strings: Mapping[int, str]) -> list[int]:
    """Return the processes whose first call of CUDA's driver was recorded."""
    numbers = [number for number, name in strings.items() if name.startswith("cuInit")]
    return distinct(columns["globalTid"][np.isin(columns["nameId"], numbers)] >> 24 & 0xFFFFFF)


def _are_for_nothing(waits: Synchronizations, hidden: Synchronizations, from_start: list[int]) -> Mask:
    """Mask of the waits of streams for events that were never recorded, which CUDA lets pass.

    So it is if the event is in no row, and its process had recorded none of the ``hidden`` events since its start.
    """
    found: Mask = (waits.kind == SyncKind.STREAM_WAIT) & (waits.awaits == UNKNOWN) & (waits.stream != UNKNOWN)
    for process in distinct(waits.process[found]):
        is_own = waits.process == process
        first = hidden.correlation[hidden.process == process].min(initial=np.iinfo(np.int64).max)
        found[is_own] &= (process in from_start) & (waits.correlation[is_own] < first)
    return found


def _match_by_sync_id(calls: Synchronizations, is_wait: Mask, sync_id: Ints) -> Ints | None:
    """Return the record of each wait by its ``eventSyncId``; ``None`` if the ids cannot be trusted."""
    awaits = np.full(len(calls), UNKNOWN, np.int64)
    for process in distinct(calls.process):
        records = np.flatnonzero((calls.process == process) & (calls.kind == SyncKind.RECORD))
        waits = np.flatnonzero((calls.process == process) & is_wait & ~np.isin(sync_id, _NO_IDS))
        if len(waits):
            before = np.searchsorted(calls.correlation[records], calls.correlation[waits])
            beyond = sync_id[waits] - before
            if np.mean(beyond == beyond.max()) < _LEAST_SHARE:
                return None
            number = sync_id[waits] - beyond.max() - 1
            awaits[waits] = np.where(number >= 0, take_or_unknown(records, number), UNKNOWN)
    return awaits if np.any(awaits != UNKNOWN) else None
