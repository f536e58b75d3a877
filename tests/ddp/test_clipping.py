"""Gradients are clipped by one norm, that of the averages, which one process would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof.ddp import VARIANTS
from ddp_prof.errors import CommunicationError
from tests.ddp import loops
from tests.ddp.cases import whole

OURS = {
    "naive": {},
    "flat": {},
    "overlap": {},
    "bucketed": {"bucket_size_mb": 0.0001},
}
KINDS = {**OURS, "torch": {}, "sharded": {"bucket_size_mb": 0.0001}, "fsdp": {}}
WIDTH = 6
BATCH = 8
LARGEST = 0.7


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def wrap(key: str, module: nn.Module) -> Any:
    return VARIANTS[key](module, **KINDS[key])


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    """The whole batch of a step, or a rank's half of it."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x if rank is None else x.chunk(2)[rank]


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([whole(parameter.detach()).flatten() for parameter in module.parameters()])


def train(trained: loops.OneProcess, norm_type: float, rank: int | None) -> tuple[list[float], torch.Tensor]:
    """Norms of three steps whose gradients are clipped, and the weights after them; without a rank on all samples."""
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.5)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        (10 * trained.model(batch(step, rank)).square().mean()).backward()
        trained.finish()
        norms.append(trained.clip(LARGEST, norm_type).item())
        optimizer.step()
    return norms, flat(trained.module)


def clip_too_early(rank: int) -> dict[str, str]:
    messages = {}
    for key in OURS:
        variant = wrap(key, mlp())
        variant(batch(0, rank)).sum().backward()
        with pytest.raises(CommunicationError) as caught:
            variant.clip_grad_norm_(1.0)
        messages[key] = str(caught.value)
        variant.finish_gradient_synchronization()
    return messages


NORM_TYPES = (1.0, 2.0, float("inf"))


def everything(rank: int) -> dict[Any, Any]:
    return {
        "clip": {
            (key, norm_type): train(loops.Variant(wrap(key, mlp())), norm_type, rank)
            for key in KINDS
            for norm_type in NORM_TYPES
        },
        "clip too early": clip_too_early(rank),
    }


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("key", list(KINDS))
def test_clipping_has_one_norm_on_all_ranks(results: list[Any], key: str, norm_type: float) -> None:
    norms, weights = train(loops.OneProcess(mlp()), norm_type, None)
    assert min(norms) > LARGEST
    for ranked in results:
        assert ranked["clip"][key, norm_type][0] == pytest.approx(norms, rel=1e-12)
        torch.testing.assert_close(ranked["clip"][key, norm_type][1], weights)


@pytest.mark.parametrize("key", list(OURS))
def test_clipping_what_is_not_synchronized_is_an_error(results: list[Any], key: str) -> None:
    assert "call finish_gradient_synchronization()" in results[0]["clip too early"][key]
