"""Reads the JSON that ``torch.profiler`` writes (Kineto's Chrome trace), plain or gzipped.

A file holds one process, which gets the number 0: the ``pid`` of a device's events is the number of the device. A file
that is put together from those of several ranks holds several; see :mod:`.kineto_processes`.
Events of ``gpu_user_annotation`` are copies of the host's ranges on streams, so they are not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions, collectives, enrich
from ddp_prof.ingest.call_order import infer_waits
from ddp_prof.ingest.kineto_document import NO_ARGUMENTS, Document, Event, read_document
from ddp_prof.ingest.kineto_processes import number_processes
from ddp_prof.ingest.names import ORDERING_CALLS, NameTable, kernel_categories
from ddp_prof.manifest import MOST_RANKS, load_manifest, manifest_path
from ddp_prof.range_names import COLLECTIVES, OPERATOR_PREFIX
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, concatenate, distinct, fill, select
from ddp_prof.trace import (
    AUTOGRAD,
    NO_WORK,
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

_KERNEL = "kernel"
_COPY, _MEMORY_SET = (
    tuple(f"{vendor}{what}" for vendor in ("", "gpu_", "mlu_", "gcu_")) for what in ("memcpy", "memset")
)
_OF_DEVICE = (_KERNEL, *_COPY, *_MEMORY_SET)
_NOT_READ = ("hpu_op", "mtia_ccp_events")  # events of devices, among other ones
_MEMORY_OF_ROCM = re.compile(
    r"MEMORY_COPY_|__amd_rocclr_copyBuffer|Copy(?:Host|Device)To(?:Host|Device)(?:2D)?$"
    r"|(?P<fill>__amd_rocclr_fillBuffer|FillBuffer$)"
)
"""Names of the copies and memory sets that ROCm records as kernels."""
_CALL = re.compile(r"(?:.*_)?(?:runtime|driver)$")  # cuda_runtime, xpu_runtime, privateuse1_driver
_RANGE, _OPERATIONS = "user_annotation", ("cpu_op", "operator")  # "operator" in old releases of torch
_OLD_RANGES = ("ProfilerStep", "gloo:", "nccl:")
"""Names of ranges; old releases of torch record them, and the user's, as operators."""
_SYNCHRONIZATION = "cuda_sync"
_ON_DEVICE = (*_OF_DEVICE, _SYNCHRONIZATION, "gpu_user_annotation")
_OF_HOST = re.compile(rf"cpu_op|operator|(?:gpu_)?user_annotation|python_function|overhead|trace|{_CALL.pattern}")
"""Categories by which a trace without kernels and copies is known to be of ``torch.profiler``."""
_OVERHEAD_OF_CUDA = (
    "Command Buffer Full",
    "Driver Compiler",
    "Lazy Function Loading",
    "Runtime Triggered Module Loading",
)
"""What the profiler records as overhead although it takes as long without a profiler."""
_NUMBER = re.compile(r"\d{1,18}")
_OF_TORCH = re.compile(r"(?:void )?(?:at|c10d)::")
_ENGINE = "autograd::engine::evaluate_function"
_COLLECTIVE_CALL = "c10d::"
_COMMUNICATING = (_COLLECTIVE_CALL, "_c10d_functional")
_MOST_US = 2.0**52
_MOST = 2**62
_MOST_LETTERS = 100


