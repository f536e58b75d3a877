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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import profile

from ddp_prof import range_names
from ddp_prof.annotate import ranges
from ddp_prof.annotate.log_targets import MlflowTarget, Target, as_target, print_text
from ddp_prof.annotate.monitor_format import LIMITS, LOG_NAME
from ddp_prof.annotate.recording import RECORDS_ALL_THREADS, ProfilersOfProgram, call_at_exit, make_profile

PYTHON_VARIABLE = "DDP_PROF_PYTHON"
"""The Python that analyses, where the job's own lacks ddp_prof's dependencies; set by ``ddp-prof capture``."""
FIRST = 10
"""The step of the first measurement, as a job's first steps are no sample."""
ANALYSIS_S, GATHER_S, PATIENCE_S = 600.0, 120.0, 60.0
"""How long an analysis may take, how long rank 0 waits for those of other ranks, and how long a program that ends waits
for what is not logged yet."""
_POLL_S = 0.2
_MOST_WAITING = 2
"""Measurements that wait for their analysis; if there are more, as analyses take too long, they are left out."""
_MOST_SENT = 4
"""Results of a rank in the store, and traces of it, that rank 0 has not dealt with."""
_ABSENT = "absent"
_QUIET_KINETO = "6"
"""Log level without the two lines that torch 2.13 prints for each recording; a level that is set stays."""
_KEPT = "kept"
_LOG = logging.getLogger("ddp_prof.monitor")
_numbers = iter(range(sys.maxsize))

