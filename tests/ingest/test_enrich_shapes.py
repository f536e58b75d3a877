"""Launches: shapes of kernels, names and ends of calls, read on request, named alike from every format."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, Trace
from tests.nsys_factory import Capture, Kernel, write_capture

CAPTURE = Capture(
    kernels=[
        Kernel("gemm", 1000, 2000, 500, 1, grid=7),
        Kernel("copy", 2000, 2100, 600, 1, kind="memcpy"),
        Kernel("gemm", 3000, 4000, 700, 1, grid=9),
        Kernel("norm", 4000, 5000, 800, 1, grid=7),
    ]
)


def shapes_of(trace: Trace) -> list[str | None]:
    assert trace.shape_id is not None
    return [None if item == UNKNOWN else trace.names[item] for item in trace.shape_id.tolist()]


def test_shapes_of_an_export(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", CAPTURE)
    trace = load_trace(path, ReadOptions(with_launches=True))
    seven, nine = "grid 7x1x1 block 128x1x1", "grid 9x1x1 block 128x1x1"
    assert shapes_of(trace) == [seven, nine, seven, None], "kernels come first, then the copy"
    plain = load_trace(path)
    assert plain.shape_id is None
    assert trace.names[: len(plain.names)] == plain.names


def test_shapes_of_kineto_and_what_is_no_shape(tmp_path: Path) -> None:
    shapes = [{"grid": [7, 1, 1], "block": [128, 1, 1]}, {"grid": [7, 1], "block": "wide"}, {}]
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 2, "pid": 0, "tid": 7}
    path = tmp_path / "x.json"
    path.write_text(
        json.dumps({"traceEvents": [event | {"ts": 2 * at + 1, "args": shape} for at, shape in enumerate(shapes)]})
    )
    assert shapes_of(load_trace(path, ReadOptions(with_launches=True))) == ["grid 7x1x1 block 128x1x1", None, None]


def test_an_export_without_kernels_has_no_shapes(tmp_path: Path) -> None:
    copies = Capture(kernels=[CAPTURE.kernels[1]])
    assert shapes_of(load_trace(write_capture(tmp_path / "x.sqlite", copies), ReadOptions(with_launches=True))) == [
        None
    ]


def calls_of(trace: Trace) -> list[tuple[int, int, str]]:
    assert trace.call_details is not None
    columns = (trace.calls.start_ns, trace.call_details.end_ns, trace.call_details.name_id)
    return [
        (start, end, trace.names[name]) for start, end, name in zip(*(item.tolist() for item in columns), strict=True)
    ]


def test_calls_of_an_export_have_names_and_ends(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", CAPTURE)
    starts = [500, 600, 700, 800]
    assert calls_of(load_trace(path, ReadOptions(with_launches=True))) == [
        (at, at + 5000, "cudaLaunchKernel") for at in starts
    ]
    assert load_trace(path).call_details is None


def test_calls_and_registers_of_kineto(tmp_path: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 9, "dur": 2, "pid": 0, "tid": 7,
              "args": {"registers per thread": 96, "correlation": 3}}  # fmt: skip
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 0.5, "pid": 8, "tid": 8,
            "args": {"correlation": 3}}  # fmt: skip
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"traceEvents": [kernel, call]}))
    trace = load_trace(path, ReadOptions(with_launches=True))
    assert calls_of(trace) == [(1000, 1500, "cudaLaunchKernel")]
    assert trace.registers is not None
    assert trace.registers.tolist() == [96]
    assert load_trace(path).registers is None


def test_registers_of_an_export(shared_traces: Path) -> None:
    """Against SQLite itself, on a capture by others."""
    path = shared_traces / "nsys2025_3_single_gpu_t4.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        (expected,) = database.execute("SELECT sum(registersPerThread) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    registers = load_trace(path, ReadOptions(with_launches=True)).registers
    assert registers is not None
    assert int(registers[registers != UNKNOWN].sum()) == expected
