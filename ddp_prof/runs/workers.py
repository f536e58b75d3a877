"""Measure many reports with several workers: processes of this machine, or of a Dask scheduler.

Tasks and results are sent as pickles, in which a path may have another name on the other machine. The order in which
workers finish does not influence the results.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from ddp_prof.bounded_file import read_at_most
from ddp_prof.errors import DdpProfError, TraceError, naming_limits, printable
from ddp_prof.file_kinds import PACKED_SUFFIXES
from ddp_prof.new_process import without_main_module
from ddp_prof.runs.pickles import pickle_with_names, unpickle_with_names
from ddp_prof.runs.report import LoadOptions, TraceEvents, measure_report
from ddp_prof.threads import count_cores

_LOG = logging.getLogger("ddp_prof")

BYTES_PER_WORKER = 64 * 2**20
"""By default, there is one worker for this number of bytes, as starting a worker takes half a second."""
LEAST_BYTES_PER_FILE = 2**20
"""A smaller file counts as one of this size: it takes as long (25 ms), mostly for what is done once per file."""
UNPACKED_TO_PACKED = 10
"""Assumed ratio of the size of a trace to that of its packed file; the measured ratio is 10 to 25."""

MOST_BYTES_OF_ADDRESS = 2**20
"""A larger file is none of a Dask scheduler."""
SECONDS_TO_CONNECT = 10
SECONDS_TO_FETCH = 30
"""How long the result of a task that Dask calls finished may take to arrive, until the task is submitted again."""
SECONDS_WITHOUT_WORKERS = 10
"""How long a Dask scheduler may have no worker until a note says so."""


def _ignore(*_told: object) -> None:
    """Do nothing: the default callback. As it does not keep events, they are dropped once they are measured."""


@dataclass(frozen=True)
class Workers:
    """How reports are read in parallel.

    Attributes:
        jobs: Processes of this machine; ``None`` for as many as there are cores, and fewer where there is little to
            read; 1 reads in this process.
        scheduler: Address of a Dask scheduler, or a file that holds it, whose workers read instead.
        progress: Called with the number of finished reports and the number of all.
        leave_out: Called with the error of each report that cannot be read, which is then skipped; ``None`` raises it.
        keep: Called with the events of each report that this process reads as a whole.
    """

    jobs: int | None = 1
    scheduler: str | None = None
    progress: Callable[[int, int], None] = _ignore
    leave_out: Callable[[TraceError], None] | None = None
    keep: Callable[[TraceEvents], None] = _ignore


class WantedReport(NamedTuple):
    """A report, how it is read, and what is measured of it: names in ``report.MEASURES``."""

    file: Path
    options: LoadOptions
    measures: tuple[str, ...]


def measure_files(
    reports: Sequence[WantedReport], workers: Workers
) -> Generator[tuple[int, dict[str, Any] | TraceError]]:
    """Measure reports; yield the outcome of each as it is finished.

    The caller must close the generator, which owns the processes or the client of the scheduler. If it were left to the
    garbage collector, that might close it while the next client is created, and wait forever for that client's lock.

    Args:
        reports: The reports.
        workers: The processes that read them.

    Yields:
        The position of the report in ``reports``, and its results by measure, or the ``TraceError`` that stopped it.
    """
    workers.progress(0, len(reports))
    jobs = workers.jobs
    if jobs is None:  # no more processes than are worth it
        jobs = min(count_cores(), 1 + sum(_bytes_to_read(report.file) for report in reports) // BYTES_PER_WORKER)
    processes = min(jobs, len(reports))
    is_here = workers.scheduler is None and processes < 2
    measured = _measure_here(reports, workers) if is_here else _measure_elsewhere(reports, workers, processes)
    with closing(measured) as outcomes:
        for done, outcome in enumerate(outcomes, 1):
            workers.progress(done, len(reports))
            yield outcome


def _bytes_to_read(file: Path) -> int:
    """Return the estimated size of an unpacked trace; 0 if there is no such file."""
    if not file.is_file():
        return 0
    size = file.stat().st_size * (UNPACKED_TO_PACKED if file.suffix in PACKED_SUFFIXES else 1)
    return max(size, LEAST_BYTES_PER_FILE)


def _measure_here(
    reports: Sequence[WantedReport], workers: Workers
) -> Generator[tuple[int, dict[str, Any] | TraceError]]:
    """Measure reports in this process, one after the other; yields as :func:`measure_files` does."""
    for index, (file, options, measures) in enumerate(reports):
        outcome: dict[str, Any] | TraceError
        try:
            outcome = measure_report(file, options, measures, workers.keep)
        except TraceError as error:
            outcome = error
        yield index, outcome


def _measure_elsewhere(
    reports: Sequence[WantedReport], workers: Workers, processes: int
) -> Generator[tuple[int, dict[str, Any] | TraceError]]:
    """Measure reports in other processes; yields as :func:`measure_files` does."""
    here = {str(report.file.absolute()): report.file for report in reports}
    tasks = [pack_task(report.file, measure_report, *report) for report in reports]
    with closing(run_tasks(tasks, workers, processes)) as outcomes:
        for index, outcome in outcomes:
            yield index, unpickle_with_names(outcome, here)


def run_tasks(tasks: Sequence[bytes], workers: Workers, processes: int) -> Generator[tuple[int, bytes]]:
    """Run tasks in other processes.

    The caller must close the generator, see :func:`measure_files`.

    Args:
        tasks: What :func:`pack_task` returned.
        workers: Its scheduler, if it has one, runs the tasks.
        processes: The number of processes of this machine, if there is no scheduler.

    Returns:
        A generator that yields, as each task finishes, its position and what :func:`run_task` returned.
    """
    if workers.scheduler:
        return _run_by_scheduler(workers.scheduler, tasks)
    return _run_in_processes(processes, tasks)


def _run_in_processes(jobs: int, tasks: Sequence[bytes]) -> Generator[tuple[int, bytes]]:
    """Run tasks in ``jobs`` processes of this machine, which are killed if the generator is closed early."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(_LOG.getEffectiveLevel(),)
    )
    try:
        with without_main_module():
            futures = {pool.submit(run_task, task): index for index, task in enumerate(tasks)}
        for future in as_completed(list(futures)):
            yield futures.pop(future), future.result()
    except BrokenProcessPool as error:
        raise DdpProfError("a worker process was killed, perhaps for want of memory: try --jobs 1") from error
    finally:  # also after Ctrl-C: nobody needs the tasks that still run
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(cancel_futures=True)


