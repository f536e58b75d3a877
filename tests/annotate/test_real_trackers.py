"""TensorBoard, W&B (offline) and MLflow themselves get the figures of the log, by name and step.

``scripts/dev/trainers.sh`` makes an environment with them, and runs this (marker ``trainers``); a nightly does so.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.annotate.log_targets import scalars

JOB = Path(__file__).parent / "jobs" / "tracked_job.py"
TRACKERS = ["tensorboard", "wandb", "mlflow"]
Logged = dict[tuple[str, int], float]
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.trainers]


def run_job(tracker: str, folder: Path, *options: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of the log, and the warnings of the monitor."""
    environ = {**os.environ, "WANDB_SILENT": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    command = [sys.executable, str(JOB), tracker, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trained"), done.stderr
    records = [json.loads(line) for line in (folder / "monitor" / "monitor.jsonl").read_text().splitlines()]
    return records, [line for line in done.stderr.splitlines() if line.startswith("ddp_prof.monitor ")]


def of_tensorboard(folder: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {(name, one.step): one.value for name in events.Tags()["scalars"] for one in events.Scalars(name)}


def of_mlflow(folder: Path) -> Logged:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs(["0"])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {(name, one.step): one.value for name, history in histories.items() for one in history}


def of_wandb(folder: Path) -> Logged:
    """By the step that goes with the figures; those of the program keep their own."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    logged, of_program = Logged(), []
    for packed in records_of_wandb(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(packed)
        items = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
        step = items.pop("ddp_prof/step", None)
        logged |= {(name, step): value for name, value in items.items() if name.startswith("ddp_prof/")}
        of_program += [(items["_step"], items["loss"])] if "loss" in items else []
    assert of_program == [(step, step) for step in range(21)]
    return logged


def records_of_wandb(data: bytes) -> Iterator[bytes]:
    """The log format of LevelDB: blocks of 32 KiB, in which records lie in parts (1 whole, 4 last part)."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_gets_the_figures_of_the_log(tracker: str, tmp_path: Path) -> None:
    records, warnings = run_job(tracker, tmp_path)
    assert [record["step"] for record in records] == [6, 12, 18]
    expected = {(name, record["step"]): value for record in records for name, value in scalars(record)}
    found = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}[tracker](tmp_path)
    assert warnings == []
    if tracker == "wandb":  # of two measurements before the program's next record, it has the later one
        assert ("ddp_prof/step_ms", 18) in found
        expected = {key: value for key, value in expected.items() if key in found}
    assert found == pytest.approx(expected, rel=1e-6)  # TensorBoard has floats of 32 bits


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_cannot_be_reached_is_one_warning(tracker: str, tmp_path: Path) -> None:
    records, warnings = run_job(tracker, tmp_path, "unreachable")
    assert [record["step"] for record in records] == [6, 12, 18]
    (warning,) = warnings
    assert "was not passed on" in warning
