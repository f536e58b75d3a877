"""The JSON that ``torch.profiler`` writes (Kineto's Chrome trace), plain or gzipped.

A file holds one process, numbered 0 here: the events of a device carry the device's number where the others carry
the process id. ``gpu_user_annotation`` mirrors the host's ranges onto streams; it is neither a range nor an activity.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions, enrich
from ddp_prof.ingest.collectives import CollectiveRow, collective_metadata, message_bytes, name_operations
from ddp_prof.ingest.kineto_document import NO_ARGUMENTS, Event, read_document
from ddp_prof.ingest.names import NameTable, kernel_categories
from ddp_prof.manifest import MOST_RANKS, load_manifest, manifest_path
from ddp_prof.range_names import COLLECTIVES, OPERATOR_PREFIX
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, concatenate, distinct, select
from ddp_prof.trace import (
    AUTOGRAD,
    Activities,
    CallDetails,
    Calls,
    Category,
    CollectiveCalls,
    CollectiveMetadata,
    Kind,
    Operators,
    Overhead,
    Spans,
    Synchronizations,
    SyncKind,
    Trace,
)

PROCESS = 0

_KERNEL, _COPY, _MEMORY_SET = "kernel", ("gpu_memcpy", "memcpy"), ("gpu_memset", "memset")
_OF_DEVICE = (_KERNEL, *_COPY, *_MEMORY_SET)
_CALL = re.compile(r"(?:.*_)?(?:runtime|driver)$")  # cuda_runtime, xpu_runtime, privateuse1_driver
_RANGE, _OPERATIONS = "user_annotation", ("cpu_op", "operator")  # the last as old torch has it
_SYNCHRONIZATION = "cuda_sync"
_OF_HOST = re.compile(
    r"cpu_op|operator|(?:gpu_)?user_annotation|python_function|overhead|trace|(?:.*_)?(?:runtime|driver)"
)
"""Categories that tell a trace without kernels and copies from one of another program."""
_NUMBER = re.compile(r"\d{1,18}")
_ENGINE = "autograd::engine::evaluate_function"
_ASKING = "c10d::"
_COMMUNICATING = (_ASKING, "_c10d_functional")
_MOST_US = 2.0**52
_MOST = 2**62
_YEAR_2000_NS = 946_684_800_000_000_000
_MOST_LETTERS = 100


def load_kineto_json(path: Path, options: ReadOptions) -> Trace:
    """Read a whole trace; arguments and errors as of :func:`ddp_prof.ingest.load.load_trace`."""
    document = read_document(path)
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in document.traceEvents:
        if event.ph == "X":
            by_category[(event.cat or "").lower()].append(event)
        elif event.ph == "B" and event.cat and (event.cat in _OF_DEVICE or _OF_HOST.fullmatch(event.cat)):
            reason = "it has a row for the beginning of an event and one for its end, which torch.profiler does not"
            raise TraceError(path, reason, "give the file that torch.profiler wrote")
    tells_device = any(map(by_category.get, _OF_DEVICE))
    if by_category and not tells_device and ("" in by_category or not any(map(_OF_HOST.fullmatch, by_category))):
        reason = "a Chrome trace without the categories that tell kernels from ranges, as of JAX, torch_npu, VizTracer"
        raise TraceError(path, reason, "record with torch.profiler or with nsys")
    launches = _events_of_categories(by_category, sorted(filter(_CALL.match, by_category)))
    call_ns, call_end_ns = _times(launches)
    operations = _events_of_categories(by_category, _OPERATIONS)
    ranges = by_category[_RANGE] or [event for event in by_category["operator"] if "::" not in str(event.name)]
    if ours := [event for event in operations if str(event.name).startswith(OPERATOR_PREFIX)]:
        operations = [event for event in operations if not str(event.name).startswith(OPERATOR_PREFIX)]
        for event in ours:
            event.name = str(event.name).removeprefix(OPERATOR_PREFIX)
        ranges = [*by_category[_RANGE], *ours]
    names = NameTable()
    spans = _spans(ranges, names)
    told = document.distributedInfo or {}
    rank, world, base_ns = told.get("rank"), told.get("world_size"), document.baseTimeNanoseconds
    synchronizations, sync_source, sync_reason = _synchronizations(by_category[_SYNCHRONIZATION], launches)
    activities = concatenate(
        _activities(by_category[_KERNEL], names, Kind.KERNEL, options.comm_patterns),
        _activities(_events_of_categories(by_category, _COPY), names, Kind.COPY),
        _activities(_events_of_categories(by_category, _MEMORY_SET), names, Kind.MEMORY_SET),
    )
    of_host = [] if len(activities) else operations
    processes, warnings = len({str(event.pid) for event in launches}), tuple[str, ...]()
    # ``distributedInfo`` describes only one of several ranks.
    may_hold_several_ranks = processes > 1 or (not processes and len(distinct(activities.device)) > 1)
    if processes > 1:
        taken = f"{processes} processes launched what is in this file, and are taken for one"
        doubt = "which rank each device is of is not known; give the file of each rank"
        warnings = (f"{taken}: steps and phases may be wrong, and {doubt}",)
    without_end = sum(event.dur < 0 for event in _events_of_categories(by_category, _OF_DEVICE))
    warnings = (*warnings, *enrich.warn_missing_ends(without_end))
    call_details = None
    if options.with_launches:
        call_details = CallDetails(call_end_ns, _intern_names(launches, names, enrich.UNNAMED_CALL))
    trace = Trace(
        path=path,
        source="kineto",
        producer=None,
        activities=activities,
        spans=spans,
        calls=Calls(
            call_ns,
            np.full(len(launches), PROCESS, np.int64),
            _thread_ids(launches),
            _argument(launches, "correlation"),
        ),
        call_details=call_details,
        threads=_thread_names(document.traceEvents, operations, ranges),
        overhead=Overhead(*_times(by_category["overhead"])),
        ranks={PROCESS: rank} if _is_count(rank, MOST_RANKS) and not may_hold_several_ranks else {},
        synchronizations=synchronizations,
        operators=_operators(of_host),
        collective_calls=_collective_calls(of_host, names),
        sync_source=sync_source,
        sync_reason=sync_reason,
        collective_metadata=_collective_metadata(by_category[_KERNEL], names),
        world_size=world if world and _is_count(world, MOST_RANKS) else None,
        names=names.as_tuple(),
        epoch_ns=_epoch_ns(base_ns, call_ns, activities.start_ns, spans.start_ns),
        manifest=load_manifest(manifest_path(path)),
        warnings=warnings,
        gpus=dict(_read_gpu_names(document.deviceProperties)),
    )
    trace = name_operations(enrich.name_ranks(enrich.report_unresolved_names(enrich.refuse_impossible_times(trace))))
    if not (options.with_launches or options.with_shapes):
        return trace
    kernels = by_category[_KERNEL]
    return enrich.add_launch_shapes(trace, [*_launch_sizes(kernels), _argument(kernels, "registers")])


def _epoch_ns(base_ns: int, *starts_ns: Ints) -> int | None:
    """UTC of time 0: as noted; without a note times are UTC themselves, unless another program made them relative."""
    is_utc = all(int(start_ns.min(initial=_MOST)) > _YEAR_2000_NS for start_ns in starts_ns)
    return base_ns if 0 < base_ns < _MOST else 0 if base_ns == 0 and is_utc else None


def _read_gpu_names(noted: Any) -> Iterator[tuple[tuple[int, int], str]]:
    """Names of GPUs by (process, device); the document may hold any type here."""
    for properties in noted if isinstance(noted, list) else ():
        number, name = (properties.get(key) for key in ("id", "name")) if isinstance(properties, dict) else (None, None)
        if isinstance(number, int) and isinstance(name, str):
            yield (PROCESS, number), name[:_MOST_LETTERS]


def _is_count(value: object, bound: int = 1 << 31) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < bound


def _events_of_categories(by_category: dict[str, list[Event]], categories: Sequence[str]) -> list[Event]:
    return [event for category in categories for event in by_category[category]]


def _times(events: Sequence[Event]) -> tuple[Ints, Ints]:
    start = _nanoseconds([event.ts for event in events])
    return (start, start + np.maximum(0, _nanoseconds([event.dur for event in events])))


def _nanoseconds(microseconds: Sequence[float | Decimal]) -> Ints:
    """Exact integers of microseconds with three decimals: the fraction is rounded on its own, without the rest.

    Anything else, or a value beyond what a trace can hold, becomes the largest number, which is refused later.
    """
    if microseconds and isinstance(microseconds[0], Decimal):
        return np.array([round(_clamp_time(microsecond) * 1000) for microsecond in microseconds], np.int64)
    try:
        values = np.array(microseconds, np.float64)
    except OverflowError:  # integers of hundreds of digits
        values = np.array([*map(_clamp_time, microseconds)], np.float64)
    values = np.clip(np.nan_to_num(values, nan=_MOST_US), -_MOST_US, _MOST_US)
    whole = np.floor(values)
    nanoseconds: Ints = whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
    return nanoseconds


def _clamp_time(microseconds: Decimal | float) -> Decimal | float:
    is_number = not isinstance(microseconds, Decimal) or microseconds.is_finite()
    return microseconds if is_number and -_MOST_US <= microseconds <= _MOST_US else _MOST_US


def _activities(events: Sequence[Event], names: NameTable, kind: Kind, comm_patterns: Sequence[str] = ()) -> Activities:
    if kind is Kind.KERNEL:
        name_id = _intern_names(events, names)
        category = kernel_categories(names.as_tuple(), comm_patterns)[name_id]
        name_id = names.fill_unknown(name_id, enrich.UNNAMED_KERNEL)
    else:
        name_id = _intern_names(events, names, unnamed=kind.name.lower())
        category = np.full(len(events), Category.MEMORY, np.int64)
    start_ns, end_ns = _times(events)
    return Activities(
        start_ns=start_ns,
        end_ns=end_ns,
        process=np.full(len(events), PROCESS, np.int64),
        device=_argument(events, "device", otherwise="pid"),
        lane=_argument(events, "stream", otherwise="tid"),
        name_id=name_id,
        kind=np.full(len(events), kind, np.int64),
        category=category,
        correlation=_argument(events, "correlation"),
        bytes=_argument(events, "bytes"),
    )


def _launch_sizes(kernels: Sequence[Event]) -> list[Ints]:
    """A column for each size of grid and block; there are few shapes, so each is decoded once."""

    @cache
    def decoded(text: bytes) -> tuple[int, ...]:
        try:
            found: Any = msgspec.json.decode(text)
        except msgspec.DecodeError:  # there is none, or a number in it is beyond every range
            found = None
        is_shape = isinstance(found, list) and len(found) == 3 and all(map(_is_count, found))
        return tuple(found) if is_shape else (UNKNOWN,) * 3

    noted = [event.args or NO_ARGUMENTS for event in kernels]
    rows = [decoded(bytes(arguments.grid)) + decoded(bytes(arguments.block)) for arguments in noted]
    return list(np.array(rows, np.int64).reshape(len(rows), 6).T)


def _collective_calls(events: Sequence[Event], names: NameTable) -> CollectiveCalls:
    asking = [event for event in events if str(event.name).startswith(_ASKING)]
    return CollectiveCalls(_times(asking)[0], _intern_names(asking, names))


def _operators(events: Sequence[Event]) -> Operators:
    """Operators that compute. One that asks for a collective may wait for it: of it counts what else it calls."""
    talks = np.array([str(event.name).startswith(_COMMUNICATING) for event in events], np.bool_)
    is_backward = np.array([str(event.name).startswith(_ENGINE) for event in events], np.bool_)
    (start_ns, end_ns), thread = _times(events), _thread_ids(events)
    computes = ~talks
    for lane in np.unique(thread[talks]):
        own = np.flatnonzero(thread == lane)
        asked_ns = np.sort(start_ns[own[talks[own]]])
        computes[own] &= np.searchsorted(asked_ns, start_ns[own]) == np.searchsorted(asked_ns, end_ns[own])
        left_out = own[is_backward[own] & ~computes[own]]  # what these call is backward's, too
        begun, ended = (np.searchsorted(np.sort(at[left_out]), start_ns[own], "right") for at in (start_ns, end_ns))
        is_backward[own] |= begun > ended
    return select(Operators(start_ns, end_ns, is_backward.astype(np.int64)), computes)


def _spans(events: Sequence[Event], names: NameTable) -> Spans:
    start_ns, end_ns = _times(events)
    rows, collectives = len(events), tuple(f"{name}|" for name in COLLECTIVES)
    return Spans(
        start_ns=start_ns,
        end_ns=end_ns,
        process=np.full(rows, PROCESS, np.int64),
        lane=_thread_ids(events),
        name_id=_intern_names(events, names, unnamed=enrich.UNNAMED_RANGE),
        # Kineto does not tell; ours of collectives end on other threads.
        is_start_end=np.array([str(event.name).startswith(collectives) for event in events], np.int64),
        is_open=np.zeros(rows, np.int64),
    )


_SYNC_KINDS = {
    "Stream Wait Event": SyncKind.STREAM_WAIT,
    "Event Sync": SyncKind.HOST_WAIT_EVENT,
    "Stream Sync": SyncKind.HOST_WAIT_STREAM,
    "Context Sync": SyncKind.HOST_WAIT_DEVICE,
}
_CALL_KINDS = {"StreamWaitEvent": SyncKind.STREAM_WAIT, "Memcpy": SyncKind.COPY}
_CALL_NAME = re.compile(f"cu(?:da)?({'|'.join(_CALL_KINDS)})")
_NO_SYNCS = (
    "synchronizations were not recorded (torch.profiler records them with "
    "experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True))"
)
_ONLY_CUDA = "synchronizations were not recorded, which torch.profiler does on CUDA only"
_NO_RECORDS = "the trace does not tell which records stream waits are for, as with CUDA 12.9 and later"


def _synchronizations(events: Sequence[Event], launches: Sequence[Event]) -> tuple[Synchronizations, str, str | None]:
    """The waits with the records they wait for, the source of this, and why it is not known (or ``None``).

    A wait names its record by the record's call number and stream. If only the call is known, the record is unknown.
    """
    rows = [event for event in events if event.name in _SYNC_KINDS]
    seen = set(_argument(rows, "correlation").tolist())
    numbers = _argument(launches, "correlation").tolist()
    bare, kinds = list[Event](), [_SYNC_KINDS[event.name] for event in rows]
    for event, number in zip(launches, numbers, strict=True):
        if number not in seen and (found := _CALL_NAME.match(str(event.name))):
            bare.append(event)
            kinds.append(_CALL_KINDS[found[1]])
    both = [*rows, *bare]
    start_ns, end_ns = _times(both)
    correlation, count = _argument(both, "correlation"), len(both)
    thread_of = dict(zip(numbers, _thread_ids(launches).tolist(), strict=True))
    record, stream = _argument(both, "awaited_record"), _argument(both, "awaited_stream")
    is_told = (record > 0) & (stream >= 0)
    waits = Synchronizations(
        kind=np.array(kinds, np.int64),
        start_ns=start_ns,
        end_ns=end_ns,
        process=np.full(count, PROCESS, np.int64),
        thread=np.array([thread_of.get(number, UNKNOWN) for number in correlation.tolist()], np.int64),
        correlation=correlation,
        device=_argument(both, "device"),
        stream=_argument(both, "stream"),
        awaits=np.where(is_told, count + np.cumsum(is_told) - 1, UNKNOWN),
    )
    told = int(is_told.sum())
    nothing, no_time = np.full(told, UNKNOWN), np.full(told, NO_TIME)
    records = replace(
        select(waits, is_told),
        kind=np.full(told, SyncKind.RECORD, np.int64),
        start_ns=no_time,
        end_ns=no_time,
        thread=nothing,
        correlation=record[is_told],
        stream=stream[is_told],
        awaits=nothing,
    )
    can_record = not launches or any(str(event.name).startswith("cu") for event in launches)
    reason = None if told else _NO_RECORDS if rows else _NO_SYNCS if can_record else _ONLY_CUDA
    return concatenate(waits, records), "kineto" if told else "none", reason


def _collective_metadata(kernels: Sequence[Event], names: NameTable) -> CollectiveMetadata:
    """Metadata of the collectives; kernels are the first activities."""
    rows = [
        CollectiveRow(
            activity,
            op=str(noted.collective),
            bytes=message_bytes((noted.elements_in, noted.elements_out), noted.element_type),
            # Several releases give the groups that one is split into one name.
            group=None if noted.group is None else f"{noted.group} {noted.group_ranks}".strip(),
            group_size=noted.group_size if isinstance(noted.group_size, int) else UNKNOWN,
            sequence=noted.sequence if isinstance(noted.sequence, int) else UNKNOWN,
        )
        for activity, event in enumerate(kernels)
        if (noted := event.args) is not None and noted.collective is not None
    ]
    return collective_metadata(rows, names)


def _intern_names(events: Sequence[Event], names: NameTable, unnamed: str = "") -> Ints:
    """Indices of the events' names; an event without a name gets ``unnamed``, or ``UNKNOWN`` if that is empty."""
    found = (event.name if isinstance(event.name, str) and event.name else unnamed for event in events)
    return np.array([names.intern(name) if name else UNKNOWN for name in found], np.int64)


