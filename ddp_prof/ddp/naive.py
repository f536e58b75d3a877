"""Naive: nothing is sent before backward has ended; then one all-reduce a parameter, each waited for.

    host      |  forward  |     backward     |           synchronize           |optimizer|
    compute   |###########|##################|                                 |#########|
    all-reduce                               |[p9]|[p8]|[p7]| ... |[p1]|[p0]   |

forward      computes the loss.
backward     computes all gradients; no hook, no communication.
synchronize  last parameter first: copy the gradient, divided, into a buffer, all-reduce that, wait; then the next.
             The gradient stays a view of the buffer: nothing is copied back.
optimizer    steps on the averaged gradients.

Nothing overlaps, and each parameter pays the latency of a collective of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ddp_prof.ddp.bucket_assignment import assign_each
from ddp_prof.ddp.reducing import ReducingVariant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.ddp.bucket_assignment import Assignment, ParameterSize


class NaiveDDP(ReducingVariant):
    """After backward, one blocking all-reduce a parameter. Arguments as in :class:`ReducingVariant`."""

    is_blocking: ClassVar[bool] = True

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_each(sizes)

    def _synchronize(self) -> None:
        for _ in self._reducer.buckets:
            self._reducer.launch_next().wait()
        self._reducer.finish()
