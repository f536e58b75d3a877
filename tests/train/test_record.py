"""What is recorded of a run: its commit, each rank's file of a profiler, all-reduces counted and timed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shutil import which

import pytest
import torch
import torch.distributed as dist

from ddp_prof import annotate
from ddp_prof.annotate import Recorded, Recorder
from ddp_prof.manifest import MessageTimes
from ddp_prof.train import record
from ddp_prof.train.record import GlooBarrier, MessageLog, rank_path
from tests.ddp.gloo_ranks import run_ranks


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *settings, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(which("git") is None, reason="no git")
def test_the_commit_is_of_the_checkout_that_holds_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "site-packages" / "record.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(record, "__file__", str(file))
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "somebody else's")
    assert record.git_commit() is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "with the package")
    assert record.git_commit() == git(tmp_path, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a/naive.json.gz", "a/naive.rank1.json.gz"), ("b_2.5mb.json", "b_2.5mb.rank1.json")],
)
def test_each_rank_has_a_file(path: str, expected: str) -> None:
    assert rank_path(Path(path), 1) == Path(expected)


def wait_for_a_rank_that_does_not_come(rank: int) -> str:
    meet = GlooBarrier(torch.device("cpu"), timeout_s=2.0)
    error = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            meet()
        error = str(caught.value)
    dist.barrier()  # the other rank waits here, and stays until the first one has given up
    return error


def test_ranks_wait_for_each_other_no_longer_than_the_user_said() -> None:
    """Groups that are made with no word on it wait for half an hour."""
    assert "Timed out waiting 2000ms" in run_ranks(wait_for_a_rank_that_does_not_come)[0]


def test_only_all_reduces_are_noted_and_nobody_else_hears_of_them() -> None:
    log, profiler = MessageLog(lambda: None), Recorder()
    with annotate.only_sink(profiler):
        with annotate.only_sink(log), annotate.step(0), annotate.forward():
            span = annotate.start_all_reduce(0, 4096, 1)
            annotate.start_synchronize().end()
            span.end()
            span.end()
        with annotate.backward():
            pass
    assert [row.bytes for row in log.summarize()] == [4096]
    assert [range_.text for range_ in profiler.ranges] == ["backward"]


def test_ranges_that_are_off_are_off_again_afterwards() -> None:
    log = MessageLog(lambda: None)
    annotate.enable(False)
    try:
        with annotate.only_sink(log):
            annotate.start_all_reduce(0, 1, 1).end()
        assert not annotate.is_enabled()
    finally:
        annotate.enable()
    assert [row.calls for row in log.summarize()] == [1]


def test_what_the_device_did_before_is_not_part_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_ns = [50, 10]  # for what was computed before, for the message
    now_ns = 0

    def wait_for_device() -> None:
        nonlocal now_ns
        now_ns += waits_ns.pop(0)

    monkeypatch.setattr("ddp_prof.annotate.ranges.time.perf_counter_ns", lambda: now_ns)
    log = MessageLog(wait_for_device)
    token = log.start("all_reduce|bucket=0|bytes=8|params=1")
    log.end(token)
    assert log.summarize() == (MessageTimes(8, 1, 10, 10),)


def test_a_row_a_size() -> None:
    log = MessageLog(lambda: None)
    assert log.summarize() == ()
    log.ranges = [
        Recorded(f"all_reduce|bucket=0|bytes={size}|params=1", 7, 7 + duration_ns, 1, True)
        for size, duration_ns in ((8, 30), (8, 10), (4, 5), (8, 20))
    ]
    assert log.summarize() == (MessageTimes(4, 1, 5, 5), MessageTimes(8, 3, 20, 10))