Keep = Literal["all", "worst and last", "none"]


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
            ``SummaryWriter``, a W&B run, MLflow, a logger of Lightning, or a list of these. Default: a line on stderr.
            They are called on rank 0, in a thread of the monitor.
        keep: Traces that stay: that with the highest cost and the last one, all, or none.
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
            warn_once("step", f"step {step} is not measured: {type(error).__name__}: {error}")
            with suppress(Exception):
                self._drop("")

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
        self._drop("")
        self._reader.close()

    def _is_due(self, step: int) -> bool:
        is_due = step == self._first or (step > self._first and step % self._every == 0)
        return is_due and not self._is_stuck

    def _begin(self) -> None:
        if _watch_profilers().record:
            warn_once("profiler", f"step {self._step} is not measured: the program records by torch.profiler itself")
            return
        before_ns = time.perf_counter_ns()
        self._starts = True
        try:
            started = make_profile(on_gpu=torch.cuda.is_available())
            started.start()
        except Exception as error:
            warn_once("start", f"torch.profiler did not start: {type(error).__name__}: {error}")
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

    def _drop(self, why: str) -> None:
        """Stop without a result."""
        self._end_range()
        stopped, self._profile = self._profile, None
        if stopped is not None:
            with suppress(Exception):
                self._stop(stopped)
            if why:
                warn_once("dropped", f"step {self._step} is not measured: {why}")

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
        if not self._starts:
            self._drop("the program records by torch.profiler itself")

    def _finish(self) -> None:
        before_ns = time.perf_counter_ns()
        stopped, self._profile = self._profile, None
        assert stopped is not None
        self._stop(stopped)
        measured = self._end - self._steps - 1
        trace = export(stopped, self._folder, measured)
        self._overhead_ns += time.perf_counter_ns() - before_ns
        if trace is not None:
            usual_ns = round(median(self._lengths_ns)) if self._lengths_ns else None
            self._reader.read(_Recorded(measured, trace, self._overhead_ns, usual_ns, tuple(self._recorded_ns[1:])))


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
            trace = export(recorded, self._folder, step)
            if trace is not None:
                self._reader.read(_Recorded(step, trace, time.perf_counter_ns() - before_ns, None, ()))
        except Exception as error:  # training goes on
            warn_once("step", f"step {step} is not logged: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Wait until all is logged."""
        self._reader.close()


def export(recorded: Any, folder: Path, step: int) -> Path | None:
    """Write what a torch.profiler recorded; return the file, ``None`` if that failed, which is a warning."""
    target = folder / f"step{step:08d}.rank{_find_group().rank}.json"
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.partial.json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(unfinished))
        unfinished.replace(target)
    except Exception as error:  # training goes on
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        warn_once("write", f"{target} was not written: {error}")
        return None
    return target


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
        logs = log if isinstance(log, list) else [print_text if log is None else log]
        self._targets: list[Target] = [as_target(one) for one in logs]
        self._folder, self._keep, self._limits, self._alert = folder, keep, dict(limits or {}), alert
        self._tasks: queue.SimpleQueue[tuple[_Recorded, _Group] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = f"ddp_prof/monitor/{next(_numbers)}"
        self._worst: tuple[int, int] | None = None
        self._own, self._kept = set[int](), set[int]()
        self._sent = deque[str]()

    def read(self, recorded: _Recorded) -> None:
        """Have a measurement analysed and logged; what the program may end meanwhile is looked up here."""
        if self._tasks.qsize() >= _MOST_WAITING:
            recorded.trace.unlink(missing_ok=True)
            warn_once("late", f"step {recorded.step} is not logged: analyses take longer than the steps between them")
            return
        for target in self._targets:
            if isinstance(target, MlflowTarget):
                target.find_run()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddp_prof.monitor", daemon=True)
            self._thread.start()
        self._tasks.put((recorded, _find_group()))

    def close(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(PATIENCE_S)
            self._thread = None

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._read_or_warn(*task)
            del task  # a store that is held here would outlive its process group

    def _read_or_warn(self, recorded: _Recorded, group: _Group) -> None:
        try:
            self._read(recorded, group)
        except Exception as error:  # training goes on
            warn_once("read", f"step {recorded.step} is not logged: {type(error).__name__}: {error}")

    def _read(self, recorded: _Recorded, group: _Group) -> None:
        if not self._own:
            _delete_partial(self._folder, group.rank)
        self._own.add(recorded.step)
        with tempfile.TemporaryDirectory(prefix="ddp_prof.") as scratch:
            out = Path(scratch) / "measured"
            error = _analyse(Path(scratch), "measure", str(recorded.trace), str(out))[1]
            head = {
                "rank": group.rank,
                "host": socket.gethostname(),
                "overhead_ns": recorded.overhead_ns,
                "usual_ns": recorded.usual_ns,
                "recorded_ns": recorded.recorded_ns,
                "error": error,
            }
            part = json.dumps(head).encode() + b"\n" + (out.read_bytes() if error is None else b"")
            if group.rank:
                try:
                    self._send(group, self._key(recorded.step, group.rank), part)
                finally:
                    self._delete_unkept(group)
            else:
                self._log(recorded, group, self._gather(group, recorded.step, part), Path(scratch))

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
        """Wait for what the other ranks found; those that do not come in time are left out."""
        parts, missing = [own], set(range(1, group.world) if group.store is not None else ())
        until = time.monotonic() + GATHER_S
        while missing and time.monotonic() < until:
            for rank in sorted(missing):
                key = self._key(step, rank)
                try:
                    if (part := _peek(group.store, key)) is None:
                        continue
                    parts.append(part)
                    group.store.delete_key(key)
                except RuntimeError:
                    return parts  # the store's rank has ended
                missing.discard(rank)
            if missing:
                time.sleep(_POLL_S)
        return parts

    def _log(self, recorded: _Recorded, group: _Group, parts: Sequence[bytes], scratch: Path) -> None:
        files = []
        for number, part in enumerate(parts):
            (file := scratch / f"part{number}").write_bytes(part)
            files.append(str(file))
        asked = {"step": recorded.step, "world": group.world, "limits": self._limits}
        text, error = _analyse(scratch, "merge", json.dumps(asked), *files)
        if error is not None:
            warn_once("merge", f"step {recorded.step} is not logged: {error}")
            self._keep_only(self._choose(recorded.step, None), recorded.step, group)
            return
        record = json.loads(text)
        kept = self._choose(recorded.step, record["worst_ns"] or 0)
        record["traces"] = [name for name in record["traces"] if recorded.step in kept]
        try:
            with (self._folder / LOG_NAME).open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
        except OSError as failed:
            warn_once("log", f"{self._folder / LOG_NAME} was not written: {failed}")
        self._keep_only(kept, recorded.step, group)
        for number, target in enumerate(self._targets):
            self._call(f"target {number}", target, record)
        if record["failed"]:
            self._call("alert", self._alert or _warn_of_limits, record)

    @staticmethod
    def _call(which: str, function: Callable[[dict[str, Any]], object], record: dict[str, Any]) -> None:
        try:
            function(record)
        except Exception as error:
            warn_once(which, f"step {record['step']} was not passed on: {type(error).__name__}: {error}")

    def _choose(self, step: int, cost_ns: int | None) -> set[int]:
        """Return the measurements whose traces stay; ``cost_ns`` is of ``step``, ``None`` if that was not analysed."""
        if cost_ns is not None and (self._worst is None or cost_ns > self._worst[1]):
            self._worst = step, cost_ns
        if self._keep == "all":
            return {*self._own}
        worst = {self._worst[0]} if self._worst else set()
        return {step, *worst} if self._keep == "worst and last" else set()

    def _keep_only(self, kept: set[int], step: int, group: _Group) -> None:
        """Delete what does not stay, of all ranks whose disk this is, and tell the others."""
        if group.store is not None:
            with suppress(RuntimeError):
                group.store.set(f"{self._name}/{_KEPT}", json.dumps([step, sorted(kept)]))
        self._delete(step, kept, "*")

    def _delete_unkept(self, group: _Group) -> None:
        """Delete traces of this rank as rank 0 decided, which may not see this rank's disk, or may decide no more."""
        with suppress(RuntimeError):
            if group.store is not None and (said := _peek(group.store, f"{self._name}/{_KEPT}")):
                last, kept = json.loads(said)
                self._kept = set(kept)
                self._delete(last, self._kept, str(group.rank))
        undecided = sorted(self._own - self._kept)
        if self._keep != "all" and len(undecided) > _MOST_SENT:
            self._delete(undecided[-_MOST_SENT - 1], self._kept, str(group.rank))

    def _delete(self, last: int, kept: set[int], rank: str) -> None:
        """Delete traces of measurements up to ``last`` that are not kept."""
        for step in [own for own in self._own if own <= last and own not in kept]:
            for trace in self._folder.glob(f"step{step:08d}.rank{rank}.json*"):
                with suppress(OSError):
                    trace.unlink()
            self._own.discard(step)


def _analyse(scratch: Path, *arguments: str) -> tuple[str, str | None]:
    """Run the analysis as a process of its own; return what it prints, and why it failed.

    It runs in an empty folder and without the job's PYTHONPATH: there modules of the job cannot hide Python's own.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDP_PROF_")}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    try:
        done = subprocess.run(  # noqa: S603
            [python, "-m", "ddp_prof.monitor", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environ,
            cwd=scratch,
            timeout=ANALYSIS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"its analysis took longer than {ANALYSIS_S:.0f} s"
    except OSError as error:
        return "", f"its analysis did not start: {error}"
    if done.returncode < 0:
        return "", f"its analysis was ended by signal {-done.returncode}"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.stdout, None


_warned = set[str]()


def warn_once(kind: str, text: str) -> None:
    """Log a warning, the first time that something of this kind happens."""
    if kind not in _warned:
        _warned.add(kind)
        _LOG.warning("ddp-prof monitor: %s", text)


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
