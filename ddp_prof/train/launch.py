"""Starts the ranks of a run on this machine and ends all of them when one fails.

The ranks find each other through a file, so no port can be taken by another program. Each rank that fails writes the
reason to a file. If several ranks failed, the launcher shows the reason that caused the other failures, in one line.

A program that starts many runs can let a server process fork the ranks. The server has imported torch, so that the
ranks need not, which saves seconds. It has no threads, so it can be forked.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

from ddp_prof.errors import CommunicationError, DdpProfError, OutOfMemoryError, WorkloadError, printable
from ddp_prof.new_process import without_main_module
from ddp_prof.signals import Stopped, ignore_stopping, stop_on_signals

Rank = subprocess.Popen[bytes] | BaseProcess

LAUNCH_DIRECTORY = "DDP_PROF_LAUNCH_DIRECTORY"
"""Environment variable of a launched rank: the folder that the ranks of a run share."""
LAUNCHER = "DDP_PROF_LAUNCHER"
"""Environment variable of a launched rank: process id of its launcher."""

GRACE_S = 2.0
"""How many seconds the other ranks may take to end by themselves after one failed, and again after SIGTERM."""
POLL_S = 0.02
"""Seconds between two looks whether ranks have ended."""
RANK_BYTES = 2**28
"""Memory that torch alone needs in each rank, in bytes."""
LONGEST_TMPDIR = 70
"""Bytes of the longest path of a folder for sockets."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h

FORKING = multiprocessing.get_context("forkserver")
"""Starts processes by a fork of a server that has imported torch; a program has one such server."""
# The last two would be imported by the first step of an optimizer and by the variant fsdp.
PRELOADED = ["ddp_prof.train.run", "torch._dynamo", "torch.distributed.fsdp"]
FORKING.set_forkserver_preload(PRELOADED)


def launch(world: int, command: Sequence[str], log: Path | None = None, *, forked: bool = False) -> None:
    """Run a Python program as ``world`` ranks on this machine and wait until all of them have ended.

    Args:
        world: Number of ranks.
        command: The arguments of Python, such as ``-m ddp_prof.train --variant flat``.
        log: The file to which the output of the ranks is appended; ``None``: it goes where this process's output goes.
        forked: Fork the ranks from a server that has imported torch and also serves later calls. A profiler that
            records this process does not record such ranks.

    Raises:
        WorkloadError: A rank failed, and all other ranks were ended; or the memory cannot hold ``world`` ranks.
        OutOfMemoryError: As WorkloadError, and the cause is a lack of memory.
    """
    if world > most_ranks():
        raise WorkloadError(f"{world} ranks do not fit: the memory of this machine holds at most {most_ranks()}")
    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        kills_before = _kills_for_memory()
        with log.open("ab") if log else nullcontext() as output:
            start = _fork if forked else _start
            ranks: list[Rank] = []
            try:
                ranks.extend(start(_environment(rank, world, directory), command, output) for rank in range(world))
                failed = _wait(ranks)
            finally:
                _end(ranks)
        if failed:
            kills = _kills_for_memory()
            raise _find_cause(failed, Path(directory), log, can_lack_memory=kills is None or kills != kills_before)


def most_ranks() -> int:
    """Return how many ranks the memory of this machine could hold at most, by what torch alone needs."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // RANK_BYTES + 1


def run_program(program: str, action: Callable[[], int | None], *, on_stop: str = "") -> int:
    """Run a program's main function and return the exit code of the program.

    Args:
        program: Name of the program in error messages.
        action: The main function; ``None`` counts as exit code 0.
        on_stop: Printed to stderr if a signal ended the program.

    Returns:
        What ``action`` returned; after a DdpProfError, which is printed in one line, its exit code; after a signal 128
        plus the signal's number.
    """
    try:
        with stop_on_signals():
            return action() or 0
    except DdpProfError as error:
        sys.stderr.write(f"{program}: error: {printable(str(error))}\n")
        return error.exit_code
    except Stopped as stop:
        sys.stderr.write(on_stop)
        return 128 + stop.number


def _environment(rank: int, world: int, directory: str) -> dict[str, str]:
    """Return the environment of a rank; ``directory`` is the folder that the ranks of the run share.

    It holds the variables that torchrun sets, and defaults for OMP_NUM_THREADS and GLOO_SOCKET_IFNAME if the user has
    not set them.
    """
    return {
        "OMP_NUM_THREADS": "1",  # as torchrun does: ranks share the cores
        **({"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}),
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        LAUNCH_DIRECTORY: directory,
        LAUNCHER: str(os.getpid()),
    }


def _start(environment: dict[str, str], command: Sequence[str], output: IO[bytes] | None) -> Rank:
    """Start a rank as a new Python process."""
    # In its own session, so that Ctrl-C reaches only the launcher, which then ends the ranks.
    return subprocess.Popen(  # noqa: S603
        [sys.executable, *command], env=environment, start_new_session=True, stdout=output, stderr=output
    )


def _fork(environment: dict[str, str], command: Sequence[str], output: IO[bytes] | None) -> Rank:
    """Let the server fork a rank; starts the server at the first call."""
    os.environ.setdefault("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])  # the server's torch reads it, too
    rank = FORKING.Process(
        target=_run_as_rank, args=(environment, list(command), output and output.name), daemon=True
    )  # fmt: skip
    with without_main_module(), short_socket_paths():
        rank.start()
    return rank


@contextmanager
def short_socket_paths() -> Iterator[None]:
    """Let ``multiprocessing`` put the server's socket into /tmp, if TMPDIR is so long that its path would be refused.

    A socket's path may have 107 bytes, and ``multiprocessing`` appends about 32.
    """
    before = tempfile.gettempdir()
    if len(os.fsencode(before)) > LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"  # noqa: S108
    try:
        yield
    finally:
        tempfile.tempdir = before


def _run_as_rank(environment: dict[str, str], command: Sequence[str], output: str | None) -> None:
    """Do in a forked process what a rank that :func:`_start` started would do; ``output`` is the log's path."""
    os.setsid()  # its own session, as in ``_start``
    threading.Thread(target=_end_with_launcher, args=(multiprocessing.parent_process(),), daemon=True).start()
    if output is not None:  # make the log stdout (1) and stderr (2)
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:  # the launcher has been stopped
            sys.exit(1)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment | {LAUNCHER: str(os.getppid())})  # the parent of this process is the server
    option, module, *arguments = command
    assert option == "-m", command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_launcher(launcher: BaseProcess) -> None:
    """Wait until the launcher ends, then kill this rank.

    The server would not end the rank: it runs as long as any of its ranks.
    """
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(ranks: Sequence[Rank]) -> dict[int, int]:
    """Wait until all ranks ended, or until a rank failed and all others had :data:`GRACE_S` seconds to end.

    Returns the exit code of each failed rank, by rank; minus the signal's number if a signal ended it.
    """
    while _running(ranks):
        if any(_exit_code(rank) for rank in ranks):
            _wait_at_most(ranks, GRACE_S)
            break
        time.sleep(POLL_S)
    return {index: code for index, rank in enumerate(ranks) if (code := _exit_code(rank))}


