"""Figures of a set of settings, of one testbed or of a published study alike: each of all comparable settings together.

Only settings of the same work, batch size and context length, are compared; what was not measured drops out, and a
figure without any comparable settings is ``None``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from ddp_prof.benchmark.statistics import combine, derived, quotient, relative_saving, root_of_squares
from ddp_prof.variants import BUCKETED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_prof.benchmark.settings import Timing
    from ddp_prof.benchmark.statistics import Effect, Estimate

Variant: TypeAlias = "tuple[str, float | None]"
"""A variant and its bucket size in MB."""
Workload = tuple[int, int]
Quantity: TypeAlias = "Callable[[Timing], Estimate | None]"

HARDLY = 0.05
"""A difference below this share of a step counts as none."""

NAIVE: Variant = ("naive", None)
FLAT: Variant = ("flat", None)
OVERLAP: Variant = ("overlap", None)
TORCH: Variant = ("torch", None)


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


def communication_share(timings: Sequence[Timing], variant: Variant) -> Effect | None:
    """Share of a step that the host's timer calls communication."""
    return combine(list(_figures(timings, variant, share_of).values()))


def saving(
    timings: Sequence[Timing], before: Variant, after: Variant, quantity: Quantity = step_of, *, choices: int = 1
) -> Effect | None:
    """What one variant takes off another's figure, as a share of that: negative where it adds.

    Args:
        timings: Of one testbed.
        before: The variant compared with.
        after: The variant.
        quantity: What is compared.
        choices: Of how many candidates one was chosen for being the best, see :func:`combine`.
    """
    return combine([relative_saving(*pair) for pair in pairs(timings, before, after, quantity)], choices=choices)


def pairs(
    timings: Sequence[Timing], before: Variant, after: Variant, quantity: Quantity
) -> list[tuple[Estimate, Estimate]]:
    """A figure of two variants, for each work that both did."""
    old, new = _figures(timings, before, quantity), _figures(timings, after, quantity)
    return [(old[work], new[work]) for work in old if work in new and old[work].value > 0]


def hidden_but_not_saved(timings: Sequence[Timing]) -> Effect | None:
    """By how much overlapping shortens communication more than the step, as a share of naive's step."""
    step, new_step = (_figures(timings, variant, step_of) for variant in (NAIVE, OVERLAP))
    communication, new_communication = (_figures(timings, variant, communication_of) for variant in (NAIVE, OVERLAP))
    found = []
    for work in set(step) & set(new_step) & set(communication) & set(new_communication):
        hidden = communication[work].value - new_communication[work].value
        saved = step[work].value - new_step[work].value
        half = root_of_squares(step[work], new_step[work], communication[work], new_communication[work])
        found.append(derived((hidden - saved) / step[work].value, half and half / step[work].value))
    return combine(found)


def bucket_sizes(timings: Sequence[Timing]) -> list[float]:
    """The bucket sizes measured, in MB, ascending."""
    measured = (timing.setting.swept_mb for timing in timings if timing.step_ns)
    return sorted({size for size in measured if size is not None})


def fastest_bucket_size(timings: Sequence[Timing]) -> float | None:
    """The bucket size, in MB, whose steps are the shortest: in the geometric mean over the work that all sizes did."""
    times = {size: _figures(timings, (BUCKETED, size), step_of) for size in bucket_sizes(timings)}
    common = set.intersection(*(set(time) for time in times.values())) if times else set()
    if not common:
        return None
    return min(times, key=lambda size: sum(math.log(times[size][work].value) for work in common))


def inner_bucket_saving(timings: Sequence[Timing], quantity: Quantity) -> Effect | None:
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
    return combine(found)


def share_drop_with_context(timings: Sequence[Timing]) -> Effect | None:
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
            drops.append(derived(shortest.value - longest.value, root_of_squares(shortest, longest)))
    return combine(drops)


def _figures(timings: Sequence[Timing], variant: Variant, quantity: Quantity) -> dict[Workload, Estimate]:
    found = {timing.setting.workload: quantity(timing) for timing in timings if timing.setting.kind == variant}
    return {work: figure for work, figure in found.items() if figure}
