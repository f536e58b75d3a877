"""Reads the JSON that ``torch.profiler`` writes (Kineto's Chrome trace), plain or gzipped.

A file holds one process, which gets the number 0; the ``pid`` of a device's events is the number of the device. A file
that was put together from the files of several ranks holds several processes, see :mod:`.kineto_processes`. Events of
the category ``gpu_user_annotation`` are copies of the host's ranges on streams, so they are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddp_prof.communication import GLOO
from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions, collectives, enrich
from ddp_prof.ingest.call_order import infer_waits
from ddp_prof.ingest.kineto_columns import (
    BETWEEN_DEVICES,
    COPY,
    KERNEL,
    MEMORY_SET,
    OF_DEVICE,
    OF_HOST,
    OPERATIONS,
    OVERHEAD,
    RANGE,
    SYNCHRONIZATION,
    WITHIN_DEVICE,
    CallEvents,
    Codes,
    DeviceEvents,
    Events,
    HostEvents,
    KernelCollectives,
    KinetoColumns,
    is_collective_call,
    is_count,
    is_of_engine,
    orders_work,
    parse_integers,
)
from ddp_prof.ingest.kineto_document import Header
from ddp_prof.ingest.kineto_processes import (
    Processes,
    number_processes,
    refuse_shared_pids,
    refuse_shared_streams,
    refuse_shared_threads,
)
from ddp_prof.ingest.kineto_stream import read_events
from ddp_prof.ingest.names import NameTable, kernel_categories, ordering_kind
from ddp_prof.manifest import MOST_RANKS, load_manifest, manifest_path
from ddp_prof.notes import Doubt
from ddp_prof.range_names import COLLECTIVES, OPERATOR_PREFIX
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, concatenate, distinct, distinct_rows, empty, fill, select
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

_NOT_READ = ("hpu_op", "mtia_ccp_events")
"""Categories that hold events of devices, but together with others, so they are not read."""
_OLD_RANGES = ("ProfilerStep", GLOO, "nccl:")
"""Start of the names of torch's ranges; old releases of torch record them, and the user's ranges, as operators."""
_OVERHEAD_OF_CUDA = (
    "Command Buffer Full",
    "Driver Compiler",
    "Lazy Function Loading",
    "Runtime Triggered Module Loading",
)
"""Names of events that the profiler records as its overhead, although they take as long without a profiler."""
_OF_TORCH = re.compile(r"(?:void )?(?:at|c10d)::")
"""Start of the names of torch's own kernels."""
_COMMUNICATING = ("c10d::", "_c10d_functional")
"""Start of the names of operators that call collectives."""


def load_kineto_json(path: Path, options: ReadOptions) -> Trace:
    """Read and return a whole trace; arguments and errors are those of :func:`ddp_prof.ingest.load.load_trace`."""
    # Read the events, and sort them by what they are.
    header, columns = read_events(path, partial(KinetoColumns, with_launches=options.with_launches))
    _refuse_foreign(path, columns)
    has_operators = columns.with_times["operator"] > 0
    read = _Read.of(path, columns)
    ranges, operations = _find_ranges(columns.names, read.ranges, read.operations, has_old=has_operators)
    read = replace(read, ranges=ranges, operations=operations)
    # Build the trace, check and complete it.
    trace, awaited = _build(path, options, header, read)
    trace = enrich.report_unresolved_names(enrich.refuse_impossible_times(trace))
    trace = enrich.cut_overlong_activities(enrich.doubt_streams(trace))
    trace = enrich.doubt_ranks(enrich.name_ranks(trace))
    trace = collectives.mark_reductions_of_one_rank(_add_collectives(trace, read), options.comm_patterns)
    trace = infer_waits(collectives.name_operations(trace), awaited)
    if not options.with_launches:
        return trace
    kernels = read.kernels
    return enrich.add_launch_shapes(trace, [*columns.launch_sizes(kernels.shape), kernels.registers])


