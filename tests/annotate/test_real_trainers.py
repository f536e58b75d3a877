"""Lightning and Hugging Face's Trainer themselves, on two ranks that accumulate two batches a step.

``scripts/dev/trainers.sh`` makes an environment with both, and runs this (marker ``trainers``); a nightly does so.
Elsewhere stand-ins of their interfaces are tested (``test_callbacks.py``).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ddp_prof as dp
from ddp_prof.analyze.step_columns import StepOverlap
from tests.command_line import run

JOBS = Path(__file__).parent / "jobs"
OURS = ("ddp_prof|", "step|", "all_reduce|", "process|")
FIGURES = ("collectives", "comm_ns", "overlapped_ns", "exposed_ns", "tail_ns", "passes")
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.trainers]


def run_job(trainer: str, folder: Path, callback: str = "callback") -> int:
    """The number of optimizer steps that the trainer counts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(JOBS / f"{trainer}_job.py"), str(folder), callback]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("optimizer steps")]
    return int(said[0])


def without_marks(path: Path, folder: Path) -> Path:
    """The capture without the callback's marks; steps go from one end of torch's own optimizer range to the next."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    names = {str(event.get("name")) for event in document["traceEvents"]}
    kept = [event for event in document["traceEvents"] if not str(event.get("name")).startswith(OURS)]
    steps: list[dict[str, Any]] = sorted(
        (event for event in kept if str(event.get("name")).startswith("Optimizer.step#") and event.get("ph") == "X"),
        key=lambda event: float(event["ts"]),
    )
    ends = [event["ts"] + event["dur"] for event in steps]
    for index, (start, end) in enumerate(pairwise(ends), 1):
        if f"step|index={index}|warmup=1" not in names:
            kept.append({**steps[0], "name": f"step {index}", "ts": start, "dur": end - start})
    bare = folder / path.name
    bare.write_bytes(gzip.compress(json.dumps({**document, "traceEvents": kept}).encode()))
    return bare


def steps_of(*paths: Path) -> list[tuple[StepOverlap, ...]]:
    return [rank.marked_steps for path in paths for (run,) in [dp.load_runs(path)] for rank in run.overlap().ranks]


@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_figures_that_a_callback_logs_are_those_of_the_kept_traces(trainer: str, tmp_path: Path) -> None:
    assert run_job(trainer, tmp_path, "monitor") == 16
    records = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [(record["step"], record["steps"], record["ranks"]) for record in records] == [(6, 2, 2), (12, 2, 2)]
    traces = [tmp_path / name for name in records[-1]["traces"]]
    (summary,) = json.loads(run("summary", *traces, "--format", "json").stdout)["runs"]
    assert records[-1]["comm_ns"] > 0
    for name in ("step_ns", "comm_ns", "overlapped_ns", "exposed_ns", "blocking_ns", "cost", "bounds", "headline"):
        assert records[-1][name] == summary[name], name


@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_figures_of_a_callback_are_those_of_the_same_run_without_it(trainer: str, tmp_path: Path) -> None:
    steps = run_job(trainer, tmp_path)
    paths = sorted(tmp_path.glob("job.rank*.json.gz"))
    (bare := tmp_path / "bare").mkdir()
    marked, plain = steps_of(*paths), steps_of(*(without_marks(path, bare) for path in paths))
    assert [of_rank[-1].step for of_rank in marked] == [steps - 1] * 2
    assert all(steps - 2 <= len(of_rank) < steps for of_rank in marked), "one or two are warm-up"
    for ours, torchs in zip(marked, plain, strict=True):
        assert [step.step for step in ours] == [step.step for step in torchs]
        for name in FIGURES:
            assert [getattr(step, name) for step in ours] == [getattr(step, name) for step in torchs], name
