"""The figures of a step. Each is declared once, with how it is measured; tables, documents and docs are made from that.

For one step, N is the communication that was launched in it; C is all compute of the rank::

    C           ######....####
    N           ...########...
    overlapped  ...###....#...   |N and C|
    exposed     ......####....   |N minus C|
    tail        ..........####   |(N minus C) after the last compute of its pass of backward|
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE, last_by_step
from ddp_prof.analyze.core.operations import Part, assign_instants, cut_pauses, find_pauses
from ddp_prof.analyze.core.passes import seem_lost
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import StepTimes, sum_by_group
from ddp_prof.analyze.intervals import Intervals, union, union_by_group
from ddp_prof.analyze.result_bases import make_rows, measure_columns
from ddp_prof.analyze.why_unknown import why_unknown
from ddp_prof.columns import (
    ALWAYS,
    USUALLY,
    WITH_MUCH_ROOM,
    WITH_ROOM,
    Hidden,
    column,
    derived,
    hidden_fields,
)
from ddp_prof.growing_column import in_order
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Ints, Mask, select


@dataclass(frozen=True)
class StepEvents:
    """The steps of a rank, and intermediate results from which their figures are measured.

    Columns have one element per step. ``backward`` is when compute of backward runs.
    """

    rank: RankEvents
    backward: Intervals

    @property
    def count(self) -> int:
        return len(self.rank.steps)

    @property
    def times(self) -> StepTimes:
        return self.rank.step_times

    @property
    def unknown(self) -> Ints:
        """A column of ``UNKNOWN``."""
        return np.full(self.count, UNKNOWN)

    @cached_property
    def is_launched(self) -> Mask:
        """Which events were launched in a step."""
        is_launched: Mask = self.rank.events.step != UNKNOWN
        return is_launched

    @cached_property
    def is_communication(self) -> Mask:
        """Which events are communication that was launched in a step."""
        is_communication: Mask = self.is_launched & (self.rank.events.category == Category.COMMUNICATION)
        return is_communication

    @cached_property
    def communication(self) -> tuple[Ints, Ints, Ints]:
        """The union of each step's communication: starts, ends and steps."""
        events, rows = self.rank.events, self.is_communication
        return union_by_group(events.start_ns[rows], events.end_ns[rows], events.step[rows])

    @cached_property
    def collectives(self) -> Ints:
        """Number of collectives that each step launched."""
        return self.count_events(self.is_launched & self.rank.is_collective)

    @cached_property
    def passes(self) -> Ints:
        """Number of passes of backward; 0 if none is known."""
        return self.rank.passes.count(self.count) if self.rank.has_steps else np.zeros(self.count, np.int64)

    @cached_property
    def may_block(self) -> Intervals | None:
        """When the rank may stand still for communication; ``None`` if it is known when it does.

        Also ``None`` if the trace does not tell when it may; see :attr:`.RankEvents.may_block`.
        """
        coverage = self.rank.blocking.coverage
        return self.rank.may_block if coverage.reason or coverage.host_waits else None

    @cached_property
    def standstill(self) -> Standstill:
        return _measure_standstill(self)

    def count_events(self, rows: Mask | Ints) -> Ints:
        """Return how many of the events in ``rows``, all of them launched in steps, each step launched."""
        return np.bincount(self.rank.events.step[rows], minlength=self.count)

    def in_communication_ns(self, of: Intervals) -> Ints:
        """Return for each step how much (ns) of ``of`` lies in the step's communication."""
        start, end, step = self.communication
        return sum_by_group(of.covered_ns(start, end), step, self.count)


def _in_backward(steps: StepEvents) -> Ints:
    rows = np.flatnonzero(steps.is_launched & steps.rank.is_collective)
    rows = rows[np.isin(steps.rank.events.phase[rows], (BACKWARD_PHASE, SYNCHRONIZE_PHASE))]
    is_unknown = (steps.rank.backward == "none") | seem_lost(steps.collectives, steps.passes > 0)
    is_unknown |= steps.rank.lacks_phase
    return np.where(is_unknown, UNKNOWN, steps.count_events(rows))


def _backward_overlapped_ns(steps: StepEvents) -> Ints:
    has_backward = steps.count_events(steps.is_launched & steps.rank.is_backward) > 0
    has_backward &= ~steps.rank.lacks_phase
    return np.where(has_backward, steps.in_communication_ns(steps.backward), UNKNOWN)


