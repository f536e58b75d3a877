"""When and why communication is exposed: each nanosecond of a step's ``exposed_ns`` gets one collective and one pair.

*The collective.* If several run at once, the instant belongs to the one that ends last: the step waits for it, and if
another one had ended earlier, the instant would still be exposed. So the collectives' parts sum to the step's figures::

    A            #########
    B              ######
    C                 ########
    belongs to   aaaaacccccccc      B ends under A and C, so nothing waits for it

*When* depends on what the device computes before and after the instant, in the step that launched the collective:
``docs/metrics.md`` has a table. *Why* is the first reason in this table that applies. ``E`` are the exposed instants
that it explains, ``#`` compute, ``r`` ready, ``L`` launch, ``C`` the collective:

=============  ======================================================================================================
blocking_call  The program waits for it: it was launched after backward, or on the compute stream, where no later
               operation can run beside it.

               compute ####|      LCCCCC
                             ->    EEEEE

peer_wait      A peer had not arrived. This is the first part of the collective: its duration minus the shortest
               duration over all ranks. An earlier launch would not change it.

               compute ####....####
               here      LCCCCCCC     peer      LCCC
                           EEEE

launched_late  The host was late. If launched when ready, the collective would have ended earlier by this delay; the
               last part of the collective, as long as the delay, counts.

               compute ###r.....
               here        ..LCCCCC       late by 2
                                EE

queued         It waited behind another collective on its stream; a part as long as that wait counts. The queue is the
               busy stretch of the stream that ends where the collective starts.

               stream  BBBBBCCCCC        ready and launched at the second B: queued for 4
               here     L    ~EEEE

late_input     It waited for its input: a part counts that is as long as its stream was idle, after the launch, until
               the input was there.

               input   ######|           launched at L, the stream free from the second dot on: late by 3
               stream  BBB...CCCCC
               here     L      EEE

transfer       Everything else: data is on the wire. Also all of a send or receive, which may wait for its peer.

unknown        Everything but waiting for a peer, where the clocks of host and device disagree: when a collective was
               launched is then not known.
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
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.communication import OPERATIONS, POINT_TO_POINT
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, Table, concatenate, distinct, select, take_or_unknown

TAIL, OUTSIDE, UNKNOWN_WHEN = "tail", "outside", "unknown"
WHENS = (FORWARD, BACKWARD, TAIL, OPTIMIZER, OUTSIDE, UNKNOWN_WHEN)
"""When communication can be exposed, in the order of a step."""

BLOCKING_CALL, LAUNCHED_LATE, QUEUED = "blocking_call", "launched_late", "queued"
LATE_INPUT, PEER_WAIT, TRANSFER, UNKNOWN_WHY = "late_input", "peer_wait", "transfer", "unknown"
WHYS = (BLOCKING_CALL, LAUNCHED_LATE, QUEUED, LATE_INPUT, PEER_WAIT, TRANSFER, UNKNOWN_WHY)
"""Why communication is exposed."""

BACK_TO_BACK_NS = 20_000
"""Usual gap between two operations of a stream if the second one waits for nothing else."""

_LATEST = 2**62
_SEND_OR_RECEIVE = OPERATIONS.index(POINT_TO_POINT)
_WHEN_OF_PHASE = {PHASES.index(phase): WHENS.index(phase) for phase in (FORWARD, BACKWARD, OPTIMIZER)}


@dataclass(frozen=True)
class Exposure(Table):
    """One row per collective, in the order of its timings; a step's rows sum to the figures of its ``StepOverlap``.

    Attributes:
        overlapped_ns: The instants that belong to the collective and have compute beside them.
        exposed_ns: The other instants that belong to it.
        exposed_wait_ns: The exposed instants at which a peer had not arrived, whatever their pair.
        pairs_ns: Exposed time by :data:`WHENS` and :data:`WHYS`; shape (collectives, whens, whys).
    """

    overlapped_ns: Ints
    exposed_ns: Ints
    exposed_wait_ns: Ints
    pairs_ns: Ints


@dataclass(frozen=True)
class PhaseParts(Pieces):
    """Pieces of the time of collectives, each at one ``when``, an index into :data:`WHENS`."""

    when: Ints


def explain_exposure(rank: RankCollectives, wait_ns: Ints, parts: Mapping[str, PhaseParts]) -> Exposure:
    """Divide the exposed time of one rank among its collectives; ``parts`` are of :attr:`.RunAnalysis.parts`."""
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
    return pieces.end_ns - pieces.start_ns - rank.compute.covered_ns(pieces.start_ns, pieces.end_ns)


def divide_by_why(timings: CollectiveTimings, wait_ns: Ints, *, clocks_disagree: bool = False) -> dict[str, Part]:
    """The part of each collective that each reason explains; parts may be empty."""
    first, last = assign_instants(timings)
    if clocks_disagree:
        wait_end = wait_end_ns(timings, wait_ns)
        return {PEER_WAIT: Part(first, wait_end), UNKNOWN_WHY: Part(wait_end, last)}
    begin = np.where(timings.blocking > 0, last, first)
    wait_end = np.maximum(wait_end_ns(timings, wait_ns), begin)
    # A send or receive may wait for its peer, which is never known: then no delay before its start matters.
    is_delayed = timings.operation != _SEND_OR_RECEIVE
    late_ns, queued_ns, input_ns = (np.where(is_delayed, delay_ns, 0) for delay_ns in measure_delays(timings))
    late_from = np.clip(timings.end_ns - late_ns, wait_end, last)
    queued_from = np.clip(timings.end_ns - late_ns - queued_ns, wait_end, late_from)
    input_from = np.clip(timings.end_ns - late_ns - queued_ns - input_ns, wait_end, queued_from)
    return {
        BLOCKING_CALL: Part(first, begin),
        PEER_WAIT: Part(begin, wait_end),
        TRANSFER: Part(wait_end, input_from),
        LATE_INPUT: Part(input_from, queued_from),
        QUEUED: Part(queued_from, late_from),
        LAUNCHED_LATE: Part(late_from, last),
    }


def divide_by_when(rank: RankCollectives, part: Part) -> PhaseParts:
    """Cut a part of each collective at its pauses and the borders of the device's phases, without empty pieces."""
    pieces = cut_pauses(rank.timings, rank.pauses, part)
    of_piece, stretch = _overlapping_stretches(rank, pieces)
    row, start_ns, end_ns = pieces.row[of_piece], pieces.start_ns[of_piece], pieces.end_ns[of_piece]

    # A stretch of a phase ends where the next one begins; the last one of a step has no end.
    phases = rank.device_phases
    ends = np.append(phases.start_ns[1:], _LATEST)
    ends[np.append(phases.step[1:] != phases.step[:-1], True)] = _LATEST
    start = np.maximum(start_ns, phases.start_ns[stretch])
    end = np.minimum(end_ns, ends[stretch])

    when = _classify_when(phases.before[stretch], phases.after[stretch], rank.timings.phase[row])
    timings = select(rank.timings, row)
    is_lost = (timings.step == UNKNOWN) & ((timings.launch_ns == NO_TIME) | (timings.phase != UNKNOWN))
    when[is_lost] = WHENS.index(UNKNOWN_WHEN)

    # What lies after the end of backward's compute is tail, whatever the phase is.
    tail_from = np.clip(backward_end_ns(rank)[row], start, np.maximum(start, end))
    in_tail = PhaseParts(row, tail_from, end, np.full(len(row), WHENS.index(TAIL)))
    cells = concatenate(PhaseParts(row, start, tail_from, when), in_tail)
    return select(cells, cells.end_ns > cells.start_ns)


