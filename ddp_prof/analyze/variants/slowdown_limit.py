"""What communication beside kernels can cost at most, where their launch shapes are not known yet.

:mod:`~ddp_prof.analyze.variants.contention` compares kernels of one name, launch shape and position in the step. To
read the shapes of a million kernels takes as long as their times. Without them a kernel is compared with the shortest
execution of its name alone, which no median of some of these is below: so the limit is never below the figure. That
there would be a figure is shown by the shapes of the first kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.kernels.kernel_times import is_mostly_overlapped, merge_keys
from ddp_prof.analyze.variants.contention import LEAST_KERNELS, find_samples, kernel_keys, rows_of_compute
from ddp_prof.table import Ints, distinct_rows
from ddp_prof.trace import Category

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class SlowdownLimit:
    """What limits the slowdown of the kernels of one rank.

    Attributes:
        names: Names of kernels.
        shortest_ns: The shortest execution alone of each; the largest integer where it never ran alone.
        kernel: Of each execution beside communication the index into ``names``.
        duration_ns: How long each took.
        compared: How many kernels are known to have run both beside communication and alone.
        all_communicate: Whether kernels ran beside communication in each step that has any.
        steps: Number of measured steps.
    """

    names: tuple[str, ...]
    shortest_ns: Ints
    kernel: Ints
    duration_ns: Ints
    compared: int
    all_communicate: bool
    steps: int


def limit_slowdown(rank: RankEvents) -> SlowdownLimit:
    """What the trace tells without the shapes of all kernels."""
    events, rows = rank.events, rows_of_compute(rank)
    step, duration_ns = events.step[rows], events.end_ns[rows] - events.start_ns[rows]
    beside_ns = rank.union_of(Category.COMMUNICATION).covered_ns(events.start_ns[rows], events.end_ns[rows])
    is_beside = is_mostly_overlapped(duration_ns, beside_ns)
    name_id = rank.trace.activities.name_id[events.activity[rows]]
    first, kernel = distinct_rows(name_id)
    shortest_ns = np.full(len(first), _NEVER)
    np.minimum.at(shortest_ns, kernel[beside_ns == 0], duration_ns[beside_ns == 0])
    has_kernels, communicates = (np.bincount(of, minlength=len(rank.steps)) > 0 for of in (step, step[is_beside]))
    return SlowdownLimit(
        names=tuple(rank.trace.names[name] for name in name_id[first].tolist()),
        shortest_ns=shortest_ns,
        kernel=kernel[is_beside],
        duration_ns=duration_ns[is_beside],
        compared=_count_compared(rank, rows),
        all_communicate=bool(np.all(communicates[has_kernels])),
        steps=len(rank.steps),
    )


def _count_compared(rank: RankEvents, rows: Ints) -> int:
    """How many kernels ran both beside communication and alone, in the steps all of whose shapes are known."""
    step = rank.events.step[rows]
    is_whole = np.ones(len(rank.steps), np.bool_)
    is_whole[step[rank.events.activity[rows] >= rank.trace.shapes_known]] = False
    found = find_samples(rank, rows[is_whole[step]])
    key = kernel_keys([found])
    is_beside = is_mostly_overlapped(found.duration_ns, found.beside_ns)
    return len(np.intersect1d(key[is_beside], key[found.beside_ns == 0]))


def limit_contention_ns(limits: Sequence[SlowdownLimit]) -> int | None:
    """What ``measure_contention`` would find at most; ``None`` where it may find a reason for not telling anything.

    Args:
        limits: The ranks of a run.
    """
    compared = max((one.compared for one in limits), default=0)
    if compared < LEAST_KERNELS or not all(one.all_communicate for one in limits):
        return None
    names, kernel = merge_keys((one.names, one.kernel) for one in limits)
    number = {name: index for index, name in enumerate(names)}
    shortest_ns = np.full(len(names), _NEVER)
    for one in limits:
        np.minimum.at(shortest_ns, np.array([number[name] for name in one.names], np.int64), one.shortest_ns)
    duration_ns = np.concatenate([one.duration_ns for one in limits])
    longer_ns = int(np.maximum(0, duration_ns - shortest_ns[kernel]).sum())
    return longer_ns // sum(one.steps for one in limits) + 1
