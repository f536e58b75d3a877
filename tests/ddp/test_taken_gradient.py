"""What stands for a gradient that is on its way sees what is done to it, and lets nobody read it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddp_prof.ddp.buckets import TakenGradient
from ddp_prof.errors import CommunicationError


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
