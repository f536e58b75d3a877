"""Gathers the events of a ``torch.profiler`` trace in columns, part by part, so that no event stays a Python object.

Of events that are not needed, such as the calls of Python functions, only the category is kept. Names and ``pid``,
which may be text, become codes: the numbers that :class:`Codes` gives to distinct values.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any, Generic, TypeGuard

import msgspec
import numpy as np

from ddp_prof.communication import GLOO
from ddp_prof.ingest import collectives
from ddp_prof.ingest.enrich import MOST, MOST_AT_ZERO, SHAPE_COLUMNS
from ddp_prof.ingest.export_tables import GatheredColumns
from ddp_prof.ingest.kineto_document import NO_ARGUMENTS, Event, EventArguments
from ddp_prof.ingest.names import ordering_kind
from ddp_prof.ingest.shifted_copies import find_shifted_copies
from ddp_prof.range_names import OPERATOR_PREFIX
from ddp_prof.table import UNKNOWN, AnyTable, Ints, Mask, Table, are_repeated, concatenate, empty, select

KERNEL = "kernel"
OTHER_KERNELS = ("concurrent_kernel", "gpu_kernel", "collective_comm")
"""Other categories of kernels, as some builds of Kineto write them: by its internal name, or for collectives alone."""
COPY, MEMORY_SET = (
    tuple(f"{vendor}{what}" for vendor in ("", "gpu_", "mlu_", "gcu_")) for what in ("memcpy", "memset")
)
OF_DEVICE = (KERNEL, *COPY, *MEMORY_SET)
"""Categories of what a device did."""
SYNCHRONIZATION, RANGE, OVERHEAD = "cuda_sync", "user_annotation", "overhead"
OPERATIONS = ("cpu_op", "operator")
"""Categories of operators; old releases of torch write the second one."""
IS_CALL = re.compile(r"(?:.*_)?(?:runtime|driver)$")  # cuda_runtime, xpu_runtime, privateuse1_driver
OF_HOST = re.compile(rf"cpu_op|operator|(?:gpu_)?user_annotation|python_function|overhead|trace|{IS_CALL.pattern}")
"""Categories on the host; one of them shows that a trace without kernels and copies is of ``torch.profiler``."""
ENGINE = "autograd::engine::evaluate_function"
"""Start of the names of operators that autograd's engine calls in a backward pass."""
COLLECTIVE_CALL = "c10d::"
"""Start of the names of torch's operators that call collectives."""
_MEMORY_OF_ROCM = re.compile(
    r"MEMORY_COPY_|__amd_rocclr_copyBuffer|Copy(?:Host|Device)To(?:Host|Device)(?:2D)?$"
    r"|(?P<fill>__amd_rocclr_fillBuffer|FillBuffer$)"
)
"""Names of the copies and memory sets that ROCm records as kernels."""
_FLOWS = frozenset("stf")
"""Values of ``ph`` of events that are arrows between other events; a trace has as many of them as calls."""
_NUMBER = re.compile(r"\d{1,18}")
_MOST_US = 2.0**52
"""Largest time in microseconds that is kept; larger ones become this one."""

OTHER_COPY, BETWEEN_DEVICES, WITHIN_DEVICE = range(3)
"""Where a copy goes. ``WITHIN_DEVICE`` also stands for copies of which this is not known."""


