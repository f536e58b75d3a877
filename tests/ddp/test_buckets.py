"""Buckets: what is assigned to each, what it reduces, and what stands for a gradient that is on its way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_prof.bucket_assignment import EACH_ALONE, assign_buckets, assign_by_readiness, bucket_bytes
from ddp_prof.ddp.buckets import GradientBucket, TakenGradient, cap_in_bytes
from ddp_prof.errors import CommunicationError
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.workload import TransformerLM

KINDS = (torch.float32, torch.bfloat16)


def sized(numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(numel, dtype=kind, device="meta")


sizes_strategy = st.lists(
    st.builds(sized, st.integers(0, 50), st.sampled_from(KINDS)),
    max_size=30,
)
cap_strategy = st.none() | st.integers(1, 400) | st.floats(0.5, 400)


def parameters(*bytes_: int) -> list[torch.Tensor]:
    return [sized(item // 4) for item in bytes_]


def total(sizes: list[torch.Tensor], bucket: tuple[int, ...]) -> int:
    return sum(sizes[index].nbytes for index in bucket)


@given(sizes_strategy, cap_strategy)
def test_every_parameter_is_in_exactly_one_bucket(sizes: list[torch.Tensor], cap: float | None) -> None:
    assigned = [index for bucket in assign_buckets(sizes, cap) for index in bucket]
    assert sorted(assigned) == list(range(len(sizes)))


@given(sizes_strategy, cap_strategy)
def test_a_bucket_holds_one_kind_within_the_cap_unless_alone(sizes: list[torch.Tensor], cap: float | None) -> None:
    for bucket in assign_buckets(sizes, cap):
        assert len({sizes[index].dtype for index in bucket}) == 1
        assert cap is None or len(bucket) == 1 or total(sizes, bucket) <= cap


@given(sizes_strategy, cap_strategy)
def test_parameters_come_in_reverse_order(sizes: list[torch.Tensor], cap: float | None) -> None:
    buckets = assign_buckets(sizes, cap)
    for kind in KINDS:
        members = [index for bucket in buckets for index in bucket if sizes[index].dtype == kind]
        assert members == sorted(members, reverse=True)


@given(sizes_strategy, cap_strategy)
def test_buckets_come_in_the_order_in_which_backward_fills_them(sizes: list[torch.Tensor], cap: float | None) -> None:
    filled_by = [bucket[-1] for bucket in assign_buckets(sizes, cap)]
    assert filled_by == sorted(filled_by, reverse=True)


@given(sizes_strategy, cap_strategy)
def test_a_bucket_ends_only_where_the_next_parameter_does_not_fit(sizes: list[torch.Tensor], cap: float | None) -> None:
    buckets = assign_buckets(sizes, cap)
    for kind in KINDS:
        mine = [bucket for bucket in buckets if sizes[bucket[0]].dtype == kind]
        for bucket, after in pairwise(mine):
            assert cap is not None
            assert total(sizes, bucket) + sizes[after[0]].nbytes > cap


@given(sizes_strategy)
def test_without_a_cap_there_is_one_bucket_a_kind(sizes: list[torch.Tensor]) -> None:
    assert len(assign_buckets(sizes, None)) == len({size.dtype for size in sizes})


@given(sizes_strategy)
def test_each_alone(sizes: list[torch.Tensor]) -> None:
    assert assign_buckets(sizes, EACH_ALONE) == [(index,) for index in range(len(sizes))][::-1]


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        (parameters(4, 4, 4, 4), 8, [(3, 2), (1, 0)]),
        (parameters(4, 4, 4), 8, [(2, 1), (0,)]),
        (parameters(4, 100, 4), 8, [(2,), (1,), (0,)]),  # larger than the cap: alone
        (parameters(4, 8, 4), 8, [(2,), (1,), (0,)]),
        (parameters(4, 4), 7.9, [(1,), (0,)]),  # the cap may be a fraction of a MB
        ([], 8, []),
    ],
)
def test_examples(sizes: list[torch.Tensor], cap: float, expected: list[tuple[int, ...]]) -> None:
    assert assign_buckets(sizes, cap) == expected


def test_kinds_fill_side_by_side() -> None:
    sizes = [sized(1), sized(2, torch.bfloat16)] * 2
    assert assign_buckets(sizes, 8) == [(3, 1), (2, 0)]


def test_caps_hold_for_the_buckets_in_turn_and_the_last_for_all_that_follow() -> None:
    assert assign_buckets(parameters(8, 8, 8, 8, 8, 8), [8, 16]) == [(5,), (4, 3), (2, 1), (0,)]


@given(sizes_strategy, cap_strategy)
def test_one_cap_in_a_list_is_that_cap(sizes: list[torch.Tensor], cap: float | None) -> None:
    if cap is not None:
        assert assign_buckets(sizes, [cap]) == assign_buckets(sizes, cap)


@given(sizes_strategy, cap_strategy)
def test_readiness_in_reverse_order_is_the_usual_assignment(sizes: list[torch.Tensor], cap: float | None) -> None:
    usual = assign_by_readiness(sizes, cap, [*reversed(range(len(sizes)))])
    assert usual == assign_buckets(sizes, cap)


def test_what_is_ready_first_travels_first() -> None:
    assert assign_by_readiness(parameters(4, 4, 4, 4), 8, [2, 0, 3, 1]) == [(2, 0), (3, 1)]


def test_caps_are_given_in_mb() -> None:
    assert cap_in_bytes(None) is None
    assert cap_in_bytes(2) == 2 * 2**20
    assert cap_in_bytes([1, 0.5]) == [2**20, 2**19]


@pytest.mark.parametrize("caps", [[], [1, 0], [-1]])
def test_a_list_of_caps_has_positive_ones(caps: list[float]) -> None:
    with pytest.raises(ValueError, match="bucket_size_mb must"):
        cap_in_bytes(caps)


SCALE = 0.25


@st.composite
def aliased_models(draw: st.DrawFn) -> tuple[list[torch.nn.Parameter], list[list[int]]]:
    """Parameters whose gradients autograd gives one storage by sums, and a partition of them into buckets."""
    count = draw(st.integers(2, 6))
    shape = draw(st.sampled_from([(), (3,), (2, 3)]))
    parameters = [torch.nn.Parameter(torch.randn(shape)) for _ in range(count)]
    summands = draw(st.lists(st.sets(st.integers(0, count - 1), min_size=2), min_size=1, max_size=3))
    loss = torch.zeros(())
    for group in summands:
        total = sum((parameters[member][None] for member in sorted(group)), torch.zeros(1))
        loss = loss + (total * torch.randn(4, *shape)).sum()
    loss.backward()
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1))))
    return parameters, [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


@given(aliased_models())
def test_gradients_that_share_storage_are_scaled_once(
    model: tuple[list[torch.nn.Parameter], list[list[int]]],
) -> None:
    parameters, partition = model
    expected = [None if parameter.grad is None else parameter.grad * SCALE for parameter in parameters]
    for index, members in enumerate(partition):
        bucket = GradientBucket(index, [parameters[member] for member in members])
        for slot in range(len(members)):
            bucket.take(slot, SCALE)
        for slot in range(len(members)):
            bucket.restore_gradient(slot, True, None)
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter) if value is None else value)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_gradient_has_the_strides_of_its_parameter(
    count: int, memory_format: torch.memory_format, has_gradient: bool
) -> None:
    weights = [torch.nn.Parameter(torch.randn(4, 2, 3, 3).to(memory_format=memory_format)) for _ in range(count)]
    gradients = [torch.randn(4, 2, 3, 3) for _ in weights]
    bucket = GradientBucket(0, weights)
    for slot, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        weight.grad = gradient if has_gradient else None
        bucket.take(slot, SCALE)
        bucket.restore_gradient(slot, True, None)
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride()
        torch.testing.assert_close(weight.grad, gradient * SCALE if has_gradient else torch.zeros_like(gradient))


def test_a_parameter_that_is_not_dense_gets_a_row_major_gradient() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 6)[:, ::2])
    weight.grad = torch.ones(4, 3)
    bucket = GradientBucket(0, [weight])
    bucket.take(0, SCALE)
    bucket.restore_gradient(0, True, None)
    assert weight.grad is not None
    assert weight.grad.stride() == (3, 1)


def test_a_launch_waits_for_the_copies_of_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket notes each copy behind it, whatever stream it was on, and waits before it is handed out."""
    seen: list[tuple[str, list[float]]] = []

    class Fence:
        def note(self, _device: torch.device) -> None:
            seen.append(("note", bucket.views[0].tolist()))

        def wait(self, _device: torch.device) -> None:
            seen.append(("wait", bucket.views[0].tolist()))

    monkeypatch.setattr("ddp_prof.ddp.buckets.StreamFence", Fence)
    parameter = torch.nn.Parameter(torch.zeros(2))
    bucket = GradientBucket(0, [parameter])
    parameter.grad = torch.full((2,), 4.0)
    bucket.take(0, scale=0.5)
    bucket.tensor()
    assert seen == [("note", [2.0, 2.0]), ("wait", [2.0, 2.0])]


