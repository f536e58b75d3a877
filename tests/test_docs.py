"""What the documentation shows is what happens."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddp_prof.cli import COMMANDS
from tests.conftest import ROOT


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"ddp-prof {command}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "traces/README.md"])
def test_shown_output_is_real(page: str) -> None:
    """Rebuild with ``python -m cogapp -r -I scripts README.md traces/README.md``."""
    changed = subprocess.run(["git", "status", "--porcelain", "traces"], cwd=ROOT, capture_output=True, check=False)
    if changed.returncode or changed.stdout:
        pytest.skip("the captures here are of one's own run; what is shown is of the repository's")
    done = subprocess.run(
        [sys.executable, "-m", "cogapp", "--check", "--diff", "-I", "scripts", page],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_picture_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    pictures = [part.partition(")")[0] for part in text.split("](")[1:] if part.partition(")")[0].endswith(".png")]
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)
