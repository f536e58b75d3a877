"""Options of bucketed: buckets in the order in which gradients come, and gradients in fewer bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_prof.ddp import BucketedDDP, annotate
from ddp_prof.ddp.annotate import Recorder
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
    with annotate.listening(recorder):
        variant(x).square().mean().backward()
        variant.finish_gradient_synchronization()
    names = [parse_range(taken.text) for taken in recorder.ranges if taken.text.startswith("all_reduce")]
    return [name.number("bytes") or 0 for name in names]


def rebuilt(rank: int) -> list[Any]:
    variant = BucketedDDP(Swapped(rank), 2 * LAYER_MB, rebuild_buckets=True)
    assignments = [variant.assignment]
    for _ in range(2):
        step(variant, torch.randn(3, WIDTH))
        assignments.append(variant.assignment)
    return assignments


def compressed(rank: int) -> dict[str, Any]:
    """Gradients with and without compression, the mean of the ranks' absolute ones, bytes sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    magnitude = torch.cat([parameter.grad.abs().flatten() for parameter in model.parameters()])
    dist.all_reduce(magnitude)
    found: dict[str, Any] = {"magnitude": magnitude / dist.get_world_size()}
    for compression in (None, "bf16"):
        variant = BucketedDDP(model, 1, compression=compression)
        found[f"bytes {compression}"] = step(variant, x)
        found[f"{compression}"] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone()
        variant.remove()
    return found


def stepped(rank: int) -> dict[str, Any]:
    """Five steps of AdamW in backward on this rank's half, and in one process on all samples; refused options."""
    weights = {}
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
    for name in ("in backward", "one process"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        if name == "in backward":
            variant = BucketedDDP(model, LAYER_MB, step_in_backward=lambda own: torch.optim.AdamW(own, lr=0.05))
            recorder = Recorder()
            with annotate.listening(recorder):
                for _ in range(5):
                    with annotate.backward():
                        loss = variant(x[rank * 4 : rank * 4 + 4]).square().mean()
                        loss.backward()
                    variant.finish_gradient_synchronization()
            gradients = [parameter.grad for parameter in model.parameters()]
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            for _ in range(5):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        weights[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    left = variant.optimizer_parameters(), len(variant.optimizers)
    return {**weights, "gradients": gradients, "left": left, "ranges": recorder.ranges}


def everything(rank: int) -> dict[str, Any]:
    return {"rebuilt": rebuilt(rank), "compressed": compressed(rank), "stepped": stepped(rank)}


@pytest.mark.parametrize("rank", [0, 1])
def test_buckets_are_rebuilt_once_by_the_order_of_rank_0(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["rebuilt"] == [[(3, 2), (1, 0)], [(1, 3), (0, 2)], [(1, 3), (0, 2)]]


def test_bf16_halves_the_bytes(results: list[dict[str, Any]]) -> None:
    found = results[0]["compressed"]
    assert [2 * size for size in found["bytes bf16"]] == found["bytes None"]


def test_the_error_of_bf16_is_as_stated(results: list[dict[str, Any]]) -> None:
    found = results[0]["compressed"]
    error = (found["bf16"] - found["None"]).abs()
    assert (error <= 2 * 2**-8 * found["magnitude"] + 1e-12).all()
    assert error.max() > 0


def test_there_is_no_other_compression() -> None:
    with pytest.raises(ValueError, match="compression must be None, 'bf16' or a PowerSGD"):
        BucketedDDP(nn.Linear(2, 2), 1, compression="zip")


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_in_backward_equal_one_process(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]["stepped"]
    torch.testing.assert_close(found["in backward"], found["one process"], rtol=1e-4, atol=1e-5)
    assert found["gradients"] == [None] * 8
    assert found["left"] == ([], 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_step_on_a_bucket_has_a_range_within_backward_or_synchronize(
    results: list[dict[str, Any]], rank: int
) -> None:
    recorded = results[rank]["stepped"]["ranges"]
    steps = [taken for taken in recorded if taken.text.startswith("optimizer")]
    holders = [taken for taken in recorded if taken.text in ("backward", "synchronize")]
    assert [taken.text for taken in steps] == [f"optimizer|bucket={bucket}" for bucket in range(8)] * 5
    held = [
        sum(holder.start_ns <= taken.start_ns <= taken.end_ns <= holder.end_ns for holder in holders) for taken in steps
    ]
    assert held == [1] * 40


def test_steps_in_backward_go_with_no_other_option() -> None:
    with pytest.raises(ValueError, match="step_in_backward goes with no other option"):
        BucketedDDP(nn.Linear(2, 2), 1, compression="bf16", step_in_backward=torch.optim.SGD)
