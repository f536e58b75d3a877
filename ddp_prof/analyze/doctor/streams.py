"""Rules about what communication runs beside, and what it queues behind."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.collectives.timing import BLOCKING
from ddp_prof.analyze.core.collective_ranges import OPERATIONS
from ddp_prof.analyze.doctor.evidence import (
    Abstained,
    Finding,
    RunEvidence,
    median_or_zero,
)
from ddp_prof.table import NO_TIME, UNKNOWN

_COMPUTE_STREAM = BLOCKING.index("compute_stream")
_GATHER, _SCATTER = OPERATIONS.index("all_gather"), OPERATIONS.index("reduce_scatter")


def compute_stream(run: RunEvidence) -> Finding | None:
    """Communication on the stream of compute: nothing that follows on it can hide it.

    Found where more than half of the time of communication is on the stream that computes.
    """
    timings = [rank.timings for rank in run.analysis.ranks]
    lengths_ns = [of_rank.end_ns - of_rank.start_ns for of_rank in timings]
    there = [of_rank.blocking == _COMPUTE_STREAM for of_rank in timings]
    own_ns = [np.where(rows, length_ns, 0) for rows, length_ns in zip(there, lengths_ns, strict=True)]
    total_ns = sum(int(length_ns.sum()) for length_ns in lengths_ns)
    if run.is_cpu or 2 * sum(int(own.sum()) for own in own_ns) <= total_ns:
        return None
    per_step = [ns for of_rank, own in zip(timings, own_ns, strict=True) for ns in of_rank.sum_by_step(own)[1].tolist()]
    found = [one for one in run.collectives.collectives if one.blocking == "compute_stream"]
    return Finding(
        "communication on the compute stream",
        f"{len(found):,} of {len(run.collectives.collectives):,} collectives ran on the stream of compute.",
        "Launch them with async_op=True, or on a stream of their own, and wait where their result is needed.",
        tuple(dict.fromkeys(one.name for one in found)),
        tuple(sorted({one.step for one in found if one.step is not None})),
        median_or_zero(per_step) if per_step else None,
    )


def one_communicator(run: RunEvidence) -> Finding | None:
    """One communicator that runs gathers and scatters one after the other, though they need not wait for each other.

    Found where gathers and scatters of one stream wait for one another in most steps.
    """
    if run.is_cpu:
        return None
    found, waits, ranks = 0, [], []
    for rank in run.analysis.ranks:
        timings = rank.timings
        rows = np.flatnonzero(np.isin(timings.operation, (_GATHER, _SCATTER)) & (timings.launch_ns != NO_TIME))
        rows = rows[np.lexsort((timings.start_ns[rows], timings.lane[rows]))]
        if len(rows) < 2:
            continue
        before, after = rows[:-1], rows[1:]
        differs = timings.operation[before] != timings.operation[after]
        differs &= timings.lane[before] == timings.lane[after]
        could_ns = np.maximum(timings.launch_ns[after], timings.start_ns[before])
        queued = np.where(differs, np.maximum(0, timings.end_ns[before] - could_ns), 0)
        step = timings.step[after]
        per_step = [int(queued[step == one].sum()) for one in np.unique(step[step != UNKNOWN])]
        if per_step and np.median(per_step) > 0:
            found += int((queued > 0).sum())
            waits += per_step
            ranks.append(rank.name)
    if not ranks:
        return None
    return Finding(
        "one communicator serializes gathers and scatters",
        f"{found:,} gathers and scatters waited behind one of the other kind on their stream, for "
        f"{median_or_zero(waits) / 1e6:.2f} ms of a typical step.",
        "Give all-gathers and reduce-scatters communicators of their own.",
        tuple(ranks),
        (),
        median_or_zero(waits),
    )


def hardware_queue(run: RunEvidence) -> Finding | Abstained | None:
    """A single hardware queue: collectives that could begin wait for what was launched before them on other streams.

    Found where most collectives begin only when an operation of another stream has ended.
    """
    if run.is_cpu or not any(len(rank.timings) for rank in run.analysis.ranks):
        return None
    if not any(facts.could_begin for facts in run.facts):
        reason = next((rank.dependencies.reason for rank in run.overlap.ranks if rank.dependencies), None)
        return Abstained("single hardware queue", reason or "it is not known when collectives could have begun")
    late = [
        (rank.name, facts)
        for rank, facts in zip(run.analysis.ranks, run.facts, strict=True)
        if 2 * facts.serialized > facts.could_begin
    ]
    if not late:
        return None
    serialized, could = (sum(getattr(facts, name) for _, facts in late) for name in ("serialized", "could_begin"))
    return Finding(
        "single hardware queue",
        f"{serialized:,} of {could:,} collectives could have begun, but began only when an operation of another stream "
        "ended.",
        "Unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more: with 1 all streams share one queue.",
        tuple(name for name, _ in late),
    )


def net_gain(run: RunEvidence) -> Finding | Abstained | None:
    """Compute that slows down so much beside communication that hiding it gains nothing.

    Found where the slowdown of compute beside communication takes back what hiding it saved.
    """
    if run.is_cpu:
        return None
    steps = [step for rank in run.overlap.ranks for step in rank.communicating_steps]
    hidden = median_or_zero([step.overlapped_ns for step in steps if step.overlapped_ns is not None])
    if not hidden:
        return None
    part = "kernels of {} of {} traces were compared: ".format(*run.compared_files) if run.compared_files else ""
    contention_ns = run.most_contention_ns
    if contention_ns is None or contention_ns >= hidden:
        found = run.contention()
        if found.contention_ns is None:
            return Abstained("overlap without gain", part + (found.reason or "kernels were not compared"))
        contention_ns = found.contention_ns
    gain = hidden - contention_ns
    if gain > 0:
        return Abstained("overlap without gain", f"{part}in these overlap gains time") if part else None
    return Finding(
        "overlap without gain",
        f"Communication hides {hidden / 1e6:.2f} ms in a typical step, and slows compute beside it by "
        f"{contention_ns / 1e6:.2f} ms: a net gain of {gain / 1e6:.2f} ms.",
        "Let collectives take fewer multiprocessors (NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS), or overlap less.",
        tuple(dict.fromkeys(rank.name for rank in run.analysis.ranks if len(rank.timings))),
        (),
        -gain,
    )
