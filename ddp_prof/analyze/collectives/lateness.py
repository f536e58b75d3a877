"""How much time the other ranks would gain in a step if some were not late, queues behind their delay included.

A rank *arrives* at a collective when its own part of it begins. In the simulated step, a collective ends on each rank
as long after the last arrival as it did. Without the lag of the late rank, another rank is the last to arrive. A
collective that queued behind another one then arrives earlier, too, but not before it was launched and its input was
there. A and B are two collectives on one stream::

    late rank      .......AAAAABBBB      rank 0 arrives 4 earlier, and B queues behind A:
    rank 0         ...AAAAAAAAABBBB      without the lag the step ends 4 earlier
    without lag    ...AAAAABBBB

So does one that waited for a collective of another stream, also on a late rank: the all-reduce between nodes waits for
the reduce-scatter within each.

A collective gets on no rank shorter than it was on the rank where it was shortest: a rank that did not wait gains
nothing.

The gain of a rank is the exposed time that disappears or, where a stream stands still beside compute of another stream,
the standstill that disappears. Where no waits of streams were recorded, standstill is inferred: compute that begins
right after the end of a collective waited for it. A lag that is the same at each collective costs at most that lag. A
lag that grows costs as much as the rank would be late at the last collective, if the other ranks had not queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.collectives.timing import CollectiveTimings, RankCollectives
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.intervals import union, union_by_group
from ddp_prof.table import NEVER, NO_TIME, UNKNOWN, Ints, Mask, count_before, take_or_unknown


@dataclass(frozen=True)
class Queue:
    """Behind which collective each collective of a rank queued; one element per row of its timings.

    Attributes:
        before: Row of the collective before it on its stream, for which it waited; ``UNKNOWN`` if it did not queue.
        queued_ns: How much earlier it could have started at most, if all before it on its stream, and the collective
            ``input``, had ended.
        input: Row of the collective of another stream whose result it waited for, as the all-reduce between nodes waits
            for the reduce-scatter within each; ``UNKNOWN`` if there is none.
    """

    before: Ints
    queued_ns: Ints
    input: Ints


def find_queue(timings: CollectiveTimings) -> Queue:
    """Return behind which collective each one queued, and which one of another stream it waited for.

    A collective queued if it was launched and had its input before the end of the collective before it on its stream,
    and started right after that end: one that began long before had not waited for it. Where it is not known when it
    was launched, it may have been in time. If it did not queue, it waited for a collective of another stream if it
    started right after the end of that one.
    """
    before, awaited = np.full((2, len(timings)), UNKNOWN, np.int64)
    queued_ns = np.zeros(len(timings), np.int64)
    # An unknown time is the least; without a lag, too, no collective begins before the first one of the capture.
    first = np.full(len(timings), timings.start_ns.min(initial=-NO_TIME))
    due_ns = np.maximum.reduce((timings.launch_ns, timings.ready_ns, timings.input_ns, first))
    order = np.lexsort((timings.start_ns, timings.lane))
    follows = (timings.lane[order[1:]] == timings.lane[order[:-1]]) & (timings.lane[order[1:]] != UNKNOWN)
    later, earlier = order[1:][follows], order[:-1][follows]
    gap_ns = timings.start_ns[later] - timings.end_ns[earlier]
    is_queue = (np.abs(gap_ns) <= BACK_TO_BACK_NS) & (due_ns[later] <= timings.end_ns[earlier])
    later, earlier = later[is_queue], earlier[is_queue]
    before[later] = earlier
    queued_ns[later] = np.maximum(0, timings.start_ns[later] - due_ns[later])
    # The collective of the rank that ended last before each start.
    by_end = np.argsort(timings.end_ns, kind="stable")
    latest = np.searchsorted(timings.end_ns[by_end], timings.start_ns, side="right") - 1
    ended = np.where(latest < 0, UNKNOWN, by_end[latest])
    ended_ns = take_or_unknown(timings.end_ns, ended, NO_TIME)
    is_input = (
        (ended != UNKNOWN) & (before == UNKNOWN) & (timings.lane != UNKNOWN)
        & (take_or_unknown(timings.lane, ended) != timings.lane)
        & (timings.start_ns - ended_ns <= BACK_TO_BACK_NS) & (due_ns <= ended_ns)
    )  # fmt: skip
    awaited[is_input] = ended[is_input]
    queued_ns[is_input] = (timings.start_ns - due_ns)[is_input]
    return Queue(before, queued_ns, awaited)


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
    queues = _with_inputs_of_others(ranks, queues, matches[chosen])
    waits_ns = _waits(ranks, matches)
    # How much earlier each collective of each rank starts and ends without the lag; filled turn by turn.
    start_shift_ns, end_shift_ns = ([np.zeros(len(rank.timings), np.int64) for rank in ranks] for _ in range(2))
    # Collectives of late ranks alone, of which it is not known how much earlier they would end.
    is_of_late = [np.zeros(len(rank.timings) + 1, np.bool_) for rank in ranks]  # the last element is for UNKNOWN
    # The n-th collective of all steps at once: the collectives behind which it may have queued have had their turn.
    for of_turn in np.split(chosen[np.argsort(turn, kind="stable")], np.cumsum(np.bincount(turn))[:-1]):
        earlier_ns = np.full((len(of_turn), len(ranks)), never)
        # Each rank starts as much earlier as what held it up ended earlier, but at most the time for which it did so.
        # `earlier_ns` are the new arrivals of all ranks but the late ones.
        for index, queue in enumerate(queues):
            row = matches[of_turn, index]
            here = row != UNKNOWN
            awaited = take_or_unknown(queue.input, row)
            held_by = np.where(awaited == UNKNOWN, take_or_unknown(queue.before, row), awaited)
            shift = np.minimum(
                take_or_unknown(end_shift_ns[index], held_by, 0), take_or_unknown(queue.queued_ns, row, 0)
            )
            start_shift_ns[index][row[here]] = shift[here]
            # A late rank is not the last one now; but what waits for a collective with others is no earlier than that.
            waits_for_others = (awaited != UNKNOWN) & ~is_of_late[index][awaited]
            counts = here & (~late[step[of_turn], index] | waits_for_others)
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
            is_of_late[index][row[here]] = (last_ns == never)[here]
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

    def within(rows: Ints) -> Ints:
        return np.where(take_or_unknown(step, rows) == step, rows, UNKNOWN)

    return replace(queue, before=within(queue.before), input=within(queue.input))


def _with_inputs_of_others(ranks: Sequence[RankCollectives], queues: Sequence[Queue], matches: Ints) -> list[Queue]:
    """Return the queues of all ranks, in which none is left before the input is there that the same one had elsewhere.

    Where a collective queued, nothing tells whether it also waited for one of another stream. But where it did not
    queue, on another rank, its input is known, and each rank launches its collectives in the same order.
    ``matches`` are rows of the ranks' collectives, as in :func:`measure_lateness`.
    """
    inputs = np.stack(
        [take_or_unknown(queue.input, of_rank) for queue, of_rank in zip(queues, matches.T, strict=True)], axis=1
    )
    launched_before = np.where(inputs == UNKNOWN, 0, matches - inputs).max(axis=1)  # by how many collectives
    found = []
    for index, (rank, queue) in enumerate(zip(ranks, queues, strict=True)):
        timings, row = rank.timings, matches[:, index]
        has_queued = (row != UNKNOWN) & (take_or_unknown(queue.before, row) != UNKNOWN) & (launched_before > 0)
        row, awaited = row[has_queued], row[has_queued] - launched_before[has_queued]
        is_input = (awaited >= 0) & (timings.lane[awaited] != timings.lane[row])
        is_input &= timings.end_ns[awaited] <= timings.start_ns[row]
        row, awaited = row[is_input], awaited[is_input]
        queued_ns = queue.queued_ns.copy()
        queued_ns[row] = np.minimum(queued_ns[row], timings.start_ns[row] - timings.end_ns[awaited])
        found.append(replace(queue, queued_ns=queued_ns))
    return found


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
    stood_ns = np.where(timings.blocking_ns == UNKNOWN, _inferred_standstill(rank), timings.blocking_ns)[rows]
    found: Ints = np.maximum(gone_ns, _standstill_gone(timings, queue, rows, step[rows], stood_ns, end_shift_ns, steps))
    return found


def _inferred_standstill(rank: RankCollectives) -> Ints:
    """Return for each collective how long compute stood still for it, where no wait of a stream was recorded.

    Compute that begins right after the end of a collective, when nothing else ran, waited for it, as that of a layer
    waits for its parameters. It stood still since the compute before it, or since the collectives began among which
    this one is. Where several collectives end in one pause, compute waited for the last one::

        stream 20    ...AAAAAAAABBB       compute stood still for A alone: B ran beside it
        stream 7     kk.........kkkkk
    """
    timings, compute = rank.timings, rank.compute
    stood_ns = np.zeros(len(timings), np.int64)
    if not len(compute) or not len(timings):
        return stood_ns
    busy = union(timings.start_ns, timings.end_ns + BACK_TO_BACK_NS)
    order = np.argsort(timings.end_ns, kind="stable")
    end_ns = timings.end_ns[order]
    # The first compute that begins at the end of each collective or after it, and the last collective before it.
    follower = np.searchsorted(compute.start_ns, end_ns)
    is_last = np.append(follower[1:] != follower[:-1], True)
    begins_ns = np.append(compute.start_ns, NEVER)[follower]
    since_ns = np.maximum(
        np.append(compute.end_ns, NO_TIME)[follower - 1],  # NO_TIME before the first compute
        busy.start_ns[np.searchsorted(busy.start_ns, end_ns, side="right") - 1],
    )
    waited = is_last & (begins_ns - end_ns <= BACK_TO_BACK_NS) & (since_ns < end_ns)
    stood_ns[order[waited]] = (end_ns - since_ns)[waited]
    return stood_ns


def _standstill_gone(
    timings: CollectiveTimings, queue: Queue, rows: Ints, step: Ints, stood_ns: Ints, end_shift_ns: Ints, steps: int
) -> Ints:
    """Return how much earlier the last consumer of each step begins if the collectives in ``rows`` end earlier.

    A consumer begins as much earlier as its collective ends, and as the consumer before it begins and the standstill
    between both allows. So one lag counts once, though the stream stood still for several collectives of a queue::

        stream 20    AAAAAAAAABBBBCCCC        A, B and C end 3 earlier
        stream 7     kkk......a...b...c       a, b, c copy gradients out of them; the stream stood still for 6 + 3 + 3
        without lag  kkk...a...b...c          c begins 3 earlier, not 9

    A collective that began because of what ran after an earlier standstill begins, and so ends, earlier with it.

    - ``step``: The step of each of ``rows``, from 0 to ``steps``.
    - ``stood_ns``: How long a stream stood still for each of them; not positive where none did.
    - ``end_shift_ns``: How much earlier each of them ends.

    Gloo's threads are no streams, so it is not known what queued there: each standstill is shorter by itself.
    """
    stood_ns, end_ns = np.maximum(0, stood_ns), timings.end_ns[rows]
    if (timings.lane[rows] == UNKNOWN).any():
        return sum_by_group(np.minimum(stood_ns, end_shift_ns), step, steps)
    # What held a collective up: its input or launch if it queued, else whatever ended right before its start. If that
    # is a collective of another stream, its gain is in `end_shift_ns` already: it was held up when that one was.
    due_ns = np.where(queue.before == UNKNOWN, timings.start_ns, timings.start_ns - queue.queued_ns)
    due_ns = np.where(queue.input == UNKNOWN, due_ns, take_or_unknown(due_ns, queue.input))[rows]
    gained_ns = np.zeros(steps, np.int64)
    blocks = np.flatnonzero(stood_ns > 0)
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
        gained_ns[of] = np.minimum(end_shift_ns[here] + inherited_ns, gained_ns[of] + stood_ns[here])
        ends_ns[of, number], begin_earlier_ns[of, number] = end_ns[here], gained_ns[of]
    return gained_ns