def load_kineto_json(path: Path, options: ReadOptions) -> Trace:
    """Read a whole trace; arguments and errors as of :func:`ddp_prof.ingest.load.load_trace`."""
    document = read_document(path)
    by_category = _events_by_category(path, document)
    calls = sorted(filter(_CALL.match, by_category))
    has_start = _leave_out_without_times(by_category, calls)
    launches = _events_of_categories(by_category, calls)
    of_device = _events_of_categories(by_category, (*_OF_DEVICE, _SYNCHRONIZATION))
    of_host = (event for event in document.traceEvents if event.ph == "M" or event.cat not in _ON_DEVICE)
    processes = number_processes(path, launches, of_host, of_device)
    call_ns, call_end_ns = _times(launches)
    operations = _events_of_categories(by_category, _OPERATIONS)
    ours, operations = _partition(operations, lambda name: name.startswith(OPERATOR_PREFIX))
    for event in ours:
        event.name = str(event.name).removeprefix(OPERATOR_PREFIX)
    ranges = by_category[_RANGE]
    if not ranges and (by_category["operator"] or any(str(event.name).startswith(_OLD_RANGES) for event in operations)):
        ranges, operations = _partition(operations, lambda name: "::" not in name)
    ranges = [*ranges, *ours]
    names = NameTable()
    spans = _spans(ranges, names, _find_window_ends(document.traceEvents))
    distributed = document.distributedInfo if isinstance(document.distributedInfo, dict) else {}
    told = (distributed.get("rank"), distributed.get("world_size"), document.baseTimeNanoseconds)
    rank, world, base_ns = _parse_integers(told).tolist()
    synchronizations, sync_source, sync_reason, awaited = _synchronizations(by_category[_SYNCHRONIZATION], launches)
    copies = _events_of_categories(by_category, _COPY)
    activities = concatenate(
        _activities(by_category[_KERNEL], names, Kind.KERNEL, options.comm_patterns),
        _activities(copies, names, Kind.COPY),
        _activities(_events_of_categories(by_category, _MEMORY_SET), names, Kind.MEMORY_SET),
    )
    host_operations = [] if len(activities) else operations
    called = [event for event in operations if str(event.name).startswith(_COLLECTIVE_CALL)]
    is_utc = base_ns <= 0 and enrich.are_utc((call_ns, activities.start_ns, spans.start_ns))
    # ``distributedInfo`` describes only one of several ranks.
    may_hold_several_ranks = processes > 1 or (not processes and len(distinct(activities.device)) > 1)
    warnings = [
        *enrich.warn_missing_starts(path, has_start),
        *enrich.warn_missing_ends(int(np.count_nonzero(_nanoseconds([event.dur for event in of_device]) < 0))),
        *_read_losses(document),
    ]
    if processes > 1:
        merged = f"{processes} processes launched the work in this file, and each is taken for a rank"
        warnings.insert(0, f"{merged}: the rank of each is not known; give the file of each rank")
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
            _processes(launches),
            _thread_ids(launches),
            _argument(launches, "correlation"),
        ),
        call_details=call_details,
        threads=_thread_names(document.traceEvents, operations, ranges),
        names_autograd=bool(by_category["cpu_op"]),  # releases that call operators so record autograd's engine, too
        overhead=Overhead(*_times([e for e in by_category["overhead"] if e.name not in _OVERHEAD_OF_CUDA])),
        ranks={0: rank} if 0 <= rank < MOST_RANKS and not may_hold_several_ranks else {},
        synchronizations=synchronizations,
        operators=_operators(host_operations),
        collective_calls=CollectiveCalls(_times(called)[0], _intern_names(called, names)),
        sync_source=sync_source,
        sync_reason=sync_reason,
        collective_metadata=_collective_metadata(by_category[_KERNEL], names),
        world_size=world if 0 < world < MOST_RANKS else None,
        has_subgroups=_has_subgroups(distributed.get("pg_config"), world),
        names=tuple(names),
        epoch_ns=base_ns if 0 < base_ns < _MOST else 0 if is_utc else None,
        manifest=load_manifest(manifest_path(path)),
        warnings=tuple(warnings),
        gpus=(gpus := dict(_read_gpu_names(document.deviceProperties, max(1, processes)))),
        platform="rocm" if _is_amd(launches, gpus) else "cuda",
    )
    kinds = np.array([enrich.kind_of_call(str(event.name)) for event in launches], np.int64)
    trace = replace(trace, is_launch=enrich.find_launches(trace.calls, kinds))
    trace = enrich.report_unresolved_names(enrich.refuse_impossible_times(trace))
    trace = enrich.cut_overlong_activities(trace)
    trace = enrich.doubt_ranks(enrich.name_ranks(trace))
    within_device = np.zeros(len(activities), np.bool_)
    first = len(by_category[_KERNEL])
    within_device[first : first + len(copies)] = [*map(_is_within_device, copies)]
    of_one_rank = _spans([event for event in operations if _is_of_one_rank(event)], NameTable(), np.empty(0, np.int64))
    trace = collectives.mark_copies_that_communicate(trace, within_device, of_one_rank)
    calls_of_collectives = _spans(called, NameTable(), np.empty(0, np.int64))
    trace = collectives.add_input_sizes(trace, calls_of_collectives, *_input_sizes(ranges, called))
    trace = infer_waits(collectives.name_operations(trace), awaited)
    if not options.with_launches:
        return trace
    kernels = by_category[_KERNEL]
    return enrich.add_launch_shapes(trace, [*_launch_sizes(kernels), _argument(kernels, "registers")])


