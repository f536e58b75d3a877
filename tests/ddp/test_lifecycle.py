"""A variant besides its steps: copied, pickled, dropped, used in the wrong order, its model changed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_prof.ddp import VARIANTS, DataParallel, NaiveDDP, OverlapDDP, collective
from ddp_prof.ddp.base import _after_steps, _before_steps
from ddp_prof.errors import CommunicationError

OURS = [key for key in VARIANTS if key in ("naive", "flat", "overlap", "bucketed")]


def make(key: str, module: nn.Module, **options: Any) -> DataParallel:
    more = {"bucket_size_mb": 0.0001} if key == "bucketed" else {}
    return VARIANTS[key](module, **more, **options)


def backward(variant: Any, rank: int) -> None:
    """The gradient of ``weight`` is ``rank + 1`` everywhere."""
    variant(torch.full((1, 2), float(rank + 1))).sum().backward()


def step(variant: Any, rank: int) -> list[float]:
    variant.zero_grad()
    backward(variant, rank)
    variant.finish_gradient_synchronization()
    return variant.module.weight.grad.flatten().tolist()


def copies(rank: int) -> dict[str, list[list[float]]]:
    """Gradients of a copy, of a pickled one, and of the variant that both were made of while its weight was frozen."""
    gradients = {}
    for key in ("naive", "flat", "overlap", "bucketed", "torch"):
        variant = make(key, nn.Linear(2, 1, bias=False))
        step(variant, rank)
        variant.module.weight.requires_grad_(key == "torch")  # torch's DDP cannot be copied then
        twin = copy.deepcopy(variant)
        again = pickle.loads(pickle.dumps(variant))
        assert twin.module.weight is not variant.module.weight
        for each in (twin, again, variant):
            each.module.weight.requires_grad_()
        gradients[key] = [step(candidate, rank) for candidate in (twin, again, variant)]
    return gradients


def groups(rank: int) -> list[Any]:
    """A copy keeps a group of its own; to pickle it is refused, and a step after the group was destroyed."""
    group = dist.new_group([0, 1])
    variant = OverlapDDP(nn.Linear(2, 1, bias=False), process_group=group)
    twin = copy.deepcopy(variant)
    with pytest.raises(CommunicationError) as pickled:
        pickle.dumps(variant)
    found = [twin.process_group is group, step(twin, rank), str(pickled.value)]
    dist.destroy_process_group(group)
    with pytest.raises(CommunicationError) as late:
        step(twin, rank)
    return [*found, str(late.value)]


def dropped(rank: int) -> dict[str, Any]:
    """Of a module whose variant was dropped, or removed: whether that is gone, the hooks that are left, gradients."""
    gradients = {}
    gc.collect()  # variants of other checks
    for key in ("overlap", "bucketed", "torch"):
        module = nn.Linear(2, 1, bias=False)
        before = count_hooks(module)
        variant = make(key, module)
        step(variant, rank)
        seen = weakref.ref(variant)
        if key == "bucketed":
            variant.remove()  # and kept
        else:
            del variant
            gc.collect()
        module.zero_grad()
        backward(module, rank)
        left = count_hooks(module) - before
        gradients[key] = [seen() is None, left, module.weight.grad.flatten().tolist()]
    return gradients


def count_hooks(module: nn.Linear) -> int:
    """On the parameter, and on all optimizers."""
    return len(module.weight._post_accumulate_grad_hooks or ()) + len(_before_steps) + len(_after_steps)


def forgotten(rank: int) -> dict[str, list[str]]:
    """What a step says that was not finished; then it is finished and said nothing of."""
    messages: dict[str, list[str]] = {}
    for key in ("naive", "flat", "overlap", "bucketed"):
        variant = make(key, nn.Linear(2, 1, bias=False))
        optimizer = torch.optim.SGD(variant.parameters(), lr=1)
        messages[key] = []
        backward(variant, rank)
        try:
            optimizer.step()
        except CommunicationError as error:
            messages[key].append(str(error))
        variant.finish_gradient_synchronization()
        optimizer.step()
        with variant.no_sync():
            backward(variant, rank)
        optimizer.step()  # accumulated by this rank alone, on purpose
    return messages


def finished_too_early(rank: int) -> dict[str, list[Any]]:
    """Weights after a step whose ``finish`` was within ``no_sync``; and what is said if gradients changed since."""
    results: dict[str, list[Any]] = {}
    for key in (*OURS, "sharded"):
        moved = []
        for how in ("one", "each", "clipped", "closure"):
            variant = make(key, nn.Linear(2, 1, bias=False))
            weight = variant.module.weight
            with torch.no_grad():
                weight.zero_()
            optimizer: Any = torch.optim.SGD(variant.optimizer_parameters(), lr=1)

            def loss(variant: Any = variant, how: str = how) -> Any:
                with variant.no_sync():
                    for _ in range(2 if how == "each" else 1):
                        backward(variant, rank)
                        variant.finish_gradient_synchronization()
                if how == "clipped":
                    variant.clip_grad_norm_(0.15)
                return torch.zeros(())

            if how == "closure":
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            moved.append(variant.module.weight.flatten().tolist())
        variant = make(key, nn.Linear(2, 1, bias=False))
        optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=1)
        with variant.no_sync():
            backward(variant, rank)
            variant.finish_gradient_synchronization()
        torch.nn.utils.clip_grad_norm_(variant.trained_parameters(), 0.5)
        before = variant.module.weight.clone()
        with pytest.raises(CommunicationError) as caught:
            optimizer.step()
        results[key] = [moved, str(caught.value), torch.equal(before, variant.module.weight)]
    return results


def frozen_later(rank: int) -> dict[str, list[Any]]:
    """A parameter that is frozen after two steps of AdamW: has it moved since; and one that is unfrozen."""
    results: dict[str, list[Any]] = {}
    for key in ("naive", "flat", "overlap", "bucketed"):
        module = nn.Linear(2, 1)
        variant = make(key, module)
        optimizer = torch.optim.AdamW(variant.parameters(), lr=0.1)
        for index in range(4):
            if index == 2:
                module.weight.requires_grad_(False)
                before = [module.weight.clone(), module.bias.clone()]
            optimizer.zero_grad()
            backward(variant, rank)
            variant.finish_gradient_synchronization()
            optimizer.step()
        moved = [not torch.equal(old, new) for old, new in zip(before, (module.weight, module.bias), strict=True)]
        variant.remove()
        partly = make(key, module)
        module.weight.requires_grad_(True)
        with pytest.raises(CommunicationError) as caught:
            backward(partly, rank)
        results[key] = [moved, str(caught.value)]
    return results


def normalized(rank: int) -> dict[str, list[float]]:
    """Running statistics of batch normalisation on different samples, after two forwards."""
    means = {}
    for key in ("naive", "overlap", "torch", "unsynchronized"):
        options = {"broadcast_buffers": False} if key == "unsynchronized" else {}
        variant = make("overlap" if key == "unsynchronized" else key, nn.BatchNorm1d(1), **options)
        for index in range(2):
            variant(torch.tensor([[1.0], [3.0]]) * (rank + 1 + index)).sum().backward()
            variant.finish_gradient_synchronization()
        variant.eval()
        with torch.no_grad():
            variant(torch.ones(1, 1))
        means[key] = variant.module.running_mean.tolist()
    return means


def criticized(rank: int) -> dict[str, list[float]]:
    """Statistics and weights of a critic with batch normalisation: two forwards, then one backward."""
    trained = {}
    for key in ("naive", "flat", "overlap", "bucketed", "sharded", "torch"):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
        variant = make(key, critic)
        optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=0.1)
        for index in range(3):
            optimizer.zero_grad()
            real, made = torch.rand(2, 8, 2, generator=torch.Generator().manual_seed(9 * rank + index)).double()
            (variant(made).square().mean() - variant(real).mean()).backward()
            variant.finish_gradient_synchronization()
            optimizer.step()
        trained[key] = torch.cat([each.flatten() for each in critic.state_dict().values()]).tolist()
    return trained


def everything(rank: int) -> dict[str, Any]:
    checks = copies, groups, dropped, forgotten, finished_too_early, frozen_later, normalized, criticized
    return {check.__name__: check(rank) for check in checks}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", [*OURS, "torch"])
def test_copies_synchronize_gradients_of_their_own(results: list[dict[str, Any]], key: str, rank: int) -> None:
    assert results[rank]["copies"][key] == [[1.5, 1.5]] * 3


def test_a_group_is_shared_by_a_copy_and_cannot_be_pickled(results: list[dict[str, Any]]) -> None:
    shares, gradient, message, late = results[0]["groups"]
    assert shares
    assert gradient == [1.5, 1.5]
    assert "pickle its module" in message
    assert late.startswith("all-reduce of bucket 0 could not be started: its process group was destroyed")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["overlap", "bucketed", "torch"])
def test_a_module_whose_variant_is_gone_trains_alone(results: list[dict[str, Any]], key: str, rank: int) -> None:
    assert results[rank]["dropped"][key] == [key != "bucketed", 0, [rank + 1.0] * 2]


@pytest.mark.parametrize("key", OURS)
def test_an_optimizer_is_refused_gradients_that_are_not_synchronized(results: list[dict[str, Any]], key: str) -> None:
    (forgotten,) = results[0]["forgotten"][key]
    assert "call finish_gradient_synchronization()" in forgotten


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", [*OURS, "sharded"])
def test_what_was_finished_within_no_sync_is_reduced_by_the_step(
    results: list[dict[str, Any]], key: str, rank: int
) -> None:
    """The mean gradient of a micro-batch is 1.5."""
    moved, message, is_unmoved = results[rank]["finished_too_early"][key]
    clipped = -0.15 / 2**0.5
    expected = [-1.5] * 2, [-3.0] * 2, [clipped] * 2, [-1.5] * 2
    assert moved == [pytest.approx(each, rel=1e-5) for each in expected]
    assert "run the last micro-batch outside of no_sync()" in message
    assert is_unmoved


@pytest.mark.parametrize("key", OURS)
def test_a_parameter_frozen_later_rests_and_one_unfrozen_later_is_refused(
    results: list[dict[str, Any]], key: str
) -> None:
    moved, message = results[0]["frozen_later"][key]
    assert moved == [False, True]
    assert message.startswith("parameter 'weight' was frozen when the variant was made")


def test_buffers_are_those_of_rank_0_before_each_forward_as_with_torch(results: list[dict[str, Any]]) -> None:
    by_rank = [ranked["normalized"] for ranked in results]
    for key in ("naive", "overlap"):
        assert [means[key] for means in by_rank] == [means["torch"] for means in by_rank]
    assert by_rank[0]["unsynchronized"] == by_rank[0]["torch"]
    assert by_rank[1]["unsynchronized"] != by_rank[1]["torch"]


@pytest.mark.parametrize("key", [*OURS, "sharded"])
def test_two_forwards_before_one_backward_keep_what_the_first_one_saved(
    results: list[dict[str, Any]], key: str
) -> None:
    """A broadcast of buffers, as torch's own, does not count as a change of them."""
    for ranked in results:
        assert ranked["criticized"][key] == pytest.approx(ranked["criticized"]["torch"], abs=1e-12)


def test_a_broadcast_of_buffers_that_fails_says_that_all_ranks_must_call_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise CommunicationError("rank 0: broadcast of bucket 0 failed: timed out")

    monkeypatch.setattr(collective, "launch_broadcast", fail)
    with pytest.raises(CommunicationError, match=r"timed out; .*to evaluate on one rank, call variant\.module"):
        collective.broadcast_buffers([torch.ones(1)], None)


def test_a_variant_is_dropped_with_its_last_reference() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        variant = NaiveDDP(nn.Linear(2, 1))
        seen = weakref.ref(variant)
        del variant
        assert seen() is None
    finally:
        dist.destroy_process_group()
