"""How much shorter a typical step would be without the cause of a finding, by a simulation.

The finding itself has an upper limit of that; see ``Finding.cost_ns``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np

from ddp_prof.analyze.collectives.gradients import carry_gradients
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.critical.critical_path import COMMON_QUEUE, COPIES, HOST_WAITS
from ddp_prof.analyze.critical.what_if import Gain, gain_of_steps, unknown_gain
from ddp_prof.analyze.doctor.buckets import BUCKET_COPIES, UNUSED_VOTE
from ddp_prof.analyze.doctor.communication import (
    BARRIER_IN_STEP,
    BUFFER_BROADCAST,
    HARDWARE_QUEUE,
    are_barriers,
    are_broadcasts_in_forward,
)
from ddp_prof.analyze.doctor.evidence import Finding, RunEvidence
from ddp_prof.analyze.doctor.hosts import HOST_SYNC, STRAGGLER
from ddp_prof.analyze.statistics import FEW_STEPS
from ddp_prof.table import UNKNOWN, Mask, begins_run, distinct

_MOST_REPLAYS = 32
"""A lag is replayed for at most this number of choices of late ranks."""

NOT_SIMULATED = "the trace does not tell what else this change would affect"
NO_QUEUE = "what was launched before the collectives began before they could, so no queue of all streams held them up"
NO_LAUNCH = "it is not known when collectives were launched, so neither is what queued behind those that waited"
NO_BOUND = "the trace does not tell how much of a step this costs"
MODEL_ERROR = 0.19
"""The error of a replayed gain against the gain that another capture then measured, as a fraction of the gain.

