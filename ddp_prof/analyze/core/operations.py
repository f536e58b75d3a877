"""Which events belong to one operation of communication, which counts once although it launched several events.

    stream 30    nn....DDDDDDDD        n tells the peers the sizes, and the dispatch D follows: one all-to-all
    stream 20    ccc ccc ccc           copies launched in one range, or by one call: one all-gather

One event, the *head*, stands for the operation: the kernel that moves the data, or the copy that ends last. The
operation lasts from the start of its first event to the end of its last; in between it may pause.

If several operations of a step run at once, an instant belongs to the operation that ends last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ddp_prof.analyze.core.attribution import Events, find_operations
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.communication import ALL_TO_ALL, NOTIFY, OPERATIONS
from ddp_prof.growing_column import in_file
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Table,
    concatenate,
    distinct,
    distinct_rows,
    empty,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Category, Kind, Trace


@dataclass(frozen=True)
class OperationParts(Table):
    """To which operation of communication each event of a rank belongs; one row per event.

    Attributes:
        head: Row of the event that stands for its operation; ``UNKNOWN`` if the event does not communicate.
        start_ns, end_ns, launch_ns: Start, end and first launch of the whole operation; those of the event itself if
            it does not communicate.
    """

    head: Ints
    start_ns: Ints
    end_ns: Ints
    launch_ns: Ints

    @property
    def is_head(self) -> Mask:
        """Whether each event stands for its operation."""
        heads: Mask = self.head == np.arange(len(self))
        return heads


def find_operation_parts(trace: Trace, events: Events) -> OperationParts:
    """Return to which operation of communication each event of a rank belongs."""
    # At first each event that communicates is its own operation; the two calls change `head` where events are joined.
    communicates = np.flatnonzero(events.category == Category.COMMUNICATION)
    head = np.full(len(events), UNKNOWN, np.int64)
    head[communicates] = communicates
    kind = take_or_unknown(trace.activities.kind, events.activity[communicates])
    copies, kernels = (communicates[kind == one] for one in (Kind.COPY, Kind.KERNEL))
    _join_copies(trace, events, copies, head)
    _join_preparations(trace, events, kernels, head)
    parts = communicates[head[communicates] != communicates]
    if not len(parts):  # as usual: the times are those of the events, which are not copied
        return OperationParts(in_file(head), events.start_ns, events.end_ns, events.launch_ns)
    start_ns, end_ns, launch_ns = events.start_ns.copy(), events.end_ns.copy(), events.launch_ns.copy()
    np.minimum.at(start_ns, head[parts], events.start_ns[parts])
    np.maximum.at(end_ns, head[parts], events.end_ns[parts])
    launched = parts[events.launch_ns[parts] != NO_TIME]
    np.minimum.at(launch_ns, head[launched], events.launch_ns[launched])
    for column in (start_ns, end_ns, launch_ns):
        column[parts] = column[head[parts]]
    return OperationParts(head, start_ns, end_ns, launch_ns)


def _join_copies(trace: Trace, events: Events, copies: Ints, head: Ints) -> None:
    """Join copies that were launched in one range or, if in no range, by one call: change their rows in ``head``.

    ``copies`` are the rows of the copies that communicate.
    """
    if not len(copies):
        return
    # Copies with the same span or, without a span, the same call have the same number in `operation`.
    metadata, activity = trace.collective_metadata, events.activity[copies]
    span = take_or_unknown(metadata.span, positions(metadata.activity, len(trace.activities))[activity])
    call = np.where(span == UNKNOWN, trace.launching_calls[activity], UNKNOWN)
    alone = np.where((span == UNKNOWN) & (call == UNKNOWN), copies, UNKNOWN)
    _, operation = distinct_rows(span, call, alone)
    last = np.full(int(operation.max()) + 1, UNKNOWN)
    order = np.lexsort((copies, events.end_ns[copies], operation))
    last[operation[order]] = copies[order]  # the last write stays
    head[copies] = last[operation]


def _join_preparations(trace: Trace, events: Events, kernels: Ints, head: Ints) -> None:
    """Join each kernel that prepares an all-to-all with the kernel that performs it: change their rows in ``head``.

    That is the next kernel of communication on its stream and in its step, other preparing kernels aside, if it is an
    all-to-all. ``kernels`` are the rows of the kernels that communicate.
    """
    operation = find_operations(trace, take_or_unknown(trace.activities.name_id, events.activity[kernels]))
    if not np.any(operation == OPERATIONS.index(NOTIFY)):
        return
    order = np.lexsort((events.start_ns[kernels], events.step[kernels], events.lane[kernels]))
    kernels, operation = kernels[order], operation[order]
    prepares = operation == OPERATIONS.index(NOTIFY)
    # `following`: the next row that does not prepare, as the minimum of such rows from the end; len(kernels) if none.
    place = np.where(prepares, len(kernels), np.arange(len(kernels)))
    following = np.minimum.accumulate(place[::-1])[::-1]
    rows = np.flatnonzero(prepares & (following < len(kernels)))
    after = following[rows]
    is_its_own = operation[after] == OPERATIONS.index(ALL_TO_ALL)
    for column in (events.lane, events.step):
        is_its_own &= column[kernels[rows]] == column[kernels[after]]
    head[kernels[rows[is_its_own]]] = kernels[after[is_its_own]]


@dataclass(frozen=True)
class Pauses(Table):
    """When an operation lasts, but neither an event of it nor any other communication of its step runs."""

    step: Ints
    start_ns: Ints
    end_ns: Ints


def find_pauses(events: Events, parts: OperationParts) -> Pauses:
    """Return the pauses of a rank's operations, ordered by step and start; most ranks have none."""
    # Only operations of several events can pause: `joined` are their heads.
    joined = np.unique(parts.head[(parts.head != UNKNOWN) & ~parts.is_head])
    found: list[Pauses] = []
    for step in distinct(events.step[joined]):
        rows = joined[events.step[joined] == step]
        communicates = (events.category == Category.COMMUNICATION) & (events.step == step)
        paused = union(parts.start_ns[rows], parts.end_ns[rows])
        paused -= union(events.start_ns[communicates], events.end_ns[communicates])
        found.append(Pauses(np.full(len(paused), step, np.int64), paused.start_ns, paused.end_ns))
    return concatenate(empty(Pauses), *found)


