"""The workload from its command line to its files, on real ranks."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_prof.ddp import ShardedDDP
from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.manifest import Manifest, label_of, load_manifest
from ddp_prof.range_names import parse_range
from ddp_prof.train import __main__
from ddp_prof.train import run as train_run
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.launch import launch
from ddp_prof.train.workload import Trainer
from tests.ddp.gloo_ranks import fork_ranks
from tests.forked_python import run_python
from tests.kineto_events import ranges_in
from tests.test_manifest import MANIFEST
from tests.train.forked import train
from tests.waiting import is_running, wait_until

STEPS, WARMUP, SYNCHRONIZED = 3, 1, 4
SMALL = ["--model-size", "tiny", "--seq-len", "16", "--steps", str(STEPS), "--warmup", str(WARMUP), "--batch-size", "4"]
TRAIN = ["-m", "ddp_prof.train"]


class Finished(NamedTuple):
    """A run that went well."""

    output: str
    manifest: Manifest
    kineto: list[dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("run")
    more = [
        "--run-json",
        folder / "b.run.json",
        "--kineto",
        folder / "b.json.gz",
        "--key",
        "c0ffee",
        "--profiler",
        "p 1",
        "--synchronized-steps",
        str(SYNCHRONIZED),
    ]
    said = train("--variant", "bucketed", "--bucket-size-mb", "1", *SMALL, *more)
    manifest = load_manifest(folder / "b.run.json")
    assert manifest is not None
    assert sorted(path.name for path in folder.iterdir()) == ["b.rank0.json.gz", "b.rank1.json.gz", "b.run.json"]
    kineto = [json.loads(gzip.decompress((folder / f"b.rank{rank}.json.gz").read_bytes())) for rank in (0, 1)]
    return Finished(said, manifest, kineto)


def test_the_manifest_says_what_ran(finished: Finished) -> None:
    manifest = finished.manifest
    assert (manifest.variant, manifest.bucket_size_mb, manifest.world_size) == ("bucketed", 1.0, 2)
    assert (manifest.backend, manifest.device, manifest.model_size) == ("gloo", "cpu", "tiny")
    assert (manifest.key, manifest.profiler) == ("c0ffee", "p 1")
    assert manifest.command[:5] == ("python", "-m", "ddp_prof.train", "--variant", "bucketed")
    assert len(manifest.step_seconds) == len(manifest.communication_seconds) == manifest.steps == STEPS
    assert all(
        0 < wait < step for wait, step in zip(manifest.communication_seconds, manifest.step_seconds, strict=True)
    )
    assert 9 < manifest.final_loss < 9.5  # random tokens: ln 10,000 is 9.21
    assert {"python", "torch", "nvtx", "ddp_prof"} <= manifest.versions.keys()
    assert manifest.machine["cores"]


def test_the_manifest_lists_parameters_and_buckets(finished: Finished) -> None:
    parameters, buckets = finished.manifest.parameters, finished.manifest.options["buckets"]
    assert [parameters[0].name, parameters[-1].name] == ["embedding.weight", "head.weight"]
    assert sorted(item for bucket in buckets for item in bucket) == list(range(len(parameters)))
    assert buckets[0] == [len(parameters) - 1]  # the head alone is larger than 1 MB
    assert all(parameter.dtype == "float32" and parameter.requires_grad for parameter in parameters)


def test_host_times_are_of_measured_and_of_synchronized_steps(finished: Finished) -> None:
    manifest = finished.manifest
    kinds = [(host_time.is_synchronized, host_time.step) for host_time in manifest.host_times]
    assert kinds == [*((False, step) for step in range(STEPS)), *((True, step) for step in range(SYNCHRONIZED))]
    unsynchronized = manifest.host_times[:STEPS]
    assert [item.step_ns / 1e9 for item in unsynchronized] == pytest.approx(manifest.step_seconds)
    assert [item.communication_ns / 1e9 for item in unsynchronized] == pytest.approx(manifest.communication_seconds)
    for entry in manifest.host_times:
        phases = (entry.forward_ns, entry.backward_ns, entry.communication_ns, entry.optimizer_ns)
        assert all(phase > 0 for phase in phases)
        assert sum(phases) <= entry.step_ns


def test_messages_are_counted_but_timed_only_where_each_is_waited_for(finished: Finished) -> None:
    manifest = finished.manifest
    assert manifest.collectives == len(manifest.options["buckets"])
    assert manifest.communicated_bytes == 4 * sum(parameter.numel for parameter in manifest.parameters)
    assert manifest.messages == ()
    assert manifest.peak_memory_bytes is not None
    assert manifest.peak_memory_bytes > 100 * 2**20


def test_the_output_is_a_few_lines(finished: Finished) -> None:
    lines = [line for line in finished.output.splitlines() if not line.startswith("USDT")]
    assert len(lines) <= 7
    assert lines[-2].startswith("bucketed: step ")
    assert lines[-1].startswith("bucketed: rank 0 keeps between steps: parameters 2.5 MiB")


@pytest.mark.parametrize("rank", [0, 1])
def test_kineto_holds_our_ranges_and_no_warmup(finished: Finished, rank: int) -> None:
    events = ranges_in(finished.kineto[rank]["traceEvents"])
    ranges = [parse_range(event["name"]) for event in events]
    (process,) = (range_ for range_ in ranges if range_.name == "process")
    assert process.fields == {"rank": rank, "world": 2, "variant": "bucketed", "backend": "gloo", "device": "cpu"}
    assert sorted(range_.fields["index"] for range_ in ranges if range_.name == "step") == list(range(STEPS))
    assert not any("warmup" in range_.fields for range_ in ranges)
    for phase in ("forward", "backward", "synchronize", "optimizer"):
        assert sum(range_.name == phase for range_ in ranges) == STEPS
    buckets = finished.manifest.options["buckets"]
    assert sum(range_.name == "all_reduce" for range_ in ranges) == STEPS * len(buckets)


def _order(rank: int, world: int, directory: str) -> list[str]:
    """What happens in a run of ``sharded`` that is recorded: its steps, waits for parameters, the recording's end."""
    order: list[str] = []
    wait, step = ShardedDDP.wait_for_parameters, Trainer.train_step

    @contextmanager
    def recording() -> Iterator[None]:
        yield
        order.append("recorded")

    def waited(variant: ShardedDDP) -> None:
        order.append("waited")
        wait(variant)

    def stepped(trainer: Trainer, *batch: Any, **options: Any) -> Any:
        result = step(trainer, *batch, **options)
        order.append("stepped")
        return result

    ShardedDDP.wait_for_parameters, Trainer.train_step = waited, stepped  # type: ignore[method-assign]
    train_run.choose_recording = lambda *_: recording()
    sys.argv = ["ddp_prof.train", "--variant", "sharded", *SMALL]
    assert __main__.main() == 0
    return order


