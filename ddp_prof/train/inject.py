"""Faults put into a run on purpose, so that what finds them can be tested: ``--inject``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_prof.run_config import FAULTS

NOTHING, HOST_SYNC, ONE_BUCKET, REVERSED, SLOW_RANK, STARVED = FAULTS
SLOW_RANK_S = 0.2
"""How long the slow rank sleeps at the start of each backward."""


class ReversedModules(nn.Module):
    """A model whose parameters are registered in the order in which backward does not come to them.

    Buckets are filled from the last parameter registered to the first, as gradients usually become ready. Here the
    gradients of the first bucket are the last ones to be ready.

    Args:
        model: The model; all its parameters are in modules without children.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        leaves = [module for module in model.modules() if not any(module.children())]
        for index, module in enumerate(reversed(leaves)):
            self.add_module(str(index), module)
        self._model = (model,)  # in a tuple, lest it be registered once more

    def forward(self, *inputs: Any) -> Any:
        """What the model computes."""
        return self._model[0](*inputs)


@contextmanager
def waiting_collectives(device: torch.device) -> Iterator[None]:
    """The host waits for each all-reduce as soon as it was launched."""
    launch = dist.all_reduce

    def launch_and_wait(*args: Any, **options: Any) -> Any:
        work = launch(*args, **options)
        if work is not None:
            work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return work

    dist.all_reduce = launch_and_wait
    try:
        yield
    finally:
        dist.all_reduce = launch
