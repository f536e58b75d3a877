"""The phase of a rank while it computes nothing, from the compute before and after.

compute      ffff...ff....bbbb..bbb....oo
inside of         f         b             both neighbours are of that phase
between              fb            bo     between two phases
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE, Events
from ddp_prof.range_names import FORWARD, OPTIMIZER, PHASES
from ddp_prof.trace import UNKNOWN, Category, Ints, Mask, Table

NONE = -2
"""Stands for the phase before a step's first compute and after its last."""

BETWEEN_STEPS = -3
"""Both phases of the one stretch that stands for all time outside of the steps."""

ALWAYS = -(2**62)
"""Start of the first stretch of a step: earlier than any event."""


@dataclass(frozen=True)
class DevicePhases(Table):
    """Stretches of time by step and start; a stretch ends where the next one of the step starts, the last one never.

    Attributes:
        step: Index into the rank's steps; their number for the time outside of them.
        before: Phase of the compute that starts last before an instant of the stretch, an index into
            ``range_names.PHASES``; ``UNKNOWN`` where that belongs to no phase, ``NONE`` where there is none.
        after: The same of the compute that starts next.
    """

    step: Ints
    start_ns: Ints
    before: Ints
    after: Ints


def find_device_phases(events: Events, steps: int) -> DevicePhases:
    """The stretches of all steps, each of which has at least one; the last stretch is the time outside of them.

    Compute of no phase counts only in steps without any of forward: beside named phases it is a helper's, as a data
    loader's, and the rank's own phase goes on. So it does where an optimizer steps on a bucket and backward follows;
    where forward does, as in a step of two networks, backward was done.

    Args:
        events: All of the rank's.
        steps: How many steps it has.
    """
    rows = np.flatnonzero(
        (events.category == Category.COMPUTE) & (events.step != UNKNOWN) & (events.phase != SYNCHRONIZE_PHASE)
    )
    has_forward = np.zeros(steps, np.bool_)
    has_forward[events.step[rows][events.phase[rows] == PHASES.index(FORWARD)]] = True
    rows = rows[(events.phase[rows] != UNKNOWN) | ~has_forward[events.step[rows]]]
    rows = rows[~_is_within_backward(events, rows)]
    # Each step has one row before its first compute; each compute begins a stretch.
    step = np.concatenate([np.arange(steps + 1), events.step[rows]])
    start = np.concatenate([np.full(steps + 1, ALWAYS), events.start_ns[rows]])
    phase = np.concatenate([np.full(steps, NONE), [BETWEEN_STEPS], events.phase[rows]])
    order = np.lexsort((start, step))
    step, start, before = step[order], start[order], phase[order]
    after = np.where(np.append(step[1:] == step[:-1], False), np.append(before[1:], NONE), NONE)
    changes = np.ones(len(step), np.bool_)
    changes[1:] = (step[1:] != step[:-1]) | (before[1:] != before[:-1]) | (after[1:] != after[:-1])
    return DevicePhases(step[changes], start[changes], before[changes], after[changes])


def _is_within_backward(events: Events, rows: Ints) -> Mask:
    """Which of the rows are compute of an optimizer after which backward's is the next of another phase in the step."""
    is_optimizer = events.phase[rows] == PHASES.index(OPTIMIZER)
    others = rows[~is_optimizer]
    if not is_optimizer.any() or not len(others):
        return np.zeros(len(rows), np.bool_)
    others = others[np.lexsort((events.phase[others] != BACKWARD_PHASE, events.start_ns[others], events.step[others]))]
    # Steps laid end to end on one axis cannot reach into each other, so one search serves all of them.
    low = int(events.start_ns[rows].min())
    axis = events.step * (int(events.start_ns[rows].max()) - low + 1) + events.start_ns - low
    following = np.append(others, others[-1])[np.searchsorted(axis[others], axis[rows])]
    follows = (axis[following] >= axis[rows]) & (events.step[following] == events.step[rows])
    within: Mask = is_optimizer & follows & (events.phase[following] == BACKWARD_PHASE)
    return within
