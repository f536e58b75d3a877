"""Traces whose timelines tests open, in a page or without one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddp_prof.present.timeline.model import Source
from ddp_prof.trace import UNKNOWN, Activities, CallDetails, Calls, Category, Kind, Trace
from tests.drawing import PID, column, draw_trace, table
from tests.measuring import source_of

KERNELS = 30_000
SHAPES = ("grid 7x1x1 block 128x1x1", "grid 24x1x1 block 640x1x1")


def gpu_trace() -> Trace:
    """A step whose backward autograd launches: ``c`` and the all-reduce ``A``, the half of which is exposed."""
    drawn = draw_trace(
        ranges={
            "step|index=0": "####################",
            "forward": ".###................",
            "optimizer": "...............#....",
            "inner": "..#.................",
            "load data": "....##..............",
            "all_reduce|bucket=3|bytes=64|params=1": "......##########....",
        },
        launches={"main": ".ab............d....", "pt_autograd_0": ".....cA............."},
        streams={7: "..aaabbbcccc......dd", 9: "........AAAAAAAA...."},
        ranks={4242: 0},
    )
    names = (*drawn.names, "cudaLaunchKernel", "cudaGraphLaunch", *SHAPES)
    calls = len(drawn.calls)
    kernels = len(drawn.activities)
    return replace(
        drawn,
        names=names,
        call_details=CallDetails(drawn.calls.start_ns + 1, column([names.index("cudaLaunchKernel")] * calls)),
        shape_id=column([names.index(SHAPES[at == kernels - 1]) for at in range(kernels)]),
        registers=column([96] * kernels),
    )


def steps_of(*lengths: int) -> Trace:
    """Steps of so many microseconds, each with a kernel from its start to its end."""
    ranges, streams, launches, at = [], "", "", 0
    for index, length in enumerate(lengths):
        ranges.append((f"step|index={index}", "." * at + "#" * length))
        streams += "abcdefgh"[index] * length
        launches += "abcdefgh"[index] + "." * (length - 1)
        at += length
    return draw_trace(ranges=ranges, launches={"main": launches}, streams={7: streams}, character_ns=1000)


def busy_run(kernels: int = KERNELS) -> Source:
    """Steps of a microsecond a kernel, on two streams; collectives beside every tenth."""
    chance = np.random.default_rng(0)
    start = 1000 * np.arange(kernels) + chance.integers(0, 300, kernels)
    length = chance.integers(100, 700, kernels)
    kinds = np.where(np.arange(kernels) % 10, Category.COMPUTE, Category.COMMUNICATION)
    drawn = draw_trace(ranges={f"step|index={index}": "." * index + "#" for index in range(10)})
    rows = [
        {"start_ns": at, "end_ns": at + ns, "process": PID, "device": 0, "lane": 7 + 2 * kind, "name_id": kind,
         "kind": Kind.KERNEL, "category": kind, "correlation": row, "bytes": UNKNOWN}
        for row, (at, ns, kind) in enumerate(zip(start.tolist(), length.tolist(), kinds.tolist(), strict=True))
    ]  # fmt: skip
    scale = 1000 * kernels // 10
    calls = [{"start_ns": at, "process": PID, "lane": PID, "correlation": row} for row, at in enumerate(start.tolist())]
    spans = replace(drawn.spans, start_ns=drawn.spans.start_ns * scale, end_ns=drawn.spans.end_ns * scale,
                    name_id=drawn.spans.name_id + 2)  # fmt: skip
    trace = replace(drawn, names=("gemm", "ncclDevKernel", *drawn.names), spans=spans,
                    activities=table(Activities, rows), calls=table(Calls, calls),
                    launching_calls=None)  # fmt: skip
    return source_of("busy", trace)
