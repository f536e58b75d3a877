from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_prof.train import record


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *settings, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_of_the_checkout_that_holds_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "site-packages" / "record.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(record, "__file__", str(file))
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "somebody else's")
    assert record.git_commit() is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "with the package")
    assert record.git_commit() == git(tmp_path, "rev-parse", "HEAD")
