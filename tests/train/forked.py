"""``ddp_prof.train`` on forked ranks, for what a run computes and writes. How ranks are launched: test_workload.py."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from ddp_prof.train.__main__ import main
from ddp_prof.train.launch import LAUNCH_DIRECTORY
from tests.ddp.gloo_ranks import fork_ranks


def train(*argv: str | Path, world: int = 2) -> str:
    """Run a command line as each of two ranks that were launched, or alone without a launcher; what rank 0 prints."""
    said = fork_ranks(partial(_train, list(map(str, argv))), world)
    assert None not in said, "a rank failed: see its line on stderr"
    assert not any(said[1:]), "rank 0 speaks for all"
    return str(said[0])


def _train(argv: list[str], rank: int, world: int, directory: str) -> str:
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), LAUNCH_DIRECTORY: directory}
    sys.argv = ["ddp_prof.train", *argv]
    with redirect_stdout(io.StringIO()) as said:
        assert main() == 0
    return said.getvalue()