def _overlapping_stretches(rank: RankCollectives, pieces: Pieces) -> tuple[Ints, Ints]:
    """Pairs of a piece of a collective and a stretch of its step's phases that overlap."""
    phases = rank.device_phases
    rows = np.arange(len(pieces))
    if not len(rows):
        return rows, rows
    step, start, end = rank.timings.step[pieces.row], pieces.start_ns, pieces.end_ns
    step = np.where(step == UNKNOWN, phases.step[-1], step)
    # On an axis with all steps end to end, stretches are in order, so one search is enough.
    low, high = int(start.min()), int(end.max()) + 1
    axis = phases.step * (high - low) + np.clip(phases.start_ns, low, high - 1) - low
    first = np.searchsorted(axis, step * (high - low) + start - low, side="right") - 1
    first = np.maximum(first, np.searchsorted(phases.step, step))
    count = np.maximum(1, np.searchsorted(axis, step * (high - low) + end - low, side="left") - first)
    nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(rows, count), np.repeat(first, count) + nth


def _classify_when(before: Ints, after: Ints, launched_in: Ints) -> Ints:
    """Index into :data:`WHENS` of instants between compute of two phases; the tail is found elsewhere."""
    found = np.full(len(before), WHENS.index(OUTSIDE), np.int64)
    nothing = (before < 0) & (after < 0) & (before != BETWEEN_STEPS)
    found[nothing] = WHENS.index(UNKNOWN_WHEN)
    for phase, when in _WHEN_OF_PHASE.items():
        waits_for_it = (after == phase) & ((before == phase) | (launched_in == phase))
        found[waits_for_it] = when
    return found