def _events_by_category(path: Path, document: Document) -> dict[str, list[Event]]:
    """Return the complete events by category; raise TraceError for traces of other programs."""
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in document.traceEvents:
        if event.ph == "X":
            category = (event.cat or "").lower()
            if category == _KERNEL and (found := _MEMORY_OF_ROCM.match(str(event.name))):
                category = "gpu_memset" if found["fill"] else "gpu_memcpy"
            by_category[category].append(event)
        elif event.ph == "B" and event.cat and (event.cat in _OF_DEVICE or _OF_HOST.fullmatch(event.cat)):
            reason = "it has a row for the beginning of an event and one for its end, which torch.profiler does not"
            raise TraceError(path, reason, "give the file that torch.profiler wrote")
    has_device_events = any(map(by_category.get, _OF_DEVICE))
    is_foreign = "" in by_category or not any(map(_OF_HOST.fullmatch, by_category))
    has_events = by_category or any(event.ph in ("B", "b") for event in document.traceEvents)
    if has_events and not has_device_events and is_foreign:
        reason = "a Chrome trace without the categories that tell kernels from ranges, as of JAX, torch_npu, VizTracer"
        raise TraceError(path, reason, "record with torch.profiler or with nsys")
    if not has_device_events and (unread := next(filter(by_category.get, _NOT_READ), None)):
        reason = f"its device's events are of the category {unread}, which is not read"
        raise TraceError(path, reason, "record on a device whose kernels have the category kernel, such as CUDA's")
    return by_category


def _leave_out_without_times(by_category: dict[str, list[Event]], calls: Sequence[str]) -> dict[str, Mask]:
    """Leave out the events whose start and duration are 0; return which events of each table have times.

    CUPTI gives 0 as start and end of an activity whose times it could not collect, and some releases of torch write 0
    for all kinds of events.
    """
    has_start = {}
    for table, categories in {"activities": _OF_DEVICE, "ranges": (_RANGE,), "calls": calls}.items():
        has_start[table] = np.array(
            [bool(event.ts or event.dur) for event in _events_of_categories(by_category, categories)], np.bool_
        )
    for category, events in by_category.items():
        by_category[category] = [event for event in events if event.ts or event.dur]
    return has_start


def _find_window_ends(events: Sequence[Event]) -> Ints:
    """Return when the recording ended, as Kineto writes it."""
    return _nanoseconds([event.ts for event in events if event.ph == "i" and event.name == "Record Window End"])


def _read_losses(document: Document) -> Iterator[str]:
    """Yield what torch.profiler logged about records that it lost; the document may hold any type here."""
    logged = (text for texts in (document.ERROR, document.WARNING) if isinstance(texts, list) for text in texts)
    yield from enrich.report_losses("torch.profiler", (text for text in logged if isinstance(text, str)))


def _partition(events: Sequence[Event], is_first: Callable[[str], bool]) -> tuple[list[Event], list[Event]]:
    """Return the events with names of the first kind, and the others."""
    first = [event for event in events if is_first(str(event.name))]
    return first, [event for event in events if not is_first(str(event.name))]


def _is_amd(launches: Sequence[Event], gpus: Mapping[tuple[int, int], str]) -> bool:
    """Whether the devices are AMD's: by their names, else by those of the calls."""
    return any(name.startswith("AMD") for name in gpus.values()) or any(
        str(event.name).startswith("hip") for event in launches
    )


