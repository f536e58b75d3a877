"""How much time the other ranks would gain in a step if some were not late, queues behind their delay included.

A rank *arrives* at a collective when its own part of it begins. In the simulated step, a collective ends on each rank
as long after the last arrival as it did. Without the lag of the late rank, another rank is the last to arrive. A
collective that queued behind another one then arrives earlier, too, but not before it was launched and its input was
there. A and B are two collectives on one stream::

    late rank      .......AAAAABBBB      rank 0 arrives 4 earlier, and B queues behind A:
    rank 0         ...AAAAAAAAABBBB      without the lag the step ends 4 earlier
    without lag    ...AAAAABBBB

A collective gets on no rank shorter than it was on the rank where it was shortest: a rank that did not wait gains
nothing.

The gain of a rank is the exposed time that disappears or, where a stream stands still beside compute of another stream,
the standstill that disappears. A lag that is the same at each collective costs at most that lag. A lag that grows costs
as much as the rank would be late at the last collective, if the other ranks had not queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.collectives.timing import BACK_TO_BACK_NS, CollectiveTimings, RankCollectives
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.intervals import union_by_group
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, Mask, count_before, take_or_unknown


@dataclass(frozen=True)
class Queue:
    """Behind which collective each collective of a rank queued; one element per row of its timings.

    Attributes:
        before: Row of the collective before it on its stream, for which it waited; ``UNKNOWN`` if it did not queue.
        queued_ns: How much earlier it could have started at most, if all before it on its stream had ended.
    """

    before: Ints
    queued_ns: Ints


def find_queue(timings: CollectiveTimings) -> Queue:
    """Return behind which collective each one queued.

    A collective queued if it was launched and had its input before the end of the collective before it on its stream,
    and started right after that end. Where it is not known when it was launched, it may have been in time.
    """
    before, queued_ns = np.full(len(timings), UNKNOWN, np.int64), np.zeros(len(timings), np.int64)
    # An unknown time is the least; without a lag, too, no collective begins before the first one of the capture.
    first = np.full(len(timings), timings.start_ns.min(initial=-NO_TIME))
    due_ns = np.maximum.reduce((timings.launch_ns, timings.ready_ns, timings.input_ns, first))
    order = np.lexsort((timings.start_ns, timings.lane))
    follows = (timings.lane[order[1:]] == timings.lane[order[:-1]]) & (timings.lane[order[1:]] != UNKNOWN)
    later, earlier = order[1:][follows], order[:-1][follows]
    gap_ns = timings.start_ns[later] - timings.end_ns[earlier]
    is_queue = (gap_ns <= BACK_TO_BACK_NS) & (due_ns[later] <= timings.end_ns[earlier])
    later, earlier = later[is_queue], earlier[is_queue]
    before[later] = earlier
    queued_ns[later] = np.maximum(0, timings.start_ns[later] - due_ns[later])
    return Queue(before, queued_ns)


def measure_lateness(
    ranks: Sequence[RankCollectives], matches: Ints, starts_ns: Ints, step: Ints, late: Mask, exposed_ns: Sequence[Ints]
) -> Ints:
    """Return what each rank (column) would gain in each step (row) if the step's late ranks were not late, in ns.

    Args:
        ranks: The ranks of the run.
        matches: Rows of the ranks' collectives, ``UNKNOWN`` where a rank takes no part; shape (matches, ranks).
        starts_ns: When each rank arrives, on a common clock; the same shape.
        step: Number of the step of each match, from 0; ``UNKNOWN`` for a match that does not count.
        late: For each step (row) and rank (column), whether the rank is late.
        exposed_ns: For each rank, the exposed time of each of its collectives.
    """
    chosen = np.flatnonzero((step != UNKNOWN) & np.append(late.any(axis=1), False)[step])
    gains = np.zeros((len(late), len(ranks)), np.int64)
    if not len(chosen):
        return gains
    # In each step, take the collectives in the order of their last arrival: `turn` is the position, from 0.
    never = np.iinfo(np.int64).min
    taking = np.where(matches != UNKNOWN, starts_ns, never)
    arrival_ns = taking.max(axis=1)
    chosen = chosen[np.lexsort((arrival_ns[chosen], step[chosen]))]
    turn = count_before(step[chosen])
    steps = [_step_of_each(rank, matches[chosen, index], step[chosen]) for index, rank in enumerate(ranks)]
    queues = [_within_steps(find_queue(rank.timings), of_each) for rank, of_each in zip(ranks, steps, strict=True)]
    waits_ns = _waits(ranks, matches)
    # How much earlier each collective of each rank starts and ends without the lag; filled turn by turn.
    start_shift_ns, end_shift_ns = ([np.zeros(len(rank.timings), np.int64) for rank in ranks] for _ in range(2))
    # The n-th collective of all steps at once: the collectives behind which it may have queued have had their turn.
    for of_turn in np.split(chosen[np.argsort(turn, kind="stable")], np.cumsum(np.bincount(turn))[:-1]):
        earlier_ns = np.full((len(of_turn), len(ranks)), never)
        # Each rank starts as much earlier as the collective before it ended earlier, but at most the time it queued.
        # `earlier_ns` are the new arrivals of all ranks but the late ones.
        for index, queue in enumerate(queues):
            row = matches[of_turn, index]
            here = row != UNKNOWN
            shift = np.minimum(
                take_or_unknown(end_shift_ns[index], take_or_unknown(queue.before, row), 0),
                take_or_unknown(queue.queued_ns, row, 0),
            )
            start_shift_ns[index][row[here]] = shift[here]
            counts = here & ~late[step[of_turn], index]
            earlier_ns[counts, index] = starts_ns[of_turn[counts], index] - shift[counts]
        # The collective ends as much earlier as the last arrival is earlier, limited by what each rank waited.
        last_ns = earlier_ns.max(axis=1)
        gained_ns = np.where(last_ns == never, 0, np.maximum(0, arrival_ns[of_turn] - last_ns))
        for index in range(len(ranks)):
            row = matches[of_turn, index]
            here = row != UNKNOWN
            is_late = late[step[of_turn], index]  # a late rank itself arrives, and so ends, that much earlier
            most_ns = take_or_unknown(start_shift_ns[index], row, 0) + waits_ns[of_turn, index]
            end_shift_ns[index][row[here]] = np.where(is_late, gained_ns, np.minimum(gained_ns, most_ns))[here]
    for index, rank in enumerate(ranks):
        shifts = start_shift_ns[index], end_shift_ns[index]
        gains[:, index] = _gain_of_rank(rank, queues[index], steps[index], shifts, exposed_ns[index], len(late))
    gains[late] = 0
    return gains


def _step_of_each(rank: RankCollectives, rows: Ints, step: Ints) -> Ints:
    """Return the step of each collective of a rank; ``UNKNOWN`` for collectives that are not in ``rows``.

    ``step`` is the step of each of ``rows``, which may hold ``UNKNOWN``.
    """
    found = np.full(len(rank.timings), UNKNOWN, np.int64)
    found[rows[rows != UNKNOWN]] = step[rows != UNKNOWN]
    return found


def _within_steps(queue: Queue, step: Ints) -> Queue:
    """Return the queue with ``before`` set to ``UNKNOWN`` where the collective ahead belongs to another step.

    ``before`` is the row of the collective that each one queues behind. The rank that is late in a step cannot have
    delayed a collective of another step. ``step`` is the step of each collective.
    """
    is_within = take_or_unknown(step, queue.before) == step
    return replace(queue, before=np.where(is_within, queue.before, UNKNOWN))


def _waits(ranks: Sequence[RankCollectives], matches: Ints) -> Ints:
    """Return by how much each part of a match is longer than the match's shortest part; 0 where a rank has no part.

    The shape is that of ``matches``.
    """
    longest = np.iinfo(np.int64).max
    lengths = [
        take_or_unknown(rank.timings.end_ns - rank.timings.start_ns, matches[:, index], longest)
        for index, rank in enumerate(ranks)
    ]
    length_ns = np.stack(lengths, axis=1)
    shortest = length_ns.min(axis=1, keepdims=True)
    waits: Ints = np.where(matches == UNKNOWN, 0, length_ns - shortest)
    return waits


def _gain_of_rank(
    rank: RankCollectives, queue: Queue, step_of: Ints, shifts_ns: tuple[Ints, Ints], exposed_ns: Ints, steps: int
) -> Ints:
    """Return what a rank gains in each step if its collectives start and end earlier.

    That is the larger one of two gains: exposed time that disappears, and standstill that disappears.

    - ``queue``: Behind which collective each one queued.
    - ``step_of``: The step of each of its collectives; ``UNKNOWN`` for those without a match.
    - ``shifts_ns``: How much earlier each collective starts, and how much earlier it ends.
    - ``exposed_ns``: The exposed time of each collective.
    - ``steps``: Number of steps.
    """
    timings = rank.timings
    key = np.full(len(rank.step_keys) + 1, UNKNOWN, np.int64)  # the last element is for UNKNOWN
    known = step_of != UNKNOWN
    key[timings.step[known]] = step_of[known]
    step = key[timings.step]  # the step of all collectives in these steps, also of those without a match
    rows = np.flatnonzero(step != UNKNOWN)

    def bare_ns(start_shift_ns: Ints, end_shift_ns: Ints) -> Ints:
        """Return the exposed communication of each step if its collectives start and end so much earlier."""
        start_ns = timings.start_ns[rows] - start_shift_ns
        start_ns, end_ns, group = union_by_group(
            start_ns, np.maximum(start_ns, timings.end_ns[rows] - end_shift_ns), step[rows]
        )
        return sum_by_group(end_ns - start_ns - rank.compute.covered_ns(start_ns, end_ns), group, steps)

    start_shift_ns, end_shift_ns = (shift_ns[rows] for shift_ns in shifts_ns)
    gone_ns = bare_ns(np.zeros_like(rows), np.zeros_like(rows)) - bare_ns(start_shift_ns, end_shift_ns)
    gone_ns = np.clip(gone_ns, 0, sum_by_group(exposed_ns[rows], step[rows], steps))
    found: Ints = np.maximum(gone_ns, _standstill_gone(timings, queue, rows, step[rows], end_shift_ns, steps))
    return found


def _standstill_gone(
    timings: CollectiveTimings, queue: Queue, rows: Ints, step: Ints, end_shift_ns: Ints, steps: int
) -> Ints:
    """Return how much earlier the last consumer of each step begins if the collectives in ``rows`` end earlier.

    A consumer begins as much earlier as its collective ends, and as the consumer before it begins and the standstill
    between both allows. So one lag counts once, though the stream stood still for several collectives of a queue::

        stream 20    AAAAAAAAABBBBCCCC        A, B and C end 3 earlier
        stream 7     kkk......a...b...c       a, b, c copy gradients out of them; the stream stood still for 6 + 3 + 3
        without lag  kkk...a...b...c          c begins 3 earlier, not 9

    A collective that began because of what ran after an earlier standstill begins, and so ends, earlier with it.

    - ``step``: The step of each of ``rows``, from 0 to ``steps``.
    - ``end_shift_ns``: How much earlier each of them ends.

    Gloo's threads are no streams, so it is not known what queued there: each standstill is shorter by itself.
    """
    blocking_ns, end_ns = np.maximum(0, timings.blocking_ns[rows]), timings.end_ns[rows]
    if (timings.lane[rows] == UNKNOWN).any():
        return sum_by_group(np.minimum(blocking_ns, end_shift_ns), step, steps)
    # What held a collective up: its input or launch if it queued, else whatever ended right before its start.
    due_ns = np.where(queue.before == UNKNOWN, timings.start_ns, timings.start_ns - queue.queued_ns)[rows]
    gained_ns = np.zeros(steps, np.int64)
    blocks = np.flatnonzero(blocking_ns > 0)
    blocks = blocks[np.lexsort((end_ns[blocks], step[blocks]))]
    turn = count_before(step[blocks])
    # After each turn: the ends of standstills of each step so far, and how much earlier their consumers begin.
    turns = int(turn.max(initial=-1)) + 1
    ends_ns, begin_earlier_ns = np.full((steps, turns), NO_TIME), np.zeros((steps, turns), np.int64)
    for number in range(turns):
        here = blocks[turn == number]
        of = step[here]
        before = (ends_ns[of, :number] <= due_ns[here, None]).sum(axis=1) - 1
        inherited_ns = np.where(before < 0, 0, begin_earlier_ns[of, before])
        gained_ns[of] = np.minimum(end_shift_ns[here] + inherited_ns, gained_ns[of] + blocking_ns[here])
        ends_ns[of, number], begin_earlier_ns[of, number] = end_ns[here], gained_ns[of]
    return gained_ns
