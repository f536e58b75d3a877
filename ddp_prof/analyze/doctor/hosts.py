"""Rules about what delays a device from outside: its host, another rank, or the profiler."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ddp_prof.analyze.collectives.skew import LateGroup
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE
from ddp_prof.analyze.doctor.evidence import NO_STEPS, Abstained, Finding, RunEvidence
from ddp_prof.analyze.doctor.gradients import Gradients, median_or_zero
from ddp_prof.analyze.statistics import WORTH, bootstrap_interval
from ddp_prof.analyze.why_unknown import LOST_LAUNCHES, NO_COMMUNICATION
from ddp_prof.columns import by_number, capitalized, count_noun, milliseconds, percent
from ddp_prof.communication import OPERATIONS, POINT_TO_POINT, REDUCE_SCATTER
from ddp_prof.table import NO_TIME, UNKNOWN, count_before, distinct_rows

_HOST_SHARE = 0.25
"""The host is reported as late if it takes at least this fraction of a step."""
_OVERHEAD_SHARE = 0.05
"""The profiler is reported if it works for more than this fraction of the time of steps."""
_IN_TURNS_SHARE = 0.05
"""Ranks that are late in turns are reported if that costs more than this fraction of most steps: all ranks jitter."""
_AS_LONG = 0.8
"""A rank waits for launches, or computes, as long as another one if it does for at least this fraction of its time."""
_CLEARLY_LONGER = 1.2
"""A rank computes clearly longer than the others if it does so for at least this many times their median."""
_LEAST_HOOKS = 3
"""Only passes of backward with at least this number of collectives tell whether the host waits for each of them."""
_DELAY_TOLERANCE = 0.5
"""If a collective takes 1 ms longer, the next launch is later by 1 ms, give or take this, if the host waits for it.

