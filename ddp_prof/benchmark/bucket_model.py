"""Predicts the communication that is left when backward ends, from the real buckets; see ``docs/bucket_size.md``.

A message of s bytes takes ``t(s) = o + s / w``: an overhead per call, and a bandwidth, see :mod:`.findings`. Gradients
become ready from the last parameter to the first, in proportion to the matrix products of backward; the gradient of an
embedding, which has none, is ready at the end. A bucket is sent when its last gradient is ready and the link is free::

    backward     hhhhhh44332211.      h: head, e: embedding
    buckets      .....|hhhhhhh|43|21|eeeeee
    tail                        ______            from the end of backward

What is sent beside compute takes ``slowdown`` times as long, if captures tell: their communication over the times that
the link alone would take. On a CPU, ranks and gloo share the cores.

The course CS336 (spring 2025, assignment 2, *ddp_bucketed_benchmarking*) divides the s bytes into n equal buckets whose
backward takes as long as their transfer, s / (n w). Then ``s / (n w) + n o`` is left, which is least for buckets
of ``sqrt(s o w)``. This formula is used for a model whose parameters are not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddp_prof.benchmark.settings import SettingSummary
from ddp_prof.bucket_assignment import Float32, assign_buckets, bucket_bytes
from ddp_prof.present.text import milliseconds, percent
from ddp_prof.train import MODEL_SIZES
from ddp_prof.variants import BASELINE, BYTES_PER_MB

Workload = tuple[int, int]
CURVE_MB = tuple(float(mb) for mb in np.geomspace(0.25, 4096, 113))
"""The bucket sizes in MiB of which the best is looked for, and which are drawn."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A message takes ``overhead_ns + bytes / bytes_per_ns``, fitted to ``sizes`` message sizes; 1 byte/ns: 1 GB/s."""

    overhead_ns: float
    bytes_per_ns: float
    sizes: int
    relative_error: float  # median over the sizes, as a share of the measured time

    @property
    def text(self) -> str:
        overhead = milliseconds(round(self.overhead_ns))
        return f"an all-reduce takes {overhead} per call plus its bytes at {self.bytes_per_ns:.3g} GB/s"

    def time_ns(self, size: float) -> float:
        return self.overhead_ns + size / self.bytes_per_ns


@dataclass(frozen=True, slots=True)
class BucketModel:
    """The model of bucketing for one testbed.

    Attributes:
        gradient_bytes: Bytes of all gradients.
        counts: Number of elements of each parameter, in the order of ``parameters()``; empty if not known.
        backward_ns: Length of backward without communication beside it, by workload.
        slowdown: How many times as long a transfer takes beside compute; ``None`` if no capture tells.
    """

    link: LinkModel
    gradient_bytes: int
    counts: tuple[int, ...] = ()
    backward_ns: Mapping[Workload, float] = field(default_factory=dict)
    slowdown: float | None = None

    @property
    def course_best_bytes(self) -> float:
        """The bucket size with the smallest tail by the course's formula."""
        best = math.sqrt(self.gradient_bytes * self.link.overhead_ns * self.link.bytes_per_ns)
        return min(best, float(self.gradient_bytes))

    @property
    def best_mb(self) -> float:
        """The smallest bucket size whose tail, mean over workloads, is within a per cent of the least."""
        left = [self.mean_ns(mb) for mb in CURVE_MB]
        return next(mb for mb, ns in zip(CURVE_MB, left, strict=True) if ns <= 1.01 * min(left))

    def mean_ns(self, mb: float) -> float:
        workloads: Sequence[Workload | None] = [*self.backward_ns] or [None]
        return float(np.mean([self.expected_ns(mb, workload) for workload in workloads]))

    def buckets(self, mb: float) -> list[tuple[float, float]]:
        """The bytes of each bucket in the order of launch, and the share of backward after which it is ready."""
        if not self.counts:  # as the course has it
            count = math.ceil(self.gradient_bytes / (mb * BYTES_PER_MB))
            return [(self.gradient_bytes / count, (index + 1) / count) for index in range(count)]
        computed = [0, *self.counts[1:]]
        ready = np.cumsum(computed[::-1])[::-1] / sum(computed)
        assigned = assign_buckets([Float32(count) for count in self.counts], mb * BYTES_PER_MB)
        return [(sum(4 * self.counts[at] for at in bucket), float(ready[min(bucket)])) for bucket in assigned]

    def expected_ns(self, mb: float, workload: Workload | None = None, *, contended: bool = True) -> float:
        """Communication left when backward ends; a backward of unknown length is as long as the transfers."""
        buckets = self.buckets(mb)
        slowdown = (self.slowdown or 1.0) if contended else 1.0
        known_ns = self.backward_ns.get(workload) if workload and self.counts else None
        backward_ns = known_ns or self.gradient_bytes / self.link.bytes_per_ns
        free_ns = 0.0
        for size, ready in buckets:
            left_ns, free_ns = self.link.time_ns(size), max(free_ns, ready * backward_ns)
            beside_ns = min(slowdown * left_ns, max(0.0, backward_ns - free_ns))
            free_ns += beside_ns + left_ns - beside_ns / slowdown
        return free_ns - backward_ns


