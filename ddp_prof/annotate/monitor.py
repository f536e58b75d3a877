"""Measures a few steps now and then while a job trains, and logs the overlap and the cost of its communication.

::

    monitor = Monitor(every=1000, steps=3)
    for batch in loader:
        ...
        optimizer.step()
        monitor.step()

A *measurement* is a few consecutive recorded steps, known by the number of the first one. All ranks record the same
steps by torch.profiler. On each rank a process of low priority then analyses the rank's trace. Rank 0 gathers the
results of all ranks over the store of the process group (no collective is called), and logs one record::

    trains  ###########RRRR##########################RRRR######
    analyses               aaaaa                         aaaaa
    logs                        L                             L

``#`` is a usual step, ``R`` a recorded step, ``a`` the analysis, which runs beside the training, ``L`` the record.

The first recorded step is warm-up: in it ranks wait for those whose profiler starts later. Nothing here may end the
training: a failure is logged as a warning, once for each kind of failure.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import profile

from ddp_prof import range_names
from ddp_prof.annotate import ranges
from ddp_prof.annotate.kept_traces import Keep, KeptTraces, name_of_trace
from ddp_prof.annotate.log_file import LogFile
from ddp_prof.annotate.log_targets import MlflowTarget, as_target, print_text
from ddp_prof.annotate.messenger import Messenger
from ddp_prof.annotate.monitor_format import LIMITS, LOG_NAME, first_step
from ddp_prof.annotate.recording import (
    RECORDS_ALL_THREADS,
    ProfilersOfProgram,
    call_at_exit,
    export_trace,
    make_profile,
)

PYTHON_VARIABLE = "DDP_PROF_PYTHON"
"""Environment variable: the Python that runs the analysis if the job's Python lacks ddp_prof's dependencies.

``ddp-prof capture`` sets it."""
ANALYSIS_S, GATHER_S, PATIENCE_S = 600.0, 120.0, 60.0
"""How long an analysis may take; how long rank 0 waits for the results of other ranks; how long a program that ends
waits until everything is logged."""
AFTER_SILENCE_S = 5.0
"""How long rank 0 waits for ranks from which nothing arrived the last time."""
_POLL_S = 0.2
"""Time between two looks into the store."""
_MOST_WAITING = 2
"""Most measurements that wait for their analysis; if analyses take too long, later measurements are left out."""
_MOST_SENT = 4
"""Most results of a rank in the store, and most traces of it on disk, that rank 0 has not dealt with."""
_ABSENT = "absent"
"""Stands for "no value" when the store is asked for a key, see :func:`_peek`."""
_OWN_PROFILER = "the program runs its own torch.profiler, which has priority"
_NOT_MEASURED, _NOT_LOGGED = "is not measured", "is not logged"
_QUIET_KINETO = "6"
"""Log level without the two lines that torch 2.13 prints for each recording; a level that is set stays."""
_KEPT = "kept"
"""End of the store's key under which rank 0 says which traces stay."""
_LOG = logging.getLogger("ddp_prof.monitor")
_numbers = iter(range(sys.maxsize))
"""Numbers for the readers of this process, 0, 1, ...; on all ranks the same, if all make their readers in one order."""


@dataclass(frozen=True)
class _Recorded:
    """A measurement of this rank whose trace is written.

    Attributes:
        step: The first recorded step.
        trace: File of the trace.
        overhead_ns: How long start, stop and export of the profiler held the training up.
        usual_ns: Median length of the unrecorded steps before, by the host's clock; ``None`` if it is not known.
        recorded_ns: Length of each recorded step after warm-up, by the host's clock; empty if it is not known.
    """

    step: int
    trace: Path
    overhead_ns: int
    usual_ns: int | None
    recorded_ns: tuple[int, ...]


@dataclass(frozen=True)
class _Failed:
    """A measurement that this rank could not make, and the reason, which a warning has told."""

    step: int
    why: str


