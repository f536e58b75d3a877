"""A DDP that gets other arguments between two steps."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.annotate.rewrap import Wrapped
from tests.ddp.gloo_ranks import run_ranks


def set_while_frozen(_rank: int) -> list[tuple[int, list[bool]]]:
    """How many parameters are reduced after ``set``, and which of them require gradients."""
    init, found = DistributedDataParallel.__init__, []
    for frozen in (slice(1), slice(2)):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        ddp = DistributedDataParallel(model)
        wrapped = Wrapped(ddp, init, inspect.signature(init).bind(ddp, model))
        model[frozen].requires_grad_(False)
        wrapped.set({"bucket_cap_mb": 1})
        reduced = int(ddp._get_ddp_logging_data()["num_parameter_tensors"])
        found.append((reduced, [parameter.requires_grad for parameter in model.parameters()]))
    return found


def test_what_is_frozen_between_two_steps_is_reduced_later() -> None:
    """A GAN whose critic is frozen while the generator steps ended the run; what was frozen in part was not reduced."""
    assert run_ranks(set_while_frozen, world=1) == [[(2, [False, True]), (2, [False, False])]]
