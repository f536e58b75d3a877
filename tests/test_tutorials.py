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

# A torchrun that forks its ranks from a process that has imported what each would take seconds to import. The real one
# is captured in tests/capture/test_job.py.
TORCHRUN = f"""#!{sys.executable}
import os, runpy, socket, sys
import torch._dynamo
import torch.multiprocessing

def run_rank(rank, world, port, script):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    runpy.run_path(script, run_name="__main__")

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    option, world, script = sys.argv[1:]
    assert option == "--nproc-per-node"
    torch.multiprocessing.start_processes(run_rank, (world, port, script), int(world), start_method="fork")
"""


def commands_of(page: str) -> list[str]:
    """Those that a reader types; shown ones stand behind a ``$``."""
    return re.findall(r"^ddp-prof .*$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_is_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_tutorial_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/torchrun").write_text(TORCHRUN)
    (tmp_path / "bin/torchrun").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NSYS": "none"}
    said = {}
    for command in commands_of(page):
        words = shlex.split(command.replace("--nproc-per-node 8", "--nproc-per-node 2"))
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        said[words[1]] = done.stdout
        if "now" in words and words[1] == "capture":
            shutil.copytree(tmp_path / "now", tmp_path / "baseline")
    if page == "docs/tutorial_ci.md":
        assert re.search(r"cpu +all ranks +2 +2 .* passed ", said["check"])
        assert re.search(r"cpu +step time against baseline .* passed ", said["check"])
    else:
        assert re.findall(r"^\S+/train +cpu +(\d) +10 ", said["compare"], re.MULTILINE) == ["1", "2"]
