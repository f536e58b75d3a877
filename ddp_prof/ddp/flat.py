"""Flat: nothing is sent before backward has ended; then all gradients at once, in one buffer.

    host      |  forward  |     backward     |      synchronize      |optimizer|
    compute   |###########|##################|                       |#########|
    all-reduce                               |[ p9 p8 p7 ... p1 p0 ] |

forward      computes the loss.
backward     computes all gradients; no hook, no communication.
synchronize  copy every gradient, divided, into one flat buffer (one a data type and device), all-reduce it, wait.
             The gradients stay views of the buffer: nothing is copied back.
optimizer    steps on the averaged gradients.

Nothing overlaps, but the latency of a collective is paid once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ddp_prof.ddp.bucket_assignment import assign_buckets
from ddp_prof.ddp.reducing import ReducingVariant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.ddp.bucket_assignment import Assignment, ParameterSize


class FlatDDP(ReducingVariant):
    """After backward, one all-reduce of one flat buffer. Arguments as in :class:`ReducingVariant`."""

    is_blocking: ClassVar[bool] = True

    def _assign(self, sizes: Sequence[ParameterSize]) -> Assignment:
        return assign_buckets(sizes, cap_bytes=None)
