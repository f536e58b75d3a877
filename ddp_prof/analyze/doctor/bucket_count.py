"""One collective per parameter, or one for all: too many to be quick, or none that could begin early."""

from __future__ import annotations

from ddp_prof.analyze.doctor.evidence import Finding, RunEvidence, names_of, numbers_of, typical

RULE_MANY = "one collective per parameter"
RULE_ONE = "one bucket for all gradients"
_MANY = 30
_SMALL_BYTES = 1 << 20
_EXPOSED = 0.5


def examine(run: RunEvidence) -> Finding | None:
    """Found where most steps have very many small reductions, or a single one that is mostly exposed."""
    steps = list(run.gradients_by_step.values())
    if not steps:
        return None
    counts = sorted(map(len, steps))
    count = counts[len(counts) // 2]
    everything = [one for step in steps for one in step]
    if count >= _MANY and _are_small(run):
        return Finding(
            RULE_MANY,
            f"A typical step reduces its gradients by {count} collectives"
            + (f" of {size / 1e6:.2f} MB each." if (size := _typical_bytes(run)) is not None else "."),
            "Put gradients into buckets of some MB: each collective costs its latency.",
            names_of(everything),
            numbers_of(everything),
        )
    exposed = typical([one.exposed_ns for one in everything])
    if count == 1 and exposed > _EXPOSED * typical([one.duration_ns for one in everything]):
        return Finding(
            RULE_ONE,
            f"One collective reduces all gradients of a step, and {exposed / 1e6:.2f} ms of it are exposed: it cannot "
            "begin before the last gradient is ready.",
            "Take several buckets (bucket_cap_mb), so that the first begin while backward computes.",
            names_of(everything),
            numbers_of(everything),
            exposed,
        )
    return None


def _typical_bytes(run: RunEvidence) -> int | None:
    sizes = [one.bytes for step in run.gradients_by_step.values() for one in step if one.bytes is not None]
    return typical(sizes) if sizes else None


def _are_small(run: RunEvidence) -> bool:
    size = _typical_bytes(run)
    return size is None or size < _SMALL_BYTES
