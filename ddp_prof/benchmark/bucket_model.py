"""Predicts the communication that is left when backward ends (the tail) from a model's buckets.

See ``docs/bucket_size.md``. A message of s bytes takes ``t(s) = o + s / w``: an overhead o per call and a bandwidth w,
which :mod:`.findings` fits. Gradients become ready from the last parameter to the first, in proportion to the matrix
products of backward. The embedding has none, and its gradient is ready at the end. A bucket is sent when its last
gradient is ready and the link is free. Time runs to the right, h is the head, 4 to 1 are blocks, e is the embedding, a
dot is no work::

    backward     hhhhhh44332211.                  computes gradients
    buckets      .....|hhhhhhh|43|21|eeeeee       are on the link
    tail                        ______            from the end of backward

What is sent while backward computes takes ``slowdown`` times as long as alone, if captures show it: on a CPU, for
example, ranks and gloo share the cores. The slowdown is the communication time of captures over the time that the link
alone would take.

The course CS336 (spring 2025, assignment 2, *ddp_bucketed_benchmarking*) divides the s bytes into n equal buckets whose
backward takes as long as their transfer, s / (n w). Then ``s / (n w) + n o`` is left, which is least for buckets of
``sqrt(s o w)`` bytes. This formula is used for a model whose parameters are not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddp_prof.benchmark.settings import SettingSummary
from ddp_prof.bucket_assignment import Float32, assign_buckets, bucket_bytes
from ddp_prof.columns import milliseconds, percent
from ddp_prof.train import MODEL_SIZES
from ddp_prof.variants import BASELINE, BYTES_PER_MB

Workload = tuple[int, int]
"""Sequences per step of one rank, and tokens of a sequence."""
CURVE_MB = tuple(float(mb) for mb in np.geomspace(0.25, 4096, 113))
"""The bucket sizes in MiB that are tried to find the best one, and that are drawn."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The fitted time of an all-reduce, ``overhead_ns + bytes / bytes_per_ns``; 1 byte/ns is 1 GB/s.

    ``sizes`` is the number of message sizes to which it was fitted.
    """

    overhead_ns: float
    bytes_per_ns: float
    sizes: int
    relative_error: float  # median over the sizes, as a share of the measured time

    @property
    def text(self) -> str:
        overhead = milliseconds(round(self.overhead_ns))
        return f"an all-reduce takes {overhead} per call plus its bytes at {self.bytes_per_ns:.3g} GB/s"

    def time_ns(self, size: float) -> float:
        """Return the time of a message of ``size`` bytes."""
        return self.overhead_ns + size / self.bytes_per_ns


@dataclass(frozen=True, slots=True)
class BucketModel:
    """Predicts the tail for a bucket size on one testbed.

    Attributes:
        link: The fitted time of an all-reduce by its bytes.
        gradient_bytes: Bytes of all gradients.
        counts: Number of elements of each parameter, in the order of ``parameters()``; empty if not known.
        backward_ns: Length of backward without communication at the same time, by workload.
        slowdown: How many times as long a transfer takes while backward computes; ``None`` if no capture shows it.
    """

    link: LinkModel
    gradient_bytes: int
    counts: tuple[int, ...] = ()
    backward_ns: Mapping[Workload, float] = field(default_factory=dict)
    slowdown: float | None = None

    @property
    def course_best_bytes(self) -> float:
        """The bucket size in bytes with the smallest tail by the course's formula, at most all gradients."""
        best = math.sqrt(self.gradient_bytes * self.link.overhead_ns * self.link.bytes_per_ns)
        return min(best, float(self.gradient_bytes))

    @property
    def best_mb(self) -> float:
        """The smallest bucket size in MiB whose mean tail over workloads is at most 1 % above the least one."""
        left = [self.mean_ns(mb) for mb in CURVE_MB]
        return next(mb for mb, ns in zip(CURVE_MB, left, strict=True) if ns <= 1.01 * min(left))

    def mean_ns(self, mb: float) -> float:
        """Return the predicted tail for a bucket size, as the mean over the workloads whose backward is known."""
        workloads: Sequence[Workload | None] = [*self.backward_ns] or [None]
        return float(np.mean([self.expected_ns(mb, workload) for workload in workloads]))

    def buckets(self, mb: float) -> list[tuple[float, float]]:
        """Return the buckets of a bucket size in MiB, in the order of launch.

        Each is a pair of its bytes and the fraction of backward (0 to 1) after which its last gradient is ready.
        """
        if not self.counts:  # equal buckets, as in the course's formula
            count = math.ceil(self.gradient_bytes / (mb * BYTES_PER_MB))
            return [(self.gradient_bytes / count, (index + 1) / count) for index in range(count)]
        # Backward's work for each parameter, none for the embedding, the first one; summed up from the last parameter.
        computed = [0, *self.counts[1:]]
        ready = np.cumsum(computed[::-1])[::-1] / sum(computed)
        assigned = assign_buckets([Float32(count) for count in self.counts], mb * BYTES_PER_MB)
        # The gradient of a bucket's first parameter is ready last. An element has 4 bytes.
        return [(sum(4 * self.counts[at] for at in bucket), float(ready[min(bucket)])) for bucket in assigned]

    def expected_ns(self, mb: float, workload: Workload | None = None, *, contended: bool = True) -> float:
        """Return the predicted tail in nanoseconds: the communication that is left when backward ends.

        A backward of unknown length is assumed to take as long as the transfer of all bytes.

        Args:
            mb: The bucket size in MiB.
            workload: The workload; ``None``: backward's length is not known.
            contended: Whether transfers are slower while backward computes.
        """
        buckets = self.buckets(mb)
        slowdown = (self.slowdown or 1.0) if contended else 1.0
        known_ns = self.backward_ns.get(workload) if workload and self.counts else None
        backward_ns = known_ns or self.gradient_bytes / self.link.bytes_per_ns
        # Send the buckets one after another. Times count from the start of backward; the link is free at ``free_ns``.
        free_ns = 0.0
        for size, ready in buckets:
            left_ns, free_ns = self.link.time_ns(size), max(free_ns, ready * backward_ns)
            # The transfer takes ``left_ns`` alone. In ``beside_ns``, while backward computes, ``beside_ns / slowdown``
            # of it gets done; the rest follows after the end of backward.
            beside_ns = min(slowdown * left_ns, max(0.0, backward_ns - free_ns))
            free_ns += beside_ns + left_ns - beside_ns / slowdown
        return free_ns - backward_ns


