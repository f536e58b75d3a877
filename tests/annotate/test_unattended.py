"""What ``ddp-prof capture`` starts in a program: it records, and the program ends as it would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

IN_A_THREAD = """
import sys, threading, torch
from ddp_prof.annotate import unattended
unattended.start()
ended, trained = threading.Event(), threading.Event()

def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    trained.set()
    if sys.argv[1] == "goes on":
        ended.wait()

thread = threading.Thread(target=train, daemon=True)
thread.start()
trained.wait()
if sys.argv[1] == "ends":
    thread.join()
"""


@pytest.mark.torch
@pytest.mark.parametrize(("thread", "is_written"), [("ends", True), ("goes on", False)])
def test_a_program_that_trains_in_a_thread(thread: str, is_written: bool, tmp_path: Path) -> None:
    """As Ray Train's does: it ended by a segmentation fault, when another thread stopped the recording."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD, thread],
        env=os.environ | {"DDP_PROF_TRACE": str(tmp_path / "x")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.rank0.json.gz").is_file() == is_written
    assert ("the trace of this rank is not written" in done.stderr) != is_written
