"""When and why communication is exposed: each exposed nanosecond of a step gets one collective, one when and one why.

*The collective.* If several run at once, the instant belongs to the collective that ends last: the step waits for it,
and if another one had ended earlier, the instant would still be exposed. So the collectives' parts sum to the step's
``exposed_ns``::

    A            #########
    B              ######
    C                 ########
    belongs to   aaaaacccccccc      B ends under A and C, so nothing waits for it

*When* (forward, backward, tail, ...) depends on what the device computes before and after the instant, in the step that
launched the collective: ``docs/metrics.md`` has a table. *Why* is the first reason in the following table that applies.
In the pictures, ``E`` is an exposed instant that the reason explains, ``#`` compute, ``r`` when the gradients were
ready, ``L`` the launch, ``C`` the collective, ``B`` another collective on its stream, ``|`` the end of backward or of
the input:

=============  ======================================================================================================
blocking_call  The program waits for it: it was launched after backward, or on the compute stream, where no later
               operation can run beside it.

               compute ####|      LCCCCC
                             ->    EEEEE

peer_wait      A peer had not arrived. This is the first part of the collective, as long as its duration minus the
               shortest duration over all ranks. An earlier launch on this rank would not change it.

               compute ####....####
               here      LCCCCCCC     peer      LCCC
                           EEEE

launched_late  The host launched the collective after its gradients were ready. Without this delay the collective would
               have ended earlier by as much, so its last part, as long as the delay, counts.

               compute ###r.....
               here        ..LCCCCC       late by 2
                                EE

queued         It waited behind another collective on its stream; a part as long as that wait counts. The queue is the
               busy stretch of the stream that ends where the collective starts.

               stream  BBBBBCCCCC        ready and launched at the second B: queued for 4
               here     L    ~EEEE

late_input     It waited for its input: a part counts that is as long as the time from the launch, or from when its
               stream was free if that is later, until the input was there.

               input   ######|           launched at L, stream free after the last B: the input comes 3 later
               stream  BBB...CCCCC
               here     L      EEE

transfer       Everything else: data is on the wire. Also all of a send or receive; part of it may be waiting for its
               peer, which is not known.

unknown        Everything but waiting for a peer, if the clocks of host and device disagree: it is then not known when
               a collective was launched. Within a CUDA graph, whose order is not recorded, the part of the queue before
               the last other work of the graph that ended before the collective starts: it may be its input.
=============  ======================================================================================================

``exposed_wait_ns`` counts all exposed instants at which a peer had not arrived, also in blocking calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.collectives.timing import CollectiveTimings, RankCollectives
from ddp_prof.analyze.core.operations import Part, Pieces, assign_instants, cut_pauses
from ddp_prof.analyze.core.step_breakdown import BETWEEN_STEPS, sum_by_group
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.communication import OPERATIONS, POINT_TO_POINT
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ddp_prof.trace import NEVER, NO_TIME, UNKNOWN, Ints, Table, concatenate, distinct, select, take_or_unknown

TAIL, OUTSIDE, UNKNOWN_WHEN = "tail", "outside", "unknown"
WHENS = (FORWARD, BACKWARD, TAIL, OPTIMIZER, OUTSIDE, UNKNOWN_WHEN)
"""When communication can be exposed, in the order of a step."""

BLOCKING_CALL, LAUNCHED_LATE, QUEUED = "blocking_call", "launched_late", "queued"
LATE_INPUT, PEER_WAIT, TRANSFER, UNKNOWN_WHY = "late_input", "peer_wait", "transfer", "unknown"
WHYS = (BLOCKING_CALL, LAUNCHED_LATE, QUEUED, LATE_INPUT, PEER_WAIT, TRANSFER, UNKNOWN_WHY)
"""Why communication is exposed."""

_SEND_OR_RECEIVE = OPERATIONS.index(POINT_TO_POINT)
_WHEN_OF_PHASE = {PHASES.index(phase): WHENS.index(phase) for phase in (FORWARD, BACKWARD, OPTIMIZER)}


@dataclass(frozen=True)
class Exposure(Table):
    """One row per collective, in the order of its timings; a step's rows sum to the figures of its ``StepOverlap``.

    Attributes:
        overlapped_ns: Time that belongs to the collective and has compute beside it.
        exposed_ns: The other time that belongs to it.
        exposed_wait_ns: The part of ``exposed_ns`` in which a peer had not arrived, whatever its why.
        pairs_ns: ``exposed_ns`` by :data:`WHENS` and :data:`WHYS`; shape (collectives, whens, whys).
    """

    overlapped_ns: Ints
    exposed_ns: Ints
    exposed_wait_ns: Ints
    pairs_ns: Ints


@dataclass(frozen=True)
class PhaseParts(Pieces):
    """Intervals of the time of collectives, each at one ``when``, an index into :data:`WHENS`."""

    when: Ints


def explain_exposure(rank: RankCollectives, wait_ns: Ints, parts: Mapping[str, PhaseParts]) -> Exposure:
    """Return the exposed time of each collective of one rank, by when and why.

    ``wait_ns`` and ``parts`` are the rank's elements of :attr:`.RunAnalysis.waits_ns` and :attr:`.RunAnalysis.parts`.
    """
    timings = rank.timings
    pairs = np.zeros((len(timings), len(WHENS), len(WHYS)), np.int64)
    for why, cells in parts.items():
        np.add.at(pairs[:, :, WHYS.index(why)], (cells.row, cells.when), _exposed_ns(rank, cells))
    first, last = assign_instants(timings)
    waiting = cut_pauses(rank.timings, rank.pauses, Part(first, wait_end_ns(timings, wait_ns)))
    owned = cut_pauses(rank.timings, rank.pauses, Part(first, last))
    return Exposure(
        overlapped_ns=sum_by_group(rank.compute.covered_ns(owned.start_ns, owned.end_ns), owned.row, len(timings)),
        exposed_ns=pairs.sum(axis=(1, 2)),
        exposed_wait_ns=sum_by_group(_exposed_ns(rank, waiting), waiting.row, len(timings)),
        pairs_ns=pairs,
    )


def _exposed_ns(rank: RankCollectives, pieces: Pieces) -> Ints:
    """Return how much of each interval has no compute beside it."""
    return pieces.end_ns - pieces.start_ns - rank.compute.covered_ns(pieces.start_ns, pieces.end_ns)


def divide_by_why(timings: CollectiveTimings, wait_ns: Ints, *, clocks_disagree: bool = False) -> dict[str, Part]:
    """Return by reason, one of :data:`WHYS`: the interval of each collective that it explains, which may be empty.

    ``wait_ns`` is how long each collective waited for a peer, ``UNKNOWN`` if not known. The intervals of a collective
    follow each other: from ``first`` to ``last``, the instants that belong to it.
    """
    first, last = assign_instants(timings)
    if clocks_disagree:
        wait_end = wait_end_ns(timings, wait_ns)
        return {PEER_WAIT: Part(first, wait_end), UNKNOWN_WHY: Part(wait_end, last)}
    begin = np.where(timings.blocking > 0, last, first)  # a blocking call explains all of the collective
    wait_end = np.maximum(wait_end_ns(timings, wait_ns), begin)
    # A send or receive may wait for its peer, which is never known: then no delay before its start matters.
    is_delayed = timings.operation != _SEND_OR_RECEIVE
    delays = [np.where(is_delayed, delay_ns, 0) for delay_ns in measure_delays(timings)]
    # From the end back: as long as it was launched late, then as long as it queued, then as it may have queued, then as
    # it waited for its input.
    late_from, queued_from, unknown_from, input_from = (
        np.clip(timings.end_ns - sum(delays[:count]), wait_end, last) for count in range(1, 5)
    )
    return {
        BLOCKING_CALL: Part(first, begin),
        PEER_WAIT: Part(begin, wait_end),
        TRANSFER: Part(wait_end, input_from),
        LATE_INPUT: Part(input_from, unknown_from),
        UNKNOWN_WHY: Part(unknown_from, queued_from),
        QUEUED: Part(queued_from, late_from),
        LAUNCHED_LATE: Part(late_from, last),
    }


def divide_by_when(rank: RankCollectives, part: Part) -> PhaseParts:
    """Return each collective's interval in pieces, without its pauses, each piece at one when; no piece is empty.

    ``part`` has one interval per collective. It is cut where the phase of the device changes, and at the end of the
    collective's pass of backward, after which it is tail.
    """
    pieces = cut_pauses(rank.timings, rank.pauses, part)
    of_piece, stretch = _overlapping_stretches(rank, pieces)
    row, start_ns, end_ns = pieces.row[of_piece], pieces.start_ns[of_piece], pieces.end_ns[of_piece]

    # A stretch of a phase ends where the next one begins; the last one of a step has no end.
    phases = rank.device_phases
    ends = np.append(phases.start_ns[1:], NEVER)
    ends[np.append(phases.step[1:] != phases.step[:-1], True)] = NEVER
    start = np.maximum(start_ns, phases.start_ns[stretch])
    end = np.minimum(end_ns, ends[stretch])

    when = _classify_when(phases.before[stretch], phases.after[stretch], rank.timings.phase[row])
    timings = select(rank.timings, row)
    # Outside of steps, the phase of the device means nothing for a collective without launch, or launched in a phase.
    is_lost = (timings.step == UNKNOWN) & ((timings.launch_ns == NO_TIME) | (timings.phase != UNKNOWN))
    when[is_lost] = WHENS.index(UNKNOWN_WHEN)

    # What lies after the end of backward's compute is tail, whatever the phase is.
    tail_from = np.clip(backward_end_ns(rank)[row], start, np.maximum(start, end))
    in_tail = PhaseParts(row, tail_from, end, np.full(len(row), WHENS.index(TAIL)))
    cells = concatenate(PhaseParts(row, start, tail_from, when), in_tail)
    return select(cells, cells.end_ns > cells.start_ns)


def _overlapping_stretches(rank: RankCollectives, pieces: Pieces) -> tuple[Ints, Ints]:
    """Return pairs of a piece of a collective and a stretch of its step's phases that overlap, as two arrays of rows.

    The first array has rows of ``pieces``, the second rows of ``rank.device_phases``.
    """
    phases = rank.device_phases
    rows = np.arange(len(pieces))
    if not len(rows):
        return rows, rows
    step, start, end = rank.timings.step[pieces.row], pieces.start_ns, pieces.end_ns
    step = np.where(step == UNKNOWN, phases.step[-1], step)  # the last stretch is the time outside of steps
    # On an axis with all steps end to end, stretches are in order, so one search is enough.
    low, high = int(start.min()), int(end.max()) + 1
    axis = phases.step * (high - low) + np.clip(phases.start_ns, low, high - 1) - low
    first = np.searchsorted(axis, step * (high - low) + start - low, side="right") - 1
    first = np.maximum(first, np.searchsorted(phases.step, step))
    count = np.maximum(1, np.searchsorted(axis, step * (high - low) + end - low, side="left") - first)
    # Repeat each piece once per stretch; `nth` counts 0, 1, 2, ... within the stretches of a piece.
    nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(rows, count), np.repeat(first, count) + nth


def _classify_when(before: Ints, after: Ints, launched_in: Ints) -> Ints:
    """Return the index into :data:`WHENS` of instants between compute of two phases; the tail is not found here.

    - ``before``, ``after``: Phase of the compute before and after each instant, as in ``DevicePhases``.
    - ``launched_in``: Phase that launched the collective.
    """
    found = np.full(len(before), WHENS.index(OUTSIDE), np.int64)
    nothing = (before < 0) & (after < 0) & (before != BETWEEN_STEPS)
    found[nothing] = WHENS.index(UNKNOWN_WHEN)
    # During a phase: both neighbours are of it, or the later one and the launch.
    for phase, when in _WHEN_OF_PHASE.items():
        waits_for_it = (after == phase) & ((before == phase) | (launched_in == phase))
        found[waits_for_it] = when
    return found


def backward_end_ns(rank: RankCollectives) -> Ints:
    """Return the end of backward's compute in each collective's pass; a time later than any event if not known."""
    end = rank.timings.backward_end_ns
    return np.where(end == NO_TIME, NEVER, end)


def wait_end_ns(timings: CollectiveTimings, wait_ns: Ints) -> Ints:
    """Return the end of each collective's wait for peers, cut to the instants that belong to the collective.

    ``wait_ns`` is the length of the wait; ``UNKNOWN`` counts as 0.
    """
    first, last = assign_instants(timings)
    return np.clip(timings.start_ns + np.maximum(wait_ns, 0), first, last)


def measure_delays(timings: CollectiveTimings) -> tuple[Ints, Ints, Ints, Ints]:
    """Return for each collective how long it was delayed, for each cause of a delay.

    The causes: the host launched it late; it queued; it queued or waited for its input, which is not known within a
    CUDA graph; and it waited for its input.
    """
    launched = timings.launch_or_start_ns
    ready = np.where(timings.ready_ns == NO_TIME, launched, timings.ready_ns)
    late = np.maximum(0, np.minimum(launched, timings.start_ns) - ready)
    due = np.minimum(np.maximum(launched, ready), timings.start_ns)
    queued, unknown, waited = (np.zeros(len(timings), np.int64) for _ in range(3))
    # It queued in the busy stretch of its stream that ends where it starts, gaps of BACK_TO_BACK_NS included; but only
    # if its input was there before the stream was free.
    for lane in distinct(timings.lane[timings.lane != UNKNOWN]):
        mine = timings.lane == lane
        start, end, input_ns = timings.start_ns[mine], timings.end_ns[mine], timings.input_ns[mine]
        busy = union(start, end)
        _, free_from = _last_before(busy, start)
        stretch_from, stretch_end = _last_before(union(busy.start_ns, busy.end_ns + BACK_TO_BACK_NS), start)
        is_queue = (stretch_end >= start) & (input_ns <= free_from)
        # From when on it queued at the earliest and, if its input is one of several operations, at the latest.
        from_ns = np.clip(stretch_from, due[mine], start)
        surely_from_ns = np.clip(timings.graph_input_ns[mine], from_ns, start)
        queued[mine] = np.where(is_queue, busy.covered_ns(surely_from_ns, start), 0)
        unknown[mine] = np.where(is_queue, busy.covered_ns(from_ns, surely_from_ns), 0)
        waited[mine] = np.maximum(0, input_ns - np.maximum(due[mine], free_from))
    return late, queued, unknown, waited


def _last_before(intervals: Intervals, time_ns: Ints) -> tuple[Ints, Ints]:
    """Return start and end of the last interval that starts before each time, cut at that time; else ``NO_TIME``."""
    row = np.searchsorted(intervals.start_ns, time_ns) - 1
    return take_or_unknown(intervals.start_ns, row, NO_TIME), np.minimum(
        take_or_unknown(intervals.end_ns, row, NO_TIME), time_ns
    )
