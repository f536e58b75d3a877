"""One rank alone: everything works, and gradients are what one process has."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_prof.ddp import VARIANTS, BucketedDDP, NaiveDDP, ShardedOptimizer, reference
from ddp_prof.errors import CommunicationError
from tests.ddp import cases

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("setting", list(cases.SETTINGS))
@pytest.mark.parametrize("case", ["plain", "mixed-dtypes", "checkpoint-reentrant", "unused-everywhere-found"])
def test_equals_one_process(case: str, setting: str) -> None:
    what = cases.CASES[case]
    if not cases.can_run(what, cases.SETTINGS[setting][0]):
        pytest.skip("not possible")
    expected = cases.train(what, cases.OneProcess(cases.build(what, seed=0)), "sgd")
    got = cases.train(what, cases.make_variant(what, setting, cases.build(what, seed=0)), "sgd")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("key", list(VARIANTS))
def test_parameters_are_those_of_the_module(key: str) -> None:
    module = cases.build(cases.CASES["plain"], seed=0)
    variant: Any = cases.make_variant(
        cases.CASES["plain"], {"bucketed": "bucketed-small", "sharded": "sharded-tiny"}.get(key, key), module
    )
    assert variant.module is module
    assert list(variant.parameters()) == list(module.parameters())
    assert list(variant.state_dict()) == [f"module.{name}" for name in module.state_dict()]


@pytest.mark.usefixtures("alone")
def test_a_copy_is_made_where_torch_s_ddp_cannot_leave_out_the_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.7: "unexpected keyword argument 'init_sync'"."""

    class OlderDDP(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module: Any, process_group: Any = None, *, find_unused_parameters: bool = False) -> None:
            super().__init__(module, process_group=process_group, find_unused_parameters=find_unused_parameters)

    monkeypatch.setattr(reference, "DistributedDataParallel", OlderDDP)
    variant = VARIANTS["torch"](torch.nn.Linear(2, 2))
    twin = copy.deepcopy(variant)
    for own, copied in zip(variant.parameters(), twin.parameters(), strict=True):
        assert own is not copied
        torch.testing.assert_close(own, copied)


@pytest.mark.usefixtures("alone")
def test_a_group_of_other_ranks_is_refused() -> None:
    others: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns where this rank is not in it
    model = torch.nn.Linear(2, 2)
    for make in (
        lambda: NaiveDDP(model, process_group=others),
        lambda: ShardedOptimizer(model.parameters(), torch.optim.SGD, process_group=others),
    ):
        with pytest.raises(CommunicationError, match="rank 0 is no member of the process group that it was given"):
            make()


@pytest.mark.usefixtures("alone")
def test_nothing_to_train_is_nothing_to_send() -> None:
    variant = NaiveDDP(torch.nn.Linear(2, 2).requires_grad_(False), find_unused_parameters=True)
    variant.finish_gradient_synchronization()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_bucket_has_a_size(size: float) -> None:
    with pytest.raises(ValueError, match="bucket_size_mb must be positive"):
        BucketedDDP(torch.nn.Linear(2, 2), size)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("size", ["3", True, ["3"]])
def test_a_bucket_size_is_a_number(size: Any) -> None:
    with pytest.raises(TypeError, match="bucket_size_mb must be a number of MiB or None, got"):
        BucketedDDP(torch.nn.Linear(2, 2), size)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("key", list(VARIANTS))
def test_what_only_torch_s_ddp_has_is_refused_in_one_line(key: str) -> None:
    options: dict[str, Any] = {"bucket_size_mb": 1} if key == "bucketed" else {}
    variant: Any = VARIANTS[key](torch.nn.Linear(2, 2), **options)
    with pytest.raises(CommunicationError, match="same number of batches"), variant.join():
        pass
    with pytest.raises(CommunicationError, match="TorchDDP"):
        variant.register_comm_hook(None, print)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["removed", "deleted"])
def test_a_module_trains_alone_when_sharded_is_gone(how: str) -> None:
    module = torch.nn.Linear(2, 2)
    variant: Any = VARIANTS["sharded"](module)
    variant(torch.ones(2)).sum().backward()
    variant.finish_gradient_synchronization()
    if how == "removed":
        variant.remove()
    del variant
    gc.collect()
    assert [parameter.grad for parameter in module.parameters()] == [None, None]
    module(torch.ones(2)).sum().backward()
    torch.optim.AdamW(module.parameters()).step()


@pytest.mark.usefixtures("alone")
def test_a_variant_may_be_collected_within_a_step_of_another_optimizer() -> None:
    """Its hooks on all optimizers were removed while torch called them: "OrderedDict mutated during iteration"."""
    variants = [NaiveDDP(torch.nn.Linear(2, 2))]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)
    handle = register_optimizer_step_pre_hook(lambda *_: variants.clear())
    optimizer.step()
    handle.remove()


