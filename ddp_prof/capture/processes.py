"""Runs the recorded program and cleans up on every path: processes, temporary files, leftovers of killed runs.

Every process of a run has the run's folder in its environment and is found by that, even nsys's daemon, which is not a
descendant of this process any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from ddp_prof.errors import WorkloadError, printable
from ddp_prof.train.launch import handle_signals, handle_stopping

MARK = "DDP_PROF_CAPTURE"
"""Environment variable of all processes of a run; its value is the run's folder."""
INJECTION = "QUADD_INJECTION_CONFIG"
"""Environment variable of all processes that nsys records."""
PREFIX = "ddp_prof.capture."
SHARED_MEMORY = "/dev/shm/"  # noqa: S108
SHARED_NAMES = ("quadd-agent-instance-", "sem.nsys_sem_")
OUTSIDE = "outside"
"""File in the folder of a run that lists files of nsys outside of the folder."""
NOTING_S = 20.0
"""For how many seconds after the start files of nsys outside of the folder are looked for."""
POLL_S = 0.1
GRACE_S = 10.0
"""Seconds that a run has to end by itself after its time limit."""
PATIENCE_S = 3.0
"""Seconds that other processes have to end after SIGTERM."""
NSYS_MESSAGE = re.compile(r"\[\d+/\d+\]|Generat(ing|ed)\b|Collecting data|Processing events|.*\.(nsys-rep|qdstrm)$")
NOT_DONE = 124
"""Exit code of a run that took too long."""
# A namespace needs its own /dev/shm: nsys names a file there by its process id, which is the same in each namespace.
MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create the folder of this run and remove it at the end; first clean up after runs that were killed."""
    root = Path("/tmp")  # noqa: S108  # a short path; mkdtemp makes the folder
    for left in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = _lock(left)
            _remove(left)
            os.close(lock)
    folder, lock = _new_folder(root)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _new_folder(root: Path) -> tuple[Path, int]:
    for _ in range(10):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        with suppress(OSError):
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)  # another run removed it as the folder of a killed run
    raise WorkloadError(f"no folder in {root} can be locked: is it on a file system without locks?")


def _lock(folder: Path) -> int:
    """Lock a folder; raise OSError if another process holds it, it belongs to another user, or it does not exist."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid != os.getuid():
            raise PermissionError(folder)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


@contextmanager
def hold_folder(folder: Path, on_busy: Callable[[], None]) -> Iterator[None]:
    """Lock the folder while a capture runs, because two would disturb each other; call ``on_busy`` before waiting."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            on_busy()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    end_started(f"{MARK}={folder}")
    with suppress(OSError):
        for path in (folder / OUTSIDE).read_text(encoding="ascii").splitlines():
            Path(path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    scratch: Path,
    *,
    log: Path | None = None,
    namespace: Sequence[str] = (),
    limit_s: int | None = None,
) -> int:
    """Run a command until it ends, for at most ``limit_s`` seconds; its environment is ``environ`` and :data:`MARK`.

    With ``log``, output goes there, and a signal to this process raises an exception. Without, the command uses this
    process's terminal, and signals are forwarded to it.

    Returns:
        The exit code, 128 plus the number of the signal that ended it, or :data:`NOT_DONE`. All processes that it
        started have ended, except after a success without ``log``.
    """
    command = [*_tether("KILL" if namespace else "TERM"), *namespace, *command]
    environ = {**environ, MARK: str(scratch)}
    if log is None:
        process = subprocess.Popen(command, env=environ)  # noqa: S603
    else:
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    ends_all, signals = True, list[int]()
    try:
        with nullcontext() if log else _forward_signals(process, scratch, signals):
            code = _wait(process, scratch, limit_s, has_namespace=bool(namespace))
        if signals and not code and (scratch / OUTSIDE).exists():  # of nsys, whatever the program ended with
            code = -signals[0]
        ends_all = bool(log or signals or code)
        return 128 - code if code < 0 else code
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return NOT_DONE
    finally:
        if namespace:
            process.kill()  # ends all processes of the namespace
        if ends_all:
            end_started(f"{MARK}={scratch}")
        process.wait()


def run_tethered(
    command: Sequence[str], stdout: int | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command, ended with this process; return its exit code and, if ``stdout`` is a pipe, its output."""
    with subprocess.Popen([*_tether("TERM"), *command], stdout=stdout, env=environ, text=True) as process:  # noqa: S603
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()
            raise
    return process.returncode, printed or ""


