"""When and why each instant of communication is exposed."""

from __future__ import annotations

from collections import Counter

from ddp_prof.trace import Category
from tests.oracle.ranks import LONG_AGO, Event, Rank, united
from tests.oracle.several_ranks import match

BLOCKING_CALL, PEER_WAIT, LAUNCHED_LATE, QUEUED, LATE_INPUT, TRANSFER = (
    "blocking_call", "peer_wait", "launched_late", "queued", "late_input", "transfer",
)  # fmt: skip
BACK_TO_BACK = 2
"""Instants that a stream may stand idle within a queue."""


def ready_at(rank: Rank, collective: Event) -> int | None:
    """The end of the last compute of backward that the same thread launched before, if that is of the same step.

    Not of what forward or the optimizer launched, nor of what one call launched together with compute of backward, nor
    of what began before that end.
    """
    if collective.stream is None:
        return collective.launch
    if collective.step is None or collective.launch is None or collective.operation in ("peer_copy", "all_gather"):
        return None
    follows = collective.phase is None and is_after_backward(rank, collective)
    if collective.phase not in ("backward", "synchronize") and not follows:
        return None
    gradients = [e for e in rank.backward() if e.thread == collective.thread] or rank.backward()
    before = [e for e in gradients if _or(e.launch, LONG_AGO) <= collective.launch]
    last = max(
        enumerate(before), key=lambda found: (_or(found[1].launch, LONG_AGO), found[1].end, found[0]), default=None
    )
    if last is None or last[1].step is not collective.step or last[1].launch == collective.launch:
        return None
    return last[1].end if last[1].end <= collective.start else None


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def compute_stream(rank: Rank) -> int | None:
    busy: Counter[int] = Counter()
    for e in rank.select_category(Category.COMPUTE):
        if e.stream is not None and e.end > e.start:
            busy[e.stream] += e.end - e.start
    return min((stream for stream in busy if busy[stream] == max(busy.values()) > 0), default=None)


def is_after_backward(rank: Rank, collective: Event) -> bool:
    """Whether launched after all compute of its pass of backward; without steps, of all backward."""
    own = rank.pass_of(collective)
    compute = own.compute if own else [] if rank.has_steps or not collective.step else rank.backward(collective.step)
    launches = [e.launch for e in compute if e.launch is not None]
    if not launches or collective.launch is None:
        return False
    return collective.phase != "backward" and collective.launch > max(launches)


def is_blocking(rank: Rank, collective: Event) -> bool:
    """Launched in ``synchronize``; or after all of backward; or on the stream of compute."""
    on_stream = collective.stream is not None and collective.stream == compute_stream(rank)
    in_wait = collective.phase == "synchronize" and collective.launch is not None
    return in_wait or is_after_backward(rank, collective) or on_stream


def explain(ranks: list[Rank], apart: int = 1_000_000) -> None:
    """Note on each collective what of it is overlapped, exposed when and why, and waited."""
    match(ranks, apart)
    for rank in ranks:
        compute = rank.instants(Category.COMPUTE)
        every = rank.collectives()
        for step in [None, *rank.steps]:
            own = [e for e in every if e.step is step]
            for time in sorted(united([part for e in own for part in e.parts])):
                in_flight = [(e.end, place) for place, e in enumerate(own) if e.start <= time < e.end]
                owner = own[max(in_flight)[1]]
                if time in compute:
                    owner.overlapped += 1
                else:
                    _note(rank, owner, time, every)


def _note(rank: Rank, owner: Event, time: int, every: list[Event]) -> None:
    when = when_of(rank, owner, time)
    waits = time < owner.start + _or(owner.wait, 0)
    owner.exposed[when, why_of(rank, owner, time, every)] += 1
    owner.exposed_wait += waits
    rank.at.setdefault(time, []).append((waits, when == "tail"))


