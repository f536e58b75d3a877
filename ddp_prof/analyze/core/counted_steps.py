"""Decides which steps of a rank count: all but warm-up steps and those that were not recorded completely."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddp_prof.analyze.core.attribution import are_gloo_events, find_operations, first_by_step, last_by_step
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.recording import name_steps
from ddp_prof.analyze.intervals import union
from ddp_prof.communication import BARRIER, OPERATIONS, POINT_TO_POINT
from ddp_prof.notes import Doubt
from ddp_prof.range_names import BACKWARD, FORWARD, PHASES, SYNCHRONIZE
from ddp_prof.table import NEVER, is_in
from ddp_prof.trace import UNKNOWN, Category, Ints, Mask, select, take_or_unknown

SKIPPED = 0.1
"""A step on a CPU did nothing if it lasts at most this fraction of the shortest one in which the host did something."""


def without_uncounted_steps(rank: RankEvents, warmup_steps: int = 0) -> RankEvents:
    """Return the rank without warm-up steps and incomplete steps, and without their events.

    Complete steps that may have run beside the lost work of an incomplete step are left out with it. The first
    ``warmup_steps`` of the steps that would count are warm-up, too, because the user says so.
    """
    is_incomplete, step_notes = np.zeros(len(rank.steps), np.bool_), rank.step_notes
    if rank.has_steps and rank.device is not None:
        is_incomplete = rank.recording.is_incomplete
        if is_incomplete.any():
            is_beside = _run_beside_lost_work(rank, is_incomplete)
            if (is_named := is_beside & ~rank.steps.warmup).any():
                which, beside = name_steps(rank.steps.names, is_named), "it" if is_named.sum() == 1 else "them"
                why = f"work of a step that was recorded in part may have run beside {beside}"
                step_notes += (Doubt(f"{which} left out: {why}"),)
            is_incomplete = is_incomplete | is_beside
    elif rank.has_steps:
        for lacks, what in (
            (_hold_nothing(rank), "nothing that its host did was recorded in {}"),
            (_hold_no_operator(rank), "no operator was recorded in {}"),
            (_lack_phases(rank), "ranges of phases seem to be recorded only in part in {}"),
            (_lack_collectives(rank), "fewer collectives were recorded in {} than torch's operators call there"),
        ):
            if (is_new := lacks & ~is_incomplete).any():
                which, them = name_steps(rank.steps.names, is_new), "it" if is_new.sum() == 1 else "them"
                step_notes += (Doubt(f"{which} left out: {what.format(them)}"),)
                is_incomplete |= is_new
    measured: Mask = ~(rank.steps.warmup | is_incomplete)
    if warmup_steps:
        is_warmup = measured & (np.cumsum(measured) <= warmup_steps)
        rank = replace(rank, steps=replace(rank.steps, warmup=rank.steps.warmup | is_warmup))
        measured &= ~is_warmup
    is_unfinished = _are_of_unfinished_step(rank)
    if measured.all() and not is_unfinished.any():
        return rank
    # Index UNKNOWN (-1), an event outside of all steps, selects the appended last element: such events stay.
    renumbered = np.where(measured, np.cumsum(measured) - 1, UNKNOWN)
    step = _steps_of_events(rank, is_incomplete)
    events = select(rank.events, np.append(measured, True)[step] & ~is_unfinished)
    is_beside = np.append(is_incomplete, False)[step] | is_unfinished
    return replace(
        rank,
        events=replace(events, step=take_or_unknown(renumbered, events.step)),
        steps=select(rank.steps, measured),
        is_followed=(rank.is_followed & np.append(measured[1:], False))[measured],
        warmup_steps=int(rank.steps.warmup.sum()),
        incomplete_steps=int((is_incomplete & ~rank.steps.warmup).sum()),
        own_keys=rank.steps.keys[measured] if is_incomplete.any() else None,
        beside=select(rank.events, is_beside) if is_beside.any() else None,
        follows_lost=np.append(False, is_incomplete[:-1])[measured] if is_incomplete.any() else None,
        with_warmup=rank,
        step_notes=step_notes,
    )


def _are_of_unfinished_step(rank: RankEvents) -> Mask:
    """Return which events belong to a step that did not end, behind the others."""
    if not len(rank.unfinished):
        return np.zeros(len(rank.events), np.bool_)
    events = rank.launched_events
    at_ns = events.launch_ns if rank.clocks_disagree else events.launch_or_start_ns
    found: Mask = (events.step == UNKNOWN) & rank.unfinished.holds(at_ns)
    return found


def _hold_nothing(rank: RankEvents) -> Mask:
    """Return which steps of a CPU rank have neither compute nor communication, although other steps have."""
    recorded = rank.union_of(Category.COMPUTE) | rank.union_of(Category.COMMUNICATION)
    return _lack_time(rank, recorded.covered_ns(rank.steps.start_ns, rank.steps.end_ns) > 0)


def _lack_time(rank: RankEvents, has_any: Mask) -> Mask:
    """Return which steps had the time to do what was not recorded in them, although it was in some (``has_any``).

    The host itself computes on a CPU, so one that takes at most :data:`SKIPPED` of these skips its batch.
    """
    length_ns = rank.steps.end_ns - rank.steps.start_ns
    least_ns = length_ns[has_any].min(initial=NEVER)
    found: Mask = ~(has_any | rank.steps.warmup) & has_any.any() & (length_ns > SKIPPED * least_ns)
    return found


def _hold_no_operator(rank: RankEvents) -> Mask:
    """Return which steps of a CPU rank have no compute, although torch's operators tell that of other steps."""
    has_any = rank.union_of(Category.COMPUTE).covered_ns(rank.steps.start_ns, rank.steps.end_ns) > 0
    return _lack_time(rank, has_any) & (len(rank.trace.operators) > 0)