@dataclass(frozen=True)
class _Read:
    """The events of a file, a table for each kind, and the processes that they belong to."""

    columns: KinetoColumns
    kernels: DeviceEvents
    copies: DeviceEvents
    memory_sets: DeviceEvents
    waits: CallEvents
    calls: CallEvents
    ranges: HostEvents
    operations: HostEvents
    processes: Processes

    @classmethod
    def of(cls, path: Path, columns: KinetoColumns) -> _Read:
        """Take the tables out of ``columns``; TraceError if the process of an event is not known."""
        calls = columns.table(CallEvents, *columns.calls())
        kernels = columns.table(DeviceEvents, KERNEL)
        copies, memory_sets = (columns.table(DeviceEvents, *categories) for categories in (COPY, MEMORY_SET))
        waits = columns.table(CallEvents, SYNCHRONIZATION)
        ranges, operations = (columns.table(HostEvents, *categories) for categories in ((RANGE,), OPERATIONS))
        pids, names, of_device = columns.pids.texts, columns.names, (kernels, copies, memory_sets, waits)
        processes = number_processes(path, pids, calls, ranges, operations, of_device)
        refuse_shared_pids(path, pids, select(calls, names.which(calls.name, _launches)))
        refuse_shared_threads(path, pids, select(ranges, names.which(ranges.name, _is_step)), operations, kernels)
        if not len(calls):
            refuse_shared_streams(path, kernels)
        return cls(columns, kernels, copies, memory_sets, waits, calls, ranges, operations, processes)


def _launches(call: str) -> bool:
    return enrich.kind_of_call(call) == enrich.CallKind.LAUNCH


def _refuse_foreign(path: Path, columns: KinetoColumns) -> None:
    """Raise TraceError if the trace was not written by torch.profiler, or is of a device that is not supported.

    Nor is one read of which HolisticTraceAnalysis kept the events of a critical path only, as it does by default.
    """
    if columns.is_critical_path:
        reason = "only the events of a critical path are left in it, as HolisticTraceAnalysis writes them"
        raise TraceError(path, reason, "give the file that torch.profiler wrote")
    if any(category in OF_DEVICE or OF_HOST.fullmatch(category) for category in columns.pairs):
        reason = "it has separate rows for the begin and the end of an event, which torch.profiler does not write"
        raise TraceError(path, reason, "give the file that torch.profiler wrote")
    categories = columns.categories
    has_device_events = not categories.isdisjoint(OF_DEVICE)
    is_foreign = "" in categories or not any(map(OF_HOST.fullmatch, categories))
    if (categories or columns.has_pairs) and not has_device_events and is_foreign:
        reason = "a Chrome trace without the categories that tell kernels from ranges, as of JAX, torch_npu, VizTracer"
        raise TraceError(path, reason, "record with torch.profiler or with nsys")
    if not has_device_events and (unread := next((name for name in _NOT_READ if name in categories), None)):
        reason = f"its device's events are of the category {unread}, which is not read"
        raise TraceError(path, reason, "record on a device whose kernels have the category kernel, such as CUDA's")


def _find_ranges(
    names: Codes, ranges: HostEvents, operations: HostEvents, *, has_old: bool
) -> tuple[HostEvents, HostEvents]:
    """Return the ranges and the operators, after moving ranges that were recorded as operators.

    Args:
        names: Codes of names.
        ranges: Events that were recorded as ranges.
        operations: Events that were recorded as operators.
        has_old: Whether an old release of torch wrote the file.
    """
    # Our own ranges, whose names get rid of the prefix that an operator has.
    is_ours = names.which(operations.name, _is_ours)
    ours, operations = select(operations, is_ours), select(operations, ~is_ours)
    first, which = distinct_rows(ours.name)
    texts = [names.texts[code].removeprefix(OPERATOR_PREFIX) for code in ours.name[first].tolist()]
    ours = replace(ours, name=names.of(texts)[which])
    if not len(ranges) and (has_old or names.which(operations.name, _is_old_range).any()):
        is_operator = names.which(operations.name, _is_operator)
        ranges, operations = select(operations, ~is_operator), select(operations, is_operator)
    return concatenate(ranges, ours), operations


def _is_ours(name: str) -> bool:
    return name.startswith(OPERATOR_PREFIX)


def _is_old_range(name: str) -> bool:
    return name.startswith(_OLD_RANGES)


def _is_operator(name: str) -> bool:
    return "::" in name


