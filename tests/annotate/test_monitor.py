"""A monitor in real ranks: it logs what ``ddp-prof`` says of the traces that it keeps, and never ends a job."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as stores
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, schedule

from ddp_prof import annotate
from ddp_prof.annotate import log_targets, monitor, monitor_reader
from ddp_prof.annotate.analysis_process import PYTHON_VARIABLE
from ddp_prof.annotate.monitor import Monitor, log_overlap
from ddp_prof.annotate.steps import CountedSteps
from ddp_prof.monitor.log import load_log
from tests.command_line import run
from tests.ddp.gloo_ranks import run_ranks
from tests.examples import IS_NIGHTLY
from tests.forked_analysis import forked_analysis
from tests.forked_python import run_python

EVERY, STEPS = 6, 2
MEASURED = [6, 12, 18]
ONCE = " (said once: later measurements may be missing for the same reason)"


@pytest.fixture(scope="module", autouse=True)
def _analyses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """They are forked, which saves what each would import."""
    with forked_analysis(tmp_path_factory.mktemp("monitor") / "programs") as python, pytest.MonkeyPatch.context() as to:
        to.setenv(PYTHON_VARIABLE, str(python))
        yield


def make_job() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def monitored(folder: Path, rank: int) -> dict[str, Any]:
    """Train with a monitor; return its records and alerts, and the weights."""
    records, alerts = list[dict[str, Any]](), list[dict[str, Any]]()
    model, optimizer = make_job()
    watched = Monitor(
        EVERY, STEPS, folder=folder, log=[records.append], alert=alerts.append, limits={"max_exposed_ms": 1e-6}
    )
    for _ in range(21):
        train_step(model, optimizer)
        watched.step()
    watched.close()
    return {"rank": rank, "records": records, "alerts": alerts, "weight": next(model.parameters()).detach().clone()}


def unmonitored(rank: int) -> torch.Tensor:
    assert rank >= 0
    model, optimizer = make_job()
    for _ in range(21):
        train_step(model, optimizer)
    return next(model.parameters()).detach().clone()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("monitored") / "monitor"
    return folder, run_ranks(partial(monitored, folder))


def test_each_measurement_is_a_record_of_all_ranks(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, second) = job
    records = [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == MEASURED
    assert {(one["ranks"], one["world_size"], one["steps"]) for one in records} == {(2, 2, STEPS)}
    assert not any(one["missing_ranks"] for one in records)
    assert first["records"] == records
    assert second["records"] == []


def test_the_figures_are_those_of_the_kept_traces(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, _) = job
    record = first["records"][-1]
    traces = sorted(folder.glob(f"step{MEASURED[-1]:08d}.rank*.json.gz"))
    assert [trace.name for trace in traces] == record["traces"]
    (summary,) = json.loads(run("summary", *traces, "--format", "json").stdout)["runs"]
    for name in ("step_ns", "comm_ns", "overlapped_ns", "exposed_ns", "blocking_ns", "cost", "bounds", "headline"):
        assert record[name] == summary[name], name
    overlap = json.loads(run("overlap", *traces, "--one-run", "--format", "json").stdout)
    steps = [sorted(step["exposed_ns"] for step in rank["steps"]) for rank in overlap["ranks"]]
    assert [rank["exposed_ns"] for rank in record["by_rank"]] == [round(sum(of) / 2) for of in steps]
    skew = json.loads(run("skew", *traces, "--one-run", "--format", "json").stdout)
    assert [rank["lag_ns"] for rank in record["by_rank"]] == [rank["lag_ns"] for rank in skew["ranks"]]


def test_the_warm_up_step_is_left_out(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    overlap = json.loads(run("overlap", folder / "step00000018.rank0.json.gz", "--format", "json").stdout)
    assert [step["step"] for step in overlap["ranks"][0]["steps"]] == [19, 20]


def counted_by_several(marked_by: str, folder: Path, rank: int) -> list[dict[str, Any]]:
    """Train in steps that others mark, too: a trainer's callback that counts, or the program itself."""
    records, (model, optimizer) = list[dict[str, Any]](), make_job()
    watched = Monitor(EVERY, STEPS, folder=folder, log=records.append)
    if marked_by == "a callback":
        (counted := CountedSteps()).begin()
    for step in range(10):
        with annotate.step(step) if marked_by == "the program" else nullcontext():
            train_step(model, optimizer)
        watched.step()
    watched.close()
    if marked_by == "a callback":
        counted.stop()
    return records if rank == 0 else []


