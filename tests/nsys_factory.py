"""Captures with known truth, written through the tables of each generation of ``nsys export --type sqlite``."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ddp_prof.trace import UNKNOWN, Category, Kind, Trace

HARDWARE, MACHINE = 1, 2


def global_tid(process: int, thread: int) -> int:
    return HARDWARE << 56 | MACHINE << 48 | process << 24 | thread


@dataclass
class Kernel:
    """A kernel, a copy (``kind="memcpy"``), a memory set or a graph, with its launch call."""

    name: str
    start: int
    end: int
    launch: int | None
    thread: int
    process: int = 100
    stream: int = 7
    device: int = 0
    kind: str = "kernel"
    bytes: int = 0
    copy_kind: int = 8
    """Of a copy: 1 to the device, 8 within it, 10 to another device."""
    from_device: int | None = None
    to_device: int | None = None
    """Of a copy, the devices that it copies from and to, where they are recorded."""
    call: str = "cudaLaunchKernel"
    """That launches it."""
    grid: int = 64
    number: int | None = None
    """Of the launch call; by default calls are numbered as they are listed."""
    is_lost: bool = False
    """Whether its launch alone was recorded."""


@dataclass
class Sync:
    """A call that records an event or waits; ``call`` is its name, ``sync_type`` what the release says it is."""

    call: str
    at: int
    number: int
    stream: int
    event: int = 4294967295
    sync_id: int = 4294967295
    sync_type: int = 3
    thread: int = 100
    process: int = 100
    device: int = 0
    lasts: int = 1
    has_row: bool = True
    """Whether it is in the table of event records or of synchronizations; else only its call is recorded."""


@dataclass
class Range:
    """An NVTX range; ``end=None`` was open when recording stopped."""

    name: str
    start: int
    end: int | None
    thread: int
    process: int = 100
    domain: str | None = None
    is_start_end: bool = False
    registered: bool = False


@dataclass
class Capture:
    """Everything that a capture holds."""

    kernels: list[Kernel] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    syncs: list[Sync] = field(default_factory=list)
    has_event_records: bool = True


KINDS = {Kind.KERNEL: "kernel", Kind.COPY: "memcpy", Kind.MEMORY_SET: "memset", Kind.GRAPH: "graph"}
NAMES = {Category.COMPUTE: "gemm", Category.COMMUNICATION: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"}


def capture_of(trace: Trace) -> Capture:
    """What an export of a drawn trace holds."""
    capture = Capture(threads=dict(trace.threads))
    activities, calls = trace.activities, trace.calls
    for row, call in enumerate(trace.launching_calls.tolist()):
        capture.kernels.append(
            Kernel(
                NAMES.get(Category(activities.category[row]), "") if activities.kind[row] == Kind.KERNEL else "x",
                int(activities.start_ns[row]),
                int(activities.end_ns[row]),
                None if call == UNKNOWN else int(calls.start_ns[call]),
                0 if call == UNKNOWN else int(calls.lane[call]),
                int(activities.process[row]),
                int(activities.lane[row]),
                int(activities.device[row]),
                KINDS[Kind(activities.kind[row])],
            )
        )
    for row, name_id in enumerate(trace.spans.name_id.tolist()):
        spans = trace.spans
        end = None if spans.is_open[row] else int(spans.end_ns[row])
        name, start, lane = trace.names[name_id], int(spans.start_ns[row]), int(spans.lane[row])
        capture.ranges.append(Range(name, start, end, lane, int(spans.process[row])))
    return capture


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
US = 1_000
STEP_NS = 40 * US


def bucket_steps(*lengths_us: int, has_event_records: bool = True) -> Capture:
    """Steps of a gradient, an all-reduce that waits for it, compute that goes on, and a copy that needs the all-reduce.

    us         0         10        20        30        40
    stream 7   .gggggcccccccccc..........kkk              stands still for 10 us where the all-reduce takes 20
    stream 20  ......AAAAAAAAAAAAAAAAAAAA

    Args:
        lengths_us: Of the all-reduce of each step.
        has_event_records: Whether the table of event records was recorded.
    """
    capture = Capture(has_event_records=has_event_records)
    for step, length in enumerate(lengths_us):
        at, first = step * STEP_NS, 10 * step
        done = at + (5 + length) * US
        copy = max(done, at + 15 * US) + 1
        capture.ranges.append(Range(f"step {step}", at, at + STEP_NS, 100))
        capture.kernels += [
            Kernel("gradient", at + 1 * US, at + 5 * US, at, 100, number=first + 1),
            Kernel(NCCL, at + 5 * US, done, at + 300, 100, stream=20, number=first + 4),
            Kernel("other", at + 5 * US, at + 15 * US, at + 500, 100, number=first + 6),
            Kernel("copy back", copy, copy + 3 * US, at + 700, 100, kind="memcpy", number=first + 8),
        ]
        ids = 41 + 2 * step
        capture.syncs += [
            Sync("cudaEventRecord_v3020", at + 100, first + 2, 7, event=5, sync_id=ids),
            Sync("cudaStreamWaitEvent_v3020", at + 200, first + 3, 20, event=5, sync_id=ids),
            Sync("cudaEventRecordWithFlags_v11010", at + 400, first + 5, 20, event=5, sync_id=ids + 1),
            Sync("cudaStreamWaitEvent_v3020_ptsz", at + 600, first + 7, 7, event=5, sync_id=ids + 1),
            Sync("cudaDeviceSynchronize_v3020", at + 800, first + 9, 4294967295),
        ]
    return capture


@dataclass(frozen=True)
class Generation:
    """What distinguishes the exports of one release from those of others."""

    product: str
    metadata: str | None
    schema: str
    lazy: bool = True
    open_end: int | None = None
    without: tuple[str, ...] = ()
    with_columns: dict[str, str] = field(default_factory=dict)


KERNEL, COPY, MEMORY_SET = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CALL, NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
SYNC, EVENT = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_PREFIX = "start deviceId contextId streamId correlationId globalPid end"

TABLES = {
    "StringIds": "id value",
    KERNEL: f"{_PREFIX} demangledName shortName gridX gridY gridZ blockX blockY blockZ graphNodeId",
    COPY: f"{_PREFIX} bytes copyKind srcKind dstKind srcDeviceId dstDeviceId graphNodeId",
    MEMORY_SET: f"{_PREFIX} value bytes memKind",
    CALL: "start end eventClass globalTid correlationId nameId returnValue",
    GRAPH: f"{_PREFIX} graphId graphExecId",
    SYNC: f"{_PREFIX} syncType eventId",
    EVENT: "deviceId contextId streamId correlationId globalPid eventId",
    NVTX: "start end eventType rangeId category color text globalTid endGlobalTid textId domainId jsonText",
    "ThreadNames": "nameId priority globalTid",
    "PROCESSES": "globalPid pid name",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    "OSRT_API": "start end eventClass globalTid nameId",
}
_GREEN = {KERNEL: "greenContextId", COPY: "greenContextId", MEMORY_SET: "greenContextId"}

GENERATIONS = {
    item.product: item
    for item in (
        Generation("2020.3", None, "", open_end=0, without=("PROCESSES", "TARGET_INFO_SESSION_START_TIME")),
        Generation("2022.2", "EXPORT_META_DATA", "2.9.1", lazy=False, open_end=-1),
        Generation("2023.4", "META_DATA_EXPORT", "3.7.2", with_columns=_GREEN),
        Generation("2024.6", "META_DATA_EXPORT", "3.16.1", with_columns=_GREEN | {NVTX: "binaryData"}),
        Generation(
            "2025.3",
            "META_DATA_EXPORT",
            "3.20.2",
            with_columns=_GREEN | {NVTX: "binaryData", SYNC: "deprecatedSyncType eventSyncId"},
        ),
        Generation(
            "2026.2",
            "META_DATA_EXPORT",
            "3.25.0",
            without=("PROCESSES",),
            with_columns=_GREEN
            | {
                KERNEL: "greenContextId graphId clusterX tensorSizeMinusOneElements",
                NVTX: "binaryData",
                SYNC: "deprecatedSyncType eventSyncId",
                EVENT: "timestamp eventSyncId",
            },
        ),
        Generation(
            "2026.4",
            "META_DATA_EXPORT",
            "3.28.1",
            lazy=False,
            with_columns=_GREEN | {KERNEL: "greenContextId graphId clusterX", NVTX: "binaryData eventId"},
        ),
    )
}
DEMANGLED_SUFFIX = "(ncclDevKernelArgsStorage<4096ul>)"


class _Writer:
    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.strings: dict[str, int] = {}
        self.columns: dict[str, list[str]] = {}
        self.rows: dict[str, list[list[object]]] = {}
        if not generation.lazy:
            for table in TABLES:
                self._create(table)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 17)

    def insert(self, table: str, **row: object) -> None:
        if table in self.generation.without:
            return
        self._create(table)
        self.rows[table].append([row.get(column) for column in self.columns[table]])

    def _create(self, table: str) -> None:
        if table in self.columns or table in self.generation.without:
            return
        extra = self.generation.with_columns.get(table, "")
        self.columns[table] = (TABLES.get(table, "name value") + " " + extra).split()
        self.rows[table] = []

    def save(self, path: Path) -> None:
        """Without what keeps a database whole in a crash, which is most of the time that a small one takes."""
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; BEGIN")
            for table, columns in self.columns.items():
                declared = ", ".join(f'"{column}" {_type(table, column)}' for column in columns)
                database.execute(f'CREATE TABLE "{table}" ({declared})')
                places = ", ".join("?" * len(columns))
                database.executemany(f'INSERT INTO "{table}" VALUES ({places})', self.rows[table])
            database.execute("COMMIT")


def _type(table: str, column: str) -> str:
    if (table, column) == (NVTX, "eventId"):
        return "INTEGER PRIMARY KEY"
    return "TEXT" if column in {"value", "text", "name", "jsonText", "utcTime", "localTime"} else "INTEGER"


def write_capture(path: Path, capture: Capture, product: str = "2024.6") -> Path:
    """Write a capture as the given release would export it."""
    generation = GENERATIONS[product]
    writer = _Writer(generation)
    _write_kernels(writer, capture)
    _write_ranges(writer, capture, generation)
    _write_syncs(writer, capture)
    for (process, thread), name in capture.threads.items():
        writer.insert("ThreadNames", nameId=writer.string(name), priority=0, globalTid=global_tid(process, thread))
    for process in sorted({kernel.process for kernel in (*capture.kernels, *capture.ranges)}):
        writer.insert("PROCESSES", globalPid=global_tid(process, 0), pid=process, name="python3")
    writer.insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_700_000_000_000_000_000)
    if generation.metadata:
        writer.insert(generation.metadata, name="EXPORT_PRODUCT_VERSION", value=f"{product}.0.1")
        writer.insert(generation.metadata, name="EXPORT_SCHEMA_VERSION", value=generation.schema)
    for text, number in writer.strings.items():
        writer.insert("StringIds", id=number, value=text)
    writer.save(path)
    return path


def _write_kernels(writer: _Writer, capture: Capture) -> None:
    per_process: dict[int, int] = {}
    for kernel in capture.kernels:
        # Correlation ids count per process, so they collide between processes.
        per_process[kernel.process] = per_process.get(kernel.process, 0) + 1
        correlation = per_process[kernel.process] if kernel.number is None else kernel.number
        _write_launch(writer, kernel, correlation)
        if kernel.is_lost:
            continue
        place = {"deviceId": kernel.device, "contextId": 1, "greenContextId": None, "streamId": kernel.stream}
        writer.insert(
            {"kernel": KERNEL, "memcpy": COPY, "memset": MEMORY_SET, "graph": GRAPH}[kernel.kind],
            **place,
            start=kernel.start,
            end=kernel.end,
            correlationId=correlation,
            globalPid=global_tid(kernel.process, 0),
            demangledName=writer.string(kernel.name),
            shortName=writer.string(kernel.name.partition("(")[0]),
            bytes=kernel.bytes,
            copyKind=kernel.copy_kind,
            srcDeviceId=kernel.from_device,
            dstDeviceId=kernel.to_device,
            gridX=kernel.grid,
            gridY=1,
            gridZ=1,
            blockX=128,
            blockY=1,
            blockZ=1,
            value=0,
            tensorSizeMinusOneElements="",
        )


def _write_launch(writer: _Writer, kernel: Kernel, correlation: int) -> None:
    if kernel.launch is not None:
        writer.insert(
            CALL,
            start=kernel.launch,
            end=kernel.launch + 5_000,
            eventClass=0,
            globalTid=global_tid(kernel.process, kernel.thread),
            correlationId=correlation,
            nameId=writer.string(f"{kernel.call}_v7000"),
            returnValue=0,
        )


def _write_syncs(writer: _Writer, capture: Capture) -> None:
    for sync in capture.syncs:
        writer.insert(
            CALL,
            start=sync.at,
            end=sync.at + sync.lasts,
            eventClass=0,
            globalTid=global_tid(sync.process, sync.thread),
            correlationId=sync.number,
            nameId=writer.string(sync.call),
            returnValue=0,
        )
        is_record = "EventRecord" in sync.call
        if sync.has_row and (not is_record or capture.has_event_records):
            writer.insert(
                EVENT if is_record else SYNC,
                start=sync.at,
                end=sync.at + 1,
                deviceId=sync.device,
                contextId=1,
                streamId=sync.stream,
                correlationId=sync.number,
                globalPid=global_tid(sync.process, 0),
                eventId=sync.event,
                syncType=sync.sync_type,
                eventSyncId=sync.sync_id,
            )


def _write_ranges(writer: _Writer, capture: Capture, generation: Generation) -> None:
    domains: dict[tuple[int, str | None], int] = {}
    for range_ in capture.ranges:
        tid = global_tid(range_.process, range_.thread)
        key = (range_.process, range_.domain)
        if key not in domains:
            domains[key] = 0 if range_.domain is None else 1 + sum(process == range_.process for process, _ in domains)
            if range_.domain is not None:  # made before recording began
                writer.insert(
                    NVTX, start=-1_957_198_520, eventType=75, text=range_.domain, globalTid=tid, domainId=domains[key]
                )
        writer.insert(
            NVTX,
            start=range_.start,
            end=generation.open_end if range_.end is None else range_.end,
            eventType=60 if range_.is_start_end else 59,
            text=None if range_.registered else range_.name,
            textId=writer.string(range_.name) if range_.registered else None,
            globalTid=tid,
            endGlobalTid=tid if range_.is_start_end else None,
            domainId=domains[key],
        )