def _build(path: Path, options: ReadOptions, header: Header, read: _Read) -> tuple[Trace, Ints | None]:
    """Return the trace as the file tells it, and for each of its synchronizations the number of its CUDA event."""
    # Tables; they add names to the table of names in this order.
    columns, processes, names = read.columns, read.processes, NameTable()
    spans = _spans(read, read.ranges, names, np.array(columns.window_ends_ns, np.int64))
    recorded = columns.collectives()
    activities = concatenate(
        _activities(read, 0, read.kernels, _kernel_names(read, recorded.kernel, names, options.comm_patterns)),
        _activities(read, 1, read.copies, _copy_names(read, names)),
        _activities(read, 2, read.memory_sets, _memory_set_names(read, names)),
    )
    synchronizations, sync_source, sync_reason, awaited = _synchronizations(read)
    called, calls = _called(read), _calls(read)
    # The job, the clock, and what is read besides.
    job = _Job.of(header, processes.count, activities)
    base_ns = job.base_ns
    is_utc = base_ns <= 0 and enrich.are_utc((calls.start_ns, activities.start_ns, spans.start_ns))
    again = kernel_categories(names, options.comm_patterns)[_intern(columns.names, columns.repeated_kernels, names)]
    # An operator within one of its own name may look like a duplicate in whole microseconds, so these are not counted.
    counted = sum(number for category, number in columns.repeated.items() if category not in OPERATIONS)
    repeated = counted, int((again == Category.COMMUNICATION).sum())
    warnings = (*_warnings(path, header, read), *enrich.warn_repeated(*repeated))
    call_details = None
    if options.with_launches:
        call_names = _intern(columns.names, read.calls.name, names, enrich.UNNAMED_CALL)
        call_details = CallDetails(read.calls.end_ns, call_names)
    overhead = columns.table(Events, OVERHEAD)
    overhead = select(overhead, ~columns.names.which(overhead.name, _OVERHEAD_OF_CUDA.__contains__))
    call_texts = [columns.names.texts[code] for code in distinct(read.calls.name)]
    kinds = _by_text(columns.names, read.calls.name, enrich.kind_of_call)
    trace = Trace(
        path=path,
        source="kineto",
        producer=None,
        activities=activities,
        spans=spans,
        calls=calls,
        call_details=call_details,
        is_launch=enrich.find_launches(calls, kinds),
        threads=_thread_names(read),
        # Releases of torch that write the category cpu_op record autograd's engine, too.
        names_autograd=columns.with_times["cpu_op"] > 0,
        overhead=Overhead(overhead.start_ns, overhead.end_ns),
        ranks=job.ranks,
        synchronizations=synchronizations,
        operators=_operators(columns.names, read.operations if not len(activities) else empty(HostEvents)),
        collective_calls=CollectiveCalls(called.start_ns, _intern(columns.names, called.name, names)),
        sync_source=sync_source,
        sync_reason=sync_reason,
        collective_metadata=_collective_metadata(columns.names, recorded, names),
        world_size=job.world_size,
        has_subgroups=job.has_subgroups,
        names=tuple(names),
        epoch_ns=base_ns if 0 < base_ns < enrich.MOST else 0 if is_utc else None,
        manifest=load_manifest(manifest_path(path)),
        warnings=warnings,
        gpus=(gpus := dict(_read_gpu_names(header.deviceProperties, max(1, processes.count)))),
        platform="rocm" if _is_amd(call_texts, gpus) else "cuda",
    )
    is_of_graph = columns.names.which(read.calls.name, _launches_graph)
    trace = enrich.mark_peer_copies(enrich.share_out_launches(trace, is_of_graph), kinds)
    return enrich.leave_out_captured_copies(trace, kinds, awaited)


def _launches_graph(name: str) -> bool:
    return "GraphLaunch" in name


@dataclass(frozen=True)
class _Job:
    """What the header of a file tells about the job.

    Attributes:
        base_ns: UTC time of the trace's time 0, in ns; 0 or less if it is not known.
        ranks: Rank by process; empty if it is not known.
        world_size: Number of ranks; ``None`` if it is not known.
        has_subgroups: Whether there are process groups of a part of the ranks.
    """

    base_ns: int
    ranks: Mapping[int, int]
    world_size: int | None
    has_subgroups: bool

    @classmethod
    def of(cls, header: Header, processes: int, activities: Activities) -> _Job:
        """Take the facts from the header; ``processes`` is the number of processes that launched work."""
        distributed = header.distributedInfo if isinstance(header.distributedInfo, dict) else {}
        base = 0 if header.baseTimeNanoseconds is msgspec.UNSET else header.baseTimeNanoseconds
        told = [distributed.get("rank"), distributed.get("world_size"), base]
        rank, world, base_ns = parse_integers(told).tolist()
        # If the file holds several ranks, ``distributedInfo`` describes only one of them.
        may_hold_several_ranks = processes > 1 or (not processes and len(distinct(activities.device)) > 1)
        return cls(
            base_ns=base_ns,
            ranks={0: rank} if 0 <= rank < MOST_RANKS and not may_hold_several_ranks else {},
            world_size=world if 0 < world < MOST_RANKS else None,
            has_subgroups=_has_subgroups(distributed.get("pg_config"), world),
        )


