"""Launch shapes of kernels: read on request, named alike from every format, unknown where they were not noted."""

from __future__ import annotations

import json
from pathlib import Path

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
    trace = load_trace(path, with_shapes=True)
    seven, nine = "grid 7x1x1 block 128x1x1", "grid 9x1x1 block 128x1x1"
    assert shapes_of(trace) == [seven, nine, seven, None], "kernels come first, then the copy"
    plain = load_trace(path)
    assert plain.shape_id is None
    assert trace.names[: len(plain.names)] == plain.names


def test_shapes_of_kineto_and_what_is_no_shape(tmp_path: Path) -> None:
    shapes = [{"grid": [7, 1, 1], "block": [128, 1, 1]}, {"grid": [7, 1], "block": "wide"}, {}]
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"traceEvents": [event | {"args": shape} for shape in shapes]}))
    assert shapes_of(load_trace(path, with_shapes=True)) == ["grid 7x1x1 block 128x1x1", None, None]


def test_an_export_without_kernels_has_no_shapes(tmp_path: Path) -> None:
    copies = Capture(kernels=[CAPTURE.kernels[1]])
    assert shapes_of(load_trace(write_capture(tmp_path / "x.sqlite", copies), with_shapes=True)) == [None]
