"""The trace in the middle: three tables of columns that are never mixed.

``Activities`` are what a device did, ``Spans`` what the program said, ``Calls`` what the host asked of the device.
Times are int64 nanoseconds on the trace's own clock, half-open ``[start, end)``. A trace is never changed after it was
read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.table import UNKNOWN, Ints, Mask, Table, concatenate, distinct, distinct_rows, empty, looked_up, select

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ddp_prof.manifest import Manifest

__all__ = [
    "AUTOGRAD", "SOURCE_NAMES", "UNKNOWN", "Activities", "CallDetails", "Calls", "Category", "CollectiveMetadata",
    "Ints", "Kind", "Mask", "Overhead", "Spans", "Table", "Trace", "UnresolvedNames", "concatenate", "distinct",
    "distinct_rows",
    "empty", "find_launching_calls", "looked_up", "select",
]  # fmt: skip
"""What a reader of traces needs, :mod:`ddp_prof.table` included."""

AUTOGRAD = "pt_autograd"
"""What torch calls the threads in which autograd computes backward, before their number."""

SOURCE_NAMES = {"nsys-sqlite": "nsys", "nsys-report": "nsys", "nsys-tables": "nsys", "kineto": "torch.profiler"}
"""The program that recorded a trace, as it is shown to users, where :attr:`Trace.source` does not name it."""


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
class CallDetails(Table):
    """When each call ended, and its name without the version that CUDA adds; rows as those of :class:`Calls`."""

    end_ns: Ints
    name_id: Ints


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

    They are ``kernels`` of all ``of_kernels``, and last ``time_ns`` of ``of_time_ns``, both sums of durations.
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
        source: Format of the file; see :data:`SOURCE_NAMES`.
        producer: The profiler's version, ``None`` where the file does not say.
        names: The string table that every ``name_id`` points into.
        threads: Name of a thread by (process, lane), where known.
        ranks: Rank of a process, where the trace says it.
        collective_metadata: What is known of the collectives beside their kernels.
        launching_calls: Row in ``calls`` of the call that launched each activity, ``UNKNOWN`` where the trace holds
            none. Joined when the trace is built, and kept by ``replace``: who replaces the rows of activities or calls
            must hand over ``None``, which joins again.
        shape_id: For each activity the index into ``names`` of its launch shape, ``UNKNOWN`` where it has none;
            ``None`` where launches were not asked for.
        registers: For each activity the registers a thread of it uses, likewise.
        call_details: Likewise.
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
    registers: Ints | None = None
    call_details: CallDetails | None = None
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

    @property
    def device(self) -> str:
        """``cuda`` where it holds activities of a device, else ``cpu``."""
        return "cuda" if len(self.activities) else "cpu"

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
        return int(max(t.end_ns.max() for t in tables) - min(t.start_ns.min() for t in tables)) if tables else 0


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
    order = None if np.all(keys[1:] >= keys[:-1]) else np.argsort(keys, kind="stable")
    ordered = keys if order is None else keys[order]
    if np.any(ordered[1:] == ordered[:-1]):
        order = np.lexsort((start_ns, keys))
        ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    position = at if order is None else order[at]
    return np.where(ordered[at] == wanted, position, UNKNOWN)