def _warnings(path: Path, header: Header, read: _Read) -> Iterator[str]:
    """Yield warnings about unknown ranks, missing times, and losses; TraceError if no event of a kind has a start."""
    columns = read.columns
    if read.processes.count > 1:
        launching, every = read.processes.launching, read.processes.count
        merged = f"{launching} processes launched the work in this file, and each is taken for a rank"
        if launching < 2:
            merged = f"{every} processes are in this file, and only the one that launched its work is taken for a rank"
        yield Doubt(f"{merged}: the rank of each is not known; give the file of each rank")
    has_start = {}
    for table, categories in {"activities": OF_DEVICE, "ranges": (RANGE,), "calls": columns.calls()}.items():
        without, with_times = (
            sum(counts[category] for category in categories) for counts in (columns.without_times, columns.with_times)
        )
        has_start[table] = np.arange(without + with_times) >= without  # only their numbers matter, not which rows
    yield from enrich.warn_missing_starts(path, has_start)
    yield from enrich.warn_missing_ends(columns.without_end)
    yield from _read_losses(header)


def _add_collectives(trace: Trace, read: _Read) -> Trace:
    """Return the trace with facts about collectives completed from the ranges and operators that launched them."""
    within_device = np.zeros(len(trace.activities), np.bool_)
    first = len(read.kernels)  # the activities are the kernels, the copies, and the memory sets
    within_device[first : first + len(read.copies)] = read.copies.copy == WITHIN_DEVICE
    # Operators as ranges: those of groups of one rank, and those that call collectives. None of them counts as open.
    no_ends, called = np.empty(0, np.int64), _called(read)
    alone = select(read.operations, read.operations.is_of_one_rank == 1)
    trace = collectives.mark_copies_that_communicate(trace, within_device, _spans(read, alone, NameTable(), no_ends))
    calls = _spans(read, called, NameTable(), no_ends)
    return collectives.add_input_sizes(trace, calls, read.ranges.size, called.size)


def _called(read: _Read) -> HostEvents:
    """Return the operators of torch that call collectives."""
    return select(read.operations, read.columns.names.which(read.operations.name, is_collective_call))


def _calls(read: _Read) -> Calls:
    calls = read.calls
    return Calls(calls.start_ns, read.processes.of_host(calls.pid), calls.tid, _known_numbers(calls.correlation))


def _read_losses(header: Header) -> Iterator[str]:
    """Yield warnings from what torch.profiler logged about lost records; the document may hold any type here."""
    logged = (text for texts in (header.ERROR, header.WARNING) if isinstance(texts, list) for text in texts)
    yield from enrich.report_losses("torch.profiler", (text for text in logged if isinstance(text, str)))


def _is_amd(calls: Sequence[str], gpus: Mapping[tuple[int, int], str]) -> bool:
    """Return whether the devices are AMD's, by the names of the GPUs or of the calls."""
    return any(name.startswith("AMD") for name in gpus.values()) or any(name.startswith("hip") for name in calls)


