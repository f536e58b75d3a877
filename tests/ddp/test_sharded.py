"""Sharded: what each rank keeps, when parameters are whole, what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_prof.ddp import ShardedDDP, ShardedOptimizer
from ddp_prof.ddp.awaited_parameters import Awaited
from ddp_prof.ddp.base import _after_steps, _before_steps
from ddp_prof.ddp.buckets import TakenGradient
from ddp_prof.errors import CommunicationError
from tests.ddp.test_sharded_optimizer import peak_bytes, state_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

MAKE_COPY = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda original: pickle.loads(pickle.dumps(original)),
}


class Block(nn.Module):
    """Three outputs; an ``nn.Sequential`` alone is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x))


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
        "full gradients": sum(not isinstance(parameter.grad, TakenGradient) for parameter in variant.parameters()),
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


def copies(rank: int) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Weights of copies that are made right after a step: of the variant, of its module; and after one more step."""
    found = {}
    for how, make_copy in MAKE_COPY.items():
        variant = make()
        take_step(variant, rank)
        found[how, "of the module"] = weights(make_copy(variant.module))
        take_step(variant, rank)
        twin = make_copy(variant)
        found[how, "of the variant"] = weights(twin.module)
        take_step(twin, rank)
        found[how, "stepped on"] = weights(twin.module)
        found[how, "of the variant, after it"] = weights(variant.module)
    return found


def expected_copies() -> dict[str, dict[str, torch.Tensor]]:
    """The same in one process, on the samples of both ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    states = []
    for _ in range(3):
        optimizer.zero_grad()
        (sum(module(torch.full((2, 5), float(rank + 1))).square().mean() for rank in (0, 1)) / 2).backward()
        optimizer.step()
        states.append(weights(module))
    names = "of the module", "of the variant", "stepped on"
    return {**dict(zip(names, states, strict=True)), "of the variant, after it": states[1]}


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def take_step(variant: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=0.1)
    optimizer.zero_grad()
    variant(torch.full((2, 5), float(rank + 1))).square().mean().backward()
    variant.finish_gradient_synchronization()
    optimizer.step()


def left(rank: int) -> dict[str, Any]:
    """Of a module whose variant is removed or dropped right after a step: its weights, hooks on optimizers."""
    found: dict[str, Any] = {}
    for how in ("removed", "dropped"):
        before = len(_before_steps), len(_after_steps)
        variant = make()
        module = variant.module
        take_step(variant, rank)
        if how == "removed":
            variant.remove()
            found["kinds"] = {type(layer._parameters) for layer in module.modules()}
        del variant
        gc.collect()
        hooks = len(_before_steps), len(_after_steps)
        found[how] = [weights(module), hooks == before]
    return found


def compiled(rank: int) -> dict[str, Any]:
    """Graphs that ran in each of three steps, and weights, by what is compiled; and evaluated right after a step."""
    found = {}
    for how in ("nothing", "block", "module", "variant"):
        torch._dynamo.reset()
        ran: list[int] = []
        compiler = partial(torch.compile, backend=partial(count_graph, ran))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), Block())
        if how == "block":
            model[1].compile(backend=partial(count_graph, ran))
        variant = ShardedDDP(compiler(model) if how == "module" else model, 0.0001)
        call = compiler(variant) if how == "variant" else variant
        optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=0.1)
        runs = []
        for _ in range(4):
            ran.clear()
            call(torch.full((2, 5), float(rank + 1))).square().sum().backward()
            variant.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            runs.append(len(ran))
        with torch.no_grad():
            output = variant.module(torch.ones(1, 5))
        found[how] = {"graphs": runs[1:], "weights": [each.clone() for each in model.parameters()], "output": output}
    return found


def count_graph(ran: list[int], graph: Any, _inputs: Any) -> Any:
    """A compiler that leaves a graph as it is and counts how often it runs."""

    def run(*arguments: Any) -> Any:
        ran.append(1)
        return graph(*arguments)

    return run