def _end(ranks: Sequence[Rank]) -> None:
    """Send the ranks that still run SIGTERM and, if they do not end in time, SIGKILL.

    From now on this process ignores signals that ask it to end.
    """
    try:
        ignore_stopping()
    finally:  # also if a signal that came just before raises Stopped
        for end in ("terminate", "kill"):  # methods that both kinds of processes have
            for rank in _running(ranks):
                getattr(rank, end)()
            _wait_at_most(ranks, GRACE_S)


def _wait_at_most(ranks: Sequence[Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _running(ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _running(ranks: Sequence[Rank]) -> list[Rank]:
    return [rank for rank in ranks if _exit_code(rank) is None]


def _exit_code(rank: Rank) -> int | None:
    """Return the exit code of a rank; ``None`` while it runs."""
    return rank.poll() if isinstance(rank, subprocess.Popen) else rank.exitcode


def _kills_for_memory() -> int | None:
    """Return how many processes the system has killed for lack of memory since it started; ``None`` if unknown."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(counters[counters.index("oom_kill") + 1])
    except (OSError, ValueError):
        return None


def _find_cause(
    failed: Mapping[int, int], directory: Path, log: Path | None, *, can_lack_memory: bool
) -> WorkloadError:
    """Return the error that explains why ranks failed.

    It is, in this order: an error of a rank's own that is no failure of communication; a rank that ended without
    leaving a reason; a failure of communication, which another rank's end causes.

    Args:
        failed: The exit codes of the failed ranks, by rank.
        directory: The folder in which ranks leave their reasons.
        log: The file with the output of the ranks, if there is one.
        can_lack_memory: Whether the system may have killed a process for lack of memory during the run.
    """
    # Files ``failure.RANK`` hold ``NameOfError: message``.
    reasons = [path.read_text(encoding="utf-8") for path in sorted(directory.glob("failure.*"))]
    own = [reason for reason in reasons if not reason.startswith(CommunicationError.__name__)]
    silent = [rank for rank in failed if not (directory / f"failure.{rank}").exists()]
    # A rank's own reason; or, if each failed rank left a reason, a failure of communication.
    if own or not silent:
        name, _, message = (own or reasons)[0].partition(": ")
        return OutOfMemoryError(message) if name == OutOfMemoryError.__name__ else WorkloadError(message)
    # A rank without a reason. The launcher killed none of these: the exit codes were read before it killed any.
    killed = [rank for rank in silent if failed[rank] == -signal.SIGKILL]
    rank = (killed or silent)[0]
    lacks_memory = bool(killed) and can_lack_memory
    code = failed[rank]
    status = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    output = "see its output"
    if log is not None:  # quote the last line
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        output = f"after saying: {text.splitlines()[-1]}" if text else "without any output"
    message = f"rank {rank} ended with {status}{' (out of memory?)' * lacks_memory}, {output}"
    return OutOfMemoryError(message) if lacks_memory else WorkloadError(message)


def die_with_launcher() -> None:
    """Let the system kill this rank when its launcher ends, even if that is killed; without a launcher do nothing."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher ended before the line above
        sys.exit(1)


def leave_failure(rank: int, error: Exception) -> bool:
    """Write the reason of a failure to a file for the launcher; return whether this rank has a launcher."""
    directory = os.environ.get(LAUNCH_DIRECTORY)
    if directory is None:
        return False
    Path(directory, f"failure.{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    return True