def _lack_phases(rank: RankEvents) -> Mask:
    """Return which steps of a CPU rank lack a range without which compute or communication is not known.

    A step that launches communication has a backward, one with a backward a forward, and one that waits communicates,
    if at least half of such steps do, two or more. So it is also if such a range takes no time. One waits whose
    ``synchronize`` takes as long as that of a step that communicates: in micro-batches under ``no_sync`` it returns at
    once. What a step launched may reach into the next one, which may only evaluate.
    """
    steps, phases = rank.steps, rank.phases
    of_step, length_ns = steps.index_at(phases.start_ns), phases.end_ns - phases.start_ns
    forward_ns, backward_ns, synchronize_ns = (
        np.bincount(of_step[mine], length_ns[mine], len(steps)) if mine.any() else np.zeros(len(steps))
        for mine in ((of_step != UNKNOWN) & (phases.kind == PHASES.index(kind)) for kind in _NEEDED)
    )
    has_forward, has_backward = forward_ns > 0, backward_ns > 0
    communicates = rank.union_of(Category.COMMUNICATION).covered_ns(steps.start_ns, steps.end_ns) > 0
    launches = is_in(np.arange(len(steps)), rank.events.step[rank.events.category == Category.COMMUNICATION])
    shortest_ns = synchronize_ns[communicates & (synchronize_ns > 0)].min(initial=np.inf)
    found = np.zeros(len(steps), np.bool_)
    for asked, has_it in (
        (communicates & launches, has_backward),
        (has_backward, has_forward),
        (synchronize_ns >= shortest_ns, communicates),
    ):
        counted = asked & ~steps.warmup
        if (counted & has_it).sum() >= max(2, counted.sum() / 2):
            found |= counted & ~has_it
    return found


_NEEDED = (FORWARD, BACKWARD, SYNCHRONIZE)
"""The phases without whose ranges compute or communication of a CPU is not known."""


