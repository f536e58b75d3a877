"""Steps of a sharded optimizer equal those of the whole one; each rank keeps its part of the state."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_prof.ddp import ShardedOptimizer
from ddp_prof.errors import CommunicationError


class Toy(nn.Module):
    """As in CS336's assignment 2: three layers, and a parameter that is not trained."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(10, 10, bias=False), nn.LayerNorm(10), nn.Linear(10, 5)
        self.frozen = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        self.third = nn.Linear(10, 10, bias=False)
        if is_tied:
            self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.third(self.norm(torch.relu(self.first(x))))))


def train(rank: int, is_tied: bool, world: int) -> dict[str, Any]:
    """Ten steps with AdamW and a schedule on equal data, sharded and whole: parameters, and bytes of state."""
    torch.manual_seed(0)
    model = Toy(is_tied)
    twin = copy.deepcopy(model)
    kwargs = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    whole: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    sharded: torch.optim.Optimizer = ShardedOptimizer(twin.parameters(), torch.optim.AdamW, **kwargs)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in (whole, sharded)]
    for _ in range(10):
        x, y = torch.rand(8, 10), torch.rand(8, 5)
        for module, optimizer in ((model, whole), (twin, sharded)):
            optimizer.zero_grad()
            (module(x) - y).square().sum().backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    return {
        "whole": model.state_dict(),
        "sharded": twin.state_dict(),
        "bytes": [state_bytes(whole), state_bytes(sharded.local)],
    }


def state_bytes(optimizer: Any) -> int:
    """Bytes of the moments; the counters of steps are left out."""
    if optimizer is None:
        return 0
    kept = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    return sum(value.nbytes for name, value in kept if name != "step" and isinstance(value, torch.Tensor))


def groups(rank: int) -> dict[str, Any]:
    """A group added later with a learning rate of its own; a closure; state saved and loaded."""
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(6))
    optimizer = ShardedOptimizer([first], torch.optim.SGD, lr=9.0, momentum=0.5)
    optimizer.param_groups[0]["lr"] = 1.0  # as by a schedule; adding a group put the former one back
    optimizer.add_param_group({"params": [second], "lr": 0.1})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = first.sum() + second.sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step(closure)
    after = [first[0].item(), second[0].item()]
    with torch.no_grad():
        first.fill_(0.0)
        second.fill_(0.9)
    optimizer.load_state_dict(saved)
    optimizer.step(closure)
    again = [first[0].item(), second[0].item()]
    return {
        "loss": loss.item(),
        "after": after,
        "again": again,
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"fused": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


def every_optimizer(rank: int) -> dict[tuple[str, str], list[float]]:
    """Weights and learning rate after steps with a schedule, whole and sharded; rank 1 owns nothing."""
    found = {}
    for name, options in OPTIMIZERS.items():
        cls = getattr(torch.optim, name)
        for kind, make in (("whole", cls), ("sharded", partial(ShardedOptimizer, optimizer_cls=cls))):
            parameter = nn.Parameter(torch.arange(1.0, 5.0))
            optimizer = make([parameter], **options)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for _ in range(3):
                optimizer.zero_grad()
                parameter.square().sum().backward()
                optimizer.step()
                schedule.step()
            found[name, kind] = [*parameter.tolist(), *schedule.get_last_lr()]
    return found


MAKE_COPY = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "deepcopy of the optimizer": lambda pair: (None, copy.deepcopy(pair[1])),
}


def copies(rank: int) -> dict[str, Any]:
    """Of model and optimizer, copied together after a step under a schedule: weights of both after one more."""
    found = {}
    for how, make_copy in MAKE_COPY.items():
        model, optimizer = small_model()
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        weights = []
        for index in range(3):
            if index == 1:
                _, twin = make_copy((model, optimizer))
            if index == 2:
                stepped = all_weights(twin)
                for parameter in stepped:
                    parameter.grad = torch.ones_like(parameter)
                twin.step()
            take_step(model, optimizer)
            weights.append(torch.cat([each.detach().flatten() for each in all_weights(optimizer)]))
        found[how] = [torch.cat([each.detach().flatten() for each in stepped]), weights[1]]
    group = dist.new_group([0, 1])
    mine = ShardedOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, group, lr=1)
    found["shares its group"] = copy.deepcopy(mine)._group is group
    with pytest.raises(CommunicationError) as caught:
        pickle.dumps(mine)
    found["message"] = str(caught.value)
    return found


