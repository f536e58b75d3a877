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

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import profile

from ddp_prof import range_names
from ddp_prof.annotate import ranges
from ddp_prof.annotate.kept_traces import Keep, name_of_trace
from ddp_prof.annotate.monitor_format import first_step
from ddp_prof.annotate.monitor_reader import NOT_LOGGED, NOT_MEASURED, Reader, RecordedSteps, find_group, warn_of_step
from ddp_prof.annotate.recording import (
    RECORDS_ALL_THREADS,
    ProfilersOfProgram,
    call_at_exit,
    export_trace,
    make_profile,
)

_OWN_PROFILER = "the program runs its own torch.profiler, which has priority"
_OTHER_MONITOR = "another monitor of this process measures at this step"


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
        alert: Is called with the record if a limit is not met or cannot be judged; default: a warning in Python's
            logging.
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
        # It lives on where the program forgets it, as at the end of a function: measurements are still to be logged.
        call_at_exit(self._close_at_exit)

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
            warn_of_step("step", self._measured, f"{NOT_MEASURED}: {why}")
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

    def _close_at_exit(self) -> None:
        """Close the monitor at the end of the process, if this process, not a parent, made it."""
        if os.getpid() == self._process:
            self.close()

    def _is_due(self, step: int) -> bool:
        is_due = step == self._first or (step > self._first and step % self._every == 0)
        return is_due and not self._is_stuck

    def _begin(self) -> None:
        """Start the profiler for a measurement that begins with the current step; if it does not start, warn."""
        self._measured = self._step
        # Of two profilers in one process one ends by a segmentation fault.
        of_other = any(one._profile is not None for one in list(_monitors))
        if of_other or _watch_profilers().record:
            why = _OTHER_MONITOR if of_other else _OWN_PROFILER
            warn_of_step("profiler", self._step, f"{NOT_MEASURED}: {why}")
            self._reader.fail(self._step, why)
            return
        before_ns = time.perf_counter_ns()
        self._starts = True  # so that our own profiler is not taken for one of the program's
        try:
            started = make_profile(on_gpu=torch.cuda.is_available())
            started.start()
        except Exception as error:
            why = f"torch.profiler did not start: {type(error).__name__}: {error}"
            warn_of_step("start", self._step, f"{NOT_MEASURED}: {why}")
            self._reader.fail(self._step, why)
            return
        finally:
            self._starts = False
        self._recording_thread = threading.get_ident()
        self._profile, self._end, self._recorded_ns = started, self._step + self._steps + 1, []  # 1 for warm-up
        ranges.warms_up = ranges.steps_are_marked
        ranges.monitor_marks_steps = not ranges.steps_are_marked
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
        ranges.warms_up = ranges.monitor_marks_steps = False
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
            warn_of_step("dropped", self._measured, f"{NOT_MEASURED}: {_OWN_PROFILER}")
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
        self._reader.read(RecordedSteps(self._measured, trace, self._overhead_ns, usual_ns, recorded_ns))


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
            self._reader.read(RecordedSteps(step, trace, time.perf_counter_ns() - before_ns, None, ()))
        except Exception as error:  # training goes on
            warn_of_step("step", step, f"{NOT_LOGGED}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Wait until all is logged."""
        self._reader.close()


def export(recorded: Any, folder: Path, step: int) -> Path:
    """Write the trace of a torch.profiler into ``folder`` and return the file; ``step`` is the first recorded step.

    Raises:
        OSError: The trace was not written; no part of a file is left.
    """
    target = folder / name_of_trace(step, find_group().rank)
    folder.mkdir(parents=True, exist_ok=True)
    export_trace(recorded, target, is_compressed=False)
    return target


def warn_of_export(error: Exception, folder: Path, step: int) -> str:
    """Log a warning that the trace of a measurement was not written; return the text."""
    why = f"{folder / name_of_trace(step, find_group().rank)} was not written: {error}"
    warn_of_step("write", step, f"{NOT_MEASURED}: {why}")
    return why


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
