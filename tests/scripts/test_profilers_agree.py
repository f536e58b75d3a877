"""The same workload recorded by nsys and by torch.profiler: what it did must be the same, how long it took alike.

What is counted is compared exactly. Times are those of two runs on shared cores, which differ from run to run by more
than any profiler adds: so the tolerance is the runs' own spread. The middle 80 % of the steps' times of the two runs
have to meet, ranks taken together; a reader that lost, doubled or misplaced collectives would be off by far more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.overlap import StepOverlap, TraceOverlap, measure_overlap, merge_ranks
from ddp_prof.ingest.load import find_traces, load_trace
from tests.scripts.test_capture import capture

STEPS = 12
MIDDLE = (10, 90)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], TraceOverlap]:
    """The overlap of two variants by two profilers."""
    found = {}
    for profiler in ("nsys", "kineto"):
        for variant in ("naive", "overlap"):
            folder = tmp_path_factory.mktemp(f"{variant}_{profiler}")
            done = capture(folder, variant, PROFILER=profiler, STEPS=str(STEPS), WARMUP="3")
            assert done.returncode == 0, done.stderr
            found[variant, profiler] = measured(folder)
    return found


def measured(folder: Path) -> TraceOverlap:
    return merge_ranks([measure_overlap(load_trace(path)) for path in find_traces(folder)])


def steps_of(result: TraceOverlap) -> list[StepOverlap]:
    return [step for rank in result.ranks for step in rank.steps]


@pytest.mark.parametrize("variant", ["naive", "overlap"])
def test_what_happened_is_the_same(variant: str, runs: dict[tuple[str, str], TraceOverlap]) -> None:
    by_nsys, by_kineto = runs[variant, "nsys"], runs[variant, "kineto"]
    assert (by_nsys.source, by_kineto.source) == ("nsys-sqlite", "kineto")
    for first, second in zip(by_nsys.ranks, by_kineto.ranks, strict=True):
        assert (first.rank, len(first.steps), first.collectives) == (second.rank, len(second.steps), second.collectives)
        assert [step.step for step in first.steps] == [step.step for step in second.steps] == list(range(STEPS))
        assert [step.collectives for step in first.steps] == [step.collectives for step in second.steps]


@pytest.mark.parametrize("variant", ["naive", "overlap"])
@pytest.mark.parametrize("time", ["host_ns", "comm_ns", "compute_only_ns", "exposed_ns"])
def test_times_agree_within_the_runs_own_spread(
    variant: str, time: str, runs: dict[tuple[str, str], TraceOverlap]
) -> None:
    (low, high), (other_low, other_high) = (
        np.percentile([getattr(step, time) for step in steps_of(runs[variant, profiler])], MIDDLE)
        for profiler in ("nsys", "kineto")
    )
    assert low <= other_high
    assert other_low <= high


def test_both_see_that_naive_hides_nothing(runs: dict[tuple[str, str], TraceOverlap]) -> None:
    for profiler in ("nsys", "kineto"):
        assert all(rank.overlap_ratio == 0 for rank in runs["naive", profiler].ranks)
        assert all(rank.overlap_ratio > 0 for rank in runs["overlap", profiler].ranks)
