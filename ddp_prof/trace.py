"""The trace in the middle: three tables of columns that are never mixed.

``Activities`` are what a device did, ``Spans`` what the program said, ``Calls`` what the host asked of the device.
A column is a one-dimensional NumPy array with one element a row; times are int64 nanoseconds on the trace's own
clock, half-open ``[start, end)``. A trace is never changed after it was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from ddp_prof.manifest import Manifest

    Ints = NDArray[np.int64]
    Mask = NDArray[np.bool_]

UNKNOWN = -1
"""In a column: no value (no correlation, no name, size not known)."""

SOURCE_NAMES = {"nsys-sqlite": "nsys", "nsys-report": "nsys", "kineto": "torch.profiler"}
"""The program that recorded a trace, as it is shown to users, by :attr:`Trace.source`."""


class Kind(IntEnum):
    """What an activity was."""

    KERNEL = 0
    COPY = 1
    MEMORY_SET = 2
    GRAPH = 3


class Category(IntEnum):
    """What an activity was for; decided once, when the trace is read."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2
    OTHER = 3
    UNKNOWN = 4  # a kernel whose name the trace does not tell


@dataclass(frozen=True)
class Table:
    """Columns of equal length."""

    def __post_init__(self) -> None:
        lengths = {column.name: len(getattr(self, column.name)) for column in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of unequal length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))


AnyTable = TypeVar("AnyTable", bound=Table)


def select(table: AnyTable, rows: Mask | Ints) -> AnyTable:
    """The chosen rows, as a table of the same kind; the very same where all are chosen."""
    if rows.dtype == np.bool_ and rows.all():
        return table
    return type(table)(**{column.name: getattr(table, column.name)[rows] for column in fields(table)})


def distinct(column: Ints) -> list[int]:
    """The values that occur, ascending; quickest where they are small, as ids of processes, devices and streams are."""
    if not len(column):
        return []
    low, high = int(column.min()), int(column.max())
    if high - low > 1 << 24:
        return [int(value) for value in np.unique(column)]
    return [low + row for row in np.flatnonzero(np.bincount(column - low)).tolist()]


def concatenate(first: AnyTable, *others: AnyTable) -> AnyTable:
    """The rows of all tables, one after the other."""
    tables = (first, *others)
    return type(first)(
        **{column.name: np.concatenate([getattr(t, column.name) for t in tables]) for column in fields(first)}
    )


def empty(kind: type[AnyTable]) -> AnyTable:
    """A table without rows."""
    return kind(**{item.name: np.empty(0, np.int64) for item in fields(kind)})


@dataclass(frozen=True)
class Activities(Table):
    """What a device did: a kernel, a copy, a memory set, a CUDA graph recorded whole.

    Attributes:
        process: Operating-system process id.
        device: CUDA ordinal, as the process counts.
        lane: CUDA stream id.
        name_id: Index into :attr:`Trace.names`.
        kind: A :class:`Kind`.
        category: A :class:`Category`.
        correlation: Id that the launching call carries too, unique within a process; ``UNKNOWN`` where none.
        bytes: Size of a copy or a memory set; ``UNKNOWN`` for kernels.
    """

    start_ns: Ints
    end_ns: Ints
    process: Ints
    device: Ints
    lane: Ints
    name_id: Ints
    kind: Ints
    category: Ints
    correlation: Ints
    bytes: Ints


@dataclass(frozen=True)
class Spans(Table):
    """What the program said: a range of time with a name.

    Attributes:
        process: Operating-system process id.
        lane: Thread that opened the range.
        name_id: Index into :attr:`Trace.names`.
        domain_id: Index into :attr:`Trace.names` of the NVTX domain's name; ``UNKNOWN`` for the default domain.
        is_start_end: 1 for a start/end range, which may overlap others of its thread and end on another one;
            0 for a push/pop range, which nests.
        is_open: 1 for a range that was still open when recording stopped: its end is the last event of the capture,
            and nobody knows how long it would have lasted.
    """

    start_ns: Ints
    end_ns: Ints
    process: Ints
    lane: Ints
    name_id: Ints
    domain_id: Ints
    is_start_end: Ints
    is_open: Ints


@dataclass(frozen=True)
class Calls(Table):
    """What the host asked: a CUDA API call that launched something.

    Attributes:
        process: Operating-system process id.
        lane: Thread that made the call.
        correlation: Id that the launched activities carry too.
    """

    start_ns: Ints
    process: Ints
    lane: Ints
    correlation: Ints


@dataclass(frozen=True)
class CollectiveMetadata(Table):
    """What is known of collectives beside their kernels, where the profiler noted it; ``UNKNOWN`` where not.

    Attributes:
        activity: Row in :class:`Activities` of what the collective launched.
        op_id: Index into :attr:`Trace.names` of the collective's name, as the profiler calls it.
        bytes: Size of the larger one of what goes in and what comes out.
        group_id: Index into :attr:`Trace.names` of the communicator's name, the same on all its ranks.
        group_size: Number of ranks in the communicator.
        sequence: Number of the collective within the communicator.
    """

    activity: Ints
    op_id: Ints
    bytes: Ints
    group_id: Ints
    group_size: Ints
    sequence: Ints