def backward_end_ns(rank: RankCollectives) -> Ints:
    """The end of backward's compute in each collective's pass; if not known, a time later than any event."""
    end = rank.timings.backward_end_ns
    return np.where(end == NO_TIME, _LATEST, end)


def wait_end_ns(timings: CollectiveTimings, wait_ns: Ints) -> Ints:
    """End of each collective's wait for peers, within the instants that belong to it."""
    first, last = assign_instants(timings)
    return np.clip(timings.start_ns + np.maximum(wait_ns, 0), first, last)


def measure_delays(timings: CollectiveTimings) -> tuple[Ints, Ints, Ints]:
    """For each collective: how late it was launched, how long it queued, and how long it waited for its input."""
    launched = np.where(timings.launch_ns == NO_TIME, timings.start_ns, timings.launch_ns)
    ready = np.where(timings.ready_ns == NO_TIME, launched, timings.ready_ns)
    late = np.maximum(0, np.minimum(launched, timings.start_ns) - ready)
    due = np.minimum(np.maximum(launched, ready), timings.start_ns)
    queued, waited = np.zeros(len(timings), np.int64), np.zeros(len(timings), np.int64)
    for lane in distinct(timings.lane[timings.lane != UNKNOWN]):
        mine = timings.lane == lane
        start, end, input_ns = timings.start_ns[mine], timings.end_ns[mine], timings.input_ns[mine]
        busy = union(start, end)
        _, free_from = _last_before(busy, start)
        stretch_from, stretch_end = _last_before(union(busy.start_ns, busy.end_ns + BACK_TO_BACK_NS), start)
        is_queue = (stretch_end >= start) & (input_ns <= free_from)
        queue_ns = busy.covered_ns(np.clip(stretch_from, due[mine], start), start)
        queued[mine] = np.where(is_queue, queue_ns, 0)
        waited[mine] = np.maximum(0, input_ns - np.maximum(due[mine], free_from))
    return late, queued, waited


def _last_before(intervals: Intervals, time_ns: Ints) -> tuple[Ints, Ints]:
    """Start and end of the last interval that starts before each time, cut at that time; ``NO_TIME`` if none does."""
    row = np.searchsorted(intervals.start_ns, time_ns) - 1
    return take_or_unknown(intervals.start_ns, row, NO_TIME), np.minimum(
        take_or_unknown(intervals.end_ns, row, NO_TIME), time_ns
    )
