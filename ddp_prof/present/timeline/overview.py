"""A whole timeline at low resolution: what a page shows until its boxes are read."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.intervals import Intervals
from ddp_prof.trace import select

if TYPE_CHECKING:
    from ddp_prof.present.timeline.model import Boxes

COLUMNS = 1000


def overview(boxes: Boxes, start_ns: int, end_ns: int) -> dict[int, str]:
    """For each category, how much of each column its boxes cover, from 0 to 255, as base64.

    Args:
        boxes: In order; they do not overlap.
        start_ns: Start of the first column.
        end_ns: End of the last column.
    """
    edges = np.linspace(start_ns, end_ns, COLUMNS + 1).astype(np.int64)
    result = {}
    for category in np.unique(boxes.category).tolist():
        mine = select(boxes, boxes.category == category)
        covered = Intervals(mine.start_ns, mine.end_ns).covered_ns(edges[:-1], edges[1:])
        shares = np.ceil(255 * covered / np.maximum(1, np.diff(edges)))  # whatever is there is seen
        result[category] = base64.b64encode(shares.astype(np.uint8).tobytes()).decode()
    return result
