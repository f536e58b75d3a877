"""What communication can cost kernels at most, told without their launch shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.contention import measure_contention
from ddp_prof.analyze.kernels.contention_limit import SlowdownLimit, limit_contention_ns, limit_slowdown
from ddp_prof.analyze.kernels.kernel_times import find_kernel_runs
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.runs import load_runs
from ddp_prof.runs.run import DOCTOR
from tests.nsys_factory import Capture, Kernel, Range, write_capture

STEPS, KERNELS, NAMES = 8, 12, 6


def capture(silent_steps: tuple[int, ...] = (), beside_ns: int = 1300, *, always_last: bool = False) -> Capture:
    """Twelve kernels a step, two of each name; a collective is beside the first, or the last, six of them.

    So each kernel runs beside communication in one half of the steps, and alone in the other; or the first of a name
    always alone, and the last always beside it.
    """
    found = Capture(threads={(100, 100): "python3", (100, 131): "pt_autograd_0"})
    for step in range(STEPS):
        at = begin = step * 200_000 + 1000
        for position in range(KERNELS):
            first_half = step % 2 == 0 and not always_last
            is_beside = (position < KERNELS // 2) == first_half and step not in silent_steps
            length = beside_ns if is_beside else 1000
            grid = 7 + position // NAMES
            found.kernels.append(Kernel(f"gemm{position % NAMES}", at, at + length, begin + position, 131, grid=grid))
            if is_beside and position % (KERNELS // 2) == 0:
                comm = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at, at + 6 * beside_ns, begin + position, 131)
                comm.stream = 9
                found.kernels.append(comm)
            at += length
        found.ranges.append(Range(f"step_{step}", begin - 10, max(begin + 50_000, at), 100))
    return found


def limit_of(path: Path) -> SlowdownLimit:
    (rank,) = find_rank_events(load_trace(path))
    return limit_slowdown(rank)


def test_the_limit_is_not_below_the_figure(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture())
    (rank,) = find_rank_events(load_trace(path, ReadOptions(with_launches=True)))
    figure = measure_contention([find_kernel_runs(rank)]).contention_ns
    assert figure == 6 * 300
    limit = limit_of(path)
    assert limit_contention_ns([limit]) == figure + 1
    assert limit_contention_ns([limit, limit]) == figure + 1, "of a step of a rank"


def test_kernels_that_later_steps_let_compare_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture())
    whole = limit_of(path)
    monkeypatch.setattr("ddp_prof.analyze.kernels.contention_limit._FIRST_STEPS", 1)  # in one step each runs once
    assert limit_of(path) == whole
    assert whole.compares


@pytest.mark.parametrize(
    "made",
    [capture(silent_steps=(5,)), capture(always_last=True)],
    ids=["a step without communication", "kernels of a name, but none that ran both beside communication and alone"],
)
def test_nothing_is_said_where_contention_may_have_no_figure(tmp_path: Path, made: Capture) -> None:
    assert limit_contention_ns([limit_of(write_capture(tmp_path / "x.sqlite", made))]) is None


@pytest.mark.parametrize(
    ("made", "are_compared"),
    [
        (capture(), False),
        (capture(silent_steps=(5,)), True),
        (capture(beside_ns=30_000), False),  # what it hides is always more than what it slows on one stream
        (capture(always_last=True), True),
    ],
    ids=["a limit", "a step without communication", "a large slowdown", "an abstention"],
)
def test_the_doctor_says_the_same_without_comparing_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Capture, are_compared: bool
) -> None:
    path = write_capture(tmp_path / "x.sqlite", made)
    (run,) = load_runs(path, measures=DOCTOR)
    found = run.doctor()
    assert ("kernels" in run.measured[path]) == are_compared
    monkeypatch.setattr("ddp_prof.analyze.doctor.communication.limit_contention_ns", lambda _limits: None)
    (other,) = load_runs(path, measures=DOCTOR)
    assert other.doctor() == found
    assert "kernels" in other.measured[path]


def test_a_real_capture_is_limited(shared_traces: Path) -> None:
    path = shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"
    (rank,) = find_rank_events(load_trace(path, ReadOptions(with_launches=True)))
    figure = measure_contention([find_kernel_runs(rank)]).contention_ns
    limit = limit_contention_ns([limit_of(path)])
    assert figure is not None
    assert limit is not None
    assert figure <= limit
