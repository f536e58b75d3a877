"""Optimizer step in backward: each bucket has an optimizer, which steps when the bucket's gradients have arrived.

    host        |  forward  |        backward         |synchronize|
    compute     |###########|########|o0|####|o1|#####|  |o2|     |
    all-reduce                  [b0]   [b1]    [b2]      |

forward      computes the loss.
backward     the hook that fills a bucket first looks which earlier buckets have arrived: their gradients are handed to
             their optimizers and dropped. Then it launches its own all-reduce.
synchronize  wait for the buckets that are left, and step on each.
optimizer    nothing is left; each bucket's step has a range ``optimizer|bucket=3`` where it was taken.

A layer's weights may change before backward ends: its own gradients are complete then. Autograd raises an error if
something still needs the old weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.ddp import annotate
from ddp_prof.ddp.engine.reducer import Reducer
from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ddp_prof.ddp.engine.collective import InFlight
    from ddp_prof.ddp.engine.gradients import GradientBucket


class SteppingReducer(Reducer):
    """Reduces buckets and steps on each as it arrives.

    Args:
        args: As of :class:`Reducer`.
        make_optimizer: Called once a bucket with its parameters.
    """

    def __init__(
        self, *args: Any, make_optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(*args)
        self.optimizers = [make_optimizer(bucket.parameters) for bucket in self.buckets]
        self._stepped = 0

    def _launch(self, bucket: GradientBucket) -> InFlight:
        while self._stepped < len(self._in_flight) and self._in_flight[self._stepped].is_completed():
            self._step_next()
        return super()._launch(bucket)

    def _step_next(self) -> None:
        bucket = self.buckets[self._stepped]
        self._in_flight[self._stepped].wait()
        with annotate.optimizer(bucket.index):
            for slot in range(len(bucket)):
                bucket.give_back(slot, True, None)
            self.optimizers[self._stepped].step()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._stepped += 1

    def _give_back(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:  # noqa: ARG002  # they got zeros
        while self._stepped < len(self.buckets):
            self._step_next()
        self._stepped = 0
        if late:
            raise CommunicationError(
                "a gradient came twice in one backward, after its optimizer may have stepped: "
                "use checkpoint(use_reentrant=False), and one backward a step"
            )
