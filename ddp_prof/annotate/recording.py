"""Makes a torch.profiler that records what the analysis needs, and writes its trace.

It also calls functions when the program starts a torch.profiler of its own, and when the process ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import gzip
import multiprocessing
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from ddp_prof.annotate.tracebacks import stands_for
from ddp_prof.errors import printable

RECORDS_ALL_THREADS = "profile_all_threads" in str(_ExperimentalConfig.__init__.__doc__)
"""Whether torch records all threads. Older releases record only the thread that starts the profiler, and crash if
another thread stops it."""
_QUIET_KINETO = "6"
"""Log level without the two lines that torch 2.13 prints for each recording; a level that is set stays."""


def make_profile(*, on_gpu: bool) -> profile:
    """Return a torch.profiler that records all threads if torch can, and the waits between streams.

    From these waits the analysis knows what stands still for communication.

    Args:
        on_gpu: Whether it records the GPU as well as the CPU.
    """
    _let_forks_end()
    _keep_results_at_exit()
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_KINETO)
    all_threads: dict[str, Any] = {"profile_all_threads": True} if RECORDS_ALL_THREADS else {}
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True, **all_threads),
    )


@cache
def _let_forks_end() -> None:
    """Let each fork of this process end without C++'s destructors, as forks of multiprocessing do.

    torch.profiler starts a thread, which a fork does not have. When a fork ends, a destructor of libkineto waits for
    that thread for ever, and with it a program that waits for its fork.
    """
    libc = ctypes.CDLL(None)
    # Functions of C, called with the exit code as first argument, the last one first. Python is gone by then.
    names = ("_exit", "fcloseall")
    if not all(hasattr(libc, name) for name in ("on_exit", *names)):  # on a Mac, for example
        return
    steps = [ctypes.cast(getattr(libc, name), ctypes.c_void_p) for name in names]

    def leave_out_destructors() -> None:
        for step in steps:
            libc.on_exit(step, None)

    os.register_at_fork(after_in_child=leave_out_destructors)


def free_results(recorded: profile) -> None:
    """Free at once what a profiler of ours has recorded, because a profiler of the program records after it."""
    if recorded.profiler is not None:
        recorded.profiler.kineto_results = None


@cache
def _keep_results_at_exit() -> None:
    atexit.register(keep_results)


def keep_results() -> None:
    """Let the results of all profilers of this process live on until it has ended.

    Where two have recorded, one of ours and one of the program, torch may end in a segmentation fault as it frees
    results while Python ends.
    """
    for one in gc.get_objects():
        if not issubclass(type(one), torch.autograd.profiler.profile):
            continue
        if (results := getattr(one, "kineto_results", None)) is not None:  # one that is switched off has no attribute
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(results))


def export_trace(recorded: profile, target: Path, *, is_compressed: bool) -> None:
    """Write the trace that a torch.profiler recorded to the file ``target``, compressed by gzip if ``is_compressed``.

    It writes to temporary files and renames the complete one: on an error ``target`` is as before, and no temporary
    file is left.

    Raises:
        OSError: The trace was not written. torch.profiler itself raises nothing if the disk is full.
    """
    plain = target.with_name(f".{target.name.removesuffix('.gz')}.{os.getpid()}.partial.json")
    # Our compressed file, and the file to which Kineto writes before it renames it to plain.
    packed, kinetos = (plain.with_name(plain.name + suffix) for suffix in (".gz", ".tmp"))
    try:
        with _plainly_named(plain) as named:
            recorded.export_chrome_trace(named)
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


@contextmanager
def _plainly_named(file: Path) -> Iterator[str]:
    """Return a context that gives a path of ``file`` that Kineto can write to, which leaves out control characters.

    Only the folder may have such characters in its name, or bytes that are no UTF-8.
    """
    if printable(str(file)) == str(file) or not Path("/proc/self/fd").is_dir():
        yield str(file)
        return
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{file.name}"
    finally:
        os.close(folder)


def wrap_with_call(owner: Any, name: str, first: Callable[[], None]) -> None:
    """Replace the function ``owner.name`` of a module or class by a function that calls ``first()`` before it."""
    original = getattr(owner, name)

    @stands_for(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(owner, name, called)


def call_before_profilers(first: Callable[[], None]) -> None:
    """Call ``first`` from now on whenever a torch.profiler or an emitter is about to begin: only one can at a time."""
    wrap_with_call(torch.autograd.profiler.profile, "_prepare_trace", first)
    _call_before_emitters(first)


def _call_before_emitters(first: Callable[[], None]) -> None:
    """Call ``first`` from now on before ``emit_nvtx`` and ``emit_itt`` begin, unless they are disabled."""
    for emitter in (torch.autograd.profiler.emit_nvtx, torch.autograd.profiler.emit_itt):
        original: Callable[[Any], Any] = emitter.__enter__

        @stands_for(original)
        def enter(emits: Any, original: Callable[[Any], Any] = original) -> Any:
            if emits.enabled:
                first()
            return original(emits)

        setattr(emitter, "__enter__", enter)  # noqa: B010  # mypy refuses an assignment


def call_at_exit(last: Callable[[], object]) -> None:
    """Call ``last`` when the process ends; it may be called twice, and the second call must do no harm."""
    atexit.register(last)
    # A process that multiprocessing forked ends without the functions of atexit, but runs its finalizers.
    if multiprocessing.parent_process():
        Finalize(None, last, exitpriority=0)


class ProfilersOfProgram:
    """Keeps track of the torch.profilers that the program itself runs, by replacing methods of torch's profiler.

    Make one per process. A profiler in its warm-up is prepared but not enabled: torch cannot be asked for it, and ends
    the process if another profiler records meanwhile. ``emit_nvtx`` and ``emit_itt`` raise an exception while a
    profiler is enabled, so ``at_start`` is called before them, too.

    Args:
        is_own: Returns whether the profiler that is being prepared is ours and not the program's.
        at_start: Is called before a profiler of the program starts.
    """

    def __init__(self, is_own: Callable[[], bool], at_start: Callable[[], None]) -> None:
        """Replace the methods by which torch's profiler is prepared and ended, and those that emit NVTX or ITT."""
        self._active: weakref.WeakSet[Any] = weakref.WeakSet()  # the program's profilers that are prepared or record
        profiler = torch.autograd.profiler
        replaced: Any = profiler.profile
        prepare, leave = replaced._prepare_trace, replaced.__exit__  # called before warm-up or recording; at the end

        @stands_for(prepare)
        def prepared(of_program: Any, *args: Any, **kwargs: Any) -> Any:
            """Note a profiler of the program, and call ``at_start``, before it is prepared; ours is only prepared."""
            if not is_own():
                at_start()
                self._active.add(of_program)
            return prepare(of_program, *args, **kwargs)

        @stands_for(leave)
        def left(of_program: Any, *args: Any, **kwargs: Any) -> Any:
            self._active.discard(of_program)
            return leave(of_program, *args, **kwargs)

        replaced._prepare_trace, replaced.__exit__ = prepared, left
        _call_before_emitters(at_start)

    @property
    def record(self) -> bool:
        """Whether a profiler of the program is prepared or records, or any profiler is enabled."""
        return bool(self._active) or torch._C._autograd._profiler_enabled()
