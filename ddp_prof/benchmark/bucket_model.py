"""The cost of an all-reduce by its size, and the bucket size that follows from it.

A message of s bytes takes ``t(s) = o + s / w``: an overhead per call, and a bandwidth. In the model of the course CS336
(spring 2025, assignment 2, problem *ddp_bucketed_benchmarking*) the gradients, s bytes, fall into n buckets whose
backward takes as long as their transfer, s / (n w). Bucket i is ready after i such times, and each call takes
s / (n w) + o, so the link is busy from the first bucket on; what is left when backward ends is

    overhead(n) = s / (n w) + n o,  or by the size of a bucket  overhead(b) = b / w + s o / b.

Its derivative, 1 / w - s o / b**2, is zero at ``b* = sqrt(s o w)``, a minimum, of ``2 sqrt(s o / w)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.statistics import bootstrap_interval
from ddp_prof.benchmark.settings import Testbed
from ddp_prof.benchmark.store import OK, Results, StoredMessages

HUBER = 1.345
"""Residuals beyond so many standard deviations lose weight: 95 % efficient on normal ones (P. J. Huber, 1964)."""
MAD_TO_SIGMA = 1.4826
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Unknown:
    """In place of a model: why there is none, as part of a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class MessageCost:
    """All-reduces of one size.

    Attributes:
        median_ns: Median over runs of each run's median; of a single run, over its calls.
        low_ns: Lower end of its 95 % interval, ``high_ns`` the upper one; ``None`` for fewer than three values.
    """

    bytes: int
    calls: int
    median_ns: float
    low_ns: float | None = None
    high_ns: float | None = None
    runs: int = 1


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Time of a message, ``overhead_ns + bytes / bytes_per_ns``.

    Attributes:
        bytes_per_ns: Bandwidth; the same number in GB/s.
        sizes: Number of message sizes that it was fitted to.
        relative_error: Median over them of how far the model is off, as a share of the measured time.
    """

    overhead_ns: float
    bytes_per_ns: float
    sizes: int
    relative_error: float

    def time_ns(self, size: float) -> float:
        return self.overhead_ns + size / self.bytes_per_ns


@dataclass(frozen=True, slots=True)
class BucketModel:
    """The course's model of bucketing, for gradients of so many bytes."""

    link: LinkModel
    gradient_bytes: int

    @property
    def best_bytes(self) -> float:
        """The bucket size b* of the least overhead; all gradients at most."""
        best = math.sqrt(self.gradient_bytes * self.link.overhead_ns * self.link.bytes_per_ns)
        return min(best, float(self.gradient_bytes))

    def overhead_ns(self, bucket_bytes: float) -> float:
        """Communication left when backward ends, with buckets of so many bytes."""
        size = min(bucket_bytes, self.gradient_bytes)
        return size / self.link.bytes_per_ns + self.gradient_bytes * self.link.overhead_ns / size


def message_costs(results: Results) -> dict[Testbed, list[MessageCost]]:
    """The cost of messages in the runs of each testbed, by ascending size."""
    runs = {run.id: run for run in results.runs if run.status == OK}
    found: dict[Testbed, dict[int, list[StoredMessages]]] = {}
    for message in results.messages:
        if (run := runs.get(message.run)) and message.bytes > 0 and message.median_ns > 0:
            found.setdefault(Testbed.from_run(run), {}).setdefault(message.bytes, []).append(message)
    costs: dict[Testbed, list[MessageCost]] = {}
    for testbed, sizes in found.items():
        for size, messages in sorted(sizes.items()):
            medians = [message.median_ns for message in messages]
            low, high = bootstrap_interval(medians) or (None, None)
            calls = sum(message.calls for message in messages)
            cost = MessageCost(size, calls, float(np.median(medians)), low, high, len(medians))
            costs.setdefault(testbed, []).append(cost)
    return costs


def fit_link(messages: Sequence[MessageCost]) -> LinkModel | Unknown:
    """Fit the model to messages of one testbed, each size counting once.

    Least squares of *relative* errors, since times span orders of magnitude, with Huber's weights, so that a size that
    was disturbed does not bend the line (iteratively reweighted; P. W. Holland and R. E. Welsch, 1977).
    """
    if len(messages) < 2:
        return Unknown("messages of fewer than two sizes were timed")
    sizes = np.array([message.bytes for message in messages], float)
    times = np.array([message.median_ns for message in messages])
    # A line through (0, 0) of relative units: 1 = (o + s / w) / t.
    columns = np.column_stack([1 / times, sizes / times])
    overhead, slope = _robust_line(columns)
    if overhead < 0:
        overhead, (slope,) = 0.0, _robust_line(columns[:, 1:])
    if slope <= 0:
        return Unknown("larger messages did not take longer")
    residuals = columns @ np.array([overhead, slope]) - 1
    return LinkModel(float(overhead), float(1 / slope), len(messages), float(np.median(np.abs(residuals))))


def _robust_line(columns: np.ndarray) -> np.ndarray:
    """Coefficients whose combination of the columns is nearest to 1 in each row."""
    weights = np.ones(len(columns))
    found = np.zeros(columns.shape[1])
    scaling = np.linalg.norm(columns, axis=0)  # the columns differ by orders of magnitude
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(columns / scaling * root[:, None], root, rcond=None)[0] / scaling
        residuals = np.abs(columns @ found - 1)
        scale = MAD_TO_SIGMA * float(np.median(residuals))
        if scale < 1e-12:
            break
        weights = np.minimum(1, HUBER * scale / np.maximum(residuals, 1e-300))
    return found
