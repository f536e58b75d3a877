"""The table of docs/compared_with_ddp.md that says under what a training loop equals one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.torch


def test_the_table_in_the_documentation_is_what_the_loops_give() -> None:
    """Rebuild with ``python scripts/dev/compare_loops.py --write``."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/dev/compare_loops.py"], capture_output=True, text=True, check=True
    )
    rows = done.stdout.strip().splitlines()
    page = (ROOT / "docs/compared_with_ddp.md").read_text().splitlines()
    assert page[page.index(rows[0]) : page.index(rows[-1]) + 1] == rows
    assert done.stdout.count("| right ") > 80
