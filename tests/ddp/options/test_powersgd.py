"""PowerSGD against its formula on all ranks' gradients in one process, and against torch's hook."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.ddp import BucketedDDP, PowerSGD, annotate
from ddp_prof.ddp.annotate import Recorder
from ddp_prof.range_names import parse_range

STEPS = 4
EMPTY_STEPS = 16
SHAPES = ((12, 9), (7,), (16, 3, 3, 3), (2, 2), (), (10, 15))
COMPRESSED = ((10, 15), (16, 27), (12, 9))
"""As matrices, in the order in which buckets hold them: last first."""
HOWS = {
    "rank 1": PowerSGD(1),
    "rank 2": PowerSGD(2),
    "without error feedback": PowerSGD(2, error_feedback=False),
    "cold start": PowerSGD(2, warm_start=False),
}
CAPS_MB = {"a bucket each": 1e-6, "one bucket": None}


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in SHAPES)
        self.tensors[2] = nn.Parameter(self.tensors[2].detach().to(memory_format=torch.channels_last))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((one * gradient).sum() for one, gradient in zip(self.tensors, gradients, strict=True))


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """Of one rank; in the last steps there are none."""
    random = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=random, dtype=torch.float64) * (step < STEPS) for shape in SHAPES]


def reduced(rank: int) -> dict[str, list[list[torch.Tensor]]]:
    """The gradients of each step, by how and bucket size."""
    found = {}
    for name, how in HOWS.items():
        for cap, size in CAPS_MB.items():
            variant = BucketedDDP(Given(), size, compression=how)
            found[f"{name}, {cap}"] = [take(variant, gradients(step, rank)) for step in range(STEPS + EMPTY_STEPS)]
    return found


def take(variant: BucketedDDP, given: list[torch.Tensor]) -> list[torch.Tensor]:
    variant.zero_grad()
    variant(given).backward()
    variant.finish_gradient_synchronization()
    return [parameter.grad.clone() for parameter in variant.module.parameters()]


def messages(rank: int) -> list[tuple[int | None, ...]]:
    """Bucket, part and bytes of each all-reduce of a step, in the order of launch."""
    variant = BucketedDDP(Given(), 0.002, compression=PowerSGD(2))
    recorder = Recorder()
    with annotate.listening(recorder):
        take(variant, gradients(0, rank))
    taken = sorted((one for one in recorder.ranges if one.text.startswith("all_reduce")), key=lambda one: one.start_ns)
    names = [parse_range(one.text) for one in taken]
    return [tuple(name.number(key) for key in ("bucket", "part", "bytes")) for name in names]


def beside_torch(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Our gradients and those of torch's hook, which first sends two steps whole, from the same random Q."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(20, 17), nn.Tanh(), nn.Linear(17, 13), nn.Tanh(), nn.Linear(13, 11)).double()
    variant = BucketedDDP(ours, None, compression=PowerSGD(2))
    same = copy.deepcopy(ours)
    ddp = DistributedDataParallel(same)
    theirs = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(theirs, powerSGD_hook)
    inputs = torch.Generator().manual_seed(rank)
    found = []
    for step in range(2 + STEPS):
        x = torch.randn(5, 20, generator=inputs, dtype=torch.float64)
        if step == 2:
            random = torch.Generator().manual_seed(0)
            q = [torch.randn(width, 2, generator=random, dtype=torch.float64) for width in (13, 17, 20)]
            theirs.q_memory_dict[0] = torch.cat([one.flatten() for one in q])
            theirs.p_memory_dict[0] = torch.zeros(2 * (11 + 13 + 17), dtype=torch.float64)
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        if step >= 2:
            variant.zero_grad()
            variant(x).square().sum().backward()
            variant.finish_gradient_synchronization()
            both = (torch.cat([one.grad.flatten() for one in model.parameters()]) for model in (ours, same))
            found.append(tuple(both))
    return found


def scaled(rank: int) -> list[torch.Tensor]:
    """The third step's gradients, of usual size and so small that their squares are zero; scaled back."""
    found = []
    for scale in (1.0, 1e-25):
        module = nn.Linear(20, 20, bias=False)
        variant = BucketedDDP(module, None, compression=PowerSGD(2))
        random = torch.Generator().manual_seed(rank)
        for _ in range(3):
            variant.zero_grad()
            (module.weight * torch.randn(20, 20, generator=random) * scale).sum().backward()
            variant.finish_gradient_synchronization()
        found.append(module.weight.grad / scale)
    return found


def everything(rank: int) -> dict[str, Any]:
    return {
        "scaled": scaled(rank),
        "reduced": reduced(rank),
        "messages": messages(rank),
        "beside torch": beside_torch(rank),
    }


