"""Commands of a test share what they read, and most have a small export to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import each_read_once
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

READING_ITSELF = {"test_cli.py", "test_mcp.py"}
"""Files of tests in which reading fails, or is done by other processes."""


@pytest.fixture(autouse=True)
def _of_one_reading(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.name in READING_ITSELF:
        yield
    else:
        with each_read_once():
            yield


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """An export whose figures are known."""
    return write_capture(tmp_path / "known.sqlite", known_truth())