def _lack_collectives(rank: RankEvents) -> Mask:
    """Return which steps of a CPU rank lack events of gloo: more than usual of those that torch's operators asked for.

    A thread of gloo may begin one in a later step, so what was asked for is lacking if it is not made up for later::

        asked for by then      1  2  3  4
        begun by then          1  1  1  3      one of step 1 is lost, that of step 2 begins in step 3
        lacking by then        0  1  1  1      the least of this and all later differences
    """
    ranges, calls, steps = rank.collective_ranges, rank.trace.collective_calls, rank.steps
    is_event = are_gloo_events(rank.trace, ranges)
    is_gloo = is_event & (ranges.end_ns > ranges.start_ns)
    if not is_event.all():
        # Beside ranges of ddp_prof, events of gloo count neither within these nor outside of steps.
        marked = union(ranges.start_ns[~is_event], ranges.end_ns[~is_event])
        counts = (steps.index_at(calls.start_ns) != UNKNOWN) & ~marked.holds(calls.start_ns)
        calls = select(calls, counts)
    if not is_gloo.any() or not len(calls):
        return np.zeros(len(steps), np.bool_)
    differs = np.zeros(len(steps), np.int64)
    for operation, at_ns, sign in (
        (find_operations(rank.trace, calls.name_id), calls.start_ns, 1),
        (ranges.operation[is_gloo], ranges.start_ns[is_gloo], -1),
    ):
        begun_ns = np.sort(at_ns[is_in(operation, _COUNTED)])
        differs += sign * np.searchsorted(begun_ns, np.append(steps.start_ns[1:], NEVER))
    lacking = np.diff(np.minimum.accumulate(differs[::-1])[::-1], prepend=0)
    counts, times = np.unique(lacking, return_counts=True)
    found: Mask = (lacking > counts[times.argmax()]) & ~steps.warmup
    return found


_COUNTED = tuple(at for at, name in enumerate(OPERATIONS) if name not in (BARRIER, POINT_TO_POINT))
"""Operations (indices) of which gloo records one event for each operator of torch."""


def _steps_of_events(rank: RankEvents, is_incomplete: Mask) -> Ints:
    """Return the step of each event; of one without a recorded launch, the incomplete step in which it began, if any.

    Other work of such a step may be lost, so what such an event ran beside is not known.
    """
    step = rank.events.step
    if not is_incomplete.any() or rank.clocks_disagree:
        return step
    rows = np.flatnonzero((step == UNKNOWN) & (rank.events.activity != UNKNOWN))
    rows = rows[rank.trace.launching_calls[rank.events.activity[rows]] == UNKNOWN]
    at = rank.steps.index_at(rank.events.start_ns[rows])
    found: Ints = step.copy()
    found[rows] = np.where(np.append(is_incomplete, False)[at], at, UNKNOWN)
    return found


def _run_beside_lost_work(rank: RankEvents, is_incomplete: Mask) -> Mask:
    """Return a mask of the complete steps beside which work of an incomplete step may have run, which was lost.

    These are steps whose work on the device had not ended when an incomplete step began on the host, if complete steps
    so far apart overlap on the device, or no two complete steps follow each other, which would show it. If steps of
    this rank overlap on the device, they are also steps that follow an incomplete step::

        step 3 on the device  #####
        step 4 on the host    |------|
        step 4 on the device     ########     steps 3 and 4 overlap
        step 5 on the host           |------|   its work was lost
        doubtful                     ####       so step 4 is left out, too

    If the clocks of host and device disagree, both neighbours of an incomplete step are doubtful if steps overlap.
    """
    # The next incomplete step after each step: the minimum of such positions, from the last step on.
    count = len(rank.steps)
    place = np.arange(count)
    next_lost = np.append(np.minimum.accumulate(np.where(is_incomplete, place, count)[::-1])[::-1][1:], count)
    ended_ns = last_by_step(rank.events.end_ns, rank.events.step, count)
    begun_ns = first_by_step(rank.events.start_ns, rank.events.step, count)

    # How many steps apart complete steps are that overlap on the device: after a step, the last one that began before
    # its end. `least_ns` is the first start of each step and all after it, so it is in order.
    least_ns = np.minimum.accumulate(np.where(is_incomplete, NEVER, begun_ns)[::-1])[::-1]
    apart = (np.searchsorted(least_ns, ended_ns) - 1 - place)[~is_incomplete]
    pairs = ~is_incomplete[:-1] & ~is_incomplete[1:] & (begun_ns[1:] != NEVER)
    overlap = np.any(pairs & (ended_ns[:-1] > begun_ns[1:]))
    follows = np.append(False, is_incomplete[:-1]) & overlap
    if rank.clocks_disagree:
        before = np.append(is_incomplete[1:], False) & overlap
    else:
        is_near = next_lost - place <= (apart.max(initial=0) if pairs.any() else count)
        before = is_near & (ended_ns > np.append(rank.steps.start_ns, NEVER)[next_lost])
    doubtful: Mask = ~is_incomplete & (before | follows)
    return doubtful
