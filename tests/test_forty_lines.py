"""The two short programs of docs/forty_lines.md give what the real ones give."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.command_line import run
from tests.conftest import ROOT
from tests.night import of_which_the_gate_keeps

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "forty_lines.md").read_text(encoding="utf-8"), re.DOTALL)
STEPS, MOST_LINES = 3, 45
CAPTURES = ("bucketed_10mb", "overlap", "torch")


def test_they_are_short() -> None:
    bucketed, overlap = (len([line for line in text.splitlines() if line.strip()]) for text in PROGRAMS)
    assert (bucketed <= MOST_LINES, overlap <= MOST_LINES) == (True, True)


@pytest.mark.parametrize("name", of_which_the_gate_keeps(["bucketed_10mb"], CAPTURES))
def test_the_overlap_of_each_step_is_that_of_the_command(name: str) -> None:
    trace = ROOT / "traces" / "h200" / "nccl" / f"{name}.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[1], str(trace)], capture_output=True, text=True, check=True
    )  # fmt: skip
    found = sorted(tuple(map(int, line.split())) for line in done.stdout.splitlines())
    document = json.loads(run("overlap", "--format", "json", trace).stdout)
    keys = ("comm_ns", "overlapped_ns", "exposed_ns")
    steps = [step for rank in document["ranks"] for step in rank["steps"]]
    assert len(steps) >= 2 * STEPS
    assert [step for step in sorted(tuple(step[key] for key in keys) for step in steps) if step not in found] == []


def train(rank: int, *, is_ours: bool) -> list[Any]:
    """The weights after a few steps, of ranks that begin with other weights and see other data."""
    import torch
    from torch import nn

    from ddp_prof.ddp import BucketedDDP

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
    forward: Any = model
    if is_ours:
        forward = BucketedDDP(model, 700 / 2**20)
        finish = forward.finish_gradient_synchronization
    else:
        scope: dict[str, Any] = {}
        exec(PROGRAMS[0], scope)
        reducer = scope["Bucketed"](model, 700)
        assert len(reducer.buckets) == 3
        finish = reducer.finish
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        forward(inputs).square().mean().backward()
        finish()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def train_both(rank: int) -> list[list[Any]]:
    return [train(rank, is_ours=is_ours) for is_ours in (False, True)]


@pytest.mark.torch
def test_the_weights_are_those_of_bucketed() -> None:
    from tests.ddp.gloo_ranks import run_ranks

    ranks = run_ranks(train_both)
    for weights in zip(*(model for rank in ranks for model in rank), strict=True):
        for other in weights[1:]:
            np.testing.assert_allclose(other, weights[0], rtol=1e-6)
