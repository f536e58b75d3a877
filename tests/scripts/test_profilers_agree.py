"""One run of the workload, recorded by nsys and by torch.profiler at once: both must tell the same of it.

Two runs on shared cores differ by more than any profiler adds, so both record the same one. What is counted is then
equal. A time is not quite: each edge of a range is taken down by one profiler after the other, some microseconds apart,
and by a switch of threads more where the cores are shared. Hence medians over the steps of all ranks, and a tolerance
of 5 % of a step; a reader that lost, doubled or misplaced a collective would be off by far more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.overlap import StepOverlap, TraceOverlap, measure_overlap, merge_ranks
from ddp_prof.ingest.load import find_traces, load_trace
from tests.scripts.test_capture import capture

pytestmark = [pytest.mark.nsys, pytest.mark.torch]

STEPS = 8
TOLERANCE = 0.05
Pair = tuple[TraceOverlap, TraceOverlap]


@pytest.fixture(scope="module", params=["naive", "overlap"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """What nsys and what torch.profiler recorded of one run."""
    by_nsys, by_kineto = (tmp_path_factory.mktemp(name) for name in ("nsys", "kineto"))
    more = ("--", "--kineto", str(by_kineto / "run.json.gz"))
    done = capture(by_nsys, request.param, *more, PROFILER="nsys", STEPS=str(STEPS), WARMUP="2")
    assert done.returncode == 0, done.stderr
    return measured(by_nsys), measured(by_kineto)


def measured(folder: Path) -> TraceOverlap:
    return merge_ranks([measure_overlap(load_trace(path)) for path in find_traces(folder)])


def steps_of(result: TraceOverlap) -> list[StepOverlap]:
    return [step for rank in result.ranks for step in rank.steps]


def test_what_happened_is_the_same(both: Pair) -> None:
    assert [sample.source for sample in both] == ["nsys-sqlite", "kineto"]
    for first, second in zip(both[0].ranks, both[1].ranks, strict=True):
        assert (first.rank, first.collectives) == (second.rank, second.collectives)
        assert [step.step for step in first.steps] == [step.step for step in second.steps] == list(range(STEPS))
        assert [step.collectives for step in first.steps] == [step.collectives for step in second.steps]
        assert bool(first.overlap_ratio) == bool(second.overlap_ratio), "0 for naive, more for overlap, in both"


@pytest.mark.parametrize("time", ["host_ns", "comm_ns", "overlapped_ns", "exposed_ns", "compute_only_ns", "tail_ns"])
def test_times_agree(time: str, both: Pair) -> None:
    first, second = ([getattr(step, time) for step in steps_of(sample)] for sample in both)
    apart = np.median(np.abs(np.array(first) - np.array(second)))
    assert apart <= TOLERANCE * np.median([step.host_ns for step in steps_of(both[0])])
