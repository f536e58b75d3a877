"""A single hardware queue: collectives that could begin wait for what was launched before them on other streams."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence

RULE = "single hardware queue"


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where most collectives begin only when an operation of another stream has ended."""
    if run.is_cpu or not run.collectives.collectives:
        return None
    if not any(facts.could_begin for facts in run.facts):
        reason = next((rank.dependencies.reason for rank in run.overlap.ranks if rank.dependencies), None)
        return Abstained(RULE, reason or "it is not known when collectives could have begun")
    late = [
        (rank.name, facts)
        for rank, facts in zip(run.analysis.ranks, run.facts, strict=True)
        if 2 * facts.serialized > facts.could_begin
    ]
    if not late:
        return None
    serialized, could = (sum(getattr(facts, name) for _, facts in late) for name in ("serialized", "could_begin"))
    return Finding(
        RULE,
        f"{serialized:,} of {could:,} collectives could have begun, but began only when an operation of another stream "
        "ended.",
        "Unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more: with 1 all streams share one queue.",
        tuple(name for name, _ in late),
    )
