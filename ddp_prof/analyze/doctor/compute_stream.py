"""Communication on the stream of compute: nothing that follows on it can hide it."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Finding, RunEvidence, names_of, numbers_of, typical

RULE = "communication on the compute stream"


def examine(run: RunEvidence) -> Finding | None:
    """Found where more than half of the time of communication is on the stream that computes."""
    there = [one for one in run.collectives.collectives if one.blocking == "compute_stream"]
    total_ns = sum(one.duration_ns for one in run.collectives.collectives)
    own_ns = sum(one.duration_ns for one in there)
    if run.is_cpu or 2 * own_ns <= total_ns:
        return None
    ids = {id(one) for one in there}
    per_step = [sum(one.duration_ns for one in step if id(one) in ids) for step in run.by_step.values()]
    return Finding(
        RULE,
        f"{len(there):,} of {len(run.collectives.collectives):,} collectives ran on the stream of compute.",
        "Launch them with async_op=True, or on a stream of their own, and wait where their result is needed.",
        names_of(there),
        numbers_of(there),
        typical(per_step) if per_step else None,
    )