def _read_gpu_names(devices: Any, processes: int) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield (process, device) and name of each GPU; the document may hold any type here."""
    for properties in devices if isinstance(devices, list) else ():
        number, name = (properties.get(key) for key in ("id", "name")) if isinstance(properties, dict) else (None, None)
        if isinstance(number, int) and isinstance(name, str):
            for process in range(processes):
                yield (process, number), name[: enrich.MOST_LETTERS_OF_GPU]


def _has_subgroups(groups: Any, world: int) -> bool:
    """Return whether a process group has more than one rank, but not all ranks; ``groups`` may be of any type."""
    sizes = [group.get("pg_size") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return any(is_count(size) and 1 < size < world for size in sizes)


def _kernel_names(
    read: _Read, collectives_of: Ints, names: NameTable, comm_patterns: Sequence[str]
) -> tuple[Kind, Ints, Ints]:
    """Return the kind, the names and the categories of the kernels.

    Args:
        read: The events.
        collectives_of: Rows of the kernels that were recorded with the arguments of a collective.
        names: Table to which the names are added.
        comm_patterns: Regular expressions for names of kernels that communicate, besides the known ones.
    """
    codes = read.columns.names
    name_id = _intern(codes, read.kernels.name, names)
    category = kernel_categories(names, comm_patterns)[name_id]
    is_collective = np.zeros(len(read.kernels), np.bool_)
    is_collective[collectives_of] = True
    # Torch's own kernels within a call of a collective have its arguments, too, but do not communicate.
    is_collective &= ~codes.which(read.kernels.name, _OF_TORCH.match)
    category[(category == Category.COMPUTE) & is_collective] = Category.COMMUNICATION
    return Kind.KERNEL, names.fill_unknown(name_id, enrich.UNNAMED_KERNEL), category


def _copy_names(read: _Read, names: NameTable) -> tuple[Kind, Ints, Ints]:
    """Return the kind, the names and the categories of the copies; copies between devices communicate."""
    is_between = read.copies.copy == BETWEEN_DEVICES
    category = np.where(is_between, Category.COMMUNICATION, Category.MEMORY).astype(np.int64)
    return Kind.COPY, _intern(read.columns.names, read.copies.name, names, "copy"), category


def _memory_set_names(read: _Read, names: NameTable) -> tuple[Kind, Ints, Ints]:
    """Return the kind, the names and the categories of the memory sets."""
    name_id = _intern(read.columns.names, read.memory_sets.name, names, "memory_set")
    return Kind.MEMORY_SET, name_id, np.full(len(name_id), Category.MEMORY, np.int64)


def _activities(read: _Read, place: int, events: DeviceEvents, named: tuple[Kind, Ints, Ints]) -> Activities:
    """Return the activities of one kind.

    Args:
        read: The events.
        place: Index of their table in ``read.processes.of_device``: 0 kernels, 1 copies, 2 memory sets.
        events: The table.
        named: Kind, names and categories, as the functions above return them.
    """
    kind, name_id, category = named
    return Activities(
        start_ns=events.start_ns,
        end_ns=events.end_ns,
        process=read.processes.of_table(place, len(events)),
        device=events.device,
        lane=events.lane,
        name_id=name_id,
        kind=np.full(len(events), kind, np.int64),
        category=category,
        correlation=_known_numbers(events.correlation),
        bytes=events.bytes,
    )


def _known_numbers(correlation: Ints) -> Ints:
    """Return correlation numbers, ``UNKNOWN`` for 0, which is none: ROCm's tracer gives it to all collectives."""
    return np.where(correlation == 0, UNKNOWN, correlation)


def _operators(names: Codes, events: HostEvents) -> Operators:
    """Return the operators that compute.

    An operator that calls a collective may wait for it, so it is left out; the other operators that it calls stay. If
    autograd ran, operators of threads without autograd are left out, too, for example of a thread that loads data.
    """
    communicates = names.which(events.name, _is_communicating)
    is_backward = names.which(events.name, is_of_engine)
    start_ns, end_ns, thread = events.start_ns, events.end_ns, events.tid
    computes = ~communicates & (np.isin(thread, thread[is_backward]) | ~is_backward.any())
    for lane in np.unique(thread[communicates]):
        # Leave out operators within which a call of a collective starts.
        own = np.flatnonzero(thread == lane)
        called_ns = np.sort(start_ns[own[communicates[own]]])
        computes[own] &= np.searchsorted(called_ns, start_ns[own]) == np.searchsorted(called_ns, end_ns[own])
        # Operators inside a backward operator that is left out belong to backward: more have begun by then than ended.
        left_out = own[is_backward[own] & ~computes[own]]
        begun, ended = (np.searchsorted(np.sort(at[left_out]), start_ns[own], "right") for at in (start_ns, end_ns))
        is_backward[own] |= begun > ended
    return select(Operators(start_ns, end_ns, is_backward.astype(np.int64)), computes)


def _is_communicating(name: str) -> bool:
    return name.startswith(_COMMUNICATING)


