"""A ``torchrun`` for the PATH whose ranks are forked from the server of the tests, which has imported torch.

For tests of what becomes of what ranks record; the real one starts those of ``tests/capture/test_job.py``.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Asks for its work by its arguments, environment, folder and process id, and waits for the exit code. It begins as a
# program of pip does in a path with blanks, which "#!" does not take.
ASKING = """#!/bin/sh
'''exec' "{python}" -IS "$0" "$@"
' '''
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect({address!r})
asked.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]).encode())
asked.shutdown(socket.SHUT_WR)
sys.exit(int(asked.recv(9)))
"""


def write_asking(program: Path, address: Path) -> None:
    """Write a program that leaves its work to what listens at ``address``."""
    program.write_text(ASKING.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)


@contextmanager
def forked_torchrun(folder: Path) -> Iterator[Path]:
    """Put a ``torchrun --nproc-per-node N [-m] PROGRAM ...`` into a new folder, where it works until the block ends."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "asked"))
        listening.listen()
        write_asking(folder / "torchrun", folder / "asked")
        thread = Thread(target=_serve, args=(listening,), daemon=True)
        thread.start()
        yield folder
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def _serve(listening: socket.socket) -> None:
    while True:
        try:
            asked, _ = listening.accept()
        except OSError:  # it was shut down
            return
        with asked, asked.makefile("rb") as question:
            asked.sendall(str(_run(*json.load(question))).encode())


def _run(arguments: list[str], environment: dict[str, str], folder: str, launcher: int) -> int:
    import torch.distributed as dist

    from tests.ddp.gloo_ranks import FORKING

    option, world, *program = arguments
    assert option == "--nproc-per-node"
    # The launcher has the store, as torchrun has.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    ranks = [
        FORKING.Process(target=_rank, args=(program, environment, folder, launcher, rank)) for rank in range(int(world))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode) for rank in ranks)


def _rank(program: list[str], environment: dict[str, Any], folder: str, launcher: int, rank: int) -> None:
    os.environ.clear()
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{launcher}/fd/{number}", os.O_WRONLY | os.O_APPEND), number)
    if "DDP_PROF_TRIAL" in environment:  # tune's sitecustomize would, with the import of torch
        from ddp_prof.annotate import trial

        trial.start()
    elif environment.keys() & {"DDP_PROF_TRACE", "DDP_PROF_EVERY"}:  # capture's likewise
        from ddp_prof.annotate import unattended

        unattended.start()
    sys.argv = program[1:] if program[0] == "-m" else program
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")
