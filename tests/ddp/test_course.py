"""The contract of CS336's assignment 2, through adapters as its tests call them.

Two ranks see half of the samples each, a twin in one process sees all of them; after every one of five steps the
weights are equal, also where two parameters are tied, and a parameter that is not trained stays as it is. Ranks start
from different weights: those of rank 0 count.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP, ShardedOptimizer
from tests.ddp.test_sharded_optimizer import Toy

STEPS = 5
SAMPLES = 20
BUCKET_SIZES_MB = (0.0016, 0.0001, 0.01)


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    return OverlapDDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> nn.Module:
    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Nothing to do: the end of a step makes buckets ready for the next one."""


def get_sharded_optimizer(params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any) -> Any:
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def whole_optimizer(params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any) -> Any:
    return optimizer_cls(params, **kwargs)


MAKE = {
    "individual": get_ddp_individual_parameters,
    "naive": NaiveDDP,
    "flat": FlatDDP,
    **{f"bucketed {size}": partial(get_ddp_bucketed, bucket_size_mb=size) for size in BUCKET_SIZES_MB},
}


def same_weights(module: nn.Module, twin: nn.Module) -> bool:
    pairs = zip(module.parameters(), twin.parameters(), strict=True)
    return all(torch.allclose(own, other) for own, other in pairs)


def train(rank: int, make: Any, is_tied: bool, is_sharded: bool) -> list[bool]:
    """Of each step: are the weights those of the twin, which in turn moved?"""
    torch.manual_seed(rank)
    ddp_model = make(Toy(is_tied))
    twin = copy.deepcopy(ddp_model.module)
    make_optimizer = get_sharded_optimizer if is_sharded else whole_optimizer
    ddp_optimizer = make_optimizer(ddp_model.parameters(), torch.optim.SGD, lr=0.1)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    torch.manual_seed(42)
    all_x, all_y = torch.rand(SAMPLES, 10), torch.rand(SAMPLES, 5)
    answers = []
    for _ in range(STEPS):
        ddp_bucketed_on_train_batch_start(ddp_model, ddp_optimizer)
        before = [parameter.clone() for parameter in twin.parameters()]
        twin_optimizer.zero_grad()
        nn.functional.mse_loss(twin(all_x), all_y).backward()
        twin_optimizer.step()
        ddp_optimizer.zero_grad()
        half = SAMPLES // 2
        own = slice(rank * half, (rank + 1) * half)
        nn.functional.mse_loss(ddp_model(all_x[own]), all_y[own]).backward()
        ddp_bucketed_on_after_backward(ddp_model, ddp_optimizer)
        ddp_optimizer.step()
        moved = any(not torch.equal(old, new) for old, new in zip(before, twin.parameters(), strict=True))
        frozen_rests = torch.equal(ddp_model.module.frozen, torch.tensor([2.0, 2.0]))
        answers.append(moved and frozen_rests and same_weights(ddp_model.module, twin))
        order = torch.randperm(SAMPLES)
        all_x, all_y = all_x[order], all_y[order]
    return answers


def everything(rank: int) -> dict[tuple[str, bool, bool], list[bool]]:
    return {
        (name, is_tied, is_sharded): train(rank, make, is_tied, is_sharded)
        for name, make in MAKE.items()
        for is_tied in (False, True)
        for is_sharded in (False, True)
    }


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", list(MAKE))
def test_weights_follow_the_twin(results: list[Any], name: str, is_tied: bool, is_sharded: bool) -> None:
    for ranked in results:
        assert ranked[name, is_tied, is_sharded] == [True] * STEPS