class Codes(dict[Any, int]):
    """Gives each distinct value a number (its code), in the order in which the values arrive.

    Attributes:
        texts: Each value as text, by its code.
        is_text: Whether each value is a text that is not empty, by its code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.is_text: list[bool] = []
        self._known: dict[Callable[[str], object], Mask] = {}  # answers of which(), by code

    def __missing__(self, value: Any) -> int:
        """Give a new value the next number; called when a value is looked up that is not known yet."""
        number = self[value] = len(self)
        # A list or an object comes as a tuple with its text, see of().
        self.texts.append(str(value[0]) if isinstance(value, tuple) else str(value))
        self.is_text.append(isinstance(value, str) and value != "")
        return number

    def of(self, values: Sequence[Any]) -> Ints:
        """Return the code of each value; values may be of any type that JSON has."""
        try:
            return np.fromiter(map(self.__getitem__, values), np.int64, len(values))
        except TypeError:  # a list or an object, which has no hash
            hashable = [(str(value),) if isinstance(value, (list, dict)) else value for value in values]
            return np.fromiter(map(self.__getitem__, hashable), np.int64, len(values))

    def which(self, codes: Ints, is_wanted: Callable[[str], object]) -> Mask:
        """Return which rows have a text for which ``is_wanted`` is true; it is called once for each distinct text.

        ``codes`` holds the code of each row.
        """
        known = self._known.get(is_wanted, np.zeros(0, np.bool_))
        if len(known) < len(self.texts):
            new = (bool(is_wanted(text)) for text in self.texts[len(known) :])
            known = self._known[is_wanted] = np.concatenate([known, np.fromiter(new, np.bool_)])
        return known[codes]


@dataclass(frozen=True)
class Events(Table):
    """Events with a duration; ``name`` and ``pid`` are codes, ``tid`` is the number of the thread.

    If the file has an end before the start, ``end_ns`` is the start.
    """

    start_ns: Ints
    end_ns: Ints
    name: Ints
    pid: Ints
    tid: Ints


_OF_EVENTS = ("start_ns", "end_ns", "name", "pid", "tid")
_OF_WORK = ("device", "lane", "correlation")
"""Columns in which events are equal that are in a file twice; the others only where a table has them."""


@dataclass(frozen=True)
class HostEvents(Events):
    """Operators and ranges.

    Attributes:
        size: Bytes of the inputs if the event is torch's range of a collective; bytes of the largest argument if it is
            a ``c10d::`` call; ``UNKNOWN`` for all other events.
        is_of_one_rank: 1 for torch's record of a collective in a group of one rank, else 0.
    """

    size: Ints
    is_of_one_rank: Ints


@dataclass(frozen=True)
class CallEvents(Events):
    """Calls of CUDA, and waits of streams and of the host.

    For calls that neither record an event nor wait, all columns after ``correlation`` are ``UNKNOWN``.
    """

    correlation: Ints
    device: Ints
    stream: Ints
    awaited_record: Ints
    awaited_stream: Ints
    awaited_event: Ints


_OF_WAITS = ("device", "stream", "awaited_record", "awaited_stream", "awaited_event")
"""Columns of :class:`CallEvents` for calls that order work."""


@dataclass(frozen=True)
class DeviceEvents(Events):
    """What a device did.

    Attributes:
        named_by: Code of the ``pid`` that stands for the device; ``UNKNOWN`` if the event has a number of its device.
        copy: Where a copy goes, see :data:`WITHIN_DEVICE`; ``UNKNOWN`` if the event is no copy.
        shape: Code of the launch shape; ``UNKNOWN`` unless launches are read.
        registers: Registers per thread; ``UNKNOWN`` unless launches are read.
    """

    device: Ints
    named_by: Ints
    lane: Ints
    correlation: Ints
    bytes: Ints
    copy: Ints
    shape: Ints
    registers: Ints


@dataclass(frozen=True)
class KernelCollectives(Table):
    """The collectives that the profiler recorded with kernels.

    ``kernel`` is the row of the kernel among all kernels; ``operation`` and ``group`` are codes of names.
    """

    kernel: Ints
    operation: Ints
    bytes: Ints
    group: Ints
    group_size: Ints
    sequence: Ints


class _Rows(Generic[AnyTable]):
    """A table that grows by rows; ``kind`` is the class of the table."""

    def __init__(self, kind: type[AnyTable]) -> None:
        self.kind, self.rows = kind, 0
        self._columns = GatheredColumns([item.name for item in fields(kind)])

    def add(self, **columns: Ints) -> None:
        self._columns.add(columns)
        self.rows += len(next(iter(columns.values())))

    def table(self) -> AnyTable:
        return self.kind(**self._columns.columns())


class KinetoColumns:
    """Everything that is read from the events of a trace.

    Args:
        with_launches: Whether to read launch shapes and registers of kernels.

    Attributes:
        names: Codes of the names of events, and of other texts.
        pids: Codes of ``pid``.
        categories: Categories of the events with a duration, in lower case.
        pairs: Categories of events that are written as two entries, for their beginning and for their end.
        has_pairs: Whether there are such events, with or without a category.
        with_times, without_times: Number of events with a duration that have times, and that have none, by category.
        repeated: Number of events that are in the file twice, by category; the second one is left out.
        repeated_kernels: The names (codes) of the kernels among these.
        without_end: Number of a device's events that have no end, or an end before their start.
        is_critical_path: Whether all operators, calls and work of devices are marked as parts of a critical path;
            ``None`` if there are none of these.
        window_ends_ns: When the recording ended, as Kineto writes it.
        thread_names: (code of the ``pid``, thread, name) of each event that names a thread.
        engine_threads: Keys are (code of the ``pid``, thread) of threads other than the main one that ran autograd's
            engine.
    """

    def __init__(self, *, with_launches: bool = False) -> None:
        """Begin without events; the class describes the parameters and attributes."""
        self.names, self.pids = Codes(), Codes()
        self.categories: set[str] = set()
        self.pairs: set[str] = set()
        self.has_pairs = False
        self.with_times: dict[str, int] = defaultdict(int)
        self.without_times: dict[str, int] = defaultdict(int)
        self.without_end = 0
        self.window_ends_ns: list[int] = []
        self.thread_names: list[tuple[int, int, str]] = []
        self.engine_threads: dict[tuple[int, int], None] = {}
        self.is_critical_path: bool | None = None
        self._with_launches = with_launches
        self._shapes = Codes()  # of launch shapes: (grid, block), both as JSON
        self._rows: dict[str, _Rows[Any]] = {}  # a table for each category that is read
        self._collectives = _Rows(KernelCollectives)
        self.repeated: dict[str, int] = defaultdict(int)
        self.repeated_kernels = np.empty(0, np.int64)
        self._left_out: Mask | None = None  # which kernels are left out, if any is

    def add(self, events: Sequence[Event]) -> None:
        """Add the next events of the document."""
        # "X" is an event with a duration.
        found: dict[str | None, list[Event]] = defaultdict(list)
        others = []
        for event in events:
            if event.ph == "X":
                found[event.cat].append(event)
            elif event.ph not in _FLOWS:
                others.append(event)
        by_category = {(category or "").lower(): of_category for category, of_category in found.items()}
        # Rare: two spellings of a category, or copies that ROCm recorded as kernels. Then sort anew, which is slower.
        has_other_names = len(by_category) < len(found) or any(map(_holds_kernels, by_category, by_category.values()))
        if has_other_names or self._has_memory_of_rocm(by_category.get(KERNEL, ())):
            by_category = _in_order(events)
        self.categories |= by_category.keys()
        for category, of_category in by_category.items():
            add = self._reader_of(category)
            if self.is_critical_path is not False and add and category not in (RANGE, OVERHEAD):
                self.is_critical_path = all((event.args or NO_ARGUMENTS).critical == 1 for event in of_category)
            if add and (timed := self._with_times(category, of_category)):
                add(category, *timed)
        self._add_others(others)

    def table(self, kind: type[AnyTable], *categories: str) -> AnyTable:
        """Return a table with all events of these categories, in the order of the categories; call it once for each."""
        found = [self._counted(category) for category in categories if category in self._rows]
        return concatenate(*found) if len(found) > 1 else found[0] if found else empty(kind)

    def _counted(self, category: str) -> Any:
        """Return the table of a category without events that have lost their start, or that are in the file twice."""
        table = self._rows[category].table()
        is_lost = table.start_ns == 0
        lost = int(np.count_nonzero(is_lost))
        if lost <= MOST_AT_ZERO:
            is_lost[:] = False
        else:
            self.with_times[category] -= lost
            self.without_times[category] += lost
        columns = [getattr(table, name) for name in (*_OF_EVENTS, *_OF_WORK) if hasattr(table, name)]
        # In whole microseconds, two events that take none may look alike.
        is_again = are_repeated(*columns) & (table.end_ns > table.start_ns) & ~is_lost
        if isinstance(table, DeviceEvents):
            of_device = (table.pid, table.device, table.lane, table.name)
            is_again |= find_shifted_copies(table.start_ns, table.end_ns, table.correlation, *of_device)
        self.repeated[category] += int(np.count_nonzero(is_again))
        left_out = is_lost | is_again
        if not left_out.any():
            return table
        if category == KERNEL:
            self._left_out, self.repeated_kernels = left_out, table.name[is_again]
        return select(table, ~left_out)

    def calls(self) -> tuple[str, ...]:
        """Return the recorded categories of events that are calls of a runtime or driver, such as ``cuda_runtime``."""
        return tuple(sorted(filter(IS_CALL.match, self.categories)))

    def collectives(self) -> KernelCollectives:
        """Return the collectives that were recorded with kernels; call it once, and after the table of kernels."""
        found = self._collectives.table()
        if self._left_out is None:
            return found
        found = select(found, ~self._left_out[found.kernel])
        return replace(found, kernel=found.kernel - np.cumsum(self._left_out)[found.kernel])

    def launch_sizes(self, shape: Ints) -> list[Ints]:
        """Return the columns :data:`.SHAPE_COLUMNS`, ``UNKNOWN`` where no shape was recorded; ``shape`` holds codes."""
        sizes = [_decode_shape(grid) + _decode_shape(block) for grid, block in self._shapes]
        return list(np.array(sizes, np.int64).reshape(len(sizes), len(SHAPE_COLUMNS))[shape].T)

    def _reader_of(self, category: str) -> Callable[..., None] | None:
        """Return the method that adds events of a category, ``None`` if they are not needed."""
        if category in OF_DEVICE:
            return self._add_of_device
        if category == SYNCHRONIZATION or IS_CALL.match(category):
            return self._add_calls
        if category == RANGE or category in OPERATIONS:
            return self._add_of_host
        return self._add_plain if category == OVERHEAD else None

    def _has_memory_of_rocm(self, kernels: Sequence[Event]) -> bool:
        """Return whether some kernels are copies or memory sets that ROCm recorded as kernels."""
        codes = self.names.of([event.name for event in kernels])
        return bool(self.names.which(codes, _MEMORY_OF_ROCM.match).any())

    def _with_times(self, category: str, events: list[Event]) -> tuple[list[Event], Ints, Ints] | None:
        """Return the events of a category that have times, their starts, and their ends; ``None`` if none has times.

        CUPTI gives 0 as start and end of an activity whose times it could not collect, and some releases of torch write
        0 for all kinds of events.
        """
        start_ns = nanoseconds([event.ts for event in events])
        duration_ns = nanoseconds([event.dur for event in events])
        # Leave out events without times: candidates by the rounded times, which is fast, then by the times themselves.
        timeless = np.flatnonzero((start_ns == 0) & (duration_ns == 0)).tolist()
        if timeless := [row for row in timeless if not events[row].ts and not events[row].dur]:
            self.without_times[category] += len(timeless)
            start_ns, duration_ns = np.delete(start_ns, timeless), np.delete(duration_ns, timeless)
            left_out = set(timeless)
            events = [event for row, event in enumerate(events) if row not in left_out]
        if not events:
            return None
        self.with_times[category] += len(events)
        if category in OF_DEVICE or category == SYNCHRONIZATION:
            self.without_end += int(np.count_nonzero(duration_ns < 0))
        return events, start_ns, start_ns + np.maximum(0, duration_ns)

    def _columns(self, events: Sequence[Event], start_ns: Ints, end_ns: Ints) -> dict[str, Ints]:
        """Return the columns of :class:`Events` for these events."""
        return {
            "start_ns": start_ns,
            "end_ns": end_ns,
            "name": self.names.of([event.name for event in events]),
            "pid": self.pids.of([event.pid for event in events]),
            "tid": parse_integers([event.tid for event in events]),
        }

    def _put(self, category: str, kind: type[Table], **columns: Ints) -> None:
        """Add rows to the table of a category, which is of the class ``kind``."""
        if category not in self._rows:
            self._rows[category] = _Rows(kind)
        self._rows[category].add(**columns)

    def _add_plain(self, category: str, events: Sequence[Event], start_ns: Ints, end_ns: Ints) -> None:
        self._put(category, Events, **self._columns(events, start_ns, end_ns))

    def _add_of_host(self, category: str, events: Sequence[Event], start_ns: Ints, end_ns: Ints) -> None:
        """Add ranges or operators, as :class:`HostEvents`; note the threads of autograd's engine."""
        columns = self._columns(events, start_ns, end_ns)
        names, size = columns["name"], np.full(len(events), UNKNOWN, np.int64)
        # Sizes of messages, from torch's ranges and operators of collectives.
        for row in np.flatnonzero(self.names.which(names, _is_collective_range)).tolist():
            size[row] = _input_size(events[row])
        is_of_one_rank = np.zeros(len(events), np.int64)
        if category != RANGE:
            for row in np.flatnonzero(self.names.which(names, is_collective_call)).tolist():
                size[row] = max(_argument_sizes(events[row]), default=UNKNOWN)
            for row in np.flatnonzero(self.names.which(names, _records_collective)).tolist():
                is_of_one_rank[row] = (events[row].args or NO_ARGUMENTS).group_size in (1, "1")
            # Threads of autograd's engine.
            of_engine = np.flatnonzero(self.names.which(names, is_of_engine)).tolist()
            pids, tids = columns["pid"], columns["tid"]
            beside = (row for row in of_engine if events[row].tid != events[row].pid)  # equal on the main thread
            self.engine_threads |= dict.fromkeys((int(pids[row]), int(tids[row])) for row in beside)
        self._put(category, HostEvents, **columns, size=size, is_of_one_rank=is_of_one_rank)

    def _add_calls(self, category: str, events: Sequence[Event], start_ns: Ints, end_ns: Ints) -> None:
        """Add calls or waits, as :class:`CallEvents`."""
        columns = self._columns(events, start_ns, end_ns)
        found = [event.args or NO_ARGUMENTS for event in events]
        columns["correlation"] = argument(found, "correlation")
        if category == SYNCHRONIZATION:
            columns |= {name: argument(found, name) for name in _OF_WAITS}
        else:
            rows = np.flatnonzero(self.names.which(columns["name"], orders_work))
            ordering = [found[row] for row in rows.tolist()]
            for name in _OF_WAITS:
                columns[name] = np.full(len(events), UNKNOWN, np.int64)
                columns[name][rows] = argument(ordering, name)
        self._put(category, CallEvents, **columns)

    def _add_of_device(self, category: str, events: Sequence[Event], start_ns: Ints, end_ns: Ints) -> None:
        """Add what devices did, as :class:`DeviceEvents`; ``pid`` and ``tid`` stand in for absent arguments."""
        columns = self._columns(events, start_ns, end_ns)
        found = [event.args or NO_ARGUMENTS for event in events]
        # The device and the stream: in the arguments, else as pid and tid.
        devices = [arguments.device for arguments in found]
        has_device = np.array([device is not None for device in devices], np.bool_)
        lane = argument(found, "stream", [event.tid for event in events])
        original_lane = argument(found, "original_stream")  # of an event that is drawn on another stream
        copy = shape = registers = np.full(len(events), UNKNOWN, np.int64)
        if category in COPY:
            copy = np.array([*map(_way_of_copy, events)], np.int64)
        if category == KERNEL:
            self._add_collectives(category, events)
            if self._with_launches:
                shape = self._shapes.of([(bytes(arguments.grid), bytes(arguments.block)) for arguments in found])
                registers = argument(found, "registers")
        self._put(
            category,
            DeviceEvents,
            **columns,
            device=argument(found, "device", [event.pid for event in events]),
            named_by=np.where(has_device, UNKNOWN, columns["pid"]),
            lane=np.where(original_lane == UNKNOWN, lane, original_lane),
            correlation=argument(found, "correlation"),
            bytes=argument(found, "bytes"),
            copy=copy,
            shape=shape,
            registers=registers,
        )

    def _add_collectives(self, category: str, kernels: Sequence[Event]) -> None:
        """Add the collectives among kernels; call it before the kernels are added themselves."""
        first = self._rows[category].rows if category in self._rows else 0  # row of the first of these kernels
        found = [(row, event.args) for row, event in enumerate(kernels, first) if event.args]
        found = [(row, arguments) for row, arguments in found if arguments.collective is not None]
        rows = [arguments for _, arguments in found]
        elements = zip(argument(rows, "elements_in").tolist(), argument(rows, "elements_out").tolist(), strict=True)
        sizes = [collectives.message_bytes(both, one.element_type) for both, one in zip(elements, rows, strict=True)]
        groups = [one.group is not None for one in rows]
        # Some releases give all subgroups of a split group the same name.
        texts = self.names.of([f"{one.group} {one.group_ranks}".strip() for one in rows])
        self._collectives.add(
            kernel=np.array([row for row, _ in found], np.int64),
            operation=self.names.of([str(one.collective) for one in rows]),
            bytes=np.array([size if is_count(size, MOST) else UNKNOWN for size in sizes], np.int64),
            group=np.where(np.array(groups, np.bool_), texts, UNKNOWN),
            group_size=np.maximum(argument(rows, "group_size"), UNKNOWN),
            sequence=np.maximum(argument(rows, "sequence"), UNKNOWN),
        )

    def _add_others(self, events: Sequence[Event]) -> None:
        """Add what is needed of events that are not written with a duration."""
        for event in events:
            if event.ph == "M" and event.name == "thread_name" and event.args:
                (pid,), (tid,) = self.pids.of([event.pid]).tolist(), parse_integers([event.tid]).tolist()
                self.thread_names.append((pid, tid, str(event.args.name)))
            elif event.ph == "i" and event.name == "Record Window End":
                self.window_ends_ns += nanoseconds([event.ts]).tolist()
            elif event.ph in ("B", "b"):
                self.has_pairs = True
                if event.ph == "B" and event.cat:
                    self.pairs.add(event.cat)


