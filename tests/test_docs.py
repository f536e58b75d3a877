"""What the documentation shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ddp_prof.cli import COMMANDS
from tests.conftest import ROOT


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"ddp-prof {command}" in (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "traces/README.md"])
def test_shown_output_is_real(page: str) -> None:
    """Rebuild with ``python -m cogapp -r -I scripts README.md traces/README.md``."""
    done = subprocess.run(
        [sys.executable, "-m", "cogapp", "--check", "--diff", "-I", "scripts", page],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_a_page_names_exists(page: str) -> None:
    """Every path in backquotes; ``*`` and the like stand for made files."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    paths = {
        name for name in re.findall(r"`([^`\s]+)`", text) if "/" in name or name.endswith((".py", ".toml", ".yaml"))
    }
    assert paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_the_architecture_names_every_folder_of_the_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path for path in (ROOT / "ddp_prof").rglob("*") if path.is_dir() and path.name != "__pycache__"}
    names = {f"`{path.relative_to(ROOT)}/`" for path in folders if any(path.iterdir())}
    assert len(names) > 10
    assert {name for name in names if name not in text} == set()


def test_the_architecture_names_every_module_of_the_ground_floor() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    modules = {path.name for path in (ROOT / "ddp_prof").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"`ddp_prof/{name}`" not in text} == set()


def test_every_picture_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    pictures = [part.partition(")")[0] for part in text.split("](")[1:] if part.partition(")")[0].endswith(".png")]
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)
