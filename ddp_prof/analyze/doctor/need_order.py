"""The bucket that is needed first comes last: whatever needs it waits for all others, too."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, names_of, numbers_of, typical

RULE = "the last bucket is needed first"


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where in most steps that block the first consumer needs the collective that was launched last."""
    steps = [step for step in run.gradients_by_step.values() if len(step) > 1]
    if run.is_cpu or not steps:
        return None
    known = [step for step in steps if all(one.consumer is not None and one.blocking_ns is not None for one in step)]
    if 2 * len(known) <= len(steps):
        reason = next((rank.dependencies.reason for rank in run.overlap.ranks if rank.dependencies), None)
        return Abstained(RULE, reason or "it is not known what needs the collectives")
    found = []
    for step in known:
        first = min(step, key=lambda one: (one.consumer.start_ns if one.consumer else 0, one.index))
        alone = sum(one.consumer == first.consumer for one in step) == 1  # one consumer of all has no order
        if alone and first is step[-1] and (first.blocking_ns or 0) > 0:
            found.append(first)
    if 2 * len(found) <= len(known):
        return None
    cost = typical([one.blocking_ns or 0 for one in found])
    return Finding(
        RULE,
        f"In {len(found)} of {len(known)} steps what needs a collective first needs the one launched last, and stands "
        f"still for it for {cost / 1e6:.2f} ms.",
        "Launch first what is needed first, or let the first consumer wait for its own bucket only.",
        names_of(found),
        numbers_of(found),
        cost,
    )
