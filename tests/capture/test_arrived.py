"""What got lost between the program and the capture."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.capture.arrived import find_loss
from tests.capture.conftest import exported


@pytest.mark.parametrize(
    ("steps", "expected", "loss"),
    [
        ({0: 2, 1: 2}, {0, 1}, None),
        ({0: 2, 1: 2}, {0, 1, 2, 3}, "the report lacks rank 2, 3"),
        ({0: 2, 1: 2}, set(), None),
        ({}, {0}, "no range of ours arrived"),
        ({0: 2, 1: 1, 2: 2}, {0, 1, 2}, "not all steps arrived of rank 1"),
        ({0: 0, 1: 0}, {0, 1}, "not all steps arrived of rank 0, 1"),
    ],
)
def test_ranks_and_steps(tmp_path: Path, steps: dict[int, int], expected: set[int], loss: str | None) -> None:
    exported(tmp_path / "x.sqlite", steps)
    assert find_loss(tmp_path / "x.sqlite", expected, on_gpus=False) == loss


def test_kernels_are_missed_on_gpus_alone(tmp_path: Path) -> None:
    exported(tmp_path / "x.sqlite", {0: 1, 1: 1}, lost_kernels=1)
    assert find_loss(tmp_path / "x.sqlite", {0, 1}, on_gpus=False) is None
    assert find_loss(tmp_path / "x.sqlite", {0, 1}, on_gpus=True) == "no kernels arrived of rank 1"
