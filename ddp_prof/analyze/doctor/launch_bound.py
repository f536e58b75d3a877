"""A host that launches too slowly: the device waits for it."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, typical

RULE = "launch-bound host"
_SHARE = 0.25


def examine(run: RunEvidence) -> Finding | Abstained | None:
    """Found where the host and its launches are a quarter of the critical path, or of a CPU step outside of phases."""
    if run.is_cpu:
        return _on_host(run)
    if run.critical.reason:
        return Abstained(RULE, run.critical.reason)
    late = [(path, path.parts_ns["host"] + path.parts_ns["launch"]) for path in run.critical.steps]
    shares = [ns / path.window_ns for path, ns in late]
    if not shares or sorted(shares)[len(shares) // 2] < _SHARE:
        return None
    cost = typical([ns for _, ns in late])
    whole = "a typical step" if run.analysis.has_steps else "the capture"
    return Finding(
        RULE,
        f"{sorted(shares)[len(shares) // 2]:.0%} of the critical path of {whole}, {cost / 1e6:.2f} ms, is the "
        "host: the device had nothing to do until it launched.",
        "Fewer, larger kernels: torch.compile, CUDA graphs, a fused optimizer, larger batches; load data elsewhere.",
        tuple(dict.fromkeys(path.rank for path, _ in late)),
        tuple(path.step for path, ns in late if path.step is not None and ns >= _SHARE * path.window_ns),
        cost,
    )


def _on_host(run: RunEvidence) -> Finding | None:
    found = []
    for rank, facts, overlap in zip(run.analysis.ranks, run.facts, run.overlap.ranks, strict=True):
        step = typical(overlap.lengths_ns)
        outside = typical(list(facts.outside_ns))
        if step and outside >= _SHARE * step:
            found.append((rank.name, outside, outside / step))
    if not found:
        return None
    cost = typical([ns for _, ns, _ in found])
    return Finding(
        RULE,
        f"{max(share for _, _, share in found):.0%} of a typical step, {cost / 1e6:.2f} ms, lies outside of forward, "
        "backward, synchronize and optimizer: the host prepares work meanwhile.",
        "Load and move data in other processes, ahead of the step that needs it.",
        tuple(name for name, _, _ in found),
        (),
        cost,
    )
