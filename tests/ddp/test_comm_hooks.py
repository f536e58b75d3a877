"""Torch's own communication hooks on ``torch``: what they reduce is torch's, and each message is marked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_prof import annotate
from ddp_prof.annotate import Recorder
from ddp_prof.ddp import TorchDDP
from ddp_prof.ddp.reference import sent_bytes
from ddp_prof.errors import CommunicationError
from ddp_prof.range_names import parse_range

WIDTH = 16
LAYER_MB = WIDTH * WIDTH * 4 / 2**20
HOOKS = ("bf16", "powersgd")
STEPS = 5


def bare(name: str, model: nn.Module) -> nn.Module:
    """DDP with torch's hook, as torch documents it."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=LAYER_MB)
    if name == "bf16":
        # By a name of its own: torch refuses its hook by name where there is no GPU.
        ddp.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        return ddp
    state = PowerSGDState(None, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)

    def waited(future: torch.futures.Future[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        future.wait()
        return future

    ddp.register_comm_hook(state, lambda state, bucket: waited(powerSGD_hook(state, bucket)))
    return ddp


def train(model: nn.Module, wrapped: nn.Module, rank: int) -> list[Any]:
    """Of each step: gradients, of each message bucket and bytes, and the number of waits."""
    steps = []
    for step in range(STEPS):
        recorder = Recorder()
        model.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        with annotate.only_sink(recorder):
            wrapped(x).square().mean().backward()
        if isinstance(wrapped, TorchDDP):
            wrapped.finish_gradient_synchronization()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        waits = [taken for taken in recorder.ranges if taken.text == "synchronize"]
        launched = sorted(recorder.ranges, key=lambda taken: taken.start_ns)
        messages = [taken for taken in launched if taken.text.startswith("all_reduce")]
        names = [parse_range(message.text) for message in messages]
        steps.append((gradients, [(name.number("bucket"), name.number("bytes")) for name in names], len(waits)))
    return steps


def everything(rank: int) -> dict[str, Any]:
    found = {}
    for name in HOOKS:
        for kind in ("ours", "torch's"):
            torch.manual_seed(0)
            # Four matrices and a vector; twice a bucket holds nothing but a matrix.
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=layer == 1) for layer in range(4)))
            options = {"comm_hook": name, "bucket_cap_mb": LAYER_MB}
            wrapped = TorchDDP(model, **options) if kind == "ours" else bare(name, model)
            found[name, kind] = train(model, wrapped, rank)
        found[name, "sent"] = sum(sent_bytes(parameter, name) for parameter in model.parameters())
    with pytest.raises(CommunicationError) as caught:
        TorchDDP(Scaled(), comm_hook="powersgd")
    return {**found, "scalar": str(caught.value)}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", HOOKS)
def test_gradients_are_those_of_torchs_hook(results: list[dict[Any, Any]], name: str, rank: int) -> None:
    for ours, torchs in zip(results[rank][name, "ours"], results[rank][name, "torch's"], strict=True):
        assert torch.equal(ours[0], torchs[0])
        assert ours[0].isfinite().all()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("name", "messages"), [("bf16", 1), ("powersgd", 3)])
def test_each_message_is_marked_by_its_bucket_and_its_bytes(
    results: list[dict[Any, Any]], name: str, messages: int, rank: int
) -> None:
    _, ranges, _ = results[rank][name, "ours"][-1]
    buckets = [bucket for bucket, _ in ranges]
    assert buckets == [bucket for bucket in range(max(buckets) + 1) for _ in range(messages)]
    assert max(buckets) >= 2
    assert sum(size for _, size in ranges) == results[rank][name, "sent"]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_the_hook_waits_the_range_says_so(results: list[dict[Any, Any]], rank: int) -> None:
    """Once a bucket, and after the last as always; else PowerSGD's communication would pass for hidden."""
    for _, ranges, waits in results[rank]["powersgd", "ours"][2:]:
        assert waits == len(ranges) / 3 + 1


def test_bf16_sends_half_and_powersgd_after_two_steps_an_eighth_of_each_matrix(results: list[dict[Any, Any]]) -> None:
    whole = 4 * (4 * WIDTH * WIDTH + WIDTH)
    sums = {name: [sum(size for _, size in step[1]) for step in results[0][name, "ours"]] for name in HOOKS}
    assert sums["bf16"] == [whole / 2] * STEPS
    thin = 4 * (4 * 2 * WIDTH + WIDTH)
    assert sums["powersgd"] == [whole, whole, thin, thin, thin]


def test_a_scalar_parameter_is_refused(results: list[dict[Any, Any]]) -> None:
    assert "takes no scalar parameter" in results[0]["scalar"]


@pytest.mark.parametrize("options", [{"comm_hook": "zip"}, {"comm_hook": "bf16", "mark_buckets": False}])
def test_there_is_no_other_hook_and_none_without_marks(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="comm_hook"):
        TorchDDP(nn.Linear(2, 2), **options)
