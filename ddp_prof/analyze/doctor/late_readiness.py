"""Gradients that become ready in another order than buckets are filled: all buckets are complete only at the end."""

from __future__ import annotations

import math

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, typical

RULE = "gradients ready in another order than buckets"
_LATE = 0.8
_LEAST_BUCKETS = 3


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where of several buckets the first one is launched only when backward is almost over."""
    hooks = [
        step
        for step in run.gradients_by_step.values()
        if len(step) >= _LEAST_BUCKETS and all(one.phase == "backward" for one in step[:-1])
    ]
    if 2 * len(hooks) <= len(run.gradients_by_step):
        return None  # nothing is launched in backward, or it is a single bucket: other rules say so
    late = {}
    for rank, facts in zip(run.analysis.ranks, run.facts, strict=True):
        shares = sorted(share for share in facts.first_share if not math.isnan(share))
        if shares and shares[len(shares) // 2] >= _LATE:
            late[rank.name] = shares[len(shares) // 2]
    if not any(not math.isnan(share) for facts in run.facts for share in facts.first_share):
        return Abstained(RULE, "the trace does not tell when backward began")
    if not late:
        return None
    exposed = typical([sum(one.exposed_ns for one in step) for step in hooks])
    return Finding(
        RULE,
        f"The first of {len(hooks[0])} buckets was launched when {max(late.values()):.0%} of backward were over: "
        f"{exposed / 1e6:.2f} ms of a typical step's communication are exposed.",
        "Register parameters in the order in which forward uses them, or let DDP rebuild its buckets: it does so after "
        "the first step unless find_unused_parameters is set.",
        tuple(late),
        (),
        exposed,
    )