def refused(rank: int) -> list[str]:
    variant = make()
    variant.module[0].weight.requires_grad_(False)
    backward(variant, rank)
    with pytest.raises(CommunicationError) as frozen:
        variant.finish_gradient_synchronization()
    local = make()
    with local.no_sync():
        backward(local, rank)
    with pytest.raises(CommunicationError) as alone:
        torch.optim.SGD(local.optimizer_parameters(), lr=1).step()
    other = make()
    whole = torch.optim.SGD(other.parameters(), lr=1)
    backward(other, rank)
    other.finish_gradient_synchronization()
    with pytest.raises(CommunicationError) as stepped:
        whole.step()
    divided = ShardedOptimizer(other.optimizer_parameters(), torch.optim.SGD, lr=1)
    with pytest.raises(CommunicationError) as twice:
        divided.step()
    with pytest.raises(CommunicationError) as as_a_whole:
        torch.optim.LBFGS(other.optimizer_parameters()).step(lambda: 0.0)
    with pytest.raises(CommunicationError) as read:
        torch.nn.utils.clip_grad_norm_(other.module.parameters(), 1.0)
    with pytest.raises(CommunicationError) as shared:
        ShardedDDP(Overlapping(1))
    ShardedDDP(Overlapping(2))
    caught = frozen, alone, stepped, twice, as_a_whole, read, shared, loaded_from_the_other_rank(rank)
    return [str(each.value) for each in caught]


def loaded_from_the_other_rank(rank: int) -> pytest.ExceptionInfo[CommunicationError]:
    """What a program does that saves on rank 0 alone, and loads that on all."""
    variant = make()
    optimizer = torch.optim.Adam(variant.optimizer_parameters())
    for _ in range(2):
        backward(variant, rank)
        variant.finish_gradient_synchronization()
        optimizer.step()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[1 - rank])
    with pytest.raises(CommunicationError) as raised:
        optimizer.step()
    optimizer.load_state_dict(states[rank])
    optimizer.step()
    return raised


class Overlapping(nn.Module):
    """Each second column of a matrix, and those beside them; with ``step`` 1 the same ones."""

    def __init__(self, step: int) -> None:
        super().__init__()
        columns = torch.ones(4, 6)
        self.even = nn.Parameter(columns[:, ::2])
        self.odd = nn.Parameter(columns[:, step - 1 :: 2])


def used_late(rank: int) -> dict[str, str]:
    """What optimizers say of a head that is used after a step in which it was not; ``resumed``: after a restart."""
    said = {}
    for name, cls, options in (
        ("Adam", torch.optim.AdamW, {"find_unused_parameters": True}),
        ("Adam, resumed", torch.optim.AdamW, {"find_unused_parameters": True}),
        ("SGD, dampened", partial(torch.optim.SGD, momentum=0.9, dampening=0.5), {"find_unused_parameters": True}),
        ("SGD", torch.optim.SGD, {}),
        ("SGD, momentum", partial(torch.optim.SGD, momentum=0.9), {}),
    ):
        heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        heads.forward = lambda x, last, heads=heads: heads[0](x) + (heads[1](x) if last else 0)  # type: ignore[method-assign]
        variant = ShardedDDP(heads, None, **options)
        optimizer = cls(variant.optimizer_parameters(), lr=0.1)
        said[name] = ""
        for last in (False, True):
            if last and name == "Adam, resumed":
                saved = optimizer.state_dict()
                optimizer = cls(variant.optimizer_parameters(), lr=0.1)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            variant(torch.ones(1, 4), last).sum().backward()
            variant.finish_gradient_synchronization()
            try:
                optimizer.step()
            except CommunicationError as error:
                said[name] = str(error)
    return said


class Cautious(torch.optim.Optimizer):
    """Leaves out what goes against the gradient, and scales the rest up by the share of a parameter that it is."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        for parameter in self.param_groups[0]["params"]:
            mask = (parameter * parameter.grad > 0).float()
            parameter.add_(parameter.grad * mask / (mask.mean() + 0.01), alpha=-self.param_groups[0]["lr"])


def misused(rank: int) -> dict[str, str]:
    """What is said if parts are used as if they were whole parameters, or changed without the other ranks."""
    variant = make()
    parts = variant.optimizer_parameters()
    backward(variant, rank)
    variant.finish_gradient_synchronization()

    def change(how: Callable[[torch.Tensor], object]) -> None:
        changed = make()
        with torch.no_grad():
            how(changed.optimizer_parameters()[0])
        changed(torch.ones(2, 5))

    def step_after(how: Callable[[nn.Parameter], object]) -> None:
        changed = make()
        optimizer = torch.optim.SGD(changed.optimizer_parameters(), lr=1)
        backward(changed, rank)
        changed.finish_gradient_synchronization()
        how(changed.module[0].weight)
        optimizer.step()

    mistakes = {
        "gradient added to": lambda: step_after(lambda weight: weight.grad.add_(torch.ones_like(weight))),
        "gradient set": lambda: step_after(lambda weight: setattr(weight, "grad", torch.ones_like(weight))),
        "gradient set by data": lambda: step_after(lambda weight: setattr(weight.grad, "data", torch.ones(2))),
        "clipped": lambda: torch.nn.utils.clip_grad_norm_(parts, 1.0),
        "stepped by shares": Cautious(parts, lr=0.1).step,
        "changed by hand": lambda: change(lambda part: part.sub_(0.1)),
        "changed by data": lambda: change(lambda part: part.data.sub_(0.1)),
    }
    said = {}
    for name, mistake in mistakes.items():
        with pytest.raises(CommunicationError) as caught:
            mistake()
        said[name] = str(caught.value)
    return said


def gathered(rank: int) -> dict[str, Any]:
    """The most bytes that a step in place allocates with its all-gathers; those of the parameters."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(16)))
    variant = ShardedDDP(model, 0.25)
    optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=1)
    variant(torch.ones(1, 128)).sum().backward()
    variant.finish_gradient_synchronization()
    with torch.profiler.profile(profile_memory=True) as profiler:
        optimizer.step()
        variant.wait_for_parameters()
    return {"peak": peak_bytes(profiler), "parameters": sum(each.nbytes for each in model.parameters())}


