"""Reads what ``nsys export`` writes, of any release: a SQLite database, or a folder with a file per table.

Releases differ in their tables and columns. An absent or empty table means that no such event was recorded; it is never
an error. A global id holds several numbers with these widths in bits, from the highest bits down:
``<hardware:8><machine:8><process:24><thread:24>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.columns import by_number
from ddp_prof.errors import TraceError
from ddp_prof.file_kinds import is_sqlite
from ddp_prof.growing_column import in_order, in_parts
from ddp_prof.ingest import ReadOptions, collectives, enrich
from ddp_prof.ingest.call_order import infer_waits
from ddp_prof.ingest.export_tables import HOLDS, ExportTables, GatheredColumns
from ddp_prof.ingest.names import NameTable, kernel_categories, read_strings
from ddp_prof.ingest.nsys_program import recording_version
from ddp_prof.ingest.nsys_synchronization import Found, find_synchronizations, process_ids, read_rows, thread_ids
from ddp_prof.ingest.shifted_copies import find_shifted_copies
from ddp_prof.ingest.sqlite_columns import open_sqlite
from ddp_prof.ingest.table_folder import TableFolder
from ddp_prof.manifest import MOST_RANKS, Manifest, load_manifest, manifest_path
from ddp_prof.notes import Doubt
from ddp_prof.table import UNKNOWN, Ints, Mask, are_repeated, constant_column, distinct, rows_of, select, translate
from ddp_prof.threads import in_thread, in_threads
from ddp_prof.trace import Activities, CallDetails, Calls, Category, Kind, Overhead, Spans, Trace

KERNELS, COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
COPY_KIND, COPY_DEVICES = "copyKind", ("srcDeviceId", "dstDeviceId")
ACTIVITIES = {
    KERNELS: Kind.KERNEL,
    COPIES: Kind.COPY,
    "CUPTI_ACTIVITY_KIND_MEMSET": Kind.MEMORY_SET,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": Kind.GRAPH,
}
"""The tables of activities, in the order in which they are read."""
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
OVERHEADS = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")

_PUSH_POP, _START_END = 59, 60
_RANGES = ("eventType", (_PUSH_POP, _START_END))
"""The rows that are ranges, by the type of the event; other rows name domains and the like, and may hold anything."""
_TEXT, _PAYLOADS = "text", ("jsonText", "jsonTextId")
"""Columns of a range: its name, if that is not in the table of strings; its payload, and the id of a payload in the
table of strings."""
_HAS_TEXT, _HAS_PAYLOAD = 1, 2 | 4
"""Bits in the column ``HOLDS``, which tells which of these three columns a range has."""
ACTIVITY_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes")
RANGE_COLUMNS = ("start", "end", "eventType", "globalTid")
CALL_COLUMNS = ("start", "globalTid", "correlationId")
CALL_NAME = "nameId"
_LATER_VERSION = re.compile(r"(\w+)_V\d+")  # NVTX_EVENTS_V2
_CALL_VERSION = re.compile(r"_v\d{4,}$")  # cudaLaunchKernel_v7000
_NO_MPI = "MPI calls are not read: only kernels and copies of NCCL and the like communicate here"
_EXPORT_AGAIN = "export it again, or record each rank in a file of its own"
LEAST_ROWS_COUNTED = 9_000_000
"""The rows of an export are counted from this number on: fewer rows fit into the memory of any machine."""
_LEAST_BYTES_PER_ROW = 15
"""Least bytes that a row of an export takes, so the size of the file bounds the number of rows."""
_WARNINGS = (2, 3)
"""Severities of diagnostic events: a warning and an error."""
_UNNAMED = {Kind.COPY: "memcpy", Kind.MEMORY_SET: "memset", Kind.GRAPH: "CUDA graph"}
"""Names for activities that have none in an export."""


def count_rows(path: Path) -> int:
    """Return about how many activities, calls and ranges an export holds; 0 if it is no large SQLite file."""
    if not path.is_file() or path.stat().st_size < LEAST_ROWS_COUNTED * _LEAST_BYTES_PER_ROW:
        return 0
    with path.open("rb") as head:
        if not is_sqlite(head.read(16)):
            return 0
    with open_sqlite(path) as file:
        tables = [table for table in (*ACTIVITIES, CALLS, NVTX) if table in file.columns]
        last: list[int] = file.run_with_deadline(
            lambda: [file.rows(f'SELECT max(rowid) FROM "{table}"')[0][0] for table in tables]
        )
        rows = min(sum(last), file.most_rows)  # the number of the last row may be larger than the number of rows
        return rows if rows >= LEAST_ROWS_COUNTED else 0


def load_nsys_sqlite(path: Path, options: ReadOptions, run: Path | None = None) -> Trace:
    """Read and return a whole export; arguments and errors are those of :func:`ddp_prof.ingest.load.load_trace`.

    ``run`` is the file that the ``run.json`` lies beside, if that is not the export.
    """
    with open_sqlite(path) as file:
        manifest = load_manifest(manifest_path(run or path))
        return file.run_with_deadline(lambda: _load(file, manifest, options))


def load_nsys_table_folder(path: Path, options: ReadOptions) -> Trace:
    """Read and return an export that is a folder of tables.

    Arguments and errors are those of :func:`.load.load_trace`.
    """
    file = TableFolder(path)
    manifest = load_manifest(manifest_path(path))
    return file.run_with_deadline(lambda: _load(file, manifest, options))


def _load(file: ExportTables, manifest: Manifest | None, options: ReadOptions) -> Trace:
    """Read the tables of an export, build the trace, check it, and complete it."""
    _require_export(file)
    strings = read_strings(file)
    # Columns of the file that the trace does not share end with _build, so that completing it needs no more memory.
    trace, beside = _build(file, strings, manifest, options)
    trace = replace(trace, is_launch=enrich.find_launches(trace.calls, beside.kinds))
    trace, events = enrich.leave_out_captured_copies(trace, beside.kinds, beside.events)
    trace = enrich.mark_peer_copies(trace, beside.kinds, beside.within_one)
    # Copies become communication before collectives get their metadata. None of these functions adds or removes
    # activities or calls, so the join of activities with their launching calls stays valid.
    trace = enrich.close_open_ranges(enrich.report_unresolved_names(enrich.refuse_impossible_times(trace)))
    trace = enrich.cut_overlong_activities(enrich.doubt_streams(trace))
    trace = enrich.doubt_ranks(enrich.name_ranks(trace))
    trace = collectives.mark_copies_that_communicate(trace, beside.within_device)
    trace = collectives.mark_reductions_of_one_rank(trace, options.comm_patterns)
    trace = infer_waits(trace, events)
    if beside.has_payloads:
        trace = collectives.add_nccl_metadata(trace, _nccl_payloads(file, strings))
    trace = collectives.name_operations(trace)
    return enrich.add_launch_shapes(trace, beside.launches) if options.with_launches else trace


class _Beside(NamedTuple):
    """What completing a trace needs beside it.

    Attributes:
        kinds: The :class:`.CallKind` of each call.
        within_device: Which activities are, or may be, copies within one device.
        within_one: Which activities are known to copy within one device.
        events: See :attr:`.Found.events`.
        has_payloads: Whether ranges have payloads.
        launches: The columns that :func:`.add_launch_shapes` takes; empty if they were not read.
    """

    kinds: Ints
    within_device: Mask
    within_one: Mask
    events: Ints | None
    has_payloads: bool
    launches: list[Ints]


def _build(
    file: ExportTables, strings: Mapping[int, str], manifest: Manifest | None, options: ReadOptions
) -> tuple[Trace, _Beside]:
    """Read the tables of an export; return a trace of them that is still to be completed, and what that needs.

    ``strings`` are the strings of the export by id.
    """
    # The tables are read in parallel, those that take longest first: NumPy and Arrow work outside Python's lock.
    activity_columns, call_columns, range_rows, synchronization_rows = in_threads(
        partial(_activity_columns, file, options.with_launches),
        partial(_call_columns, file),
        partial(_range_rows, file),
        partial(read_rows, file),
    )
    # The columns of the ranges are deleted as soon as they are used, to free their memory.
    names = NameTable()
    ranges, texts = range_rows.result()
    spans = _spans(ranges, texts, strings, names)
    has_payloads = bool(np.any(ranges[HOLDS] & _HAS_PAYLOAD))
    del ranges, range_rows
    columns, copies, launches = activity_columns.result()
    enrich.refuse_shared_process_ids(file.path, columns["globalPid"])
    calls, calls_again = call_columns.result()
    synchronizations = in_thread(partial(_find_synchronizations, file, calls, strings, synchronization_rows))
    tid = calls["globalTid"]
    columns["globalPid"] = _complete_processes(columns["globalPid"], tid)
    columns["deviceId"] = _complete_devices(columns["deviceId"], columns["globalPid"])
    kernel_names = _kernel_names(file, columns, strings, names)
    activities = _activities(columns, kernel_names, names, options.comm_patterns)
    _name_copies(activities, copies[COPY_KIND], names)
    within_device, within_one = _mark_copies(activities, copies)
    call_details = _call_details(calls, strings, names) if options.with_launches else None
    facts = _read_facts(file, activities, strings)
    starts = {"activities": activities.start_ns, "ranges": spans.start_ns, "calls": calls["start"]}
    has_start, counts, repeated, repeated_collectives = _find_rows(columns, activities, spans, calls, starts)
    is_ownerless = counts["activities"] & (activities.process == UNKNOWN) & (len(tid) > 0)
    counts["activities"] &= ~is_ownerless
    # nsys export --ts-normalize=true adds the start of the session to all times.
    is_utc = enrich.are_utc(start_ns[rows_of(has_start[table])] for table, start_ns in starts.items())
    has_no_end = has_start["activities"] & (columns["end"] < columns["start"])
    waits = synchronizations.result()
    trace = Trace(
        path=file.path,
        source=file.source,
        names=tuple(names),
        activities=select(activities, counts["activities"]),
        spans=select(spans, counts["ranges"]),
        calls=select(Calls(calls["start"], process_ids(tid), thread_ids(tid), calls["correlationId"]), counts["calls"]),
        synchronizations=waits.calls,
        sync_source=waits.source,
        sync_reason=waits.reason,
        call_details=call_details and select(call_details, counts["calls"]),
        warnings=(
            *enrich.warn_missing_starts(file.path, has_start),
            *enrich.warn_missing_ends(int(has_no_end.sum())),
            *_warn_ownerless(file.path, is_ownerless),
            *_warn_deviceless(activities.device),
            *([_NO_MPI] if facts["ranks"] else []),
            *enrich.warn_repeated(repeated + calls_again, repeated_collectives),
            *enrich.report_losses("nsys", _diagnoses(file)),
        ),
        manifest=manifest,
        recorder=_recorder(file.path, manifest),
        **{**facts, **({"epoch_ns": 0} if is_utc else {})},
    )
    kernels = rows_of(counts["activities"][: len(next(iter(launches.values()), ()))])
    beside = _Beside(
        kinds=_kinds_of_calls(calls[CALL_NAME], strings)[rows_of(counts["calls"])],
        within_device=within_device[counts["activities"]],
        within_one=within_one[counts["activities"]],
        events=waits.events,
        has_payloads=has_payloads,
        launches=[column[kernels] for column in launches.values()],
    )
    return trace, beside


def _complete_processes(global_pid: Ints, global_tid: Ints) -> Ints:
    """Return the process of each activity, also of those without a recorded one if only one can have launched them.

    That is the only process of which calls, but no activities, were recorded. All others are ``UNKNOWN``, as is 0.

    Args:
        global_pid: The recorded process of each activity, ``UNKNOWN`` or 0 if there is none.
        global_tid: The thread of each call.
    """
    if int(global_pid.min(initial=1)) > 0 or not len(global_tid):
        return global_pid
    is_missing = (global_pid == UNKNOWN) | (global_pid == 0)
    without = set(distinct(global_tid >> 24)) - set(distinct(global_pid[~is_missing] >> 24))
    owner = without.pop() << 24 if len(without) == 1 else UNKNOWN
    if is_missing.all():
        return constant_column(owner, len(global_pid))
    return np.where(is_missing, owner, global_pid)


def _complete_devices(device: Ints, global_pid: Ints) -> Ints:
    """Return the device of each activity, also of those without a recorded one if their process uses only one other.

    All others are ``UNKNOWN``.
    """
    if int(device.min(initial=0)) != UNKNOWN:
        return device
    completed: Ints = device.copy()
    for process in distinct(global_pid[device == UNKNOWN]):
        mine = global_pid == process
        if len(known := set(distinct(device[mine])) - {UNKNOWN}) == 1:
            completed[mine] = known.pop()
    return completed


def _warn_deviceless(device: Ints) -> Iterator[str]:
    """Yield a warning if the device of activities is not known."""
    if count := int((device == UNKNOWN).sum()):
        yield (
            f"{count:,} {by_number(count, 'activity has', 'activities have')} no number of a device: those of a "
            "process are taken for work of one device, and whether processes share it is not known"
        )


def _warn_ownerless(path: Path, is_ownerless: Mask) -> Iterator[str]:
    """Yield a warning if it is not known which process launched an activity; raise TraceError if it is of none."""
    count, why = int(is_ownerless.sum()), "no process is recorded for them, and calls of several may have launched them"
    if count == len(is_ownerless) > 0:
        which = by_number(count, "rank its only activity is", f"ranks its {count:,} activities are")
        raise TraceError(path, f"nothing tells which {which} of: {why}", _EXPORT_AGAIN)
    if count:
        yield Doubt(f"{count:,} of {len(is_ownerless):,} activities left out: {why}")


def _find_rows(
    columns: Mapping[str, Ints],
    activities: Activities,
    spans: Spans,
    calls: Mapping[str, Ints],
    starts: Mapping[str, Ints],
) -> tuple[dict[str, Mask], dict[str, Mask], int, int]:
    """Find the rows that count: those that have a start, and are not in the file already.

    Args:
        columns: Columns of all activities.
        activities: The activities.
        spans: The ranges.
        calls: Columns of all calls, of which none is in the file twice.
        starts: The starts by table: ``activities``, ``ranges`` and ``calls``.

    Returns:
        By table, which rows have a start, and which count; how many others are in the file already, and how many of
        these are of collectives.
    """
    has_start = {table: start_ns != UNKNOWN for table, start_ns in starts.items()}
    # CUPTI gives 0 as start and end of an activity whose times it could not collect. Ranges and calls may lose theirs.
    has_start["activities"] &= (columns["start"] != 0) | (columns["end"] != 0)
    has_start["ranges"] &= (spans.start_ns != 0) | (spans.end_ns != 0)
    has_start["calls"] &= (calls["start"] != 0) | (calls["end"] > 0)
    begins_at_zero = columns["start"] == 0
    if np.count_nonzero(begins_at_zero & has_start["activities"]) > enrich.MOST_AT_ZERO:
        has_start["activities"] &= ~begins_at_zero
    again = {
        "activities": are_repeated(*(columns[name] for name in (*ACTIVITY_COLUMNS[:-1], "name", "kind")))
        & (columns["end"] > columns["start"]),
        "ranges": are_repeated(spans.start_ns, spans.end_ns, spans.process, spans.lane, spans.name_id)
        & (spans.end_ns > spans.start_ns),
        "calls": np.zeros(len(calls["start"]), np.bool_),
    }
    start_ns, end_ns, *same, number, process, _ = (columns[name] for name in ACTIVITY_COLUMNS)
    again["activities"] |= find_shifted_copies(
        start_ns, end_ns, number, process, *same, columns["name"], columns["kind"]
    )
    counts = {table: rows & ~again[table] for table, rows in has_start.items()}
    repeated = sum(int((rows & again[table]).sum()) for table, rows in has_start.items())
    collectives_again = int((activities.category[again["activities"]] == Category.COMMUNICATION).sum())
    return has_start, counts, repeated, collectives_again


def _recorder(path: Path, manifest: Manifest | None) -> str | None:
    """Return the version of the nsys that recorded an export, from the report beside it or the manifest, if known."""
    name, _, version = (manifest.profiler or "" if manifest else "").partition(" ")
    return recording_version(path) or (version.split(" ")[0] if name == "nsys" and version else None)


def _read_facts(file: ExportTables, activities: Activities, strings: Mapping[int, str]) -> dict[str, Any]:
    """Return what an export tells of the machine, the processes and itself: values of fields of ``Trace``, by name."""
    versions = [_read_value(file, name, "EXPORT_PRODUCT_VERSION") for name in ("META_DATA_EXPORT", "EXPORT_META_DATA")]
    order = ("priority", "nameId") if file.has_columns("ThreadNames", "priority") else ("nameId",)
    thread_names = file.few_rows("ThreadNames", ("globalTid",), ("nameId",), order=order)  # the last of several counts
    mpi_ranks = file.few_rows("MPI_RANKS", ("globalTid", "rank"))  # recorded with --trace=mpi
    overheads = [file.read_integers(table, ("start", "end")) for table in OVERHEADS]
    overhead_ns, overhead_end_ns = (np.concatenate([one[name] for one in overheads]) for name in ("start", "end"))
    sessions = file.few_rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), distinct=True)
    gpu_ids, gpus = _gpus(file, activities)
    return {
        "producer": next((one for one in versions if one and re.fullmatch(r"[\w.@-]{1,64}", one)), None),
        "threads": {_unpack_ids(tid): strings.get(name, "") for tid, name in thread_names},
        "ranks": {_unpack_ids(tid)[0]: rank for tid, rank in mpi_ranks if 0 <= rank < MOST_RANKS},
        "overhead": Overhead(overhead_ns, np.maximum(overhead_ns, overhead_end_ns)),
        "epoch_ns": min((start for (start,) in sessions), default=None),
        "node": _read_value(file, "TARGET_INFO_SYSTEM_ENV", "Hostname"),
        "gpus": gpus,
        "gpu_ids": gpu_ids,
    }


def _diagnoses(file: ExportTables) -> Iterator[str]:
    """Yield the warnings and errors that nsys itself wrote while it recorded."""
    for severity, text in file.few_rows("DIAGNOSTIC_EVENT", ("severity",), ("text",)):
        if severity in _WARNINGS and isinstance(text, str):
            yield text


def _require_export(file: ExportTables) -> None:
    """Raise TraceError if the tables are not those of an export of Nsight Systems, or of a release that is not known.

    If a table is there under the name of a later version alone, what it holds would seem not to be recorded.
    """
    later = {match[1]: match[0] for match in map(_LATER_VERSION.fullmatch, file.columns) if match}
    if table := next((later[name] for name in (*ACTIVITIES, CALLS, NVTX) if name in later.keys() - file.columns), None):
        reason = f"the form of its table {table} is not known"
        raise TraceError(file.path, reason, "export the report by an earlier release of nsys")
    known = {*ACTIVITIES, CALLS, NVTX, "META_DATA_EXPORT", "EXPORT_META_DATA", "StringIds"}
    if not known & file.columns.keys() or "StringTable" in file.columns:  # nvprof shares some names of tables
        found = ", ".join(sorted(file.columns)[:4]) or "no table with rows"
        raise TraceError(
            file.path,
            f"{file.kind}, but no Nsight Systems export (it holds {found})",
            "record the job with nsys profile, and export its report with nsys export",
        )


def _ends(start: Ints, end: Ints) -> Ints:
    """Return the ends, each at least its start."""
    if np.all(end >= start):  # as usual: nothing is copied
        return end
    return in_parts(len(end), lambda rows: np.maximum(start[rows], end[rows]))


def _find_synchronizations(
    file: ExportTables,
    calls: Mapping[str, Ints],
    strings: Mapping[int, str],
    rows: Future[dict[str, dict[str, Ints]]],
) -> Found:
    """Find the synchronizations of the trace, see :func:`find_synchronizations`.

    Args:
        file: The export.
        calls: Columns of all calls.
        strings: The strings of the export by id.
        rows: Will hold the tables of waits and of event records.
    """
    # Without one of these columns, calls cannot be matched: then none is given.
    is_complete = file.has_columns(CALLS, CALL_NAME, "correlationId", "globalTid", "end")
    own = calls if is_complete else {name: column[:0] for name, column in calls.items()}
    return find_synchronizations(own, strings, rows.result(), has_calls=CALLS in file.columns)


_OF_LAUNCHES = (*enrich.SHAPE_COLUMNS, enrich.REGISTERS)


def _activity_columns(
    file: ExportTables, with_launches: bool
) -> tuple[dict[str, Ints], dict[str, Ints], dict[str, Ints]]:
    """Read the tables of activities.

    Returns:
        The columns of all activities, kernels first; the columns of copies: their kind, as CUPTI numbers it, and the
        devices that they copy from and to, which are known of some copies only; and the columns of launch shapes and
        registers of all kernels, which are none unless ``with_launches``.
    """
    name = "demangledName" if file.has_columns(KERNELS, "demangledName") else "shortName"
    gathered = GatheredColumns((*ACTIVITY_COLUMNS, "name", "kind"))
    of_copies = (COPY_KIND, *COPY_DEVICES)
    copies, launches = GatheredColumns(of_copies), GatheredColumns(_OF_LAUNCHES if with_launches else ())
    for table, kind in ACTIVITIES.items():
        file.require(table, "start", "end")
        more = {COPIES: of_copies, KERNELS: _OF_LAUNCHES if with_launches else ()}.get(table, ())
        for batch in file.batches(table, (*ACTIVITY_COLUMNS, name, *more)):
            rows = len(batch[name])
            named = batch[name] if kind is Kind.KERNEL else constant_column(UNKNOWN, rows)
            gathered.add({**batch, "name": named, "kind": constant_column(kind, rows)})
            if more:
                (copies if table == COPIES else launches).add(batch)
    return gathered.columns(), copies.columns(), launches.columns()


def _kernel_names(file: ExportTables, columns: dict[str, Ints], strings: Mapping[int, str], names: NameTable) -> Ints:
    """Return the index in ``names`` of each kernel's name, ``UNKNOWN`` if it has none; of others it means nothing.

    Args:
        file: The export. A name that is missing there is taken from one of the columns with shorter names.
        columns: Columns of all activities.
        strings: The strings of the export by id.
        names: Table to which the names are added.
    """
    name_id = names.intern_ids(columns["name"], strings)
    for other in ("shortName", "mangledName"):
        unnamed = np.flatnonzero((columns["kind"] == Kind.KERNEL) & (name_id == UNKNOWN))
        if len(unnamed) and file.has_columns(KERNELS, other):
            name_id = name_id.copy()
            name_id[unnamed] = names.intern_ids(file.read_integers(KERNELS, (other,))[other][unnamed], strings)
    return name_id


def _activities(columns: dict[str, Ints], name_id: Ints, names: NameTable, comm_patterns: Sequence[str]) -> Activities:
    """Return the table of activities.

    Args:
        columns: Columns of all activities.
        name_id: Index of each kernel's name; other activities get a name here.
        names: Table of names.
        comm_patterns: Regular expressions for names of kernels that communicate, besides the known ones.
    """
    kind, pid, numbers = columns["kind"], columns["globalPid"], columns["correlationId"]
    of_kernels = kernel_categories(names, comm_patterns)
    # Activities that are no kernels: their kind tells the name and the category.
    name_of, category_of = np.full((2, max(Kind) + 1), UNKNOWN, np.int64)
    for other in set(distinct(kind)) - {Kind.KERNEL}:
        category_of[other] = Category.OTHER if other == Kind.GRAPH else Category.MEMORY
    for other, name in _UNNAMED.items():
        name_of[other] = names.intern(name) if category_of[other] != UNKNOWN else UNKNOWN

    category = in_parts(
        len(kind),
        lambda rows: np.where(kind[rows] == Kind.KERNEL, of_kernels[name_id[rows]], category_of[kind[rows]]),
    )
    names_of_all = in_parts(
        len(kind), lambda rows: np.where(kind[rows] == Kind.KERNEL, name_id[rows], name_of[kind[rows]])
    )
    return Activities(
        start_ns=columns["start"],
        end_ns=_ends(columns["start"], columns["end"]),
        process=np.where(pid == UNKNOWN, UNKNOWN, process_ids(pid)) if UNKNOWN in pid else process_ids(pid),
        device=columns["deviceId"],
        lane=columns["streamId"],
        name_id=names.fill_unknown(names_of_all, enrich.UNNAMED_KERNEL),
        kind=kind,
        category=category,
        correlation=np.where(numbers == 0, UNKNOWN, numbers) if 0 in numbers else numbers,  # CUPTI counts from 1
        bytes=columns["bytes"],
    )


_OF_HOST = {"memcpy HtoD": (1, 3, 11), "memcpy DtoH": (2, 4, 12)}
"""Names of copies from and to the host, and their kinds, as CUPTI numbers them: those to arrays and of UVM, too."""


def _name_copies(activities: Activities, kind: Ints, names: NameTable) -> None:
    """Name copies from and to the host; ``kind`` is that of each copy."""
    copies = np.flatnonzero(activities.kind == Kind.COPY)
    for name, kinds in _OF_HOST.items():
        if len(rows := copies[np.isin(kind, kinds)]):
            activities.name_id[rows] = names.intern(name)


_WITHIN_DEVICE, _BETWEEN_DEVICES = (8, 0, UNKNOWN), 10
"""Kinds of copies, as CUPTI numbers them. 8 is within a device; 0 and ``UNKNOWN`` are not known and may be so, too."""


def _mark_copies(activities: Activities, columns: Mapping[str, Ints]) -> tuple[Mask, Mask]:
    """Change the category of copies between devices to COMMUNICATION.

    ``columns`` has the kind of each copy, and the devices that it copies from and to.

    Returns:
        Which activities are, or may be, copies within one device; and which are known to be.
    """
    copies, kind = np.flatnonzero(activities.kind == Kind.COPY), columns[COPY_KIND]
    source, target = (columns[name] for name in COPY_DEVICES)
    may_be_within, has_devices = np.isin(kind, _WITHIN_DEVICE), (source != UNKNOWN) & (target != UNKNOWN)
    is_between = (kind == _BETWEEN_DEVICES) | (may_be_within & has_devices & (source != target))
    activities.category[copies[is_between]] = Category.COMMUNICATION
    within_device, within_one = np.zeros((2, len(activities)), np.bool_)
    within_device[copies[may_be_within & ~is_between]] = True
    within_one[copies[may_be_within & has_devices & (source == target)]] = True
    return within_device, within_one


def _call_columns(file: ExportTables) -> tuple[dict[str, Ints], int]:
    """Read the calls without those that are in the file twice.

    Returns:
        Their columns, sorted by correlation id, as the join of activities with their calls is then faster; calls with
        the same id stay in the order of the file. And how many calls were left out.
    """
    file.require(CALLS, "start")
    columns = file.read_integers(CALLS, (*CALL_COLUMNS, CALL_NAME, "end"))
    correlation = columns["correlationId"]
    if np.any(correlation[1:] < correlation[:-1]):
        order = np.argsort(correlation, kind="stable")
        for name, column in columns.items():  # one by one, so that only one of them is held twice
            columns[name] = in_order(column, order) if column.strides[0] else column  # stride 0: one value in all rows
    numbers = columns["correlationId"]
    if len(numbers) and numbers[0] == 0:  # none is called 0
        columns["correlationId"] = numbers = np.where(numbers == 0, UNKNOWN, numbers)
    if np.all(numbers[1:] > numbers[:-1]):  # usual: no number comes twice
        return columns, 0
    again = are_repeated(*columns.values())
    if not again.any():
        return columns, 0
    return {name: column[~again] for name, column in columns.items()}, int(again.sum())


def _call_details(calls: Mapping[str, Ints], strings: Mapping[int, str], names: NameTable) -> CallDetails:
    """Return the ends of calls, and their names without the version that CUDA adds; these are added to ``names``."""
    name_id = names.intern_ids(calls[CALL_NAME], strings, partial(_CALL_VERSION.sub, ""))
    return CallDetails(_ends(calls["start"], calls["end"]), names.fill_unknown(name_id, enrich.UNNAMED_CALL))


def ids_of_calls(strings: Mapping[int, str]) -> dict[enrich.CallKind, list[int]]:
    """Return the ids of the names of calls that launch work or capture a graph, by what they do."""
    found: dict[enrich.CallKind, list[int]] = {}
    for key, text in strings.items():
        if (kind := enrich.kind_of_call(text)) is not enrich.CallKind.OTHER:
            found.setdefault(kind, []).append(key)
    return found


def _kinds_of_calls(name_id: Ints, strings: Mapping[int, str]) -> Ints:
    """Return the :class:`.CallKind` of each call by the id of its name among the strings of the export."""
    kind_of = {number: int(kind) for kind, ids in ids_of_calls(strings).items() for number in ids}
    return translate(name_id, lambda number: kind_of.get(number, int(enrich.CallKind.OTHER)))


def _range_rows(file: ExportTables) -> tuple[dict[str, Ints], tuple[str, ...]]:
    """Read the ranges, push/pop and start/end.

    Returns:
        Their columns by name; and the distinct names that are not in the table of strings. The column ``text`` holds
        indices into these, ``UNKNOWN`` for a range with its name in the table of strings.
    """
    columns, texts = (*RANGE_COLUMNS, "textId", HOLDS), NameTable()
    file.require(NVTX, *RANGE_COLUMNS)
    gathered = GatheredColumns(columns)
    for batch in file.batches(NVTX, columns[:-1], (_TEXT, *_PAYLOADS), _RANGES):  # adds the last column, HOLDS
        rows = _are_ranges(batch["eventType"])
        gathered.add(batch if rows.all() else {name: column[rows] for name, column in batch.items()})
    found = gathered.columns()
    has_text = found[HOLDS] & _HAS_TEXT != 0
    found[_TEXT] = constant_column(UNKNOWN, len(has_text))
    # Texts are read apart and only if there are some: most exports have the names in the table of strings, and texts
    # take as long to read as all other columns.
    if has_text.any():
        inline = GatheredColumns((_TEXT,))
        for number, distinct_texts in file.text_batches(NVTX, _TEXT, _RANGES):
            inline.add({_TEXT: texts.intern_texts(distinct_texts)[number]})
        found[_TEXT] = inline.columns()[_TEXT]
        if len(found[_TEXT]) != len(has_text):
            raise TraceError(file.path, "it changed while it was read", "wait until its export has ended")
    return found, tuple(texts)


def _are_ranges(event_type: Ints) -> Mask:
    is_range: Mask = (event_type == _PUSH_POP) | (event_type == _START_END)
    return is_range


def _spans(column: dict[str, Ints], texts: Sequence[str], strings: Mapping[int, str], names: NameTable) -> Spans:
    """Return the table of ranges.

    Args:
        column: The columns that :func:`_range_rows` returned.
        texts: The names that it returned.
        strings: The strings of the export by id.
        names: Table to which the names are added.
    """
    start, end, tid = column["start"], column["end"], column["globalTid"]
    inline = np.array([*map(names.intern, texts), UNKNOWN], np.int64)  # UNKNOWN is -1: the last element
    name_id = of_table = names.intern_ids(column["textId"], strings)
    if texts:
        name_id = in_parts(
            len(start),
            lambda rows: np.where(column[_TEXT][rows] == UNKNOWN, of_table[rows], inline[column[_TEXT][rows]]),
        )

    def is_open(rows: slice) -> Ints:
        """Return 1 for the ranges that did not end.

        Releases write NULL, 0 or -1 as their end. A range opened before recording may start below 0.
        """
        begun, ended = start[rows], end[rows]
        found: Mask = (ended < begun) | ((begun < 0) & ((ended == 0) | (ended == UNKNOWN)))
        return found.astype(np.int64)

    return Spans(
        start_ns=start,
        end_ns=_ends(start, end),
        process=process_ids(tid),
        lane=thread_ids(tid),
        name_id=names.fill_unknown(name_id, enrich.UNNAMED_RANGE),
        is_start_end=in_parts(len(start), lambda rows: (column["eventType"][rows] == _START_END).astype(np.int64)),
        is_open=in_parts(len(start), is_open),
    )


def _nccl_payloads(file: ExportTables, strings: Mapping[int, str]) -> dict[tuple[int, int, int, str], str]:
    """Return the JSON payloads of NCCL's ranges by process, thread, start and name.

    A payload is in the row of its range, or in the table of strings.
    """
    held = [name for name in (_TEXT, "textId", *_PAYLOADS) if file.has_columns(NVTX, name)]
    payloads = [name for name in _PAYLOADS if name in held]
    found: dict[tuple[int, int, int, str], str] = {}
    columns = (NVTX, ("start", "globalTid", "eventType"), held)
    for start, tid, event_type, *values in file.few_rows(*columns, filled=payloads):
        row: dict[str, Any] = dict(zip(held, values, strict=True))
        name = _as_text(row.get(_TEXT)) or strings.get(row.get("textId", UNKNOWN), "")
        if event_type == _PUSH_POP and name.startswith("nccl"):
            text, number = (row.get(payload) for payload in _PAYLOADS)
            process, thread = _unpack_ids(tid)
            own = UNKNOWN if number is None else number
            found[process, thread, start, name] = _as_text(text) or strings.get(own, "")
    return found


def _as_text(value: object) -> str:
    """Return a value as text; other programs may have written bytes. An empty text for NULL."""
    return value.decode(errors="replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _unpack_ids(global_id: int) -> tuple[int, int]:
    """Return the process and the thread in a global id."""
    return global_id >> 24 & 0xFFFFFF, global_id & 0xFFFFFF


def _read_value(file: ExportTables, table: str, name: str) -> str | None:
    """Return the text for a name in a table with the columns ``name`` and ``value``; ``None`` if none or several."""
    found = {value for own, value in file.few_rows(table, (), ("name", "value"), distinct=True) if own == name}
    value = found.pop() if len(found) == 1 else None
    return value if isinstance(value, str) else None


def _parts_of_gpus(file: ExportTables) -> dict[tuple[int, int], int]:
    """Return numbers for parts of GPUs by (process, the process's own number): a GPU with several uuids is divided."""
    table = "TARGET_INFO_CUDA_DEVICE"
    seen = [row for row in file.few_rows(table, ("pid", "cudaId", "gpuId"), ("uuid",)) if row[-1]]
    uuids: dict[int, set[str]] = {}
    for _, _, gpu, uuid in seen:
        uuids.setdefault(gpu, set()).add(str(uuid))
    parts = [(gpu, uuid) for gpu, of_gpu in sorted(uuids.items()) if len(of_gpu) > 1 for uuid in sorted(of_gpu)]
    above = max(uuids, default=0) + 1
    return {
        (pid & 0xFFFFFF, device): above + parts.index((gpu, str(uuid)))
        for pid, device, gpu, uuid in seen
        if (gpu, str(uuid)) in parts
    }


def _gpus(file: ExportTables, activities: Activities) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], str]]:
    """Return the machine's number of each GPU, and its name, both by (process, the process's own number of the GPU).

    The numbers differ if a process sees only some of the GPUs. Parts of a GPU (MIG) have numbers of their own, above
    all others: what runs on one of them does not share it with what runs on another.
    """
    # Names by the machine's numbers, and all pairs of a process and a device that may be in the trace.
    rows = file.few_rows("TARGET_INFO_GPU", ("id",), ("name",))
    names = {gpu: str(name)[: enrich.MOST_LETTERS_OF_GPU] for gpu, name in rows if name is not None}
    used = list(product(distinct(activities.process), distinct(activities.device)))
    seen = file.few_rows("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId"))
    ids = {(pid & 0xFFFFFF, device): gpu for pid, device, gpu in seen}
    if not seen and len(names) == 1:  # the machine's only GPU must be the device of each process
        ids = dict.fromkeys(used, *names)
    if ids:
        return ids | _parts_of_gpus(file), {key: names[gpu] for key, gpu in ids.items() if gpu in names}
    kinds = set(names.values())  # without numbers, names are known only if all GPUs have the same name
    return ids, dict.fromkeys(used, *kinds) if len(kinds) == 1 else {}