It was measured for six changes of a setting between captures of one job, a U-Net on four A100: gains of 0.61 ms were
missed by 0.115 ms (both root mean square). The error includes what a replay does not know, such as what else a setting
changes, and what differs between two runs.
"""


def with_expected_gain(run: RunEvidence, finding: Finding) -> Finding:
    """Return the finding with the simulated gain, which is limited to the cost of the finding."""
    simulate = SIMULATED.get(finding.rule)
    gain = unknown_gain(NOT_SIMULATED) if simulate is None else simulate(run)
    if finding.cost_ns is None:
        finding = replace(finding, cost_reason=NO_BOUND)
    if gain.ns is None:
        return replace(finding, gain_reason=gain.reason)
    if simulate is _without_straggler and finding.cost_ns is not None:
        # The cost is the exposed time for which other ranks wait. But a replay also knows that collectives that wait
        # slow the compute beside them, so its gain may be larger, though not than all time for which they wait.
        most_ns = min(max(gain.ns, gain.high_ns or 0), _mean_of_longest_waits(run))
        finding = replace(finding, cost_ns=max(finding.cost_ns, most_ns))
    wider = _with_model_error(gain)

    def bounded(ns: int | None) -> int | None:
        """Limit a gain to the cost of the finding."""
        return ns if ns is None or finding.cost_ns is None else min(ns, finding.cost_ns)

    return replace(
        finding,
        expected_gain_ns=bounded(max(0, gain.ns)),
        gain_low_ns=bounded(wider.low_ns),
        gain_high_ns=bounded(wider.high_ns),
        gain_reason=FEW_STEPS if gain.low_ns is None else None,
    )


def _with_model_error(gain: Gain) -> Gain:
    """Return the gain with an interval that also includes the error of replays; before, it reflects one recording."""
    if gain.ns is None or gain.low_ns is None or gain.high_ns is None:
        return gain
    missed_ns = 1.96 * MODEL_ERROR * gain.ns
    return replace(
        gain,
        low_ns=round(gain.ns - math.hypot(gain.ns - gain.low_ns, missed_ns)),
        high_ns=round(gain.ns + math.hypot(gain.high_ns - gain.ns, missed_ns)),
    )


def _without_straggler(run: RunEvidence) -> Gain:
    """Return the gain without the lag of the straggler, or of the ranks that are late together, or in turns.

    It is the mean over all steps, as they may be late in some of them only. It is replayed or, where dependencies are
    not known, what their lag costs (``run.skew``). So it is where other ranks are late in almost every one of many
    steps: each choice of late ranks would take a replay of its own. And so it is where a replay gains clearly more than
    all time for which collectives wait, as where ranks share a GPU in turns: a collective that begins later on one rank
    ends later there, too, and did not wait.
    """
    skew = run.skew
    late: Mapping[int, tuple[int, ...]] = skew.in_turns.ranks if skew.in_turns else {}
    surely: Collection[int] = ()
    if skew.late_ranks:
        late = {step.step: skew.late_ranks for step in skew.steps}
        last = [step.step for step in skew.steps if step.last == skew.straggler]
        surely = {*(skew.group.keys if skew.group else last)}
    if len(set(late.values())) <= _MOST_REPLAYS:
        gain = run.what_if.without_lag(lambda key: late.get(key, ()), surely)
        if gain.ns is not None and gain.ns <= (1 + MODEL_ERROR) * _mean_of_longest_waits(run):
            return gain
    if not run.knows_queues:
        return unknown_gain(NO_LAUNCH)
    if skew.in_turns:
        return gain_of_steps(skew.in_turns.costs_ns, is_mean=True)
    if skew.costs_ns is None:
        return unknown_gain(skew.reason or "what others expose is not known")
    return gain_of_steps(skew.costs_ns, is_mean=True)


def _mean_of_longest_waits(run: RunEvidence) -> int:
    """Return for how long (ns) collectives wait for peers in a mean step, on the rank where they wait longest.

    Late ranks do not count.
    """
    ranks = enumerate(zip(run.analysis.ranks, run.analysis.waits_ns, strict=True))
    of_ranks = [
        int(np.maximum(0, waits_ns[rank.keys != UNKNOWN]).sum())
        for index, (rank, waits_ns) in ranks
        if index not in run.skew.late_ranks
    ]
    return max(of_ranks, default=0) // max(1, len(run.skew.steps))


def _are_votes(rank: RankCollectives) -> Mask:
    """Return which collectives are the last reduction of their pass of backward: votes on unused parameters."""
    timings = rank.timings
    rows = np.flatnonzero(carry_gradients(rank) & (timings.step != UNKNOWN))
    found = np.zeros(len(timings), np.bool_)
    if len(rows):
        # A row is the last one of its pass if the next row begins another pass.
        found[rows[np.append(begins_run(timings.step[rows], timings.backward_end_ns[rows])[1:], True)]] = True
    return found


def _without_copies(run: RunEvidence) -> Gain:
    """Return the gain without copies out of buckets in a typical step that reduces gradients; others copy none."""
    reducing = [rank.keys[carry_gradients(rank)] for rank in run.analysis.ranks]
    return run.what_if.without(COPIES, {*distinct(np.concatenate(reducing))})


def _without_common_queue(run: RunEvidence) -> Gain:
    return run.what_if.without(COMMON_QUEUE) if run.what_if.knows(COMMON_QUEUE) else unknown_gain(NO_QUEUE)


SIMULATED: Mapping[str, Callable[[RunEvidence], Gain]] = {
    BUCKET_COPIES: _without_copies,
    HOST_SYNC: lambda run: run.what_if.without(HOST_WAITS),
    HARDWARE_QUEUE: _without_common_queue,
    STRAGGLER: _without_straggler,
    UNUSED_VOTE: lambda run: run.what_if.without_collectives(_are_votes),
    BUFFER_BROADCAST: lambda run: run.what_if.without_collectives(are_broadcasts_in_forward),
    BARRIER_IN_STEP: lambda run: run.what_if.without_collectives(are_barriers),
}
"""For the name of a rule, the function that replays the recorded steps without the cause of its finding.

The causes of other rules cannot be left out of a replay: without them, steps would have another schedule.
"""
