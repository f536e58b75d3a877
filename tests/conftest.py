"""Shared fixtures: the traces of this repository, and real captures by others where they are present."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED_TRACES = ROOT.parent / "shared" / "traces"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """A folder of real captures by others, with the figures an independent program measured on them."""
    if not SHARED_TRACES.is_dir():
        pytest.skip("the captures by others are not part of the repository")
    return SHARED_TRACES


@pytest.fixture(scope="session")
def own_traces() -> list[Path]:
    """The real captures that come with the repository."""
    found = sorted((ROOT / "traces").glob("*.sqlite"))
    assert found, "traces/ holds no capture"
    return found
