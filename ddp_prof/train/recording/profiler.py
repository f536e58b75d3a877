"""What is captured: the window of time that a profiler records, opened and closed on all ranks together."""

from __future__ import annotations

import gzip
import json
import os
import threading
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_prof.ddp import annotate
from ddp_prof.whole_file import written_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ddp_prof.ddp.annotate import Recorded

IN_FLIGHT_LANE = 10_000_000
"""Thread ids of the lanes that hold start/end ranges in Kineto JSON: above any that Linux gives."""


class CaptureWindow(NamedTuple):
    """What is recorded.

    Attributes:
        recording: Put round it.
        includes_warmup: Whether everything is recorded anyway, so that the warm-up steps belong inside.
    """

    recording: AbstractContextManager[None]
    includes_warmup: bool = False


def choose_window(device: torch.device, kineto: Path | None, rank: int, timeout_s: float) -> CaptureWindow:
    """What fits the device and the options; nothing is to be done where a profiler records the whole process, or none.

    Every rank must enter it, and then waits for the others for ``timeout_s`` seconds.
    """
    if kineto is not None:
        return CaptureWindow(_kineto(rank_path(kineto, rank), GlooBarrier(device, timeout_s)))
    if device.type == "cuda":
        return CaptureWindow(_cuda_profiler(GlooBarrier(device, timeout_s)))
    return CaptureWindow(nullcontext(), includes_warmup=True)


class GlooBarrier:
    """Lets all ranks come to the same point, with their device idle.

    Through gloo, whatever the backend: NCCL's barrier is an all-reduce, which would be recorded with the others.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.device = device

    def __call__(self) -> None:
        """Wait for all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self._group)


@contextmanager
def _cuda_profiler(meet: GlooBarrier) -> Iterator[None]:
    """``cudaProfilerStart`` to ``cudaProfilerStop``, which ``nsys --capture-range=cudaProfilerApi`` waits for.

    The ranks meet on both sides: the first to stop may end the recording for all. After a failure they do not: a peer
    may be gone, and would be waited for.
    """
    meet()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch's omission
    meet()
    yield
    meet()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # torch's omission
    meet()


@contextmanager
def _kineto(path: Path, meet: GlooBarrier) -> Iterator[None]:
    """``torch.profiler``, written as Kineto JSON: one file a rank, our ranges included; none after a failure."""
    ranges, on_gpu = KinetoRanges(), meet.device.type == "cuda"
    recorded = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        # Stream waits with the records that they are for: what blocks is told by them.
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
    )
    meet()
    with recorded, annotate.listening(ranges):
        meet()
        yield
    write_kineto(recorded, [range_ for range_ in ranges.ranges if range_.is_start_end], path)


class KinetoRanges(annotate.Recorder):
    """Hands nested ranges to torch's profiler and keeps the others, which it cannot end on another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._local = threading.local()

    def push(self, text: str) -> None:
        """See :class:`annotate.Sink`."""
        function = ExitStack()
        function.enter_context(record_function(text))
        self._functions().append(function)

    def pop(self) -> None:
        """See :class:`annotate.Sink`."""
        self._functions().pop().close()

    def _functions(self) -> list[ExitStack]:
        if not hasattr(self._local, "functions"):
            self._local.functions = []
        functions: list[ExitStack] = self._local.functions
        return functions


def rank_path(path: Path, rank: int) -> Path:
    """Where a rank writes: ``naive.json.gz`` becomes ``naive.rank0.json.gz``."""
    suffix = ".json.gz" if path.name.endswith(".json.gz") else ".json"
    return path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")


def write_kineto(recorded: profile, crossing: Sequence[Recorded], path: Path) -> None:
    """Export the profile with the ranges that cross threads added; the file is there whole or not at all."""
    with written_whole(path) as partial:
        recorded.export_chrome_trace(str(partial))
        document = json.loads(partial.read_bytes())
        document["traceEvents"] += in_flight_events(crossing, document.get("baseTimeNanoseconds", 0), os.getpid())
        text = json.dumps(document, separators=(",", ":")).encode()
        partial.write_bytes(gzip.compress(text, 6) if path.name.endswith(".gz") else text)


def in_flight_events(crossing: Sequence[Recorded], base_ns: int, process: int) -> list[dict[str, Any]]:
    """The ranges as complete events, in lanes of their own in which none overlaps another; thread as an argument."""
    events: list[dict[str, Any]] = []
    lane_ends: list[int] = []
    for span in sorted(crossing, key=lambda item: item.start_ns):
        lane = next((index for index, end_ns in enumerate(lane_ends) if end_ns <= span.start_ns), len(lane_ends))
        lane_ends[lane : lane + 1] = [span.end_ns]
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": span.text,
                "pid": process,
                "tid": IN_FLIGHT_LANE + lane,
                # Three decimals of a double are exact for the range of some months in which Kineto counts.
                "ts": (span.start_ns - base_ns) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"thread": span.thread},
            }
        )
    names = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": IN_FLIGHT_LANE + lane, "args": {"name": "in flight"}}
        for lane in range(len(lane_ends))
    ]
    return names + events
