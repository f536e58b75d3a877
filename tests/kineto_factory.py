"""The captures of :mod:`tests.nsys_factory` as torch.profiler would have written them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.nsys_factory import Capture, Kernel, Range

BASE_NS = 1_700_000_000_000_000_000
COPY_NAMES = {
    1: "Memcpy HtoD (Pinned -> Device)",
    8: "Memcpy DtoD (Device -> Device)",
    10: "Memcpy PtoP (Device -> Device)",
}
CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}


def write_kineto(
    path: Path, capture: Capture, *, rank: int = 0, world: int = 2, others: Sequence[dict[str, Any]] = ()
) -> Path:
    """Write a capture without graphs that were recorded whole; ``others`` are events besides.

    A range without an end lasts until the recording ended. Of several processes, each has the name of its rank before
    its number, as tools write it that put files together. What begins at 0 lost its times.
    """
    processes = sorted({one.process for one in (*capture.kernels, *capture.ranges)})
    names = {process: f"[TP{place:02}] {process}" for place, process in enumerate(processes)}
    pids: dict[int, int | str] = dict(names) if len(processes) > 1 else {process: process for process in processes}
    ends = [one.end for one in (*capture.kernels, *capture.ranges) if one.end is not None]
    window_end = max(ends, default=0) + 50_000
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": pids[process], "tid": thread, "ts": 0, "args": {"name": name}}
        for (process, thread), name in capture.threads.items()
    ]
    events += [_range(one, pids[one.process], window_end) for one in capture.ranges]
    number: dict[int, int] = {}
    for kernel in capture.kernels:
        number[kernel.process] = number.get(kernel.process, 0) + 1
        correlation = 100 + number[kernel.process] if kernel.number is None else kernel.number
        events += _kernel(kernel, correlation, pids[kernel.process])
    if any(one.end is None for one in capture.ranges):
        events.append({"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": window_end / 1000})
    document = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE_NS,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
        "traceEvents": [*events, *others],
    }
    path.write_text(json.dumps(document))
    return path


def event(
    category: str, name: str, start_ns: int, end_ns: int, pid: int | str, tid: int, **about: Any
) -> dict[str, Any]:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": about}


def _range(one: Range, pid: int | str, window_end: int) -> dict[str, Any]:
    return event("user_annotation", one.name, one.start, window_end if one.end is None else one.end, pid, one.thread)


def _kernel(kernel: Kernel, correlation: int, pid: int | str) -> list[dict[str, Any]]:
    found = []
    if kernel.launch is not None:
        is_usual = kernel.call == "cudaLaunchKernel"
        call = "cudaMemcpyAsync" if is_usual and kernel.kind != "kernel" else kernel.call
        end = kernel.launch + 2_000 if kernel.launch else 0
        found.append(event("cuda_runtime", call, kernel.launch, end, pid, kernel.thread, correlation=correlation))
    if not kernel.is_lost:
        on = pid.partition(" ")[0] + f" {kernel.device}" if isinstance(pid, str) else kernel.device
        name = COPY_NAMES[kernel.copy_kind] if kernel.kind == "memcpy" else kernel.name
        about = {"correlation": correlation, "device": kernel.device, "stream": kernel.stream}
        if kernel.kind == "kernel":
            about |= {"grid": [kernel.grid, 1, 1], "block": [128, 1, 1]}
        category = CATEGORIES[kernel.kind]
        found.append(event(category, name, kernel.start, kernel.end, on, kernel.stream, **about))
    return found
