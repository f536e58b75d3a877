"""Which collectives something waited for, and for how long: from recorded dependency edges alone.

An operation that needs a collective could begin at the latest of the end of the operation before it on its stream, the
start of its launch call, and the ends of everything else it waits for. From there to the end of the last collective
that it waits for, its stream *stands still for communication*::

    stream 20   ....CCCCCCCC...      the collective
    stream 7    kkkkkk......ccc      its consumer, a copy
    stands still      ^^^^^^

A collective that ended before had *slack*::

    stream 20   ..CCC..........
    stream 7    kkkkkkkkkkkkccc
    slack            ^^^^^^^

Where a collective runs on a stream that computes, its consumer is the next operation there that is no collective, and
the operation before that is the last one that is none either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.dependencies.edges import Dependencies
from ddp_prof.table import UNKNOWN, Ints, Mask, Table, select, take_or_unknown
from ddp_prof.trace import Category, Trace

HELD_BY = ("collective", "operation before", "launch", "other wait")
"""What a consumer waited for last."""

_LONG_AGO = -(2**62)


@dataclass(frozen=True)
class Consumers(Table):
    """For each collective that is needed: the consumer that it delayed most, or left the least time.

    Attributes:
        collective: Row in the trace's activities.
        consumer: Row of the operation that needs it, on a stream that computes.
        slack_ns: How much later the collective could have ended without delaying the consumer; where the consumer's
            stream stood still for it, how long it did, negative.
        held_by: Index into :data:`HELD_BY`.
    """

    collective: Ints
    consumer: Ints
    slack_ns: Ints
    held_by: Ints


@dataclass(frozen=True)
class Stretches(Table):
    """When a stream stood still for communication; disjoint, each part of the collective that ended last.

    Attributes:
        collective: Row in the trace's activities.
        consumer: Row of the operation that waited.
    """

    start_ns: Ints
    end_ns: Ints
    collective: Ints
    consumer: Ints


@dataclass(frozen=True)
class Blocking:
    """What the streams of one device waited for.

    Attributes:
        stretches: When they stood still.
        consumers: Who needed each collective.
        unknown: Rows of collectives of which a consumer is known, but not when it was launched.
        unneeded: Rows of collectives that nothing is known to need.
    """

    stretches: Stretches
    consumers: Consumers
    unknown: Ints
    unneeded: Ints


def find_blocking(trace: Trace, dependencies: Dependencies, is_mine: Mask) -> Blocking:
    """When the streams of a device that compute stood still for its collectives.

    Args:
        trace: The trace.
        dependencies: Its edges.
        is_mine: Which activities are the device's.
    """
    activities, edges, stream = trace.activities, dependencies.edges, dependencies.stream
    end_ns, is_collective = activities.end_ns, activities.category == Category.COMMUNICATION
    computes = np.zeros(int(stream.max(initial=0)) + 1, np.bool_)
    computes[stream[is_mine & (activities.category == Category.COMPUTE)]] = True
    rows = dependencies.in_order[is_mine[dependencies.in_order]]
    rows = rows[computes[stream[rows]]]

    # Of each operation the first one from it on that is no collective: it needs what the others of its stream wait for.
    is_needer = ~is_collective[rows]
    needers = rows[is_needer]
    at = np.cumsum(is_needer) - is_needer
    needer = np.full(len(activities), UNKNOWN, np.int64)
    has_one = at < len(needers)
    has_one[has_one] = stream[needers[at[has_one]]] == stream[rows[has_one]]
    needer[rows[has_one]] = at[has_one]

    before_ns = np.full(len(needers), _LONG_AGO)
    follows = stream[needers[1:]] == stream[needers[:-1]]
    before_ns[1:][follows] = end_ns[needers[:-1][follows]]
    call = trace.launching_calls[needers]
    launch_ns = np.where(call == UNKNOWN, _LONG_AGO, take_or_unknown(trace.calls.start_ns, call))

    own = rows[has_one & ~is_needer]
    asked = np.concatenate([needer[edges.consumer], needer[own]])
    needed = np.concatenate([edges.producer, own])
    asked, needed = asked[asked != UNKNOWN], needed[asked != UNKNOWN]
    collective = is_collective[needed]
    other_ns = np.full(len(needers), _LONG_AGO)
    np.maximum.at(other_ns, asked[~collective], end_ns[needed[~collective]])
    asked, needed = asked[collective], needed[collective]
    last_ns = np.full(len(needers), _LONG_AGO)
    np.maximum.at(last_ns, asked, end_ns[needed])

    reasons_ns = np.stack([last_ns, before_ns, launch_ns, other_ns])
    could_ns = reasons_ns[1:].max(axis=0)
    is_last = end_ns[needed] == last_ns[asked]
    slack_ns = np.where(is_last, could_ns[asked], np.maximum(could_ns, last_ns)[asked]) - end_ns[needed]
    # What holds a consumer is what ended last; of several that end together the collective is not it.
    held_by = np.where(last_ns > could_ns, 0, 1 + reasons_ns[1:].argmax(axis=0))
    is_known = call[asked] != UNKNOWN
    found = Consumers(needed, needers[asked], slack_ns, held_by[asked])
    found = select(found, np.lexsort((found.consumer, slack_ns, needed)))
    closest = np.append(True, found.collective[1:] != found.collective[:-1]) if len(found) else np.empty(0, np.bool_)

    blocks = is_last & (last_ns > could_ns)[asked] & is_known
    mine = np.flatnonzero(is_mine & is_collective)
    return Blocking(
        stretches=_disjoint(
            Stretches(could_ns[asked[blocks]], last_ns[asked[blocks]], needed[blocks], needers[asked[blocks]])
        ),
        consumers=select(found, closest),
        unknown=np.unique(needed[~is_known]),
        unneeded=np.setdiff1d(mine, needed),
    )


def _disjoint(stretches: Stretches) -> Stretches:
    """Each instant to the stretch that ends last; of those that end together to the one that begins first.

    Taken from the last end backwards, what earlier ones cover goes from the earliest start so far on, up to that end.
    """
    found = select(stretches, np.lexsort((stretches.collective, stretches.start_ns, -stretches.end_ns)))
    covered_from = np.minimum.accumulate(found.start_ns)
    end = found.end_ns.copy()
    end[1:] = np.minimum(found.end_ns[1:], covered_from[:-1])
    found = Stretches(found.start_ns, end, found.collective, found.consumer)
    found = select(found, found.end_ns > found.start_ns)
    return select(found, np.argsort(found.start_ns, kind="stable"))
