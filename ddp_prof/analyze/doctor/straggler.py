"""A rank that arrives last: the others wait for it."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence

RULE = "straggler"


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where one rank arrives last more often than chance explains."""
    if run.skew.reason:
        return Abstained(RULE, run.skew.reason)
    if run.skew.straggler is None:
        return None
    late, steps = run.skew.ranks[run.skew.straggler], len(run.skew.steps)
    cost = round(late.cost_ns / max(1, steps))
    return Finding(
        RULE,
        f"{late.name[:1].upper()}{late.name[1:]} arrives last in {late.last_steps} of {steps} steps, by "
        f"{(late.lag_when_last_ns or 0) / 1e6:.2f} ms (median); that costs another rank {cost / 1e6:.2f} ms per step.",
        "Compare its input, clocks, power limit and placement with the other ranks'.",
        (late.name,),
        (),
        cost,
    )
