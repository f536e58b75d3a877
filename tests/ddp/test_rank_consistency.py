"""Ranks with different models end with one error that says which tensor differs on which rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddp_prof.ddp import BucketedDDP, FlatDDP, FullyShardedDDP, NaiveDDP, ShardedDDP, TorchDDP
from ddp_prof.ddp.collective import describe_tensors, find_difference
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
    difference = find_difference(describe_tensors(build()), describe_tensors(model()))
    assert difference is not None
    assert difference.startswith(words)
    assert difference.endswith(": build the same model on every rank")


def test_equal_models_have_no_difference() -> None:
    assert find_difference(describe_tensors(model()), describe_tensors(model())) is None


def wrap_with_other_options_on_rank_1(rank: int) -> dict[str, str]:
    """On each rank; on rank 1 as its second argument says."""
    made: dict[str, Callable[[nn.Module, bool], object]] = {
        "size": lambda module, other: BucketedDDP(module, 1.5 if other else 1),
        "sizes": lambda module, other: BucketedDDP(module, [1, 25] if other else [1, 5]),
        "rebuild": lambda module, other: BucketedDDP(module, 1, rebuild_buckets=other),
        "hook": lambda module, other: TorchDDP(module, comm_hook="bf16" if other else None),
        "unused": lambda module, other: NaiveDDP(module, find_unused_parameters=other),
        "buffers": lambda module, other: NaiveDDP(module, broadcast_buffers=not other),
        "variant": lambda module, other: NaiveDDP(module) if other else FlatDDP(module),
        "sharded": lambda module, other: ShardedDDP(module, None if other else 1),
        "torch": lambda module, other: TorchDDP(module, bucket_cap_mb=2 if other else 1),
        "fsdp": lambda module, other: FullyShardedDDP(module, reshard_after_forward=other),
    }
    messages = {}
    for name, make in made.items():
        with pytest.raises(CommunicationError) as caught:
            make(nn.Linear(2, 3), rank == 1)
        messages[name] = str(caught.value)
    return messages


def test_options_that_change_the_schedule_must_be_alike() -> None:
    first, second = run_ranks(wrap_with_other_options_on_rank_1)
    assert first == second
    ending = ": give every rank the same options"
    assert all(message.startswith("rank 1: ") and message.endswith(ending) for message in first.values())
    assert {name: message.removeprefix("rank 1: ").removesuffix(ending) for name, message in first.items()} == {
        "size": "bucket_size_mb=1.5, on rank 0 bucket_size_mb=1",
        "sizes": "bucket_size_mb=[1, 25], on rank 0 bucket_size_mb=[1, 5]",
        "rebuild": "rebuild_buckets=True, on rank 0 rebuild_buckets=False",
        "hook": "comm_hook=bf16, on rank 0 comm_hook=None",
        "unused": "find_unused_parameters=True, on rank 0 find_unused_parameters=False",
        "buffers": "broadcast_buffers=False, on rank 0 broadcast_buffers=True",
        "variant": "variant=NaiveDDP, on rank 0 variant=FlatDDP",
        "sharded": "bucket_size_mb=None, on rank 0 bucket_size_mb=1",
        "torch": "bucket_cap_mb=2, on rank 0 bucket_cap_mb=1",
        "fsdp": "reshard_after_forward=True, on rank 0 reshard_after_forward=False",
    }


def wrap_with_sizes_of_their_own(rank: int) -> str:
    with pytest.raises(CommunicationError) as caught:
        BucketedDDP(nn.Linear(2, 3), [1, 1, 2, 3][rank])
    return str(caught.value)


def test_of_several_ranks_that_differ_all_are_named() -> None:
    words = (
        "rank 2: bucket_size_mb=2, on rank 0 bucket_size_mb=1: give every rank the same options (so ranks 2, 3 differ"
    )
    assert run_ranks(wrap_with_sizes_of_their_own, world=4) == [f"{words} from rank 0)"] * 4


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
