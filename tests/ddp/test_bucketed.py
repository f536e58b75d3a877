"""Options of bucketed: buckets in the order in which gradients come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof import annotate
from ddp_prof.annotate import Recorder
from ddp_prof.ddp import BucketedDDP
from ddp_prof.range_names import parse_range

WIDTH = 8
LAYER_MB = WIDTH * WIDTH * 4 / 2**20


class Swapped(nn.Module):
    """Layers that run in another order than they are registered; on rank 1 in a third one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.order = (2, 0, 3, 1) if rank == 0 else (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def step(variant: BucketedDDP, x: torch.Tensor) -> list[int]:
    """Bytes of the all-reduces of a step."""
    recorder = Recorder()
    variant.zero_grad()
    with annotate.only_sink(recorder):
        variant(x).square().mean().backward()
        variant.finish_gradient_synchronization()
    names = [parse_range(taken.text) for taken in recorder.ranges if taken.text.startswith("all_reduce")]
    return [name.number("bytes") or 0 for name in names]


def everything(rank: int) -> list[Any]:
    variant = BucketedDDP(Swapped(rank), 2 * LAYER_MB, rebuild_buckets=True)
    assignments = [variant.assignment]
    for _ in range(2):
        step(variant, torch.randn(3, WIDTH))
        assignments.append(variant.assignment)
    return assignments


@pytest.mark.parametrize("rank", [0, 1])
def test_buckets_are_rebuilt_once_by_the_order_of_rank_0(results: list[Any], rank: int) -> None:
    assert results[rank] == [[(3, 2), (1, 0)], [(1, 3), (0, 2)], [(1, 3), (0, 2)]]
