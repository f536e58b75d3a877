"""Overlap: each gradient is sent the moment backward has finished it, while backward computes the next.

    host      |  forward  |     backward     |synchronize|optimizer|
    compute   |###########|##################|           |#########|
    all-reduce                [p9] [p8] [p7] ... [p1][p0]|

forward      computes the loss.
backward     the hook of each parameter: copy the gradient, divided, into a buffer, launch its all-reduce, return.
             The launches keep the order last parameter first; a gradient that comes early waits for its turn.
synchronize  launch what no hook brought (unused parameters: zeros), then wait for all that is in flight.
             The gradients stay views of the buffers: nothing is copied back.
optimizer    steps on the averaged gradients.

What is exposed is the tail after backward; each parameter still pays the latency of a collective of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.ddp.bucket_assignment import assign_each
from ddp_prof.ddp.reducing import ReducingVariant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.ddp.bucket_assignment import Assignment, ParameterSize


class OverlapDDP(ReducingVariant):
    """From gradient hooks, one asynchronous all-reduce a parameter. Arguments as in :class:`ReducingVariant`."""

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_each(sizes)
