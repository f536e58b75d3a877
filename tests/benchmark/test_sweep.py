"""Which runs a sweep makes and which it leaves out, and what it shows; without ranks."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof import analyze
from ddp_prof.benchmark import sweep as sweep_module
from ddp_prof.benchmark.store import FAILED, OK, OUT_OF_MEMORY, Environment, load_results
from ddp_prof.benchmark.sweep import Grid, Machine, sweep
from ddp_prof.capture.variant import Captured, digest_code
from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.manifest import HostTimes, Manifest
from ddp_prof.run_config import RunConfig
from tests.conftest import ROOT
from tests.test_manifest import MANIFEST

ENVIRONMENT = Environment("e1", "some CPU", 2, 2**34, "Linux", "", "3.11", "2.13", None, None, "0.1")
MACHINE = Machine(ENVIRONMENT, gpus=0, git_commit=None, code="c1")
GRID = Grid(
    variants=("naive", "flat"),
    bucket_sizes_mb=(),
    model_sizes=("tiny",),
    local_batch_sizes=(1,),
    seq_lens=(16,),
    steps=1,
    warmup=1,
    repeats=2,
)
GOOD = replace(MANIFEST, host_times=(HostTimes(False, 0, 100, 20, 40, 30, 10),))


class Bench:
    """Stands in for the ranks: what each variant gives, and which were run."""

    def __init__(self, database: Path) -> None:
        self.gives: dict[str, Manifest | WorkloadError] = {}
        self.ran: list[str] = []
        self.including_warmup: list[str] = []
        self.database = database

    def measure(self, config: RunConfig) -> Manifest | WorkloadError:
        self.ran.append(config.variant)
        return self.gives.get(config.variant, GOOD)

    def capture(self, config: RunConfig, folder: Path, *, force: bool) -> tuple[Path, dict[str, int | None]]:
        self.including_warmup.append(f"{config.variant}{' again' if force else ''}")
        if config.variant == "flat":
            raise WorkloadError("no profiler")
        return folder / "x.sqlite", {"trace_comm_ns": 30, "trace_tail_ns": 5}

    def sweep(self, **changes: object) -> sweep_module.Outcome:
        self.ran, self.including_warmup = [], []
        return sweep(**{"jobs": GRID.jobs(), "machine": MACHINE, "path": self.database, **changes})  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path / "results.db")
    monkeypatch.setattr(sweep_module, "measure", bench.measure)
    monkeypatch.setattr(sweep_module, "capture", bench.capture)
    return bench


def test_what_is_there_is_not_run_again_unless_forced(bench: Bench) -> None:
    assert str(bench.sweep()) == "4 runs measured"
    assert bench.ran == ["naive", "flat", "flat", "naive"]
    assert str(bench.sweep()) == "0 runs measured, 4 there before"
    assert bench.ran == []
    assert str(bench.sweep(force=True)) == "4 runs measured"
    assert len(bench.ran) == 4
    assert len(load_results(bench.database).runs) == 4


def test_other_code_is_measured_under_the_same_id(bench: Bench) -> None:
    bench.sweep()
    before = load_results(bench.database).runs
    assert str(bench.sweep(machine=replace(MACHINE, code="c2"))) == "4 runs measured"
    after = load_results(bench.database).runs
    assert [item.id for item in after] == [item.id for item in before]
    assert {item.code for item in after} == {"c2"}


def test_other_definitions_are_measured_again_and_never_kept_beside_todays(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sweep(profile=True)
    monkeypatch.setattr(sweep_module, "DEFINITIONS", analyze.DEFINITIONS + 1)
    assert str(bench.sweep(profile=True)) == "4 runs measured, 1 captured, 1 captures failed"
    assert {run.definitions for run in load_results(bench.database).runs} == {sweep_module.DEFINITIONS}


def test_another_machine_and_other_conditions_are_runs_of_their_own(bench: Bench) -> None:
    bench.sweep()
    bench.sweep(machine=replace(MACHINE, environment=replace(ENVIRONMENT, id="e2")))
    bench.sweep(jobs=replace(GRID, warmup=2).jobs())
    assert len(load_results(bench.database).runs) == 12


def test_want_of_memory_lasts_and_a_failure_is_tried_again(bench: Bench) -> None:
    bench.gives = {"naive": OutOfMemoryError("too big"), "flat": WorkloadError("bad luck")}
    outcome = bench.sweep()
    assert not outcome.is_good
    assert str(outcome) == "0 runs measured, 2 out of memory, 2 failed"
    rows = load_results(bench.database)
    assert {(run.variant, run.status, run.reason) for run in rows.runs} == {
        ("naive", OUT_OF_MEMORY, "too big"),
        ("flat", FAILED, "bad luck"),
    }
    assert rows.steps == ()
    bench.gives.pop("flat")
    outcome = bench.sweep()
    assert bench.ran == ["flat", "flat"]
    assert outcome.is_good
    assert {run.status for run in load_results(bench.database).runs} == {OK, OUT_OF_MEMORY}


def test_each_setting_is_captured_once_without_timing_it_again(bench: Bench) -> None:
    bench.gives = {"flat": OutOfMemoryError("too big")}
    bench.sweep()
    outcome = bench.sweep(profile=True)
    assert (bench.ran, bench.including_warmup, outcome.is_good) == ([], ["naive"], True)
    run, *others = load_results(bench.database).runs
    assert (run.repeat, run.trace_comm_ns, run.trace_tail_ns) == (0, 30, 5)
    assert run.trace == "results/tiny_2ranks_1x16/x.sqlite"
    assert all(other.trace is None for other in others)
    assert len(load_results(bench.database).steps) == 2
    bench.sweep(profile=True)
    assert bench.including_warmup == []
    bench.sweep(profile=True, force=True)
    assert bench.including_warmup == ["naive again"]


def test_a_capture_is_made_without_synchronized_steps_and_gives_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for what records; a nightly records."""
    asked: list[tuple[list[str], dict[str, str]]] = []

    def record(argv: list[str], environ: dict[str, str]) -> Captured:
        asked.append((argv, environ))
        shutil.copy(ROOT / "traces" / "naive.sqlite", environ["TRACES_DIR"])
        return Captured("naive", 6, "torch.profiler")

    monkeypatch.setattr(sweep_module, "capture_variant", record)
    job, *_ = GRID.jobs()
    assert job.config.synchronized_steps == 1
    file, figures = sweep_module.capture(job.config, tmp_path / "new", force=True)
    assert file == tmp_path / "new" / "naive.sqlite"
    assert figures["trace_comm_ns"] == figures["trace_exposed_ns"] == figures["trace_tail_ns"] != 0
    assert figures["trace_overlapped_ns"] == 0, "naive hides nothing"
    ((argv, environ),) = asked
    assert argv == replace(job.config, synchronized_steps=0).script_argv()
    assert (environ["FORCE"], environ["NGPU"], environ["DEVICE"]) == ("1", "2", "auto")
    monkeypatch.setattr(sweep_module, "capture_variant", lambda *_: Captured("flat", 6))
    with pytest.raises(WorkloadError, match="left no trace"):
        sweep_module.capture(job.config, tmp_path / "new", force=False)