def _spans(read: _Read, events: HostEvents, names: NameTable, window_ends_ns: Ints) -> Spans:
    """Return host events as ranges.

    Args:
        read: All events.
        events: The events to return.
        names: Table to which their names are added.
        window_ends_ns: When the recording ended. A range that ends exactly then was still open.
    """
    codes = read.columns.names
    return Spans(
        start_ns=events.start_ns,
        end_ns=events.end_ns,
        process=read.processes.of_host(events.pid),
        lane=events.tid,
        name_id=_intern(codes, events.name, names, enrich.UNNAMED_RANGE),
        # Kineto does not record the kind; our ranges of collectives may end on other threads.
        is_start_end=codes.which(events.name, _is_of_collective).astype(np.int64),
        is_open=np.isin(events.end_ns, window_ends_ns).astype(np.int64),
    )


def _is_of_collective(name: str) -> bool:
    return name.startswith(tuple(f"{collective}|" for collective in COLLECTIVES))


_SYNC_KINDS = {
    "Stream Wait Event": SyncKind.STREAM_WAIT,
    "Event Sync": SyncKind.HOST_WAIT_EVENT,
    "Stream Sync": SyncKind.HOST_WAIT_STREAM,
    "Context Sync": SyncKind.HOST_WAIT_DEVICE,
}
_NO_SYNCS = (
    "synchronizations were not recorded (torch.profiler records them with "
    "experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True))"
)
_ONLY_CUDA = "synchronizations were not recorded, which torch.profiler does on CUDA only"
_NO_RECORDS = "the trace does not tell which records stream waits are for, as with CUDA 12.9 and later"


def _synchronizations(read: _Read) -> tuple[Synchronizations, str, str | None, Ints]:
    """Return the synchronizations of the trace.

    They come from events for waits, if these were recorded, and from the calls of CUDA that wait or record an event.
    The calls alone do not tell which stream waits. Where waits were recorded, a call without one is of a stream without
    work. A wait names its record by the number and the stream of the call that made the record.

    Returns:
        The synchronizations; :attr:`.Trace.sync_source`; :attr:`.Trace.sync_reason`, why the records are not known; and
        the number of the CUDA event of each synchronization.
    """
    # The waits, and those of the calls that no wait was recorded for.
    codes, launches = read.columns.names, read.calls
    of_calls = read.processes.of_host(launches.pid)
    is_wait = codes.which(read.waits.name, _SYNC_KINDS.__contains__)
    waits, of_waits = select(read.waits, is_wait), read.processes.of_table(3, len(read.waits))[is_wait]
    seen = set(zip(of_waits.tolist(), waits.correlation.tolist(), strict=True))
    rows = np.flatnonzero(codes.which(launches.name, orders_work)).tolist()
    keys = zip(of_calls[rows].tolist(), launches.correlation[rows].tolist(), strict=True)
    unseen = np.array([row for row, key in zip(rows, keys, strict=True) if key not in seen], np.int64)
    only_calls = select(launches, unseen)
    both, owner = concatenate(waits, only_calls), np.concatenate([of_waits, of_calls[unseen]])
    kind = np.concatenate(
        [_by_text(codes, waits.name, _SYNC_KINDS.__getitem__), _by_text(codes, only_calls.name, _ordering_kind)]
    )
    # The rows of waits and calls; ``awaits`` refers to rows of records that follow them.
    count = len(both)
    is_known = (both.awaited_record > 0) & (both.awaited_stream >= 0)
    lane = both.stream.copy()
    # If waits of streams were recorded at all, a call for which none was recorded is of a stream without work.
    if SyncKind.STREAM_WAIT in kind[: len(waits)]:
        lane[(np.arange(count) >= len(waits)) & (kind == SyncKind.STREAM_WAIT)] = NO_WORK
    calls = Synchronizations(
        kind=kind,
        start_ns=both.start_ns,
        end_ns=both.end_ns,
        process=owner,
        thread=_threads_of_calls(launches, of_calls, both.correlation, owner),
        correlation=both.correlation,
        device=both.device,
        stream=lane,
        awaits=np.where(is_known, count + np.cumsum(is_known) - 1, UNKNOWN),
    )
    # A row for each record that a wait names; these rows follow the others.
    known = int(is_known.sum())
    nothing, no_time = np.full(known, UNKNOWN), np.full(known, NO_TIME)
    records = replace(
        select(calls, is_known),
        kind=np.full(known, SyncKind.RECORD, np.int64),
        start_ns=no_time,
        end_ns=no_time,
        thread=nothing,
        correlation=both.awaited_record[is_known],
        stream=both.awaited_stream[is_known],
        awaits=nothing,
    )
    can_record = not len(launches) or codes.which(launches.name, _is_of_cuda).any()
    reason = None if known else _NO_RECORDS if len(waits) else _NO_SYNCS if can_record else _ONLY_CUDA
    awaited = np.concatenate([both.awaited_event, nothing])
    return concatenate(calls, records), "kineto" if known else "none", reason, awaited