def _blocking_ns(steps: StepEvents) -> Ints:
    return steps.unknown if why_unknown(steps.rank) else steps.rank.blocking.by_step_ns


def _blocking_at_most_ns(steps: StepEvents) -> Ints:
    return steps.unknown if steps.may_block is None else steps.in_communication_ns(steps.may_block)


def _tail_ns(steps: StepEvents) -> Ints:
    tail_ns = _tail_of_each_pass(steps.rank) if steps.rank.passes.any_several else _tail_of_one_pass(steps)
    is_unknown = (steps.passes == 0) | (steps.rank.breakdown.comm_ns == 0) | steps.rank.lacks_phase
    # A pass of which all compute waits for reduced gradients has no known end.
    passes = steps.rank.passes
    is_unknown[passes.step[passes.end_ns == NO_TIME]] = True
    return np.where(is_unknown, UNKNOWN, tail_ns)


def _tail_of_one_pass(steps: StepEvents) -> Ints:
    """Return the exposed communication (ns) of each step after the end of its only pass of backward."""
    rank, (start_ns, end_ns, step) = steps.rank, steps.communication
    last_ns = np.full(steps.count, NO_TIME)
    last_ns[rank.passes.step] = rank.passes.end_ns
    tail_from = np.minimum(np.maximum(start_ns, last_ns[step]), end_ns)
    bare_ns = end_ns - tail_from - rank.union_of(Category.COMPUTE).covered_ns(tail_from, end_ns)
    return sum_by_group(bare_ns, step, steps.count)


def _tail_of_each_pass(rank: RankEvents) -> Ints:
    """Return the exposed communication (ns) of each step after the end of its pass, if steps have several passes.

    Each instant belongs to one operation of communication (:func:`.assign_instants`), and the operation to one pass.
    """
    operations, pauses = rank.operations, find_pauses(rank.events, rank.operation_parts)
    backward_end_ns = rank.backward_end_of_operation_ns
    first, last = assign_instants(operations)
    tail_from = np.where(backward_end_ns == NO_TIME, last, np.clip(backward_end_ns, first, last))
    pieces = cut_pauses(operations, pauses, Part(tail_from, last))
    pieces = select(pieces, operations.step[pieces.row] != UNKNOWN)
    compute = rank.union_of(Category.COMPUTE)
    bare_ns = pieces.end_ns - pieces.start_ns - compute.covered_ns(pieces.start_ns, pieces.end_ns)
    return sum_by_group(bare_ns, operations.step[pieces.row], len(rank.steps))


@dataclass(frozen=True)
class Standstill:
    """How much of each step's length a stream, or a host that communicates, stands still for communication.

    These may be collectives of the step before. Time in which anything computes does not count.

    Attributes:
        blocking_ns: The time; ``UNKNOWN`` if it is not known.
        at_most_ns: An upper limit of it; the time itself if it is known.
        exposed_ns: The part of it in which communication runs; ``UNKNOWN`` if it is not known.
        memory_ns: The part of it in which only copies run; ``UNKNOWN`` if it is not known.
    """

    blocking_ns: Ints
    at_most_ns: Ints
    exposed_ns: Ints
    memory_ns: Ints


