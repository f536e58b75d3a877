"""What docs/your_own_job.md tells to type and to write does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import ddp_prof as dp
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "your_own_job.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"ddp-prof capture [^`\n]*-- [^`\n]*", PAGE)
BEFORE = """
import torch
rank = 0
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [torch.randn(4, 8) for _ in range(3)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_capture_is_understood(command: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("ddp-prof")
    words = [word for word in shlex.split(command) if word != "..."][2:]
    for launcher in ("srun", "mpirun", "torchrun"):
        (tmp_path / launcher).write_text("#!/bin/sh\n")
        (tmp_path / launcher).chmod(0o755)
    done = subprocess.run(
        [program, "capture", "--print", *words], capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", "NODE_RANK": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout)[-1] == words[-1]


def test_the_page_has_snippets_and_commands() -> None:
    assert (len(SNIPPETS), len(COMMANDS)) == (3, 7)


def run_code(code: str, folder: Path, *_: object) -> None:
    os.chdir(folder)
    exec(code, {"__name__": "__main__"})


@pytest.mark.torch
@pytest.mark.parametrize("snippet", SNIPPETS, ids=["annotate", "monitor", "torch.profiler"])
def test_snippets_run(snippet: str, tmp_path: Path) -> None:
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    fork_ranks(partial(run_code, BEFORE + snippet, tmp_path), world=1)
    if "profile(" in snippet:
        (run,) = dp.load_runs(tmp_path / "train.rank0.json.gz")
        (rank,) = run.overlap().ranks
        assert [step.step for step in rank.steps] == [0, 1, 2]


def test_the_readme_tells_the_sizes_of_the_page() -> None:
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install")]
    rows = re.findall(r"^\| `(?:pip install )?'?\.(\[\w+\])?'?` \| .* \| (\d+)(?: more)? \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == ["", "[pictures]", "[cluster]", "[mcp]"]
    for name, size in rows:
        assert re.search(rf"{re.escape(name)} {size}\b" if name else rf": {size} MB", line), (name, size)
