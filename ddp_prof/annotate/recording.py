"""A torch.profiler with what the analysis needs, and calls that tell when a program starts one of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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
