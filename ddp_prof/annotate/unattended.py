"""Marks and records an unchanged program in each of its ranks, for ``ddp-prof capture``.

``steps`` says what a step is.
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
from torch.profiler import profile

from ddp_prof.annotate import ranges
from ddp_prof.annotate.hooks import Instrumented
from ddp_prof.annotate.monitor import Monitor
from ddp_prof.annotate.recording import (
    RECORDS_ALL_THREADS,
    call_at_exit,
    call_before_profilers,
    export_trace,
    make_profile,
    wrap_with_call,
)
from ddp_prof.annotate.steps import CountedSteps

TRACE_VARIABLE = "DDP_PROF_TRACE"
"""Path of torch.profiler's files without rank and suffix; not set if nsys records."""
STEPS_VARIABLE = "DDP_PROF_STEPS"
"""The steps to record, ``10:20``; not set: all."""
EVERY_VARIABLE = "DDP_PROF_EVERY"
"""Steps between two measurements of a monitor, and how many it records, ``1000:3``; not set: one recording."""
FOLDER_VARIABLE = "DDP_PROF_MONITOR"
"""Folder of the monitor."""
SHARED_VARIABLE = "DDP_PROF_SHARED"
"""Set if one nsys records all ranks of a machine."""
MEETING = timedelta(seconds=30)
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def start() -> None:
    """Mark all training from now on; call it once per process."""
    if EVERY_VARIABLE in os.environ:
        _monitor(*map(int, os.environ[EVERY_VARIABLE].split(":")))
        return
    Instrumented(None, ())
    recording = _Recording(os.environ.get(TRACE_VARIABLE), os.environ.get(STEPS_VARIABLE))
    call_before_profilers(recording.stop_for_own_profiler)
    _call_at_training(recording.begin)
    ranges.at_own_step = recording.begin_own_step


def _call_at_training(begin: Callable[[], None]) -> None:
    """Call ``begin`` at each sign of training."""
    wrap_with_call(torch.autograd, "backward", begin)
    wrap_with_call(torch.nn.parallel.DistributedDataParallel, "__init__", begin)
    with suppress(ImportError):  # torch without FSDP2
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        wrap_with_call(FSDPParamGroup, "__init__", begin)


def _monitor(every: int, steps: int) -> None:
    """Measure a few steps now and then, instead of recording; nothing is marked in between."""
    started: list[Monitor] = []

    def at_step(index: int) -> None:
        if not started:  # at the first sign of training: other processes of the job need none
            started.append(Monitor(every, steps, folder=os.environ[FOLDER_VARIABLE], keep="worst and last"))
        started[0].at_step(index)

    _call_at_training(CountedSteps(at_step, marks=False).begin)


class _Kept:
    """Is deleted when the thread that stores it in a ``threading.local`` ends."""


class _Recording:
    """Records the chosen steps."""

    def __init__(self, trace: str | None, steps: str | None) -> None:
        first, _, end = (steps or "0:").partition(":")
        self._first, self._end = int(first), int(end) if end else None
        self._trace, self._process = trace, 0
        self._steps = CountedSteps(self._at_step)
        self._rank = 0
        self._profile: profile | None = None
        self._is_free = True
        self._thread, self._of_thread = 0, threading.local()

    def stop_for_own_profiler(self) -> None:
        """Stop recording because the program starts its own torch.profiler: there can be only one."""
        if self._trace is not None and self._is_free:
            self._is_free = False
            if self._profile is not None:
                self._profile.stop()
                self._profile = None
            sys.stderr.write("ddp-prof: the program records by torch.profiler itself: read its files, or use nsys\n")

    def begin(self) -> None:
        """Begin step 0, at the first sign of training."""
        if self._steps.index < 0:
            self._process = os.getpid()
            call_at_exit(self.stop)
            if self._first > 0:
                ranges.enable(False)
            self._steps.begin()

    def begin_own_step(self) -> None:
        """Close the range of the counted step before a step that the program marks."""
        self.begin()
        self._steps.close()

    def _at_step(self, index: int) -> None:
        """Start or stop to record, between two steps."""
        self._rank = _find_rank(self._rank)  # at the end the process group may be gone
        if index == self._first:
            self._start()
        if index == self._end:
            self.stop()

    def _start(self) -> None:
        ranges.enable()
        if self._trace is not None and self._is_free:
            self._is_free = False
            self._profile = make_profile(on_gpu=torch.cuda.is_available())
            self._profile.start()
            self._is_free, self._thread = True, threading.get_ident()
            if threading.current_thread() is not threading.main_thread():  # stop when the thread ends
                self._of_thread.kept = kept = _Kept()
                weakref.finalize(kept, self.stop).atexit = False
        elif self._nsys_waits():
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch's omission

    def _nsys_waits(self) -> bool:
        """Whether nsys records only between ``torch.cuda.profiler.start`` and ``stop``."""
        return self._trace is None and bool(os.environ.get(STEPS_VARIABLE)) and torch.cuda.is_available()

    def stop(self) -> None:
        recorded, self._profile = self._profile, None
        if os.getpid() != self._process:  # a fork, for example a worker of a data loader
            return
        if recorded is not None and not RECORDS_ALL_THREADS and self._thread != threading.get_ident():
            sys.stderr.write("ddp-prof: the thread that trains did not end, so the trace of this rank is not written\n")
            recorded = None
        self._steps.mark_unfinished()
        if recorded is not None:
            recorded.stop()
            target = Path(f"{self._trace}.rank{self._rank}.json.gz")
            try:
                export_trace(recorded, target, is_compressed=True)
            except OSError as error:
                sys.stderr.write(f"ddp-prof: {target} could not be written: {error}\n")
        elif self._nsys_waits():
            torch.cuda.synchronize()
            is_shared = bool(os.environ.get(SHARED_VARIABLE))
            if is_shared and self._steps.index == self._end:
                _meet()
            if not is_shared or self._steps.index == self._end:  # else nsys records until the last rank has ended
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # torch's omission
        if self._steps.index == self._end:
            ranges.enable(False)


def _meet() -> None:
    """Wait for all ranks that one nsys records: the first rank that stops may end the recording for all."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    world = os.environ.get("LOCAL_WORLD_SIZE", "")
    here = int(world) if world.isdecimal() else dist.get_world_size()
    name = f"ddp_prof/done/{os.environ.get('GROUP_RANK', '0')}"
    store = dist.distributed_c10d._get_default_store()  # a collective would be recorded
    with suppress(RuntimeError):  # a rank does not come in time, or the store's rank has ended
        if store.add(f"{name}/count", 1) == here:
            store.set(name, "")
        store.wait([name], MEETING)


def _find_rank(default: int) -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdecimal()), default)
