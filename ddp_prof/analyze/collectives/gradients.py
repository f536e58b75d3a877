"""Which collectives reduce gradients, which of these are votes and no buckets, and whether they are many and small."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.collectives.timing import PLACES, RankCollectives
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, MAY_REDUCE, first_by_step
from ddp_prof.communication import NOTIFY, OPERATIONS, REDUCE, REDUCE_SCATTER
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, Mask, distinct_rows

SHARDING_OPERATIONS = (REDUCE_SCATTER, REDUCE)
SHARDING = tuple(map(OPERATIONS.index, SHARDING_OPERATIONS))
"""Operations, by name and by number, after which not all ranks have all gradients.

DeepSpeed reduces each bucket to the rank that needs it.
"""

NUMBER_BYTES = 8
"""Largest size of a single number."""

_MANY, _SMALL_BYTES = 30, 1 << 20
"""Number of a pass's reductions from which on, and size below which, they are many and small."""

_VOTE_BYTES, _VOTE_TIMES = 64 * 1024, 10
"""The vote on unused parameters, an all-reduce behind the buckets, has at most this number of bytes, and each bucket is
at least this many times as large."""


def carry_gradients(rank: RankCollectives) -> Mask:
    """Return a mask of the collectives of a rank that seem to reduce gradients.

    These are reductions with a known bucket, and reductions launched in backward. A reduction launched after backward
    counts only if backward never launches one of gradients on this rank; otherwise it reduces a norm or a loss, also in
    a step of an accumulation whose backward reduces nothing, or parameters after the optimizer. It does not count if it
    is a single number, as NCCL's barrier is.
    Exceptions:

    - If at least half as many reductions of the same kind as these were launched before backward of the same step,
      reductions of this kind reduce activations (tensor parallelism). Fewer, or single numbers, may reduce a loss.
    - If no phase is known, as in a trace of inference, no reduction is assumed to reduce gradients.
    """
    timings = rank.timings
    # A kind is an operation of a communicator in a step. `is_late`: backward launches none but of activations.
    is_reduction = np.isin(timings.operation, MAY_REDUCE)
    _, step = distinct_rows(timings.step)
    _, same_kind = distinct_rows(timings.step, timings.operation, timings.group)
    knows_backward = timings.backward_end_ns != NO_TIME
    tells_phase = (timings.phase != UNKNOWN) & (timings.operation != OPERATIONS.index(NOTIFY))
    in_backward = timings.phase == BACKWARD_PHASE
    is_number = (timings.bytes != UNKNOWN) & (timings.bytes <= NUMBER_BYTES)
    first_ns = first_by_step(timings.launch_ns[in_backward], step[in_backward], int(step.max(initial=-1)) + 1)
    is_early = (timings.launch_ns < first_ns[step]) & _are_with_any(step, in_backward)
    is_early |= timings.place == PLACES.index("before_backward")
    is_early &= (timings.phase == UNKNOWN) & (timings.launch_ns != NO_TIME)
    is_early |= timings.phase == PHASES.index(FORWARD)
    early = np.bincount(same_kind[is_early & ~is_number], minlength=len(same_kind))[same_kind]

    def of_activations(may_be_gradients: Mask) -> Mask:
        """Whether at least half as many of a collective's kind were launched early."""
        late = np.bincount(same_kind[may_be_gradients], minlength=len(same_kind))[same_kind]
        return (early > 0) & (2 * early >= late)

    is_late = ~is_early & ~is_number & (timings.place != PLACES.index("after_optimizer"))
    is_late &= ~np.any(is_reduction & in_backward & ~of_activations(in_backward))
    may_be_gradients = in_backward | is_late
    may_be_gradients &= ~of_activations(may_be_gradients) & _are_with_any(step, knows_backward | tells_phase)
    found: Mask = is_reduction & ((timings.bucket != UNKNOWN) | may_be_gradients)
    return found


def are_votes(sizes: Ints, buckets: Ints) -> Mask:
    """Return which collectives of known sizes are votes and no buckets, beside a bucket of a known size each; bytes."""
    votes: Mask = (sizes <= _VOTE_BYTES) & (_VOTE_TIMES * sizes <= buckets)
    return votes


def are_many_and_small(count: int, sizes: Ints) -> bool:
    """Return whether a pass of backward has so many reductions of gradients, and so small ones, that latency adds up.

    ``count`` is their number, and ``sizes`` those that are known of their bytes.
    """
    return count >= _MANY and (not len(sizes) or float(np.median(sizes)) < _SMALL_BYTES)


def _are_with_any(group: Ints, chosen: Mask) -> Mask:
    """Return a mask of the rows whose group contains a chosen row."""
    found: Mask = (np.bincount(group[chosen], minlength=int(group.max(initial=-1)) + 1) > 0)[group]
    return found