def formula(how: PowerSGD) -> list[list[torch.Tensor]]:
    """What every rank has to get, in one process: of the mean the part in the span of P."""
    random = torch.Generator().manual_seed(0)
    errors = {index: [torch.zeros(SHAPES[index]).double() for _ in (0, 1)] for index in (5, 2, 0)}
    q: dict[int, torch.Tensor] = {}
    found = []
    for step in range(STEPS):
        own = [gradients(step, rank) for rank in (0, 1)]
        means = [(first + second) / 2 for first, second in zip(*own, strict=True)]
        for (_, width), (index, error) in zip(COMPRESSED, errors.items(), strict=True):
            if not how.warm_start or not step:
                q[index] = torch.randn(width, how.rank, generator=random, dtype=torch.float64)
            sent = [one[index] + behind for one, behind in zip(own, error, strict=True)]
            mean = ((sent[0] + sent[1]) / 2).flatten(1)
            p = mean @ q[index]
            means[index] = (p @ torch.linalg.pinv(p) @ mean).view(SHAPES[index])
            q[index] = mean.t() @ p
            if how.error_feedback:
                errors[index] = [one - means[index] for one in sent]
        found.append(means)
    return found


@pytest.mark.parametrize("cap", CAPS_MB)
@pytest.mark.parametrize("name", HOWS)
def test_gradients_are_those_of_the_formula(results: list[dict[str, Any]], name: str, cap: str) -> None:
    expected = formula(HOWS[name])
    for step in range(STEPS):
        for ours, theirs in zip(results[0]["reduced"][f"{name}, {cap}"][step], expected[step], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", HOWS)
def test_the_error_of_a_step_is_between_the_best_and_the_whole(results: list[dict[str, Any]], name: str) -> None:
    first = results[0]["reduced"][f"{name}, one bucket"][0]
    for index in (0, 2, 5):
        mean = ((gradients(0, 0)[index] + gradients(0, 1)[index]) / 2).flatten(1)
        best = torch.linalg.svdvals(mean)[HOWS[name].rank :].norm()
        error = (first[index].flatten(1) - mean).norm()
        assert best < error < mean.norm()


@pytest.mark.parametrize("cap", CAPS_MB)
@pytest.mark.parametrize("name", HOWS)
def test_all_ranks_get_the_same_bits(results: list[dict[str, Any]], name: str, cap: str) -> None:
    by_rank = [ranked["reduced"][f"{name}, {cap}"] for ranked in results]
    for first, second in zip(*by_rank, strict=True):
        assert all(map(torch.equal, first, second))


def missing(taken: list[list[torch.Tensor]]) -> float:
    """How far the sum of what was applied is from that of all ranks' mean gradients."""
    given = [
        (first + second) / 2
        for step in range(STEPS)
        for first, second in zip(gradients(step, 0), gradients(step, 1), strict=True)
    ]
    count = len(SHAPES)
    return max(
        float((sum(step[index] for step in taken) - sum(given[index::count])).abs().max()) for index in range(count)
    )


@pytest.mark.parametrize("name", HOWS)
def test_what_was_held_back_comes_in_later_steps(results: list[dict[str, Any]], name: str) -> None:
    taken = results[0]["reduced"][f"{name}, one bucket"]
    # Each step takes `rank` dimensions out of what is left, which has at most 16 of them.
    assert missing(taken[:STEPS]) > 0.1
    assert (missing(taken) < 1e-6) is HOWS[name].error_feedback


def test_small_gradients_are_sent_as_well_as_large_ones(results: list[dict[str, Any]]) -> None:
    usual, small = results[0]["scaled"]
    torch.testing.assert_close(small, usual, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_are_those_of_torch(results: list[dict[str, Any]], rank: int) -> None:
    for ours, theirs in results[rank]["beside torch"]:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_vector_is_sent_whole_and_a_matrix_where_it_saves_half() -> None:
    how = PowerSGD(2)
    assert [how.sent_numel(shape) for shape in SHAPES] == [42, 7, 86, 4, 1, 50]
    assert [how.columns(shape) for shape in SHAPES] == [2, 0, 2, 0, 0, 2]
    assert PowerSGD(3).columns((12, 9)) == 0
    assert PowerSGD(3).columns((0, 9)) == 0


def test_ranges_say_what_is_sent_in_the_order_of_launch(results: list[dict[str, Any]]) -> None:
    assert results[0]["messages"] == results[1]["messages"]
    assert results[0]["messages"] == [
        (0, None, 8 * (2 * 10 + 1 + 4)),
        (0, 2, 8 * 2 * 15),
        (1, None, 8 * 2 * 16),
        (1, 2, 8 * 2 * 27),
        (2, None, 8 * (7 + 2 * 12)),
        (2, 2, 8 * 2 * 9),
    ]


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_a_rank_is_a_positive_whole_number(rank: Any) -> None:
    with pytest.raises(ValueError, match="the rank of PowerSGD must be a positive whole number"):
        PowerSGD(rank)


@pytest.mark.parametrize("option", ["rebuild_buckets", "find_unused_parameters"])
def test_it_goes_not_with_options_that_would_lose_errors(option: str) -> None:
    with pytest.raises(ValueError, match="PowerSGD goes with neither rebuild_buckets nor find_unused_parameters"):
        BucketedDDP(nn.Linear(2, 2), 1, compression=PowerSGD(), **{option: True})