@pytest.mark.parametrize("marked_by", ["a callback", "the program"])
def test_steps_that_others_mark_too_are_measured_once_and_without_the_warm_up_step(
    marked_by: str, tmp_path: Path
) -> None:
    """Of a program with both, the monitor's warm-up step was measured, and each step cut where the other's began.

    ::

        monitor    |6 warm-up  |7          |8          |
        callback    |6          |7          |8
    """
    ((record,), _) = run_ranks(partial(counted_by_several, marked_by, tmp_path))
    assert (record["step"], record["steps"]) == (6, STEPS)
    trace = tmp_path / "step00000006.rank0.json.gz"
    overlap = json.loads(run("overlap", trace, "--format", "json").stdout)
    assert [step["step"] for step in overlap["ranks"][0]["steps"]] == [7, 8]
    texts = [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    steps = [text.removeprefix("ddp_prof|") for text in texts if text.removeprefix("ddp_prof|").startswith("step|")]
    assert steps == ["step|index=6|warmup=1", "step|index=7", "step|index=8"]


def test_the_worst_trace_and_the_last_one_stay(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, _) = job
    worst = max(first["records"], key=lambda record: record["worst_ns"])["step"]
    kept = {f"step{step:08d}.rank{rank}.json.gz" for step in {worst, MEASURED[-1]} for rank in (0, 1)}
    assert {path.name for path in folder.iterdir()} == {*kept, "monitor.jsonl"}


def test_a_limit_that_is_not_met_is_an_alert(job: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, _) = job
    assert [one["step"] for one in first["alerts"]] == MEASURED
    assert all("max exposed is not met" in one["failed"][0] for one in first["alerts"])


def test_it_changes_no_weight(job: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = job
    for found, expected in zip(ranks, run_ranks(unmonitored), strict=True):
        assert torch.equal(found["weight"], expected)


def sharded(folder: Path | None, rank: int) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Train with FSDP2; return the records, if there is a monitor, and a shard of the weights."""
    assert rank >= 0
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    records = list[dict[str, Any]]()
    watched = Monitor(EVERY, STEPS, folder=folder, log=records.append) if folder else None
    for _ in range(2 * EVERY):
        train_step(model, optimizer)
        if watched:
            watched.step()
    if watched:
        watched.close()
    return records, next(model.parameters()).to_local().detach().clone()


def test_fsdp2_is_measured_with_the_figures_of_its_trace_and_is_not_changed(tmp_path: Path) -> None:
    """That it is not changed, a nightly finds; the gate finds it of DDP, which is marked by more."""
    (((record,), weight), (_, second)) = run_ranks(partial(sharded, tmp_path))
    traces = sorted(tmp_path.glob("*.json.gz"))
    assert (record["ranks"], record["steps"], record["traces"]) == (2, STEPS, [trace.name for trace in traces])
    (summary,) = json.loads(run("summary", *traces, "--format", "json").stdout)["runs"]
    assert record["comm_ns"] > 0
    for name in ("step_ns", "comm_ns", "exposed_ns", "blocking_ns", "cost", "bounds"):
        assert record[name] == summary[name], name
    if IS_NIGHTLY:
        for found, (_, expected) in zip((weight, second), run_ranks(partial(sharded, None)), strict=True):
            assert torch.equal(found, expected)


# What fails is a warning.


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(monitor_reader, "_warned", set())
    caplog.set_level(logging.WARNING, "ddp_prof.monitor")
    return caplog


def train_alone(watched: Monitor, steps: int = 14) -> None:
    model, optimizer = make_job()
    for _ in range(steps):
        train_step(model, optimizer)
        watched.step()
    watched.close()


def stand_in(folder: Path, script: str) -> str:
    """A Python that analyses nothing."""
    (program := folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -KILL $$", "its analysis was ended by signal 9"),
        ("echo 'too bad' >&2; exit 1", "too bad"),
        ("exit 3", "exit code 3"),
    ],
)
def test_an_analysis_that_ends_early_is_one_warning(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, script))
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "monitor"))
    (warning,) = warned.messages
    assert warning == f"ddp-prof monitor: step 6 is not logged: {reason}{ONCE}", "so is step 12"


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "file" / "monitor"))
    (warning,) = warned.messages
    assert "was not written" in warning


def test_a_log_that_cannot_be_reached_is_one_warning_and_the_others_get_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    record = {"step": 6, "traces": [], "worst_ns": 1, "failed": [], "text": "step 6"}
    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, f"echo '{json.dumps(record)}'; touch \"$5\""))
    monkeypatch.setattr(Path, "read_bytes", lambda _self: b"")

    def unreachable(_record: dict[str, Any]) -> None:
        raise ConnectionError("no route to the tracker")

    got = list[int]()
    logs = [None, unreachable, lambda record: got.append(record["step"])]
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path, log=logs))
    assert got == [6]
    (warning,) = warned.messages
    assert "step 6 was not passed on to log[1]: ConnectionError: no route to the tracker" in warning


def test_a_warning_that_the_program_s_logging_cannot_take_ends_no_training(
    tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("I/O operation on closed file.")

    (tmp_path / "file").touch()
    log, handler = logging.getLogger("ddp_prof.monitor"), Raising()
    log.addHandler(handler)
    try:
        train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "file" / "monitor"))
    finally:
        log.removeHandler(handler)
    assert not warned.messages


def test_the_program_s_own_profiler_has_priority(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    watched = Monitor(EVERY, STEPS, folder=tmp_path / "monitor")
    model, optimizer = make_job()
    with profile(activities=[ProfilerActivity.CPU]) as own:  # when a measurement is due
        for _ in range(EVERY):
            train_step(model, optimizer)
            watched.step()
    for _ in range(EVERY + 1):
        train_step(model, optimizer)
        watched.step()
    with profile(activities=[ProfilerActivity.CPU]) as later:  # while one is recorded
        train_step(model, optimizer)
    watched.close()
    assert all(any("addmm" in event.name for event in recorded.events()) for recorded in (own, later))
    due, recorded_first = (message.partition("step ")[2] for message in warned.messages)
    why = f"is not measured: the program runs its own torch.profiler, which has priority{ONCE}"
    assert (due, recorded_first) == (f"6 {why}", f"12 {why}"), "a measurement is named by its first step"
    assert not (tmp_path / "monitor").exists()


def test_a_program_s_profiler_in_its_warm_up_has_priority(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    watched = Monitor(EVERY, STEPS, folder=tmp_path / "monitor")
    model, optimizer = make_job()
    when = schedule(wait=1, warmup=EVERY, active=4, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=when) as own:  # a measurement is due in its warm-up
        for _ in range(EVERY + 6):
            train_step(model, optimizer)
            watched.step()
            own.step()
    watched.close()
    assert any("addmm" in event.name for event in own.events())
    assert [message.partition("step ")[2][:2] for message in warned.messages] == ["6 "]
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "later"), 10)
    assert (tmp_path / "later" / "monitor.jsonl").exists(), "after it, measurements go on"


def test_ranges_for_another_profiler_have_priority(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    """Older releases of torch raise an exception if both are enabled."""
    watched = Monitor(EVERY, STEPS, folder=tmp_path / "monitor")
    model, optimizer = make_job()
    for _ in range(EVERY + 1):
        train_step(model, optimizer)
        watched.step()
    with torch.autograd.profiler.emit_itt():
        assert watched._profile is None
        train_step(model, optimizer)
    assert ["step 6 is not measured" in message for message in warned.messages] == [True]


@pytest.mark.parametrize("call", ["stop", "export_chrome_trace"])
def test_a_profiler_that_fails_is_one_warning(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    original = getattr(profile, call)

    def fail(recorded: Any, *arguments: Any) -> None:
        if call == "stop":
            original(recorded)
        raise RuntimeError("CUPTI_ERROR_UNKNOWN")

    monkeypatch.setattr(profile, call, fail)
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "monitor"))
    (warning,) = warned.messages
    assert warning.startswith("ddp-prof monitor: step 6 is not measured: ")
    assert warning.endswith(f"CUPTI_ERROR_UNKNOWN{ONCE}")


def test_without_recording_of_all_threads_another_thread_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These releases of torch crash then."""
    monkeypatch.setattr(monitor, "RECORDS_ALL_THREADS", False)
    watched = Monitor(EVERY, STEPS, folder=tmp_path / "monitor")

    def train() -> None:
        for step in range(EVERY + 1):
            watched.at_step(step)

    (thread := threading.Thread(target=train)).start()
    thread.join()
    recording = watched._profile
    assert recording is not None
    stopped = list[bool]()
    with monkeypatch.context() as patched:
        patched.setattr(profile, "stop", lambda _self: stopped.append(True))
        watched.close()
    recording.stop()
    assert not stopped
    watched.at_step(2 * EVERY)
    assert watched._profile is None, "nothing more is measured"


def test_of_failed_analyses_the_last_trace_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, "exit 3"))
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "monitor"), 22)
    assert len(warned.messages) == 1
    assert [path.name for path in (tmp_path / "monitor").iterdir()] == ["step00000018.rank0.json"]


