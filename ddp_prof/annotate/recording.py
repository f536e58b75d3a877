"""A torch.profiler with what the analysis needs, and its file; what is called when a program starts one, or ends."""

from __future__ import annotations

import atexit
import gzip
import multiprocessing
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

RECORDS_ALL_THREADS = "profile_all_threads" in str(_ExperimentalConfig.__init__.__doc__)
"""Older releases of torch record only the thread that starts the profiler, and crash if another thread stops it."""


def make_profile(*, on_gpu: bool) -> profile:
    """Return a torch.profiler of all threads that also records stream waits, from which analysis knows what blocks."""
    all_threads: dict[str, Any] = {"profile_all_threads": True} if RECORDS_ALL_THREADS else {}
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True, **all_threads),
    )


def export_trace(recorded: profile, target: Path, *, is_compressed: bool) -> None:
    """Write what a torch.profiler recorded; ``target`` exists in whole or as it was, and no part of it is left.

    Raises:
        OSError: It was not written; torch.profiler itself says nothing to a program whose disk is full.
    """
    plain = target.with_name(f".{target.name.removesuffix('.gz')}.{os.getpid()}.partial.json")
    packed, kinetos = (plain.with_name(plain.name + suffix) for suffix in (".gz", ".tmp"))
    try:
        recorded.export_chrome_trace(str(plain))
        if not plain.exists():
            free_mb = shutil.disk_usage(target.parent).free // 10**6
            raise OSError(f"torch.profiler left no file there: is the disk full? ({free_mb} MB are free)")
        if is_compressed:
            with plain.open("rb") as read, gzip.open(packed, "wb", compresslevel=6) as written:
                shutil.copyfileobj(read, written)
        (packed if is_compressed else plain).replace(target)
    finally:
        for left in (plain, packed, kinetos):
            with suppress(OSError):
                left.unlink(missing_ok=True)


def wrap_with_call(owner: Any, name: str, first: Callable[[], None]) -> None:
    """Replace a function of a module or class by one that calls ``first`` before it."""
    original = getattr(owner, name)

    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(owner, name, called)


def call_before_profilers(first: Callable[[], None]) -> None:
    """Call ``first`` whenever a torch.profiler is about to record: there can be only one."""
    wrap_with_call(torch.autograd.profiler.profile, "_prepare_trace", first)


def call_at_exit(last: Callable[[], object]) -> None:
    """Call ``last`` when the process ends; it must allow to be called twice."""
    atexit.register(last)
    # A process that multiprocessing forked ends without the functions of atexit, but runs its finalizers.
    if multiprocessing.parent_process():
        Finalize(None, last, exitpriority=0)


class ProfilersOfProgram:
    """The torch.profilers that the program has started; there is one of these per process, from then on.

    One in its warm-up is prepared but not enabled: torch does not tell of it, and ends the process if another profiler
    records meanwhile. ``emit_nvtx`` and ``emit_itt`` raise an exception while a profiler is enabled.

    Args:
        is_own: Whether a profiler that is being prepared is not the program's.
        at_start: Is called before one of the program's starts.
    """

    def __init__(self, is_own: Callable[[], bool], at_start: Callable[[], None]) -> None:
        self._active: weakref.WeakSet[Any] = weakref.WeakSet()
        profiler = torch.autograd.profiler
        replaced: Any = profiler.profile
        prepare, leave = replaced._prepare_trace, replaced.__exit__

        @wraps(prepare)
        def prepared(of_program: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_own():
                at_start()
                self._active.add(of_program)
            return prepare(of_program, *args, **kwargs)

        @wraps(leave)
        def left(of_program: Any, *args: Any, **kwargs: Any) -> Any:
            self._active.discard(of_program)
            return leave(of_program, *args, **kwargs)

        replaced._prepare_trace, replaced.__exit__ = prepared, left
        for emitter in (profiler.emit_nvtx, profiler.emit_itt):
            wrap_with_call(emitter, "__enter__", at_start)

    @property
    def record(self) -> bool:
        """Whether one is prepared or records."""
        return bool(self._active) or torch._C._autograd._profiler_enabled()
