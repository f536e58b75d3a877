"""A test that hangs is a failure which shows what every thread was doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HANGING = """
from threading import Event, Thread

def wait_beside():
    Event().wait()

def test_that_hangs():
    Thread(target=wait_beside, daemon=True).start()
    Event().wait()

def test_after_it():
    pass
"""


@pytest.mark.slow
def test_a_test_that_hangs_fails_with_all_stacks_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "1", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "1 failed, 1 passed" in done.stdout
    assert "in wait_beside" in done.stdout
    assert "test_hanging.py:9: " in done.stdout  # the main thread, as the traceback of its failure


def test_every_test_of_this_project_has_a_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 600
