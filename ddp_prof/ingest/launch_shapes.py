"""The launch shape of kernels, as a name: ``grid 256x1x1 block 128x1x1``.

Only comparing kernels with themselves needs it, so it is read on request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.ingest.string_table import NameTable
from ddp_prof.trace import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.trace import Ints, Trace

SIZES = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
"""What makes a shape, as Nsight Systems calls its columns."""


def add_launch_shapes(trace: Trace, sizes: Sequence[Ints]) -> Trace:
    """Name the shape of each kernel.

    Args:
        trace: Its kernels come first among the activities.
        sizes: A column for each of :data:`SIZES`, a row a kernel; ``UNKNOWN`` where the profiler noted none.
    """
    names = NameTable(trace.names)
    used, which = np.unique(np.stack(sizes, axis=1), axis=0, return_inverse=True)
    index = [UNKNOWN if UNKNOWN in row else names.intern(_name(row)) for row in used.tolist()]
    shape_id = np.full(len(trace.activities), UNKNOWN, np.int64)
    shape_id[: len(which)] = np.array(index, np.int64)[which.reshape(-1)]
    return replace(trace, names=names.as_tuple(), shape_id=shape_id)


def _name(sizes: Sequence[int]) -> str:
    grid, block = ("x".join(map(str, part)) for part in (sizes[:3], sizes[3:]))
    return f"grid {grid} block {block}"