def _tether(signal_name: str) -> list[str]:
    """Return the command prefix with which a command is ended when this process ends, even if that is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", signal_name] if setpriv else []


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes], scratch: Path, signals: list[int]) -> Iterator[None]:
    """Forward signals to the program and append them to ``signals``; a Ctrl-C of the terminal reaches it anyway.

    ``process`` is the program, or nsys. Once nsys has started the program, the program alone gets them: nsys drops its
    recording at a second signal, and may have got one with all processes of the group.
    """

    def forward_signal(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        is_in_foreground = False
        with suppress(OSError):
            is_in_foreground = os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        if number != signal.SIGINT or not is_in_foreground:
            for each in _find_recorded_programs(scratch) if (scratch / OUTSIDE).exists() else [process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(each, number)

    before = handle_stopping(forward_signal)
    try:
        yield
    finally:
        handle_signals(before)


def _wait(process: subprocess.Popen[bytes], scratch: Path, limit_s: int | None, *, has_namespace: bool) -> int:
    """Wait for the exit code, and meanwhile note the files that nsys keeps outside of the run's folder."""
    began = time.monotonic()
    while not _note_leftovers_of_nsys(scratch, has_namespace=has_namespace) and time.monotonic() < began + NOTING_S:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.5 if limit_s is None else min(0.5, limit_s))
        if limit_s is not None and time.monotonic() >= began + limit_s:
            raise subprocess.TimeoutExpired(process.args, limit_s)
    return process.wait(None if limit_s is None else max(0, began + limit_s - time.monotonic()))


def _note_leftovers_of_nsys(scratch: Path, *, has_namespace: bool) -> bool:
    """Note files of nsys in /tmp and, without a namespace, in /dev/shm: they stay if nsys is killed.

    Return whether there are any, that is, whether nsys has begun.
    """
    environments = _find_marked_processes(f"{MARK}={scratch}")
    configs = {environ.get(INJECTION, "") for environ in environments.values()}
    outside = [config for config in configs if re.fullmatch(r"/tmp/injection_config_[0-9a-f]+", config)]  # noqa: S108
    if outside and not has_namespace:
        outside += [f"{SHARED_MEMORY}{name}{process}" for name in SHARED_NAMES for process in environments]
    if outside:
        (scratch / OUTSIDE).write_text("\n".join(outside), encoding="ascii")
    return bool(outside)


def _find_recorded_programs(scratch: Path) -> list[int]:
    """Return the processes that nsys has started, without those that they have started themselves."""
    environments = _find_marked_processes(f"{MARK}={scratch}")
    recorded = {process for process, environ in environments.items() if INJECTION in environ}
    return [process for process in recorded if _parent_of(process) not in recorded]


def _parent_of(process: int) -> int | None:
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
        return int(status.partition("PPid:")[2].split()[0])
    return None


def end_started(mark: str) -> None:
    """End all processes of a run by SIGTERM, later SIGKILL; ``mark`` is ``NAME=value`` in their environment."""
    terminated: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while processes := set(_find_marked_processes(mark)):
        is_over = time.monotonic() > deadline
        for process in processes if is_over else processes - terminated:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL if is_over else signal.SIGTERM)
        terminated |= processes
        time.sleep(POLL_S)


def _find_marked_processes(mark: str) -> dict[int, dict[str, str]]:
    """Return the environments of a run's processes by process id, as in this process's namespace."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            words = path.read_text(encoding="utf-8", errors="replace").split("\0")
            if mark in words:
                found[int(path.parent.name)] = dict(word.split("=", 1) for word in words if "=" in word)
    return found


def process_namespace() -> list[str]:
    """Return the command prefix that starts a process namespace; empty if that is not possible.

    Without a namespace, nsys records the names of all processes of the machine, and the environments of the user's.
    """
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid():
        words += ["--user", "--map-root-user"]
    words += ["sh", "-c", MOUNT, "sh"]
    with suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([*words, "true"], capture_output=True, timeout=30, check=False).returncode == 0:  # noqa: S603
            return words
    return []


def find_reason(log: Path, code: int, program: str) -> str:
    """Return why a run failed: the workload's error, else the signal that ended it, else its last output."""
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("unshare: sigprocmask unblock failed") for line in lines):  # its child was killed
        code = 128 + signal.SIGKILL
    lines = [line for line in lines if not NSYS_MESSAGE.match(line)] or lines
    errors = [line for line in lines if re.search(r": error: |^[A-Za-z.]*Error\b", line)]
    if errors:
        reason = errors[-1].partition(": error: ")[2] or errors[-1]
    elif code > 128 and code - 128 in set(signal.Signals):
        reason = f"{program} or the ranks were ended by {signal.Signals(code - 128).name}"
    elif any(line.startswith("usage: nsys") for line in lines):
        reason = f"{lines[0]} (see NSYS_FLAGS)"
    else:
        reason = lines[-1] if lines else "it printed nothing"
    return printable(reason[:300])
