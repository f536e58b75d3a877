"""The collectives that reduce gradients, by step and by pass of backward: what rules about buckets look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ddp_prof.analyze.collectives.gradients import SHARDING
from ddp_prof.analyze.collectives.timing import FEW_BYTES
from ddp_prof.table import UNKNOWN, Ints, Mask, Table, begins_run, distinct, select


@dataclass(frozen=True)
class Gradients(Table):
    """The collectives that reduce gradients in steps, ordered by rank, step and launch.

    The rows are grouped in units: a unit is a step or, in :attr:`by_pass`, a pass of backward. The order and number of
    buckets are those of a pass; costs are those of a step, see :meth:`sum_of_steps`.

    Attributes that are not listed here are those of ``CollectiveTimings``.

    Attributes:
        rank: Index into ``RunAnalysis.ranks``.
        unit: Index of the step or pass, counted over all ranks.
        step: Index of the step, counted over all ranks.
        number: The step's own number, or ``UNKNOWN``.
        is_copied: Whether its consumer is a memory copy that may be of gradients: of more than a number, within the
            device.
        is_needed_on_stream: Whether its consumer is compute of backward on the stream with most compute.
        exposed_ns: See ``Exposure``.
    """

    rank: Ints
    unit: Ints
    step: Ints
    number: Ints
    is_copied: Mask
    is_needed_on_stream: Mask
    exposed_ns: Ints
    phase: Ints
    bucket: Ints
    bytes: Ints
    launch_ns: Ints
    start_ns: Ints
    end_ns: Ints
    blocking: Ints
    operation: Ints
    backward_end_ns: Ints
    updates: Ints
    blocking_ns: Ints
    consumer: Ints
    consumer_start_ns: Ints

    @cached_property
    def by_pass(self) -> Gradients:
        """The same collectives grouped by pass of backward: those of a pass share the end of its compute."""
        return replace(self, unit=np.cumsum(begins_run(self.step, self.backward_end_ns)) - 1)

    @property
    def unit_name(self) -> str:
        """What to call a unit: "step" if each step is one unit, else "pass of backward"."""
        return "step" if len(self.counts) == self.steps else "pass of backward"

    @cached_property
    def steps(self) -> int:
        """The number of steps."""
        return len(distinct(self.step))

    @cached_property
    def counts(self) -> Ints:
        """The number of collectives of each unit."""
        return np.unique(self.unit, return_counts=True)[1]

    @property
    def last(self) -> Ints:
        """Row of the last collective of each unit."""
        return np.cumsum(self.counts) - 1

    @property
    def first(self) -> Ints:
        """Row of the first collective of each unit."""
        return np.cumsum(self.counts) - self.counts

    @property
    def duration_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    @property
    def cost_ns(self) -> Ints:
        """Upper limit of what the collectives of each unit cost, in nanoseconds.

        That is their exposed time or, if longer, the time in which streams stand still for them (a stream may stand
        still while another one computes), but not more than their duration.
        """
        sums = (self.by_unit(np.add, values) for values in (self.exposed_ns, self.blocking_ns, self.duration_ns))
        exposed_ns, blocking_ns, duration_ns = sums
        cost_ns: Ints = np.minimum(np.maximum(exposed_ns, blocking_ns), duration_ns)
        return cost_ns

    @property
    def are_small(self) -> bool:
        """Whether the collectives of a typical unit have so few bytes that they cost little but latency.

        Collectives without a known size count as 0 bytes; ``False`` if no size is known.
        """
        is_known = self.bytes != UNKNOWN
        return bool(is_known.any()) and median_or_zero(self.by_unit(np.add, self.bytes * is_known)) < FEW_BYTES

    @property
    def are_sharded(self) -> bool:
        """Whether some leave each rank a part of the gradients, perhaps within groups of ranks only."""
        return bool(np.isin(self.operation, SHARDING).any())

    def by_unit(self, combine: np.ufunc, values: Ints | Mask) -> Any:
        """Combine values, one per collective, to one per unit, such as their sum with ``np.add``."""
        return combine.reduceat(values, self.first)

    def sum_of_steps(self, values: Ints) -> Ints:
        """Return for each step the sum of the values of its units; ``values`` has one per unit."""
        first = np.flatnonzero(begins_run(self.step[self.first]))
        return np.add.reduceat(values, first) if len(values) else values

    def least_but_last(self, values: Ints) -> Ints:
        """Return the smallest value of each unit without its last collective; ``values`` has one per collective.

        For a unit with a single collective, the largest possible integer.
        """
        values = values.copy()
        values[self.last] = np.iinfo(np.int64).max
        least: Ints = self.by_unit(np.minimum, values)
        return least

    def of_units(self, chosen: Mask) -> Gradients:
        """Return the collectives of the chosen units; ``chosen`` has one element per unit."""
        return select(self, np.repeat(chosen, self.counts))

    @property
    def of_several(self) -> Gradients:
        """The collectives of units with more than one."""
        return self.of_units(self.counts > 1)


def median_or_zero(values: Sequence[int] | Ints) -> int:
    return round(float(np.median(values))) if len(values) else 0
