"""The commands of the tutorials that record a job, run in their order on a job of two ranks.

What they show is made by the commands they show: tests/test_docs.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forked_torchrun import forked_torchrun
from tests.night import of_which_the_gate_keeps

PAGES = ("docs/tutorial_scaling.md", "docs/tutorial_ci.md")
JOB = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(24):
    model(torch.randn(32, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def commands_of(page: str) -> list[str]:
    """Those that a reader types; shown ones stand behind a ``$``."""
    return re.findall(r"^ddp-prof .*$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_is_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) < 125


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("page", of_which_the_gate_keeps(["docs/tutorial_ci.md"], PAGES))
def test_the_commands_of_a_tutorial_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    with forked_torchrun(tmp_path / "programs") as programs:
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        said = run_commands(page, tmp_path, {**os.environ, "PATH": path, "NSYS": "none"})
    if page == "docs/tutorial_ci.md":
        assert re.search(r"cpu +all ranks +2 +2 .* passed ", said["check"])
        assert re.search(r"cpu +step time against baseline .* passed ", said["check"])
    else:
        assert re.findall(r"^\S+/train +cpu +(\d) +10 ", said["compare"], re.MULTILINE) == ["1", "2"]


def run_commands(page: str, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """What the last command of each kind says."""
    said = {}
    for command in commands_of(page):
        words = shlex.split(command.replace("--nproc-per-node 8", "--nproc-per-node 2"))
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said[words[1]] = done.stdout
        if "now" in words and words[1] == "capture":
            shutil.copytree(folder / "now", folder / "baseline")
    return said
