"""A rank that dies makes the others fail at once, with an error that says so."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from ddp_prof.ddp import VARIANTS
from ddp_prof.errors import CommunicationError
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.workload import Trainer, TransformerLM
from tests.ddp.gloo_ranks import run_ranks


def one_dies(rank: int, key: str, steps: int) -> str:
    """Rank 1 dies after some steps; what rank 0 says to that."""
    options = {"bucket_size_mb": 0.1} if key == "bucketed" else {}
    variant = VARIANTS[key](TransformerLM(MODEL_SIZES["tiny"]), **options)
    trainer = Trainer(variant, torch.optim.SGD(variant.parameters(), lr=0.1))
    tokens = torch.randint(100, (1, 9))
    for _ in range(steps):
        trainer.train_step(tokens[:, :-1], tokens[:, 1:])
    if rank == 1:
        os._exit(1)
    try:
        trainer.train_step(tokens[:, :-1], tokens[:, 1:])
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("key", "steps", "what"),
    [
        ("naive", 1, "all-reduce of bucket "),
        ("bucketed", 1, "all-reduce of bucket "),
        ("torch", 1, "DDP's exchange before forward"),  # of the bucket order, before the second forward only
        ("torch", 2, "all-reduce of bucket "),
    ],
)
def test_the_other_rank_fails_and_does_not_wait_for_a_timeout(key: str, steps: int, what: str) -> None:
    message = run_ranks(partial(one_dies, key=key, steps=steps))[0]
    assert message.startswith(f"rank 0: {what}")
    assert message.endswith(": another rank ended, see its output")  # after a timeout: "is stuck or ended"
    assert "\n" not in message
