"""A profiler that takes so much time itself that the figures are partly its own."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Finding, RunEvidence

RULE = "overhead of the profiler"
_SHARE = 0.05


def examine(run: RunEvidence) -> Finding | None:
    """Found where the profiler was at work in more than a twentieth of the steps' time."""
    found = {}
    for rank, facts, overlap in zip(run.analysis.ranks, run.facts, run.overlap.ranks, strict=True):
        window = sum(step.window_ns or 0 for step in overlap.marked_steps)
        if window and facts.overhead_ns > _SHARE * window:
            found[rank.name] = facts.overhead_ns / window
    if not found:
        return None
    return Finding(
        RULE,
        f"The profiler was at work in {max(found.values()):.0%} of the time of steps.",
        "Record fewer steps, without backtraces, sampling and memory usage (nsys: --cuda-flush-interval).",
        tuple(found),
    )