def test_what_a_killed_job_did_not_finish_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, "exit 3"))
    folder = tmp_path / "monitor"
    folder.mkdir()
    old = [".step00000010.rank0.json.77.partial.json", ".step00000010.rank0.json.gz.partial"]
    others = [".step00000010.rank1.json.78.partial.json", "step00000010.rank0.json.gz"]
    for name in (*old, *others, ".step00000020.rank0.json.79.partial.json"):
        (folder / name).touch()
        if "20" not in name:
            os.utime(folder / name, (0, 0))
    train_alone(Monitor(EVERY, STEPS, folder=folder), EVERY + STEPS + 1)
    left = {path.name for path in folder.iterdir()}
    assert left == {*others, ".step00000020.rank0.json.79.partial.json", "step00000006.rank0.json"}


def test_measurements_that_analysis_cannot_keep_up_with_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    """The warning told nobody how much less often: the second analysis does not end here, the first one does."""
    may_go_on, has_ended = threading.Event(), threading.Event()
    read = monitor_reader.Reader._read_or_warn

    def read_first_only(reader: monitor_reader.Reader, *task: Any) -> None:
        if has_ended.is_set():
            may_go_on.wait()
        else:
            read(reader, *task)
            has_ended.set()

    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, "exit 3"))
    monkeypatch.setattr(monitor_reader.Reader, "_read_or_warn", read_first_only)
    watched = Monitor(EVERY, STEPS, folder=tmp_path)
    model, optimizer = make_job()
    for number in range(9 * EVERY):
        train_step(model, optimizer)
        watched.step()
        if number == EVERY + STEPS + 1:
            has_ended.wait()
    may_go_on.set()
    watched.close()
    late = [message for message in warned.messages if "analyses take longer" in message]
    assert len(late) == 1
    assert re.search(r": measure less often \(one took \d+\.\d s, as long as \d+ steps\)", late[0])
    assert len([*tmp_path.glob("*.json")]) <= 4


