"""A model that is changed after it was wrapped, or wrapped twice: trained rightly, or refused by a clear error."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ddp_prof.ddp import VARIANTS, BucketedDDP, NaiveDDP, OverlapDDP, ShardedDDP, collective
from ddp_prof.ddp.buckets import TakenGradient
from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "naive": NaiveDDP,
    "overlap": OverlapDDP,
    "bucketed": lambda module: BucketedDDP(module, 1),
    "sharded": ShardedDDP,
}


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    made[0].bias.requires_grad_(False)
    return made


def add_layer(module: nn.Sequential) -> None:
    module.append(nn.Linear(1, 1))


def add_parameter(module: nn.Sequential) -> None:
    module[0].register_parameter("gain", nn.Parameter(torch.ones(1)))


def replace_layer(module: nn.Sequential) -> None:
    module[1] = nn.Linear(3, 1)


def assign(module: nn.Sequential) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def convert(module: nn.Sequential) -> None:
    module.double()


def transpose(module: nn.Sequential) -> None:
    module[0].weight.data = module[0].weight.data.t().contiguous().t()


def unfreeze(module: nn.Sequential) -> None:
    module[0].bias.requires_grad_(True)


CONVERTED = "was converted or moved after the variant was made"
REFUSED: dict[str, tuple[Callable[[nn.Sequential], None], str]] = {
    "a layer added": (add_layer, "parameter '2.weight' was added to the model after the variant was made"),
    "a parameter added": (add_parameter, "parameter '0.gain' was added to the model after the variant was made"),
    "a layer replaced": (replace_layer, "parameter '1.weight' was added to the model after the variant was made"),
    "assigned": (assign, "parameter '0.weight' was added to the model after the variant was made"),
    "converted": (
        convert,
        f"parameter '0.weight' {CONVERTED}: its dtype was torch.float32 and is torch.float64",
    ),
    "transposed": (
        transpose,
        f"parameter '0.weight' {CONVERTED}: its strides was (2, 1) and is (1, 3)",
    ),
    "unfrozen": (unfreeze, "parameter '0.bias' was frozen when the variant was made and requires a gradient now"),
}


def delete_frozen(module: nn.Sequential) -> None:
    module[0].bias = None


def add_without_parameters(module: nn.Sequential) -> None:
    module.append(nn.Tanh())


TAKEN: dict[str, Callable[[nn.Sequential], None]] = {
    "a frozen parameter deleted": delete_frozen,
    "a layer without parameters added": add_without_parameters,
}


def refused(rank: int) -> dict[tuple[str, str], str]:
    messages = {}
    for key, make in MAKE.items():
        for name, (change, _) in REFUSED.items():
            module = model()
            variant = make(module)
            variant(torch.ones(1, 2))
            change(module)
            with pytest.raises(CommunicationError) as caught:
                variant(torch.ones(1, 2))
            messages[key, name] = str(caught.value)
            with pytest.raises(CommunicationError) as bypassed:  # the module was called in its place
                variant.finish_gradient_synchronization()
            assert str(bypassed.value) == str(caught.value)
    return messages


def taken(rank: int) -> dict[tuple[str, str], list[float]]:
    """The gradient of the last bias, of losses that are the rank's number plus 1 times the output, two steps later."""
    gradients = {}
    for key, make in MAKE.items():
        for name, change in TAKEN.items():
            module = model()
            variant = make(module)
            change(module)
            module[1].weight.data.zero_()
            module[1].bias.data.zero_()
            for _ in range(2):
                variant.zero_grad()
                for parameter in variant.optimizer_parameters():
                    parameter.grad = None
                (variant(torch.ones(1, 2)) * (rank + 1)).sum().backward()
                variant.finish_gradient_synchronization()
            gradients[key, name] = [float(parameter.grad.sum()) for parameter in variant.optimizer_parameters()]
    return gradients


def frozen_on_rank_1(rank: int) -> dict[str, Any]:
    """What finishing a step says on each rank where only rank 1 froze a parameter; then both do, which is no error."""
    found = {}
    for key in ("naive", "overlap", "bucketed"):
        module = model()
        variant = MAKE[key](module)
        module[1].weight.requires_grad_(rank == 0)
        variant(torch.ones(1, 2)).sum().backward()
        try:
            variant.finish_gradient_synchronization()
            found[key] = ""
        except CommunicationError as error:
            found[key] = str(error)
        variant.zero_grad()
        module[1].weight.requires_grad_(False)
        variant(torch.ones(1, 2)).sum().backward()
        variant.finish_gradient_synchronization()  # frozen on all ranks
        assert module[1].weight.grad is None
    return found


def wrapped_twice(rank: int) -> dict[str, str]:
    messages = {}
    for key, make in MAKE.items():
        for inner in ("module", "variant"):
            first = make(model())
            with pytest.raises(CommunicationError) as caught:
                NaiveDDP(first.module if inner == "module" else first)
            messages[f"{key}, {inner}"] = str(caught.value)
            first.remove()
            NaiveDDP(first.module)
    with pytest.raises(CommunicationError) as caught:
        OverlapDDP(nn.parallel.DistributedDataParallel(model()))
    return {**messages, "torch's own": str(caught.value)}


