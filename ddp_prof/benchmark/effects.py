"""Figures of a set of settings, of one place or of a published study alike: each of all comparable settings together.

Only settings of the same work, batch size and context length, are compared; what was not measured drops out, and a
figure without any comparable settings is ``None``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ddp_prof.benchmark.evidence import Evidence, gather
from ddp_prof.benchmark.spread import Estimate
from ddp_prof.variants import BUCKETED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_prof.benchmark.settings import Timing

Variant: TypeAlias = "tuple[str, float | None]"
"""A variant and its bucket size in MB."""
Workload = tuple[int, int]
Quantity: TypeAlias = "Callable[[Timing], Estimate | None]"

NAIVE: Variant = ("naive", None)
FLAT: Variant = ("flat", None)
OVERLAP: Variant = ("overlap", None)


def step_of(timing: Timing) -> Estimate | None:
    """Time of a whole step."""
    return timing.step_ns


def communication_of(timing: Timing) -> Estimate | None:
    """What the host's timer calls communication."""
    return timing.communication_ns


def share_of(timing: Timing) -> Estimate | None:
    """Communication as the host's timer has it, as a share of the step."""
    step, communication = timing.step_ns, timing.communication_ns
    return quotient(communication, step) if step and communication else None


def communication_share(timings: Sequence[Timing], variant: Variant) -> Evidence | None:
    """Share of a step that the host's timer calls communication."""
    return gather(list(_figures(timings, variant, share_of).values()))


def saving(
    timings: Sequence[Timing], before: Variant, after: Variant, quantity: Quantity = step_of, *, choices: int = 1
) -> Evidence | None:
    """What one variant takes off another's figure, as a share of that: negative where it adds.

    Args:
        timings: Of one place.
        before: The variant compared with.
        after: The variant.
        quantity: What is compared.
        choices: Of how many candidates one was chosen for being the best, see :func:`gather`.
    """
    return gather([relative_saving(*pair) for pair in pairs(timings, before, after, quantity)], choices=choices)


def pairs(
    timings: Sequence[Timing], before: Variant, after: Variant, quantity: Quantity
) -> list[tuple[Estimate, Estimate]]:
    """A figure of two variants, for each work that both did."""
    old, new = _figures(timings, before, quantity), _figures(timings, after, quantity)
    return [(old[work], new[work]) for work in old if work in new and old[work].value > 0]


def hidden_but_not_saved(timings: Sequence[Timing]) -> Evidence | None:
    """By how much overlapping shortens communication more than the step, as a share of naive's step."""
    step, new_step = (_figures(timings, item, step_of) for item in (NAIVE, OVERLAP))
    communication, new_communication = (_figures(timings, item, communication_of) for item in (NAIVE, OVERLAP))
    found = []
    for work in set(step) & set(new_step) & set(communication) & set(new_communication):
        hidden = communication[work].value - new_communication[work].value
        saved = step[work].value - new_step[work].value
        half = _root_of_squares(step[work], new_step[work], communication[work], new_communication[work])
        found.append(_derived((hidden - saved) / step[work].value, half and half / step[work].value))
    return gather(found)


def bucket_sizes(timings: Sequence[Timing]) -> list[float]:
    """The bucket sizes measured, in MB, ascending."""
    sizes = {
        timing.setting.bucket_size_mb
        for timing in timings
        if timing.setting.variant == BUCKETED and timing.step_ns and timing.setting.bucket_size_mb is not None
    }
    return sorted(sizes)


def fastest_bucket_size(timings: Sequence[Timing]) -> float | None:
    """The bucket size, in MB, whose steps are the shortest: in the geometric mean over the work that all sizes did."""
    times = {size: _figures(timings, (BUCKETED, size), step_of) for size in bucket_sizes(timings)}
    common = set.intersection(*(set(time) for time in times.values())) if times else set()
    if not common:
        return None
    return min(times, key=lambda size: sum(math.log(times[size][work].value) for work in common))


def inner_bucket_saving(timings: Sequence[Timing], quantity: Quantity) -> Evidence | None:
    """What the best of the inner bucket sizes takes off the better of the least and the greatest."""
    sizes = bucket_sizes(timings)
    if len(sizes) < 3:
        return None
    times = {size: _figures(timings, (BUCKETED, size), quantity) for size in sizes}
    inner, ends = sizes[1:-1], (sizes[0], sizes[-1])
    found = []
    for work in set.intersection(*(set(time) for time in times.values())):
        best, end = (min((times[size][work] for size in some), key=lambda time: time.value) for some in (inner, ends))
        if end.value > 0:
            found.append(relative_saving(end, best))
    return gather(found)


def share_drop_with_context(timings: Sequence[Timing]) -> Evidence | None:
    """Communication's share of the step at the shortest context less that at the longest, where backward overlaps."""
    curves: dict[tuple[str, float | None, int], dict[int, Estimate]] = {}
    for timing in timings:
        setting, share = timing.setting, share_of(timing)
        if setting.variant in (OVERLAP[0], BUCKETED) and share:
            curve = setting.variant, setting.bucket_size_mb, setting.local_batch_size
            curves.setdefault(curve, {})[setting.seq_len] = share
    drops = []
    for shares in curves.values():
        shortest, longest = shares[min(shares)], shares[max(shares)]
        if len(shares) > 1:
            drops.append(_derived(shortest.value - longest.value, _root_of_squares(shortest, longest)))
    return gather(drops)


def quotient(above: Estimate, below: Estimate) -> Estimate:
    """A ratio of two figures: the median over the blocks that both have a run in, else that of their medians.

    Its relative error is, to first order, that of both together.
    """
    common = [block for block in above.medians if below.medians.get(block)]
    if not common or above.paired_half_width is None or below.paired_half_width is None:
        return Estimate(above.value / below.value)
    ratio = float(np.median([above.medians[block] / below.medians[block] for block in common]))
    half_width = math.hypot(above.paired_half_width, ratio * below.paired_half_width) / below.value
    fewer = min(len(above.medians), len(below.medians)) / len(common)
    freedom = min((item.paired_freedom for item in (above, below) if item.paired_freedom is not None), default=None)
    return _derived(ratio, half_width * math.sqrt(fewer), freedom)


def relative_saving(before: Estimate, after: Estimate) -> Estimate:
    """What the second takes off the first, as a share of that."""
    ratio = quotient(after, before)
    return _derived(1 - ratio.value, ratio.paired_half_width, ratio.paired_freedom)


def _derived(value: float, half_width: float | None, freedom: int | None = None) -> Estimate:
    """A figure computed from others, with what their errors within blocks make of its own."""
    return Estimate(value, paired_half_width=half_width, paired_freedom=freedom)


def _figures(timings: Sequence[Timing], variant: Variant, quantity: Quantity) -> dict[Workload, Estimate]:
    found = {
        timing.setting.workload: quantity(timing)
        for timing in timings
        if (timing.setting.variant, timing.setting.bucket_size_mb) == variant
    }
    return {work: figure for work, figure in found.items() if figure}


def _root_of_squares(*figures: Estimate) -> float | None:
    """Spread of a sum or difference of figures whose errors are independent."""
    halves = [figure.paired_half_width for figure in figures if figure.paired_half_width is not None]
    return math.hypot(*halves) if len(halves) == len(figures) else None
