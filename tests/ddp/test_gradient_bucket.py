"""What a bucket reduces: every gradient times the scale, once, wherever autograd left it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_prof.ddp.buckets import GradientBucket

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


@settings(deadline=None)
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


def test_what_is_reduced_is_one_contiguous_tensor_of_all_gradients() -> None:
    weights = [torch.nn.Parameter(torch.randn(2, 3).t()), torch.nn.Parameter(torch.randn(4))]
    bucket = GradientBucket(0, weights)
    assert bucket.take_missing(SCALE) == [0, 1]
    assert bucket.tensor().shape == (10,)
    assert bucket.tensor().is_contiguous()
