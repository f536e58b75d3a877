"""CUDA graphs replayed whole: what they communicate is not in the trace."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Finding, RunEvidence

RULE = "CUDA graphs recorded whole"


def examine(run: RunEvidence) -> Finding | None:
    """Found where a rank replays graphs of which the trace holds one activity each."""
    graphs = {
        rank.name: facts.graphs for rank, facts in zip(run.analysis.ranks, run.facts, strict=True) if facts.graphs
    }
    if not graphs:
        return None
    return Finding(
        RULE,
        f"{sum(graphs.values()):,} replays of CUDA graphs were recorded as one activity each.",
        "Record with nsys profile --cuda-graph-trace=node to see what they compute and communicate.",
        tuple(graphs),
    )