def _start_worker(log_level: int) -> None:
    """Prepare a worker process: log as the parent does, ignore Ctrl-C, which the parent handles, and end with it."""
    import signal

    logging.basicConfig(format="%(message)s")
    _LOG.setLevel(log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait until the parent process ends, and then end this process; runs in a thread of a worker."""
    from multiprocessing import parent_process

    if parent := parent_process():
        parent.join()
        os._exit(1)


def _run_by_scheduler(scheduler: str, tasks: Sequence[bytes]) -> Generator[tuple[int, bytes]]:
    """Run tasks with Dask, which repeats a task if its worker is lost.

    Args:
        scheduler: Address of the scheduler, or a file that holds it.
        tasks: The tasks.

    Yields:
        The position and the result of each task as it finishes.

    Raises:
        DdpProfError: Dask is not installed, there is no such scheduler, or several workers ended over one task.
    """
    try:
        from distributed import Client, KilledWorker, as_completed
        from distributed import TimeoutError as DaskTimeoutError  # before Python 3.11 not the built-in one
    except ImportError as error:
        raise DdpProfError("--scheduler needs Dask: pip install 'distributed>=2024.8'") from error
    try:
        client = Client(_find_address(scheduler), set_as_default=False, timeout=SECONDS_TO_CONNECT)
    except (OSError, ValueError) as error:
        raise DdpProfError(
            f"no Dask scheduler at {scheduler} ({error}): start one with 'dask scheduler', workers with 'dask worker'"
        ) from error
    # ``patience``: for how many seconds the result of each task is waited for, until it is submitted again.
    done = Event()
    with client:
        Thread(target=_warn_no_workers, args=(client, scheduler, done), daemon=True).start()
        futures = {client.submit(run_task, task, pure=False): index for index, task in enumerate(tasks)}
        patience = dict.fromkeys(range(len(tasks)), SECONDS_TO_FETCH)
        try:
            completed = as_completed(list(futures), loop=client.loop)
            for future in completed:
                index = futures.pop(future)
                try:
                    outcome = future.result(timeout=patience[index])
                except (TimeoutError, DaskTimeoutError):
                    # A worker killed while its result is fetched can leave distributed (2026.8) waiting for ever.
                    patience[index] *= 2  # it may also be large, and the network slow
                    again = client.submit(run_task, tasks[index], pure=False)
                    futures[again] = index
                    completed.add(again)
                except KilledWorker as error:
                    file = printable(str(unpickle_with_names(tasks[index])[0]))
                    ended = "several Dask workers ended while they read it, perhaps for want of memory"
                    hint = "start workers with more memory, or leave out --scheduler"
                    raise DdpProfError(f"{file}: {ended}: {hint}") from error
                else:
                    yield index, outcome
        finally:
            done.set()


def _find_address(scheduler: str) -> str:
    """Return the address of a scheduler, given that or the file that holds it; raises DdpProfError if there is none.

    Dask reads such a file, too, but where it holds no address Dask's error is one of its own code.
    """
    file = Path(scheduler)
    way_out = "give the file of 'dask scheduler --scheduler-file', or an address: tcp://HOST:8786"
    if not file.is_file():
        if ":" in scheduler:
            return scheduler
        raise DdpProfError(f"{printable(scheduler)}: neither a file nor an address of a Dask scheduler: {way_out}")
    address = None
    with suppress(ValueError, KeyError, TypeError):
        content = read_at_most(file, MOST_BYTES_OF_ADDRESS, "a file of a Dask scheduler", way_out)
        address = json.loads(content)["address"]
    if not isinstance(address, str):
        raise DdpProfError(f"{printable(scheduler)}: it holds no address of a Dask scheduler: {way_out}")
    return address


def _warn_no_workers(client: Any, scheduler: str, done: Event) -> None:
    """Log once that reports wait because no worker is connected; one may connect later."""
    while not done.wait(SECONDS_WITHOUT_WORKERS):
        if not client.scheduler_info()["workers"]:
            _LOG.warning(
                "note: no worker is connected to the Dask scheduler at %s: the reports wait for one",
                printable(scheduler),
            )
            return


def own_version() -> str:
    """Return the installed version of ddp_prof."""
    from importlib.metadata import version

    return version("ddp-prof")


def pack_task(path: Path, work: Callable[..., Any], *arguments: Any) -> bytes:
    """Return the call ``work(*arguments)`` about a report as bytes, for a worker with the same version of ddp_prof.

    The call is pickled by itself: a worker of another version can read the path and the version without it.
    """
    return pickle_with_names((path, own_version(), pickle_with_names((work, arguments))))


def run_task(task: bytes) -> bytes:
    """Make the call that :func:`pack_task` packed; return its result, or the ``TraceError`` that ended it, as bytes."""
    path, version, call = unpickle_with_names(task)
    if version != (installed := own_version()):
        reason = f"the worker has ddp_prof {installed}, and this program {version}"
        return pickle_with_names(TraceError(path, reason, "install one version everywhere"))
    work, arguments = unpickle_with_names(call)
    try:
        with naming_limits(path):
            return pickle_with_names(work(*arguments))
    except TraceError as error:
        return pickle_with_names(error)
    except (DdpProfError, OSError) as error:
        reason = str(error) or type(error).__name__
        hint = "try --jobs 1, which needs no worker; if that fails, too, copy it or record it again"
        return pickle_with_names(TraceError(path, reason, hint))