class _Group(NamedTuple):
    """Rank and number of ranks, and the store over which ranks send results; ``None`` if there is no process group."""

    rank: int
    world: int
    store: Any


class Monitor:
    """Measures ``steps`` training steps once in every ``every`` steps, and logs what their communication costs.

    Args:
        every: Steps from the start of a measurement to the next one. The first measurement is at step 10, or at
            ``every`` if that is less.
        steps: Recorded steps that are analysed; one more step before them is recorded as warm-up.
        folder: Folder for the log, ``monitor.jsonl``, which is appended to, and for the traces. If nodes do not share
            the disk, each node has its own folder.
        log: Where records go besides the file: a callable that takes a record, a ``logging.Logger``, a TensorBoard
            ``SummaryWriter``, a W&B run, MLflow, a logger of Lightning, or a list of these, in which ``None`` is left
            out. Default: a line on stderr. Each is called on rank 0, in a thread of its own.
        keep: Which traces stay, over all starts of a job that append to one log: the trace with the highest cost and
            the last trace, all traces, or none.
        limits: Limits as for ``ddp-prof check``: ``min_overlap`` (0 to 1), ``max_exposed_ms``, ``max_tail_ms``,
            ``max_blocking_ms``, ``max_cost_ms``.
        alert: Is called with the record if a limit is not met; default: a warning in Python's logging.
        start: Number of the first step, for a job that goes on from a checkpoint.

    The program's own torch.profiler has priority: if the program starts one, a measurement stops without a result.
    """

    def __init__(
        self,
        every: int = 1000,
        steps: int = 3,
        *,
        folder: str | os.PathLike[str] = "monitor",
        log: Any = None,
        keep: Keep = "worst and last",
        limits: Mapping[str, float] | None = None,
        alert: Callable[[dict[str, Any]], object] | None = None,
        start: int = 0,
    ) -> None:
        """Check the arguments, which the class describes, and begin to watch for the program's own torch.profiler.

        Raises:
            ValueError: ``every`` or ``steps`` is too small, or there is no such ``keep`` or limit.
            TypeError: ``log`` is nothing that takes records.
        """
        if steps < 1 or every < steps + 2:
            raise ValueError(f"every={every}, steps={steps}: give at least 1 step, and every >= steps + 2")
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_KINETO)
        self._every, self._steps, self._step = every, steps, start
        self._first = start + first_step(every)
        self._process = os.getpid()
        self._folder = Path(folder).absolute()
        self._lengths_ns: deque[int] = deque(maxlen=100)  # of the last steps that were not recorded
        self._begun_ns: int | None = None  # when the current step began
        self._profile: profile | None = None  # of the measurement that runs, if one does
        self._end = 0  # the step before which it stops
        self._measured = start  # the first step of the last measurement
        self._starts = False  # whether our own profiler is being started
        self._recording_thread = 0
        self._is_stuck = False  # whether a profiler could not be stopped, so that none can be started
        self._range: ranges.OpenRange | None = None
        self._overhead_ns = 0
        self._recorded_ns: list[int] = []
        self._reader = Reader(self._folder, log, keep, limits, alert)
        _monitors.add(self)
        _watch_profilers()
        call_at_exit(partial(_close, weakref.ref(self)))

    def step(self) -> None:
        """Note that a step is done. Call it after ``optimizer.step()``, on every rank, in the thread that trains."""
        self.at_step(self._step + 1)

    def at_step(self, step: int) -> None:
        """Do what :meth:`step` does, for a caller that counts: ``step`` is the number of the step that begins."""
        if os.getpid() != self._process:  # a fork, for example a worker of a data loader
            return
        try:
            self._at_step(step)
        except Exception as error:  # training goes on
            why = f"{type(error).__name__}: {error}"
            _warn_of_step("step", self._measured, f"{_NOT_MEASURED}: {why}")
            with suppress(Exception):
                self._drop()
                self._reader.fail(self._measured, why)

    def _at_step(self, step: int) -> None:
        """Note the length of the step that ended, and end or begin a measurement if ``step`` is its turn."""
        now_ns = time.perf_counter_ns()
        if self._begun_ns is not None:  # None before the first step
            (self._lengths_ns if self._profile is None else self._recorded_ns).append(now_ns - self._begun_ns)
        self._step = step
        if self._profile is not None:
            self._end_range()
            if step == self._end:
                self._finish()
            else:
                self._open_range()
        if self._profile is None and self._is_due(step):
            self._begin()
        self._begun_ns = time.perf_counter_ns()  # taken anew: what was done above is no part of the step

    def close(self) -> None:
        """End the monitor: drop a measurement that is not complete, and return once all complete ones are logged.

        The wait for the log is limited, see :meth:`Reader.close`.
        """
        if self._profile is not None:
            self._drop()
            self._reader.fail(self._measured, "the job ended", tells_rank_0=False)
        self._reader.close()

    def _is_due(self, step: int) -> bool:
        is_due = step == self._first or (step > self._first and step % self._every == 0)
        return is_due and not self._is_stuck

    def _begin(self) -> None:
        """Start the profiler for a measurement that begins with the current step; if it does not start, warn."""
        self._measured = self._step
        if _watch_profilers().record:
            _warn_of_step("profiler", self._step, f"{_NOT_MEASURED}: {_OWN_PROFILER}")
            self._reader.fail(self._step, _OWN_PROFILER)
            return
        before_ns = time.perf_counter_ns()
        self._starts = True  # so that our own profiler is not taken for one of the program's
        try:
            started = make_profile(on_gpu=torch.cuda.is_available())
            started.start()
        except Exception as error:
            why = f"torch.profiler did not start: {type(error).__name__}: {error}"
            _warn_of_step("start", self._step, f"{_NOT_MEASURED}: {why}")
            self._reader.fail(self._step, why)
            return
        finally:
            self._starts = False
        self._recording_thread = threading.get_ident()
        self._profile, self._end, self._recorded_ns = started, self._step + self._steps + 1, []  # 1 for warm-up
        self._open_range(warmup=1)
        self._overhead_ns = time.perf_counter_ns() - before_ns

    def _open_range(self, **marks: int) -> None:
        """Open the range of the current step, unless the program marks steps itself; ``marks``: further fields."""
        if not ranges.steps_are_marked:
            self._range = ranges.OpenRange(range_names.format_range(range_names.STEP, index=self._step, **marks))

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.end()
            self._range = None

    def _drop(self) -> None:
        """Stop the measurement that runs, if one does, without a result."""
        self._end_range()
        stopped, self._profile = self._profile, None
        if stopped is not None:
            with suppress(Exception):
                self._stop(stopped)

    def _stop(self, recording: profile) -> None:
        """Stop a profiler, unless this would crash the process, see :data:`.RECORDS_ALL_THREADS`.

        Raises:
            RuntimeError: It would crash the process; the profiler records on, and nothing more is measured.
        """
        if not RECORDS_ALL_THREADS and self._recording_thread != threading.get_ident():
            self._is_stuck = True
            raise RuntimeError(
                "this release of torch cannot stop its profiler in another thread; nothing more is measured"
            )
        recording.stop()

    def give_way(self) -> None:
        """Stop measuring because the program starts its own torch.profiler: only one can record at a time."""
        if not self._starts and self._profile is not None:
            self._drop()
            _warn_of_step("dropped", self._measured, f"{_NOT_MEASURED}: {_OWN_PROFILER}")
            self._reader.fail(self._measured, _OWN_PROFILER)

    def _finish(self) -> None:
        """Stop the profiler after the last recorded step, write its trace, and have it analysed."""
        before_ns = time.perf_counter_ns()
        stopped, self._profile = self._profile, None
        assert stopped is not None
        self._stop(stopped)
        try:
            trace = export(stopped, self._folder, self._measured)
        except Exception as error:  # training goes on
            self._reader.fail(self._measured, warn_of_export(error, self._folder, self._measured))
            return
        self._overhead_ns += time.perf_counter_ns() - before_ns
        usual_ns = round(median(self._lengths_ns)) if self._lengths_ns else None
        recorded_ns = tuple(self._recorded_ns[1:])  # without warm-up
        self._reader.read(_Recorded(self._measured, trace, self._overhead_ns, usual_ns, recorded_ns))