def held(rank: int) -> dict[str, Any]:
    """Sizes of what the current stream holds when late contributions are there, and of what it uses."""
    variant = make()
    backward(variant, rank)
    backward(variant, rank)
    buckets = variant._reducer.buckets
    used = [bucket.shard.numel() * 2 for bucket in buckets]  # what is received
    used += [parameter.numel() for parameter in variant.parameters()]  # what came late
    with mock.patch.object(sys.modules[type(buckets[0]).__module__], "hold_for_current_stream") as hold:
        variant.finish_gradient_synchronization()
    sizes = Counter(call.args[0].numel() for call in hold.call_args_list)
    return {"count": sizes.total() - len(buckets), "missing": Counter(used) - sizes, "used": len(used)}


KEPT_OF_PARAMETERS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda module: None,
    "a list": lambda module: [*module.parameters()],
    "data": lambda module: [parameter.data for parameter in module.parameters()],
    "a state dict": lambda module: module.state_dict(),
    "an array": lambda module: module[0].weight.detach().numpy(),  # type: ignore[index]
    "a graph": lambda module: module(torch.ones(1, 5)),
}


def in_flight(rank: int) -> list[str]:
    """With what of the parameters in the hands of the program all-gathers are on their way after a step."""
    found = []
    for name, keep in KEPT_OF_PARAMETERS.items():
        variant = make()
        kept = keep(variant.module)
        optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=1)
        backward(variant, rank)
        variant.finish_gradient_synchronization()
        optimizer.step()
        found += [name] * variant._gathers.is_pending
        variant.wait_for_parameters()
        del kept
    return found


READ_FROM_A_LIST: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detached": lambda parameter: parameter.detach(),
    "of another class": lambda parameter: parameter.as_subclass(torch.Tensor),
    "a parameter of its own": lambda parameter: nn.Parameter(parameter).detach(),
}


def read_in_flight(rank: int) -> dict[str, bool]:
    """By how a parameter in a list of the program is read right after a step: whether that waited, and how it reads."""
    found = {}
    for name, read in READ_FROM_A_LIST.items():
        variant = make()
        first, *_ = variant.module.parameters()
        optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=1)
        backward(variant, rank)
        variant.finish_gradient_synchronization()
        optimizer.step()
        was_waiting = isinstance(first, Awaited)
        values = read(first)
        has_waited = not isinstance(first, Awaited)
        found[name] = was_waiting and has_waited and type(values) is torch.Tensor and torch.equal(values, first)
    return found


def everything(rank: int) -> dict[str, Any]:
    checks = (kept, accumulated, copies, left, compiled, refused, used_late, misused, gathered, held)
    checks = (*checks, in_flight, read_in_flight)
    return {check.__name__: check(rank) for check in checks}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_its_part_of_state_and_gradients(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]["kept"]
    padding = 4 * 4  # one element in each bucket at most
    assert found["parameters"] / 2 <= found["gradients"] <= found["parameters"] / 2 + padding
    assert found["state"] == 2 * found["gradients"]
    assert found["full gradients"] == found["buffers"] == 0


def test_parameters_are_gathered_without_a_copy(results: list[dict[str, Any]]) -> None:
    for ranked in results:
        assert ranked["gathered"]["parameters"] > 2**20
        assert ranked["gathered"]["peak"] < ranked["gathered"]["parameters"] / 20


