"""What is built for installation: the wheel holds the package whole and nothing else, the sdist the sources."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow  # hatchling need not be there on other machines


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ddp_prof").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == package
    endings = {name.rpartition("/")[2].rpartition(".")[2] for name in inside}
    assert {"py", "typed", "js", "css", "html"} <= endings, endings
    assert any(name.endswith("/sitecustomize.py") for name in inside), "capture marks a program through it"


def test_the_wheel_asks_for_pictures_and_training_by_extras_alone(wheel: zipfile.ZipFile) -> None:
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(wheel.read(path))
    needed = metadata.get_all("Requires-Dist", [])
    always = [each for each in needed if "extra ==" not in each]
    assert not [each for each in always if each.startswith(("choreographer", "torch", "nvtx", "distributed", "mcp"))]
    assert {"pictures", "train", "cluster", "mcp"} <= set(metadata.get_all("Provides-Extra", []))
    assert [each for each in needed if each.startswith("choreographer") and "extra == 'pictures'" in each]


def test_the_sdist_holds_what_git_knows_and_nothing_that_a_machine_made(built: Path, clone: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        inside = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    listed = subprocess.run(["git", "ls-files"], cwd=clone, capture_output=True, text=True, check=True).stdout
    assert inside == set(listed.split()) | {"PKG-INFO"}


@pytest.mark.nightly  # in every gate the sdist holds all that git knows
def test_the_sdist_builds_the_same_wheel(built: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        sdist.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
        sdist.extractall(tmp_path)
    (sources,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=sources, check=True)
    (again,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(wheel.namelist())