class Operations(Protocol):
    """Columns of operations, ordered by step and launch; ``step`` may be ``UNKNOWN``."""

    @property
    def start_ns(self) -> Ints: ...

    @property
    def end_ns(self) -> Ints: ...

    @property
    def step(self) -> Ints: ...

    def __len__(self) -> int: ...


class Part(NamedTuple):
    """One interval of time per operation, which may be empty."""

    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Pieces(Table):
    """Intervals of time that belong to operations. Several may belong to one operation; ``row`` is its row."""

    row: Ints
    start_ns: Ints
    end_ns: Ints


def assign_instants(operations: Operations) -> Part:
    """Return the interval of the instants that belong to each operation.

    It goes from the operation's start to its end or, if an operation of the same step starts before that end and ends
    later, to the start of that operation. If two operations of a step end together, the one launched last counts as
    ending later.
    """
    if not len(operations):
        return Part(operations.start_ns, operations.end_ns)
    order = np.lexsort((np.arange(len(operations)), operations.end_ns, operations.step))
    # On an axis with all steps end to end, steps cannot overlap, so one pass is enough.
    origin = int(operations.start_ns.min())
    shift = ((operations.step + 1) * (int(operations.end_ns.max()) - origin + 1) - origin)[order]
    start, end = operations.start_ns[order] + shift, operations.end_ns[order] + shift
    # The rows are ordered by end: the earliest start among all later rows, as a running minimum from the last row.
    starts_of_later = np.minimum.accumulate(np.append(start[1:], np.iinfo(np.int64).max)[::-1])[::-1]
    owned_end = np.empty_like(end)
    owned_end[order] = np.maximum(start, np.minimum(end, starts_of_later)) - shift
    return Part(operations.start_ns, owned_end)


def cut_pauses(operations: Operations, pauses: Pauses, part: Part) -> Pieces:
    """Return each operation's interval without the pauses of its step, in pieces; empty intervals have no piece.

    ``part`` has one interval per operation, as :func:`assign_instants` returns them: those of a step do not overlap.
    """
    rows = np.flatnonzero(part.end_ns > part.start_ns)
    pieces = Pieces(rows, part.start_ns[rows], part.end_ns[rows])
    if not len(pauses) or not len(rows):
        return pieces
    # On an axis with all steps end to end, neither pieces nor pauses of different steps overlap.
    low, high = int(pieces.start_ns.min()), int(pieces.end_ns.max())
    pauses = select(pauses, (pauses.end_ns > low) & (pauses.start_ns < high))
    shift = (operations.step[rows] + 1) * (high - low) - low
    of_pauses = (pauses.step + 1) * (high - low) - low
    order = np.argsort(pieces.start_ns + shift, kind="stable")
    pieces, shift = select(pieces, order), shift[order]
    on_axis = Intervals(pieces.start_ns + shift, pieces.end_ns + shift)
    cut = on_axis - union(np.maximum(pauses.start_ns, low) + of_pauses, np.minimum(pauses.end_ns, high) + of_pauses)
    # Which of the pieces before the cut each new piece comes from: the last one that starts not after it.
    piece = np.searchsorted(on_axis.start_ns, cut.start_ns, side="right") - 1
    return Pieces(pieces.row[piece], cut.start_ns - shift[piece], cut.end_ns - shift[piece])