def test_what_other_streams_allocated_is_held_until_it_is_used(results: list[dict[str, Any]]) -> None:
    for ranked in results:
        assert ranked["held"]["missing"] == {}
        assert ranked["held"]["count"] == ranked["held"]["used"] > 6  # and each buffer, which may be released already


def test_gradients_add_up(results: list[dict[str, Any]]) -> None:
    assert all(results[0]["accumulated"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["of the module", "of the variant", "stepped on", "of the variant, after it"])
@pytest.mark.parametrize("how", list(MAKE_COPY))
def test_copies_have_the_weights_of_the_step_and_train(
    results: list[dict[str, Any]], how: str, what: str, rank: int
) -> None:
    for name, tensor in expected_copies()[what].items():
        torch.testing.assert_close(results[rank]["copies"][how, what][name], tensor)


@pytest.mark.parametrize("how", ["removed", "dropped"])
def test_a_module_whose_variant_is_gone_has_the_weights_of_the_last_step(
    results: list[dict[str, Any]], how: str
) -> None:
    for ranked in results:
        found, has_no_hooks = ranked["left"][how]
        assert has_no_hooks
        for name, tensor in expected_copies()["of the module"].items():
            torch.testing.assert_close(found[name], tensor)
    assert results[0]["left"]["kinds"] == {dict}


@pytest.mark.parametrize("how", ["block", "module", "variant"])
def test_what_is_compiled_waits_before_it_runs(results: list[dict[str, Any]], how: str) -> None:
    for ranked in results:
        taken, plain = ranked["compiled"][how], ranked["compiled"]["nothing"]
        assert taken["graphs"] == [1, 1, 1]
        for own, expected in zip(taken["weights"], plain["weights"], strict=True):
            torch.testing.assert_close(own, expected)
        torch.testing.assert_close(taken["output"], plain["output"])


def test_a_parameter_that_is_used_late_is_an_error_for_an_optimizer_that_counts_steps(
    results: list[dict[str, Any]],
) -> None:
    for ranked in results:
        said = ranked["used_late"]
        assert (said["SGD"], said["SGD, momentum"]) == ("", "")
        for name in ("Adam", "Adam, resumed", "SGD, dampened"):
            assert "a gradient after steps in which no rank used it" in said[name]


def test_what_flat_parts_cannot_do_is_refused(results: list[dict[str, Any]]) -> None:
    frozen, alone, stepped, twice, as_a_whole, read, shared, loaded = results[0]["refused"]
    assert "wrap the module again" in frozen
    assert "cannot step on a rank's own gradients" in alone
    assert "make it of variant.optimizer_parameters()" in stepped
    assert "use the optimizer itself" in twice
    assert as_a_whole.startswith("LBFGS does not step element by element")
    assert "clip_grad_norm_() to clip them" in read
    assert shared.startswith("'even' and 'odd' share memory")
    assert loaded.startswith("rank 0 of 2: this is the optimizer state of rank 1 of 2: under sharded each rank saves")


def test_parts_are_neither_clipped_nor_stepped_on_nor_changed_as_if_they_were_whole(
    results: list[dict[str, Any]],
) -> None:
    for ranked in results:
        said = ranked["misused"]
        assert "variant.clip_grad_norm_() clips by the norm of all" in said["clipped"]
        assert said["stepped by shares"].startswith("Cautious does not step element by element")
        for change in ("by hand", "by data"):
            assert "the other ranks do not have the change" in said[f"changed {change}"]
        for change in ("added to", "set"):
            assert said[f"gradient {change}"].startswith("the gradient of a parameter was set or added to")
        assert said["gradient set by data"].startswith("data = ... of a gradient of which each rank keeps a part")


def test_a_step_waits_for_its_all_gathers_where_the_program_has_aliases_of_parameters(
    results: list[dict[str, Any]],
) -> None:
    """Averages of weights by a list of ``data`` read what was on its way. A parameter waits when it is read."""
    assert [ranked["in_flight"] for ranked in results] == [["nothing", "a list"]] * 2


def test_a_parameter_in_a_list_waits_however_it_is_read(results: list[dict[str, Any]]) -> None:
    """Of ``as_subclass`` torch tells nobody, and of a parameter of a parameter it expects the same class."""
    assert [ranked["read_in_flight"] for ranked in results] == [dict.fromkeys(READ_FROM_A_LIST, True)] * 2
