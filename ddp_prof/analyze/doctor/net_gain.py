"""Compute that slows down so much beside communication that hiding it gains nothing."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, names_of, typical

RULE = "overlap without gain"


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where the slowdown of compute beside communication takes back what hiding it saved."""
    if run.is_cpu:
        return None
    steps = [step for rank in run.overlap.ranks for step in rank.communicating_steps]
    hidden = typical([step.overlapped_ns for step in steps if step.overlapped_ns is not None])
    if not hidden:
        return None
    found, part = run.contention, ""
    if run.compared_files:
        part = "kernels of {} of {} traces were compared: ".format(*run.compared_files)
    if found is None or found.contention_ns is None:
        return Abstained(RULE, part + (found.reason if found and found.reason else "kernels were not compared"))
    gain = hidden - found.contention_ns
    if gain > 0:
        return Abstained(RULE, f"{part}in these overlap gains time") if part else None
    return Finding(
        RULE,
        f"Communication hides {hidden / 1e6:.2f} ms in a typical step, and slows compute beside it by "
        f"{found.contention_ns / 1e6:.2f} ms: a net gain of {gain / 1e6:.2f} ms.",
        "Let collectives take fewer multiprocessors (NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS), or overlap less.",
        names_of(list(run.collectives.collectives)),
        (),
        -gain,
    )
