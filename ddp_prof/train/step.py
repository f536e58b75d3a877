"""One training step of any variant, marked with ranges and timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from ddp_prof.ddp import annotate
from ddp_prof.ddp.collective import communication_errors
from ddp_prof.train.numerics import autocast

if TYPE_CHECKING:
    from torch import Tensor

    from ddp_prof.ddp import DataParallel


class StepResult(NamedTuple):
    """What a step gave and cost on this rank.

    Attributes:
        loss: Mean over this rank's share of the batch.
        step_seconds: Host seconds from the step's start until the device has finished it.
        communication_seconds: The variant's host seconds of waiting for gradients.
    """

    loss: float
    step_seconds: float
    communication_seconds: float


class Trainer:
    """Trains ``variant`` with ``optimizer``; counts the steps, warm-up ones apart from the others.

    Args:
        variant: What is trained.
        optimizer: Steps on its parameters.
        delay_s: Sleep so long at the start of each backward; a straggler to be found.
        precision: ``fp32``, or ``bf16`` by autocast.
    """

    def __init__(
        self,
        variant: DataParallel,
        optimizer: torch.optim.Optimizer,
        delay_s: float = 0.0,
        precision: str = "fp32",
    ) -> None:
        self.precision = precision
        self.variant = variant
        self.optimizer = optimizer
        self.delay_s = delay_s
        self._done = {False: 0, True: 0}

    def train_step(self, inputs: Tensor, targets: Tensor, *, warmup: bool = False) -> StepResult:
        """Take one step on this rank's share of the batch, ``[batch, seq]`` each.

        Raises:
            CommunicationError: A collective failed.
        """
        begin = time.perf_counter()
        with annotate.step(self._done[warmup], warmup):
            loss = self._step(inputs, targets)
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
        self._done[warmup] += 1
        return StepResult(loss.item(), time.perf_counter() - begin, self.variant.communication_seconds)

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with annotate.forward(), autocast(inputs.device, self.precision):
            loss = functional.cross_entropy(self.variant(inputs).flatten(0, 1), targets.flatten())
        # torch's DDP communicates in backward, where it fails with a bare RuntimeError.
        with annotate.backward(), communication_errors(self.variant.process_group, "communication in backward"):
            if self.delay_s:
                time.sleep(self.delay_s)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's omission
        self.variant.finish_gradient_synchronization()
        with annotate.optimizer():
            self.optimizer.step()
        return loss.detach()
