"""Runs the recorded program and cleans up, whatever happens: processes, temporary files, leftovers of killed runs.

Each run has a temporary folder. Its path is in the environment of every process of the run, so all of them are found,
even nsys's daemon, which is no descendant of this process any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from ddp_prof.errors import WorkloadError, printable
from ddp_prof.signals import handle_signals, handle_stopping, wait_for_end

MARK = "DDP_PROF_CAPTURE"
"""Environment variable that all processes of a run have; its value is the run's temporary folder."""
INJECTION = "QUADD_INJECTION_CONFIG"
"""Environment variable that all processes that nsys records have; its value is a file in /tmp."""
PREFIX = "ddp_prof.capture."
"""Start of the names of the temporary folders."""
SHARED_MEMORY = "/dev/shm/"  # noqa: S108
SHARED_NAMES = ("quadd-agent-instance-", "sem.nsys_sem_")
"""Start of the names of nsys's files in :data:`SHARED_MEMORY`; the number of a process follows."""
TARGET = "target"
"""File in the folder of a run that says which files it writes."""
OUTSIDE = "outside"
"""File in the folder of a run that lists the files of nsys outside of the folder."""
NOTING_S = 20.0
"""For how many seconds after the start files of nsys outside of the folder are looked for."""
POLL_S = 0.1
"""Seconds between two looks whether processes have ended."""
GRACE_S = 10.0
"""Seconds that a run has to end by itself after its time limit."""
PATIENCE_S = 3.0
"""Seconds that the processes of a run have to end after SIGTERM."""
NSYS_MESSAGE = re.compile(r"\[\d+/\d+\]|Generat(ing|ed)\b|Collecting data|Processing events|.*\.(nsys-rep|qdstrm)$")
"""Lines that nsys prints about its progress."""
NOT_DONE = 124
"""Exit code of a run that took too long."""
# A namespace needs its own /dev/shm: nsys names a file there by its process id, which is the same in each namespace.
MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Return a context that gives the temporary folder of a run; at the end the folder is removed.

    First the folders of killed runs are removed, with their processes. A run that still lives holds a lock on its
    folder. Which processes of this run go on, :func:`run` has decided.
    """
    root = Path("/tmp")  # noqa: S108  # a short path; mkdtemp makes the folder
    for left in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # if it is locked, its run still lives
            lock = _lock(left)
            end_started(f"{MARK}={left}")
            _remove(left)
            os.close(lock)
    folder, lock = _new_folder(root)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def claim(scratch: Path, target: Path) -> bool:
    """Note that the run of a temporary folder writes ``target``; return whether no other run that lives writes it, too.

    The folders of dead runs are gone, see :func:`scratch_folder`. ``target`` is a path without the suffixes of files.
    """
    name = os.fsencode(target.parent.resolve() / target.name)
    (scratch / TARGET).write_bytes(name)
    for other in scratch.parent.glob(f"{PREFIX}*/{TARGET}"):
        with suppress(OSError):  # of another user, or gone
            if other.parent != scratch and other.read_bytes() == name:
                return False
    return True


def _new_folder(root: Path) -> tuple[Path, int]:
    """Create a folder and lock it; return it and the file descriptor that holds the lock.

    Tries again if another run removes the folder before it is locked. Raises WorkloadError if that never succeeds.
    """
    reason = "other programs removed it"
    for _ in range(10):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            lock = _lock(folder)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            continue
        if folder.exists():
            return folder, lock
        os.close(lock)  # another run removed it as the folder of a killed run
    hint = f"{root} must be on a file system with locks (flock), as local ones are"
    raise WorkloadError(f"a folder in {root} cannot be locked ({reason}): {hint}")


def _lock(folder: Path) -> int:
    """Lock a folder and return the file descriptor that holds the lock.

    Raises OSError if another process holds the lock, or the folder does not exist or belongs to another user.
    """
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
    """Hold a lock on a folder in the block, so that no second capture writes into it meanwhile.

    If another process holds the lock, ``on_busy`` is called, and then the lock is waited for.
    """
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
    """Remove the folder of a run and the files that nsys has put elsewhere."""
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
    """Run a command until it ends and return its exit code.

    Args:
        command: The command line.
        environ: Its environment, to which :data:`MARK` is added.
        scratch: The temporary folder of the run.
        log: The file to which its output goes; a signal to this process then raises an exception. ``None``: the command
            uses the terminal of this process, and signals to this process are forwarded to it.
        namespace: Command prefix that starts a process namespace, see :func:`process_namespace`; empty: none.
        limit_s: The most seconds that it may take.

    Returns:
        The exit code, 128 plus the number of the signal that ended it, or :data:`NOT_DONE` after ``limit_s``. All
        processes that the command started have ended, except after a success without ``log``.
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
        # The file shows that nsys ran. Then 0 is the code of nsys, which hides that a signal ended the program.
        if signals and not code and (scratch / OUTSIDE).exists():
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
        wait_for_end(process)


