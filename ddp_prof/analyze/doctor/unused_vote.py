"""A small collective after the buckets of each step: the ranks agree on which parameters were used."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, names_of, numbers_of, typical

RULE = "vote on unused parameters"
_SMALL = 64 * 1024
_TIMES = 10


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where in most steps the last reduction is far smaller than all others."""
    steps = [step for step in run.gradients_by_step.values() if len(step) > 1]
    if not steps:
        return None
    if any(one.bytes is None for step in steps for one in step):
        return Abstained(RULE, "the trace does not tell the sizes of collectives")
    votes = []
    for *buckets, last in steps:
        size = last.bytes or 0
        if size <= _SMALL and _TIMES * size <= min(one.bytes or 0 for one in buckets):
            votes.append(last)
    if 2 * len(votes) <= len(steps):
        return None
    cost = typical([one.exposed_ns for one in votes])
    return Finding(
        RULE,
        f"In {len(votes)} of {len(steps)} steps a collective of {typical([one.bytes or 0 for one in votes]):,} bytes "
        f"follows the buckets, {cost / 1e6:.2f} ms of it exposed.",
        "Without find_unused_parameters it is left out; use it only where ranks leave parameters out.",
        names_of(votes),
        numbers_of(votes),
        cost,
    )
