"""All rules of the doctor, and what they say of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddp_prof.analyze.doctor import (
    bucket_copies,
    bucket_count,
    compute_stream,
    graph_replay,
    hardware_queue,
    host_sync,
    late_readiness,
    launch_bound,
    need_order,
    net_gain,
    one_communicator,
    profiler_overhead,
    straggler,
    unused_vote,
)
from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence

RULES: tuple[Callable[[RunEvidence], Finding | Abstained | None], ...] = (
    compute_stream.examine,
    bucket_count.examine,
    late_readiness.examine,
    host_sync.examine,
    launch_bound.examine,
    straggler.examine,
    bucket_copies.examine,
    need_order.examine,
    one_communicator.examine,
    hardware_queue.examine,
    unused_vote.examine,
    net_gain.examine,
    graph_replay.examine,
    profiler_overhead.examine,
)


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of a run.

    Attributes:
        findings: What was found, what costs most first; empty where nothing was.
        abstained: The rules that the traces do not let decide.
    """

    findings: tuple[Finding, ...]
    abstained: tuple[Abstained, ...]


def diagnose_run(run: RunEvidence) -> Diagnosis:
    """Ask every rule."""
    said = [rule(run) for rule in RULES]
    findings = sorted((one for one in said if isinstance(one, Finding)), key=lambda one: -(one.cost_ns or 0))
    return Diagnosis(tuple(findings), tuple(one for one in said if isinstance(one, Abstained)))
