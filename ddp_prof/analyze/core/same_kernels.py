"""Which executions are of one and the same kernel, and which of them had communication beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ddp_prof.trace import UNKNOWN, distinct_rows

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ddp_prof.trace import Ints, Mask, Trace

Key = TypeVar("Key", bound="Hashable")


def same_kernels(trace: Trace, activity: Ints, *more: Ints) -> tuple[list[tuple[Any, ...]], Ints]:
    """Name and launch shape of each kernel that occurs, and for each activity which one it is.

    Args:
        trace: The trace.
        activity: Rows of its activities.
        more: What else tells kernels apart, a column each; follows name and shape.
    """
    shape_id = np.full(len(activity), UNKNOWN) if trace.shape_id is None else trace.shape_id[activity]
    columns = (trace.activities.name_id[activity], shape_id, *more)
    first, kernel = distinct_rows(*columns)
    texts = (*trace.names, "")  # UNKNOWN, which is -1, finds the last one
    rows = zip(*(column[first].tolist() for column in columns), strict=True)
    return [(texts[name], texts[shape], *others) for name, shape, *others in rows], kernel


def numbered_together(parts: Iterable[tuple[Sequence[Key], Ints]]) -> tuple[list[Key], Ints]:
    """The keys of all parts, each once, and for the rows of all parts, one after the other, which of them it has."""
    parts = list(parts)
    number: dict[Key, int] = {}
    rows = [np.array([number.setdefault(key, len(number)) for key in keys], np.int64)[row] for keys, row in parts]
    return list(number), np.concatenate(rows) if rows else np.empty(0, np.int64)


def mostly_beside(duration_ns: Ints, communication_ns: Ints) -> Mask:
    """Whether communication ran beside an execution for more than half of its time."""
    found: Mask = 2 * communication_ns > duration_ns
    return found
