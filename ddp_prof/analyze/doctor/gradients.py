"""Rules about how gradients are put into buckets and reduced."""

from __future__ import annotations

import math

from ddp_prof.analyze.doctor.evidence import (
    Abstained,
    Finding,
    RunEvidence,
    distinct_ranks,
    distinct_steps,
    median_or_zero,
)

_MANY, _SMALL_BYTES = 30, 1 << 20
"""So many collectives per step, each smaller than that, cost more latency than they hide."""
_MOSTLY_EXPOSED = 0.5
_LATE, _LEAST_BUCKETS = 0.8, 3
"""The first of so many buckets is late after this share of backward."""
_VOTE_BYTES, _VOTE_TIMES = 64 * 1024, 10
"""A vote is no larger, and so many times smaller than each bucket."""


def bucket_count(run: RunEvidence) -> Finding | None:
    """One collective per parameter, or one for all: too many to be quick, or none that could begin early.

    Found where most steps have very many small reductions, or a single one that is mostly exposed.
    """
    steps = list(run.gradients_by_step.values())
    if not steps:
        return None
    counts = sorted(map(len, steps))
    count = counts[len(counts) // 2]
    everything = [one for step in steps for one in step]
    sizes = [one.bytes for one in everything if one.bytes is not None]
    if count >= _MANY and (not sizes or median_or_zero(sizes) < _SMALL_BYTES):
        each = f" of {median_or_zero(sizes) / 1e6:.2f} MB each" if sizes else ""
        return Finding(
            "one collective per parameter",
            f"A typical step reduces its gradients by {count} collectives{each}.",
            "Put gradients into buckets of some MB: each collective costs its latency.",
            distinct_ranks(everything),
            distinct_steps(everything),
        )
    exposed = median_or_zero([one.exposed_ns for one in everything])
    if count == 1 and exposed > _MOSTLY_EXPOSED * median_or_zero([one.duration_ns for one in everything]):
        return Finding(
            "one bucket for all gradients",
            f"One collective reduces all gradients of a step, and {exposed / 1e6:.2f} ms of it are exposed: it cannot "
            "begin before the last gradient is ready.",
            "Take several buckets (bucket_cap_mb), so that the first begin while backward computes.",
            distinct_ranks(everything),
            distinct_steps(everything),
            exposed,
        )
    return None


def late_readiness(run: RunEvidence) -> Finding | Abstained | None:
    """Gradients that become ready in another order than buckets are filled: all buckets are complete only at the end.

    Found where of several buckets the first one is launched only when backward is almost over.
    """
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
        return Abstained("gradients ready in another order than buckets", "the trace does not tell when backward began")
    if not late:
        return None
    exposed = median_or_zero([sum(one.exposed_ns for one in step) for step in hooks])
    return Finding(
        "gradients ready in another order than buckets",
        f"The first of {len(hooks[0])} buckets was launched when {max(late.values()):.0%} of backward were over: "
        f"{exposed / 1e6:.2f} ms of a typical step's communication are exposed.",
        "Register parameters in the order in which forward uses them, or let DDP rebuild its buckets: it does so after "
        "the first step unless find_unused_parameters is set.",
        tuple(late),
        (),
        exposed,
    )


def bucket_copies(run: RunEvidence) -> Finding | Abstained | None:
    """Copies that need a collective's result before anything else does: gradients are copied out of their bucket.

    Found where most reductions of gradients are needed first by a memory copy.
    """
    gradients = [one for step in run.gradients_by_step.values() for one in step]
    if run.is_cpu or not gradients:
        return None
    needed = [one for one in gradients if one.consumer is not None]
    if 2 * len(needed) <= len(gradients):
        reason = next((rank.dependencies.reason for rank in run.overlap.ranks if rank.dependencies), None)
        return Abstained("copies out of buckets", reason or "it is not known what needs the collectives")
    copied = [one for one in needed if one.consumer and one.consumer.name.lower().startswith("memcpy")]
    if 2 * len(copied) <= len(needed):
        return None
    copies = median_or_zero(
        [step.exposed_memory_ns or 0 for rank in run.overlap.ranks for step in rank.communicating_steps]
    )
    return Finding(
        "copies out of buckets",
        f"{len(copied):,} of {len(needed):,} reductions of gradients are needed first by a memory copy; in a typical "
        f"step copies run alone for {copies / 1e6:.2f} ms.",
        "With DistributedDataParallel, gradient_as_bucket_view=True leaves these copies out.",
        distinct_ranks(copied),
        distinct_steps(copied),
        copies,
    )


def need_order(run: RunEvidence) -> Finding | Abstained | None:
    """The bucket that is needed first comes last: whatever needs it waits for all others, too.

    Found where in most steps that block the first consumer needs the collective that was launched last.
    """
    steps = [step for step in run.gradients_by_step.values() if len(step) > 1]
    if run.is_cpu or not steps:
        return None
    known = [step for step in steps if all(one.consumer is not None and one.blocking_ns is not None for one in step)]
    if 2 * len(known) <= len(steps):
        reason = next((rank.dependencies.reason for rank in run.overlap.ranks if rank.dependencies), None)
        return Abstained("the last bucket is needed first", reason or "it is not known what needs the collectives")
    found = []
    for step in known:
        first = min(step, key=lambda one: (one.consumer.start_ns if one.consumer else 0, one.index))
        alone = sum(one.consumer == first.consumer for one in step) == 1  # one consumer of all has no order
        if alone and first is step[-1] and (first.blocking_ns or 0) > 0:
            found.append(first)
    if 2 * len(found) <= len(known):
        return None
    cost = median_or_zero([one.blocking_ns or 0 for one in found])
    return Finding(
        "the last bucket is needed first",
        f"In {len(found)} of {len(known)} steps what needs a collective first needs the one launched last, and stands "
        f"still for it for {cost / 1e6:.2f} ms.",
        "Launch first what is needed first, or let the first consumer wait for its own bucket only.",
        distinct_ranks(found),
        distinct_steps(found),
        cost,
    )


def unused_vote(run: RunEvidence) -> Finding | Abstained | None:
    """A small collective after the buckets of each step: the ranks agree on which parameters were used.

    Found where in most steps the last reduction is far smaller than all others.
    """
    steps = [step for step in run.gradients_by_step.values() if len(step) > 1]
    if not steps:
        return None
    if any(one.bytes is None for step in steps for one in step):
        return Abstained("vote on unused parameters", "the trace does not tell the sizes of collectives")
    votes = []
    for *buckets, last in steps:
        size = last.bytes or 0
        if size <= _VOTE_BYTES and _VOTE_TIMES * size <= min(one.bytes or 0 for one in buckets):
            votes.append(last)
    if 2 * len(votes) <= len(steps):
        return None
    cost = median_or_zero([one.exposed_ns for one in votes])
    return Finding(
        "vote on unused parameters",
        f"In {len(votes)} of {len(steps)} steps a collective of "
        f"{median_or_zero([one.bytes or 0 for one in votes]):,} bytes "
        f"follows the buckets, {cost / 1e6:.2f} ms of it exposed.",
        "Without find_unused_parameters it is left out; use it only where ranks leave parameters out.",
        distinct_ranks(votes),
        distinct_steps(votes),
        cost,
    )
