"""An upper limit of the contention of a run, which is found without comparing its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.kernels.contention import LEAST_KERNELS
from ddp_prof.analyze.kernels.kernel_times import is_mostly_overlapped
from ddp_prof.table import count_before
from ddp_prof.trace import UNKNOWN, Category, distinct, distinct_rows


class NameTimes(NamedTuple):
    """Executions of the kernels of one name.

    Attributes:
        shortest_ns: The shortest duration of all executions.
        beside: Number of executions beside communication.
        beside_ns: Sum of their durations.
    """

    shortest_ns: int
    beside: int
    beside_ns: int


@dataclass(frozen=True)
class SlowdownLimit:
    """What :func:`limit_contention_ns` needs of one rank. It needs no launch shapes, which take long to read.

    Attributes:
        by_name: The executions of each name of kernels.
        steps: Number of steps.
        compares: Whether enough kernels ran both beside communication and alone.
        all_communicate: Whether each step with kernels has kernels beside communication.
    """

    by_name: dict[str, NameTimes]
    steps: int
    compares: bool
    all_communicate: bool


def limit_slowdown(rank: RankEvents) -> SlowdownLimit:
    """Return what :func:`limit_contention_ns` needs of a rank."""
    events = rank.events
    computes = rank.is_kernel & (events.category == Category.COMPUTE)
    rows = np.flatnonzero(computes & (events.step != UNKNOWN) & rank.has_steps)
    step, start, end = events.step[rows], events.start_ns[rows], events.end_ns[rows]
    duration_ns, beside_ns = end - start, rank.union_of(Category.COMMUNICATION).covered_ns(start, end)
    is_beside = is_mostly_overlapped(duration_ns, beside_ns)
    name, steps, names = rank.trace.activities.name_id[events.activity[rows]], len(rank.steps), len(rank.trace.names)
    # By name of kernels: the shortest duration, and number and sum of the durations beside communication.
    shortest_ns = np.full(names, duration_ns.max(initial=0))
    np.minimum.at(shortest_ns, name, duration_ns)
    total_ns = sum_by_group(duration_ns[is_beside], name[is_beside], names)
    count = np.bincount(name[is_beside], minlength=names)
    has_kernels, communicates = (np.bincount(of, minlength=steps) > 0 for of in (step, step[is_beside]))

    def count_compared(first_steps: int) -> int:
        """Return how many kernels (name and position) ran both beside communication and alone in the first steps."""
        own = np.flatnonzero(step < first_steps)
        own = own[np.lexsort((events.launch_ns[rows[own]], step[own]))]
        position = count_before(distinct_rows(step[own], name[own])[1])
        first, kernel = distinct_rows(name[own], position)
        runs = (np.bincount(kernel[of[own]], minlength=len(first)) > 0 for of in (is_beside, beside_ns == 0))
        return int(np.logical_and(*runs).sum())

    return SlowdownLimit(
        by_name={
            rank.trace.names[number]: NameTimes(int(shortest_ns[number]), int(count[number]), int(total_ns[number]))
            for number in distinct(name)
        },
        steps=steps,
        compares=any(count_compared(first) >= LEAST_KERNELS for first in (min(steps, _FIRST_STEPS), steps)),
        all_communicate=bool(np.all(communicates[has_kernels])),
    )


_FIRST_STEPS = 20
"""Number of steps that usually contain enough kernels that can be compared; they are tried before all steps."""


def limit_contention_ns(limits: Sequence[SlowdownLimit]) -> int | None:
    """Return an upper limit of ``Contention.contention_ns``; ``None`` if the contention may not be known.

    It is a limit because no execution of a kernel alone is shorter than the shortest execution of any kernel with its
    name. ``limits`` has one element per rank.
    """
    if not (any(limit.compares for limit in limits) and all(limit.all_communicate for limit in limits)):
        return None
    longer_ns = 0
    for name in {name for limit in limits for name in limit.by_name}:
        times = [limit.by_name[name] for limit in limits if name in limit.by_name]
        shortest_ns, beside = min(one.shortest_ns for one in times), sum(one.beside for one in times)
        longer_ns += sum(one.beside_ns for one in times) - beside * shortest_ns
    return longer_ns // sum(limit.steps for limit in limits) + 1
