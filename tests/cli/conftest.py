"""Commands of a test share what they read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.command_line import each_read_once

READING_ITSELF = {"test_cli.py", "test_mcp.py"}
"""Files of tests in which reading fails, or is done by other processes."""


@pytest.fixture(autouse=True)
def _of_one_reading(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.name in READING_ITSELF:
        yield
    else:
        with each_read_once():
            yield