def test_memory_that_crosses_streams_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook drops the gradient, the launch uses the buffer, ``finish`` what came late: each on its own stream."""
    held: list[torch.Tensor] = []
    monkeypatch.setattr("ddp_prof.ddp.buckets.hold_for_current_stream", held.append)
    parameter = torch.nn.Parameter(torch.zeros(2))
    bucket, late_bucket = GradientBucket(0, [parameter]), GradientBucket(0, [parameter])
    gradient, late = torch.ones(2), torch.ones(2)
    parameter.grad = gradient
    bucket.take(0, SCALE)
    buffer = bucket.tensor()
    late_bucket.add(0, late, SCALE)
    bucket.restore_gradient(0, True, late_bucket.views[0])
    assert [id(tensor) for tensor in held] == [id(gradient), id(buffer), id(late), id(late_bucket.views[0])]


@pytest.mark.parametrize(("set_to_none", "left"), [(True, None), (False, [0.0, 0.0])])
def test_what_zero_grad_drops_before_the_reduction_ends_is_left_as_it_leaves_it(
    set_to_none: bool, left: list[float] | None
) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    bucket = GradientBucket(0, [weight])
    (weight * torch.tensor([3.0, 4.0])).sum().backward()
    bucket.take(0, SCALE)
    torch.optim.SGD([weight]).zero_grad(set_to_none=set_to_none)
    bucket.restore_gradient(0, True, None)
    assert (None if weight.grad is None else weight.grad.tolist()) == left


def test_what_is_reduced_is_one_contiguous_tensor_of_all_gradients() -> None:
    weights = [torch.nn.Parameter(torch.randn(2, 3).t()), torch.nn.Parameter(torch.randn(4))]
    bucket = GradientBucket(0, weights)
    assert bucket.take_missing(SCALE) == [0, 1]
    assert bucket.tensor().shape == (10,)
    assert bucket.tensor().is_contiguous()


@pytest.fixture
def weight() -> nn.Parameter:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    weight.grad = TakenGradient(weight)
    return weight


def taken(weight: nn.Parameter) -> TakenGradient:
    assert isinstance(weight.grad, TakenGradient)
    return weight.grad


ZERO: dict[str, Callable[[nn.Parameter], None]] = {
    "optimizer": lambda weight: torch.optim.SGD([weight]).zero_grad(set_to_none=False),
    "foreach": lambda weight: torch.optim.SGD([weight], foreach=True).zero_grad(set_to_none=False),
    "module": lambda weight: nn.ParameterList([weight]).zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", list(ZERO))
def test_zeroing_is_seen(weight: nn.Parameter, how: str) -> None:
    (weight * torch.tensor([3.0, 4.0])).sum().backward()
    ZERO[how](weight)
    assert taken(weight).is_zeroed
    assert taken(weight).added is None


def test_what_is_zeroed_beside_other_tensors_is_seen_and_they_are_zero(weight: nn.Parameter) -> None:
    other = torch.ones(3)
    torch._foreach_zero_([other, weight.grad])
    assert taken(weight).is_zeroed
    assert not other.any()


def test_what_backward_adds_is_kept_and_summed(weight: nn.Parameter) -> None:
    for factor in (1.0, 10.0):
        (weight * torch.tensor([3.0, 4.0]) * factor).sum().backward()
    assert not taken(weight).is_zeroed
    assert torch.equal(taken(weight).added, torch.tensor([33.0, 44.0]))


def test_what_a_backward_with_a_graph_adds_stands_in_its_place(weight: nn.Parameter) -> None:
    before = taken(weight)
    with pytest.warns(UserWarning, match="create_graph"):
        (weight * torch.tensor([3.0, 4.0])).sum().backward(create_graph=True)
    assert before.is_replaced
    assert torch.equal(weight.grad.detach(), torch.tensor([3.0, 4.0]))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_zeros_drop_what_was_taken_also_before_a_backward_with_a_graph() -> None:
    """Under ``sharded`` the gradient of the step before counted again."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    weight.grad = torch.ones(2)
    bucket = GradientBucket(0, [weight])
    bucket.take(0, SCALE)
    ZERO["module"](weight)
    (weight * torch.tensor([3.0, 4.0])).sum().backward(create_graph=True)
    is_dropped, late = bucket.take_late(0)
    assert (is_dropped, late.tolist()) == (True, [3.0, 4.0])  # type: ignore[union-attr]


