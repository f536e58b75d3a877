"""How long a collective takes by its size: ``overhead + bytes * per_byte``, fitted to measured collectives, or refused.

A fit is refused where the measured sizes do not determine a line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.statistics import IN_TWENTIETH, student_t
from ddp_prof.analyze.what_if.rules import mebibytes
from ddp_prof.analyze.what_if.simulate import LinkTimes
from ddp_prof.columns import milliseconds
from ddp_prof.table import Floats, Ints
from ddp_prof.variants import BYTES_PER_MB

LEAST_RATIO = 4
"""The largest size must be at least this number of times the smallest size; otherwise the slope means nothing."""
MOST_BEYOND = 2
"""A collective of more than this number of times the largest measured size is not predicted."""

TWO_SIZES = (
    "its collectives are of too few sizes ({low} to {high}; the largest must be {times} times the smallest), so what a "
    "byte costs is not known: capture it with another bucket size, which gives unequal buckets"
)
NOT_POSITIVE = (
    "{what} ({overhead} per call, {slope} per MiB): capture all ranks, on a quiet machine, or with another bucket size"
)
NOT_LONGER = "its collectives do not take longer the larger they are"
LESS_THAN_NOTHING = "by the times of its collectives, one without bytes takes less than nothing"


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A least-squares line through the mean time of each collective (ns) against its size (bytes).

    Attributes:
        times: The line: its value at 0 bytes, and its slope.
        slope_error: Half of the width of the 90 % interval of the slope, ``times.ns_per_byte``.
        level_error: Half of the width of the 90 % interval of the line's time at ``mean_bytes``, in nanoseconds.
        mean_bytes: The mean size of the collectives; errors of slope and of level are independent there.
        smallest_bytes, largest_bytes: The smallest and the largest size that was measured.
        sizes: The number of different sizes.
        relative_error: The root mean square of the deviations from the line, as a fraction of the mean time.
    """

    times: LinkTimes
    slope_error: float
    level_error: float
    mean_bytes: float
    smallest_bytes: int
    largest_bytes: int
    sizes: int
    relative_error: float

    def turned(self, share: float) -> LinkTimes:
        """Return the line with its slope shifted by ``share`` (-1 to 1) times ``slope_error``.

        It pivots around ``mean_bytes``, so the time at that size does not change.
        """
        change = share * self.slope_error
        overhead_ns = self.times.overhead_ns - change * self.mean_bytes
        return LinkTimes(max(0.0, overhead_ns), max(0.0, self.times.ns_per_byte + change))

    def raised(self, share: float) -> LinkTimes:
        """Return the line shifted up by ``share`` (-1 to 1) times ``level_error``; its slope does not change."""
        return LinkTimes(max(0.0, self.times.overhead_ns + share * self.level_error), self.times.ns_per_byte)

    def reaches(self, size: float) -> bool:
        """Return whether a collective of this number of bytes may be predicted by the line."""
        return size <= MOST_BEYOND * self.largest_bytes


def fit_link(took_ns: Floats, sizes: Ints) -> LinkFit | str:
    """Fit the line to the collectives of steps; return a text that says why where no line is determined.

    Means over the steps are fitted, not medians, because means sum to what a step's collectives take together.

    Args:
        took_ns: Duration of each collective, from its begin to its end; shape (steps, collectives).
        sizes: Bytes of each collective, equal in all steps; shape (collectives).
    """
    return fit_means(took_ns.mean(axis=0), sizes)


def fit_means(means_ns: Floats, sizes: Ints) -> LinkFit | str:
    """Fit the line as :func:`fit_link` does, to the mean duration of each collective; of several captures, if need be.

    Args:
        means_ns: Mean duration of each collective; shape (collectives).
        sizes: Bytes of each collective; shape (collectives).
    """
    known = np.unique(sizes)
    if len(known) < 2 or known[-1] < LEAST_RATIO * known[0] or known[0] <= 0:
        return TWO_SIZES.format(low=mebibytes(int(known[0])), high=mebibytes(int(known[-1])), times=LEAST_RATIO)
    slope, overhead_ns = np.polyfit(sizes.astype(float), means_ns, 1)
    if slope <= 0 or overhead_ns <= 0:
        what = NOT_LONGER if slope <= 0 else LESS_THAN_NOTHING
        return NOT_POSITIVE.format(
            what=what, overhead=milliseconds(overhead_ns), slope=milliseconds(slope * BYTES_PER_MB)
        )
    # The usual standard errors of a least-squares line. Two collectives leave no degree of freedom: then the errors are
    # as large as the slope and the overhead themselves.
    off_ns = means_ns - (overhead_ns + slope * sizes)
    freedom = len(sizes) - 2
    spread = float(((sizes - sizes.mean()) ** 2).sum())
    deviation_ns = float(np.sqrt((off_ns**2).sum() / freedom)) if freedom else 0.0
    quantile = student_t(freedom, IN_TWENTIETH) if freedom else 0.0
    return LinkFit(
        LinkTimes(float(overhead_ns), float(slope)),
        slope_error=quantile * deviation_ns / spread**0.5 if freedom else float(slope),
        level_error=quantile * deviation_ns / len(sizes) ** 0.5 if freedom else float(overhead_ns),
        mean_bytes=float(sizes.mean()),
        smallest_bytes=int(known[0]),
        largest_bytes=int(known[-1]),
        sizes=len(known),
        relative_error=float(np.sqrt((off_ns**2).mean()) / means_ns.mean()),
    )
