"""Marks and records an unchanged program in each of its ranks, for ``ddp-prof capture``.

The environment variables below say what is recorded. Module ``steps`` says what a step is.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import profile

from ddp_prof.annotate import ranges
from ddp_prof.annotate.hooks import Instrumented
from ddp_prof.annotate.monitor import Monitor
from ddp_prof.annotate.recording import (
    RECORDS_ALL_THREADS,
    call_at_exit,
    call_before_profilers,
    export_trace,
    free_results,
    make_profile,
    wrap_with_call,
)
from ddp_prof.annotate.steps import CountedSteps
from ddp_prof.errors import printable

TRACE_VARIABLE = "DDP_PROF_TRACE"
"""Path of torch.profiler's files without rank and suffix; not set if nsys records."""
STEPS_VARIABLE = "DDP_PROF_STEPS"
"""The steps to record, for example ``10:20`` for steps 10 to 19; not set: all."""
EVERY_VARIABLE = "DDP_PROF_EVERY"
"""Steps between two measurements of a monitor, and how many steps each records: ``1000:3``; not set: one recording."""
FOLDER_VARIABLE = "DDP_PROF_MONITOR"
"""Folder of the monitor."""
CAPTURE_VARIABLE = "DDP_PROF_CAPTURE"
"""Set in all processes that ``ddp-prof capture`` starts."""
SHARED_VARIABLE = "DDP_PROF_SHARED"
"""Set if one nsys records all ranks of a machine."""
MEETING = timedelta(seconds=30)
"""How long a rank waits for the other ranks before nsys stops."""
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables in which launchers give a process its rank."""


def start() -> None:
    """Mark and record all training of this process from now on, or monitor it; call it once per process."""
    if EVERY_VARIABLE in os.environ:
        _monitor(*map(int, os.environ[EVERY_VARIABLE].split(":")))
        return
    Instrumented(None, ())
    recording = _Recording(os.environ.get(TRACE_VARIABLE), os.environ.get(STEPS_VARIABLE))
    call_before_profilers(recording.stop_for_own_profiler)
    _call_at_training(recording.begin)
    ranges.at_own_step = recording.begin_own_step


def _call_at_training(begin: Callable[[], None]) -> None:
    """Call ``begin`` at each sign of training: before a backward or a step, and when a DDP or an FSDP2 unit is made."""
    wrap_with_call(torch.autograd, "backward", begin)
    register_optimizer_step_pre_hook(lambda *_: begin())  # of a program that calls ``torch.autograd.grad``
    wrap_with_call(torch.nn.parallel.DistributedDataParallel, "__init__", begin)
    with suppress(ImportError):  # torch without FSDP2
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        wrap_with_call(FSDPParamGroup, "__init__", begin)


def _monitor(every: int, steps: int) -> None:
    """Measure ``steps`` steps in every ``every`` steps by a :class:`.Monitor`, without ranges in between."""
    started: list[Monitor] = []

    def at_step(index: int) -> None:
        if not started:  # made at the first sign of training: processes that do not train need no monitor
            started.append(Monitor(every, steps, folder=os.environ[FOLDER_VARIABLE], keep="worst and last"))
        started[0].at_step(index)

    _call_at_training(CountedSteps(at_step, marks=False).begin)


class _Kept:
    """Shows when a thread ends: an object of it in a ``threading.local`` is deleted then, which a finalizer notes."""


class _Recording:
    """Records the chosen steps by torch.profiler, or lets nsys record them.

    Args:
        trace: Value of :data:`TRACE_VARIABLE`; ``None`` if nsys records.
        steps: Value of :data:`STEPS_VARIABLE`; ``None`` for all steps.
    """

    def __init__(self, trace: str | None, steps: str | None) -> None:
        """Register the hook that counts steps; nothing is recorded before :meth:`begin`."""
        first, _, end = (steps or "0:").partition(":")  # an empty end: record until the program ends
        self._first, self._end = int(first), int(end) if end else None
        self._trace, self._process = trace, 0  # the process that trains, once it has begun
        self._steps = CountedSteps(self._at_step)
        self._rank = 0
        self._profile: profile | None = None
        self._is_free = True  # False while our profiler starts, and for good once it or the program's own has recorded
        self._thread, self._of_thread = 0, threading.local()

    def stop_for_own_profiler(self) -> None:
        """Stop recording for good because the program starts its own torch.profiler: only one can record at a time."""
        if self._trace is not None and self._is_free:
            self._is_free = False
            if self._profile is not None:
                self._profile.stop()
                free_results(self._profile)
                self._profile = None
            _tell(
                "the program starts its own torch.profiler, so ddp-prof records nothing: read the traces of the "
                "program, or capture with --profiler nsys"
            )

    def begin(self) -> None:
        """Begin step 0, at the first sign of training; later calls do nothing."""
        if self._steps.index < 0:
            self._process = os.getpid()
            if self._trace is None and _is_forked() and _find_rank(0) == 0:
                _tell(_FORKED)
            call_at_exit(self.stop)
            if self._first > 0:
                ranges.enable(False)
            self._steps.begin()

    def begin_own_step(self) -> None:
        """End the range of the counted step, because the program marks a step by itself, which begins now."""
        self.begin()
        self._steps.close()

    def _at_step(self, index: int) -> None:
        """Start recording if step ``index`` is the first one to record, stop if it is the first one after these."""
        self._rank = _find_rank(self._rank)  # at the end the process group may be gone
        if index == self._first:
            self._start()
        if index == self._end:
            self.stop()

    def _start(self) -> None:
        """Switch ranges on, and start torch.profiler or let nsys start to record."""
        ranges.enable()
        if self._trace is not None and self._is_free:
            self._is_free = False
            self._profile = make_profile(on_gpu=torch.cuda.is_available())
            self._profile.start()
            self._is_free, self._thread = True, threading.get_ident()
            # Another thread than the main one stops the profiler at its end: when its _Kept is deleted, stop is called.
            if threading.current_thread() is not threading.main_thread():
                self._of_thread.kept = kept = _Kept()
                weakref.finalize(kept, self.stop).atexit = False
        elif self._nsys_waits():
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch's omission

    def _nsys_waits(self) -> bool:
        """Return whether nsys records only between ``torch.cuda.profiler.start`` and ``stop``."""
        return self._trace is None and bool(os.environ.get(STEPS_VARIABLE)) and torch.cuda.is_available()

    def stop(self) -> None:
        """Stop recording, and write the trace if torch.profiler recorded.

        Called after the last step that is to be recorded, and when the process ends.
        """
        if os.getpid() != self._process:  # a fork, for example a worker of a data loader
            return
        recorded, self._profile = self._profile, None
        if recorded is not None:
            self._is_free = False  # a profiler that the program starts now disturbs nothing
        if recorded is not None and not RECORDS_ALL_THREADS and self._thread != threading.get_ident():
            _tell(
                "the thread that trains did not end, so the trace of this rank is not written: give --steps, as 1:10, "
                "whose end the program reaches"
            )
            recorded = None
        self._steps.mark_unfinished()
        if recorded is not None:
            recorded.stop()
            self._write(recorded, Path(f"{self._trace}.rank{self._rank}.json.gz"))
        elif self._nsys_waits():
            torch.cuda.synchronize()
            # One nsys for all ranks stops only after they have met; ranks that end early let it record the others.
            is_shared = bool(os.environ.get(SHARED_VARIABLE))
            if is_shared and self._steps.index == self._end:
                _meet()
            if not is_shared or self._steps.index == self._end:  # else nsys records until the last rank has ended
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # torch's omission
        if self._steps.index == self._end:
            ranges.enable(False)

    def _write(self, recorded: profile, target: Path) -> None:
        """Write the trace that was recorded to the file ``target``.

        A program may start several processes of one rank, one after another. So a process without a complete step, such
        as an evaluation after the training, leaves the trace of another one as it is.
        """
        is_taken = target.exists()
        is_kept = is_taken and self._steps.index <= self._first
        if is_kept or (is_taken and CAPTURE_VARIABLE in os.environ):  # of this capture, which removed older ones
            outcome = "stays, as this process made no step" if is_kept else "is replaced by that of this process"
            whose = f"an earlier process of rank {self._rank}"
            _tell(f"{target} of {whose} {outcome}: of several programs, capture each by itself")
        if is_kept:
            return
        try:
            export_trace(recorded, target, is_compressed=True)
        except OSError as error:
            _tell(f"{target} could not be written: {error}")


_FORKED = (
    "this process is a fork, and nsys records no fork unless it is started with --trace-fork-before-exec=true, which "
    "may crash or block it: let multiprocessing spawn the ranks, or capture with --profiler torch"
)


def _is_forked() -> bool:
    """Return whether this process was forked after Python started, and did not start a program (exec) since then."""
    return getattr(sys.modules.get("sitecustomize"), "PROCESS", os.getpid()) != os.getpid()


def _tell(text: str) -> None:
    """Write a line to stderr. A program that has closed it, or whose reader is gone, goes on without the line."""
    with suppress(AttributeError, OSError, ValueError):  # no stderr at all, a broken pipe, a closed file
        sys.stderr.write(f"ddp-prof: {printable(text)}\n")


def _meet() -> None:
    """Wait until all ranks of this machine have recorded their last step, for :data:`MEETING` at most.

    One nsys records them all, and the first rank that stops it may end the recording for all.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    world = os.environ.get("LOCAL_WORLD_SIZE", "")
    here = int(world) if world.isdecimal() else dist.get_world_size()
    name = f"ddp_prof/done/{os.environ.get('GROUP_RANK', '0')}"
    store = dist.distributed_c10d._get_default_store()  # a collective would be recorded
    with suppress(RuntimeError):  # a rank does not come in time, or the store's rank has ended
        if store.add(f"{name}/count", 1) == here:  # this rank is the last one: it frees all
            store.set(name, "")
        store.wait([name], MEETING)


def _find_rank(default: int) -> int:
    """Return the rank of this process: from the process group, else from the launcher's variables, else ``default``."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdecimal()), default)
