"""Steps that alone hold a large part of a run's exposed time, and the run's figures without them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

LARGE_SHARE = 1 / 5
"""Share of all exposed time above which a single step or collective may be an outlier."""

TIMES_MEDIAN = 3
"""An outlier is this many times the median of the others; so none of four equal steps is one."""

Key = TypeVar("Key", bound="Hashable")


@dataclass(frozen=True, slots=True)
class Outliers:
    """Steps that stand out, and the run's figures without them.

    Attributes:
        steps: Their keys, with the exposed time of each, of all ranks; the largest first.
        are_positions: Whether keys are positions among the steps, which have no numbers or the same ones again.
        exposed_ns: Of all steps, outliers included.
        overlap_ratio: Share of all steps' communication that compute hides, outliers included.
        exposed_without_ns: Exposed time of the other steps.
        overlap_ratio_without: Their share; ``None`` where they do not communicate.
    """

    steps: tuple[tuple[int, int], ...]
    exposed_ns: int
    overlap_ratio: float | None
    exposed_without_ns: int
    overlap_ratio_without: float | None
    are_positions: bool = False


def find_outlier_keys(exposed_ns: Mapping[Key, int]) -> list[Key]:
    """The keys whose value is more than a fifth of the sum and three times the median of the other values."""
    total = sum(exposed_ns.values())
    found = []
    for key, value in exposed_ns.items():
        others = [other for name, other in exposed_ns.items() if name != key] if value > LARGE_SHARE * total else []
        if others and value >= TIMES_MEDIAN * median(others):
            found.append(key)
    return sorted(found, key=lambda key: -exposed_ns[key])


def find_outliers(steps: Iterable[tuple[int | None, int | None, int, int]]) -> Outliers | None:
    """The steps of a run that stand out; ``None`` where none does.

    Args:
        steps: Of each step of each rank its key, its own number, its communication and how much of that is exposed, in
            nanoseconds. What has no key belongs to no step.
    """
    exposed: dict[int, int] = {}
    communicated: dict[int, int] = {}
    are_positions = False
    for key, number, comm_ns, exposed_ns in steps:
        if comm_ns and key is not None:
            are_positions |= key != number
            exposed[key] = exposed.get(key, 0) + exposed_ns
            communicated[key] = communicated.get(key, 0) + comm_ns
    keys = find_outlier_keys(exposed)
    if not keys:
        return None
    rest = [key for key in exposed if key not in keys]
    return Outliers(
        steps=tuple((key, exposed[key]) for key in keys),
        exposed_ns=sum(exposed.values()),
        overlap_ratio=_overlap_ratio(exposed, communicated, list(exposed)),
        exposed_without_ns=sum(exposed[key] for key in rest),
        overlap_ratio_without=_overlap_ratio(exposed, communicated, rest),
        are_positions=are_positions,
    )


def _overlap_ratio(exposed: Mapping[int, int], communicated: Mapping[int, int], keys: list[int]) -> float | None:
    comm_ns = sum(communicated[key] for key in keys)
    return 1 - sum(exposed[key] for key in keys) / comm_ns if comm_ns else None
