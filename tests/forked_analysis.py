"""A Python for the analyses of a monitor that is forked from a server which has imported them.

For tests of what a monitor does with results. Analyses are really started in ``tests/capture/test_job.py``.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from tests.forked_torchrun import write_asking
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def forked_analysis(folder: Path) -> Iterator[Path]:
    """Put a ``python`` into a new folder that runs ``-m MODULE ARGUMENT...`` until the block ends; return its path."""
    from tests.ddp.gloo_ranks import FORKING  # imports torch

    folder.mkdir()
    address, program = folder / "asked", folder / "python"
    write_asking(program, address)
    server = FORKING.Process(target=_serve, args=(str(address),), daemon=True)
    server.start()
    try:
        wait_until(lambda: address.exists() or not server.is_alive())
        yield program
    finally:
        server.kill()
        server.join()


def _serve(address: str) -> None:
    import ddp_prof.monitor.__main__  # noqa: F401  # not again in each process

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what has ended is not waited for
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.made")
        listening.listen(64)
        Path(f"{address}.made").rename(address)
        tests = parent_process()
        assert tests is not None
        while tests.sentinel not in wait([listening, tests.sentinel]):  # it ends with the tests, however they end
            asked, _ = listening.accept()
            with asked:
                if not os.fork():
                    listening.close()
                    with asked.makefile("rb") as question:
                        code = _run(*json.load(question))
                    asked.sendall(str(code).encode())
                    os._exit(0)


def _run(words: list[str], environment: dict[str, str], folder: str, asking: int) -> int:
    option, module, *arguments = words
    assert option == "-m"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{asking}/fd/{number}", os.O_WRONLY | os.O_APPEND), number)
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
