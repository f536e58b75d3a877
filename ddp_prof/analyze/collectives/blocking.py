"""What the collectives of a run blocked, in all and in a typical step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class RunBlocking:
    """How long something stood still for communication.

    Attributes:
        typical_ns: In a step: the median over the steps of all ranks that communicate.
        total_ns: In all.
        steps: Steps that communicate, of all ranks; ``blocked_steps`` those of them in which something stood still.
        collectives: How many there are; ``needed`` those of which it is known what needs them.
        least_slack_ns: The least time that one of those could have ended later without delaying anything, where none
            blocked; ``None`` where one did, or where none is needed.
    """

    typical_ns: int
    total_ns: int
    steps: int
    blocked_steps: int
    collectives: int
    needed: int
    least_slack_ns: int | None


def measure_run_blocking(collectives: Iterable[tuple[Hashable | None, int | None, int | None]]) -> RunBlocking | None:
    """Of all collectives of a run; ``None`` where of one it is not known, or there are none.

    Args:
        collectives: Of each what identifies its step on its rank, ``None`` outside of any, how long something stood
            still for it, and its slack. Only where no step has a collective, those outside of steps count as one.
    """
    by_step: Counter[Hashable | None] = Counter()
    slacks = []
    count = 0
    for step, blocking_ns, slack_ns in collectives:
        if blocking_ns is None:
            return None
        count += 1
        by_step[step] += blocking_ns
        if slack_ns is not None:
            slacks.append(slack_ns)
    if not count:
        return None
    total = sum(by_step.values())
    if len(by_step) > 1:
        by_step.pop(None, None)
    return RunBlocking(
        typical_ns=round(median(by_step.values())),
        total_ns=total,
        steps=len(by_step),
        blocked_steps=sum(ns > 0 for ns in by_step.values()),
        collectives=count,
        needed=len(slacks),
        least_slack_ns=None if total else min(slacks, default=None),
    )
