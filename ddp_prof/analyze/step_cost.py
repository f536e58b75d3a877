"""The parts of a step: work, the time that communication adds to it, waits for communication, and the rest.

A step that waits 4 for communication, and whose compute beside it takes 1.5 times as long::

    compute          aaaa======....bb...   a and b run alone, = beside communication
    communication        NNNNNNNNNN
    contention             ##              a third of the 6 beside communication, which take 4 alone
    blocking                   ####
    standstill                       ###   nothing computes, and nothing waits for communication
    work             aaaa====      bb      all compute, without contention: 10

    step = work + contention + blocking + standstill, in integers of nanoseconds
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ddp_prof.analyze.step_columns import StepLength, StepOverlap

if TYPE_CHECKING:
    from ddp_prof.analyze.kernels.contention import Contention

ON_CPU = "ranks share cores: what communication takes from compute is not in the trace"
NO_OVERLAP = "it is not known how long communication ran beside compute"
NO_LENGTH = "how long the step took is not known"
NO_WORK = "what computed in the step is not known"
NO_BLOCKING = "it is not known what waited for communication"

PARTS = ("work", "contention", "blocking", "standstill")


@dataclass(frozen=True, slots=True)
class StepCost:
    """The parts of a step of a rank. If all are known, they sum to ``step_ns``.

    A part that is not known is ``None`` with a reason, and lies between its ``low`` and ``high``, if these are known.
    Contention, and therefore work, are estimates: their ``low`` and ``high`` are the 95 % interval.

    Attributes:
        step_ns: Length of the step.
        work_ns: All time in which the device computes, minus contention.
        contention_ns: How much longer the compute beside communication takes than it would take alone.
        blocking_ns: The time without compute in which a stream, or the host of a CPU, stands still for communication.
        standstill_ns: All other time without compute.
        standstill_by_ns: The parts of ``standstill_ns``, which sum to it: ``communication`` that nothing waits for,
            ``copies`` and ``idle``; ``None`` if one of them is not known.
        reasons: By name of the part, why it is not known: ``contention`` (then work is not known either), ``blocking``
            (then standstill is not known either).
    """

    step_ns: int | None
    work_ns: int | None
    work_low_ns: int | None
    work_high_ns: int | None
    contention_ns: int | None
    contention_low_ns: int | None
    contention_high_ns: int | None
    blocking_ns: int | None
    blocking_low_ns: int | None
    blocking_high_ns: int | None
    standstill_ns: int | None
    standstill_low_ns: int | None
    standstill_high_ns: int | None
    standstill_by_ns: dict[str, int] | None
    reasons: dict[str, str]


@dataclass(frozen=True, slots=True)
class Slowed:
    """Which fraction of the time beside communication is contention, 0 to 1.

    Attributes:
        share: The fraction; ``None`` if not known.
        low, high: Its 95 % interval or, if ``share`` is not known, its limits; ``None`` if these are not known either.
        reason: Why ``share`` is not known; ``None`` if it is.
        by_kind: Pairs of a kind of kernels and the fraction for this kind.
    """

    share: float | None
    low: float | None
    high: float | None
    reason: str | None
    by_kind: tuple[tuple[str, float], ...] = ()

    def of(self, overlapped_ns: int) -> tuple[int | None, int | None, int | None]:
        """Return the contention in a time beside communication, and the lower and upper end of its interval, in ns."""

        def part(share: float | None) -> int | None:
            """Return this fraction of the time, limited to it."""
            return None if share is None else min(overlapped_ns, max(0, round(share * overlapped_ns)))

        is_bounded = self.share is not None or self.high is not None  # not where ranks share cores
        if not overlapped_ns and is_bounded:  # nothing ran beside it
            return 0, 0, 0
        return part(self.share), part(self.low), part(self.high)


def find_slowed(contention: Contention, device: str) -> Slowed:
    """Return which fraction of the time beside communication is contention.

    If the slowdown is not known, the limits are 0 and 1: no time beside communication may be contention, or all of it.
    On a CPU, nothing is known.
    """
    if device == "cpu":
        return Slowed(None, None, None, ON_CPU)
    if contention.slowed is None:
        return Slowed(None, 0, 1, contention.reason or NO_OVERLAP)
    return Slowed(contention.slowed, contention.slowed_low, contention.slowed_high, None, contention.slowed_by_kind)


def divide_step(step: StepOverlap, slowed: Slowed, why_no_blocking: str | None) -> StepCost:
    """Return the parts of a step; ``why_no_blocking`` is the reason if it is not known what waits for communication."""
    length: StepLength = step.length
    if length.ns is None:
        return _unknown_step(None, NO_LENGTH)
    if length.compute_only_ns is None or length.overlapped_ns is None:
        return _unknown_step(length.ns, NO_WORK)
    # Compute consists of work and contention, the rest of the step of blocking and standstill.
    compute_ns = length.compute_only_ns + length.overlapped_ns
    rest_ns, reasons = length.ns - compute_ns, dict[str, str]()
    contention, low, high = slowed.of(length.overlapped_ns)
    if contention is None:
        reasons["contention"] = slowed.reason or NO_OVERLAP
    blocking, most = length.blocking_ns, length.blocking_at_most_ns
    least = 0 if blocking is None else blocking
    most = rest_ns if most is None else most
    if blocking is None:
        reasons["blocking"] = why_no_blocking or NO_BLOCKING

    def less(whole_ns: int, part_ns: int | None) -> int | None:
        """Return the whole without the part; ``None`` if the part is not known."""
        return None if part_ns is None else whole_ns - part_ns

    return StepCost(
        step_ns=length.ns,
        work_ns=less(compute_ns, contention),
        work_low_ns=less(compute_ns, high),
        work_high_ns=less(compute_ns, low),
        contention_ns=contention,
        contention_low_ns=low,
        contention_high_ns=high,
        blocking_ns=blocking,
        blocking_low_ns=least,
        blocking_high_ns=most,
        standstill_ns=less(rest_ns, blocking),
        standstill_low_ns=rest_ns - most,
        standstill_high_ns=rest_ns - least,
        standstill_by_ns=None if None in (blocking, length.exposed_memory_ns) else _divide_standstill(length),
        reasons=reasons,
    )


def _divide_standstill(length: StepLength) -> dict[str, int]:
    """Return the parts of the time without compute in which nothing stands still for communication."""
    # Blocking time lies in exposed communication, in exposed copies or in idle time; each part is what is left there.
    communication = (length.exposed_ns or 0) - (length.blocking_exposed_ns or 0)
    copies = (length.exposed_memory_ns or 0) - (length.blocking_memory_ns or 0)
    blocked_otherwise = (length.blocking_ns or 0) - (length.blocking_exposed_ns or 0) - (length.blocking_memory_ns or 0)
    return {"communication": communication, "copies": copies, "idle": (length.idle_ns or 0) - blocked_otherwise}


def _unknown_step(step_ns: int | None, reason: str) -> StepCost:
    """Return a step of which no part is known, for this reason."""
    nothing: dict[str, Any] = {field.name: None for field in fields(StepCost)}
    return StepCost(**{**nothing, "step_ns": step_ns, "reasons": dict.fromkeys(("contention", "blocking"), reason)})