@pytest.mark.usefixtures("alone")
def test_what_is_made_for_inference_is_not_wrapped() -> None:
    with torch.inference_mode(), pytest.raises(CommunicationError, match="wrap outside of it"):
        NaiveDDP(torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("alone")
def test_a_program_may_clear_the_state_of_a_sharded_optimizer_but_not_move_its_parameters() -> None:
    """It cleared a state that nothing used, and parameters that it put into a group were never stepped on."""
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = ShardedOptimizer([first], torch.optim.SGD, lr=1, momentum=0.5)
    first.grad = second.grad = torch.ones(1)
    optimizer.step()
    assert optimizer.state[first]["momentum_buffer"].item() == 1
    optimizer.state.clear()
    optimizer.step()
    assert first.item() == 1 - 1 - 1
    optimizer.param_groups[0]["params"].append(second)
    with pytest.raises(CommunicationError, match=r"call add_param_group\(\)"):
        optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_before", [True, False], ids=["hook before the variant's", "after it"])
@pytest.mark.parametrize("key", ["naive", "overlap", "sharded"])
def test_steps_by_hand_within_backward_are_refused(key: str, *, is_before: bool) -> None:
    """Ranks stepped on gradients of their own, and diverged in silence."""

    @torch.no_grad()
    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter -= parameter.grad
        parameter.grad = None

    def add_hooks() -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]

    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    if is_before:
        add_hooks()
    variant = VARIANTS[key](module)
    if not is_before:
        add_hooks()
    with pytest.raises(CommunicationError, match=r"call finish_gradient_synchronization|step after finish_gradient"):
        variant(torch.ones(2)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_a_step_is_compiled_though_its_end_assigns_buckets_anew() -> None:
    """Dynamo took the exchange of the order of gradients for code to compile, and ended with an error of its own."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    variant = BucketedDDP(module, None, rebuild_buckets=True)
    first = variant._reducer

    @torch.compile(backend="eager")
    def step() -> None:
        variant(torch.ones(2)).sum().backward()
        variant.finish_gradient_synchronization()

    step()
    step()
    assert variant._reducer is not first
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.usefixtures("alone")
def test_in_a_compiled_step_of_an_optimizer_what_a_variant_does_is_left_to_python() -> None:
    """Dynamo traced the collectives of ``sharded``, and warned of ranges and locks in the program's output."""
    module = torch.nn.Linear(2, 2)
    variant = VARIANTS["sharded"](module)
    optimizer = torch.optim.SGD(variant.optimizer_parameters(), lr=1.0)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph)
        return graph

    before = module.weight.detach().clone()
    variant(torch.ones(2)).sum().backward()
    variant.finish_gradient_synchronization()
    torch.compile(optimizer.step, backend=keep)()
    torch.testing.assert_close(module.weight, before - 1)
    assert len(graphs) == 1  # the step itself


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("variant", ["overlap", "torch"])
def test_in_a_compiled_step_the_hooks_of_a_bucket_are_left_to_python(
    variant: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Of ``torch`` Dynamo's error "ProcessGroup name not set" ended the program; of the others it warned of ranges."""
    trained = VARIANTS[variant](torch.nn.Linear(2, 2))

    @torch.compile(backend="eager")
    def step() -> None:
        trained(torch.ones(2)).sum().backward()

    for _ in range(2):
        step()
        trained.finish_gradient_synchronization()
        trained.zero_grad()
    assert [str(warning.message) for warning in recwarn if "ranges" in str(warning.message)] == []


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(CommunicationError, match="init_process_group"):
        NaiveDDP(torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("alone")
def test_what_gloo_calls_back_keeps_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroyed on gloo's own thread, a group would join that thread and abort the process."""
    kept: list[Any] = []

    class Watched(torch.futures.Future):
        """A future that is done, as the work of an all-reduce hands out."""

        def get_future(self) -> Any:
            return self

        def then(self, callback: Any) -> Any:
            kept.extend(cell.cell_contents for cell in callback.__closure__ or ())
            after = Watched()
            after.set_result(callback(self))
            return after

        def add_done_callback(self, callback: Any) -> None:
            kept.append(callback.__self__)
            callback(self)

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        work = Watched()
        work.set_result([tensor])
        return work

    variant = VARIANTS["torch"](torch.nn.Linear(2, 2))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    variant(torch.ones(2)).sum().backward()
    variant.finish_gradient_synchronization()
    assert kept
    assert not any(isinstance(item, (type(variant), dist.ProcessGroup)) for item in kept)