def _read_gpu_names(devices: Any, processes: int) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield (process, device) and name of each GPU; the document may hold any type here."""
    for properties in devices if isinstance(devices, list) else ():
        number, name = (properties.get(key) for key in ("id", "name")) if isinstance(properties, dict) else (None, None)
        if isinstance(number, int) and isinstance(name, str):
            for process in range(processes):
                yield (process, number), name[:_MOST_LETTERS]


def _has_subgroups(groups: Any, world: int) -> bool:
    """Whether a process group has more than one rank, but not all; the document may hold any type here."""
    sizes = [group.get("pg_size") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return any(_is_count(size) and 1 < size < world for size in sizes)


def _counts(values: object) -> list[object]:
    """Return the items of a list of counts, those written as ``7.0`` as whole numbers; empty if it is no list."""
    items = values if isinstance(values, list) else []
    return [int(item) if isinstance(item, float) and item.is_integer() else item for item in items]


def _is_count(value: object, bound: int = 1 << 31) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < bound


def _events_of_categories(by_category: dict[str, list[Event]], categories: Sequence[str]) -> list[Event]:
    return [event for category in categories for event in by_category[category]]


def _times(events: Sequence[Event]) -> tuple[Ints, Ints]:
    start = _nanoseconds([event.ts for event in events])
    return (start, start + np.maximum(0, _nanoseconds([event.dur for event in events])))


def _nanoseconds(microseconds: Sequence[float | Decimal]) -> Ints:
    """Convert microseconds with three decimals exactly: their fraction is rounded on its own.

    A value that is no number or too large becomes the largest time, which is refused later.
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
        category = kernel_categories(names, comm_patterns)[name_id]
        category[(category == Category.COMPUTE) & np.array([*map(_is_collective, events)], np.bool_)] = (
            Category.COMMUNICATION
        )
        name_id = names.fill_unknown(name_id, enrich.UNNAMED_KERNEL)
    else:
        name_id = _intern_names(events, names, unnamed=kind.name.lower())
        is_between = np.array([kind is Kind.COPY and _is_between_devices(event) for event in events], np.bool_)
        category = np.where(is_between, Category.COMMUNICATION, Category.MEMORY).astype(np.int64)
    start_ns, end_ns = _times(events)
    lane, original_lane = _argument(events, "stream", otherwise="tid"), _argument(events, "original_stream")
    correlation = _argument(events, "correlation")
    correlation[correlation == 0] = UNKNOWN  # ROCm's tracer has given it to all collectives
    return Activities(
        start_ns=start_ns,
        end_ns=end_ns,
        process=_processes(events),
        device=_argument(events, "device", otherwise="pid"),
        lane=np.where(original_lane == UNKNOWN, lane, original_lane),
        name_id=name_id,
        kind=np.full(len(events), kind, np.int64),
        category=category,
        correlation=correlation,
        bytes=_argument(events, "bytes"),
    )


def _is_collective(kernel: Event) -> bool:
    """Whether a kernel has a collective's arguments, as torch's own kernels have, too, that it launches in the call."""
    return (kernel.args or NO_ARGUMENTS).collective is not None and not _OF_TORCH.match(str(kernel.name))


_COPY_KIND = re.compile(r"([HDAP]to[HDAP])\b")
_COPY_KINDS = {"8": "DtoD", "10": "PtoP"}
"""Kinds of copies by CUPTI's numbers."""


def _copy_kind(copy: Event) -> str:
    """The kind of a copy, such as ``DtoD``: an argument since torch 2.13, before that a part of its name."""
    kind = (copy.args or NO_ARGUMENTS).copy_kind
    if kind is not None:
        return _COPY_KINDS.get(str(kind), str(kind))
    found = _COPY_KIND.search(str(copy.name))
    return found[1] if found else ""


def _is_between_devices(copy: Event) -> bool:
    return _copy_kind(copy) == "PtoP"


def _is_within_device(copy: Event) -> bool:
    """Whether a copy is, or may be, from memory of a device to memory of the same device."""
    return _copy_kind(copy) in ("DtoD", "")


def _is_of_one_rank(operation: Event) -> bool:
    """Whether an operator is torch's record of a collective in a group of one rank."""
    return operation.name == "record_param_comms" and (operation.args or NO_ARGUMENTS).group_size in (1, "1")