If the host does not wait, the next launch is later by about 0 ms.
"""
_LAUNCH_LESS = (
    "Fewer, larger kernels: torch.compile, CUDA graphs, a fused optimizer, larger batches; load data elsewhere; "
    "fewer waits for the device (.item(), .cpu(), print), so that the host runs ahead."
)
_MARK_STEPS = "Mark steps (--step-range) to see whether steps wait for the host, or other work was done meanwhile."
_LOAD_AHEAD = "If the host loads data meanwhile, load and move it in other processes, ahead of the step that needs it."


HOST_SYNC = "host synchronization in backward"


def host_sync(run: RunEvidence) -> Finding | Abstained | None:
    """Find waits of the host for the device during backward, which make it launch the rest of backward late.

    Found if, in most steps, the host waits between the first launch of backward and the last launch of a collective,
    and both these waits and the idle time of the compute stream are more than a hundredth of the step.
    """
    if run.why_no_steps:
        return Abstained(HOST_SYNC, run.why_no_steps)
    if run.is_cpu:
        return _host_sync_on_host(run)
    if not all(facts.knows_syncs for facts in run.facts):
        return Abstained(HOST_SYNC, "the trace does not tell what the host waited for")
    # For each rank that waits: its name, the number of its waits, and their length and the idle time in a typical step.
    found = []
    for rank, facts, overlap in zip(run.analysis.ranks, run.facts_of_steps, run.overlap.ranks, strict=True):
        window = median_or_zero([step.window_ns or 0 for step in overlap.communicating_steps])
        wait = median_or_zero(facts.sync_ns.tolist())
        bare = median_or_zero(facts.bare_ns)
        if window and min(wait, bare) > WORTH * window and 2 * int((facts.syncs > 0).sum()) > len(facts.syncs):
            found.append((rank.name, int(facts.syncs.sum()), wait, bare))
    if not found:
        return None
    wait, bare = median_or_zero([one[2] for one in found]), median_or_zero([one[3] for one in found])
    times = count_noun(sum(count for _, count, *_ in found), "time")
    return Finding(
        HOST_SYNC,
        f"The host waited for the device {times} between the start of backward and its last collective, "
        f"{milliseconds(wait)} in a typical step, in which the stream of compute idles for "
        f"{milliseconds(bare)}.",
        "Move .item(), .cpu(), print and torch.cuda.synchronize() out of backward and its hooks.",
        tuple(name for name, *_ in found),
        cost_ns=max(min(one[2:]) for one in found),
    )


_SCATTER = OPERATIONS.index(REDUCE_SCATTER)
_IN_HOOKS = "In hooks of your own, launch collectives with async_op=True, and wait for them after backward."
_WAITS_OF_FSDP = (
    f"On a CPU, torch's fully_shard waits for each collective itself, which no argument changes. {_IN_HOOKS}"
)


def _host_sync_on_host(run: RunEvidence) -> Finding | Abstained | None:
    """Find, on a CPU, that the host waits for each collective of backward before it goes on.

    Found if, in most passes of backward, each collective ends before the next one is launched, and a collective that
    takes longer delays the next launch by as much. Short collectives may end before the next launch even if the host
    does not wait for them; but then their length does not delay it.
    """
    every = run.gradients.by_pass
    is_known = (every.phase == BACKWARD_PHASE) & (every.launch_ns != NO_TIME)
    launched = every.of_units((every.counts >= _LEAST_HOOKS) & every.by_unit(np.logical_and, is_known))
    is_running = launched.end_ns > np.roll(launched.launch_ns, -1)  # when the next one is launched
    is_running[launched.last] = False
    blocked = launched.of_units(~launched.by_unit(np.logical_or, is_running))
    if 2 * len(blocked.counts) <= len(every.counts):
        return None
    # The delay per length must be near 1: not found if its interval excludes that, undecided if it is too wide.
    low, high = _delay_by_length(launched) or (-math.inf, math.inf)
    if high < 1 - _DELAY_TOLERANCE or low > 1 + _DELAY_TOLERANCE:
        return None
    if low < 1 - _DELAY_TOLERANCE or high > 1 + _DELAY_TOLERANCE:
        reason = "too few steps show whether the host waits for collectives, or whether they end before it needs them"
        return Abstained(HOST_SYNC, reason)
    wait = median_or_zero(blocked.sum_of_steps(blocked.by_unit(np.add, blocked.duration_ns)))
    return Finding(
        HOST_SYNC,
        f"In {blocked.steps} of {every.steps} steps each reduction of gradients in backward had ended "
        f"before the next one was launched, and delayed it by {low:.2f} to {high:.2f} ms for each ms that it took: "
        f"{milliseconds(wait)} of a typical step.",
        _WAITS_OF_FSDP if any((rank.timings.operation == _SCATTER).any() for rank in run.analysis.ranks) else _IN_HOOKS,
        run.where(blocked)[0],
        cost_ns=wait,
    )


def _delay_by_length(launched: Gradients) -> tuple[float, float] | None:
    """Return by how much the next launch is later, in ms, for each ms that a collective takes longer than usual.

    The result is the 95 % interval of this slope; ``None`` if it is not known. It is fitted to deviations from the
    medians of each rank and position in the step. A factor by which a whole step is longer, such as by other programs,
    is removed first. All steps are used: if only those were used whose collectives ended before the next launch, long
    collectives would always be followed by long intervals.
    """
    # Duration of each collective, and interval from its launch to the next one; not for the last one of a unit.
    rows = np.delete(np.arange(len(launched)), launched.last)
    intervals_ns = np.roll(launched.launch_ns, -1) - launched.launch_ns
    values = np.stack([launched.duration_ns, intervals_ns], axis=1)[rows]
    # The medians over the steps, for each rank and position of the collective in its unit.
    _, position = distinct_rows(launched.rank[rows], count_before(launched.unit)[rows])
    typical = np.ones(values.shape)
    order = np.argsort(position, kind="stable")
    for of_one in np.split(order, np.flatnonzero(np.diff(position[order])) + 1):
        typical[of_one] = np.maximum(1, np.median(values[of_one], axis=0))
    # Deviations, without the mean factor of each unit.
    factors = values / typical
    _, step = np.unique(launched.unit[rows], return_inverse=True)
    of_step = np.stack([np.bincount(step, factor) / np.bincount(step) for factor in factors.T], axis=1)
    length, interval = ((factors - of_step[step]) * typical).T
    # The slope is the sum of products over the sum of squares; units are drawn for its interval.
    products = np.stack([np.bincount(step, length * interval), np.bincount(step, length**2)], axis=1)
    if not np.all(products[:, 1]):
        return None
    return bootstrap_interval(products, lambda draws: draws[..., 0].sum(axis=1) / draws[..., 1].sum(axis=1))


LAUNCH_BOUND = "launch-bound host"


def launch_bound(run: RunEvidence) -> Finding | Abstained | None:
    """Find a host that launches too slowly, so that the device waits for it.

    Found, in this order:

    - if nothing runs between steps for at least a quarter of the time from step to step;
    - on a CPU, if the time outside of phases and communication is at least a quarter of the median step;
    - if the host and its launches take at least a quarter of the median step on its critical path, and the compute
      stream has nothing to do for as long, time before work that had been launched long before aside;
    - where the critical path is not known, if the device is idle for at least a quarter of the median step before its
      next work is launched.
    """
    if found := _idle_between_steps(run):
        return found
    if run.is_cpu:
        return _launch_bound_on_host(run)
    if run.critical.reason:
        if any(rank.loses_launches for rank in run.analysis.ranks):  # what a device waited for, too
            return Abstained(LAUNCH_BOUND, LOST_LAUNCHES)
        return _starved_devices(run) or Abstained(LAUNCH_BOUND, run.critical.reason)
    lengths_ns = {(rank.name, step.step_key): step.length.ns for rank in run.overlap.ranks for step in rank.steps}
    unfed = {
        rank.name: median_or_zero(one.unfed_ns)
        for rank, one in zip(run.analysis.ranks, run.facts_of_steps, strict=True)
    }
    # For each step: its critical path, for how long the host delayed it, and its length.
    late = [
        (path, min(path.host_delay_ns, unfed[path.rank]), lengths_ns.get((path.rank, path.step_key)) or path.path_ns)
        for path in run.critical.steps
    ]
    if not late:
        return None
    share = sorted(ns / step_ns for _, ns, step_ns in late)[len(late) // 2]
    if share < _HOST_SHARE:
        return None
    cost = median_or_zero([ns for _, ns, _ in late])
    between = median_or_zero([max(0, step_ns - path.path_ns) for path, _, step_ns in late])
    # The path of a step goes through one rank; others whose device waits for launches for as long are no better.
    named = {path.rank for path, _, _ in late}
    least_ns = max(_AS_LONG * min(unfed[name] for name in named), _HOST_SHARE * median_or_zero([ns for *_, ns in late]))
    where = "on the critical path" + (", or in the next step," if run.analysis.has_steps else "")
    return Finding(
        LAUNCH_BOUND,
        f"{percent(share)} of {run.whole}, {milliseconds(cost)}, is time in which the device waits for "
        f"launches: what came next {where} could not begin before the host had launched it.",
        _LOAD_AHEAD if 2 * between > cost else _LAUNCH_LESS if run.analysis.has_steps else _MARK_STEPS,
        tuple(name for name, ns in unfed.items() if name in named or ns >= least_ns),
        tuple(path.step for path, ns, step_ns in late if path.step is not None and ns >= _HOST_SHARE * step_ns),
        cost_ns=cost,
    )


def _name_late_hosts(
    run: RunEvidence, late: Iterable[int], whole: Iterable[int], evidence: str, advice: str
) -> Finding | None:
    """Return the finding about the ranks whose host is late for at least a quarter of the time; ``None`` if none is.

    Args:
        run: The run.
        late: For each rank, how long its host is late in a typical step, in nanoseconds.
        whole: For each rank, the time of which that is a part, such as the length of a step.
        evidence: The text of the finding, with placeholders for the rank that is late most, as the others wait for it:
            ``share`` and ``time``, and ``of_rank``, its name where there are several.
        advice: What to do about it.
    """
    of_ranks = zip(run.analysis.ranks, late, whole, strict=True)
    found = [(ns, ns / length, rank.name) for rank, ns, length in of_ranks if length and ns >= _HOST_SHARE * length]
    if not found:
        return None
    cost, share, name = max(found)
    of_rank = f" of {name}" if len(run.analysis.ranks) > 1 else ""
    text = evidence.format(share=percent(share), time=milliseconds(cost), of_rank=of_rank)
    return Finding(LAUNCH_BOUND, text, advice, tuple(name for *_, name in found), cost_ns=cost)


def _idle_between_steps(run: RunEvidence) -> Finding | None:
    """Find ranks on which nothing runs between steps for at least a quarter of the time from step to step."""
    if run.overlap.missing:  # what ran between steps may be what was not recorded
        return None
    between = [median_or_zero(facts.between_ns) for facts in run.facts_of_steps]
    whole = [ns + median_or_zero(rank.lengths_ns) for ns, rank in zip(between, run.overlap.ranks, strict=True)]
    evidence = (
        "{share} of the time from step to step{of_rank}, {time}, lies between the ranges of steps. Nothing recorded "
        "runs in it, and the length of a step does not contain it."
    )
    return _name_late_hosts(run, between, whole, evidence, _LOAD_AHEAD)


def _starved_devices(run: RunEvidence) -> Finding | None:
    """Find devices that are idle for at least a quarter of a step before their next work is launched."""
    starved = [median_or_zero(facts.starved_ns) for facts in run.facts_of_steps]
    lengths = [
        median_or_zero(rank.lengths_ns or [step.window_ns or 0 for step in rank.steps]) for rank in run.overlap.ranks
    ]
    found = "the device was idle and its next work was not launched yet."
    evidence = f"For {{share}} of {run.whole}{{of_rank}}, {{time}}, {found}"
    return _name_late_hosts(run, starved, lengths, evidence, _LAUNCH_LESS if run.analysis.has_steps else _MARK_STEPS)


def _launch_bound_on_host(run: RunEvidence) -> Finding | Abstained | None:
    """Find, on a CPU, ranks that spend at least a quarter of a step outside of phases and communication."""
    if not any(rank.comm_ns for rank in run.overlap.ranks):
        reason = next((rank.reason for rank in run.overlap.ranks if rank.reason != NO_COMMUNICATION), None)
        silent = f"{NO_COMMUNICATION}, which may be what the host does between its phases"
        return Abstained(LAUNCH_BOUND, reason or silent)
    if not any(facts.outside_ns for facts in run.facts_of_steps):
        return Abstained(LAUNCH_BOUND, "no range tells when forward ran in a step")
    outside = [median_or_zero(facts.outside_ns) for facts in run.facts_of_steps]
    lengths = [median_or_zero(rank.lengths_ns) for rank in run.overlap.ranks]
    evidence = (
        "{share} of a typical step{of_rank}, {time}, lies outside of forward, backward, synchronize, optimizer and "
        "communication: no range tells what the host does then, such as loading data."
    )
    return _name_late_hosts(run, outside, lengths, evidence, _LOAD_AHEAD)


STRAGGLER = "straggler"


def straggler(run: RunEvidence) -> Finding | Abstained | None:
    """Find a rank for which the other ranks wait, or several that are late together or in turns.

    Found if a rank, or a group of ranks, arrives last more often than chance explains, and the step would be shorter
    without its lag; or if another rank is late in each step, and most steps would be clearly shorter without that.
    """
    if run.skew.reason:
        return Abstained(STRAGGLER, run.skew.reason)
    if run.skew.doubt:
        reason = f"who arrives last ({run.skew.names_of(run.skew.late_ranks)}) {run.skew.doubt}"
        return Abstained(STRAGGLER, reason)
    if run.skew.group:
        return _late_group(run, run.skew.group)
    # Without a straggler: undecided if one rank is last in all steps, but these are too few, or if nothing marks steps.
    if run.skew.straggler is None:
        latest = None if run.skew.steps else run.skew.latest
        if latest and 2 * latest.last_collectives > latest.matched:
            last = f"{latest.name} arrives last at {latest.last_collectives} of {latest.matched} collectives"
            return Abstained(STRAGGLER, f"{last}, and {NO_STEPS}")
        for rank in run.skew.ranks:
            if run.skew.steps and rank.last_steps == len(run.skew.steps):
                which = f"each of {rank.last_steps} steps" if rank.last_steps > 1 else "the only step"
                reason = f"{rank.name} arrives last in {which}, too few to exclude chance"
                return Abstained(STRAGGLER, reason)
        return _late_in_turns(run)
    late, steps = run.skew.ranks[run.skew.straggler], len(run.skew.steps)
    cost = late.cost_when_last_ns
    if cost == 0:
        return None
    costs = "" if cost is None else f"; {_costs_another_rank(run, cost)} in such a step"
    per_step = run.skew.cost_ns
    if per_step is not None and 2 * late.last_steps < steps:
        costs += f", {milliseconds(per_step)} in the mean step"
    return Finding(
        STRAGGLER,
        f"{capitalized(late.name)} arrives last in {late.last_steps} of {steps} steps, by "
        f"{milliseconds(late.lag_when_last_ns or 0)} (median){costs}.",
        "Compare its input, clocks, power limit and placement with the other ranks'."
        if 2 * late.last_steps >= steps
        else "Look for what it alone does now and then: checkpoints, evaluation, logging, data loading, garbage "
        "collection.",
        (late.name,),
        cost_ns=per_step,
    )


UNEVEN_COMPUTE = "uneven compute"


def uneven_compute(run: RunEvidence) -> Finding | None:
    """Find ranks that compute clearly longer than the others, as a slow stage of a pipeline does.

    Found where who arrives last may have waited for another rank in sends and receives, or is not known while most
    ranks send and receive; and if less than half of the ranks compute at least a fifth longer than the median rank. A
    step then gains at most the sum of these times: whatever its schedule is, each operation lies at most once on the
    path that determines its length, and that path may lead through all these ranks.
    """
    between = OPERATIONS.index(POINT_TO_POINT)
    sends = [bool(np.any((rank.timings.operation == between) & (rank.keys != UNKNOWN))) for rank in run.analysis.ranks]
    if run.is_cpu or not (run.skew.doubt or (2 * sum(sends) > len(sends) and not run.skew.late_ranks)):
        return None
    times = [
        median_or_zero([(step.compute_only_ns or 0) + (step.overlapped_ns or 0) for step in rank.steps])
        for rank in run.overlap.ranks
    ]
    if not all(times):  # of a rank it is not known
        return None
    usual, longest = median_or_zero(times), max(times)
    found = [index for index, ns in enumerate(times) if ns >= _AS_LONG * longest and ns >= _CLEARLY_LONGER * usual]
    if longest < _CLEARLY_LONGER * usual or 2 * len(found) >= len(times):
        return None
    which = run.skew.names_of(found)
    return Finding(
        UNEVEN_COMPUTE,
        f"{capitalized(which)} compute{'' if len(found) > 1 else 's'} longest, up to {milliseconds(longest)} "
        f"of a typical step; the median of all ranks is {milliseconds(usual)}. Others may wait for that in sends and "
        "receives, which are not matched.",
        "Give these ranks less work, such as fewer layers of a pipeline; if they have no more than others, compare "
        "their clocks, power limit and placement.",
        tuple(run.skew.ranks[index].name for index in found),
        cost_ns=sum(times[index] - usual for index in found),
    )


def _late_group(run: RunEvidence, group: LateGroup) -> Finding | None:
    """Return the finding of ranks that are late together; ``None`` if that costs the others nothing."""
    cost = group.cost_ns
    if cost == 0:
        return None
    costs = "" if cost is None else f"; {_costs_another_rank(run, cost)} in such a step"
    which = run.skew.names_of(group.ranks)
    return Finding(
        STRAGGLER,
        f"{capitalized(which)} arrive last together in {group.steps} of {len(run.skew.steps)} steps, by "
        f"{milliseconds(group.lag_ns)} (median){costs}.",
        "Compare their input, clocks, power limit and placement with the other ranks': they may have a node in common.",
        tuple(run.skew.ranks[index].name for index in group.ranks),
        cost_ns=run.skew.cost_ns,
    )


def _late_in_turns(run: RunEvidence) -> Finding | None:
    """Return the finding of ranks that are late in turns; ``None`` if that costs most steps little, or is not known."""
    step_ns = median_or_zero([ns for rank in run.overlap.ranks for ns in rank.lengths_ns])
    turns = run.skew.in_turns
    if not turns or not step_ns or turns.median_cost_ns < _IN_TURNS_SHARE * step_ns:
        return None
    steps = [step for step in run.skew.steps if step.last is not None]
    lag_ns = median_or_zero([step.lags_ns[step.last] or 0 for step in steps if step.last is not None])
    several = max(map(len, turns.ranks.values())) > 1
    return Finding(
        STRAGGLER,
        f"Ranks are late in turns: in {len(steps)} of {len(run.skew.steps)} steps {'some' if several else 'one'} of "
        f"them arrive{'' if several else 's'} last, by {milliseconds(lag_ns)} (median), and none so often that chance "
        f"does not explain it; {_costs_another_rank(run, turns.cost_ns)} in a step (mean).",
        "Give all ranks equal work in each step (samples of equal length, packed or sorted into buckets), and look for "
        "pauses that any of them may have: data loading, garbage collection, other programs.",
        cost_ns=turns.cost_ns,
    )


def _costs_another_rank(run: RunEvidence, cost_ns: int) -> str:
    """Say what a lag costs: at most, where it is not known what queued behind the waits for it.

    Communication that waits also slows the compute that hides it, which is in no exposed time.
    """
    is_slowed = run.skew.hides_waits and (run.contention().slowdown or 1) > 1
    what = f"{milliseconds(cost_ns)}{' of exposed time' if is_slowed else ''}"
    return f"that costs another rank {'' if run.knows_queues else 'at most '}{what}"


GRAPH_REPLAY = "CUDA graphs recorded whole"


def graph_replay(run: RunEvidence) -> Finding | None:
    """Find CUDA graphs that were recorded as a whole, so that the trace does not contain what they communicate.

    Found if the trace contains replays of graphs as single activities.
    """
    graphs = {
        rank.name: facts.graphs for rank, facts in zip(run.analysis.ranks, run.facts, strict=True) if facts.graphs
    }
    if not graphs:
        return None
    replays = sum(graphs.values())
    were = by_number(replays, "was", "were")
    return Finding(
        GRAPH_REPLAY,
        f"{count_noun(replays, 'replay')} of CUDA graphs {were} recorded as one activity each.",
        "Record with nsys profile --cuda-graph-trace=node to see what the graphs compute and communicate.",
        tuple(graphs),
    )


PROFILER_OVERHEAD = "overhead of the profiler"


def profiler_overhead(run: RunEvidence) -> Finding | None:
    """Find a profiler that takes so much time that it changes the figures.

    Found if the profiler was at work in more than a twentieth of the time of steps, or of a capture without steps.
    """
    found = {
        rank.name: facts.overhead_share
        for rank, facts in zip(run.analysis.ranks, run.facts, strict=True)
        if facts.overhead_share > _OVERHEAD_SHARE
    }
    if not found:
        return None
    whole = "time of steps" if run.analysis.has_steps else "capture"
    return Finding(
        PROFILER_OVERHEAD,
        f"The profiler was at work in {percent(max(found.values()))} of the {whole}.",
        "Record fewer steps, without backtraces, sampling and memory usage (nsys: --cuda-flush-interval).",
        tuple(found),
    )
