"""Why communication is exposed: each nanosecond of a step's ``exposed_ns`` gets one collective and one cause.

*The collective.* Where several are in flight, the one that ends last: the step waits for it, and had another ended
sooner, the instant would be exposed all the same. So the collectives' parts sum to the step's figures::

    A            #########
    B              ######
    C                 ########
    belongs to   aaaaacccccccc      B ends under A and C, so nothing waits for it

*The cause.* The first that holds, from the top. ``E`` exposed instants in question, ``#`` compute, ``r`` ready,
``L`` launch, ``C`` the collective:

=============  ======================================================================================================
synchronous    The collective was launched after backward: the variant blocks, nothing could ever hide it.

               compute ####|      LCCCCC
                             ->    EEEEE

launched_late  The host was behind the device: launched when ready, it would have ended as much sooner, so as much of
               its end counts.

               compute ###r.....
               here        ..LCCCCC       late by 2
                                EE

queued         Behind another collective on its stream: as much of its end as it stood in the queue.

               stream  BBBBBCCCCC        ready and launched at the second B: queued for 4
               here     L    ~EEEE

tail           After the last compute of backward: nothing left to hide under.

               compute ######|
               here        LCCCCC
                              EEE

waiting        During backward, while a peer had not arrived: the collective's own duration minus the shortest of all
               ranks, at its start.

               compute ####....####
               here      LCCCCCCC     peer      LCCC
                           EEEE

starved        During backward: the collective ran while compute waited, for the host or for a dependency.

               compute ####....####
               here      LCCCCCC
                           EEEE
=============  ======================================================================================================

Whether bytes moved or a peer was missing is a second question, asked of every exposed instant: ``exposed_wait_ns``
answers it, of the tail, too. A rank that waits after its own backward has nothing left to hide under, whoever is late.
What ends late because it was launched late, or queued, is that for what follows the wait.

Where backward is not known the tail cannot be told, and its part is ``waiting`` or ``starved``; where no peer is known,
nothing is ``waiting``; where readiness is not known, nothing is ``launched_late`` and a queue counts from the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddp_prof.analyze.intervals import union
from ddp_prof.trace import UNKNOWN, Table

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.timing import CollectiveTimings, RankCollectives
    from ddp_prof.trace import Ints

TAIL, LAUNCHED_LATE, QUEUED, WAITING, STARVED, SYNCHRONOUS = CAUSES = (
    "tail",
    "launched_late",
    "queued",
    "waiting",
    "starved",
    "synchronous",
)
"""All causes, in the order in which they are listed; the order in which they are tried is the module's."""


@dataclass(frozen=True)
class Exposure(Table):
    """A row a collective, in the order of its timings; a step's rows sum to the figures of its ``StepOverlap``.

    Attributes:
        overlapped_ns: Of the instants that belong to the collective, those under compute.
        exposed_ns: The others; the sum of the causes.
        exposed_wait_ns: Of the exposed instants, those in which a peer had not arrived, whatever their cause.
        tail_wait_ns: Of the tail, the same.
    """

    overlapped_ns: Ints
    exposed_ns: Ints
    exposed_wait_ns: Ints
    tail_wait_ns: Ints
    tail_ns: Ints
    launched_late_ns: Ints
    queued_ns: Ints
    waiting_ns: Ints
    starved_ns: Ints
    synchronous_ns: Ints


class Part(NamedTuple):
    """A part of each collective: where it starts and ends."""

    start_ns: Ints
    end_ns: Ints