READ: dict[str, Callable[[nn.Parameter], object]] = {
    "torch's clipping": lambda weight: nn.utils.clip_grad_norm_([weight], 1.0),
    "a norm": lambda weight: weight.grad.norm(),
    "scaling": lambda weight: weight.grad.mul_(2),
    "a step": lambda weight: torch.optim.SGD([weight]).step(),
    "a sum": lambda weight: torch.ones(2) + weight.grad,
    "GradScaler": lambda weight: torch._amp_foreach_non_finite_check_and_unscale_(
        [weight.grad], torch.zeros(1), torch.ones(1)
    ),
}


@pytest.mark.parametrize("how", list(READ))
def test_to_read_or_change_it_is_an_error(weight: nn.Parameter, how: str) -> None:
    with pytest.raises(CommunicationError, match="not synchronized: call finish_gradient_synchronization"):
        READ[how](weight)


def test_it_can_be_printed(weight: nn.Parameter) -> None:
    assert str(weight.grad) == "a gradient of shape (2,) that is not synchronized yet"


@pytest.mark.parametrize("cap_mb", [0.5, 1, 10, 100, None])
@pytest.mark.parametrize("name", ["tiny", "mini", "medium"])
def test_buckets_are_known_from_the_size_of_the_model_alone(name: str, cap_mb: float | None) -> None:
    with torch.device("meta"):
        parameters = [*TransformerLM(MODEL_SIZES[name]).parameters()]
    cap = None if cap_mb is None else cap_mb * 2**20
    assigned = [sum(parameters[at].nbytes for at in bucket) for bucket in assign_buckets(parameters, cap)]
    assert bucket_bytes(MODEL_SIZES[name].parameter_counts, cap_mb) == tuple(assigned)