def object_collectives(rank: int) -> dict[str, bool]:
    """Of each object collective: whether it ran on the device of the model."""
    inside: list[torch.device] = []
    seen: dict[str, bool] = {}

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(torch.distributed, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seen[f"{name} {len(seen)}"] = inside == [torch.device("cpu")]
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast_object_list", "all_gather_object"):
            patch.setattr(torch.distributed, name, watched(name))
        for module in ("collective", "all_reduce"):
            patch.setattr(f"ddp_prof.ddp.{module}.current_device", on)
        variant = BucketedDDP(model(), 1, rebuild_buckets=True)
        variant(torch.ones(1, 2)).sum().backward()
        variant.finish_gradient_synchronization()
    return seen


def unmade(rank: int) -> dict[tuple[str, str], str]:
    """What is said of a module whose tensors have no shape, no values, no strides or gradients of another type."""

    def wide() -> nn.Module:
        layer = nn.Linear(2, 3, dtype=torch.bfloat16)
        layer.weight.grad_dtype = torch.float32
        return layer

    def sparse() -> nn.Module:
        layer = nn.Linear(2, 3)
        layer.register_buffer("graph", torch.eye(3).to_sparse())
        return layer

    def elsewhere() -> nn.Module:
        layer = nn.Linear(2, 3)
        layer.register_buffer("copy", TakenGradient(layer.weight))  # without values of its own, as a DTensor
        return layer

    makers = {"lazy": lambda: nn.LazyLinear(3), "meta": lambda: nn.Linear(2, 3, device="meta"), "sparse": sparse}
    makers["elsewhere"] = elsewhere
    makers |= {"wide": wide} if hasattr(torch.Tensor, "grad_dtype") else {}
    messages = {}
    for key, make in MAKE.items():
        with pytest.raises(CommunicationError) as caught:
            make(nn.Embedding(3, 2, max_norm=1.0))
        messages[key, "scaled"] = str(caught.value)
    for key, make in {**MAKE, "torch": VARIANTS["torch"], "fsdp": VARIANTS["fsdp"]}.items():
        for name, build in makers.items():
            with pytest.raises(CommunicationError) as caught:
                make(build())
            messages[key, name] = str(caught.value)
    return messages


def everything(rank: int) -> dict[str, Any]:
    checks = (refused, taken, frozen_on_rank_1, wrapped_twice, object_collectives, unmade)
    return {check.__name__: check(rank) for check in checks}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("key", list(MAKE))
def test_a_change_that_would_not_be_synchronized_is_refused(results: list[Any], key: str, name: str) -> None:
    for ranked in results:
        said, way_out = ranked["refused"][key, name].rsplit(": ", 1)
        assert said == REFUSED[name][1]
        assert "wrap" in way_out


@pytest.mark.parametrize("name", list(TAKEN))
@pytest.mark.parametrize("key", ["naive", "overlap", "bucketed"])
def test_a_change_that_does_no_harm_is_taken(results: list[Any], key: str, name: str) -> None:
    assert [ranked["taken"][key, name][-1] for ranked in results] == [1.5] * 2


@pytest.mark.parametrize("key", ["naive", "overlap", "bucketed"])
def test_a_parameter_frozen_on_one_rank_only_is_an_error_there(results: list[Any], key: str) -> None:
    assert results[0]["frozen_on_rank_1"][key] == ""
    message = results[1]["frozen_on_rank_1"][key]
    assert message.startswith("rank 1: a parameter of shape (1, 3) is frozen here and trained on another rank: ")


def test_a_module_is_wrapped_once(results: list[Any]) -> None:
    messages = results[0]["wrapped_twice"]
    assert len(messages) == 9
    assert all("already" in message and "remove()" in message for message in messages.values()), messages


def test_a_module_whose_tensors_would_not_be_equal_on_all_ranks_is_refused(results: list[Any]) -> None:
    ways_out = {"lazy": "call the module once", "meta": "call to_empty()", "sparse": "make it dense"}
    ways_out["elsewhere"] = "make it a plain tensor"
    ways_out |= {"wide": "leave grad_dtype as it is", "scaled": "scale rows after the step"}
    for (key, name), message in results[1]["unmade"].items():
        assert ways_out[name] in message, key


def test_object_collectives_run_on_the_device_of_the_model(results: list[Any]) -> None:
    """Else NCCL sends objects from GPU 0 on all ranks, where a program never called ``set_device``."""
    seen = results[0]["object_collectives"]
    assert len(seen) == 3
    assert all(seen.values())


def test_the_current_device_is_set_for_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        asked.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("cpu", "cuda:1"):
        with collective.current_device(torch.device(name)):
            pass
    assert asked == [torch.device("cuda:1")]