def test_a_fork_does_nothing(tmp_path: Path) -> None:
    watched = Monitor(EVERY, STEPS, folder=tmp_path / "monitor")
    if not (child := os.fork()):
        for _ in range(20):
            watched.step()
        os._exit(watched._profile is not None)
    assert os.waitpid(child, 0)[1] == 0
    watched.close()


# Its monitors are forgotten before it ends.
IN_A_FUNCTION = """
import sys, torch
from ddp_prof.annotate import Monitor

def main():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitors = [Monitor(6, 2, folder=f"{sys.argv[1]}/{name}", log=[]) for name in ("first", "second")]
    for _ in range(16):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        for monitor in monitors:
            monitor.step()

main()
"""


def test_two_monitors_of_a_function_that_returns(tmp_path: Path) -> None:
    """Two that measured at one step ended the program by a segmentation fault; what was not logged yet was lost."""
    done = run_python(IN_A_FUNCTION, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in load_log(tmp_path / "first" / "monitor.jsonl").records] == [6, 12]
    assert not (tmp_path / "second").exists()
    assert f"step 6 is not measured: another monitor of this process measures at this step{ONCE}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"every": 3, "steps": 2}, "every >= steps"),
        ({"every": 10, "steps": 0}, "at least 1 step"),
        ({"keep": "some"}, "keep='some'"),
        ({"limits": {"max_exposed": 3}}, "there is no max_exposed"),
    ],
)
def test_wrong_arguments_are_told_at_once(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Monitor(**arguments)


def test_what_is_no_log_is_told_at_once() -> None:
    with pytest.raises(TypeError, match="give a callable, or a logger"):
        Monitor(log=[3])


# Where a record goes.

RECORD = {
    "step": 1000,
    **{f"{name}_ns": None for name in log_targets.TIMES},
    "step_ns": 50_000_000,
    "exposed_ns": 10_000_000,
    "overlap_ratio": 0.5,
    "late": {"rank": 3, "lag_ns": 6_000_000},
    "text": "step 1000; 50.0 ms a step",
}
SCALARS = {
    "ddp_prof/step_ms": 50.0,
    "ddp_prof/exposed_ms": 10.0,
    "ddp_prof/overlap": 0.5,
    "ddp_prof/late_rank": 3,
    "ddp_prof/lag_ms": 6.0,
}


def test_what_is_not_known_is_not_logged() -> None:
    assert dict(log_targets.scalars(RECORD)) == SCALARS


def test_mlflow_logs_to_the_run_of_the_thread_that_trains() -> None:
    """Its active runs are by thread; in a thread without one it begins another run."""
    got = list[tuple[str | None, int]]()
    runs = threading.local()

    def active_run() -> Any:
        return getattr(runs, "active", None)

    def log_metrics(metrics: dict[str, float], step: int | None = None, run_id: str | None = None) -> None:
        assert metrics == SCALARS
        got.append((run_id, step or 0))

    target = log_targets.as_target(SimpleNamespace(active_run=active_run, log_metrics=log_metrics))
    assert isinstance(target, log_targets.MlflowTarget)
    with pytest.raises(RuntimeError, match="no run of MLflow"):
        target(RECORD)
    runs.active = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    target.find_run()
    (thread := threading.Thread(target=target, args=(RECORD,))).start()
    thread.join()
    assert got == [("abc", 1000)]


def test_each_kind_of_logger_gets_its_own(caplog: pytest.LogCaptureFixture) -> None:
    got: dict[str, Any] = {}
    scalars = got.setdefault("tensorboard", {})
    tensorboard = SimpleNamespace(add_scalar=lambda name, value, step: scalars.update({(name, step): value}))
    mlflow = SimpleNamespace(log_metrics=lambda metrics, step: got.update(mlflow=(metrics, step)))
    wandb = SimpleNamespace(log=lambda metrics, step=None, commit=None: got.update(wandb=(metrics, step, commit)))
    caplog.set_level(logging.INFO)
    for log in (tensorboard, mlflow, wandb, logging.getLogger("job")):
        log_targets.as_target(log)(RECORD)
    assert got["tensorboard"] == {(name, 1000): value for name, value in SCALARS.items()}
    assert got["mlflow"] == (SCALARS, 1000)
    assert got["wandb"] == ({**SCALARS, "ddp_prof/step": 1000}, None, False)
    assert caplog.messages == ["ddp-prof monitor: step 1000; 50.0 ms a step"]


# The store.


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_a_look_into_the_store_neither_waits_nor_sets(kind: str, tmp_path: Path) -> None:
    store: Any = {
        "file": lambda: stores.FileStore(str(tmp_path / "store"), 1),
        "hash": stores.HashStore,
        "tcp": lambda: stores.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5)),
    }[kind]()
    store = stores.PrefixStore("default_pg", store)
    assert monitor_reader._peek(store, "part") is None
    assert monitor_reader._peek(store, "part") is None
    assert not store.check(["part"])
    store.set("part", b'{"rank": 1}\n\x00\xff')
    assert monitor_reader._peek(store, "part") == b'{"rank": 1}\n\x00\xff'


