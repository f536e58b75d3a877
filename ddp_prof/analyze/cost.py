"""What communication costs a step: what waits for it, and what it slows; and what could be gained at most.

A step that waits 2 for communication, and whose compute beside it takes 1.5 times as long::

    compute          aaaa======....bb        a, b alone, = beside communication
    communication        NNNNNNNNNN
    contention             ##                a third of the 6 beside it
    blocking                   ####

No schedule can gain more than blocking: it can hide communication, but not the slowdown. No network can gain more than
blocking and contention together.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_prof.analyze.kernels.kernel_times import Contention
from ddp_prof.analyze.variants.comparison import VariantSummary

ON_CPU = "ranks share cores: what communication takes from compute is not in the trace"
NO_OVERLAP = "it is not known how long communication ran beside compute"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of communication in a step of a run: medians over the steps that communicate.

    Attributes:
        blocking_ns: ``None`` if not known.
        contention_ns: What communication adds to the compute beside it, by its slowdown; ``None`` with a reason.
        contention_low_ns, contention_high_ns: Its 95 % interval. Without a known slowdown, from nothing to all time
            beside communication; ``None`` if that is not known either.
        kappa: How many times as long the same kernels take beside communication, see :class:`Contention`.
        kernels_compared: Number of different kernels that ``kappa`` was measured with.
        reason: Why ``contention_ns`` is not known.
    """

    blocking_ns: int | None
    contention_ns: int | None
    contention_low_ns: int | None
    contention_high_ns: int | None
    kappa: float | None
    kernels_compared: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a step could gain at most; ``None`` if not known.

    Attributes:
        schedule_ns: By hiding communication: what waits for it, or what is exposed if that is not known.
        network_ns: By communication that takes no time and no part of the GPU: that and contention.
        low_ns, high_ns: The interval of ``network_ns``, by that of contention.
    """

    schedule_ns: int | None
    network_ns: int | None
    low_ns: int | None
    high_ns: int | None


def measure_cost(summary: VariantSummary, contention: Contention) -> Cost:
    """Return what communication costs a step of a run; ``contention`` is that of its kernels."""

    def unknown(reason: str, high_ns: int | None) -> Cost:
        low_ns = None if high_ns is None else 0
        return Cost(summary.blocking_ns, None, low_ns, high_ns, None, contention.kernels, reason)

    if summary.device == "cpu":
        return unknown(ON_CPU, None)
    overlapped_ns = summary.overlapped_ns
    if overlapped_ns is None or summary.reason:
        return unknown(summary.reason or NO_OVERLAP, None)
    if not overlapped_ns:  # nothing ran beside it
        return Cost(summary.blocking_ns, 0, 0, 0, contention.slowdown, contention.kernels, None)
    if contention.slowed is None:
        return unknown(contention.reason or NO_OVERLAP, overlapped_ns)
    slowed, low, high = contention.slowed, contention.slowed_low, contention.slowed_high
    return Cost(
        blocking_ns=summary.blocking_ns,
        contention_ns=max(0, round(slowed * overlapped_ns)),
        contention_low_ns=None if low is None else max(0, round(low * overlapped_ns)),
        contention_high_ns=None if high is None else max(0, round(high * overlapped_ns)),
        kappa=contention.slowdown,
        kernels_compared=contention.kernels,
        reason=None,
    )


def find_bounds(summary: VariantSummary, cost: Cost) -> Bounds:
    """Return what no schedule, and no network, can gain more than."""
    if summary.gain_at_most is None or not summary.communicating_step_ns:
        return Bounds(None, None, None, None)
    schedule_ns = round(summary.gain_at_most * summary.communicating_step_ns)

    def with_contention(contention_ns: int | None) -> int | None:
        return None if contention_ns is None else schedule_ns + contention_ns

    return Bounds(
        schedule_ns=schedule_ns,
        network_ns=with_contention(cost.contention_ns),
        low_ns=with_contention(cost.contention_low_ns),
        high_ns=with_contention(cost.contention_high_ns),
    )
