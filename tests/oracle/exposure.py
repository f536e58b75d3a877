"""When and why each instant of communication is exposed."""

from __future__ import annotations

from collections import Counter

from ddp_prof.trace import Category
from tests.oracle.ranks import Event, Rank, united
from tests.oracle.several_ranks import match

BLOCKING_CALL, PEER_WAIT, LAUNCHED_LATE, QUEUED, TRANSFER = (
    "blocking_call", "peer_wait", "launched_late", "queued", "transfer",
)  # fmt: skip


def ready_at(rank: Rank, collective: Event) -> int | None:
    """The end of the last compute of backward that the same thread launched before, if that is of the same step.

    Not of what forward or the optimizer launched, nor of what one call launched together with compute of backward, nor
    of what began before that end.
    """
    if collective.stream is None:
        return collective.launch
    if collective.step is None or collective.launch is None:
        return None
    follows = collective.phase is None and is_after_backward(rank, collective)
    if collective.phase not in ("backward", "synchronize") and not follows:
        return None
    gradients = [e for e in rank.backward() if e.thread == collective.thread] or rank.backward()
    before = [e for e in gradients if (-1 if e.launch is None else e.launch) <= collective.launch]
    last = max(enumerate(before), key=lambda found: (_or(found[1].launch, -1), found[0]), default=None)
    if last is None or last[1].step is not collective.step or _or(last[1].launch, -1) == collective.launch:
        return None
    return last[1].end if last[1].end <= collective.start else None


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def compute_stream(rank: Rank) -> int | None:
    busy: Counter[int] = Counter()
    for e in rank.of(Category.COMPUTE):
        if e.stream is not None and e.end > e.start:
            busy[e.stream] += e.end - e.start
    return min((stream for stream in busy if busy[stream] == max(busy.values()) > 0), default=None)


def is_after_backward(rank: Rank, collective: Event) -> bool:
    last = max((_or(e.launch, -1) for e in rank.backward(collective.step)), default=-1) if collective.step else -1
    return collective.phase != "backward" and last >= 0 and _or(collective.launch, -1) > last


def is_blocking(rank: Rank, collective: Event) -> bool:
    """Launched in ``synchronize``; or after all of backward; or on the stream of compute."""
    on_stream = collective.stream is not None and collective.stream == compute_stream(rank)
    return collective.phase == "synchronize" or is_after_backward(rank, collective) or on_stream


def explain(ranks: list[Rank]) -> None:
    """Note on each collective what of it is overlapped, exposed when and why, and waited."""
    match(ranks)
    for rank in ranks:
        compute = rank.instants(Category.COMPUTE)
        every = rank.collectives()
        for step in [None, *rank.steps]:
            own = [e for e in every if e.step is step]
            for time in sorted(united(own)):
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
    owner.tail_wait += waits and when == "tail"


def why_of(rank: Rank, owner: Event, time: int, every: list[Event]) -> str:
    """The first reason that holds."""
    if is_blocking(rank, owner):
        return BLOCKING_CALL
    if time < owner.start + _or(owner.wait, 0):
        return PEER_WAIT
    launched = _or(owner.launch, owner.start)
    ready = _or(ready_at(rank, owner), launched)
    late = max(0, min(launched, owner.start) - ready)
    if time >= owner.end - late:
        return LAUNCHED_LATE
    same_stream = [e for e in every if owner.stream is not None and e.stream == owner.stream]
    queued = {t for e in same_stream for t in e.instants if max(launched, ready) <= t < owner.start}
    return QUEUED if time >= owner.end - late - len(queued) else TRANSFER


def _goes_on(optimizer: Event, others: list[Event]) -> bool:
    """Whether the next compute of another phase is backward's."""
    first = min((e.start for e in others if e.start >= optimizer.start), default=None)
    return any(e.start == first and e.phase == "backward" for e in others)


def when_of(rank: Rank, owner: Event, time: int) -> str:
    """By the compute that starts last before the instant and the one that starts next, in the collective's step."""
    if owner.step is None:
        return "unknown" if owner.launch is None else "outside"
    last = rank.backward_end(owner.step)
    if last is not None and time >= last:
        return "tail"
    compute = [e for e in rank.of(Category.COMPUTE, owner.step) if e.phase != "synchronize"]
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
