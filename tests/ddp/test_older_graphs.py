"""A graph from before a step: autograd refuses it if it needs a weight that the step has changed, as in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ddp_prof.ddp import NaiveDDP, ShardedDDP, ShardedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable


class Heads(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.stepped, self.idle = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.stepped(x), self.idle(x)


def one_process(module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def naive(module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    return one_process(NaiveDDP(module))


def sharded(module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    variant = ShardedDDP(module)
    return variant, torch.optim.SGD(variant.optimizer_parameters(), lr=0.1)


def divided(module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    variant = NaiveDDP(module)
    return variant, ShardedOptimizer(variant.parameters(), torch.optim.SGD, lr=0.1)


WAYS: dict[str, Callable[[nn.Module], tuple[Any, torch.optim.Optimizer]]] = {
    "one process": one_process,
    "naive": naive,
    "sharded": sharded,
    "ShardedOptimizer": divided,
}


def everything(rank: int) -> dict[tuple[str, bool], dict[str, str]]:
    """What autograd says of a backward through each head after a step of one, by way and whether layers have biases."""
    return {(way, bias): after_a_step(make, bias) for way, make in WAYS.items() for bias in (False, True)}


def after_a_step(make: Callable[[nn.Module], tuple[Any, torch.optim.Optimizer]], bias: bool) -> dict[str, str]:
    model, optimizer = make(Heads(bias))
    x = torch.ones(1, 4, requires_grad=True)
    before = dict(zip(("stepped", "idle"), model(x), strict=True))
    model(x)[0].sum().backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    return {name: said_of(output) for name, output in before.items()}


def said_of(output: torch.Tensor) -> str:
    try:
        output.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", list(WAYS))
def test_an_older_graph_is_refused_only_if_its_weights_were_stepped_on(results: list[Any], way: str) -> None:
    for ranked in results:
        for bias in (False, True):
            said = ranked[way, bias]
            assert "has been modified by an inplace operation" in said["stepped"]
            assert said["idle"] == ""
