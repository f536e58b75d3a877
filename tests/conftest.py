"""Shared fixtures: the traces of this repository, and real captures by others where they are present."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

# Started in the background, or by nohup, the tests would hand on signals that no script can trap.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

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


@pytest.fixture(scope="session")
def committed_traces(own_traces: list[Path]) -> list[Path]:
    """The real captures that come with the repository, as they came: not those of one's own run in their place."""
    changed = subprocess.run(["git", "status", "--porcelain", "traces"], cwd=ROOT, capture_output=True, check=False)
    if changed.returncode or changed.stdout:
        pytest.skip("the captures here are of one's own run")
    return own_traces
