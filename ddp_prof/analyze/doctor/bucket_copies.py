"""Copies that need a collective's result before anything else does: gradients are copied out of their bucket."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, names_of, numbers_of, typical

RULE = "copies out of buckets"


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where most reductions of gradients are needed first by a memory copy."""
    gradients = [one for step in run.gradients_by_step.values() for one in step]
    if run.is_cpu or not gradients:
        return None
    needed = [one for one in gradients if one.consumer is not None]
    if 2 * len(needed) <= len(gradients):
        reason = next((rank.dependencies.reason for rank in run.overlap.ranks if rank.dependencies), None)
        return Abstained(RULE, reason or "it is not known what needs the collectives")
    copied = [one for one in needed if one.consumer and one.consumer.name.lower().startswith("memcpy")]
    if 2 * len(copied) <= len(needed):
        return None
    copies = typical([step.exposed_memory_ns or 0 for rank in run.overlap.ranks for step in rank.communicating_steps])
    return Finding(
        RULE,
        f"{len(copied):,} of {len(needed):,} reductions of gradients are needed first by a memory copy; in a typical "
        f"step copies run alone for {copies / 1e6:.2f} ms.",
        "With DistributedDataParallel, gradient_as_bucket_view=True leaves these copies out.",
        names_of(copied),
        numbers_of(copied),
        copies,
    )
