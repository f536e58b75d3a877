"""The typical step of a run: the step that headlines, parts of a step, pages and pictures show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddp_prof.trace import Ints

PARTS = ("compute_only", "overlapped", "exposed", "exposed_memory", "idle")
"""The parts of a step's length, see :class:`ddp_prof.analyze.step_columns.StepLength`."""
_EXPOSED = PARTS.index("exposed")


def distances_from_medians(parts: Ints) -> Ints:
    """Return how far each step is from a step of median values, in nanoseconds.

    That is the sum of the absolute differences of its length and its parts from the medians over all steps. ``parts``
    has one row per step, and its columns are :data:`PARTS`.
    """
    table = np.column_stack([parts, parts.sum(axis=1)])
    distances: Ints = np.abs(table - np.median(table, axis=0)).sum(axis=1).astype(np.int64)
    return distances


def find_typical_step(keys: Ints, parts: Ints) -> int | None:
    """Return the key of the step that is nearest to the medians of all; ``None`` without steps.

    A step that some ranks lack is chosen only if all are such: what its collectives waited for cannot be told.

    The first and last step of a capture are often cut, or warm up or write results. One of them is chosen only if every
    other step is further away than the median distance of those that may be chosen. If several steps are equally near,
    the one with most exposed time is chosen.

    Args:
        keys: For each step of each rank, the key of the step of the run.
        parts: For each step of each rank, a row of :data:`PARTS` in nanoseconds. The distance of a step is the mean of
            its ranks.
    """
    if not len(keys):
        return None
    each, which, ranks_of = np.unique(keys, return_inverse=True, return_counts=True)
    away = np.bincount(which, distances_from_medians(parts)) / np.bincount(which)
    exposed = np.bincount(which, parts[:, _EXPOSED])
    order = np.lexsort((-exposed, away))
    order = order[ranks_of[order] == ranks_of.max()]
    inner = order[(order > 0) & (order < len(each) - 1)]
    fits = len(inner) > 0 and away[inner[0]] <= np.median(away[order])
    return int(each[inner[0] if fits else order[0]])


def typical_step_of(ranks: Sequence[tuple[Ints, Ints]]) -> int | None:
    """Return the key of the typical step of a run; ``None`` without steps.

    ``ranks`` holds for each rank the keys and the parts of its steps, as :func:`find_typical_step` takes them.
    """
    known = [(keys, parts) for keys, parts in ranks if len(keys)]
    if not known:
        return None
    return find_typical_step(np.concatenate([keys for keys, _ in known]), np.concatenate([part for _, part in known]))
