"""Runs the project's shell scripts in a copy of the checkout, with stand-ins for the programs that they call."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Checkout:
    """A copy of the scripts; ``programs`` comes first on their PATH."""

    root: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)
    path: str = SYSTEM_PATH

    def program(self, name: str, body: str, folder: Path | None = None) -> Path:
        """Put a shell script on the PATH, or into ``folder``. ``$CALLS`` is a file to write down calls in."""
        target = (folder or self.programs) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"#!/bin/bash\nCALLS={shlex.quote(str(self.calls_file))}\n{body}\n")
        target.chmod(0o755)
        return target

    @property
    def calls_file(self) -> Path:
        return self.root.parent / "calls"

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def full_environment(self, **more: str) -> dict[str, str]:
        home = self.root.parent / "home"
        home.mkdir(exist_ok=True)
        return {"PATH": f"{self.programs}:{self.path}", "HOME": str(home), **self.environment, **more}

    def run(self, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the copy, from another folder than the copy."""
        return subprocess.run(
            [shutil.which("bash") or "/bin/bash", str(self.root / script), *arguments],
            env=self.full_environment(**more),
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "check out"  # a blank in the path, as some have
    root.mkdir()
    for name in ("scripts", "profile_all.sh", "pyproject.toml", "constraints.txt", "package-lock.json"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name)
        else:
            shutil.copy2(ROOT / name, root / name)
    programs = tmp_path / "programs"
    programs.mkdir()
    return Checkout(root, programs)