def references_to_store(folder: Path, rank: int) -> tuple[int, int]:
    """How many there are before a monitor measures, and after."""
    store = dist.distributed_c10d._get_default_store()
    model, optimizer = make_job()
    watched = Monitor(EVERY, STEPS, folder=folder, log=[])
    before = sys.getrefcount(store)
    for _ in range(EVERY + STEPS + 1):
        train_step(model, optimizer)
        watched.step()
    watched.close()
    assert rank or (folder / "monitor.jsonl").exists()
    return before, sys.getrefcount(store)


def test_the_store_is_not_kept_beyond_a_measurement(tmp_path: Path) -> None:
    """It would outlive its process group, and a group that follows would find the addresses of that one in it."""
    for before, after in run_ranks(partial(references_to_store, tmp_path)):
        assert after == before


def pauses_before_freed(folder: Path, rank: int) -> list[list[float]]:
    """How long the thread that frees a DDP leaves Python's lock to others before that.

    Without a monitor; with one; then of a DDP that is made after the first measurement.
    """
    pauses: list[float] = []
    pause, here = time.sleep, threading.get_ident()

    def noted(seconds: float) -> None:
        if threading.get_ident() == here:
            pauses.append(seconds)
        pause(seconds)

    time.sleep = noted

    def train(*, is_watched: bool) -> list[float]:
        model, optimizer = make_job()
        watched = Monitor(EVERY, STEPS, folder=folder, log=[]) if is_watched else None
        for _ in range(EVERY + STEPS + 1):
            train_step(model, optimizer)
            if watched:
                watched.step()
        if watched:
            watched.close()
        pauses.clear()
        freed = weakref.ref(model)
        del model
        assert freed() is None
        return [*pauses]

    return [train(is_watched=is_watched) for is_watched in (False, True, False)]


def test_gloo_ends_its_work_before_a_ddp_is_freed(tmp_path: Path) -> None:
    """Else a program whose training ends with its last step hangs at times, in torch: 5 of 10 did with a monitor.

    So did 3 of 6 whose DDP was made after the first measurement.
    """
    for pauses in run_ranks(partial(pauses_before_freed, tmp_path)):
        assert pauses == [[], [monitor_reader.TO_END_S], [monitor_reader.TO_END_S]]


