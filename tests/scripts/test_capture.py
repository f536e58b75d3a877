"""Real captures of the real workload, two ranks, by real nsys; nothing here is skipped where nsys is missing.

What the workload says where it fails, and what becomes of that, tests/train and tests/capture test by themselves;
a nightly of tests/benchmark/test_sweep_command.py captures by torch.profiler.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap, merge_ranks
from ddp_prof.analyze.step_columns import StepOverlap
from ddp_prof.ingest.load import find_traces, load_trace
from tests.capture.conftest import needs_namespace
from tests.examples import IS_NIGHTLY

pytestmark = [pytest.mark.nsys, pytest.mark.torch]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
TOLERANCE = 0.05
SETTINGS = {"MODEL_SIZE": "tiny", "SEQ_LEN": "16", "STEPS": "3", "WARMUP": "1"}


def capture(traces: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script with small settings."""
    return subprocess.run(
        ["bash", ROOT / "scripts/profile_variant.sh", *arguments],
        env={**os.environ, **SETTINGS, "TRACES_DIR": str(traces), **more},
        capture_output=True,
        text=True,
        check=False,
    )


class Recorded(NamedTuple):
    """One run, recorded by nsys and by torch.profiler at once: folders of what they wrote."""

    variant: str
    by_nsys: Path
    by_kineto: Path

    def capture(self, **more: str) -> subprocess.CompletedProcess[str]:
        arguments = (self.variant, "--", "--kineto", str(self.by_kineto / "run.json.gz"))
        return capture(self.by_nsys, *arguments, PROFILER="nsys", STEPS=str(STEPS), WARMUP="2", **more)


@pytest.fixture(scope="module", params=["overlap", "naive"] if IS_NIGHTLY else ["overlap"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("kineto")
    recorded = Recorded(request.param, tmp_path_factory.mktemp("capture") / "traces", folder)
    done = recorded.capture(A_SECRET="hush-hush")
    assert done.returncode == 0, done.stderr
    return recorded


def _ranges(path: Path) -> dict[int, list[str]]:
    """Texts of our ranges, by process."""
    found: dict[int, list[str]] = {}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        for process, text in database.execute(
            "SELECT globalTid >> 24, coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
            "WHERE eventType IN (59, 60) ORDER BY start"
        ):
            found.setdefault(process, []).append(text)
    return found


def test_both_ranks_arrive_with_steps_phases_and_collectives(recorded: Recorded) -> None:
    variant = recorded.variant
    ranges = _ranges(recorded.by_nsys / f"{variant}.sqlite")
    processes = sorted(text for texts in ranges.values() for text in texts if text.startswith("process|"))
    assert processes == [f"process|rank={rank}|world=2|variant={variant}|backend=gloo|device=cpu" for rank in (0, 1)]
    for texts in ranges.values():
        steps = [text for text in texts if text.startswith("step|")]
        assert len(steps) == STEPS + 2
        assert [text for text in steps if "warmup=1" in text] == steps[:2]
        assert sum(text == "backward" for text in texts) == STEPS + 2
        assert any(text.startswith("all_reduce|bucket=0|bytes=") for text in texts)


def test_the_run_is_described(recorded: Recorded) -> None:
    run = json.loads((recorded.by_nsys / f"{recorded.variant}.run.json").read_text())
    assert (run["variant"], run["world_size"], run["device"], run["steps"]) == (recorded.variant, 2, "cpu", STEPS)
    assert run["profiler"].startswith("nsys 20")
    assert len(run["key"]) == 64


@pytest.mark.nightly
def test_nightly_a_torch_that_cannot_use_the_gpu_is_told(tmp_path: Path) -> None:
    done = capture(tmp_path / "traces", "overlap", PROFILER="none", DEVICE="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "torch finds no GPU here: install a CUDA build of torch, or use --device cpu (DEVICE=cpu)" in done.stderr


def test_the_capture_tells_nothing_of_the_users_environment(recorded: Recorded) -> None:
    needs_namespace()
    for suffix in (".sqlite", ".nsys-rep"):
        content = (recorded.by_nsys / f"{recorded.variant}{suffix}").read_bytes()
        assert b"hush-hush" not in content
        assert b"A_SECRET" not in content


def test_a_finished_capture_is_left_alone(recorded: Recorded) -> None:
    traces = recorded.by_nsys
    before = {path: path.stat().st_mtime_ns for path in traces.iterdir()}
    assert recorded.capture().stdout == f"{recorded.variant}: up to date\n"
    assert {path: path.stat().st_mtime_ns for path in traces.iterdir()} == before


@pytest.mark.nightly
def test_nightly_without_nsys_torch_profiler_records(tmp_path: Path) -> None:
    done = capture(tmp_path, "bucketed", "--bucket-size-mb", "10", PROFILER="kineto")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bucketed_10mb.rank0.json.gz",
        "bucketed_10mb.rank1.json.gz",
        "bucketed_10mb.run.json",
    ]
    assert json.loads((tmp_path / "bucketed_10mb.run.json").read_text())["profiler"].startswith("torch.profiler 2")


@pytest.mark.nightly
def test_nightly_a_failing_workload_leaves_nothing(tmp_path: Path) -> None:
    done = capture(tmp_path, "naive", BATCH_SIZE="3")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "profile_variant: error: naive: the workload failed (exit code 1): a batch of 3 cannot be"
    )
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


Pair = tuple[TraceOverlap, TraceOverlap]


@pytest.fixture(scope="module")
def both(recorded: Recorded) -> Pair:
    """What nsys and what torch.profiler tell of one run."""
    return measured(recorded.by_nsys), measured(recorded.by_kineto)


def measured(folder: Path) -> TraceOverlap:
    return merge_ranks([measure_overlap(load_trace(path)) for path in find_traces(folder)])


def steps_of(result: TraceOverlap) -> list[StepOverlap]:
    return [step for rank in result.ranks for step in rank.steps]


def test_both_profilers_tell_the_same(both: Pair) -> None:
    assert [sample.source for sample in both] == ["nsys-sqlite", "kineto"]
    for first, second in zip(both[0].ranks, both[1].ranks, strict=True):
        assert (first.rank, first.collectives) == (second.rank, second.collectives)
        assert [step.step for step in first.steps] == [step.step for step in second.steps] == list(range(STEPS))
        assert [step.collectives for step in first.steps] == [step.collectives for step in second.steps]
        assert bool(first.overlap_ratio) == bool(second.overlap_ratio), "0 for naive, more for overlap, in both"


@pytest.mark.parametrize("time", ["host_ns", "comm_ns", "overlapped_ns", "exposed_ns", "compute_only_ns", "tail_ns"])
def test_times_agree(time: str, both: Pair) -> None:
    """Two runs on shared cores differ by more than any profiler adds, so both record the same one.

    What is counted is then equal. A time is not quite: each edge of a range is taken down by one profiler after the
    other, some microseconds apart, and by a switch of threads more where the cores are shared. Hence medians over the
    steps of all ranks, and a tolerance of 5 % of a step; a reader that lost, doubled or misplaced a collective would be
    off by far more.
    """
    first, second = ([getattr(step, time) for step in steps_of(sample)] for sample in both)
    apart = np.median(np.abs(np.array(first) - np.array(second)))
    assert apart <= TOLERANCE * np.median([step.host_ns for step in steps_of(both[0])])
