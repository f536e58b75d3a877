"""What a step would be shorter without the lag of its late rank: collective by collective, instant by instant."""

from __future__ import annotations

from ddp_prof.trace import Category
from tests.oracle.exposure import BACK_TO_BACK, input_end, ready_at
from tests.oracle.ranks import Event, Rank
from tests.oracle.several_ranks import Row


def cost_of_lag(ranks: list[Rank], rows: list[Row], late: int | None, offset: dict[str, int]) -> int:
    """What another rank would gain at most in a step, of whose collectives ``rows`` hold each rank's part.

    Without the late rank a collective begins when the last of the others arrives, and ends as much earlier. One that
    queued behind another arrives as much earlier as that ends, but not before it was due. So does one that waited for
    another stream's, on the late rank, too.
    """
    if late is None or not rows:
        return 0

    def arrival(index: int, e: Event) -> int:
        return e.start + offset[ranks[index].file]

    own = [{id(row[index]) for row in rows} for index in range(len(ranks))]
    begins: dict[int, int] = {}  # by how much each part begins, and ends, earlier
    ends: dict[int, int] = {}
    of_late = set()  # what the late rank alone takes part in
    for row in sorted(rows, key=lambda row: max(arrival(i, e) for i, e in enumerate(row) if e is not None)):
        parts = [(i, e) for i, e in enumerate(row) if e is not None]
        inputs = {i: _input(ranks[i], e, own[i]) for i, e in parts}
        distance = max(0 if e is None else _place(ranks[i], row[i]) - _place(ranks[i], e) for i, e in inputs.items())
        for index, e in parts:
            before, queued = _queue(ranks[index], e)
            if before is not None:
                queued = min(queued, _after_input(ranks[index], e, distance) if id(before) in own[index] else queued)
            elif inputs[index] is not None:
                before, queued = inputs[index], e.start - _due(ranks[index], e)
            begins[id(e)] = min(ends.get(id(before), 0), queued)
        others = [
            arrival(index, e) - begins[id(e)]
            for index, e in parts
            if index != late or (inputs[index] is not None and id(inputs[index]) not in of_late)
        ]
        gained = max(0, max(arrival(index, e) for index, e in parts) - max(others)) if others else 0
        of_late |= set() if others else {id(e) for _, e in parts}
        for index, e in parts:  # none gets shorter than the shortest of them was
            ends[id(e)] = gained if index == late else min(gained, begins[id(e)] + (e.wait or 0))
    return max(_gone(ranks[i], [row[i] for row in rows], begins, ends) for i in range(len(ranks)) if i != late)


def _due(rank: Rank, collective: Event) -> int:
    """When it could have begun, had no other collective run."""
    first = min(e.start for e in rank.collectives())
    times = (collective.launch, ready_at(rank, collective), input_end(rank, collective), first)
    return max(time for time in times if time is not None)


def _place(rank: Rank, collective: Event | None) -> int:
    return next(place for place, e in enumerate(rank.collectives()) if e is collective)


def _queue(rank: Rank, collective: Event) -> tuple[Event | None, int]:
    """The collective behind which it queued on its stream, and for how long at most."""
    if collective.stream is None:
        return None, 0
    own = sorted((e for e in rank.collectives() if e.stream == collective.stream), key=lambda e: e.start)
    place = next(place for place, e in enumerate(own) if e is collective)
    if not place:
        return None, 0
    before, due = own[place - 1], _due(rank, collective)
    if abs(collective.start - before.end) > BACK_TO_BACK or due > before.end:
        return None, 0
    return before, max(0, collective.start - due)


def _input(rank: Rank, collective: Event, of_step: set[int]) -> Event | None:
    """The collective of another stream whose end it waited for, if it did not queue: the last that ended before it."""
    ended = [(e.end, place) for place, e in enumerate(rank.collectives()) if e.end <= collective.start]
    if collective.stream is None or not ended or _queue(rank, collective)[0] is not None:
        return None
    last = rank.collectives()[max(ended)[1]]
    is_soon = collective.start - last.end <= BACK_TO_BACK and _due(rank, collective) <= last.end
    return last if is_soon and last.stream != collective.stream and id(last) in of_step else None


def _after_input(rank: Rank, collective: Event, distance: int) -> int:
    """How long after the end of its input it began: the collective that is as many places before as on another rank."""
    place = _place(rank, collective) - distance
    found = rank.collectives()[place] if distance and place >= 0 else None
    if found is None or found.stream == collective.stream or found.end > collective.start:
        return collective.start
    return collective.start - found.end


def _gone(rank: Rank, matched: Row, begins: dict[int, int], ends: dict[int, int]) -> int:
    """How much less of the step's communication is beside no compute, at most what is exposed of it."""
    steps = [e.step for e in matched if e is not None]
    own = [e for e in rank.collectives() if any(e.step is step for step in steps)]
    compute = rank.instants(Category.COMPUTE)
    now = {t for e in own for t in range(e.start, e.end)} - compute
    moved = [(e.start - begins.get(id(e), 0), e.end - ends.get(id(e), 0)) for e in own]
    then = {t for start, end in moved for t in range(start, end)} - compute
    return min(max(0, len(now) - len(then)), sum(sum(e.exposed.values()) for e in own))