def _parse_integers(values: Any) -> Ints:
    """Whole numbers of 63 bits, also within texts as torch 1.8 writes ids, ``"stream 7"``; else ``UNKNOWN``."""

    def within(text: object) -> int:
        found = _NUMBER.search(text) if isinstance(text, str) else None
        return int(found.group()) if found else UNKNOWN

    return np.array([v if isinstance(v, int) and -_MOST <= v < _MOST else within(v) for v in values], np.int64)


def _argument(events: Sequence[Event], name: str, otherwise: str | None = None) -> Ints:
    """An argument of each event; where it has none, one of its fields."""
    found = [getattr(event.args or NO_ARGUMENTS, name) for event in events]
    if otherwise:
        found = [
            getattr(event, otherwise) if value is None else value for event, value in zip(events, found, strict=True)
        ]
    return _parse_integers(found)


def _thread_ids(events: Iterable[Event]) -> Ints:
    return _parse_integers(event.tid for event in events)


def _thread_names(
    events: Sequence[Event], operations: Sequence[Event], ranges: Sequence[Event]
) -> dict[tuple[int, int], str]:
    """Names of threads; a thread other than the main one that runs autograd's engine gets torch's name for those."""
    named = [event for event in events if event.ph == "M" and event.name == "thread_name" and event.args]
    texts = (str(event.args and event.args.name) for event in named)
    names = dict(zip(_thread_ids(named).tolist(), texts, strict=True))
    main = _thread_ids(event for event in ranges if str(event.name).startswith("ProfilerStep#"))
    engine = (event for event in operations if str(event.name).startswith(_ENGINE) and event.tid != event.pid)
    names |= dict.fromkeys(np.setdiff1d(_thread_ids(engine), main).tolist(), AUTOGRAD)
    return {(PROCESS, tid): name for tid, name in names.items() if tid != UNKNOWN}
