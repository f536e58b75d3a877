"""What a monitor in a job and the readers of its log agree on; needs no torch."""

from __future__ import annotations

LOG_NAME = "monitor.jsonl"
LIMITS = {
    "min_overlap": "min_overlap",
    "max_exposed_ms": "max_exposed_ns",
    "max_tail_ms": "max_tail_ns",
    "max_blocking_ms": "max_blocking_ns",
    "max_cost_ms": "max_cost_ns",
}
"""The limits that may be set, as ``ddp-prof check`` calls them, and their names in :class:`.Requirements`."""