def test_what_rank_0_does_not_fetch_does_not_fill_the_store() -> None:
    reader, store = monitor_reader.Reader(Path(), None, "none", None, None), stores.HashStore()
    keys = [f"step{step}" for step in range(20)]
    for key in keys:
        reader._send(monitor_reader.Group(1, 2, store), key, b"part")
    assert [key for key in keys if store.check([key])] == keys[-4:]


# A rank that has no result.


def with_a_rank_that_fails(folder: Path, what: str, rank: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Train without collectives; rank 1 does not have its first measurement, for the reason ``what``."""
    monitor_reader.GATHER_S = monitor_reader.PATIENCE_S = 1e6  # who waits for rank 1 does not end
    warnings, records = list[str](), list[dict[str, Any]]()
    monitor_reader._LOG.addHandler(handler := logging.Handler())
    handler.emit = lambda entry: warnings.append(entry.getMessage())  # type: ignore[method-assign, assignment]
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Monitor(EVERY, STEPS, folder=folder, log=[None, records.append])
    if rank and what == "export":
        original, calls = profile.export_chrome_trace, list[str]()

        def export_once(recorded: Any, path: str) -> Any:
            calls.append(path)
            if len(calls) == 1:
                raise OSError("no space left on device")
            return original(recorded, path)

        profile.export_chrome_trace = export_once  # type: ignore[method-assign, assignment]
    steps = 2 * EVERY + STEPS + 1
    for step in range(1, steps + 1):
        own = profile(activities=[ProfilerActivity.CPU]) if what == "own profiler" and rank and step == EVERY else None
        if own:
            own.start()
        train_step(model, optimizer)
        watched.step()
        if own:
            own.stop()
        if rank and what == "end" and step == EVERY + 1:
            break
    watched.close()
    return records, warnings


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("export", "no space left on device"),
        pytest.param("own profiler", "the program runs its own torch.profiler", marks=pytest.mark.nightly),
        ("end", "the job ended"),
    ],
)
def test_rank_0_knows_at_once_that_a_rank_has_no_result(what: str, said: str, tmp_path: Path) -> None:
    (records, _), (_, warnings) = run_ranks(partial(with_a_rank_that_fails, tmp_path, what))
    first, second = records
    assert (first["step"], first["missing_ranks"], first["ranks"]) == (EVERY, [1], 1)
    assert "without rank 1" in first["text"]
    assert said in first["text"]
    assert second["missing_ranks"] == ([1] if what == "end" else [])
    assert len(warnings) == (what != "end")


def without_rank_1(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Rank 1 dies while it is measured; rank 0 goes on."""
    monitor_reader.GATHER_S, monitor_reader.AFTER_SILENCE_S, monitor_reader._MOST_WAITING = 0.5, 0.0, 100
    records = list[dict[str, Any]]()
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Monitor(EVERY, STEPS, folder=folder, log=records.append)
    for step in range(2 * EVERY + STEPS + 1):
        train_step(model, optimizer)
        watched.step()
        if rank and step == EVERY:
            os._exit(0)
    watched.close()
    return records


def test_a_dead_rank_is_named_and_is_awaited_once(tmp_path: Path) -> None:
    records, _ = run_ranks(partial(without_rank_1, tmp_path))
    assert [record["missing_ranks"] for record in records] == [[1], [1]]
    assert "without rank 1; nothing arrived from rank 1" in records[0]["text"]


# Restarts.


def test_keep_holds_over_restarts_and_deletes_only_what_is_a_monitor_s(tmp_path: Path) -> None:
    others = ["step00000099.rank0.json.gz", "step00000098.rank0.json", "step00000006.rank0.json.gz.mine", "notes.txt"]
    for name in others:
        (tmp_path / name).write_text("mine")
    for start in (0, 100):
        train_alone(Monitor(EVERY, STEPS, folder=tmp_path, start=start, log=[]))
    records = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert len({record["started"] for record in records}) == 2
    worst = max(records, key=lambda record: record["worst_ns"] or 0)
    kept = {f"step{step:08d}.rank0.json.gz" for step in {worst["step"], records[-1]["step"]}}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *others, "monitor.jsonl"}


def test_traces_of_failed_analyses_do_not_pile_up_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, "exit 3"))
    for start in (0, 100):
        train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "monitor", start=start))
    assert [path.name for path in (tmp_path / "monitor").iterdir()] == ["step00000106.rank0.json"]
    assert len(warned.messages) == 1


