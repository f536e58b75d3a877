"""Simulate a step of data-parallel training: backward, its collectives one after another, and what waits for them.

::

    compute      aaaa[1]bbbb[2]cccc[3]|22.33.rest     [k]: the last gradient of bucket k is ready
    collectives         111111.2222222333             a, b, c: backward, which ends at |
                                                      111, 222, 333: collectives of buckets 1, 2, 3
                                                      22, 33 after |: gradients of a bucket are copied out of it

- Backward goes on at ``1 - slowed`` of its speed beside a collective, else at full speed. *Work* is the time it would
  take without collectives: the times of gradients are amounts of work.
- A collective begins when its bucket is ready and the collective before it has ended. It takes
  ``overhead + bytes * per_byte``.
- When backward has ended, the gradients of each bucket are copied out of it, in order, as soon as it is reduced; copies
  are slowed as backward is. With ``gradient_as_bucket_view`` there is nothing to copy.
- What follows, such as the optimizer, waits for all of that and takes as long as it did.

With ``slowed`` 0 and n equal buckets, each computed in as long as it is transferred, the communication that is left
when backward ends is that of the course CS336 (spring 2025, *ddp_bucketed_benchmarking*): ``s / (n w) + n o``, for s
bytes of gradients, w bytes per time and an overhead o of each collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.table import Floats, Ints

Buckets = Sequence[Sequence[int]]
"""For each bucket, in the order of launch, the positions of its gradients."""


@dataclass(frozen=True)
class StepModel:
    """The work that steps of a rank consist of; times in nanoseconds, one row per step.

    *Work* is the time without the slowdown by collectives.

    Attributes:
        bytes: The size of each gradient, in the order in which gradients become ready; shape (gradients).
        ready_ns: The work from the begin of the step until each gradient is ready and a collective for it could begin;
            shape (steps, gradients).
        backward_ns: All work from the begin of the step to the end of backward; shape (steps).
        copy_ns: The work of copying each gradient out of its bucket, 0 with views; shape (steps, gradients).
        rest_ns: Time from the end of backward, collectives and copies to the end of the step; shape (steps).
    """

    bytes: Ints
    ready_ns: Floats
    backward_ns: Floats
    copy_ns: Floats
    rest_ns: Floats

    def without_copies(self) -> StepModel:
        return replace(self, copy_ns=np.zeros_like(self.copy_ns))


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How long a collective takes: ``overhead_ns + bytes * ns_per_byte``."""

    overhead_ns: float
    ns_per_byte: float


def simulate(model: StepModel, buckets: Buckets, link: LinkTimes, slowed: float, wire: float = 1.0) -> Floats:
    """Return the length of each step with these buckets, in nanoseconds; shape (steps).

    Args:
        model: The steps.
        buckets: Every gradient is in exactly one bucket.
        link: How long a collective takes.
        slowed: The fraction of the time beside a collective that compute loses, from 0 to less than 1:
            ``1 - 1 / kappa``, where kappa is how many times longer compute takes beside communication.
        wire: Bytes that are sent for each byte of a gradient, such as 0.5 for bf16.
    """
    speed = 1.0 - slowed
    free_ns = np.zeros_like(model.backward_ns)  # since when no collective runs
    done = np.zeros_like(free_ns)  # the work of backward that is done at ``free_ns``
    ended_ns = np.zeros_like(free_ns)  # when backward ended, in the steps where it has ended
    total = model.backward_ns
    ready = np.zeros_like(free_ns)
    ends, copies = [], []
    for bucket in buckets:
        first, last = bucket[0], bucket[-1]
        is_slice = last - first + 1 == len(bucket)  # consecutive gradients: a slice is faster than a list
        rows = slice(first, last + 1) if is_slice else list(bucket)
        ready = np.maximum(ready, model.ready_ns[:, rows].max(axis=1))
        # Backward runs alone until the bucket is ready, and perhaps ends meanwhile.
        alone = np.maximum(0.0, ready - done)
        ends_alone = (done < total) & (done + alone >= total)
        ended_ns = np.where(ends_alone, free_ns + total - done, ended_ns)
        start_ns, done = free_ns + alone, done + alone
        # The collective runs, and backward beside it at its lower speed; again it may end meanwhile.
        took_ns = link.overhead_ns + link.ns_per_byte * wire * float(model.bytes[rows].sum())
        left = np.maximum(0.0, total - done)
        beside = np.minimum(left, took_ns * speed)
        ended_ns = np.where((left > 0) & (beside == left), start_ns + left / speed, ended_ns)
        done, free_ns = done + beside, start_ns + took_ns
        ends.append(free_ns)
        copies.append(model.copy_ns[:, rows].sum(axis=1))
    # Behind the last collective, backward does the rest of its work alone.
    left = np.maximum(0.0, total - done)
    now_ns = np.where(left > 0, free_ns + left, ended_ns)
    # A bucket is copied out when its collective, backward and the copies before have ended; slowed until ``free_ns``,
    # the end of the last collective.
    for end_ns, copy in zip(ends, copies, strict=True):
        begin_ns = np.maximum(now_ns, end_ns)
        beside = np.minimum(copy, np.maximum(0.0, free_ns - begin_ns) * speed)
        now_ns = begin_ns + beside / speed + (copy - beside)
    return now_ns + model.rest_ns