@dataclass(frozen=True)
class Overhead(Table):
    """When the profiler itself was at work, flushing its buffers and the like."""

    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class UnresolvedNames:
    """How many kernels of a trace have no name, so that nobody knows whether they compute or communicate.

    Attributes:
        kernels: Their number.
        of_kernels: The number of all kernels.
        time_ns: The sum of their durations.
        of_time_ns: The sum of all kernels' durations.
    """

    kernels: int
    of_kernels: int
    time_ns: int
    of_time_ns: int

    @property
    def share(self) -> float:
        """From 0 to 1: the share in number or in time, whichever is larger."""
        return max(self.kernels / max(1, self.of_kernels), self.time_ns / max(1, self.of_time_ns))


@dataclass(frozen=True)
class Trace:
    """Everything read from one capture.

    Attributes:
        path: The file it was read from.
        source: Format of the file: a key of :data:`SOURCE_NAMES`.
        producer: The profiler's version, ``None`` where the file does not say.
        names: The string table that every ``name_id`` points into.
        threads: Name of a thread by (process, lane), where known.
        ranks: Rank of a process, where the trace says it.
        collective_metadata: What is known of the collectives beside their kernels.
        launching_calls: Row in ``calls`` of the call that launched each activity, ``UNKNOWN`` where the trace holds
            none. Joined when the trace is built, and kept by ``replace``: who replaces the rows of activities or calls
            must hand over ``None``, which joins again.
        shape_id: For each activity the index into ``names`` of its launch shape, ``UNKNOWN`` where it has none;
            ``None`` where shapes were not asked for.
        world_size: Ranks in the job; ``None`` where unknown.
        epoch_ns: UTC nanoseconds of the trace's time 0; ``None`` where unknown.
        manifest: The ``run.json`` beside the trace, if any.
        warnings: What the reader could not know or had to assume, a line each.
        node: Name of the machine, ``None`` where the trace does not tell it.
    """

    path: Path
    source: str
    producer: str | None
    names: tuple[str, ...]
    activities: Activities
    spans: Spans
    calls: Calls
    threads: Mapping[tuple[int, int], str]
    ranks: Mapping[int, int]
    overhead: Overhead
    collective_metadata: CollectiveMetadata = field(default_factory=lambda: empty(CollectiveMetadata))
    launching_calls: Ints = None  # type: ignore[assignment]  # never None once the trace is built
    shape_id: Ints | None = None
    world_size: int | None = None
    epoch_ns: int | None = None
    manifest: Manifest | None = None
    warnings: tuple[str, ...] = ()
    node: str | None = None

    def __post_init__(self) -> None:
        if self.launching_calls is None:
            object.__setattr__(self, "launching_calls", find_launching_calls(self.activities, self.calls))
        if len(self.launching_calls) != len(self.activities):
            raise ValueError("launching_calls were joined for other activities")

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """All processes that left an activity or a span, in ascending order."""
        tables = (self.activities, self.spans)
        return tuple(sorted({value for table in tables for value in distinct(table.process)}))

    @cached_property
    def unresolved_names(self) -> UnresolvedNames:
        """How many kernels have no name."""
        kernels = self.activities.kind == Kind.KERNEL
        unnamed = kernels & (self.activities.category == Category.UNKNOWN)
        duration_ns = self.activities.end_ns - self.activities.start_ns
        return UnresolvedNames(
            int(unnamed.sum()), int(kernels.sum()), int(duration_ns[unnamed].sum()), int(duration_ns[kernels].sum())
        )

    @cached_property
    def duration_ns(self) -> int:
        """From the first event to the last; 0 for a trace without any."""
        tables = [table for table in (self.activities, self.spans) if len(table)]
        if not tables:
            return 0
        return int(max(table.end_ns.max() for table in tables) - min(table.start_ns.min() for table in tables))


def find_launching_calls(activities: Activities, calls: Calls) -> Ints:
    """Row in ``calls`` of the call that launched each activity, ``UNKNOWN`` where the trace holds none.

    Joined on process *and* correlation: the ids of two processes collide. Where several calls of a process carry one
    id (a runtime call and the driver call in it), the one that starts first counts.
    """
    result = np.full(len(activities), UNKNOWN, np.int64)
    for process in distinct(activities.process):
        asked, offered = _rows(activities.process == process), _rows(calls.process == process)
        keys, wanted = calls.correlation[offered], activities.correlation[asked]
        if len(keys):
            found = _positions(keys, calls.start_ns[offered], wanted)
            found[wanted == UNKNOWN] = UNKNOWN
            result[asked] = found if isinstance(offered, slice) else np.append(offered, UNKNOWN)[found]
    return result


def _rows(chosen: Mask) -> Ints | slice:
    """The chosen rows; all of them as a slice, which copies nothing."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _positions(keys: Ints, start_ns: Ints, wanted: Ints) -> Ints:
    """Position in ``keys`` of each wanted value, the earliest of several; ``UNKNOWN`` where it is absent."""
    if np.all(keys[1:] >= keys[:-1]):
        order, ordered = None, keys
    else:
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
    if np.any(ordered[1:] == ordered[:-1]):
        order = np.lexsort((start_ns, keys))
        ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    position = at if order is None else order[at]
    return np.where(ordered[at] == wanted, position, UNKNOWN)