def run_tethered(
    command: Sequence[str], stdout: int | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command that ends when this process ends; return its exit code and its output.

    The output is empty unless ``stdout`` is ``subprocess.PIPE``. ``environ`` is its environment, by default this
    process's.
    """
    with subprocess.Popen([*_tether("TERM"), *command], stdout=stdout, env=environ, text=True) as process:  # noqa: S603
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()
            raise
    return process.returncode, printed or ""


def _tether(signal_name: str) -> list[str]:
    """Return a command prefix: the system sends the command a signal when this process ends, even if it is killed.

    ``signal_name`` is such as ``TERM``. The prefix is empty if the program setpriv is not there.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", signal_name] if setpriv else []


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes], scratch: Path, signals: list[int]) -> Iterator[None]:
    """Forward the signals that ask this process to end to the program, in the block, and append them to ``signals``.

    A Ctrl-C at the terminal is not forwarded, as it reaches the program anyway. ``process`` is the program, or nsys.
    Once nsys has started the program, only the program gets the signals: nsys drops its recording at a second signal,
    and the first one may have been sent to all processes of the group.
    """

    def forward_signal(number: int, _frame: FrameType | None) -> None:
        """Send a signal on, unless it is a Ctrl-C that the terminal sends to the program as well."""
        signals.append(number)
        if number != signal.SIGINT or not _is_in_foreground():
            # The file exists once nsys has started the program.
            for each in _find_recorded_programs(scratch) if (scratch / OUTSIDE).exists() else [process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(each, number)

    before = handle_stopping(forward_signal)
    try:
        yield
    finally:
        handle_signals(before)


def _is_in_foreground() -> bool:
    """Return whether the terminal sends its Ctrl-C to this process and the program; stdin may be something else."""
    with suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def _wait(process: subprocess.Popen[bytes], scratch: Path, limit_s: int | None, *, has_namespace: bool) -> int:
    """Wait for a process to end and return its exit code; meanwhile note the files that nsys keeps outside.

    Raises subprocess.TimeoutExpired after ``limit_s`` seconds; ``None``: it may take any time.
    """
    began = time.monotonic()
    # Look for nsys's files twice a second, until there are some or NOTING_S is over; then only wait.
    while not _note_leftovers_of_nsys(scratch, has_namespace=has_namespace) and time.monotonic() < began + NOTING_S:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.5 if limit_s is None else min(0.5, limit_s))
        if limit_s is not None and time.monotonic() >= began + limit_s:
            raise subprocess.TimeoutExpired(process.args, limit_s)
    return process.wait(None if limit_s is None else max(0, began + limit_s - time.monotonic()))


def _note_leftovers_of_nsys(scratch: Path, *, has_namespace: bool) -> bool:
    """Write the paths of nsys's files in /tmp and /dev/shm to :data:`OUTSIDE`, as they stay if nsys is killed.

    In a process namespace /dev/shm is a folder of its own and needs no clean-up. Returns whether there are such files,
    that is, whether nsys has started a program.
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
    """Return the ids of the processes that nsys itself has started, without the children of these processes."""
    environments = _find_marked_processes(f"{MARK}={scratch}")
    recorded = {process for process, environ in environments.items() if INJECTION in environ}
    return [process for process in recorded if _parent_of(process) not in recorded]


def _parent_of(process: int) -> int | None:
    """Return the id of a process's parent; ``None`` if the process has ended."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
        return int(status.partition("PPid:")[2].split()[0])
    return None


def end_started(mark: str) -> None:
    """End all processes that have ``mark`` (``NAME=value``) in their environment; return when none is left.

    Each process gets SIGTERM once; after :data:`PATIENCE_S` seconds those that are left get SIGKILL.
    """
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
    """Return the environments of all processes that have ``mark`` in theirs, by process id.

    The ids are those of the namespace of this process.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            words = path.read_text(encoding="utf-8", errors="replace").split("\0")
            if mark in words:
                found[int(path.parent.name)] = dict(word.split("=", 1) for word in words if "=" in word)
    return found


def process_namespace() -> list[str]:
    """Return the command prefix that runs a command in a process namespace of its own; empty if that is not possible.

    Without a namespace, the report of nsys holds the names of all processes of the machine, and the environments of all
    processes of the user.
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
    """Return why a run failed, in one line: the workload's error, else the signal that ended it, else its last output.

    Args:
        log: The file with the output of the run.
        code: The exit code of the run.
        program: What to call the program if a signal ended it.
    """
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # unshare says this when its child, the program in the namespace, was killed.
    if any(line.startswith("unshare: sigprocmask unblock failed") for line in lines):
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
