"""Rules about what delays a device from outside: its host, another rank, the profiler."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE
from ddp_prof.analyze.doctor.evidence import WORTH, Abstained, Finding, Gradients, RunEvidence, median_or_zero
from ddp_prof.analyze.quality import NO_COMMUNICATION
from ddp_prof.analyze.statistics import bootstrap_interval
from ddp_prof.communication import OPERATIONS
from ddp_prof.table import NO_TIME, count_before, distinct_rows

_HOST_SHARE = 0.25
_OVERHEAD_SHARE = 0.05
_LEAST_HOOKS = 3
_DELAY_TOLERANCE = 0.5
"""If the host waits for a collective, 1 ms more of it delays the next launch by about 1 ms, else by about 0."""
_LAUNCH_LESS = (
    "Fewer, larger kernels: torch.compile, CUDA graphs, a fused optimizer, larger batches; load data elsewhere; "
    "fewer waits for the device (.item(), .cpu(), print), so that the host runs ahead."
)
_MARK_STEPS = "Mark steps (--step-range) to see whether they wait for the host, or other work was done meanwhile."
_LOAD_AHEAD = "Load and move data in other processes, ahead of the step that needs it."


def host_sync(run: RunEvidence) -> Finding | Abstained | None:
    """The host waits for the device during backward, so that it launches the rest of backward late.

    Found if in most steps the host waits between the first launch of backward and the last launch of a collective.
    """
    if run.why_no_steps:
        return Abstained("host synchronization in backward", run.why_no_steps)
    if run.is_cpu:
        return _host_sync_on_host(run)
    if not all(facts.knows_syncs for facts in run.facts):
        return Abstained("host synchronization in backward", "the trace does not tell what the host waited for")
    found = []
    for rank, facts, overlap in zip(run.analysis.ranks, run.facts, run.overlap.ranks, strict=True):
        window = median_or_zero([step.window_ns or 0 for step in overlap.communicating_steps])
        wait = median_or_zero(facts.sync_ns.tolist())
        bare = median_or_zero(facts.bare_ns)
        if window and min(wait, bare) > WORTH * window and 2 * int((facts.syncs > 0).sum()) > len(facts.syncs):
            found.append((rank.name, int(facts.syncs.sum()), wait, bare))
    if not found:
        return None
    wait, bare = median_or_zero([one[2] for one in found]), median_or_zero([one[3] for one in found])
    return Finding(
        "host synchronization in backward",
        f"The host waited for the device {sum(count for _, count, *_ in found):,} times between the start of backward "
        f"and its last collective, {wait / 1e6:.2f} ms in a typical step, in which the stream of compute idles for "
        f"{bare / 1e6:.2f} ms.",
        "Move .item(), .cpu(), print and torch.cuda.synchronize() out of backward and its hooks.",
        tuple(name for name, *_ in found),
        (),
        max(min(one[2:]) for one in found),
    )


_SCATTER = OPERATIONS.index("reduce_scatter")
_IN_HOOKS = "In hooks of your own, launch collectives with async_op=True, and wait for them after backward."
_WAITS_OF_FSDP = (
    f"On a CPU, torch's fully_shard waits for each collective itself, which no argument changes. {_IN_HOOKS}"
)


def _host_sync_on_host(run: RunEvidence) -> Finding | Abstained | None:
    """On a CPU, the host waits for each collective of backward before it goes on.

    Found if in most passes each collective ends before the next one is launched, and a longer one delays the next
    launch by as much. Short collectives may also end before, without a wait; but then their length delays nothing.
    """
    every = run.gradients.by_pass
    is_known = (every.phase == BACKWARD_PHASE) & (every.launch_ns != NO_TIME)
    launched = every.of_units((every.counts >= _LEAST_HOOKS) & every.by_unit(np.logical_and, is_known))
    is_running = launched.end_ns > np.roll(launched.launch_ns, -1)  # when the next one is launched
    is_running[launched.last] = False
    blocked = launched.of_units(~launched.by_unit(np.logical_or, is_running))
    if 2 * len(blocked.counts) <= len(every.counts):
        return None
    low, high = _delay_by_length(launched) or (-math.inf, math.inf)
    if high < 1 - _DELAY_TOLERANCE or low > 1 + _DELAY_TOLERANCE:
        return None
    if low < 1 - _DELAY_TOLERANCE or high > 1 + _DELAY_TOLERANCE:
        reason = "too few steps show whether the host waits for collectives, or whether they end before it needs them"
        return Abstained("host synchronization in backward", reason)
    wait = median_or_zero(blocked.sum_of_steps(blocked.by_unit(np.add, blocked.duration_ns)))
    return Finding(
        "host synchronization in backward",
        f"In {blocked.steps} of {every.steps} steps each reduction of gradients in backward had ended "
        f"before the next one was launched, and delayed it by {low:.2f} to {high:.2f} ms for each ms that it took: "
        f"{wait / 1e6:.2f} ms of a typical step.",
        _WAITS_OF_FSDP if any((rank.timings.operation == _SCATTER).any() for rank in run.analysis.ranks) else _IN_HOOKS,
        run.where(blocked)[0],
        (),
        wait,
    )


def _delay_by_length(launched: Gradients) -> tuple[float, float] | None:
    """How much later the next collective is launched, divided by how much longer one takes; ``None`` if not known.

    The 95 % interval of the slope of a line through the deviations from the medians of each rank and position in the
    step. What makes all of a step longer by one factor, such as other programs, counts for neither. All steps are used:
    among the steps whose collectives ended before the next launch, long collectives always have long intervals.
    """
    rows = np.delete(np.arange(len(launched)), launched.last)
    intervals_ns = np.roll(launched.launch_ns, -1) - launched.launch_ns
    values = np.stack([launched.duration_ns, intervals_ns], axis=1)[rows]
    _, position = distinct_rows(launched.rank[rows], count_before(launched.unit)[rows])
    typical = np.ones(values.shape)
    order = np.argsort(position, kind="stable")
    for of_one in np.split(order, np.flatnonzero(np.diff(position[order])) + 1):
        typical[of_one] = np.maximum(1, np.median(values[of_one], axis=0))
    factors = values / typical
    _, step = np.unique(launched.unit[rows], return_inverse=True)
    of_step = np.stack([np.bincount(step, factor) / np.bincount(step) for factor in factors.T], axis=1)
    length, interval = ((factors - of_step[step]) * typical).T
    products = np.stack([np.bincount(step, length * interval), np.bincount(step, length**2)], axis=1)
    if not np.all(products[:, 1]):
        return None
    return bootstrap_interval(products, lambda draws: draws[..., 0].sum(axis=1) / draws[..., 1].sum(axis=1))


def launch_bound(run: RunEvidence) -> Finding | Abstained | None:
    """The host launches too slowly, so the device waits for it.

    Found if the host and its launches, on the path that goes back from the end of the step, are at least a quarter of
    the median step, and the stream of compute has nothing to do for so long. If the path is not known: if the device is
    idle for a quarter of the median step before its next work is launched. On a CPU: if time outside of phases and
    communication is at least a quarter of the median step. Everywhere: if nothing runs for a quarter of the time from
    step to step, between them.
    """
    if found := _idle_between_steps(run):
        return found
    if run.is_cpu:
        return _launch_bound_on_host(run)
    if run.critical.reason:
        return _starved_devices(run) or Abstained("launch-bound host", run.critical.reason)
    lengths_ns = {(rank.name, step.step_key): step.length.ns for rank in run.overlap.ranks for step in rank.steps}
    bare = {rank.name: median_or_zero(one.bare_ns) for rank, one in zip(run.analysis.ranks, run.facts, strict=True)}
    late = [
        (path, min(path.host_delay_ns, bare[path.rank]), lengths_ns.get((path.rank, path.step_key)) or path.path_ns)
        for path in run.critical.steps
    ]
    shares = sorted(ns / step_ns for _, ns, step_ns in late)
    if not shares or shares[len(shares) // 2] < _HOST_SHARE:
        return None
    cost = median_or_zero([ns for _, ns, _ in late])
    between = median_or_zero([max(0, step_ns - path.path_ns) for path, _, step_ns in late])
    whole = "a typical step" if run.analysis.has_steps else "the capture"
    where = "on the critical path" + (", or in the next step," if run.analysis.has_steps else "")
    return Finding(
        "launch-bound host",
        f"{shares[len(shares) // 2]:.0%} of {whole}, {cost / 1e6:.2f} ms, is the host with its launches: what came "
        f"next {where} could not begin before it was launched.",
        _LOAD_AHEAD if 2 * between > cost else _LAUNCH_LESS if run.analysis.has_steps else _MARK_STEPS,
        tuple(dict.fromkeys(path.rank for path, _, _ in late)),
        tuple(path.step for path, ns, step_ns in late if path.step is not None and ns >= _HOST_SHARE * step_ns),
        cost,
    )


def _name_late_hosts(
    run: RunEvidence, late: Iterable[int], whole: Iterable[int], evidence: str, advice: str
) -> Finding | None:
    """The finding about the ranks whose host is late for at least a quarter of the time; both times are per rank.

    ``evidence`` has places for the share and the time of the rank that is late most, for which the others wait.
    """
    of_ranks = zip(run.analysis.ranks, late, whole, strict=True)
    found = [(ns, ns / length, rank.name) for rank, ns, length in of_ranks if length and ns >= _HOST_SHARE * length]
    if not found:
        return None
    cost, share, _ = max(found)
    text = evidence.format(f"{share:.0%}", f"{cost / 1e6:.2f} ms")
    return Finding("launch-bound host", text, advice, tuple(name for *_, name in found), (), cost)


def _idle_between_steps(run: RunEvidence) -> Finding | None:
    if run.overlap.missing:  # what ran between steps may be what was not recorded
        return None
    between = [median_or_zero(facts.between_ns) for facts in run.facts]
    whole = [ns + median_or_zero(rank.lengths_ns) for ns, rank in zip(between, run.overlap.ranks, strict=True)]
    evidence = (
        "{} of the time from step to step, {}, lies between the ranges of steps. Nothing recorded runs in it, and the "
        "length of a step does not contain it."
    )
    return _name_late_hosts(run, between, whole, evidence, _LOAD_AHEAD)


def _starved_devices(run: RunEvidence) -> Finding | None:
    starved = [median_or_zero(facts.starved_ns) for facts in run.facts]
    lengths = [
        median_or_zero(rank.lengths_ns or [step.window_ns or 0 for step in rank.steps]) for rank in run.overlap.ranks
    ]
    whole = "a typical step" if run.analysis.has_steps else "the capture"
    evidence = f"For {{}} of {whole}, {{}}, the device was idle and its next work was not launched yet."
    return _name_late_hosts(run, starved, lengths, evidence, _LAUNCH_LESS if run.analysis.has_steps else _MARK_STEPS)


def _launch_bound_on_host(run: RunEvidence) -> Finding | Abstained | None:
    if not any(rank.comm_ns for rank in run.overlap.ranks):
        reason = next((rank.reason for rank in run.overlap.ranks if rank.reason != NO_COMMUNICATION), None)
        silent = f"{NO_COMMUNICATION}, which may be what the host does between its phases"
        return Abstained("launch-bound host", reason or silent)
    if not any(facts.outside_ns for facts in run.facts):
        return Abstained("launch-bound host", "no range tells when forward ran in a step")
    outside = [median_or_zero(facts.outside_ns) for facts in run.facts]
    lengths = [median_or_zero(rank.lengths_ns) for rank in run.overlap.ranks]
    evidence = (
        "{} of a typical step, {}, lies outside of forward, backward, synchronize, optimizer and communication: the "
        "host prepares work meanwhile."
    )
    return _name_late_hosts(run, outside, lengths, evidence, _LOAD_AHEAD)


def straggler(run: RunEvidence) -> Finding | Abstained | None:
    """The other ranks wait for one rank.

    Found if a rank arrives last more often than chance explains, and the step would be shorter without its lag.
    """
    if run.skew.reason:
        return Abstained("straggler", run.skew.reason)
    if run.skew.straggler is None:
        for rank in run.skew.ranks:
            if run.skew.steps and rank.last_steps == len(run.skew.steps):
                reason = f"{rank.name} arrives last in each of {rank.last_steps} steps, too few to exclude chance"
                return Abstained("straggler", reason)
        return None
    late, steps = run.skew.ranks[run.skew.straggler], len(run.skew.steps)
    cost = late.cost_when_last_ns
    if cost == 0:
        return None
    costs = "" if cost is None else f"; that costs another rank {cost / 1e6:.2f} ms in such a step"
    return Finding(
        "straggler",
        f"{late.name[:1].upper()}{late.name[1:]} arrives last in {late.last_steps} of {steps} steps, by "
        f"{(late.lag_when_last_ns or 0) / 1e6:.2f} ms (median){costs}.",
        "Compare its input, clocks, power limit and placement with the other ranks'.",
        (late.name,),
        (),
        cost,
    )


def graph_replay(run: RunEvidence) -> Finding | None:
    """CUDA graphs were recorded as a whole, so what they communicate is not in the trace.

    Found if the trace contains replays of graphs as single activities.
    """
    graphs = {
        rank.name: facts.graphs for rank, facts in zip(run.analysis.ranks, run.facts, strict=True) if facts.graphs
    }
    if not graphs:
        return None
    return Finding(
        "CUDA graphs recorded whole",
        f"{sum(graphs.values()):,} replays of CUDA graphs were recorded as one activity each.",
        "Record with nsys profile --cuda-graph-trace=node to see what they compute and communicate.",
        tuple(graphs),
    )


def profiler_overhead(run: RunEvidence) -> Finding | None:
    """The profiler itself takes so much time that it changes the figures.

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
        "overhead of the profiler",
        f"The profiler was at work in {max(found.values()):.0%} of the {whole}.",
        "Record fewer steps, without backtraces, sampling and memory usage (nsys: --cuda-flush-interval).",
        tuple(found),
    )