def test_the_recording_ends_after_the_parameters_were_waited_for() -> None:
    """torch.profiler was stopped while gloo gathered them, and crashed the rank more often than not."""
    (order,) = fork_ranks(_order, 1)
    assert order[order.index("recorded") - 2 :][:3] == ["stepped", "waited", "recorded"]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_recording_ends_after_the_last_gather_of_sharded(tmp_path: Path) -> None:
    mini = [*SMALL, "--model-size", "mini", "--steps", "2"]  # the gathers of tiny may have ended by then
    train("--variant", "sharded", *mini, "--kineto", tmp_path / "s.json.gz")
    for rank in (0, 1):
        events = json.loads(gzip.decompress((tmp_path / f"s.rank{rank}.json.gz").read_bytes()))["traceEvents"]
        launched, done = (sum(e["name"] == name for e in events) for name in ("c10d::broadcast_", "gloo:broadcast"))
        assert launched == done > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_kineto_ranges_are_on_the_profilers_clock(finished: Finished, rank: int) -> None:
    """Each of gloo's own events begins within one of our ranges. (A busy machine may delay the record of its end.)"""
    events = ranges_in(finished.kineto[rank]["traceEvents"])
    ours = [event for event in events if event["name"].startswith("all_reduce|")]
    gloos = [event for event in events if event["name"] == "gloo:all_reduce"]
    assert len(gloos) == len(ours)
    begins_within = [any(_begins_within(gloo, our) for our in ours) for gloo in gloos]
    assert all(begins_within)


def _begins_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    slack_us = 100
    return bool(outer["ts"] - slack_us <= inner["ts"] <= outer["ts"] + outer["dur"] + slack_us)