def _measure_standstill(steps: StepEvents) -> Standstill:
    """Return how much of each step's length is blocking time."""
    rank, times, blocking = steps.rank, steps.times, steps.rank.blocking
    start_ns, end_ns = times.start_ns, times.start_ns + times.length_ns
    compute, communication, memory = map(rank.union_of, (Category.COMPUTE, Category.COMMUNICATION, Category.MEMORY))
    # A step is known only if the step before it is known, too.
    is_unknown = blocking.by_step_ns == UNKNOWN
    is_unknown |= np.append(False, is_unknown[:-1])[: steps.count]
    # Communication of no step, as where calls were not recorded, may block the step in which it runs.
    is_unknown |= blocking.unknown_times(rank.events).covered_ns(start_ns, end_ns) > 0
    known = blocking.known_stretches
    still = union(known.start_ns, known.end_ns) - compute
    blocking_ns, most_ns = still.covered_ns(start_ns, end_ns), times.length_ns - times.compute_ns
    if steps.may_block is not None:
        most_ns = ((steps.may_block | still) - compute).covered_ns(start_ns, end_ns)
    exposed_ns = (still & communication).covered_ns(start_ns, end_ns)
    memory_ns = ((still & memory) - communication).covered_ns(start_ns, end_ns)
    return Standstill(
        blocking_ns=np.where(is_unknown, UNKNOWN, blocking_ns),
        at_most_ns=np.where(is_unknown, most_ns, blocking_ns),
        exposed_ns=np.where(is_unknown, UNKNOWN, exposed_ns),
        memory_ns=np.where(is_unknown, UNKNOWN, memory_ns),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLength:
    """How long a step took, and what filled that time; see :mod:`.core.step_breakdown`.

    If all parts are known they sum to ``ns``. Every figure is ``None`` if the length is not known. The blocking figures
    are no further parts: that time lies in what is exposed, copied or idle.
    """

    start_ns: int | None = column(
        "when it began: on the host, or on the device if the host runs ahead",
        default=None,
        measure=lambda steps: steps.times.start_ns,
        is_instant=True,
    )
    ns: int | None = column(
        "how long a step took: its range on the host, or its period on the device",
        default=None,
        measure=lambda steps: steps.times.length_ns,
        null="no step follows, or the device's work of no step follows it",
        key="step_ms",
        stays=ALWAYS,
        adds_up=True,
    )
    compute_only_ns: int | None = column(
        "compute without communication at the same time",
        default=None,
        measure=lambda steps: steps.times.compute_only_ns,
        needs=Hidden.WORK | Hidden.NAMES | Hidden.GRAPHS,
    )
    overlapped_ns: int | None = column(
        "communication of any step with compute at the same time",
        default=None,
        measure=lambda steps: steps.times.overlapped_ns,
        needs=Hidden.WORK | Hidden.GRAPHS | Hidden.WAITS,
    )
    exposed_ns: int | None = column(
        "communication of any step without compute at the same time",
        default=None,
        measure=lambda steps: steps.times.exposed_ns,
        needs=Hidden.WORK | Hidden.GRAPHS | Hidden.WAITS,
    )
    exposed_memory_ns: int | None = column(
        "memory copies without compute or communication at the same time",
        default=None,
        measure=lambda steps: steps.times.exposed_memory_ns,
        needs=Hidden.WORK | Hidden.GRAPHS | Hidden.COPIES,
    )
    idle_ns: int | None = column(
        "the rest",
        default=None,
        measure=lambda steps: steps.times.idle_ns,
        needs=Hidden.WORK | Hidden.NAMES | Hidden.GRAPHS | Hidden.COPIES,
    )
    blocking_ns: int | None = column(
        "time without compute in which a stream, or a host that communicates, stands still for communication",
        default=None,
        measure=lambda steps: steps.standstill.blocking_ns,
        needs=Hidden.WORK | Hidden.GRAPHS | Hidden.WAITS,
        in_document=False,  # a step's cost has these four
    )
    blocking_at_most_ns: int | None = column(
        "upper limit of it; the same if it is known",
        default=None,
        measure=lambda steps: steps.standstill.at_most_ns,
        needs=Hidden.WORK | Hidden.GRAPHS | Hidden.WAITS,
        in_document=False,
    )
    blocking_exposed_ns: int | None = column(
        "the part of it in exposed time",
        default=None,
        measure=lambda steps: steps.standstill.exposed_ns,
        needs=Hidden.WORK | Hidden.GRAPHS | Hidden.WAITS,
        in_document=False,
    )
    blocking_memory_ns: int | None = column(
        "the part of it in exposed memory copies",
        default=None,
        measure=lambda steps: steps.standstill.memory_ns,
        needs=Hidden.WORK | Hidden.GRAPHS | Hidden.WAITS,
        in_document=False,
    )
    spare_ns: int | None = column(
        "time in which the stream with most compute runs nothing, or communicates",
        default=None,
        measure=lambda steps: _spare_ns(steps),
        null="there is no such stream, as on a CPU",
        needs=Hidden.WORK | Hidden.NAMES | Hidden.GRAPHS | Hidden.COPIES,
        in_document=False,
    )


def _spare_ns(steps: StepEvents) -> Ints:
    """Return how long the stream with most compute of each step's length runs nothing, or communicates."""
    rank, times = steps.rank, steps.times
    if rank.compute_stream == UNKNOWN:
        return steps.unknown
    events = rank.events
    rows = np.flatnonzero((events.lane == rank.compute_stream) & (events.category != Category.COMMUNICATION))
    start_ns, end_ns = in_order(events.start_ns, rows), in_order(events.end_ns, rows)
    del rows  # they may be as many as the events of the trace
    own = union(start_ns, end_ns)
    return times.length_ns - own.covered_ns(times.start_ns, times.start_ns + times.length_ns)


def _lengths(steps: StepEvents) -> list[StepLength]:
    """Return the length of each step, and what filled it; without values if the length is not known."""
    if not steps.rank.has_steps:
        return [StepLength()] * steps.count
    lengths = make_rows(StepLength, measure_columns(StepLength, steps))
    is_known = steps.times.is_known.tolist()
    return [length if known else StepLength() for length, known in zip(lengths, is_known, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverlap:
    """One step of one rank. Parts of the window sum to it; see :class:`.core.step_breakdown.StepBreakdown`.

    The order of the columns is that of tables, documents and frames.
    """

    step: int | None = column(
        "number of the step",
        measure=lambda steps: steps.rank.steps.number,
        null="it has none",
    )
    step_key: int | None = column(
        "unique number of the step within its rank, see ``Steps.keys``",
        default=None,
        measure=lambda steps: steps.rank.step_keys,
        null="the capture marks no steps, and counts as a single one",
    )
    start_ns: int | None = column(
        "start of its window",
        measure=lambda steps: np.where(steps.rank.breakdown.window_ns > 0, steps.rank.breakdown.start_ns, NO_TIME),
        null="it launched nothing",
        is_instant=True,
    )
    host_ns: int | None = column(
        "length of its range on the host",
        measure=lambda steps: (
            steps.rank.steps.end_ns - steps.rank.steps.start_ns if steps.rank.has_steps else steps.unknown
        ),
        null="the capture marks no steps",
    )
    kernels: int | None = column(
        "kernels that ran on the device",
        measure=lambda steps: steps.count_events(steps.is_launched & steps.rank.is_kernel),
        needs=Hidden.KERNELS | Hidden.CALLS,
        stays=WITH_ROOM,
        adds_up=True,
    )
    collectives: int | None = column(
        "collectives; in a comparison the median of a step",
        measure=lambda steps: steps.collectives,
        needs=Hidden.LAUNCHES,
        stays=WITH_ROOM,
        adds_up=True,
    )
    in_backward: int | None = column(
        "collectives launched in backward or ``synchronize``, as those of gradients are",
        default=0,
        measure=_in_backward,
        null="it is not known when its backward ran",
        needs=Hidden.LAUNCHES | Hidden.CALLS,
    )
    passes: int | None = column(
        "passes of backward in the step, if a step has several",
        default=None,
        measure=lambda steps: np.where(steps.passes == 0, UNKNOWN, steps.passes),
        null="no pass of backward is known",
        stays=WITH_ROOM,
        shown_above=1,
    )
    window_ns: int | None = column(
        "from the first to the last work of the step on the device",
        measure=lambda steps: steps.rank.breakdown.window_ns,
        needs=Hidden.LAUNCHES | Hidden.CALLS | Hidden.COPIES,
        stays=WITH_ROOM,
        adds_up=True,
    )
    compute_only_ns: int | None = column(
        "compute without communication at the same time",
        measure=lambda steps: steps.rank.breakdown.compute_only_ns,
        needs=Hidden.LAUNCHES | Hidden.CALLS | Hidden.NAMES | Hidden.GRAPHS | Hidden.COPIES,
        stays=WITH_ROOM,
        adds_up=True,
    )
    overlapped_ns: int | None = column(
        "communication with compute at the same time",
        measure=lambda steps: steps.rank.breakdown.overlapped_ns,
        needs=Hidden.LAUNCHES | Hidden.GRAPHS | Hidden.WAITS | Hidden.COMMUNICATION,
        stays=WITH_ROOM,
        adds_up=True,
    )
    exposed_ns: int | None = column(
        "communication without compute at the same time",
        measure=lambda steps: steps.rank.breakdown.exposed_ns,
        needs=Hidden.LAUNCHES | Hidden.GRAPHS | Hidden.WAITS | Hidden.COMMUNICATION,
        stays=ALWAYS,
        adds_up=True,
    )
    exposed_memory_ns: int | None = column(
        "memory copies without compute or communication at the same time",
        measure=lambda steps: steps.rank.breakdown.exposed_memory_ns,
        needs=Hidden.LAUNCHES | Hidden.CALLS | Hidden.GRAPHS | Hidden.COPIES,
        stays=WITH_MUCH_ROOM,
        adds_up=True,
    )
    idle_ns: int | None = column(
        "time in which the device did nothing",
        measure=lambda steps: steps.rank.breakdown.idle_ns,
        needs=Hidden.LAUNCHES | Hidden.CALLS | Hidden.NAMES | Hidden.GRAPHS | Hidden.COPIES,
        stays=WITH_ROOM,
        adds_up=True,
    )
    other_comm_ns: int | None = column(
        "the part of idle time in which communication of another step ran",
        measure=lambda steps: steps.rank.breakdown.other_comm_ns,
        needs=Hidden.LAUNCHES | Hidden.CALLS | Hidden.GRAPHS,
    )
    length: StepLength = column(
        "how long the step took, and what filled that time",
        default=StepLength(),
        measure=_lengths,
        holds=StepLength,
    )
    comm_ns: int | None = column(
        "union of all communication",
        measure=lambda steps: steps.rank.breakdown.comm_ns,
        needs=Hidden.LAUNCHES | Hidden.COMMUNICATION,
        stays=USUALLY,
        adds_up=True,
    )
    blocking_ns: int | None = column(
        "time in which a stream (on a CPU: the host) stood still for communication",
        default=None,
        measure=_blocking_ns,
        needs=Hidden.LAUNCHES | Hidden.GRAPHS | Hidden.WAITS,
        null="what work waits for is not known",
        stays=USUALLY,
        adds_up=True,
    )
    blocking_at_most_ns: int | None = column(
        "upper limit of ``blocking_ns`` and of what waits of the host cost, see ``RankEvents.may_block``",
        default=None,
        measure=_blocking_at_most_ns,
        needs=Hidden.LAUNCHES | Hidden.GRAPHS | Hidden.WAITS,
        null="both are known",
    )
    backward_overlapped_ns: int | None = column(
        "communication with compute of backward at the same time",
        measure=_backward_overlapped_ns,
        needs=Hidden.LAUNCHES | Hidden.GRAPHS | Hidden.WAITS | Hidden.COMMUNICATION,
        null="no compute of backward is known",
    )
    tail_ns: int | None = column(
        "exposed communication after the last compute of its pass of backward",
        measure=_tail_ns,
        needs=Hidden.LAUNCHES | Hidden.GRAPHS | Hidden.WAITS,
        null="no compute of backward is known, or the step does not communicate",
        stays=USUALLY,
        adds_up=True,
    )
    comm_end_ns: int | None = column(
        "end of its last communication",
        default=None,
        measure=lambda steps: last_by_step(
            steps.rank.events.end_ns[steps.is_communication],
            steps.rank.events.step[steps.is_communication],
            steps.count,
        ),
        null="it has none",
        is_instant=True,
    )

    @property
    @derived(
        "share of communication that is overlapped",
        key="overlap_%",
        null="there is none",
        stays=ALWAYS,
        after="blocking_at_most_ns",
    )
    def overlap_ratio(self) -> float | None:
        """Fraction of the step's communication that compute hides, 0 to 1; ``None`` if not known."""
        return self.overlapped_ns / self.comm_ns if self.overlapped_ns is not None and self.comm_ns else None


def measure_steps(rank: RankEvents, backward: Intervals) -> tuple[StepOverlap, ...]:
    """Return the figures of a rank's steps; ``backward`` is when compute of backward runs."""
    return tuple(make_rows(StepOverlap, measure_columns(StepOverlap, StepEvents(rank, backward))))


def hide(step: StepOverlap, hidden: Hidden) -> StepOverlap:
    """Return the step without the figures that need what its capture does not tell (``hidden``)."""
    length = replace(step.length, **hidden_fields(StepLength, hidden))
    return replace(step, **hidden_fields(StepOverlap, hidden), length=length)