def _ordering_kind(name: str) -> SyncKind:
    kind = ordering_kind(name)
    assert kind is not None
    return kind


def _is_of_cuda(name: str) -> bool:
    return name.startswith("cu")


def _threads_of_calls(calls: CallEvents, of_calls: Ints, correlation: Ints, process: Ints) -> Ints:
    """Return the threads that made some calls, found by number and process; ``UNKNOWN`` for a call that is not there.

    Args:
        calls: The calls that were recorded.
        of_calls: Their processes.
        correlation: Numbers of the calls that are asked for. If a number occurs twice, the last call with it counts.
        process: Processes of the calls that are asked for.
    """
    found = np.full(len(correlation), UNKNOWN, np.int64)
    for owner in distinct(process):
        asked, offered = np.flatnonzero(process == owner), np.flatnonzero(of_calls == owner)
        if not len(offered):
            continue
        order = offered[np.argsort(calls.correlation[offered], kind="stable")]
        numbers = calls.correlation[order]
        at = np.searchsorted(numbers, correlation[asked], side="right") - 1
        is_there = (at >= 0) & (numbers[at] == correlation[asked])
        found[asked] = np.where(is_there, calls.tid[order[at]], UNKNOWN)
    return found


def _collective_metadata(codes: Codes, recorded: KernelCollectives, names: NameTable) -> CollectiveMetadata:
    """Return the metadata of the collectives that were recorded with kernels, which are the first activities."""
    return fill(
        CollectiveMetadata,
        len(recorded),
        activity=recorded.kernel,
        op_id=_intern_texts(codes, recorded.operation, names),
        bytes=recorded.bytes,
        group_id=_intern_texts(codes, recorded.group, names),
        group_size=recorded.group_size,
        sequence=recorded.sequence,
    )


def _intern(codes: Codes, column: Ints, names: NameTable, unnamed: str = "") -> Ints:
    """Return the indices in ``names`` of a column of codes, for ``Trace.names``.

    A row without a name gets the index of ``unnamed``, or ``UNKNOWN`` if that is empty.
    """

    def number(code: int) -> int:
        name = codes.texts[code] if codes.is_text[code] else unnamed
        return names.intern(name) if name else UNKNOWN

    return _map(column, number)


def _intern_texts(codes: Codes, column: Ints, names: NameTable) -> Ints:
    """Return the indices in ``names`` of a column of codes of texts that may be empty; ``UNKNOWN`` stays."""
    return _map(column, lambda code: UNKNOWN if code == UNKNOWN else names.intern(codes.texts[code]))


def _by_text(codes: Codes, column: Ints, number: Callable[[str], int]) -> Ints:
    """Return ``number(text)`` for the text of each code in a column."""
    return _map(column, lambda code: number(codes.texts[code]))


def _map(column: Ints, number: Callable[[int], int]) -> Ints:
    """Return ``number(value)`` for each value of a column.

    It is called once for each distinct value, in the order in which the values first occur.
    """
    first, which = distinct_rows(column)
    found = np.full(len(first), UNKNOWN, np.int64)
    for place in np.argsort(first).tolist():
        found[place] = number(int(column[first[place]]))
    return found[which]


def _thread_names(read: _Read) -> dict[tuple[int, int], str]:
    """Return the names of threads by (process, thread).

    Threads of autograd's engine get torch's name for them, but not the threads that the steps run on.
    """
    columns, of_pid = read.columns, read.processes.of_pid.tolist()
    names = {(of_pid[pid], tid): text for pid, tid, text in columns.thread_names}
    steps = select(read.ranges, columns.names.which(read.ranges.name, _is_step))
    main = set(zip(read.processes.of_host(steps.pid).tolist(), steps.tid.tolist(), strict=True))
    engine = [(of_pid[pid], tid) for pid, tid in columns.engine_threads]
    names |= {thread: AUTOGRAD for thread in engine if thread not in main}
    return {(process, tid): name for (process, tid), name in names.items() if tid != UNKNOWN}


def _is_step(name: str) -> bool:
    return name.startswith("ProfilerStep#")