def explain_exposure(rank: RankCollectives, wait_ns: Ints) -> Exposure:
    """Divide the exposed time of one rank among its collectives and their causes.

    Args:
        rank: The rank's collectives.
        wait_ns: How long each collective waited for peers, at its start; ``UNKNOWN`` where no peer is known.
    """
    parts = divide_by_cause(rank, wait_ns)

    def exposed(part: Part) -> Ints:
        return part.end_ns - part.start_ns - rank.compute.covered_ns(part.start_ns, part.end_ns)

    found = {cause: exposed(part) for cause, part in parts.items()}
    everything = sum(found.values(), start=np.zeros(len(rank.timings), np.int64))
    blocks = rank.timings.blocking == 1
    first, last = owned_instants(rank.timings)
    wait = exposed(Part(first, wait_end_ns(rank.timings, wait_ns)))
    return Exposure(
        overlapped_ns=rank.compute.covered_ns(first, last),
        exposed_ns=everything,
        exposed_wait_ns=wait,
        tail_wait_ns=np.where(blocks, 0, wait - found[WAITING]),
        synchronous_ns=np.where(blocks, everything, 0),
        **{f"{cause}_ns": np.where(blocks, 0, length) for cause, length in found.items()},
    )


def divide_by_cause(rank: RankCollectives, wait_ns: Ints) -> dict[str, Part]:
    """The part of each collective in which exposed instants have a cause, in order of time; parts may be empty.

    Of a collective with ``blocking`` set the causes do not count: all of it is ``synchronous``.
    """
    timings = rank.timings
    first, last = owned_instants(timings)
    wait_end = wait_end_ns(timings, wait_ns)
    late_ns, queued_ns = delays(timings)
    late_from = np.clip(timings.end_ns - late_ns, wait_end, last)
    queued_from = np.clip(timings.end_ns - late_ns - queued_ns, wait_end, late_from)
    backward_end = np.append(rank.backward_end_ns, UNKNOWN)[timings.step]
    backward_end = np.where(backward_end == UNKNOWN, np.iinfo(np.int64).max, backward_end)
    tail_from = np.clip(backward_end, first, queued_from)
    starved_from = np.minimum(wait_end, tail_from)
    return {
        WAITING: Part(first, starved_from),
        STARVED: Part(starved_from, tail_from),
        TAIL: Part(tail_from, queued_from),
        QUEUED: Part(queued_from, late_from),
        LAUNCHED_LATE: Part(late_from, last),
    }


def wait_end_ns(timings: CollectiveTimings, wait_ns: Ints) -> Ints:
    """Until when each collective waits for peers, of the instants that belong to it."""
    first, last = owned_instants(timings)
    return np.clip(timings.start_ns + np.maximum(wait_ns, 0), first, last)


def owned_instants(timings: CollectiveTimings) -> tuple[Ints, Ints]:
    """Start and end of the instants that belong to each collective: from its start to that of any that ends later.

    Of collectives of a step that end together, the one launched last counts as the last.
    """
    if not len(timings):
        return timings.start_ns, timings.end_ns
    order = np.lexsort((np.arange(len(timings)), timings.end_ns, timings.step))
    # Steps laid end to end on one axis cannot reach into each other, so one pass serves all of them.
    origin = int(timings.start_ns.min())
    shift = ((timings.step + 1) * (int(timings.end_ns.max()) - origin + 1) - origin)[order]
    start, end = timings.start_ns[order] + shift, timings.end_ns[order] + shift
    starts_of_later = np.minimum.accumulate(np.append(start[1:], np.iinfo(np.int64).max)[::-1])[::-1]
    owned_end = np.empty_like(end)
    owned_end[order] = np.maximum(start, np.minimum(end, starts_of_later)) - shift
    return timings.start_ns, owned_end


def delays(timings: CollectiveTimings) -> tuple[Ints, Ints]:
    """By how much the host launched each collective too late, and for how long it then queued on its stream."""
    launched = np.where(timings.launch_ns == UNKNOWN, timings.start_ns, timings.launch_ns)
    ready = np.where(timings.ready_ns == UNKNOWN, launched, timings.ready_ns)
    late = np.maximum(0, np.minimum(launched, timings.start_ns) - ready)
    queued = np.zeros(len(timings), np.int64)
    for lane in np.unique(timings.lane[timings.lane != UNKNOWN]):
        mine = timings.lane == lane
        busy = union(timings.start_ns[mine], timings.end_ns[mine])
        start = timings.start_ns[mine]
        queued[mine] = busy.covered_ns(np.minimum(np.maximum(launched, ready)[mine], start), start)
    return late, queued