def test_a_line_that_was_cut_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    (log := tmp_path / "monitor.jsonl").write_text('{"schema": 1, "st')
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path, log=[]), EVERY + STEPS + 1)
    assert [record["step"] for record in load_log(log).records] == [EVERY]


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    folder, seen = tmp_path / "monitor", threading.Event()

    def remove(_record: dict[str, Any]) -> None:
        if not seen.is_set():
            shutil.rmtree(folder)
            seen.set()

    watched = Monitor(EVERY, STEPS, folder=folder, log=remove)
    model, optimizer = make_job()
    for step in range(2 * EVERY + STEPS + 1):
        train_step(model, optimizer)
        watched.step()
        if step == EVERY + STEPS:
            seen.wait()
    watched.close()
    assert [record["step"] for record in load_log(folder / "monitor.jsonl").records] == [2 * EVERY]
    assert warned.messages == []


def test_two_jobs_in_one_folder_are_told_and_leave_each_other_s_traces(
    tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path, log=[]), EVERY + STEPS + 1)
    code = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", code, str(tmp_path / "monitor.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        train_alone(Monitor(EVERY, STEPS, folder=tmp_path, start=100, log=[]), 13)
        other.communicate(b"\n")
    assert (tmp_path / "step00000006.rank0.json.gz").exists()
    (warning,) = warned.messages
    assert "another job writes to" in warning


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_trace_of_another_job_in_the_folder_is_not_taken_for_its_own(
    is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    """Its figures were logged as this job's, and of a trace that is gone a path was to be checked."""
    run_analysis = monitor_reader.Analysis.run

    def run_late(analysis: Any, scratch: Path, *arguments: str) -> tuple[str, str | None]:
        """Meanwhile another job measures the same step, or deletes its traces."""
        if arguments[0] == "measure":
            trace = Path(arguments[1])
            whole, own = trace.read_bytes(), f"/.{trace.name}.{os.getpid()}.partial".encode()
            assert whole.count(own) == 1
            trace.unlink()
            if not is_gone:
                trace.write_bytes(whole.replace(own, f"/.{trace.name}.{os.getpid() + 1}.partial".encode()))
        return run_analysis(analysis, scratch, *arguments)

    monkeypatch.setattr(monitor_reader.Analysis, "run", run_late)
    monkeypatch.delenv(PYTHON_VARIABLE)  # a real process tells its reason
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path, log=[]), EVERY + STEPS + 1)
    assert not (tmp_path / "monitor.jsonl").exists()
    (warning,) = warned.messages
    assert f"was {'removed' if is_gone else 'replaced'} before it was read: if another job writes to" in warning
    assert (tmp_path / "step00000006.rank0.json").exists() != is_gone, "what is the other job's stays"


def test_a_log_that_hangs_holds_up_neither_the_other_logs_nor_the_measurements(tmp_path: Path) -> None:
    hangs, got = threading.Event(), threading.Event()
    steps = list[int]()

    def count(record: dict[str, Any]) -> None:
        steps.append(record["step"])
        if len(steps) == 2:
            got.set()

    watched = Monitor(EVERY, STEPS, folder=tmp_path, log=(lambda _record: hangs.wait(), count))
    model, optimizer = make_job()
    for _ in range(2 * EVERY + STEPS + 1):
        train_step(model, optimizer)
        watched.step()
    got.wait()
    hangs.set()
    watched.close()
    assert [record["step"] for record in load_log(tmp_path / "monitor.jsonl").records] == [EVERY, 2 * EVERY] == steps


@pytest.mark.parametrize("work", ["measure", "merge"])
def test_an_analysis_that_is_stopped_is_ended_with_the_job(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    """That of merging was said to have been ended by signal 9, which the program itself had sent."""
    monkeypatch.setattr(monitor_reader, "PATIENCE_S", 0.5)
    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, f'[ "$3" != {work} ] || kill -STOP $$; exit 1'))
    watched = Monitor(EVERY, STEPS, folder=tmp_path / "monitor")
    model, optimizer = make_job()
    for _ in range(EVERY + STEPS + 1):
        train_step(model, optimizer)
        watched.step()
    thread = watched._reader._thread
    assert thread
    watched.close()
    thread.join()
    assert warned.messages == [f"ddp-prof monitor: step 6 is not logged: the job ended before its analysis did{ONCE}"]