def small_model() -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def all_weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refused(rank: int) -> dict[str, str]:
    """What a rank says to each mistake; rank 1 makes most of them."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"first": nn.Linear(4, 4, bias=False), "second": nn.Linear(4, 4, bias=False)})
    own = [*layers.parameters()]
    named = [*layers.named_parameters()]
    _, optimizer = small_model()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    make = partial(ShardedOptimizer, optimizer_cls=torch.optim.SGD, lr=1)
    mistakes = {
        "order": lambda: make(own[::-1] if rank else own),
        "names": lambda: make(named[::-1] if rank else named),
        "shape": lambda: make([nn.Parameter(torch.ones(2 + rank))]),
        "number": lambda: make(own[: 2 - rank]),
        "group": lambda: optimizer.add_param_group({"params": own[::-1] if rank else own}),
        "state": lambda: small_model()[1].load_state_dict(states[0]),
        "closure": lambda: ShardedOptimizer(own, torch.optim.LBFGS, lr=1),
        "all": lambda: ShardedOptimizer(own, ByNormOfAll, lr=1),
    }
    return {name: message_of(mistake) for name, mistake in mistakes.items()}


class ByNormOfAll(torch.optim.Optimizer):
    """Divides gradients by the norm of all of them."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        parameters = self.param_groups[0]["params"]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm)


def message_of(mistake: Any) -> str:
    try:
        mistake()
    except (CommunicationError, ValueError) as error:
        return str(error)
    return ""


def everything(rank: int) -> dict[str, Any]:
    return {check.__name__: check(rank) for check in (every_optimizer, copies, refused, groups, peaks)}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_rank_that_owns_nothing_follows(results: list[dict[str, Any]], name: str) -> None:
    for ranked in results:
        found = ranked["every_optimizer"]
        assert found[name, "sharded"] == pytest.approx(found[name, "whole"])
    assert found[name, "whole"][0] != 1


@pytest.mark.parametrize("how", list(MAKE_COPY))
def test_a_copy_steps_as_the_original(results: list[dict[str, Any]], how: str) -> None:
    for ranked in results:
        twin, original = ranked["copies"][how]
        torch.testing.assert_close(twin, original)


def test_a_copy_shares_the_group_which_cannot_be_pickled(results: list[dict[str, Any]]) -> None:
    assert results[0]["copies"]["shares its group"]
    assert "save its state_dict() on each rank" in results[0]["copies"]["message"]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            "order",
            "rank 1: parameter 0 is parameter 1 on rank 0: give every rank the same parameters in the same order",
        ),
        (
            "group",
            "rank 1: parameter 0 is parameter 1 on rank 0: give every rank the same parameters in the same order",
        ),
        ("names", "rank 1: parameter 'second.weight' stands where rank 0 has parameter 'first.weight'"),
        ("shape", "rank 1: parameter 0 has shape (3,), on rank 0 shape (2,)"),
        ("number", "rank 1: parameter 1 of rank 0 is missing"),
        ("closure", "LBFGS computes the loss itself"),
        ("all", "ByNormOfAll steps on a parameter by what all parameters are"),
    ],
)
def test_what_would_mix_parameters_up_is_refused_on_all_ranks(
    results: list[dict[str, Any]], mistake: str, message: str
) -> None:
    for ranked in results:
        assert ranked["refused"][mistake].startswith(message)


def test_a_state_is_loaded_by_the_rank_that_saved_it(results: list[dict[str, Any]]) -> None:
    assert results[0]["refused"]["state"] == ""
    assert results[1]["refused"]["state"].startswith("rank 1 of 2: this is the optimizer state of rank 0 of 2")


def peaks(rank: int) -> list[int]:
    """The most bytes of tensors that two steps allocate, state included: of torch's optimizer, and of ours."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imported by the server alone: it takes a second

    makers: tuple[Any, Any] = ZeroRedundancyOptimizer, ShardedOptimizer
    found = []
    for make in makers:
        parameters = [nn.Parameter(torch.ones(2**18)) for _ in range(8)]
        parameters += [nn.Parameter(torch.ones(2**10)) for _ in range(256)]
        optimizer = make(parameters, torch.optim.AdamW, lr=1e-3)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with torch.profiler.profile(profile_memory=True) as profiler:
            optimizer.step()
            optimizer.step()
        found.append(peak_bytes(profiler))
    return found


def peak_bytes(profiler: torch.profiler.profile) -> int:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0))


def test_the_peak_of_memory_is_that_of_torchs_optimizer(results: list[dict[str, Any]]) -> None:
    for torchs, ours in (ranked["peaks"] for ranked in results):
        assert torchs > 9 * 2**20  # two moments of half of the parameters
        assert ours < 1.1 * torchs


def test_groups_closures_and_saved_state(results: list[dict[str, Any]]) -> None:
    for result in (ranked["groups"] for ranked in results):
        assert result["loss"] == 10
        assert result["lr"] == [1.0, 0.1]
        assert result["after"] == pytest.approx([-1.5, 1 - 0.1 - 0.15])
        assert result["again"] == pytest.approx([-1.5, 0.9 - 0.15])