@pytest.mark.parametrize(
    ("options", "label", "accounted"),
    [
        pytest.param(
            [],
            "torch 1 MB",
            "gradients {all} MiB, sent by a ring all-reduce {sent} MiB",
            marks=pytest.mark.nightly,
        ),
        (
            ["--comm-hook", "bf16"],
            "torch 1 MB + bf16",
            "gradients {all} MiB, as bf16 {sent} MiB, sent by a ring all-reduce {sent} MiB",
        ),
        (
            ["--comm-hook", "powersgd", "--warmup", "1"],
            "torch 1 MB + powersgd",
            "as powersgd {sent} MiB, sent by a ring all-reduce {sent} MiB",
        ),
    ],
)
def test_hooks_of_torch_from_the_command_line_to_the_label(
    tmp_path: Path, options: list[str], label: str, accounted: str
) -> None:
    """Two ranks send what the accounting says, as the ranges tell."""
    more = ["--accounting", "--synchronized-steps", "1", "--run-json", tmp_path / "run.json"]
    said = train("--variant", "torch", "--bucket-size-mb", "1", *SMALL, *options, *more)
    manifest = load_manifest(tmp_path / "run.json")
    assert manifest is not None
    assert label_of(tmp_path / "run.json", manifest) == label
    assert manifest.communicated_bytes is not None
    in_mb = {"all": 4 * sum(parameter.numel for parameter in manifest.parameters), "sent": manifest.communicated_bytes}
    assert accounted.format(**{name: f"{size / 2**20:.1f}" for name, size in in_mb.items()}) in said


@pytest.mark.nightly
def test_torchrun_starts_it_too(tmp_path: Path) -> None:
    arguments = ["--variant", "torch", *SMALL, "--run-json", str(tmp_path / "run.json")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([sys.executable, *torchrun, *TRAIN, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(tmp_path / "run.json")
    assert manifest is not None
    assert manifest.world_size == 2
    assert all(communication_second > 0 for communication_second in manifest.communication_seconds)


def test_alone_it_is_a_world_of_one(tmp_path: Path) -> None:
    train("--variant", "overlap", *SMALL, "--run-json", tmp_path / "run.json", world=1)
    manifest = load_manifest(tmp_path / "run.json")
    assert manifest is not None
    assert manifest.world_size == 1


# More than can be addressed: the allocation itself fails, whatever the machine.
ENDLESS = ["--batch-size", "400000000000", "--seq-len", "4096", "--steps", "1"]


@pytest.mark.parametrize(
    ("more", "exit_code", "reason"),
    [
        (ENDLESS, OutOfMemoryError.exit_code, r".*out of memory with --model-size tiny.*"),
        (["--batch-size", "3"], 1, r"a batch of 3 cannot be split evenly over 2 ranks: use --batch-size 4"),
        (["--kineto", "{folder}/x.json.gz"], 1, r"cannot write .*/x\.rank1\.json\.gz: Is a directory"),
    ],
    ids=["out of memory", "another reason", "no place for the trace"],
)
def test_failure_is_one_line_and_leaves_no_manifest(
    more: list[str],
    exit_code: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With ranks that are forked, which need not import torch."""
    manifest = tmp_path / "run.json"
    manifest.write_text("of an earlier run")
    (tmp_path / "x.rank1.json.gz").mkdir()
    more = [word.format(folder=tmp_path) for word in more]
    argv = ["--variant", "flat", "--world-size", "2", *SMALL, *more, "--run-json", str(manifest)]
    monkeypatch.setattr(__main__, "launch", partial(launch, forked=True))
    monkeypatch.setattr(sys, "argv", ["ddp_prof.train", *argv])
    assert __main__.main() == exit_code
    said, told = capfd.readouterr()
    told = "".join(line for line in told.splitlines(keepends=True) if not line.startswith("USDT:"))  # of libkineto
    assert re.fullmatch(rf"ddp_prof\.train: error: {reason}\n", told), told
    assert "final loss" not in said
    assert not manifest.exists()


def test_a_run_json_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = parse_arguments(["--variant", "flat", "--run-json", str(tmp_path / "file" / "run.json")])
    with pytest.raises(WorkloadError, match=r"^cannot write .*/run\.json: (File exists|Not a directory)$"):
        train_run._report(arguments, MANIFEST)


INTERRUPTED = """
import signal, sys
from ddp_prof.train import __main__
__main__.launch = lambda *_arguments, **_options: signal.raise_signal(signal.SIGINT)
sys.exit(__main__.main())
"""


def test_ctrl_c_is_told_by_the_exit_code_alone(tmp_path: Path) -> None:
    """How ranks end then, test_launch.py shows."""
    (manifest := tmp_path / "run.json").write_text("of an earlier run")
    argv = ["--variant", "overlap", "--world-size", "2", *SMALL, "--run-json", str(manifest)]
    done = run_python(INTERRUPTED, *argv)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not manifest.exists()


@pytest.mark.nightly
def test_ctrl_c_leaves_no_rank_and_no_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "run.json"
    argv = ["--variant", "overlap", "--world-size", "2", *SMALL, "--steps", "100000", "--run-json", str(manifest)]
    process = subprocess.Popen(
        [sys.executable, *TRAIN, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("warm-up step")
        ranks = [int(part) for part in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, "")
    assert len(ranks) == 2
    wait_until(lambda: not any(map(is_running, ranks)))
    assert not manifest.exists()