def test_a_failed_capture_leaves_the_run_and_is_told(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = bench.sweep(profile=True)
    assert not outcome.is_good
    assert str(outcome) == "4 runs measured, 1 captured, 1 captures failed"
    assert "flat, tiny, 2 ranks, 1 x 16 tokens each, capture: failed: no profiler" in capsys.readouterr().err
    assert {run.status for run in load_results(bench.database).runs} == {OK}
    bench.sweep(profile=True)
    assert (bench.ran, bench.including_warmup) == ([], ["flat"])


def test_what_restricts_the_meaning_of_a_run_is_in_its_row(bench: Bench) -> None:
    bench.gives = {"flat": replace(GOOD, world_size=1)}
    bench.sweep()
    caveats = {run.variant: run.caveat for run in load_results(bench.database).runs}
    assert caveats["naive"] is None
    assert "one rank: it has no peer" in str(caveats["flat"])


def test_two_sweeps_at_once_are_refused(bench: Bench) -> None:
    descriptor = os.open(bench.database.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another process would: locks are of descriptors
        with pytest.raises(WorkloadError, match="another sweep or capture writes there: wait for it, or name another"):
            bench.sweep()
    finally:
        os.close(descriptor)
    assert bench.ran == []
    assert bench.sweep().is_good


def test_the_digest_of_the_code_is_of_what_the_ranks_run(tmp_path: Path) -> None:
    measured = (
        "ddp/base.py",
        "ddp/reducer.py",
        "train/step.py",
        "bucket_assignment.py",
        "range_names.py",
        "run_config.py",
        "variants.py",
    )
    for name in ("benchmark/sweep.py", *measured):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    digests = []
    for name in measured:
        (tmp_path / name).write_text("2")
        digests.append(digest_code(tmp_path))
    assert len(set(digests)) == len(measured)
    (tmp_path / "benchmark/sweep.py").write_text("3")
    assert digest_code(tmp_path) == digests[-1]


def test_each_run_is_a_line_with_the_time_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.gives = {"flat": OutOfMemoryError("out of memory: too big [sic]")}
    monkeypatch.setattr(sweep_module.time, "monotonic", iter([0, 10, 40, 60, 80]).__next__)
    bench.sweep()
    assert capsys.readouterr().err.splitlines() == [
        "[1/4] naive, tiny, 2 ranks, 1 x 16 tokens each, repeat 1: step 0 ms, waiting for gradients 0 ms (30 s left)",
        "[2/4] flat, tiny, 2 ranks, 1 x 16 tokens each, repeat 1: out of memory: too big [sic] (40 s left)",
        "[3/4] flat, tiny, 2 ranks, 1 x 16 tokens each, repeat 2: out of memory: too big [sic] (20 s left)",
        "[4/4] naive, tiny, 2 ranks, 1 x 16 tokens each, repeat 2: step 0 ms, waiting for gradients 0 ms (0 s left)",
    ]
