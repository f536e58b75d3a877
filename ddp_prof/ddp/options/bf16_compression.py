"""Gradients travel in fewer bits than they have: half the bytes, at the price of rounding.

    gradient (float32, divided) -> bfloat16 -> all-reduce in bfloat16 -> float32 view of the bucket

A bfloat16 has 8 significant bits, so rounding changes a value by at most u = 2**-8 of itself. Each of n ranks rounds
once and the sum rounds n - 1 times: to first order the average is off by at most n u times the mean of the ranks'
absolute values (Higham 2002, section 4.2). Weights, state and what the optimizer reads stay in full precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddp_prof.ddp.engine.collective import launch_all_reduce
from ddp_prof.ddp.engine.reducer import Reducer

if TYPE_CHECKING:
    from ddp_prof.ddp.engine.collective import InFlight
    from ddp_prof.ddp.engine.gradient_bucket import GradientBucket


class Bf16Reducer(Reducer):
    """Reduces buckets in bfloat16; late contributions in full. Arguments as of :class:`Reducer`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sent: list[torch.Tensor] = []

    def _launch(self, bucket: GradientBucket) -> InFlight:
        self._sent.append(bucket.tensor().to(torch.bfloat16))
        return launch_all_reduce(self._sent[-1], self._group, bucket.index, len(bucket))

    def _give_back(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        for bucket, received in zip(self.buckets, self._sent, strict=True):
            bucket.tensor().copy_(received)
        self._sent.clear()
        super()._give_back(unused, late)
