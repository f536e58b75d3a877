"""Names that a monitor in a job and the readers of its log share; importing them needs no torch."""

from __future__ import annotations

LOG_NAME = "monitor.jsonl"
LIMITS = {
    "min_overlap": "min_overlap",
    "max_exposed_ms": "max_exposed_ns",
    "max_tail_ms": "max_tail_ns",
    "max_blocking_ms": "max_blocking_ns",
    "max_cost_ms": "max_cost_ns",
}
"""The limits that may be set: their names in ``ddp-prof check``, and the names of the same limits in
:class:`.Requirements`, which are in ns."""
FIRST = 10
"""The step of the first measurement, because the first steps of a job are not typical."""


def first_step(every: int) -> int:
    """Return the step of the first measurement: :data:`FIRST`, or ``every`` if that is less."""
    return min(FIRST, every)