def make_model(link: LinkModel, summaries: Sequence[SettingSummary]) -> BucketModel:
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
    """How many times as long communication takes in captures with several buckets as the link alone would take."""
    slowdowns = []
    for one in summaries:
        if counts and one.trace and one.setting.swept_mb and 2 * one.trace.overlapped_ns > one.trace.comm_ns:
            alone = sum(map(link.time_ns, bucket_bytes(counts, one.setting.swept_mb)))
            slowdowns.append(one.trace.comm_ns / alone)
    return max(1.0, float(np.median(slowdowns))) if slowdowns else None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What was expected of a bucket size, and what its capture shows; times in nanoseconds."""

    mb: float
    workload: Workload
    expected_ns: float
    alone_ns: float  # expected without contention
    measured_ns: float

    def error(self, expected_ns: float | None = None) -> float:
        """How far the expectation is off, as a share of what was measured."""
        return abs((self.expected_ns if expected_ns is None else expected_ns) - self.measured_ns) / self.measured_ns


def compare_expectations(model: BucketModel, summaries: Sequence[SettingSummary]) -> list[Expectation]:
    """Compare the tails of captures with what was expected for their buckets."""
    expectations = []
    for one in summaries:
        mb, tail_ns = one.setting.swept_mb, one.trace.tail_ns if one.trace else None
        if mb is not None and tail_ns:
            workload = one.setting.workload
            with_it, alone = (model.expected_ns(mb, workload, contended=contended) for contended in (True, False))
            expectations.append(Expectation(mb, workload, with_it, alone, tail_ns))
    return expectations


def median_error(expectations: Sequence[Expectation], *, contended: bool = True) -> float:
    return float(np.median([one.error(None if contended else one.alone_ns) for one in expectations]))


def error_text(expectations: Sequence[Expectation]) -> str:
    most = percent(max(one.error() for one in expectations))
    return f"{percent(median_error(expectations))} (median of {len(expectations)}, at most {most})"


def mismatch_text(model: BucketModel, expectations: Sequence[Expectation]) -> str:
    """Describe how far the expected tails are off, and why, as far as captures show it."""
    longer = sum(one.measured_ns > one.expected_ns for one in expectations)
    text = f"The expected tails are off by {error_text(expectations)}; {longer} of those measured are longer."
    if model.slowdown and model.slowdown > 1:
        text += (
            f" What is sent beside compute takes {model.slowdown:.1f} times as long as it would alone: without that, "
            f"the error would be {percent(median_error(expectations, contended=False))}."
        )
    return f"{text} Not in the model: ranks that wait for each other, the profiler, and compute that gets slower."