def log_overlap(
    *,
    folder: str | os.PathLike[str] = "monitor",
    log: Any = None,
    keep: Keep = "worst and last",
    limits: Mapping[str, float] | None = None,
    alert: Callable[[dict[str, Any]], object] | None = None,
) -> OnTraceReady:
    """Return a function for ``on_trace_ready`` of a program's own torch.profiler, which logs as :class:`Monitor` does.

    A step lasts from one call of the profiler's ``step()`` to the next. The arguments are those of :class:`Monitor`.
    """
    return OnTraceReady(Path(folder).absolute(), log, keep, limits, alert)


class OnTraceReady:
    """Called with a torch.profiler that has recorded: writes its trace, and has the trace analysed and logged.

    Args:
        folder: Where the log and the traces go.
        reading: The arguments of :class:`Reader` after the folder.
    """

    def __init__(self, folder: Path, *reading: Any) -> None:
        self._folder, self._reader = folder, Reader(folder, *reading)
        call_at_exit(self.close)

    def __call__(self, recorded: Any) -> None:
        """Write and analyse what ``recorded``, a torch.profiler, holds; a failure becomes a warning."""
        before_ns = time.perf_counter_ns()
        step = recorded.step_num
        try:
            try:
                trace = export(recorded, self._folder, step)
            except Exception as error:
                self._reader.fail(step, warn_of_export(error, self._folder, step))
                return
            self._reader.read(_Recorded(step, trace, time.perf_counter_ns() - before_ns, None, ()))
        except Exception as error:  # training goes on
            _warn_of_step("step", step, f"{_NOT_LOGGED}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Wait until all is logged."""
        self._reader.close()


def export(recorded: Any, folder: Path, step: int) -> Path:
    """Write the trace of a torch.profiler into ``folder`` and return the file; ``step`` is the first recorded step.

    Raises:
        OSError: The trace was not written; no part of a file is left.
    """
    target = folder / name_of_trace(step, _find_group().rank)
    folder.mkdir(parents=True, exist_ok=True)
    export_trace(recorded, target, is_compressed=False)
    return target


def warn_of_export(error: Exception, folder: Path, step: int) -> str:
    """Log a warning that the trace of a measurement was not written; return the text."""
    why = f"{folder / name_of_trace(step, _find_group().rank)} was not written: {error}"
    _warn_of_step("write", step, f"{_NOT_MEASURED}: {why}")
    return why


class Reader:
    """Has measurements analysed and logged, one after another, in a thread of its own.

    The thread waits for processes of low priority, which do the work, so that training goes on. On rank 0 it also
    gathers the results of the other ranks and writes the log; the other ranks send their results to rank 0.

    Args:
        folder: Folder for the log and the traces.
        log: As for :class:`Monitor`.
        keep: As for :class:`Monitor`.
        limits: As for :class:`Monitor`.
        alert: As for :class:`Monitor`.

    Raises:
        ValueError: There is no such ``keep``, or no such limit.
        TypeError: ``log`` is nothing that takes records.
    """

    def __init__(
        self,
        folder: Path,
        log: Any,
        keep: Keep,
        limits: Mapping[str, float] | None,
        alert: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        """Check the arguments, which the class describes; the threads start with the first measurement."""
        if keep not in ("all", "worst and last", "none"):
            raise ValueError(f"keep={keep!r}: it is 'all', 'worst and last' or 'none'")
        if unknown := {*(limits or {})} - {*LIMITS}:
            raise ValueError(f"limits: there is no {', '.join(sorted(unknown))}, only {', '.join(LIMITS)}")
        # Each target of records gets a thread of its own, and so does the alert.
        logs = {f"log[{at}]": one for at, one in enumerate(log)} if isinstance(log, (list, tuple)) else {"log": log}
        logs = {"log": print_text} if log is None else logs
        targets = {name: as_target(one) for name, one in logs.items() if one is not None}
        self._mlflow = [target for target in targets.values() if isinstance(target, MlflowTarget)]
        self._messengers = [Messenger(target, _not_passed_on(name)) for name, target in targets.items()]
        self._alerts = Messenger(alert or _warn_of_limits, _not_passed_on("alert"))
        self._folder, self._keep, self._limits = folder, keep, dict(limits or {})
        self._traces, self._log_file = KeptTraces(folder, keep), LogFile(folder / LOG_NAME)
        self._started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        # The queue of measurements for the thread; None ends it.
        self._tasks: queue.SimpleQueue[tuple[_Recorded | _Failed, _Group] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = f"ddp_prof/monitor/{next(_numbers)}"  # start of this reader's keys in the store
        self._sent = deque[str]()  # keys of this rank's results in the store, the oldest first
        self._silent = set[int]()  # on rank 0: ranks from which nothing arrived the last time
        self._analysis = Analysis()

    def read(self, recorded: _Recorded) -> None:
        """Queue a measurement for analysis and log; if too many wait, delete its trace and warn.

        The active run of MLflow is looked up here, in the thread that trains, because the program may end it later.
        """
        if self._tasks.qsize() >= _MOST_WAITING:
            recorded.trace.unlink(missing_ok=True)
            why = "analyses take longer than the steps between measurements: measure less often"
            _warn_of_step("late", recorded.step, f"{_NOT_LOGGED}: {why}")
            self.fail(recorded.step, why)
            return
        for target in self._mlflow:
            target.find_run()
        self._add(recorded)

    def fail(self, step: int, why: str, *, tells_rank_0: bool = True) -> None:
        """Tell rank 0 that this rank does not have a measurement, so that rank 0 does not wait for it.

        Args:
            step: First step of the measurement.
            why: The reason.
            tells_rank_0: Matters on rank 0 only: whether it still gathers and logs what the other ranks measured.
        """
        if tells_rank_0 or _find_group().rank:
            self._add(_Failed(step, why))

    def _add(self, task: _Recorded | _Failed) -> None:
        """Queue a measurement for the thread, which the first call starts.

        A failed measurement is left out if there are no other ranks that would wait for its result.
        """
        group = _find_group()
        if isinstance(task, _Failed) and (group.world == 1 or group.store is None):
            return
        if self._thread is None:
            self._analysis = Analysis()
            self._thread = threading.Thread(target=self._run, name="ddp_prof.monitor", daemon=True)
            self._thread.start()
            for messenger in [*self._messengers, self._alerts] if group.rank == 0 else ():
                messenger.start()
        self._tasks.put((task, group))

    def close(self) -> None:
        """Wait until all measurements are logged, for :data:`PATIENCE_S` at most; kill an analysis that still runs."""
        until = time.monotonic() + PATIENCE_S
        if self._thread is not None:
            self._tasks.put(None)  # ends the thread
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                self._analysis.kill()
            self._thread = None
        group = _find_group()
        if group.rank and group.store is not None:  # tell rank 0 that nothing more comes from this rank
            with suppress(Exception):  # rank 0, whose store it may be, has ended
                group.store.set(self._key_of_end(group.rank), "")
        for messenger in (*self._messengers, self._alerts):
            messenger.close(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        """Analyse and log the queued measurements, one after another, until ``None`` comes; this runs in the thread."""
        while (task := self._tasks.get()) is not None:
            self._read_or_warn(*task)
            del task  # a store that is held here would outlive its process group
        self._log_file.close()

    def _read_or_warn(self, task: _Recorded | _Failed, group: _Group) -> None:
        """Do :meth:`_read`; an exception becomes a warning, so that the thread goes on with the next measurement."""
        try:
            self._read(task, group)
        except Exception as error:  # training goes on
            if isinstance(task, _Recorded):  # else a warning has told already that the step is not measured
                _warn_of_step("read", task.step, f"{_NOT_LOGGED}: {type(error).__name__}: {error}")

    def _read(self, task: _Recorded | _Failed, group: _Group) -> None:
        """Analyse one measurement; send the result to rank 0, or on rank 0, gather all results and log them."""
        _delete_partial(self._folder, group.rank)
        with tempfile.TemporaryDirectory(prefix="ddp_prof.") as scratch:
            part = self._measure(task, group, Path(scratch))
            if group.rank:
                try:
                    self._send(group, self._key(task.step, group.rank), part)
                finally:
                    self._delete_unkept(group)
            else:
                self._log(task, group, self._gather(group, task.step, part), Path(scratch))

    def _measure(self, task: _Recorded | _Failed, group: _Group, scratch: Path) -> bytes:
        """Analyse the trace of this rank; return the result that rank 0 gathers.

        It is a line of JSON (rank, host, times by the host's clock, and ``error``, why there is no analysis) and what
        the analysis wrote, which is empty if there is an error.
        """
        head: dict[str, Any] = {
            "rank": group.rank, "host": socket.gethostname(), "overhead_ns": 0, "usual_ns": None, "recorded_ns": (),
        }  # fmt: skip
        out = scratch / "measured"
        if isinstance(task, _Failed):
            error: str | None = task.why
        else:
            self._traces.add(task.step, group.rank, task.trace, self._find_log(group))
            error = self._analysis.run(scratch, "measure", str(task.trace), str(out))[1]
            head |= {"overhead_ns": task.overhead_ns, "usual_ns": task.usual_ns, "recorded_ns": task.recorded_ns}
        packed = out.read_bytes() if error is None else b""
        return json.dumps({**head, "error": error}).encode() + b"\n" + packed

    def _find_log(self, group: _Group) -> Path | None:
        """Return the file of the log, which says which traces of earlier starts may be deleted.

        On rank 0 it is ``None`` if another running job writes to it, too: those traces may be that job's, so none of
        them may be deleted.
        """
        if group.rank == 0 and self._log_file.is_another_job_s():
            warn_once("shared", f"another job writes to {self._folder}, too: give each job a folder of its own")
            return None
        return self._log_file.file

    def _key(self, step: int, rank: int) -> str:
        """Return the store's key for the result of a rank for the measurement at ``step``."""
        return f"{self._name}/{step}/{rank}"

    def _send(self, group: _Group, key: str, part: bytes) -> None:
        """Put ``part``, the result of this rank, into the store, and delete its oldest result if there are too many."""
        if group.store is None:
            raise RuntimeError(
                "there is no torch process group, over whose store rank 0 gathers: measure after init_process_group() "
                "and before destroy_process_group()"
            )
        group.store.set(key, part)
        self._sent.append(key)
        if len(self._sent) > _MOST_SENT:  # rank 0 may not have measured
            group.store.delete_key(self._sent.popleft())

    def _gather(self, group: _Group, step: int, own: bytes) -> list[bytes]:
        """Return the results of the ranks for the measurement at ``step``: ``own``, then what arrives in the store.

        A rank from which nothing arrives in time is left out. If only such ranks are missing the next time, the wait is
        shorter.
        """
        parts, missing = [own], set(range(1, group.world) if group.store is not None else ())
        begun = time.monotonic()
        while missing:
            # Take the results that are there; a rank that has ended sends nothing more.
            for rank in sorted(missing):
                key = self._key(step, rank)
                try:
                    has_ended = _peek(group.store, self._key_of_end(rank)) is not None
                    if (part := _peek(group.store, key)) is not None:
                        parts.append(part)
                        group.store.delete_key(key)
                except RuntimeError:
                    return parts  # the store's rank has ended
                if part is not None or has_ended:
                    missing.discard(rank)
                    self._silent.discard(rank)
            # Give up after a while, soon if only ranks are missing that sent nothing the last time.
            patience_s = GATHER_S if missing - self._silent else AFTER_SILENCE_S
            if time.monotonic() > begun + patience_s:
                break
            if missing:
                time.sleep(_POLL_S)
        self._silent |= missing
        return parts

    def _key_of_end(self, rank: int) -> str:
        """Return the store's key that a rank sets when its reader has ended."""
        return f"{self._name}/end/{rank}"

    def _log(self, task: _Recorded | _Failed, group: _Group, parts: Sequence[bytes], scratch: Path) -> None:
        """Merge the results of the ranks into a record, log it, and delete the traces that do not stay; on rank 0.

        Args:
            task: The measurement on this rank.
            group: The ranks.
            parts: The results of the ranks that answered, see :meth:`_measure`.
            scratch: An empty folder for temporary files.
        """
        # After the first line of a part comes the analysis; it is empty if the rank has none.
        if isinstance(task, _Failed) and not any(part.partition(b"\n")[2] for part in parts):
            return  # no rank has the measurement; warnings have said why
        # Merge the results into a record.
        files = []
        for number, part in enumerate(parts):
            (file := scratch / f"part{number}").write_bytes(part)
            files.append(str(file))
        asked = {"step": task.step, "started": self._started, "world": group.world, "limits": self._limits}
        text, error = self._analysis.run(scratch, "merge", json.dumps(asked), *files)
        if error is not None:
            _warn_of_step("merge", task.step, f"{_NOT_LOGGED}: {error}")
            self._keep_only(self._traces.choose(task.step, None), task.step, group)
            return
        # Decide which traces stay, write the record, delete the other traces, and pass the record on.
        record = json.loads(text)
        kept = self._traces.choose(task.step, record["worst_ns"] or 0)
        record["traces"] = [name for name in record["traces"] if task.step in kept]
        try:
            self._log_file.append(record)
        except OSError as failed:
            _warn_of_step("write", task.step, f"is not in {self._log_file.file}: {failed}")
        self._keep_only(kept, task.step, group)
        for messenger in self._messengers:
            messenger.pass_on(record)
        if record["failed"]:
            self._alerts.pass_on(record)

    def _keep_only(self, kept: set[int], step: int, group: _Group) -> None:
        """Delete the traces of all ranks on this disk that do not stay, and tell the other ranks which stay.

        Args:
            kept: First steps of the measurements whose traces stay.
            step: First step of the last measurement that is decided.
            group: The ranks.
        """
        if group.store is not None:
            with suppress(RuntimeError):
                group.store.set(f"{self._name}/{_KEPT}", json.dumps([step, sorted(kept)]))
        self._traces.delete(step, kept, group.rank)

    def _delete_unkept(self, group: _Group) -> None:
        """Delete the traces of this rank that do not stay: rank 0 decides, but may not see the disk of this rank.

        If rank 0 has stopped deciding, the oldest traces are deleted.
        """
        with suppress(RuntimeError):
            if group.store is not None and (said := _peek(group.store, f"{self._name}/{_KEPT}")):
                last, kept = json.loads(said)
                self._traces.delete(last, {*kept}, group.rank)
        self._traces.delete_undecided(_MOST_SENT, group.rank)


class Analysis:
    """Runs ``python -m ddp_prof.monitor``, which analyses traces, as a process of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_ended = False

    def kill(self) -> None:
        """Kill the process that runs, and start none any more."""
        self._is_ended = True
        if (running := self._process) is not None:
            with suppress(OSError):
                running.kill()

    def run(self, scratch: Path, *arguments: str) -> tuple[str, str | None]:
        """Run the analysis with these command-line arguments; return its stdout and, if it failed, the reason.

        The second element is ``None`` if it succeeded. The process runs in ``scratch``, an empty folder, and without
        the job's PYTHONPATH: there modules of the job cannot hide Python's own.
        """
        if self._is_ended:
            return "", "the job ended before its analysis did"
        # The analysis must find ddp_prof, and not take the variables of ``ddp-prof capture`` for its own.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DDP_PROF_")}
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        try:
            with subprocess.Popen(  # noqa: S603
                [python, "-m", "ddp_prof.monitor", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environ,
                cwd=scratch,
            ) as self._process:
                try:
                    said, reason = self._process.communicate(timeout=ANALYSIS_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    return "", f"its analysis took longer than {ANALYSIS_S:.0f} s"
                code = self._process.returncode
        except OSError as error:
            return "", f"its analysis did not start: {error}"
        finally:
            self._process = None
        if code < 0:
            return "", f"its analysis was ended by signal {-code}"
        if code:  # the last line on stderr is the reason
            return "", (reason.strip().splitlines() or [f"exit code {code}"])[-1]
        return said, None


_warned = set[str]()


def warn_once(kind: str, text: str) -> None:
    """Log ``text`` as a warning if this is the first warning of this ``kind`` in the process."""
    if kind not in _warned:
        _warned.add(kind)
        _LOG.warning("ddp-prof monitor: %s", text)


def _warn_of_step(kind: str, step: int, what: str) -> None:
    """Do :func:`warn_once` for what happened to the measurement at ``step``, and say that no later one is named."""
    warn_once(kind, f"step {step} {what} (said once: later measurements may be missing for the same reason)")


def _not_passed_on(which: str) -> Callable[[int, str], None]:
    """Return a function that warns that a record was not passed on to ``which``, an argument of :class:`Monitor`."""
    return lambda step, why: _warn_of_step(which, step, f"was not passed on to {which}: {why}")


def _warn_of_limits(record: Mapping[str, Any]) -> None:
    _LOG.warning("ddp-prof monitor: step %d: %s", record["step"], "; ".join(record["failed"]))


def _delete_partial(folder: Path, rank: int) -> None:
    """Delete old temporary files of traces: an earlier job was killed while its process of this rank wrote them."""
    for file in folder.glob(f".step*.rank{rank}.json*.partial*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > ANALYSIS_S:
                file.unlink()


def _find_group() -> _Group:
    """Return rank, number of ranks and store of the process group.

    If there is no process group (any more), rank and number come from the launcher's environment variables, else they
    are 0 and 1; the store is ``None``.
    """
    if dist.is_available() and dist.is_initialized():
        return _Group(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return _Group(int(rank), int(world), None)
    return _Group(0, 1, None)


def _peek(store: Any, key: str) -> bytes | None:
    """Return the value of a key in the store, ``None`` if the key does not exist; without waiting.

    ``get`` would wait for the value and keep the training thread from the store meanwhile, and torch 2.1 and 2.2 have
    no ``check``. ``compare_set`` would replace the value :data:`_ABSENT`, which no key has, so it changes nothing; for
    a key that does not exist it returns :data:`_ABSENT`.
    """
    found = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return None if found == _ABSENT.encode() else found


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
"""All monitors of this process that exist."""
_profilers: list[ProfilersOfProgram] = []
"""Holds the only :class:`.ProfilersOfProgram` of this process, once there is one."""


def _watch_profilers() -> ProfilersOfProgram:
    """Return the object that keeps track of the program's own profilers; the first call makes it.

    It lets all monitors give way before such a profiler starts.
    """
    if not _profilers:

        def give_way() -> None:
            for monitor in list(_monitors):
                monitor.give_way()

        _profilers.append(ProfilersOfProgram(lambda: any(one._starts for one in list(_monitors)), give_way))
    return _profilers[0]


def _close(monitor: weakref.ref[Monitor]) -> None:
    """Close a monitor at the end of the process, if it still exists and this process, not a parent, made it."""
    if (one := monitor()) is not None and os.getpid() == one._process:
        one.close()