def _in_order(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Return the events with a duration by category in lower case, in each category in the order of the file.

    Copies and memory sets that ROCm recorded as kernels get their own categories. Some old releases of torch write
    categories in capital letters.
    """
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.ph == "X":
            category = (event.cat or "").lower()
            if _holds_kernels(category, (event,)):
                category = KERNEL
            if category == KERNEL and (memory := _MEMORY_OF_ROCM.match(str(event.name))):
                category = "gpu_memset" if memory["fill"] else "gpu_memcpy"
            found[category].append(event)
    return found


def _holds_kernels(category: str, events: Sequence[Event]) -> bool:
    """Return whether another category than that of kernels holds some, as tools name them that write traces anew.

    Only kernels have a grid.
    """
    if category in OTHER_KERNELS:
        return True
    is_known = category in OF_DEVICE or category == SYNCHRONIZATION or OF_HOST.fullmatch(category)
    return not is_known and any((event.args or NO_ARGUMENTS).grid for event in events)


def is_collective_call(name: str) -> bool:
    return name.startswith(COLLECTIVE_CALL)


def is_of_engine(name: str) -> bool:
    return name.startswith(ENGINE)


def orders_work(call: str) -> bool:
    return ordering_kind(call) is not None


def _is_collective_range(name: str) -> bool:
    return name.removeprefix(OPERATOR_PREFIX).startswith((GLOO, *collectives.TORCH_RANGES))


def _records_collective(name: str) -> bool:
    return name == "record_param_comms"


def nanoseconds(microseconds: Sequence[float | Decimal]) -> Ints:
    """Return times in nanoseconds, exact for microseconds with three decimals.

    The whole microseconds and the fraction are converted apart, so that nothing is lost. A value that is no number or
    too large becomes the largest time, which is refused later.
    """
    if microseconds and isinstance(microseconds[0], Decimal):
        return np.array([round(_clamp_time(microsecond) * 1000) for microsecond in microseconds], np.int64)
    try:
        values = np.array(microseconds, np.float64)
    except OverflowError:  # integers of hundreds of digits
        values = np.array([*map(_clamp_time, microseconds)], np.float64)
    values = np.clip(np.nan_to_num(values, nan=_MOST_US), -_MOST_US, _MOST_US)
    whole = np.floor(values)
    found: Ints = whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
    return found


def _clamp_time(microseconds: Decimal | float) -> Decimal | float:
    """Return the time, or ``_MOST_US`` if it is no number or too large."""
    is_number = not isinstance(microseconds, Decimal) or microseconds.is_finite()
    return microseconds if is_number and -_MOST_US <= microseconds <= _MOST_US else _MOST_US


_COPY_KIND = re.compile(r"([HDAP]to[HDAP])\b|(P2P|[Pp]eer ?[Tt]o ?[Pp]eer)\b")
_COPY_KINDS = {"8": "DtoD", "10": "PtoP"}
"""Kinds of copies by CUPTI's numbers: H host, D device, A array, P a device to its peer."""
_WAYS = {"PtoP": BETWEEN_DEVICES, "DtoD": WITHIN_DEVICE, "": WITHIN_DEVICE}


def _way_of_copy(copy: Event) -> int:
    return _WAYS.get(_copy_kind(copy), OTHER_COPY)


def _copy_kind(copy: Event) -> str:
    """Return the kind of a copy, such as ``DtoD``: an argument since torch 2.13, before that a part of its name."""
    kind = (copy.args or NO_ARGUMENTS).copy_kind
    if kind is not None:
        return _COPY_KINDS.get(str(kind), str(kind))
    found = _COPY_KIND.search(str(copy.name))
    return (found[1] or "PtoP") if found else ""


@cache
def _decode_shape(text: bytes) -> tuple[int, ...]:
    """Return the three sizes in the JSON text of a grid or a block, or three times ``UNKNOWN``."""
    try:
        found: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:  # no shape was recorded, or it holds a number that is too large
        found = None
    sizes = [size for size in _counts(found) if is_count(size)]
    is_shape = isinstance(found, list) and len(found) == len(sizes) == 3
    return tuple(sizes) if is_shape else (UNKNOWN,) * 3


def _input_size(range_: Event) -> int:
    """Return the bytes of all inputs of a range of torch around a collective, ``UNKNOWN`` if they are not known.

    Torch records them with ``record_shapes``.
    """
    sizes = _argument_sizes(range_)
    total = sum(sizes)
    return total if sizes and UNKNOWN not in sizes and is_count(total, MOST) else UNKNOWN


def _argument_sizes(event: Event) -> list[int]:
    """Return the bytes of each tensor among an operator's arguments, ``UNKNOWN`` if its type or shape is not known.

    A ``c10d::`` operator has its output among its arguments. The types of tensors in a list are not recorded.
    """
    arguments = event.args or NO_ARGUMENTS
    try:
        shapes, types = (msgspec.json.decode(bytes(text)) for text in (arguments.shapes, arguments.element_types))
    except msgspec.DecodeError:  # not recorded, or numbers too large
        return []
    if not (isinstance(shapes, list) and isinstance(types, list)):
        return []
    sizes = []
    # An argument that is a tensor has a list of its dimensions, and the name of its elements' type.
    for shape, element_type in zip(shapes, types, strict=False):
        if isinstance(shape, list) and isinstance(element_type, str) and element_type not in _NO_TENSOR:
            counts = [count for count in _counts(shape) if is_count(count)]
            elements = prod(counts) if shape and len(counts) == len(shape) else UNKNOWN
            size = collectives.message_bytes([elements], element_type)
            sizes.append(size if elements >= 0 and is_count(size, MOST) else UNKNOWN)
    return sizes


_NO_TENSOR = ("", "Scalar", "ScalarList", "TensorList", "GenericList")
"""Types of arguments that are no tensors, or several tensors of unknown types."""


def _counts(values: object) -> list[object]:
    """Return the items of a list, with floats such as ``7.0`` as integers; an empty list if ``values`` is no list."""
    items = values if isinstance(values, list) else []
    return [int(item) if isinstance(item, float) and item.is_integer() else item for item in items]


def is_count(value: object, bound: int = 1 << 31) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to below ``bound``."""
    return isinstance(value, int) and 0 <= value < bound


def parse_integers(values: Sequence[Any]) -> Ints:
    """Return the values as integers, ``UNKNOWN`` for other values.

    ``7.0`` counts as 7, and so does a text that contains 7 (torch 1.8 writes ``"stream 7"``).
    """
    try:
        found = np.array(array("q", values), np.int64)
    except (TypeError, OverflowError):
        return np.array([_parse_integer(value) for value in values], np.int64)
    return np.where((found < -MOST) | (found >= MOST), UNKNOWN, found)


def _parse_integer(value: object) -> int:
    """Return a value as an integer, see :func:`parse_integers`; ``UNKNOWN`` if it is none or too large."""
    if isinstance(value, int):
        return value if -MOST <= value < MOST else UNKNOWN
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < MOST else UNKNOWN
    found = _NUMBER.search(value) if isinstance(value, str) else None
    return int(found.group()) if found else UNKNOWN


def argument(arguments: Sequence[EventArguments], name: str, otherwise: Sequence[Any] | None = None) -> Ints:
    """Return the argument ``name`` of each event as an integer, ``UNKNOWN`` if it is none.

    An event without the argument gets its value in ``otherwise``, if that is given.
    """
    values = [*map(attrgetter(name), arguments)]
    missing = values.count(None)
    if missing == len(values) and otherwise is None:
        return np.full(len(values), UNKNOWN, np.int64)
    if missing and otherwise is not None:
        values = [other if value is None else value for value, other in zip(values, otherwise, strict=True)]
    return parse_integers(values)
