"""Which events are one operation of communication: it counts once, whatever it launched.

    stream 30    nn....DDDDDDDD        a kernel tells peers the sizes, and the dispatch follows: one all-to-all
    stream 20    ccc ccc ccc           copies of one range, or of one call: one all-gather

One event, the *head*, stands for the operation: the kernel that moves the data, or the copy that ends last. The
operation lasts from the start of its first event to the end of its last; in between it may pause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.attribution import Events, find_operations
from ddp_prof.analyze.intervals import union
from ddp_prof.communication import ALL_TO_ALL, NOTIFY, OPERATIONS
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
    take_or_unknown,
)
from ddp_prof.trace import Category, Kind, Trace


@dataclass(frozen=True)
class OperationParts(Table):
    """One row per event of a rank.

    Attributes:
        head: Row of the event that stands for its operation; ``UNKNOWN`` if the event does not communicate.
        start_ns, end_ns, launch_ns: Of the whole operation; of the event itself if it does not communicate.
    """

    head: Ints
    start_ns: Ints
    end_ns: Ints
    launch_ns: Ints

    @property
    def is_head(self) -> Mask:
        heads: Mask = self.head == np.arange(len(self))
        return heads


def find_operation_parts(trace: Trace, events: Events) -> OperationParts:
    head = np.where(events.category == Category.COMMUNICATION, np.arange(len(events)), UNKNOWN)
    kind = take_or_unknown(trace.activities.kind, events.activity)
    copies, kernels = (np.flatnonzero((head != UNKNOWN) & (kind == one)) for one in (Kind.COPY, Kind.KERNEL))
    _join_copies(trace, events, copies, head)
    _join_preparations(trace, events, kernels, head)
    start_ns, end_ns, launch_ns = events.start_ns.copy(), events.end_ns.copy(), events.launch_ns.copy()
    parts = np.flatnonzero((head != UNKNOWN) & (head != np.arange(len(head))))
    if len(parts):
        np.minimum.at(start_ns, head[parts], events.start_ns[parts])
        np.maximum.at(end_ns, head[parts], events.end_ns[parts])
        launched = parts[events.launch_ns[parts] != NO_TIME]
        np.minimum.at(launch_ns, head[launched], events.launch_ns[launched])
        for column in (start_ns, end_ns, launch_ns):
            column[parts] = column[head[parts]]
    return OperationParts(head, start_ns, end_ns, launch_ns)


def _join_copies(trace: Trace, events: Events, copies: Ints, head: Ints) -> None:
    """Copies that one range or, without one, one call launched are one operation."""
    if not len(copies):
        return
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
    """A kernel that prepares a collective is a part of the all-to-all that follows it on its stream in its step."""
    operation = find_operations(trace, take_or_unknown(trace.activities.name_id, events.activity[kernels]))
    if not np.any(operation == OPERATIONS.index(NOTIFY)):
        return
    order = np.lexsort((events.start_ns[kernels], events.step[kernels], events.lane[kernels]))
    kernels, operation = kernels[order], operation[order]
    prepares = operation == OPERATIONS.index(NOTIFY)
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
    """When no event of an operation ran, nor any other of its step, although the operation lasts."""

    step: Ints
    start_ns: Ints
    end_ns: Ints


def find_pauses(events: Events, parts: OperationParts) -> Pauses:
    """The pauses of a rank's operations, ordered by step and start; most ranks have none."""
    joined = np.unique(parts.head[(parts.head != UNKNOWN) & ~parts.is_head])
    found: list[Pauses] = []
    for step in distinct(events.step[joined]):
        rows = joined[events.step[joined] == step]
        communicates = (events.category == Category.COMMUNICATION) & (events.step == step)
        paused = union(parts.start_ns[rows], parts.end_ns[rows])
        paused -= union(events.start_ns[communicates], events.end_ns[communicates])
        found.append(Pauses(np.full(len(paused), step, np.int64), paused.start_ns, paused.end_ns))
    return concatenate(empty(Pauses), *found)