def _launch_sizes(kernels: Sequence[Event]) -> list[Ints]:
    """Return a column for each size of grid and block. There are few shapes, so each is decoded once."""

    @cache
    def decoded(text: bytes) -> tuple[int, ...]:
        try:
            found: Any = msgspec.json.decode(text)
        except msgspec.DecodeError:  # no shape was recorded, or it holds a number that is too large
            found = None
        sizes = [size for size in _counts(found) if _is_count(size)]
        is_shape = isinstance(found, list) and len(found) == len(sizes) == 3
        return tuple(sizes) if is_shape else (UNKNOWN,) * 3

    arguments_of = [event.args or NO_ARGUMENTS for event in kernels]
    rows = [decoded(bytes(arguments.grid)) + decoded(bytes(arguments.block)) for arguments in arguments_of]
    return list(np.array(rows, np.int64).reshape(len(rows), 6).T)


def _operators(events: Sequence[Event]) -> Operators:
    """Return the operators that compute.

    An operator that calls a collective may wait for it, so it is left out; the other operators that it calls stay. If
    autograd ran, operators of other threads are left out, too, for example of a thread that prepares data.
    """
    communicates = np.array([str(event.name).startswith(_COMMUNICATING) for event in events], np.bool_)
    is_backward = np.array([str(event.name).startswith(_ENGINE) for event in events], np.bool_)
    (start_ns, end_ns), thread = _times(events), _thread_ids(events)
    computes = ~communicates & (np.isin(thread, thread[is_backward]) | ~is_backward.any())
    for lane in np.unique(thread[communicates]):
        own = np.flatnonzero(thread == lane)
        called_ns = np.sort(start_ns[own[communicates[own]]])
        computes[own] &= np.searchsorted(called_ns, start_ns[own]) == np.searchsorted(called_ns, end_ns[own])
        left_out = own[is_backward[own] & ~computes[own]]  # the operators that these call belong to backward, too
        begun, ended = (np.searchsorted(np.sort(at[left_out]), start_ns[own], "right") for at in (start_ns, end_ns))
        is_backward[own] |= begun > ended
    return select(Operators(start_ns, end_ns, is_backward.astype(np.int64)), computes)


def _spans(events: Sequence[Event], names: NameTable, window_ends_ns: Ints) -> Spans:
    """Return the ranges. One that was still open when recording stopped ends with it, to the nanosecond."""
    start_ns, end_ns = _times(events)
    collectives = tuple(f"{name}|" for name in COLLECTIVES)
    return Spans(
        start_ns=start_ns,
        end_ns=end_ns,
        process=_processes(events),
        lane=_thread_ids(events),
        name_id=_intern_names(events, names, unnamed=enrich.UNNAMED_RANGE),
        # Kineto does not record the kind; our ranges of collectives may end on other threads.
        is_start_end=np.array([str(event.name).startswith(collectives) for event in events], np.int64),
        is_open=np.isin(end_ns, window_ends_ns).astype(np.int64),
    )


_SYNC_KINDS = {
    "Stream Wait Event": SyncKind.STREAM_WAIT,
    "Event Sync": SyncKind.HOST_WAIT_EVENT,
    "Stream Sync": SyncKind.HOST_WAIT_STREAM,
    "Context Sync": SyncKind.HOST_WAIT_DEVICE,
}
_ORDERING_CALL = re.compile(f"(?:cu(?:da)?|hip|musa)({'|'.join(ORDERING_CALLS)})")
_NO_SYNCS = (
    "synchronizations were not recorded (torch.profiler records them with "
    "experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True))"
)
_ONLY_CUDA = "synchronizations were not recorded, which torch.profiler does on CUDA only"
_NO_RECORDS = "the trace does not tell which records stream waits are for, as with CUDA 12.9 and later"


