"""The window that is recorded: each rank's file, and ranks that wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_prof.train.record import GlooBarrier, rank_path
from tests.ddp.gloo_ranks import run_ranks


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a/naive.json.gz", "a/naive.rank1.json.gz"), ("b_2.5mb.json", "b_2.5mb.rank1.json")],
)
def test_each_rank_has_a_file(path: str, expected: str) -> None:
    assert rank_path(Path(path), 1) == Path(expected)


def wait_for_a_rank_that_does_not_come(rank: int) -> str:
    meet = GlooBarrier(torch.device("cpu"), timeout_s=2.0)
    error = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            meet()
        error = str(caught.value)
    dist.barrier()  # the other rank waits here, and stays until the first one has given up
    return error


def test_ranks_wait_for_each_other_no_longer_than_the_user_said() -> None:
    """Groups that are made with no word on it wait for half an hour."""
    assert "Timed out waiting 2000ms" in run_ranks(wait_for_a_rank_that_does_not_come)[0]
