"""Sharded: what each rank keeps, when parameters are whole, what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof.ddp import ShardedDDP
from ddp_prof.errors import CommunicationError
from tests.ddp.sharding.test_optimizer import state_bytes


def make(**options: Any) -> ShardedDDP:
    torch.manual_seed(0)
    return ShardedDDP(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), 0.0001, **options)


def backward(variant: Any, rank: int) -> None:
    variant(torch.full((2, 5), float(rank + 1))).sum().backward()


def kept(rank: int) -> dict[str, Any]:
    """Bytes of state and gradients after a step, of all parameters; gradients of the module."""
    variant = make()
    optimizer = torch.optim.AdamW(variant.optimizer_parameters())
    backward(variant, rank)
    variant.finish_gradient_synchronization()
    optimizer.step()
    return {
        "state": state_bytes(optimizer),
        "gradients": sum(shard.grad.nbytes for shard in variant.optimizer_parameters()),
        "parameters": sum(parameter.nbytes for parameter in variant.parameters()),
        "full gradients": sum(parameter.grad is not None for parameter in variant.parameters()),
        "buffers": sum(len(bucket._buffer) for bucket in variant._reducer.buckets),
    }


def accumulated(rank: int) -> list[bool]:
    """Two synchronized backwards without zero_grad between add up; so they do after zero_grad to zeros."""
    variant = make()
    backward(variant, rank)
    variant.finish_gradient_synchronization()
    once = [shard.grad.clone() for shard in variant.optimizer_parameters()]
    backward(variant, rank)
    variant.finish_gradient_synchronization()
    twice = [shard.grad.clone() for shard in variant.optimizer_parameters()]
    return [torch.allclose(2 * a, b) for a, b in zip(once, twice, strict=True)]


def whole(rank: int) -> list[bool]:
    """After a step: are the parameters in ``state_dict``, a copy and the module those of the other rank, too?"""
    variant = make()
    optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=1)
    for _ in range(2):
        backward(variant, rank)
        variant.finish_gradient_synchronization()
        optimizer.step()
    saved = {name: tensor.clone() for name, tensor in variant.state_dict().items()}
    variant.wait_for_parameters()
    twin = copy.deepcopy(variant)
    twins = dict(twin.module.named_parameters())
    return [
        torch.equal(parameter, saved[f"module.{name}"]) and torch.equal(parameter, twins[name])
        for name, parameter in variant.module.named_parameters()
    ]


def refused(rank: int) -> list[str]:
    with pytest.raises(CommunicationError) as unused:
        make(find_unused_parameters=True)
    variant = make()
    variant.module[0].weight.requires_grad_(False)
    with pytest.raises(CommunicationError) as frozen:
        backward(variant, rank)
    return [str(unused.value), str(frozen.value)]


def everything(rank: int) -> dict[str, Any]:
    return {check.__name__: check(rank) for check in (kept, accumulated, whole, refused)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_its_part_of_state_and_gradients(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]["kept"]
    padding = 4 * 4  # one element in each bucket at most
    assert found["parameters"] / 2 <= found["gradients"] <= found["parameters"] / 2 + padding
    assert found["state"] == 2 * found["gradients"]
    assert found["full gradients"] == found["buffers"] == 0


def test_gradients_add_up(results: list[dict[str, Any]]) -> None:
    assert all(results[0]["accumulated"])


def test_parameters_are_whole_where_they_are_read(results: list[dict[str, Any]]) -> None:
    assert all(results[0]["whole"])
    assert all(results[1]["whole"])


def test_what_flat_parts_cannot_do_is_refused(results: list[dict[str, Any]]) -> None:
    unused, frozen = results[0]["refused"]
    assert "find_unused_parameters=False" in unused
    assert "wrap the module again" in frozen