def _synchronizations(
    events: Sequence[Event], launches: Sequence[Event]
) -> tuple[Synchronizations, str, str | None, Ints]:
    """Return the waits and records, the source of what is waited for, why it is not known, and the event of each.

    A wait identifies its record by the record's call number and stream. If only calls are recorded, which stream waits
    is not known. If waits are recorded, too, those of streams without work are left out: they are known by their calls.
    """
    rows = [event for event in events if event.name in _SYNC_KINDS]
    seen = set(zip((event.process for event in rows), _argument(rows, "correlation").tolist(), strict=True))
    numbers = _argument(launches, "correlation").tolist()
    only_calls, kinds = list[Event](), [_SYNC_KINDS[event.name] for event in rows]
    for event, number in zip(launches, numbers, strict=True):
        if (event.process, number) not in seen and (found := _ORDERING_CALL.match(str(event.name))):
            only_calls.append(event)
            kinds.append(ORDERING_CALLS[found[1]])
    both = [*rows, *only_calls]
    start_ns, end_ns = _times(both)
    correlation, count = _argument(both, "correlation"), len(both)
    owner = [event.process for event in both]
    callers = zip((event.process for event in launches), numbers, strict=True)
    thread_of = dict(zip(callers, _thread_ids(launches).tolist(), strict=True))
    record, stream = _argument(both, "awaited_record"), _argument(both, "awaited_stream")
    is_known = (record > 0) & (stream >= 0)
    kind, lane = np.array(kinds, np.int64), _argument(both, "stream")
    if SyncKind.STREAM_WAIT in kind[: len(rows)]:
        lane[(np.arange(count) >= len(rows)) & (kind == SyncKind.STREAM_WAIT)] = NO_WORK
    calls = Synchronizations(
        kind=kind,
        start_ns=start_ns,
        end_ns=end_ns,
        process=_processes(both),
        thread=np.array(
            [thread_of.get(call, UNKNOWN) for call in zip(owner, correlation.tolist(), strict=True)], np.int64
        ),
        correlation=correlation,
        device=_argument(both, "device"),
        stream=lane,
        awaits=np.where(is_known, count + np.cumsum(is_known) - 1, UNKNOWN),
    )
    known = int(is_known.sum())
    nothing, no_time = np.full(known, UNKNOWN), np.full(known, NO_TIME)
    records = replace(
        select(calls, is_known),
        kind=np.full(known, SyncKind.RECORD, np.int64),
        start_ns=no_time,
        end_ns=no_time,
        thread=nothing,
        correlation=record[is_known],
        stream=stream[is_known],
        awaits=nothing,
    )
    can_record = not launches or any(str(event.name).startswith("cu") for event in launches)
    reason = None if known else _NO_RECORDS if rows else _NO_SYNCS if can_record else _ONLY_CUDA
    awaited = np.concatenate([_argument(both, "awaited_event"), nothing])
    return concatenate(calls, records), "kineto" if known else "none", reason, awaited


def _collective_metadata(kernels: Sequence[Event], names: NameTable) -> CollectiveMetadata:
    """Return the metadata of the collectives; the kernels are the first activities."""
    activity = [row for row, event in enumerate(kernels) if event.args and event.args.collective is not None]
    events = [kernels[row] for row in activity]
    rows = [event.args or NO_ARGUMENTS for event in events]
    elements = zip(_argument(events, "elements_in").tolist(), _argument(events, "elements_out").tolist(), strict=True)
    sizes = [collectives.message_bytes(both, one.element_type) for both, one in zip(elements, rows, strict=True)]
    # Some releases give all subgroups of a split group the same name.
    groups = [None if one.group is None else f"{one.group} {one.group_ranks}".strip() for one in rows]
    return fill(
        CollectiveMetadata,
        len(activity),
        activity=np.array(activity, np.int64),
        op_id=np.array([names.intern(str(one.collective)) for one in rows], np.int64),
        bytes=np.array([size if _is_count(size, _MOST) else UNKNOWN for size in sizes], np.int64),
        group_id=np.array([UNKNOWN if group is None else names.intern(group) for group in groups], np.int64),
        group_size=np.maximum(_argument(events, "group_size"), UNKNOWN),
        sequence=np.maximum(_argument(events, "sequence"), UNKNOWN),
    )


_OF_BACKENDS = ("gloo:", *collectives.TORCH_RANGES)