def make_model(link: LinkModel, summaries: Sequence[SettingSummary]) -> BucketModel:
    """Return the model for a testbed, from its fitted link and the summaries of its settings.

    Backward's length comes from the runs of ``naive``, which communicates only after backward.
    """
    run = summaries[0].first
    size = MODEL_SIZES.get(run.model_size)
    is_known = size is not None and size.gradient_bytes() == run.gradient_bytes
    counts = size.parameter_counts if size is not None and is_known else ()
    backward = {
        one.setting.workload: one.backward_ns.value
        for one in summaries
        if one.setting.variant == BASELINE and one.backward_ns
    }
    return BucketModel(link, run.gradient_bytes, counts, backward, _slowdown(link, counts, summaries))


def _slowdown(link: LinkModel, counts: tuple[int, ...], summaries: Sequence[SettingSummary]) -> float | None:
    """Return how many times as long communication takes in captures as the link alone would take, at least 1.

    It is the median over captures of bucket sizes in which most communication overlaps with compute. It is ``None``
    without such a capture, or if the model's parameters (``counts``) are not known.
    """
    slowdowns = []
    for one in summaries:
        if counts and one.trace and one.setting.swept_mb and 2 * one.trace.overlapped_ns > one.trace.comm_ns:
            alone = sum(map(link.time_ns, bucket_bytes(counts, one.setting.swept_mb)))
            slowdowns.append(one.trace.comm_ns / alone)
    return max(1.0, float(np.median(slowdowns))) if slowdowns else None


@dataclass(frozen=True, slots=True)
class Expectation:
    """The predicted tail of a bucket size and the tail that its capture shows, in nanoseconds."""

    mb: float
    workload: Workload
    expected_ns: float
    alone_ns: float  # expected without contention
    measured_ns: float

    def error(self, expected_ns: float | None = None) -> float:
        """Return the error of a prediction, by default ``expected_ns``, as a fraction of the measured tail."""
        return abs((self.expected_ns if expected_ns is None else expected_ns) - self.measured_ns) / self.measured_ns


def compare_expectations(model: BucketModel, summaries: Sequence[SettingSummary]) -> list[Expectation]:
    """Return predicted and measured tail for each setting of a bucket size that was captured and has a tail."""
    expectations = []
    for one in summaries:
        mb, tail_ns = one.setting.swept_mb, one.trace.tail_ns if one.trace else None
        if mb is not None and tail_ns:
            workload = one.setting.workload
            with_it, alone = (model.expected_ns(mb, workload, contended=contended) for contended in (True, False))
            expectations.append(Expectation(mb, workload, with_it, alone, tail_ns))
    return expectations


def median_error(expectations: Sequence[Expectation], *, contended: bool = True) -> float:
    """Return the median error of predictions as a fraction; without ``contended``, of those without slowdown."""
    return float(np.median([one.error(None if contended else one.alone_ns) for one in expectations]))


def error_text(expectations: Sequence[Expectation]) -> str:
    most = percent(max(one.error() for one in expectations))
    return f"{percent(median_error(expectations))} (median of {len(expectations)}, at most {most})"


def mismatch_text(model: BucketModel, expectations: Sequence[Expectation]) -> str:
    """Return sentences about how far the predicted tails are off, and why, as far as captures show it."""
    longer = sum(one.measured_ns > one.expected_ns for one in expectations)
    text = f"The expected tails are off by {error_text(expectations)}; {longer} of those measured are longer."
    if model.slowdown and model.slowdown > 1:
        text += (
            f" What is sent beside compute takes {model.slowdown:.1f} times as long as it would alone: without that, "
            f"the error would be {percent(median_error(expectations, contended=False))}."
        )
    return f"{text} Not in the model: ranks that wait for each other, the profiler, and compute that gets slower."
