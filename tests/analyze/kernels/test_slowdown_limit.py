"""What communication can cost kernels at most, told without the launch shapes of all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.core.rank_events import find_rank_events
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.kernels.contention import (
    SlowdownLimit,
    limit_contention_ns,
    limit_slowdown,
    measure_contention,
    sample_kernels,
)
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.ingest.nsys_export import read_all_shapes
from ddp_prof.runs import load_runs, report
from ddp_prof.runs.run import DOCTOR
from tests.nsys_factory import Capture, Kernel, Range, write_capture

STEPS, KERNELS = 8, 12


def capture(silent_steps: tuple[int, ...] = (), beside_ns: int = 1300) -> Capture:
    """Twelve kernels a step of two names and two shapes; a collective is beside the first, or the last, six of them.

    So each kernel runs beside communication in one half of the steps, and alone in the other.
    """
    found = Capture(threads={(100, 100): "python3", (100, 131): "pt_autograd_0"})
    for step in range(STEPS):
        at = begin = step * 100_000 + 1000
        for position in range(KERNELS):
            is_beside = (position < KERNELS // 2) == (step % 2 == 0) and step not in silent_steps
            length = beside_ns if is_beside else 1000
            name, grid = f"gemm{position % 2}", 7 + position % 3
            found.kernels.append(Kernel(name, at, at + length, begin + position, 131, grid=grid))
            if is_beside and position % (KERNELS // 2) == 0:
                comm = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at, at + 6 * beside_ns, begin + 50, 131)
                comm.stream = 9
                found.kernels.append(comm)
            at += length
        found.ranges.append(Range(f"step_{step}", begin - 10, begin + 50_000, 100))
    return found


def limit_of(path: Path, kernels: int) -> SlowdownLimit:
    (rank,) = find_rank_events(load_trace(path, ReadOptions(with_shapes=kernels)))
    return limit_slowdown(rank)


def test_the_limit_is_not_below_the_figure(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture())
    (rank,) = find_rank_events(load_trace(path, ReadOptions(with_launches=True)))
    figure = measure_contention([sample_kernels(rank)]).contention_ns
    assert figure == 6 * 300
    limit = limit_of(path, 2 * (KERNELS + 1) + 3)
    assert limit.compared == KERNELS, "of the two steps whose shapes are all known, not of the third"
    assert limit_contention_ns([limit]) in (figure, figure + 1)
    assert limit_contention_ns([limit, limit]) in (figure, figure + 1), "of a step of a rank"


def test_nothing_is_said_where_contention_may_have_no_figure(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture())
    assert limit_contention_ns([limit_of(path, KERNELS)]) is None, "no step whose shapes are all known"
    silent = write_capture(tmp_path / "silent.sqlite", capture(silent_steps=(5,)))
    assert limit_contention_ns([limit_of(silent, 60)]) is None, "a step without communication may differ otherwise"
    assert limit_contention_ns([]) is None


@pytest.mark.parametrize("kernels", [30, 60])
def test_shapes_of_others_are_read_later(tmp_path: Path, kernels: int) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture())
    whole, part = load_trace(path, ReadOptions(with_launches=True)), load_trace(path, ReadOptions(with_shapes=kernels))
    assert (part.shapes_known, part.knows_shapes, whole.knows_shapes) == (kernels, False, True)
    assert part.registers is None
    assert part.call_details is None
    read = read_all_shapes(part)
    assert read.knows_shapes
    for one in (whole, read):
        assert one.shape_id is not None
    assert part.shape_id is not None
    names = [[trace.names[shape] for shape in trace.shape_id[:kernels].tolist()] for trace in (whole, part, read)]
    assert names[0] == names[1] == names[2]
    assert [whole.names[shape] for shape in whole.shape_id] == [read.names[shape] for shape in read.shape_id]


def diagnosed(path: Path) -> tuple[Diagnosis, bool]:
    """What the doctor says, and whether the shapes of all kernels were read for it."""
    (run,) = load_runs(path, measures=DOCTOR)
    found = run.doctor()
    return found, "kernels" in run.measured[path]


@pytest.mark.parametrize(
    ("made", "needs_shapes"),
    [
        (capture(), False),
        (capture(silent_steps=(5,)), True),
        (capture(beside_ns=30_000), True),
    ],
    ids=["a limit", "a step without communication", "a finding"],
)
def test_the_doctor_says_the_same_without_reading_all_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Capture, needs_shapes: bool
) -> None:
    path = write_capture(tmp_path / "x.sqlite", made)
    expected, _ = diagnosed(path)
    monkeypatch.setattr(report, "FIRST_KERNELS", 60)
    opened: list[object] = []
    load = report.load_events
    monkeypatch.setattr(report, "load_events", lambda *arguments: opened.append(arguments) or load(*arguments))
    assert diagnosed(path) == (expected, needs_shapes)
    assert len(opened) == 1, "events are read once, shapes alone again"


def test_a_real_capture_is_limited(shared_traces: Path) -> None:
    path = shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"
    (rank,) = find_rank_events(load_trace(path, ReadOptions(with_launches=True)))
    figure = measure_contention([sample_kernels(rank)]).contention_ns
    limit = limit_contention_ns([limit_of(path, 10_000)])
    assert figure is not None
    assert limit is not None
    assert figure <= limit
    assert np.all(limit_of(path, 10_000).duration_ns > 0)