def _input_sizes(ranges: Sequence[Event], called: Sequence[Event]) -> tuple[Ints, Ints]:
    """Return the bytes of the inputs of torch's ranges of collectives, and of the largest argument of ``c10d::`` calls.

    They are recorded with ``record_shapes``; ``UNKNOWN`` for all else. A call has its output among its arguments; it
    does not tell the types of tensors in a list.
    """
    of_ranges = [_argument_sizes(e) if str(e.name).startswith(_OF_BACKENDS) else [] for e in ranges]
    of_calls = [_argument_sizes(event) for event in called]
    inputs = [UNKNOWN if UNKNOWN in sizes or not sizes else sum(sizes) for sizes in of_ranges]
    largest = [max(sizes, default=UNKNOWN) for sizes in of_calls]
    return np.array(inputs, np.int64), np.array(largest, np.int64)


def _argument_sizes(event: Event) -> list[int]:
    """Return the bytes of each tensor among an event's arguments, ``UNKNOWN`` if its type or shape is not known."""
    arguments = event.args or NO_ARGUMENTS
    try:
        shapes, types = (msgspec.json.decode(bytes(text)) for text in (arguments.shapes, arguments.element_types))
    except msgspec.DecodeError:  # not recorded, or numbers too large
        return []
    if not (isinstance(shapes, list) and isinstance(types, list)):
        return []
    sizes = []
    for shape, element_type in zip(shapes, types, strict=False):
        if isinstance(shape, list) and isinstance(element_type, str) and element_type not in _NO_TENSOR:
            counts = [count for count in _counts(shape) if _is_count(count)]
            elements = prod(counts) if shape and len(counts) == len(shape) else UNKNOWN
            size = collectives.message_bytes([elements], element_type)
            sizes.append(size if elements >= 0 and _is_count(size, _MOST) else UNKNOWN)
    return sizes


_NO_TENSOR = ("", "Scalar", "ScalarList", "TensorList", "GenericList")
"""Types of arguments that are no tensors, or several of unknown types."""


def _intern_names(events: Sequence[Event], names: NameTable, unnamed: str = "") -> Ints:
    """Return the indices of the events' names; without a name, that of ``unnamed``, or ``UNKNOWN`` if that is empty."""
    found = (event.name if isinstance(event.name, str) and event.name else unnamed for event in events)
    return np.array([names.intern(name) if name else UNKNOWN for name in found], np.int64)


def _parse_integers(values: Any) -> Ints:
    """Return the whole numbers, also ``7.0`` and those within text (torch 1.8: ``"stream 7"``); else ``UNKNOWN``."""

    def within(value: object) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < _MOST:
            return int(value)
        found = _NUMBER.search(value) if isinstance(value, str) else None
        return int(found.group()) if found else UNKNOWN

    return np.array([v if isinstance(v, int) and -_MOST <= v < _MOST else within(v) for v in values], np.int64)


def _argument(events: Sequence[Event], name: str, otherwise: str | None = None) -> Ints:
    """Return an argument of each event as whole numbers; an event without it gives its field ``otherwise``."""
    found = [getattr(event.args or NO_ARGUMENTS, name) for event in events]
    if otherwise:
        found = [
            getattr(event, otherwise) if value is None else value for event, value in zip(events, found, strict=True)
        ]
    return _parse_integers(found)


def _processes(events: Sequence[Event]) -> Ints:
    return np.array([event.process for event in events], np.int64)


def _thread_ids(events: Iterable[Event]) -> Ints:
    return _parse_integers(event.tid for event in events)


def _thread_names(
    events: Sequence[Event], operations: Sequence[Event], ranges: Sequence[Event]
) -> dict[tuple[int, int], str]:
    """Return the names of threads. Threads that run autograd's engine beside the main one get torch's name for them."""
    named = [event for event in events if event.ph == "M" and event.name == "thread_name" and event.args]
    texts = (str(event.args and event.args.name) for event in named)
    names = dict(zip(_threads(named), texts, strict=True))
    main = set(_threads([event for event in ranges if str(event.name).startswith("ProfilerStep#")]))
    engine = [event for event in operations if str(event.name).startswith(_ENGINE) and event.tid != event.pid]
    names |= {thread: AUTOGRAD for thread in _threads(engine) if thread not in main}
    return {(process, tid): name for (process, tid), name in names.items() if tid != UNKNOWN}


def _threads(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Return the process and the thread of each event."""
    return list(zip(_processes(events).tolist(), _thread_ids(events).tolist(), strict=True))