def why_of(rank: Rank, owner: Event, time: int, every: list[Event]) -> str:
    """The first reason that holds; without times of launches, whether a peer had arrived."""
    if rank.clocks_disagree:
        return PEER_WAIT if time < owner.start + _or(owner.wait, 0) else "unknown"
    if is_blocking(rank, owner):
        return BLOCKING_CALL
    if time < owner.start + _or(owner.wait, 0):
        return PEER_WAIT
    launched = _or(owner.launch, owner.start)
    ready = _or(ready_at(rank, owner), launched)
    late = max(0, min(launched, owner.start) - ready)
    if time >= owner.end - late:
        return LAUNCHED_LATE
    asked = min(max(launched, ready), owner.start)
    queued, either, waited = delays(rank, owner, asked, every)
    if time >= owner.end - late - queued:
        return QUEUED
    if time >= owner.end - late - queued - either:
        return "unknown"
    return LATE_INPUT if time >= owner.end - late - queued - either - waited else TRANSFER


def delays(rank: Rank, owner: Event, asked: int, every: list[Event]) -> tuple[int, int, int]:
    """For how long it stood in the queue of its stream since it was asked for, and for how long it waited for input.

    Between them stands for how long it did one or the other: until other work of its CUDA graph had ended.
    """
    if owner.stream is None:
        return 0, 0, 0
    busy = {t for e in every if e.stream == owner.stream for t in e.instants if t < owner.start}
    free_from = max(busy, default=LONG_AGO) + 1
    fed_at = input_end(rank, owner)
    if fed_at is not None and fed_at > free_from:
        return 0, 0, max(0, fed_at - max(asked, free_from))
    of_graph = [
        e.end
        for e in rank.events
        if e.launched_by == owner.launched_by is not None and e.category != Category.COMMUNICATION
    ]
    fed_by_graph = max((end for end in of_graph if end <= owner.start), default=LONG_AGO)
    queue, either, idle, time = 0, 0, 0, owner.start - 1
    while time >= asked and idle <= BACK_TO_BACK:
        idle = 0 if time in busy else idle + 1
        queue += time in busy and time >= fed_by_graph
        either += time in busy and time < fed_by_graph
        time -= 1
    return queue, either, 0


def input_end(rank: Rank, collective: Event) -> int | None:
    """The end of what the same thread launched last before it, in the same step, if that was done when it started."""
    if collective.launch is None or collective.step is None:
        return None
    work = [e for e in rank.events if e.category != Category.COMMUNICATION and e.stream is not None]
    before = [
        e for e in work if e.thread == collective.thread and _or(e.launch, collective.launch + 1) <= collective.launch
    ]
    last = max(before, key=lambda e: (e.launch, e.end), default=None)
    if last is None or last.launch == collective.launch or last.step is not collective.step:
        return None
    return last.end if last.end <= collective.start else None


def _goes_on(optimizer: Event, others: list[Event]) -> bool:
    """Whether the next compute of another phase is backward's."""
    first = min((e.start for e in others if e.start >= optimizer.start), default=None)
    return any(e.start == first and e.phase == "backward" for e in others)


def when_of(rank: Rank, owner: Event, time: int) -> str:
    """By the compute that starts last before the instant and the one that starts next, in the collective's step."""
    if owner.step is None:
        return "outside" if owner.launch is not None and owner.phase is None else "unknown"
    own = rank.pass_of(owner)
    if own is not None and own.end is not None and time >= own.end:
        return "tail"
    compute = [e for e in rank.select_category(Category.COMPUTE, owner.step) if e.phase != "synchronize"]
    if any(e.phase == "forward" for e in compute):
        compute = [e for e in compute if e.phase is not None]
    # An optimizer that steps on a bucket while backward goes on is within backward.
    compute.sort(key=lambda e: e.start)
    own = [e for e in compute if e.phase != "optimizer"]
    compute = [e for e in compute if e in own or not _goes_on(e, own)]
    before = [e.phase for e in compute if e.start <= time]
    after = [e.phase for e in compute if e.start > time]
    phase_before, phase_after = before[-1] if before else None, after[0] if after else None
    if phase_before is None and phase_after is None:
        return "unknown"
    if phase_after in ("forward", "backward", "optimizer") and phase_after in (phase_before, owner.phase):
        return phase_after
    return "outside"
