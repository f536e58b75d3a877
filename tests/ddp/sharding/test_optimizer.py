"""Steps of a sharded optimizer equal those of the whole one; each rank keeps its part of the state."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof.ddp import ShardedOptimizer
from tests.ddp.gloo_ranks import run_ranks


class Toy(nn.Module):
    """As in CS336's assignment 2: three layers, and a parameter that is not trained."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(10, 10, bias=False), nn.LayerNorm(10), nn.Linear(10, 5)
        self.frozen = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        self.third = nn.Linear(10, 10, bias=False)
        if is_tied:
            self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.third(self.norm(torch.relu(self.first(x))))))


def train(rank: int, is_tied: bool, world: int) -> dict[str, Any]:
    """Ten steps with AdamW and a schedule on equal data, sharded and whole: parameters, and bytes of state."""
    torch.manual_seed(0)
    model = Toy(is_tied)
    twin = copy.deepcopy(model)
    kwargs = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    whole: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    sharded: torch.optim.Optimizer = ShardedOptimizer(twin.parameters(), torch.optim.AdamW, **kwargs)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in (whole, sharded)]
    for _ in range(10):
        x, y = torch.rand(8, 10), torch.rand(8, 5)
        for module, optimizer in ((model, whole), (twin, sharded)):
            optimizer.zero_grad()
            (module(x) - y).square().sum().backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    return {
        "whole": model.state_dict(),
        "sharded": twin.state_dict(),
        "bytes": [state_bytes(whole), state_bytes(sharded.local)],
    }


def state_bytes(optimizer: Any) -> int:
    """Bytes of the moments; the counters of steps are left out."""
    if optimizer is None:
        return 0
    return sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")


def groups(rank: int) -> dict[str, Any]:
    """A group added later with a learning rate of its own; a closure; state saved and loaded."""
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(6))
    optimizer = ShardedOptimizer([first], torch.optim.SGD, lr=1.0, momentum=0.5)
    optimizer.add_param_group({"params": [second], "lr": 0.1})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = first.sum() + second.sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step(closure)
    after = [first[0].item(), second[0].item()]
    with torch.no_grad():
        first.fill_(0.0)
        second.fill_(0.9)
    optimizer.load_state_dict(saved)
    optimizer.step(closure)
    again = [first[0].item(), second[0].item()]
    return {
        "loss": loss.item(),
        "after": after,
        "again": again,
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_equals_the_whole_optimizer(is_tied: bool, world: int) -> None:
    results = run_ranks(partial(train, is_tied=is_tied, world=world), world)
    for result in results:
        for name, value in result["whole"].items():
            torch.testing.assert_close(result["sharded"][name], value)
    whole, _ = results[0]["bytes"]
    parts = [result["bytes"][1] for result in results]
    assert sum(parts) == whole
    assert max(parts) < whole


def test_groups_closures_and_saved_state() -> None:
    for result in run_ranks(groups):
        assert result["loss"] == 10
        assert result["lr"] == [1.0, 0.1]
        assert result["after"] == pytest.approx([-1.5, 1 - 0.1 - 0.15])
        assert result["again"] == pytest.approx([-1.5, 0.9 - 0.15])
