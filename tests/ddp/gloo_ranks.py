"""Runs a function on ranks, each in a process of its own, most in a gloo process group, and brings the results back.

Ranks are forked from the server that the launcher of the workload uses, too.
"""

from __future__ import annotations

import io
import os
import tempfile
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_prof.train.launch import FORKING, PRELOADED

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

# The first is imported with each function of a test file, the second takes half a second in each rank that compares us
# with torch's.
FORKING.set_forkserver_preload([*PRELOADED, "pytest", "torch.distributed.optim"])


def run_ranks(function: Callable[[int], Any], world: int = 2, timeout_s: float | None = None) -> list[Any]:
    """Results of ``function(rank)`` by rank in a process group; as :func:`fork_ranks`."""
    return fork_ranks(partial(_in_group, function), world, timeout_s)


def fork_ranks(function: Callable[[int, int, str], Any], world: int, timeout_s: float | None = None) -> list[Any]:
    """Results of ``function(rank, world, shared folder)`` by rank; ``None`` for one that died.

    A raised exception is raised here. Ranks have the test's variables of ddp_prof. Only what may hang, as loops of
    others may, is given a time to answer.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith("DDP_PROF_")}
    with tempfile.TemporaryDirectory() as directory:
        ends, processes = [], []
        for rank in range(world):
            receiver, sender = FORKING.Pipe(duplex=False)
            arguments = (function, rank, world, directory, sender, variables)
            process = FORKING.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            sender.close()
            ends.append(receiver)
            processes.append(process)
        try:
            results = [_receive(end, timeout_s) for end in ends]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    for result in results:
        if isinstance(result, str):
            raise AssertionError(result)
    return [None if result is None else result[0] for result in results]


def _receive(end: Connection, timeout_s: float | None) -> Any:
    assert end.poll(timeout_s), f"no rank answered within {timeout_s} s"
    try:
        return torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
    except EOFError:
        return None


def _in_group(function: Callable[[int], Any], rank: int, world: int, directory: str) -> Any:
    store = dist.FileStore(str(Path(directory) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    _let_gloo_wait()
    return function(rank)


def _let_gloo_wait() -> None:
    """Take from gloo's own thread the right to interrupt others as soon as it has work.

    It asks again and again for a lock, without sleeping, while the thread that it has interrupted holds it: four ranks
    on two cores spend most of their time on this.
    """
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
            with suppress(OSError):  # where a sandbox does not let it
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def _rank(
    function: Callable[[int, int, str], Any],
    rank: int,
    world: int,
    directory: str,
    sender: Connection,
    variables: dict[str, str],
) -> None:
    os.environ |= {**variables, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        answer: Any = (function(rank, world, directory),)
    except Exception:
        answer = f"rank {rank}:\n{traceback.format_exc()}"
    buffer = io.BytesIO()
    torch.save(answer, buffer)  # as bytes: tensors in shared memory would be gone with this process
    sender.send_bytes(buffer.getvalue())
    sender.close()
    if isinstance(answer, str):
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
