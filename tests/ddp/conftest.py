"""What the ranks of a test file find out, asked once for all of its tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ddp.gloo_ranks import run_ranks


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[Any]:
    """By rank, what the file's ``everything(rank)`` returns in a process group of two."""
    return run_ranks(request.module.everything)
