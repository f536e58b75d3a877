"""The doctor: rules that look for faults in the set-up of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddp_prof.analyze.doctor import buckets, communication, hosts
from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence
from ddp_prof.analyze.doctor.gains import with_expected_gain
from ddp_prof.analyze.why_unknown import NO_COMMUNICATION

ABOUT_COMMUNICATION = "all rules about communication"
"""Stands for all rules about communication where it is not known what communicated, or how much of it was overlapped.

So it does where a job has one rank. These rules find nothing then; a single :class:`Abstained` of this name says so for
all of them.
"""

ABOUT_GRADIENTS = "all rules about gradients"
"""Stands for all rules about gradients where nothing tells which collectives reduce them, likewise."""

ALONE = "the only rank of its job sends nothing to another one"

UNDECIDED_TOGETHER = (ABOUT_COMMUNICATION, ABOUT_GRADIENTS)

RULES: tuple[Callable[[RunEvidence], Finding | Abstained | None], ...] = (
    communication.compute_stream,
    buckets.after_backward,
    buckets.bucket_count,
    buckets.wait_in_backward,
    buckets.last_bucket,
    buckets.late_readiness,
    hosts.host_sync,
    hosts.launch_bound,
    hosts.straggler,
    hosts.uneven_compute,
    communication.time_without_size,
    buckets.bucket_copies,
    buckets.need_order,
    communication.one_communicator,
    communication.hardware_queue,
    buckets.unused_vote,
    communication.buffer_broadcast,
    communication.barrier,
    buckets.repeated_reduction,
    communication.net_gain,
    hosts.graph_replay,
    hosts.profiler_overhead,
)


@dataclass(frozen=True)
class Diagnosis:
    """The results of all rules for a run.

    Attributes:
        findings: What was found, most expensive first.
        abstained: The rules that could not decide.
    """

    findings: tuple[Finding, ...]
    abstained: tuple[Abstained, ...]


def diagnose_run(run: RunEvidence) -> Diagnosis:
    """Apply all rules to a run, and add to each finding the gain that is expected without it.

    What costs nothing is no finding.
    """
    is_alone = run.analysis.is_alone
    # Of the only rank of a job, only rules about its host can find anything.
    results = [rule(run) for rule in RULES if not is_alone or rule.__module__ == hosts.__name__]
    found = [with_expected_gain(run, one) for one in results if isinstance(one, Finding)]
    findings = sorted((one for one in found if not _costs_nothing(one)), key=lambda one: -(one.cost_ns or 0))
    abstained = [one for one in results if isinstance(one, Abstained)]
    if (reason := run.collectives.reason) not in (None, NO_COMMUNICATION):
        abstained.insert(0, Abstained(ABOUT_COMMUNICATION, reason))
    elif is_alone:
        abstained.insert(0, Abstained(ABOUT_COMMUNICATION, ALONE))
    elif run.why_no_gradients:
        abstained.insert(0, Abstained(ABOUT_GRADIENTS, run.why_no_gradients))
    return Diagnosis(tuple(findings), tuple(abstained))


def _costs_nothing(finding: Finding) -> bool:
    """Return whether, by the simulation, steps would be longer without what was found.

    Without a late rank they may also be as long, where another rank is as late. Other findings may be hidden now and
    cost something later.
    """
    least_ns = 1 if finding.rule == hosts.STRAGGLER else 0
    return finding.gain_high_ns is not None and finding.gain_high_ns < least_ns
