"""A host that waits for the device between backward and its collectives: what it would launch next comes late."""

from __future__ import annotations

from itertools import pairwise

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, typical

RULE = "host synchronization in backward"
_WORTH = 0.01
"""Share of a step from which waiting is reported."""


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where in most steps the host waits between the first launch of backward and its last collective."""
    if run.is_cpu:
        return _on_host(run)
    if not all(facts.knows_syncs for facts in run.facts):
        return Abstained(RULE, "the trace does not hold the host's synchronizations")
    found = []
    for rank, facts, overlap in zip(run.analysis.ranks, run.facts, run.overlap.ranks, strict=True):
        window = typical([step.window_ns or 0 for step in overlap.communicating_steps])
        wait = typical(facts.sync_ns.tolist())
        if window and wait > _WORTH * window and 2 * int((facts.syncs > 0).sum()) > len(facts.syncs):
            found.append((rank.name, int(facts.syncs.sum()), wait))
    if not found:
        return None
    wait = typical([wait for _, _, wait in found])
    return Finding(
        RULE,
        f"The host waited for the device {sum(count for _, count, _ in found):,} times between the start of backward "
        f"and its last collective, {wait / 1e6:.2f} ms in a typical step.",
        "Move .item(), .cpu(), print and torch.cuda.synchronize() out of backward and its hooks.",
        tuple(name for name, _, _ in found),
        (),
        wait,
    )


def _on_host(run: RunEvidence) -> Finding | None:
    """On a CPU: collectives launched in backward of which each ended before the next one was launched.

    Where nothing waits, a collective of some length is in flight when the next gradient is ready.
    """
    blocked: dict[str, list[int]] = {}
    for step in run.gradients_by_step.values():
        hooks = [one for one in step if one.phase == "backward" and one.launch_ns is not None]
        if len(hooks) < 3 or len(hooks) < len(step):
            continue
        pairs = list(pairwise(hooks))
        soon = [after for before, after in pairs if (after.launch_ns or 0) - before.end_ns >= 0]
        if len(soon) == len(pairs):
            blocked.setdefault(hooks[0].name, []).append(sum(one.duration_ns for one in hooks))
    steps = len(run.gradients_by_step)
    if 2 * sum(map(len, blocked.values())) <= steps:
        return None
    wait = typical([wait for waits in blocked.values() for wait in waits])
    return Finding(
        RULE,
        f"In {sum(map(len, blocked.values()))} of {steps} steps each collective that backward launched had ended "
        f"before the next one was launched: they took {wait / 1e6:.2f} ms of a typical step.",
        "Launch collectives with async_op=True in the hooks, and wait for them after backward.",
        tuple(blocked),
        (),
        wait,
    )
