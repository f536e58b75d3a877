"""Measures a few steps now and then while a job trains, and logs overlap and cost of its communication.

::

    monitor = Monitor(every=1000, steps=3)
    for batch in loader:
        ...
        optimizer.step()
        monitor.step()

All ranks record the same steps by torch.profiler. A process of low priority then reads the trace of its rank; rank 0
gathers what they found over the store of the process group (no collective is called), and logs one record::

    trains  ###########RRRR##########################RRRR######
    analyses               aaaaa                         aaaaa
    logs                        L                             L

The first recorded step is warm-up: in it ranks wait for those whose profiler starts later. Nothing here may end the
training: what fails is logged as a warning, once for each kind of failure.
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
from ddp_prof.annotate.monitor_format import LIMITS, LOG_NAME
from ddp_prof.annotate.recording import (
    RECORDS_ALL_THREADS,
    ProfilersOfProgram,
    call_at_exit,
    export_trace,
    make_profile,
)

PYTHON_VARIABLE = "DDP_PROF_PYTHON"
"""The Python that analyses, where the job's own lacks ddp_prof's dependencies; set by ``ddp-prof capture``."""
FIRST = 10
"""The step of the first measurement, as a job's first steps are no sample."""
ANALYSIS_S, GATHER_S, PATIENCE_S = 600.0, 120.0, 60.0
"""How long an analysis may take, how long rank 0 waits for those of other ranks, and how long a program that ends waits
for what is not logged yet."""
AFTER_SILENCE_S = 5.0
"""How long rank 0 waits for ranks from which nothing arrived the last time."""
_POLL_S = 0.2
_MOST_WAITING = 2
"""Measurements that wait for their analysis; if there are more, as analyses take too long, they are left out."""
_MOST_SENT = 4
"""Results of a rank in the store, and traces of it, that rank 0 has not dealt with."""
_ABSENT = "absent"
_OWN_PROFILER = "the program records by torch.profiler itself"
_QUIET_KINETO = "6"
"""Log level without the two lines that torch 2.13 prints for each recording; a level that is set stays."""
_KEPT = "kept"
_LOG = logging.getLogger("ddp_prof.monitor")
_numbers = iter(range(sys.maxsize))


@dataclass(frozen=True)
class _Recorded:
    """A measurement that is recorded.

    ``overhead_ns`` is how long the profiler's start, stop and export held the training up, ``usual_ns`` the median of
    the steps before, by the host's clock.
    """

    step: int
    trace: Path
    overhead_ns: int
    usual_ns: int | None
    recorded_ns: tuple[int, ...]


@dataclass(frozen=True)
class _Failed:
    """A measurement that this rank does not have, and why; that was said in a warning."""

    step: int
    why: str


class _Group(NamedTuple):
    """This rank, and the store over which ranks send what they found; ``None`` if there is no process group."""

    rank: int
    world: int
    store: Any


