"""Two runs of one variant: which parts of the step changed by more than the spread, and which collective caused it.

A collective is launched, starts some time later (after others, or after its input), waits for its peers and transfers.
Its launch is measured from the end of backward's compute. So a change of one of the four moves its end by as much::

    before   backward ############|
             bucket 3         L..NNNN
    after    backward ############|
             bucket 3             L..NNNN       launches 4 later, so 4 more are tail
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import TAIL
from ddp_prof.analyze.collectives.results import Collective, measure_collectives
from ddp_prof.analyze.statistics import half_width_of_change, half_width_of_steps, mean_per_draw
from ddp_prof.analyze.variants.waterfall import PARTS, Analyzed, match_parts, measure_budgets, subtract_budgets

LAUNCH, QUEUEING, WAIT, TRANSFER, DURATION = "launch", "queueing", "wait", "transfer", "duration"

Key = tuple[str | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class CollectiveChange:
    """What changed of one collective of a step, on average over steps and ranks.

    Attributes:
        moved: What changed: ``launch``, ``queueing`` (from launch to start, whatever it waited for), ``wait`` or
            ``transfer``; or ``duration``, if wait and transfer cannot be distinguished.
        by_ns: By how much; for a launch, relative to the end of backward's compute.
    """

    op: str | None
    bucket: int | None
    index: int | None
    moved: str
    by_ns: int


@dataclass(frozen=True, slots=True)
class PartChange:
    """A part of the mean step, or ``step`` itself; times are ``None`` if the part is not known.

    ``half_width_ns`` is half of the change's 95 % interval, ``None`` for too few steps. ``cause`` is the collective
    with the largest share of a change of communication that exceeds the spread.
    """

    part: str
    before_ns: int | None
    after_ns: int | None
    half_width_ns: int | None
    cause: CollectiveChange | None

    @property
    def change_ns(self) -> int | None:
        return None if self.before_ns is None or self.after_ns is None else self.after_ns - self.before_ns

    @property
    def is_beyond_spread(self) -> bool | None:
        """Whether the change exceeds the spread of both runs; ``None`` if not known."""
        by_ns, half_width_ns = self.change_ns, self.half_width_ns
        return None if by_ns is None or half_width_ns is None else abs(by_ns) > half_width_ns


def compare_before_after(
    before: Analyzed, after: Analyzed, reference: Sequence[Analyzed] = ()
) -> tuple[PartChange, ...]:
    """The step and its parts in two runs of a variant; empty if a run has no steps, or if devices differ.

    See :func:`.measure_budgets` for ``reference``.
    """
    measured = measure_budgets([before, after], reference)
    if len({one.run.device for one in measured}) != 1 or len(measured) != 2:
        return ()
    first, second = match_parts(*measured)
    difference = subtract_budgets(first, second)
    collectives = [measure_collectives(run).collectives for run, _ in (before, after)]
    if first.wait_ns is None:  # of one run, so it is part of transfer and tail in both
        collectives = [tuple(replace(one, exposed_wait_ns=None) for one in of_run) for of_run in collectives]
    found = []
    for part in ("step", *PARTS):
        old, new = getattr(first, f"{part}_ns"), getattr(second, f"{part}_ns")
        has_cause = part in _EXPOSED and difference.is_beyond_spread(part)
        cause = _find_cause(part, collectives[0], collectives[1], new - old) if has_cause else None
        found.append(PartChange(part, old, new, difference.half_width_ns.get(part), cause))
    return tuple(found)


def _without_wait_ns(collective: Collective) -> int:
    """Its exposed time without waits, which come first: the tail, which comes last, is within it or contains it."""
    return collective.exposed_ns - (collective.exposed_wait_ns or 0)


_EXPOSED: dict[str, Callable[[Collective], int]] = {
    "tail": lambda collective: min(collective.when_ns(TAIL), _without_wait_ns(collective)),
    "wait": lambda collective: collective.exposed_wait_ns or 0,
    "transfer": lambda collective: max(0, _without_wait_ns(collective) - collective.when_ns(TAIL)),
}


def _find_cause(
    part: str, before: Sequence[Collective], after: Sequence[Collective], change_ns: int
) -> CollectiveChange | None:
    """The collective whose share of the part changed most in the direction of the change, and what moved it.

    Waits for peers are a part of their own, so they do not move the others.
    """
    old, new = _group_by_key(before), _group_by_key(after)
    old_steps, new_steps = (
        len({one.step_identity for one in run if one.step_key is not None}) for run in (before, after)
    )
    sign = 1 if change_ns > 0 else -1

    def share(collectives: Sequence[Collective], steps: int) -> float:
        return sum(map(_EXPOSED[part], collectives)) / steps

    shares = {key: sign * (share(new[key], new_steps) - share(old[key], old_steps)) for key in old.keys() & new.keys()}
    if not shares:
        return None
    key = max(sorted(shares, key=str), key=shares.__getitem__)
    moves = {
        name: _significant_change(_mean_per_step(old[key], name), _mean_per_step(new[key], name))
        for name in _TIMES
        if name != WAIT or part == "wait"
    }
    in_direction = {name: by for name, by in moves.items() if by is not None and sign * by > 0}
    if not in_direction:
        return None
    moved = max(in_direction, key=lambda name: abs(in_direction[name]))
    return CollectiveChange(*key, moved=moved, by_ns=round(in_direction[moved]))


def _group_by_key(collectives: Sequence[Collective]) -> dict[Key, list[Collective]]:
    found: dict[Key, list[Collective]] = {}
    for collective in collectives:
        if collective.step_key is not None:
            index = collective.index if collective.bucket is None else None
            found.setdefault((collective.op, collective.bucket, index), []).append(collective)
    return found


_TIMES: dict[str, Callable[[Collective], int | None]] = {
    LAUNCH: lambda collective: (
        None
        if collective.before_backward_end_ns is None or collective.queueing_ns is None
        else -collective.before_backward_end_ns - collective.queueing_ns
    ),
    QUEUEING: lambda collective: collective.queueing_ns,
    WAIT: lambda collective: collective.wait_ns,
    TRANSFER: lambda collective: collective.transfer_ns,
    DURATION: lambda collective: collective.duration_ns if collective.wait_ns is None else None,
}


def _mean_per_step(collectives: Sequence[Collective], name: str) -> list[float]:
    """The mean over ranks for each step; empty if a step has no known value."""
    steps: dict[int | None, list[int | None]] = {}
    for collective in collectives:
        steps.setdefault(collective.step_key, []).append(_TIMES[name](collective))
    known = [[value for value in values if value is not None] for values in steps.values()]
    return [sum(values) / len(values) for values in known] if all(known) else []


def _significant_change(before: Sequence[float], after: Sequence[float]) -> float | None:
    """The change of the mean, if it exceeds the interval of the difference; else ``None``."""
    widths = [half_width_of_steps([times], mean_per_draw) for times in (before, after)]
    if widths[0] is None or widths[1] is None:
        return None
    by = float(np.mean(after) - np.mean(before))
    return by if abs(by) > half_width_of_change(widths[0], widths[1]) else None