def test_a_rank_without_a_process_group_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    """A rank that only its launcher names: it was told that there is no group *any more*, as if there had been one."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(PYTHON_VARIABLE, stand_in(tmp_path, 'touch "$5"'))
    train_alone(Monitor(EVERY, STEPS, folder=tmp_path / "monitor"))
    (warning,) = warned.messages
    assert "step 6 is not logged: RuntimeError: there is no torch process group, over whose store" in warning
    assert "measure after init_process_group() and before destroy_process_group()" in warning


# A program's own profiler, and callbacks of trainers.


def own_profiler(folder: Path, rank: int) -> list[dict[str, Any]]:
    records = list[dict[str, Any]]()
    model, optimizer = make_job()
    ready = log_overlap(folder=folder, log=records.append, keep="all")
    when = schedule(wait=1, warmup=1, active=3)
    with profile(activities=[ProfilerActivity.CPU], schedule=when, on_trace_ready=ready) as own:
        for _ in range(6):
            train_step(model, optimizer)
            own.step()
    ready.close()
    return records if rank == 0 else []


def test_a_program_s_own_profiler_logs_the_same(tmp_path: Path) -> None:
    ((record,), _) = run_ranks(partial(own_profiler, tmp_path))
    assert (record["ranks"], record["steps"], record["step"]) == (2, 3, 5)
    (summary,) = json.loads(run("summary", *sorted(tmp_path.glob("*.gz")), "--format", "json").stdout)["runs"]
    assert (record["step_ns"], record["exposed_ns"]) == (summary["step_ns"], summary["exposed_ns"])


@pytest.mark.parametrize("trainer", ["lightning.pytorch", "transformers"])
def test_a_callback_measures_steps_of_the_optimizer(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.annotate.test_callbacks import stand_in as stand_in_package

    stand_in_package(monkeypatch, trainer, "Callback" if "lightning" in trainer else "TrainerCallback")
    due = list[int]()
    monkeypatch.setattr(Monitor, "at_step", lambda _self, step: due.append(step))
    model, optimizer = make_job()
    recorder = annotate.Recorder()
    with annotate.only_sink(recorder):
        if "lightning" in trainer:
            callback = annotate.lightning_callback(every=EVERY, folder=tmp_path)
            callback.on_train_start(SimpleNamespace(model=model, optimizers=[optimizer]), model)
        else:
            callback = annotate.trainer_callback(every=EVERY, folder=tmp_path)
            callback.on_train_begin()
        for _ in range(4):
            train_step(model, optimizer)
        callback.on_train_end()
        train_step(model, optimizer)
    assert due == [0, 1, 2, 3, 4]
    assert recorder.ranges == []


@pytest.mark.parametrize(("restored", "asked", "expected"), [(500, {}, 500), (500, {"start": 7}, 7), (0, {}, 0)])
@pytest.mark.parametrize("trainer", ["lightning.pytorch", "transformers"])
def test_a_callback_continues_the_numbers_of_a_checkpoint(
    trainer: str,
    restored: int,
    asked: dict[str, int],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.annotate.test_callbacks import stand_in as stand_in_package

    stand_in_package(monkeypatch, trainer, "Callback" if "lightning" in trainer else "TrainerCallback")
    due = list[int]()
    monkeypatch.setattr(Monitor, "at_step", lambda _self, step: due.append(step))
    model, optimizer = make_job()
    if "lightning" in trainer:
        callback = annotate.lightning_callback(every=EVERY, folder=tmp_path, **asked)
        of_trainer = SimpleNamespace(model=model, optimizers=[optimizer], global_step=restored)
        callback.on_train_start(of_trainer, model)
    else:
        callback = annotate.trainer_callback(every=EVERY, folder=tmp_path, **asked)
        callback.on_train_begin(None, SimpleNamespace(global_step=restored), None)
    train_step(model, optimizer)
    callback.on_train_end()
    assert due == [expected, expected + 1]


ENDS_WHILE_IT_GATHERS = """
import threading
from pathlib import Path
import torch.distributed as dist
from ddp_prof.annotate import monitor_reader
store = dist.TCPStore("127.0.0.1", 0, 1, True)
monitor_reader.find_group = lambda: monitor_reader.Group(0, 2, store)  # rank 1 sends nothing
monitor_reader.PATIENCE_S, monitor_reader._POLL_S = 0.5, 0.0  # so it asks the store all the time
readers = [monitor_reader.Reader(Path("."), None, "none", None, None) for _ in range(4)]
for reader in readers:
    reader.fail(6, "not measured")
for reader in readers:
    reader.close()
print([each.name for each in threading.enumerate() if each.name == "ddp_prof.monitor"])
"""


def test_a_program_that_ends_while_rank_0_waits_for_another_rank_keeps_its_exit_code() -> None:
    """A thread that was in a call of the store when Python ended made torch abort the program."""
    done = run_python(ENDS_WHILE_IT_GATHERS, to_the_end=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")