class Monitor:
    """Measures ``steps`` steps each ``every`` steps, and logs what their communication costs.

    Args:
        every: Steps between two measurements. The first one is at step 10, or at ``every`` if that is less.
        steps: Recorded steps that count; one more before them is warm-up.
        folder: For the log, ``monitor.jsonl``, which is appended to, and for traces; if a disk is not shared by all
            nodes, each has its own folder.
        log: Where records go besides: a callable that takes a record, a ``logging.Logger``, a TensorBoard
            ``SummaryWriter``, a W&B run, MLflow, a logger of Lightning, or a list of these, in which ``None`` is left
            out. Default: a line on stderr. Each is called on rank 0, in a thread of its own.
        keep: Traces that stay: that with the highest cost and the last one, all, or none; over all starts of a job
            that append to one log.
        limits: As of ``ddp-prof check``: ``min_overlap`` (0 to 1), ``max_exposed_ms``, ``max_tail_ms``,
            ``max_blocking_ms``, ``max_cost_ms``.
        alert: Is called with the record if a limit is not met; default: a warning in Python's logging.
        start: Number of the first step, for a job that goes on from a checkpoint.

    A program's own torch.profiler has priority: a measurement ends without a result where the program starts one.
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
        if steps < 1 or every < steps + 2:
            raise ValueError(f"every={every}, steps={steps}: give at least 1 step, and every >= steps + 2")
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_KINETO)
        self._every, self._steps, self._step = every, steps, start
        self._first = start + min(FIRST, every)
        self._process = os.getpid()
        self._folder = Path(folder).absolute()
        self._lengths_ns: deque[int] = deque(maxlen=100)
        self._begun_ns: int | None = None
        self._profile: profile | None = None
        self._end = 0
        self._measured = start
        self._starts = False
        self._recording_thread = 0
        self._is_stuck = False
        self._range: ranges.OpenRange | None = None
        self._overhead_ns = 0
        self._recorded_ns: list[int] = []
        self._reader = Reader(self._folder, log, keep, limits, alert)
        _monitors.add(self)
        _watch_profilers()
        call_at_exit(partial(_close, weakref.ref(self)))

    def step(self) -> None:
        """Say that a step is done: after ``optimizer.step()``, on every rank, in the thread that trains."""
        self.at_step(self._step + 1)

    def at_step(self, step: int) -> None:
        """As :meth:`step`, for who counts: ``step`` is the number of the step that begins."""
        if os.getpid() != self._process:  # a fork, for example a worker of a data loader
            return
        try:
            self._at_step(step)
        except Exception as error:  # training goes on
            why = f"{type(error).__name__}: {error}"
            warn_once("step", f"step {step} is not measured: {why}")
            with suppress(Exception):
                self._drop()
                self._reader.fail(self._measured, why)

    def _at_step(self, step: int) -> None:
        now_ns = time.perf_counter_ns()
        if self._begun_ns is not None:
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
        self._begun_ns = time.perf_counter_ns()

    def close(self) -> None:
        """End: a measurement that is not complete is dropped, what is recorded is logged before this returns."""
        if self._profile is not None:
            self._drop()
            self._reader.fail(self._measured, "the job ended", tells_rank_0=False)
        self._reader.close()

    def _is_due(self, step: int) -> bool:
        is_due = step == self._first or (step > self._first and step % self._every == 0)
        return is_due and not self._is_stuck

    def _begin(self) -> None:
        if _watch_profilers().record:
            warn_once("profiler", f"step {self._step} is not measured: {_OWN_PROFILER}")
            self._reader.fail(self._step, _OWN_PROFILER)
            return
        before_ns = time.perf_counter_ns()
        self._measured = self._step
        self._starts = True
        try:
            started = make_profile(on_gpu=torch.cuda.is_available())
            started.start()
        except Exception as error:
            why = f"torch.profiler did not start: {type(error).__name__}: {error}"
            warn_once("start", why)
            self._reader.fail(self._step, why)
            return
        finally:
            self._starts = False
        self._recording_thread = threading.get_ident()
        self._profile, self._end, self._recorded_ns = started, self._step + self._steps + 1, []
        self._open_range(warmup=1)
        self._overhead_ns = time.perf_counter_ns() - before_ns

    def _open_range(self, **marks: int) -> None:
        if not ranges.steps_are_marked:
            self._range = ranges.OpenRange(range_names.format_range(range_names.STEP, index=self._step, **marks))

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.end()
            self._range = None

    def _drop(self) -> None:
        """Stop without a result."""
        self._end_range()
        stopped, self._profile = self._profile, None
        if stopped is not None:
            with suppress(Exception):
                self._stop(stopped)

    def _stop(self, recording: profile) -> None:
        """Stop a profiler, unless this would end the process: see :data:`RECORDS_ALL_THREADS`."""
        if not RECORDS_ALL_THREADS and self._recording_thread != threading.get_ident():
            self._is_stuck = True
            raise RuntimeError(
                "this release of torch cannot stop its profiler in another thread; nothing more is measured"
            )
        recording.stop()

    def give_way(self) -> None:
        """Stop because the program starts its own torch.profiler: there can be only one."""
        if not self._starts and self._profile is not None:
            self._drop()
            warn_once("dropped", f"step {self._step} is not measured: {_OWN_PROFILER}")
            self._reader.fail(self._measured, _OWN_PROFILER)

    def _finish(self) -> None:
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
        recorded_ns = tuple(self._recorded_ns[1:])
        self._reader.read(_Recorded(self._measured, trace, self._overhead_ns, usual_ns, recorded_ns))


def log_overlap(
    *,
    folder: str | os.PathLike[str] = "monitor",
    log: Any = None,
    keep: Keep = "worst and last",
    limits: Mapping[str, float] | None = None,
    alert: Callable[[dict[str, Any]], object] | None = None,
) -> OnTraceReady:
    """Return an ``on_trace_ready`` for a program's own torch.profiler that logs as :class:`Monitor` does.

    Steps are those between the profiler's ``step()``. Arguments as of :class:`Monitor`.
    """
    return OnTraceReady(Path(folder).absolute(), log, keep, limits, alert)


class OnTraceReady:
    """Exports what a torch.profiler recorded, and has it read and logged. Arguments as of :class:`Reader`."""

    def __init__(self, folder: Path, *reading: Any) -> None:
        self._folder, self._reader = folder, Reader(folder, *reading)
        call_at_exit(self.close)

    def __call__(self, recorded: Any) -> None:
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
            warn_once("step", f"step {step} is not logged: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Wait until all is logged."""
        self._reader.close()


