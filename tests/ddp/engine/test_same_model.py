"""Ranks with different models end with one error that says which tensor differs on which rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_prof.ddp import BucketedDDP, NaiveDDP, TorchDDP
from ddp_prof.ddp.engine.same_model import describe, find_difference
from ddp_prof.errors import CommunicationError
from tests.ddp.gloo_ranks import run_ranks


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def frozen() -> nn.Module:
    made = model()
    made[0].bias.requires_grad_(False)
    return made


def transposed() -> nn.Module:
    made = model()
    made[0].weight = nn.Parameter(torch.randn(2, 3).t())
    return made


DIFFERENT = {
    "wider": (lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), "parameter '0.weight' has shape (4, 2)"),
    "double": (lambda: model().double(), "parameter '0.weight' has dtype torch.float64, on rank 0 dtype torch.float32"),
    "frozen": (frozen, "parameter '0.bias' has requires_grad=False, on rank 0 requires_grad=True"),
    "transposed": (transposed, "parameter '0.weight' has strides (1, 3), on rank 0 strides (2, 1)"),
    "renamed": (lambda: nn.ModuleDict({"a": nn.Linear(2, 3)}), "parameter 'a.weight' stands where rank 0 has"),
    "no buffers": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)),
        "buffer '1.running_mean' of rank 0 is missing",
    ),
    "more": (
        lambda: nn.Sequential(*model(), nn.BatchNorm1d(3, affine=False)),
        "buffer '2.running_mean' is not there on rank 0",
    ),
}


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_the_first_difference_is_named(name: str) -> None:
    build, words = DIFFERENT[name]
    difference = find_difference(describe(build()), describe(model()))
    assert difference is not None
    assert difference.startswith(words)


def test_equal_models_have_no_difference() -> None:
    assert find_difference(describe(model()), describe(model())) is None


def wrap_another_model_on_rank_1(rank: int) -> list[str]:
    messages = []
    for make in (NaiveDDP, lambda module: BucketedDDP(module, 1), TorchDDP):
        with pytest.raises(CommunicationError) as caught:
            make(nn.Linear(2, 3 + rank))
        messages.append(str(caught.value))
    return messages


def test_every_rank_says_which_rank_differs() -> None:
    expected = "rank 1: parameter 'weight' has shape (4, 2), on rank 0 shape (3, 2): build the same model on every rank"
    assert run_ranks(wrap_another_model_on_rank_1) == [[expected] * 3] * 2