def export(recorded: Any, folder: Path, step: int) -> Path:
    """Write what a torch.profiler recorded; return the file. An exception leaves no part of it."""
    target = folder / name_of_trace(step, _find_group().rank)
    folder.mkdir(parents=True, exist_ok=True)
    export_trace(recorded, target, is_compressed=False)
    return target


def warn_of_export(error: Exception, folder: Path, step: int) -> str:
    """Warn that a trace was not written; return the reason."""
    why = f"{folder / name_of_trace(step, _find_group().rank)} was not written: {error}"
    warn_once("write", why)
    return why


class Reader:
    """Analyses what is recorded, in a thread that waits for processes of low priority, and logs it."""

    def __init__(
        self,
        folder: Path,
        log: Any,
        keep: Keep,
        limits: Mapping[str, float] | None,
        alert: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        if keep not in ("all", "worst and last", "none"):
            raise ValueError(f"keep={keep!r}: it is 'all', 'worst and last' or 'none'")
        if unknown := {*(limits or {})} - {*LIMITS}:
            raise ValueError(f"limits: there is no {', '.join(sorted(unknown))}, only {', '.join(LIMITS)}")
        logs = log if isinstance(log, (list, tuple)) else [print_text if log is None else log]
        targets = [as_target(one) for one in logs if one is not None]
        self._mlflow = [target for target in targets if isinstance(target, MlflowTarget)]
        self._messengers = [Messenger(target, _not_passed_on(f"target {at}")) for at, target in enumerate(targets)]
        self._alerts = Messenger(alert or _warn_of_limits, _not_passed_on("alert"))
        self._folder, self._keep, self._limits = folder, keep, dict(limits or {})
        self._traces, self._log_file = KeptTraces(folder, keep), LogFile(folder / LOG_NAME)
        self._started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._tasks: queue.SimpleQueue[tuple[_Recorded | _Failed, _Group] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = f"ddp_prof/monitor/{next(_numbers)}"
        self._sent = deque[str]()
        self._silent = set[int]()
        self._analysis = Analysis()

    def read(self, recorded: _Recorded) -> None:
        """Have a measurement analysed and logged; what the program may end meanwhile is looked up here."""
        if self._tasks.qsize() >= _MOST_WAITING:
            recorded.trace.unlink(missing_ok=True)
            why = "analyses take longer than the steps between them"
            warn_once("late", f"step {recorded.step} is not logged: {why}")
            self.fail(recorded.step, why)
            return
        for target in self._mlflow:
            target.find_run()
        self._add(recorded)

    def fail(self, step: int, why: str, *, tells_rank_0: bool = True) -> None:
        """Let rank 0 know that this rank does not have a measurement, so that it does not wait for it.

        On rank 0 itself, that of the others is logged, unless not ``tells_rank_0``.
        """
        if tells_rank_0 or _find_group().rank:
            self._add(_Failed(step, why))

    def _add(self, task: _Recorded | _Failed) -> None:
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
        """Wait until all is logged, but not for ever; an analysis that is not done by then is ended."""
        until = time.monotonic() + PATIENCE_S
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                self._analysis.kill()
            self._thread = None
        group = _find_group()
        if group.rank and group.store is not None:
            with suppress(Exception):  # rank 0, whose store it may be, has ended
                group.store.set(self._key_of_end(group.rank), "")
        for messenger in (*self._messengers, self._alerts):
            messenger.close(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._read_or_warn(*task)
            del task  # a store that is held here would outlive its process group
        self._log_file.close()

    def _read_or_warn(self, task: _Recorded | _Failed, group: _Group) -> None:
        try:
            self._read(task, group)
        except Exception as error:  # training goes on
            if isinstance(task, _Recorded):
                warn_once("read", f"step {task.step} is not logged: {type(error).__name__}: {error}")

    def _read(self, task: _Recorded | _Failed, group: _Group) -> None:
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
        """Analyse the trace of this rank; return what rank 0 gathers."""
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
        """The log of earlier starts; ``None`` if it is another job's, whose traces stay."""
        if group.rank == 0 and self._log_file.is_another_job_s():
            warn_once("shared", f"another job writes to {self._folder}, too: give each job a folder of its own")
            return None
        return self._log_file.file

    def _key(self, step: int, rank: int) -> str:
        return f"{self._name}/{step}/{rank}"

    def _send(self, group: _Group, key: str, part: bytes) -> None:
        if group.store is None:
            raise RuntimeError("there is no process group any more, over whose store rank 0 gathers")
        group.store.set(key, part)
        self._sent.append(key)
        if len(self._sent) > _MOST_SENT:  # rank 0 may not have measured
            group.store.delete_key(self._sent.popleft())

    def _gather(self, group: _Group, step: int, own: bytes) -> list[bytes]:
        """Wait for what the other ranks found; late ones are left out, and awaited shorter next."""
        parts, missing = [own], set(range(1, group.world) if group.store is not None else ())
        begun = time.monotonic()
        while missing:
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
            patience_s = GATHER_S if missing - self._silent else AFTER_SILENCE_S
            if time.monotonic() > begun + patience_s:
                break
            if missing:
                time.sleep(_POLL_S)
        self._silent |= missing
        return parts

    def _key_of_end(self, rank: int) -> str:
        return f"{self._name}/end/{rank}"

    def _log(self, task: _Recorded | _Failed, group: _Group, parts: Sequence[bytes], scratch: Path) -> None:
        if isinstance(task, _Failed) and not any(part.partition(b"\n")[2] for part in parts):
            return  # no rank has it; why was said
        files = []
        for number, part in enumerate(parts):
            (file := scratch / f"part{number}").write_bytes(part)
            files.append(str(file))
        asked = {"step": task.step, "started": self._started, "world": group.world, "limits": self._limits}
        text, error = self._analysis.run(scratch, "merge", json.dumps(asked), *files)
        if error is not None:
            warn_once("merge", f"step {task.step} is not logged: {error}")
            self._keep_only(self._traces.choose(task.step, None), task.step, group)
            return
        record = json.loads(text)
        kept = self._traces.choose(task.step, record["worst_ns"] or 0)
        record["traces"] = [name for name in record["traces"] if task.step in kept]
        try:
            self._log_file.append(record)
        except OSError as failed:
            warn_once("write", f"{self._log_file.file} was not written: {failed}")
        self._keep_only(kept, task.step, group)
        for messenger in self._messengers:
            messenger.pass_on(record)
        if record["failed"]:
            self._alerts.pass_on(record)

    def _keep_only(self, kept: set[int], step: int, group: _Group) -> None:
        """Delete what does not stay, of all ranks whose disk this is, and tell the others."""
        if group.store is not None:
            with suppress(RuntimeError):
                group.store.set(f"{self._name}/{_KEPT}", json.dumps([step, sorted(kept)]))
        self._traces.delete(step, kept, group.rank)

    def _delete_unkept(self, group: _Group) -> None:
        """Delete traces of this rank as rank 0 decided, which may not see this rank's disk, or may decide no more."""
        with suppress(RuntimeError):
            if group.store is not None and (said := _peek(group.store, f"{self._name}/{_KEPT}")):
                last, kept = json.loads(said)
                self._traces.delete(last, {*kept}, group.rank)
        self._traces.delete_undecided(_MOST_SENT, group.rank)


class Analysis:
    """Runs the analysis as a process of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_ended = False

    def kill(self) -> None:
        """End the one that runs; none follows."""
        self._is_ended = True
        if (running := self._process) is not None:
            with suppress(OSError):
                running.kill()

    def run(self, scratch: Path, *arguments: str) -> tuple[str, str | None]:
        """Return what it prints, and why it failed.

        It runs in an empty folder and without the job's PYTHONPATH: there modules of the job cannot hide Python's own.
        """
        if self._is_ended:
            return "", "the job ended before its analysis did"
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
        if code:
            return "", (reason.strip().splitlines() or [f"exit code {code}"])[-1]
        return said, None


_warned = set[str]()


def warn_once(kind: str, text: str) -> None:
    """Log a warning, the first time that something of this kind happens."""
    if kind not in _warned:
        _warned.add(kind)
        _LOG.warning("ddp-prof monitor: %s", text)


def _not_passed_on(which: str) -> Callable[[int, str], None]:
    return lambda step, why: warn_once(which, f"step {step} was not passed on: {why}")


def _warn_of_limits(record: Mapping[str, Any]) -> None:
    _LOG.warning("ddp-prof monitor: step %d: %s", record["step"], "; ".join(record["failed"]))


def _delete_partial(folder: Path, rank: int) -> None:
    """Delete what an earlier job of this rank was writing when it was killed."""
    for file in folder.glob(f".step*.rank{rank}.json*.partial*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > ANALYSIS_S:
                file.unlink()


def _find_group() -> _Group:
    """The process group, or what the launcher says of this process if there is no group or none any more."""
    if dist.is_available() and dist.is_initialized():
        return _Group(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return _Group(int(rank), int(world), None)
    return _Group(0, 1, None)


def _peek(store: Any, key: str) -> bytes | None:
    """The value of a key, if there is one.

    A ``get`` would hold the store against the thread that trains until there is one, and torch 2.1 and 2.2 have no
    ``check``. This sets nothing: no value is :data:`_ABSENT`, which is returned for a key that does not exist.
    """
    found = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return None if found == _ABSENT.encode() else found


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
_profilers: list[ProfilersOfProgram] = []


def _watch_profilers() -> ProfilersOfProgram:
    if not _profilers:

        def give_way() -> None:
            for monitor in list(_monitors):
                monitor.give_way()

        _profilers.append(ProfilersOfProgram(lambda: any(one._starts for one in list(_monitors)), give_way))
    return _profilers[0]


def _close(monitor: weakref.ref[Monitor]) -> None:
    if (one := monitor()) is not None and os.getpid() == one._process:
        one.close()
